"""The tokenizer `hf`: a tokenizer.json of Hugging Face, as an imported model has it, by the `tokenizers` library.

    tok = HFTokenizer.from_folder("Llama-3.2-1B")     # in a preparation: --tokenizer=hf:Llama-3.2-1B

The ids are those of transformers' AutoTokenizer with add_special_tokens=False and split_special_tokens=True: `encode`
adds no special token, and the text of a special token is ordinary text. (Added tokens that the file does not call
special are found in texts, there and here. So are special tokens of Unigram, whose vocabulary has them as texts.) What
the tokenizer changes in a text is lost, as there: by a normalizer such as NFC, or where the vocabulary lacks a
character, which becomes the unknown token.
"""

import hashlib
import json
import os
import re
from functools import cached_property
from pathlib import Path

import numpy as np

from data import files
from data.base_tokenizer import Tokenizer, read_recorded
from data.errors import require

CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
SPECIAL = {"eos_token", "bos_token", "unk_token", "pad_token"}
LARGEST_ID = 2**24
DROPS_BLANKS = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"}
# The letters that represent bytes in vocabularies of Hugging Face and GPT-2. A byte that is printable in Latin-1 is its
# own letter. The others take U+0100, U+0101, ... in order.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
LETTERS = {chr(b): b for b in PRINTABLE}
LETTERS |= {chr(0x100 + i): b for i, b in enumerate(b for b in range(256) if b not in PRINTABLE)}
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class HFTokenizer(Tokenizer):
    """A tokenizer.json whose tokens have bytes: byte-level BPE (GPT-2, Llama 3, Qwen), or BPE, Unigram and WordLevel
    with a decoder that only joins tokens (Llama 2, Gemma). One without any special token has no end-of-text."""

    FILE = "tokenizer.json"

    def __init__(self, content: bytes, special: dict[str, str | int], name: str):
        """`special` maps "eos_token", "bos_token", ... to their texts or ids; `name` is the path for errors."""
        self.content, self.name = content, name
        special = {key: special[key] for key in special.keys() & SPECIAL}
        try:
            self.parts = json.loads(content)
            self.parts |= {"truncation": None, "padding": None}
            self.parts["model"]["dropout"] = None
            self._encoding = _from_parts(self.parts)
            self.vocabulary = self._encoding.get_vocab(with_added_tokens=True)
            self._decoding = Decoding(self._encoding.decoder)
            kinds = {part["type"] for part in _components(self.parts.get("pre_tokenizer"))}
            if (dropping := kinds & DROPS_BLANKS) and not kinds & {"Metaspace", "ByteLevel"}:
                raise _Refused(f"has the pre-tokenizer {min(dropping)}, which drops the blanks between words")
            by_id = self._encoding.id_to_token
            texts = {key: by_id(x) if isinstance(x, int) else x for key, x in sorted(special.items())}
        except ImportError as e:
            raise ValueError("tokenizer hf needs tokenizers; pip install tokenizers") from e
        except _Refused as e:
            raise ValueError(f"{name} {e}; use a byte-level or SentencePiece-like tokenizer, or bpe:N") from None
        except Exception as e:  # tokenizers raises nothing more special
            raise ValueError(f"{name} is damaged or of another kind ({str(e)[:100]}); give a tokenizer.json") from None
        last = max(self.vocabulary.values(), default=-1)
        require(0 <= last < LARGEST_ID, f"{name} has the largest id {last}; give a vocabulary of 1 to {LARGEST_ID} ids")
        self.special = {key: text for key, text in texts.items() if text in self.vocabulary}
        found = "eos_token" in self.special or not (self.parts.get("added_tokens") or "eos_token" in special)
        fact = f"{name} has no end-of-text token ({ascii(special.get('eos_token')):.50} is not in its vocabulary)"
        require(found, f"{fact}; name one as eos_token in tokenizer_config.json beside it")
        self.vocab_size = last + 1
        self.eot, self.bos = (self.vocabulary.get(self.special.get(key)) for key in ("eos_token", "bos_token"))
        digest = hashlib.sha256(content).hexdigest()
        self.spec = {"kind": "hf", "file": self.FILE, "vocab_size": last + 1, "sha256": digest, "special": self.special}

    @classmethod
    def from_folder(cls, folder: Path | str) -> "HFTokenizer":
        """Reads tokenizer.json, and the special tokens from the configurations beside it. ValueError if one is bad."""
        folder = Path(os.path.expanduser(folder))
        path = folder / cls.FILE
        remedy = "give the folder of a model with a tokenizer.json; `hf download NAME --local-dir DIR` fetches one"
        require(path.is_file(), f"{folder} lacks {cls.FILE}; {remedy}")
        content = path.read_bytes()
        found = {}
        for name in CONFIGS:
            try:
                config = files.read_json(folder / name) if (folder / name).exists() else {}
                for key in SPECIAL:
                    value = config.get(key) or config.get(f"{key}_id")  # generation_config.json may list several ids
                    value = value.get("content") if isinstance(value, dict) else value
                    value = value[0] if isinstance(value, list) and value else value
                    if isinstance(value, (str, int)):
                        found.setdefault(key, value)
            except (ValueError, RecursionError, AttributeError) as e:
                raise ValueError(f"{folder / name} is damaged ({str(e)[:100]}); fetch it again") from None
        return cls(content, found, str(path))

    @classmethod
    def load(cls, folder: Path | None, file: str, vocab_size: int, sha256: str, special: dict) -> "HFTokenizer":
        path, content = read_recorded(folder, cls.FILE, file, sha256)
        tokenizer = cls(content, special, str(path))
        same = (tokenizer.vocab_size, tokenizer.special) == (vocab_size, special)
        require(same, f"{path} has other ids or special tokens than its spec; prepare the data again")
        return tokenizer

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each id; none for an id that the vocabulary leaves out."""
        found = [b""] * self.vocab_size
        for token, i in self.vocabulary.items():
            found[i] = self._decoding.bytes_of(token)
        return found

    @cached_property
    def prefix(self) -> list[int]:
        """The ids, such as Llama's <s>, that transformers puts before a text and `encode` leaves out."""
        found = self._encoding.encode("a", add_special_tokens=True)
        plain = found.special_tokens_mask.index(0) if 0 in found.special_tokens_mask else 0
        return found.ids[:plain]

    @cached_property
    def _encoding_of_rest(self):
        """The tokenizer without the blank that SentencePiece puts before a text."""
        changed = {key: _without_blank(self.parts.get(key)) for key in ("normalizer", "pre_tokenizer")}
        return _from_parts(self.parts | changed)

    def encode(self, text: str) -> np.ndarray:
        """Lone surrogates become U+FFFD."""
        return self._ids(self._encoding, text)

    def encode_rest(self, text: str) -> np.ndarray:
        return self._ids(self._encoding_of_rest, text)

    def _ids(self, encoding, text: str) -> np.ndarray:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        try:
            [found] = encoding.encode_batch_fast([text], add_special_tokens=False)  # unlike encode, without the GIL
        except Exception as e:  # for example a WordLevel vocabulary that lacks a character
            raise ValueError(f"{self.name} cannot encode the text ({str(e)[:100]}); change the text") from None
        return np.array(found.ids, dtype=np.int64)

    def decode(self, ids) -> str:
        """The text of `ids`, without the blank that SentencePiece puts before a text."""
        text = super().decode(ids)
        return text.removeprefix(" ") if self._decoding.strips else text


class _Refused(ValueError):
    """Says what a tokenizer.json has that gives tokens no bytes of their own."""


def _from_parts(parts: dict):
    from tokenizers import Tokenizer

    encoding = Tokenizer.from_str(json.dumps(parts))
    encoding.encode_special_tokens = True  # the text of a special token is ordinary text
    return encoding


def _components(part: dict | None) -> list[dict]:
    """The parts of a Sequence of normalizers, pre-tokenizers or decoders."""
    if part is None:
        return []
    lists = [part[key] for key in ("normalizers", "pretokenizers", "decoders") if key in part]
    return [each for inner in lists[0] for each in _components(inner)] if lists else [part]


class Decoding:
    """How a decoder turns tokens into bytes."""

    def __init__(self, decoder):
        self.replaced: list[tuple[str, str]] = []  # texts to replace in every token
        self.letters = False  # whether the letters of a token are bytes
        self.fallback = False  # whether <0x0A> is the byte 10
        self.strips = fused = False  # whether the blank at the beginning of a text is removed
        steps = _components(json.loads(decoder.__getstate__()) if decoder else None)
        for step in steps:
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
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if fused:
                    self.strips = True
                case _:
                    raise _Refused(f"has the decoder {step['type']}, with which a token has no bytes of its own")
        if not steps:
            raise _Refused("has no decoder, so blanks would be put between all tokens")

    def bytes_of(self, token: str) -> bytes:
        for old, new in self.replaced:
            token = token.replace(old, new)
        if self.letters and LETTERS.keys() >= set(token):
            return bytes(LETTERS[c] for c in token)
        byte = BYTE_TOKEN.fullmatch(token) if self.fallback else None
        return bytes.fromhex(byte[1]) if byte else token.encode()


def _without_blank(part: dict | None) -> dict | None:
    """A normalizer or pre-tokenizer that puts no blank before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    changed = {"Metaspace": {"prepend_scheme": "never"}, "ByteLevel": {"add_prefix_space": False}}
    if part["type"] == "Sequence":
        key = "normalizers" if "normalizers" in part else "pretokenizers"
        return part | {key: [inner for each in part[key] if (inner := _without_blank(each))]}
    if part["type"] == "Metaspace":
        part = {key: value for key, value in part.items() if key != "add_prefix_space"}  # of older files
    return part | changed.get(part["type"], {})
