"""Tokenizers, from text to token ids and back: `char`, `byte`, `gpt2`, `bpe` and `hf` (data/hf_tokenizer.py).

    tok = build("bpe:4096", lambda: texts)     # in a preparation; char and bpe are built from the texts
    tok.save(folder)
    tok = from_spec(tok.spec, folder)          # everywhere else
    ids = tok.encode("def main(")              # (N,) int64
    tok.decode(ids)                            # "def main("

`spec`, a JSON object, describes a tokenizer in a data set's meta.json and in every checkpoint. Only `bpe` and `hf` also
need a file, beside the shards and in a run's out_dir. A character may consist of several tokens: to print ids while
they are sampled, pass the bytes of `decode_bytes` to an incremental UTF-8 decoder.
"""

import base64
import difflib
import hashlib
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np

from data.base_tokenizer import END_OF_TEXT, Tokenizer, read_recorded
from data.errors import require
from data.hf_tokenizer import LETTERS, HFTokenizer

SURROGATES = re.compile("([\ud800-\udfff]+)")


class CharTokenizer(Tokenizer):
    """One id per distinct character, in code point order, as in nanoGPT. It has no end-of-text."""

    eot = None

    def __init__(self, chars: str):
        """`chars` holds the vocabulary in any order, with repeats: it may be the text itself."""
        self.codes = np.unique(_code_points(chars))  # (V,)
        self.chars = [chr(c) for c in self.codes.tolist()]
        self.vocab_size = len(self.chars)
        self.spec = {"kind": "char", "chars": "".join(self.chars)}
        self.token_bytes = [_utf8(c) for c in self.chars]

    def encode(self, text: str) -> np.ndarray:
        """ValueError names characters that are not in the vocabulary."""
        points = _code_points(text)
        ids = np.searchsorted(self.codes, points)
        unknown = np.unique(points[np.append(self.codes, np.uint32(2**32 - 1))[ids] != points])
        if unknown.size:
            listed = ", ".join(ascii(chr(c)) for c in unknown[:5].tolist()) + (", ..." if unknown.size > 5 else "")
            fact = f"the char vocabulary of {self.vocab_size} lacks {unknown.size} of the text's characters: {listed}"
            remedy = "prepare the data with a text that has them or with the byte tokenizer"
            raise ValueError(f"{fact}; remove them, or {remedy}")
        return ids.astype(np.int64)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes 0..255 and end-of-text 256. Encodes every str, including lone surrogates."""

    spec = {"kind": "byte"}
    vocab_size = 257
    eot = 256
    token_bytes = [bytes([i]) for i in range(256)] + [END_OF_TEXT]

    def encode(self, text: str) -> np.ndarray:
        """The bytes of `text`. A file read with errors="surrogateescape" gives exactly its own bytes."""
        return _ids(_utf8(text))


class GPT2Tokenizer(Tokenizer):
    """GPT-2's 50,257 ids, by tiktoken, which downloads its table at the first use: training needs no network."""

    spec = {"kind": "gpt2"}
    vocab_size = 50257
    eot = 50256
    # Equivalent to tiktoken's own pattern, in half of the time: its regex engine compiles a group without lookahead
    # to one automaton, and interprets all others step by step.
    PATTERN = r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s"

    @cached_property
    def _encoding(self):
        try:
            return _tiktoken(self, lambda tiktoken: tiktoken.get_encoding("gpt2")._mergeable_ranks)
        except OSError as e:
            remedy = "set TIKTOKEN_CACHE_DIR to a folder that has it, go online once, or use tokenizer byte or char"
            raise ValueError(f"tokenizer gpt2 cannot fetch its table ({type(e).__name__}); {remedy}") from e

    @cached_property
    def token_bytes(self) -> list[bytes]:
        return [self._encoding.decode_single_token_bytes(i) for i in range(self.vocab_size)]

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, (N,) int64; "<|endoftext|>" is ordinary text. ValueError without tiktoken or its table."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int64)
        except UnicodeEncodeError:  # a lone surrogate, which encode_ordinary replaces
            return np.array(self._encoding.encode_ordinary(text), dtype=np.int64)


class BPETokenizer(Tokenizer):
    """Byte-level BPE: bytes 0..255, the merges in the order of training, end-of-text. Encodes every str. The file has
    tiktoken's format, a line "base64(bytes) id" for each id except end-of-text. PATTERN is a part of the definition:
    another pattern would give other ids with the same file."""

    FILE = "tokenizer.tiktoken"
    # GPT-2's split into words; merges stay inside a word. GPT-4's split makes 3 % more tokens of Python at bpe:1024 and
    # 2 % more at bpe:4096, where "(self" and ".self" take ids of their own; at bpe:16384 both are equal. The limit of
    # 999 blanks is ours: a million in a row would overflow tiktoken's stack.
    PATTERN = r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s{1,999}(?!\S)|\s"

    def __init__(self, tokens: list[bytes]):
        """`tokens` lists the bytes of each id except end-of-text."""
        self.token_bytes = [*tokens, END_OF_TEXT]
        self.vocab_size, self.eot = len(tokens) + 1, len(tokens)
        self.content = b"".join(b"%s %d\n" % (base64.b64encode(t), i) for i, t in enumerate(tokens))
        digest = hashlib.sha256(self.content).hexdigest()
        self.spec = {"kind": "bpe", "file": self.FILE, "vocab_size": self.vocab_size, "sha256": digest}

    @classmethod
    def load(cls, folder: Path | None, file: str, vocab_size: int, sha256: str) -> "BPETokenizer":
        path, content = read_recorded(folder, cls.FILE, file, sha256)
        try:
            tokens = [base64.b64decode(line.split(b" ")[0], validate=True) for line in content.splitlines()]
        except ValueError as e:
            raise ValueError(f"{path} is damaged ({e}); restore it, or prepare the data again") from None
        tokenizer, n = cls(tokens), len(tokens)
        in_order = tokenizer.content == content and n + 1 == vocab_size
        different = tokens[:256] == ByteTokenizer.token_bytes[:256] and len(set(tokens)) == n and b"" not in tokens
        fact = "does not begin with the 256 bytes, or has a token twice or an empty one"
        fact = fact if in_order else f"does not give the ids 0 to {n - 1} in order, or vocab_size is not {n + 1}"
        require(in_order and different, f"{path} is damaged: it {fact}; restore it, or prepare the data again")
        return tokenizer

    @cached_property
    def _encoding(self):
        return _tiktoken(self, lambda _: {token: i for i, token in enumerate(self.token_bytes[:-1])})

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, (N,) int64; "<|endoftext|>" is ordinary text. Lone surrogates are encoded as by `byte`."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int64)
        except UnicodeEncodeError:
            parts = enumerate(SURROGATES.split(text))  # text, surrogates, text, ...
            return np.concatenate([_ids(b"".join(map(_utf8, s))) if i % 2 else self.encode(s) for i, s in parts])


def _tiktoken(tokenizer: Tokenizer, ranks: Callable):
    """tiktoken's encoder with the tokenizer's pattern. `ranks` gives the ranks of the tokens from the module."""
    kind, special = tokenizer.spec["kind"], {END_OF_TEXT.decode(): tokenizer.eot}
    try:
        import tiktoken
    except ImportError as e:
        raise ValueError(f"tokenizer {kind} needs tiktoken; pip install tiktoken, or use byte or char") from e
    return tiktoken.Encoding(kind, pat_str=tokenizer.PATTERN, mergeable_ranks=ranks(tiktoken), special_tokens=special)


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Trains BPE: merges the most frequent pair until there are `vocab_size` ids, 257 to 1000000. Equal texts give
    equal ids. Memory grows with the number of different words. ValueError if no pair occurs twice before the end."""
    fact = f"tokenizer bpe:{vocab_size} is not possible"
    require(257 <= vocab_size <= 1_000_000, f"{fact}; pass 257 (256 bytes, end-of-text) to 1000000 ids")
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    except ImportError as e:
        raise ValueError("training bpe needs tokenizers; pip install tokenizers, or use byte, char or gpt2") from e
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(BPETokenizer.PATTERN), behavior="isolated")
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_letters])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, min_frequency=2, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    parts = (part for text in texts for part in SURROGATES.split(text)[::2])  # the library refuses lone surrogates
    parts = (re.sub(r"\S{1000}", r"\g<0> ", part) for part in parts)  # its time is quadratic in a word's length
    tokenizer.train_from_iterator(parts, trainer)
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(LETTERS[c] for c in token) for token, _ in by_id]
    most = len(tokens) + 1
    fact = f"is larger than the text supports: no pair of tokens occurs twice beyond {most} ids"
    require(most >= vocab_size, f"tokenizer bpe:{vocab_size} {fact}; use bpe:{most} or less, or more text")
    return BPETokenizer(sorted(tokens[:256]) + tokens[256:])


TOKENIZERS = {
    "char": CharTokenizer,
    "byte": ByteTokenizer,
    "gpt2": GPT2Tokenizer,
    "bpe": BPETokenizer,
    "hf": HFTokenizer,
}


def build(kind: str, texts: Callable[[], Iterable[str]]) -> Tokenizer:
    """Builds the tokenizer "char", "byte", "gpt2", "bpe:N", for example bpe:4096, or "hf:DIR". Only char and bpe call
    texts(), once: a pass over all documents. ValueError for an unknown `kind`, or for texts that do not suffice."""
    name, _, size = kind.partition(":")
    if kind == "char":
        return CharTokenizer("".join(set(chain.from_iterable(texts()))))
    if kind in ("byte", "gpt2"):
        return TOKENIZERS[kind]()
    if name == "bpe" and re.fullmatch("[0-9]{1,9}", size):
        return train_bpe(texts(), int(size))
    if name == "hf" and size:
        return HFTokenizer.from_folder(size)
    near = next(iter(difflib.get_close_matches(name.lower(), TOKENIZERS, n=1, cutoff=0.5)), None)
    hints = {None: "choose char, byte, gpt2, bpe:N or hf:DIR", "bpe": "give it a number of ids, such as bpe:4096"}
    hints["hf"] = "give it the folder of a tokenizer.json, such as hf:DIR"
    raise ValueError(f"unknown tokenizer {kind[:80]!r}; " + hints.get(near, f"did you mean {near}?"))


def from_spec(spec: dict, folder: Path | None = None) -> Tokenizer:
    """Makes the tokenizer that `spec` describes. The file of a bpe or hf is in `folder` or its parent. ValueError for
    an unknown kind, for a spec that does not fit its kind, or for a missing or damaged file."""
    kind = spec.get("kind") if isinstance(spec, dict) else spec
    if not isinstance(kind, str) or kind not in TOKENIZERS:
        raise ValueError(f"unknown tokenizer {ascii(kind):.80}; choose one of {', '.join(TOKENIZERS)}")
    try:
        return TOKENIZERS[kind].load(folder, **{k: v for k, v in spec.items() if k != "kind"})
    except (TypeError, AttributeError) as e:
        raise ValueError(f"tokenizer {kind} cannot be made from {ascii(spec):.80} ({e}); prepare the data again") from e


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate that escapes no byte is kept as three bytes
        return text.encode("utf-8", "surrogatepass")


def _ids(content: bytes) -> np.ndarray:
    return np.frombuffer(content, dtype=np.uint8).astype(np.int64)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
