"""Text to token ids and back: `char`, `byte` and `gpt2`, behind one table.

    tok = from_spec({"kind": "byte"})
    ids = tok.encode("def main(")              # (N,) int64
    tok.decode(ids)                            # "def main("

A tokenizer is described by its `spec`, a JSON object that needs nothing else: it stands in a data set's meta.json and
in every checkpoint, and `hash` tells whether two of them are the same. To print ids as they are sampled, pass what
`decode_bytes` gives to codecs.getincrementaldecoder("utf-8")("replace"): a character may be spread over several tokens.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path

import numpy as np

END_OF_TEXT = b"<|endoftext|>"  # how an end-of-text token is shown; it stands for no text


class Tokenizer:
    """What all kinds share; a kind sets the rest."""

    spec: dict
    vocab_size: int  # V
    eot: int | None  # the id of end-of-text
    token_bytes: list[bytes]  # V entries: the UTF-8 that each id is printed as

    def encode(self, text: str) -> np.ndarray:
        """(N,) int64 ids of `text`; never an end-of-text id, which only a preparation writes."""
        raise NotImplementedError

    def decode_bytes(self, ids) -> bytes:
        """The bytes of `ids`, an integer sequence, array or CPU tensor. ValueError for an id outside [0, V)."""
        ids = np.asarray(ids, dtype=np.int64).ravel()
        bad = ids[(ids < 0) | (ids >= self.vocab_size)]
        if bad.size:
            raise ValueError(
                f"token id {bad[0]} is outside the {self.spec['kind']} vocabulary of {self.vocab_size}; "
                "sample only from the first vocab_size logits"
            )
        return b"".join([self.token_bytes[i] for i in ids.tolist()])

    def decode(self, ids) -> str:
        """`decode_bytes` as text that can always be printed: bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the spec; equal hashes mean equal ids for equal text."""
        return hashlib.sha256(json.dumps(self.spec, sort_keys=True).encode()).hexdigest()

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """(V,) int64: bytes of text per token, the denominator of bits per byte; 0 for end-of-text."""
        lengths = np.array([len(b) for b in self.token_bytes], dtype=np.int64)
        if self.eot is not None:
            lengths[self.eot] = 0
        return lengths


class CharTokenizer(Tokenizer):
    """One id per distinct character, in code point order: nanoGPT's ids for the same text. Has no end-of-text."""

    eot = None

    def __init__(self, chars: str):
        """`chars`: the vocabulary, in any order (a whole text will do)."""
        self.codes = np.unique(_code_points(chars))  # (V,)
        self.chars = [chr(c) for c in self.codes.tolist()]
        self.vocab_size = len(self.chars)
        self.spec = {"kind": "char", "chars": "".join(self.chars)}
        self.token_bytes = [_utf8(c) for c in self.chars]

    def encode(self, text: str) -> np.ndarray:
        """(N,) int64. ValueError names the characters that the vocabulary lacks."""
        points = _code_points(text)
        unknown = np.setdiff1d(points, self.codes)
        if unknown.size:
            shown = ", ".join(ascii(chr(c)) for c in unknown[:5].tolist()) + (", ..." if unknown.size > 5 else "")
            raise ValueError(
                f"the char vocabulary of {self.vocab_size} lacks {unknown.size} of the text's characters: {shown}; "
                "leave them out, or prepare the data with a text that has them or with the byte tokenizer"
            )
        return np.searchsorted(self.codes, points).astype(np.int64)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes 0..255 and end-of-text 256. Encodes every str, also one holding lone surrogates."""

    spec = {"kind": "byte"}
    vocab_size = 257
    eot = 256
    token_bytes = [bytes([i]) for i in range(256)] + [END_OF_TEXT]

    def encode(self, text: str) -> np.ndarray:
        """(N,) int64. A file read with errors="surrogateescape" gives back its own bytes, UTF-8 or not."""
        return np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.int64)


class GPT2Tokenizer(Tokenizer):
    """GPT-2's 50,257 ids by tiktoken, which fetches its table from the network once. Loaded at the first use, so that
    training on prepared data needs neither."""

    spec = {"kind": "gpt2"}
    vocab_size = 50257
    eot = 50256

    @cached_property
    def _encoding(self):
        try:
            import tiktoken

            return tiktoken.get_encoding("gpt2")
        except ImportError as e:
            raise ValueError("tokenizer gpt2 needs tiktoken; pip install tiktoken, or use byte or char") from e
        except OSError as e:
            raise ValueError(
                f"tokenizer gpt2 cannot fetch its table ({type(e).__name__}); set TIKTOKEN_CACHE_DIR to a folder that "
                "has it, go online once, or use tokenizer byte or char"
            ) from e

    @cached_property
    def token_bytes(self) -> list[bytes]:
        return [self._encoding.decode_single_token_bytes(i) for i in range(self.vocab_size)]

    def encode(self, text: str) -> np.ndarray:
        """(N,) int64; "<|endoftext|>" in the text is text. ValueError if tiktoken or its table is missing."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int64)
        except UnicodeEncodeError:  # a lone surrogate, which encode_ordinary repairs
            return np.array(self._encoding.encode_ordinary(text), dtype=np.int64)


TOKENIZERS = {"char": CharTokenizer, "byte": ByteTokenizer, "gpt2": GPT2Tokenizer}


def from_spec(spec: dict, folder: Path | None = None) -> Tokenizer:
    """The tokenizer that `spec` describes; `folder` is where a kind that keeps files finds them (none of these does).

    ValueError names an unknown kind and the known ones, or a spec that does not fit its kind.
    """
    kind = spec.get("kind") if isinstance(spec, dict) else spec
    if not isinstance(kind, str) or kind not in TOKENIZERS:
        raise ValueError(f"unknown tokenizer {kind!r}; choose one of {', '.join(TOKENIZERS)}")
    try:
        return TOKENIZERS[kind](**{k: v for k, v in spec.items() if k != "kind"})
    except (TypeError, AttributeError) as e:
        raise ValueError(f"tokenizer {kind} cannot be made from {ascii(spec):.80} ({e}); prepare the data again") from e


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate that escapes no byte: keep it as the three bytes it would be
        return text.encode("utf-8", "surrogatepass")


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
