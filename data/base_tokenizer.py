"""The base class of all tokenizers, and the file that some of them have."""

import hashlib
import json
from functools import cached_property
from pathlib import Path

import numpy as np

from data import files
from data.errors import require

END_OF_TEXT = b"<|endoftext|>"  # the printed form of an end-of-text token, which has no text


class Tokenizer:
    """Base of all kinds. A kind sets the four attributes and `encode`."""

    spec: dict
    vocab_size: int  # V
    eot: int | None  # the id of end-of-text
    bos: int | None = None  # the id of beginning-of-text, if a model was trained with one
    prefix: list[int] = []  # the ids that other programs put before a text and `encode` leaves out
    FILE = ""  # the name of the kind's file, if it has one
    content: bytes  # of the file
    token_bytes: list[bytes]  # V entries: the UTF-8 bytes of each id

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, (N,) int64, without end-of-text ids: only a preparation adds these."""
        raise NotImplementedError

    @cached_property
    def end(self) -> np.ndarray:
        """The ids behind a document: end-of-text, (1,) int64, or none, (0,)."""
        return np.array([] if self.eot is None else [self.eot], dtype=np.int64)

    def encode_rest(self, text: str) -> np.ndarray:
        """The ids of a text that continues another one."""
        return self.encode(text)

    def save(self, folder: Path | str) -> None:
        """Writes the file that `spec` refers to into `folder`. Most kinds have none."""
        if self.FILE:
            files.write_file(Path(folder) / self.FILE, self.content)

    @classmethod
    def load(cls, folder: Path | None, **fields) -> "Tokenizer":
        """Makes the tokenizer from the fields of its spec and the files that `save` wrote into `folder`."""
        return cls(**fields)

    def decode_bytes(self, ids) -> bytes:
        """The bytes of `ids`, an integer sequence, array or CPU tensor. ValueError for an id outside [0, V)."""
        ids = np.asarray(ids, dtype=np.int64).ravel()
        bad = ids[(ids < 0) | (ids >= self.vocab_size)]
        if bad.size:
            fact = f"token id {bad[0]} is outside the {self.spec['kind']} vocabulary of {self.vocab_size}"
            raise ValueError(f"{fact}; sample only from the first vocab_size logits")
        return b"".join([self.token_bytes[i] for i in ids.tolist()])

    def decode(self, ids) -> str:
        """The text of `ids`, in which bytes that are not UTF-8 become U+FFFD."""
        return self.decode_rest(ids)

    def decode_rest(self, ids) -> str:
        """The text of `ids` that continue another text: a blank at its beginning stays."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the spec; equal hashes mean equal ids for equal text."""
        return hashlib.sha256(json.dumps(self.spec, sort_keys=True).encode()).hexdigest()

    def same_tokens(self, other: "Tokenizer") -> bool:
        """Whether the ids mean the same, as those of a tokenizer and of its export to Hugging Face do."""
        if self.hash == other.hash or (self.vocab_size, self.eot) != (other.vocab_size, other.eot):
            return self.hash == other.hash
        return self.token_bytes == other.token_bytes

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """Bytes of text per token, (V,) int64, for the denominator of bits per byte; 0 for end-of-text."""
        lengths = np.array([len(b) for b in self.token_bytes], dtype=np.int64)
        if self.eot is not None:
            lengths[self.eot] = 0
        return lengths


def read_recorded(folder: Path | None, name: str, file: str, sha256: str) -> tuple[Path, bytes]:
    """The path and the content of the file `name` in `folder` or its parent (out_dir of a checkpoint). `file` and
    `sha256` are those of a spec; ValueError if they do not fit, or the file is missing."""
    require(file == name, f"the tokenizer has file {ascii(file):.80}, but only {name} is read; prepare again")
    folder = Path(folder or ".")
    path = next((p for p in (folder / name, folder.absolute().parent / name) if p.is_file()), None)
    require(path, f"{folder} lacks the tokenizer's {name}; copy it there from the data, or prepare it again")
    content = path.read_bytes()
    same = hashlib.sha256(content).hexdigest() == sha256
    require(same, f"{path} was changed: its SHA-256 is not the recorded one; restore it, or prepare again")
    return path, content
