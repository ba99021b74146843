"""Text to token ids and back: `char`, `byte`, `gpt2` and `bpe`, behind one table.

    tok = build("bpe:4096", lambda: texts)     # a preparation's; char and bpe are made from the texts
    tok.save(folder)
    tok = from_spec(tok.spec, folder)          # everybody else's
    ids = tok.encode("def main(")              # (N,) int64
    tok.decode(ids)                            # "def main("

A tokenizer is described by its `spec`, a JSON object which stands in a data set's meta.json and in every checkpoint;
`hash` tells whether two of them are the same. Only `bpe` needs a file too, beside the shards and in a run's out_dir.
To print ids as they are sampled, pass what `decode_bytes` gives to codecs.getincrementaldecoder("utf-8")("replace"):
a character may be spread over several tokens.
"""

import base64
import difflib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

import numpy as np

from data import files

END_OF_TEXT = b"<|endoftext|>"  # how an end-of-text token is shown; it stands for no text
SURROGATES = re.compile("([\ud800-\udfff]+)")


class Tokenizer:
    """What all kinds share; a kind sets the rest."""

    spec: dict
    vocab_size: int  # V
    eot: int | None  # the id of end-of-text
    token_bytes: list[bytes]  # V entries: the UTF-8 that each id is printed as

    def encode(self, text: str) -> np.ndarray:
        """(N,) int64 ids of `text`; never an end-of-text id, which only a preparation writes."""
        raise NotImplementedError

    def save(self, folder: Path | str) -> None:
        """Writes the files that `spec` alone does not replace into `folder`; most kinds have none."""

    @classmethod
    def load(cls, folder: Path | None, **fields) -> "Tokenizer":
        """From the fields of a spec, and the files that `save` wrote into `folder`."""
        return cls(**fields)

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
        ids = np.searchsorted(self.codes, points)
        unknown = np.unique(points[np.append(self.codes, np.uint32(2**32 - 1))[ids] != points])
        if unknown.size:
            shown = ", ".join(ascii(chr(c)) for c in unknown[:5].tolist()) + (", ..." if unknown.size > 5 else "")
            raise ValueError(
                f"the char vocabulary of {self.vocab_size} lacks {unknown.size} of the text's characters: {shown}; "
                "leave them out, or prepare the data with a text that has them or with the byte tokenizer"
            )
        return ids.astype(np.int64)


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
    # What tiktoken's own pattern matches, in half of the time: its regex engine takes a group that looks ahead of
    # nothing as one automaton, and all others step by step.
    PATTERN = r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s"

    @cached_property
    def _encoding(self):
        try:
            import tiktoken

            table = tiktoken.get_encoding("gpt2")
            return tiktoken.Encoding(
                "gpt2",
                pat_str=self.PATTERN,
                mergeable_ranks=table._mergeable_ranks,
                special_tokens={END_OF_TEXT.decode(): self.eot},
            )
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


class BPETokenizer(Tokenizer):
    """Byte-level BPE: bytes 0..255, then a training's merges in its order, then end-of-text. Encodes every str.

    Its file has tiktoken's format, a line "base64(bytes) id" for each id but end-of-text. PATTERN belongs to this kind:
    another one would give other ids for the same file.
    """

    FILE = "tokenizer.tiktoken"
    # Merges stay inside of what this matches, GPT-2's split. GPT-4's makes 3 % more tokens of Python at bpe:1024 and
    # 2 % more at bpe:4096, where "(self" and ".self" cost ids of their own; at bpe:16384 they are equal. The bound on
    # blanks is ours: a million of them in a row would overflow tiktoken's stack.
    PATTERN = r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s{1,999}(?!\S)|\s"

    def __init__(self, tokens: list[bytes]):
        """`tokens`: the bytes of every id but end-of-text."""
        self.token_bytes = [*tokens, END_OF_TEXT]
        self.vocab_size, self.eot = len(tokens) + 1, len(tokens)
        self.content = b"".join(b"%s %d\n" % (base64.b64encode(t), i) for i, t in enumerate(tokens))
        digest = hashlib.sha256(self.content).hexdigest()
        self.spec = {"kind": "bpe", "file": self.FILE, "vocab_size": self.vocab_size, "sha256": digest}

    @classmethod
    def load(cls, folder: Path | None, file: str, vocab_size: int, sha256: str) -> "BPETokenizer":
        """ValueError if `file` is neither in `folder` nor beside it (a checkpoint's is in out_dir), or was changed."""
        if file != cls.FILE:
            raise ValueError(f"tokenizer bpe has file {ascii(file):.80}, but only {cls.FILE} is read; prepare again")
        folder = Path(folder or ".")
        path = next((p for p in (folder / file, folder.absolute().parent / file) if p.is_file()), None)
        if path is None:
            raise ValueError(f"{folder} lacks the tokenizer's {file}; copy it there from the data, or prepare it again")
        if files.sha256(path) != sha256:
            raise ValueError(f"{path} was changed: its SHA-256 is not the recorded one; restore it, or prepare again")
        content = path.read_bytes()
        try:
            tokens = [base64.b64decode(line.split(b" ")[0], validate=True) for line in content.splitlines()]
        except ValueError as e:
            raise ValueError(f"{path} is damaged ({e}); restore it, or prepare the data again") from None
        tokenizer = cls(tokens)
        if tokenizer.content != content or tokenizer.vocab_size != vocab_size:
            fact = f"does not give the ids 0 to {len(tokens) - 1} in order, or vocab_size is not {len(tokens) + 1}"
        elif tokens[:256] != ByteTokenizer.token_bytes[:256] or len(set(tokens)) != len(tokens) or b"" in tokens:
            fact = "does not begin with the 256 bytes, or has a token twice or an empty one"
        else:
            return tokenizer
        raise ValueError(f"{path} is damaged: it {fact}; restore it, or prepare the data again")

    def save(self, folder: Path | str) -> None:
        """Writes `spec`'s file, which appears whole or not at all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".tmp-{self.FILE}"
        with open(temporary, "wb") as f:
            f.write(self.content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, folder / self.FILE)

    @cached_property
    def _encoding(self):
        try:
            import tiktoken
        except ImportError as e:
            raise ValueError("tokenizer bpe needs tiktoken; pip install tiktoken") from e

        ranks = {token: i for i, token in enumerate(self.token_bytes[:-1])}
        special = {END_OF_TEXT.decode(): self.eot}
        return tiktoken.Encoding("bpe", pat_str=self.PATTERN, mergeable_ranks=ranks, special_tokens=special)

    def encode(self, text: str) -> np.ndarray:
        """(N,) int64; "<|endoftext|>" in the text is text. Lone surrogates become the bytes that `byte` gives them."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int64)
        except UnicodeEncodeError:
            parts = SURROGATES.split(text)  # text, surrogates, text, ...
            for i in range(0, len(parts), 2):
                parts[i] = self.encode(parts[i])
            for i in range(1, len(parts), 2):
                parts[i] = np.frombuffer(b"".join(map(_utf8, parts[i])), dtype=np.uint8).astype(np.int64)
            return np.concatenate(parts)


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Merges the most frequent pair until there are `vocab_size` ids; the same texts always give the same ids.

    Memory grows with the number of different words. ValueError if `vocab_size` is not in [257, 1000000], or if no pair
    occurs twice any more before it is reached.
    """
    if not 257 <= vocab_size <= 1_000_000:
        raise ValueError(
            f"tokenizer bpe:{vocab_size} is not possible; pass 257 (256 bytes, end-of-text) to 1000000 ids"
        )
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
    parts = (part for text in texts for part in SURROGATES.split(text)[::2])  # it takes no lone surrogates,
    parts = (re.sub(r"\S{1000}", r"\g<0> ", part) for part in parts)  # and time quadratic in a word's length
    tokenizer.train_from_iterator(parts, trainer)
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    letters = _letters_of_bytes()
    tokens = [bytes(letters[c] for c in token) for token, _ in by_id]
    if len(tokens) + 1 < vocab_size:
        raise ValueError(
            f"tokenizer bpe:{vocab_size} is larger than the text supports: no pair of tokens occurs twice beyond "
            f"{len(tokens) + 1} ids; use bpe:{len(tokens) + 1} or less, or more text"
        )
    return BPETokenizer(sorted(tokens[:256]) + tokens[256:])


TOKENIZERS = {"char": CharTokenizer, "byte": ByteTokenizer, "gpt2": GPT2Tokenizer, "bpe": BPETokenizer}


def build(kind: str, texts: Callable[[], Iterable[str]]) -> Tokenizer:
    """The tokenizer that a command line calls "char", "byte", "gpt2" or "bpe:N", such as bpe:4096.

    texts()     starts a pass over all documents; called, once, for char and bpe only
    ValueError names what is wrong with `kind`, or with the texts for it.
    """
    name, _, size = kind.partition(":")
    if kind == "char":
        chars = set()
        for text in texts():
            chars.update(text)
        return CharTokenizer("".join(chars))
    if kind in ("byte", "gpt2"):
        return TOKENIZERS[kind]()
    if name == "bpe" and re.fullmatch("[0-9]{1,9}", size):
        return train_bpe(texts(), int(size))
    near = next(iter(difflib.get_close_matches(name.lower(), TOKENIZERS, n=1, cutoff=0.5)), None)
    hints = {None: "choose char, byte, gpt2 or bpe:N", "bpe": "give it a number of ids, such as bpe:4096"}
    raise ValueError(f"unknown tokenizer {kind[:80]!r}; " + hints.get(near, f"did you mean {near}?"))


def from_spec(spec: dict, folder: Path | None = None) -> Tokenizer:
    """The tokenizer that `spec` describes; `folder`, or the one that it is in, is where a bpe's file lies.

    ValueError names an unknown kind and the known ones, a spec that does not fit its kind, or a file that is not right.
    """
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
    except UnicodeEncodeError:  # a lone surrogate that escapes no byte: keep it as the three bytes it would be
        return text.encode("utf-8", "surrogatepass")


def _letters_of_bytes() -> dict[str, int]:
    """The printable letter that stands for each byte in a vocabulary of Hugging Face's, or GPT-2's: itself where it is
    one in Latin-1, and else the next from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
