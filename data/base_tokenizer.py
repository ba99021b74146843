"""The base class of all tokenizers, and those of our own: characters, bytes, and GPT-2's by tiktoken."""

import hashlib
import json
from functools import cached_property
from pathlib import Path

import numpy as np

from data.errors import require
from data.files import read_file, write_file

END_OF_TEXT = b"<|endoftext|>"  # the printed form of an end-of-text token, which has no text
# The letters that represent bytes in vocabularies of GPT-2 and Hugging Face. A byte that is printable in Latin-1 is its
# own letter. The others take U+0100, U+0101, ... in order.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
LETTERS = {chr(b): b for b in PRINTABLE}
LETTERS |= {chr(0x100 + i): b for i, b in enumerate(b for b in range(256) if b not in PRINTABLE)}


class Tokenizer:
    """Base of all kinds. A kind sets spec, vocab_size, eot and token_bytes, and has `encode`."""

    spec: dict
    vocab_size: int  # V
    eot: int | None  # the id of end-of-text
    unk: int | None = None  # the id of characters that the vocabulary lacks
    keeps = True  # whether the ids of a text have all its characters
    strips = False  # whether `decode` removes a blank at the beginning, which `encode` has put there
    prefix: list[int] = []  # the ids that other programs put before a text and `encode` leaves out
    token_bytes: list[bytes]  # V entries: the UTF-8 bytes of each id
    file = ""  # the name of the file that `save` writes

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, (N,) int64, without end-of-text ids: only a preparation adds these."""
        raise NotImplementedError

    def encode_first(self, text: str) -> np.ndarray:
        """The ids of a text that continues no other one, behind the `prefix`."""
        return np.concatenate([np.array(self.prefix, dtype=np.int64), self.encode(text)])

    def encode_rest(self, text: str) -> np.ndarray:
        """The ids of a text that continues another one."""
        return self.encode(text)

    def decode_bytes(self, ids) -> bytes:
        """The bytes of `ids` below V, an integer sequence, array or CPU tensor."""
        ids = np.asarray(ids, dtype=np.int64).ravel().tolist()
        assert min(ids, default=0) >= 0
        return b"".join([self.token_bytes[i] for i in ids])

    def decode(self, ids) -> str:
        """The text of `ids`, in which bytes that are not UTF-8 become U+FFFD."""
        return self.decode_rest(ids)

    def decode_rest(self, ids) -> str:
        """The text of `ids` that continue another text: a blank at its beginning stays."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def save(self, folder: Path | str):
        """Writes the file from which the tokenizer is read again into `folder`, if it has one."""

    @classmethod
    def stored(cls, folder: Path | None) -> Path | None:
        """The path of that file in `folder` or in its parent, the out_dir of a checkpoint; None without one."""
        if folder is None:
            return None
        paths = (folder / cls.file, folder.absolute().parent / cls.file)
        return next(filter(Path.is_file, paths), None)

    @property
    def end_text(self) -> str:
        """The text of end-of-text, which `encode` takes as ordinary text; "" without one."""
        return "" if self.eot is None else self.token_bytes[self.eot].decode("utf-8", "replace")

    @cached_property
    def end(self) -> np.ndarray:
        """The ids behind a document: end-of-text, (1,) int64, or none, (0,)."""
        return np.array([] if self.eot is None else [self.eot], dtype=np.int64)

    @property
    def ends(self) -> set[int | None]:
        """The ids that end a text that a model writes."""
        return {self.eot}

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the spec; equal hashes mean equal ids for equal text."""
        return hashlib.sha256(json.dumps(self.spec, sort_keys=True).encode()).hexdigest()

    def same_tokens(self, other: "Tokenizer") -> bool:
        """Whether the ids mean the same, as those of a tokenizer and of its export to Hugging Face do."""
        if self.hash == other.hash:
            return True
        same_size = self.vocab_size == other.vocab_size and self.eot == other.eot
        return same_size and self.token_bytes == other.token_bytes

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """Bytes of text per token, (V,) int64, for the denominator of bits per byte; 0 for tokens without a text."""
        lengths = np.array([len(b) for b in self.token_bytes], dtype=np.int64)
        lengths[[i for i in (self.eot, self.unk, *self.prefix) if i is not None]] = 0
        return lengths

    def lost(self, text: str, ids: np.ndarray) -> int:
        """The bytes of a text that its ids lack, as those of unknown characters; below 0 if they have more."""
        if self.keeps:
            return 0
        return len(_utf8(text)) + self.strips - int(self.byte_lengths[ids].sum())


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
            first = ", ".join(ascii(chr(c)) for c in unknown[:5].tolist())
            raise ValueError(f"the char vocabulary lacks characters of the text, such as {first}; leave them out")
        return ids.astype(np.int64)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes 0..255 and end-of-text 256. Encodes every str, including lone surrogates."""

    spec = {"kind": "byte"}
    vocab_size = 257
    eot = 256
    merges: list[tuple[str, str]] = []
    token_bytes = [bytes([i]) for i in range(256)] + [END_OF_TEXT]

    def encode(self, text: str) -> np.ndarray:
        """The bytes of `text`. A file read with errors="surrogateescape" gives exactly its own bytes."""
        return np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.int64)


class GPT2Tokenizer(Tokenizer):
    """GPT-2's 50,257 ids, by tiktoken. The merges are in the file of a `folder`, where a preparation has saved them, or
    else downloaded at the first use."""

    file = "vocab.bpe"
    spec = {"kind": "gpt2"}
    vocab_size = 50257
    eot = 50256
    # Equivalent to tiktoken's own pattern, in half of the time: its regex engine compiles a group without lookahead
    # to one automaton, and interprets all others step by step.
    PATTERN = r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s"
    # The file and its SHA-256 in tiktoken, whose cache may have it.
    MERGES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
    SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"

    def __init__(self, folder: Path | None = None):
        self.path = self.stored(folder)

    @cached_property
    def table(self) -> bytes:
        """The content of the file."""
        if self.path:
            content = read_file(self.path, 2**20)
            same = hashlib.sha256(content).hexdigest() == self.SHA256
            require(same, f"{self.path} is not GPT-2's table; delete it or copy it again")
            return content
        from tiktoken.load import read_file_cached

        try:
            return read_file_cached(self.MERGES, self.SHA256)
        except OSError as e:
            remedy = "set TIKTOKEN_CACHE_DIR to a folder that has them, go online once, or use tokenizer byte or char"
            raise ValueError(f"tokenizer gpt2 cannot fetch its merges ({type(e).__name__}); {remedy}") from e

    def save(self, folder: Path | str):
        if self.path or "table" in vars(self):  # it is not fetched for this
            write_file(Path(folder) / self.file, self.table)

    @cached_property
    def merges(self) -> list[tuple[str, str]]:
        """The merges in order, as letters. Each makes the next id after those of the 256 bytes."""
        lines = self.table.decode().split("\n")
        return [tuple(line.split(" ")) for line in lines[1:-1]]

    @cached_property
    def token_bytes(self) -> list[bytes]:
        names = [*LETTERS, *map("".join, self.merges)]
        return [bytes(LETTERS[c] for c in name) for name in names] + [END_OF_TEXT]

    @cached_property
    def _encoding(self):
        import tiktoken

        ranks = {token: i for i, token in enumerate(self.token_bytes[:-1])}
        special = {END_OF_TEXT.decode(): self.eot}
        return tiktoken.Encoding("gpt2", pat_str=self.PATTERN, mergeable_ranks=ranks, special_tokens=special)

    def encode(self, text: str) -> np.ndarray:
        """The text "<|endoftext|>" is ordinary text, and lone surrogates become U+FFFD."""
        try:
            ids = self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            ids = self._encoding.encode_to_numpy(encodable(text), disallowed_special=())
        return ids.astype(np.int64)


def encodable(text: str) -> str:
    """The text with U+FFFD in place of lone surrogates, which no library takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate that escapes no byte is kept as three bytes
        return text.encode("utf-8", "surrogatepass")


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
