"""Tokenizers, from text to token ids and back.

    char      one id for each character of the text, as in nanoGPT
    byte      the bytes of UTF-8, and end-of-text
    gpt2      GPT-2's, by tiktoken
    bpe:N     byte-level BPE of N ids, trained on the text and kept as a tokenizer.json
    hf:DIR    the tokenizer.json of a model of Hugging Face, which as that of bpe the library `tokenizers` reads

    tok = build("bpe:4096", lambda: texts)     # in a preparation; char and bpe are built from the texts
    tok.save(folder)
    tok = from_spec(tok.spec, folder)          # everywhere else
    ids = tok.encode("def main(")              # (N,) int64
    tok.decode(ids)                            # "def main("

`spec`, a JSON object, describes a tokenizer in a data set's meta.json and in every checkpoint; a tokenizer.json is
stored beside the shards and in a run's out_dir.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np

from data import files
from data.base_tokenizer import END_OF_TEXT, LETTERS, ByteTokenizer, CharTokenizer, GPT2Tokenizer, Tokenizer, encodable
from data.errors import require

CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
KEPT = {"eos_token_id": (list,), "chat_template": (str, list), "model_max_length": (int,)}  # for an export of a run
LARGEST_ID = 2**24


class HFTokenizer(Tokenizer):
    """A tokenizer.json whose tokens have bytes: byte-level BPE (GPT-2, Llama 3, Qwen, bpe:N), or BPE, Unigram and
    WordLevel with a decoder that only joins tokens (Llama 2, Gemma). One without special tokens has no end-of-text.

    The ids are those of transformers' AutoTokenizer with add_special_tokens=False and split_special_tokens=True. What
    the tokenizer changes in a text is lost, as there: by a normalizer such as NFC, or an unknown character.
    """

    file = "tokenizer.json"

    def __init__(self, content: bytes, special: dict[str, str | int], name: str):
        """`special` maps "eos_token", "bos_token", ... to their texts or ids; `name` is the path for errors."""
        self.content = content
        self.name = name
        self.special = {key: special[key] for key in KEPT if key in special}
        try:
            self._encoding = _encoding(content)
            self.vocabulary = self._encoding.get_vocab(with_added_tokens=True)
            for key in sorted(special.keys() & {*SPECIAL}):
                token = special[key]
                text = self._encoding.id_to_token(token) if isinstance(token, int) else token
                if text in self.vocabulary:
                    self.special[key] = text
            self.prefix = self._find_prefix()
            split = self._encoding.pre_tokenizer
            dropped = split and len("".join(word for word, _ in split.pre_tokenize_str("a b"))) < len("a b")
        except errors_of_rust() as e:
            raise ValueError(f"{name} is damaged or of another kind ({str(e)[:100]}); give a tokenizer.json") from None
        remedy = "use a byte-level or SentencePiece-like tokenizer, or bpe:N"
        require(not dropped, f"{name} has a pre-tokenizer that drops the blanks between words; {remedy}")
        self._read_decoder(remedy)
        last = max([*self.vocabulary.values(), *self.prefix], default=-1)
        require(0 <= last < LARGEST_ID, f"{name} has the largest id {last}; give a vocabulary of 1 to {LARGEST_ID} ids")
        named = "eos_token" in special or self._encoding.get_added_tokens_decoder()
        remedy = "name one of its vocabulary as eos_token in tokenizer_config.json beside it"
        require("eos_token" in self.special or not named, f"{name} has no end-of-text token; {remedy}")
        self.vocab_size = last + 1
        self.eot = self.vocabulary.get(self.special.get("eos_token"))
        model = json.loads(content)["model"]
        self.unk = model.get("unk_id", self.vocabulary.get(model.get("unk_token")))
        self.keeps = self.fallback or self.letters and LETTERS.keys() <= self.vocabulary.keys()
        self.spec = {"kind": "hf", "file": self.file, "vocab_size": last + 1}
        self.spec |= {"sha256": hashlib.sha256(content).hexdigest(), "special": self.special}

    def _read_decoder(self, remedy: str):
        """Finds out how tokens become bytes. ValueError if they cannot give back the text."""
        self.replaced: list[tuple[str, str]] = []  # texts to replace in every token
        self.letters = False  # whether the letters of a token are bytes
        self.fallback = False  # whether <0x0A> is the byte 10
        require(self._encoding.decoder, f"{self.name} has no decoder, so blanks would be put between tokens; {remedy}")
        decoder = json.loads(self._encoding.decoder.__getstate__())
        for step in decoder.get("decoders", [decoder]):
            match step:
                case {"type": "ByteLevel"}:
                    self.letters = True
                case {"type": "ByteFallback"}:
                    self.fallback = True
                case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme}:
                    self.replaced.append((old, " "))
                    self.strips = scheme != "never"
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    self.replaced.append((old, new))
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:  # of the whole text, after Fuse
                    self.strips = True
                case {"type": kind} if kind != "Fuse":
                    raise ValueError(f"{self.name} has the decoder {kind}, so its tokens have no bytes; {remedy}")

    @classmethod
    def from_folder(cls, folder: Path | str) -> "HFTokenizer":
        """Reads tokenizer.json, and the special tokens from the configurations beside it. ValueError if one is bad."""
        folder = files.user_path(folder)
        path = folder / cls.file
        remedy = f"export it with python -m engine.interchange export {folder} DIR, and give hf:DIR"
        require(not (folder / "latest").is_file(), f"{folder} is a run of train.py; {remedy}")
        remedy = "`hf download NAME --local-dir DIR` fetches a model with one"
        require(path.is_file(), f"{folder} lacks {cls.file}; {remedy}")
        special = {}
        for name in CONFIGS:
            if (folder / name).exists():
                special = _special_tokens(folder / name) | special
        if (template := folder / "chat_template.jinja").exists():
            special["chat_template"] = files.read_file(template, 2**20).decode("utf-8", "replace")
        return cls(files.read_file(path, files.LARGEST_JSON), special, str(path))

    @classmethod
    def load(cls, spec: dict, folder: Path, remedy: str) -> "HFTokenizer":
        """Reads the file that `save` wrote into `folder` or its parent, the out_dir of a checkpoint."""
        path = cls.stored(folder)
        require(path, f"{folder} lacks the tokenizer's {cls.file}; copy it there from the data, or {remedy}")
        tokenizer = cls(files.read_file(path, files.LARGEST_JSON), spec["special"], str(path))
        fact = f"{path} was changed: its SHA-256, ids or special tokens are not the recorded ones"
        require(tokenizer.spec == spec, f"{fact}; restore it, or {remedy}")
        return tokenizer

    @property
    def ends(self) -> set[int | None]:
        more = self.special.get("eos_token_id", [])
        return {self.eot, *(i for i in more if type(i) is int)}

    def save(self, folder: Path | str):
        files.write_file(Path(folder) / self.file, self.content)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each id; none for an id that the vocabulary leaves out."""
        found = [b""] * self.vocab_size
        for token, i in self.vocabulary.items():
            found[i] = self._bytes_of(token)
        return found

    def _bytes_of(self, token: str) -> bytes:
        for old, new in self.replaced:
            token = token.replace(old, new)
        if self.letters and LETTERS.keys() >= set(token):
            return bytes(LETTERS[c] for c in token)
        if self.fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes.fromhex(token[3:5])
        return token.encode()

    def _find_prefix(self) -> list[int]:
        """The ids, such as Llama's <s>, that transformers puts before a text and `encode` leaves out."""
        try:
            found = self._encoding.encode("a", add_special_tokens=True)
        except Exception:  # a vocabulary of words without "a"
            return []
        plain = found.special_tokens_mask.index(0) if 0 in found.special_tokens_mask else 0
        return found.ids[:plain]

    def encode(self, text: str) -> np.ndarray:
        """Lone surrogates become U+FFFD."""
        return self._ids(self._encoding, text)

    def encode_rest(self, text: str) -> np.ndarray:
        return self._ids(self._encoding_of_rest, text)

    @cached_property
    def _encoding_of_rest(self):
        return _encoding(self.content, _without_blank)

    def _ids(self, encoding, text: str) -> np.ndarray:
        try:  # a batch, because `encode` holds Python's lock, and preparations have threads
            [found] = encoding.encode_batch_fast([encodable(text)], add_special_tokens=False)
        except errors_of_rust() as e:  # for example a WordLevel vocabulary that lacks a character
            raise ValueError(f"{self.name} cannot encode the text ({str(e)[:100]}); change the text") from None
        return np.array(found.ids, dtype=np.int64)

    def decode(self, ids) -> str:
        """The text of `ids`, without the blank that SentencePiece puts before a text."""
        text = super().decode(ids)
        return text.removeprefix(" ") if self.strips else text


def errors_of_rust() -> tuple[type, ...]:
    """The classes of the library's errors: Exception, and what a panic raises, which derives from BaseException."""
    return Exception, *(kind for kind in BaseException.__subclasses__() if kind.__name__ == "PanicException")


def _encoding(content: bytes, change: Callable[[dict], dict] | None = None):
    """The library's tokenizer of a tokenizer.json. change(object) may replace its JSON objects."""
    from tokenizers import Tokenizer

    parts = json.loads(content, object_hook=change) | {"truncation": None, "padding": None}
    parts["model"]["dropout"] = None
    encoding = Tokenizer.from_str(json.dumps(parts))
    encoding.encode_special_tokens = True  # the text of a special token is ordinary text
    return encoding


def _without_blank(part: dict) -> dict:
    """A part of a tokenizer.json, changed if it puts a blank before a text, as SentencePiece does."""
    match part:
        case {"type": "Prepend"}:
            return part | {"prepend": ""}
        case {"type": "ByteLevel"}:
            return part | {"add_prefix_space": False}
        case {"type": "Metaspace"}:
            part.pop("add_prefix_space", None)  # of older files
            return part | {"prepend_scheme": "never"}
    return part


def _special_tokens(path: Path) -> dict[str, str | int]:
    """The texts or ids of the special tokens that a configuration of Hugging Face names."""
    found = {}
    try:
        config = files.read_json(path)
        for key in SPECIAL:
            match config.get(key) or config.get(f"{key}_id"):
                case str(token) | int(token) | {"content": str(token)} | [int(token), *_]:
                    found[key] = token
        found |= {key: config[key] for key, kinds in KEPT.items() if type(config.get(key)) in kinds}
    except (ValueError, RecursionError, AttributeError) as e:
        raise ValueError(f"{path} is damaged ({str(e)[:100]}); fetch it again") from None
    return found


def train_bpe(texts: Iterable[str], vocab_size: int) -> HFTokenizer:
    """Trains byte-level BPE with GPT-2's split into words, to `vocab_size` ids with those of end-of-text and the bytes.
    Equal texts give equal ids. Memory grows with the number of different words."""
    known = 257 <= vocab_size <= 1_000_000
    require(known, f"tokenizer bpe:{vocab_size} is not possible; pass 257 (256 bytes, end-of-text) to 1000000 ids")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def cut(text: str) -> str:
        """Cuts very long words, because the time of the training is quadratic in a word's length."""
        text = re.sub(r"\S{1000}", r"\g<0> ", encodable(text))
        return re.sub(r"\s{1000}", r"\g<0>x", text)

    eot = END_OF_TEXT.decode()
    encoding = Tokenizer(models.BPE())
    encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoding.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, show_progress=False, special_tokens=[eot],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    encoding.train_from_iterator(map(cut, texts), trainer)
    most = encoding.get_vocab_size()
    fact = f"tokenizer bpe:{vocab_size} is larger than the text supports"
    require(most >= vocab_size, f"{fact}; use bpe:{most} or less, or more text")
    return HFTokenizer(encoding.to_str(pretty=True).encode(), {"bos_token": eot, "eos_token": eot}, HFTokenizer.file)


def build(kind: str, texts: Callable[[], Iterable[str]]) -> Tokenizer:
    """Builds the tokenizer "char", "byte", "gpt2", "bpe:N", for example bpe:4096, or "hf:DIR". Only char and bpe call
    texts(), once: a pass over all documents."""
    name, _, value = kind.partition(":")
    if kind == "char":
        chars = "".join(set(chain.from_iterable(texts())))
        require(encodable(chars) == chars, "the text has lone surrogates, which are no characters; use tokenizer byte")
        return CharTokenizer(chars)
    if kind == "byte":
        return ByteTokenizer()
    if kind == "gpt2":
        return GPT2Tokenizer()
    if name == "bpe" and re.fullmatch("[0-9]{1,9}", value):
        return train_bpe(texts(), int(value))
    if name == "hf" and value:
        return HFTokenizer.from_folder(value)
    raise ValueError(f"unknown tokenizer {kind[:80]!r}; choose char, byte, gpt2, bpe:N such as bpe:4096, or hf:DIR")


def from_spec(spec: dict, folder: Path | None = None, remedy: str = "prepare the data again") -> Tokenizer:
    """Makes the tokenizer that `spec` describes. A tokenizer.json is in `folder` or its parent."""
    match spec:
        case {"kind": "char", "chars": str(chars)}:
            return CharTokenizer(chars)
        case {"kind": "byte"}:
            return ByteTokenizer()
        case {"kind": "gpt2"}:
            return GPT2Tokenizer(folder)
        case {"kind": "hf", "special": dict()}:
            return HFTokenizer.load(spec, folder, remedy)
    raise ValueError(f"no tokenizer can be made from {ascii(spec):.80}; {remedy}")
