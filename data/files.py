"""Token files: their formats, and how a file is recognised, checked and mapped. Also helpers for files and paths.

A shard is the file that llm.c and modded-nanogpt read: 256 little-endian int32 (magic 20240520 and version 1 for
uint16, magic 20240801 and version 7 for uint32; the number of tokens; zeros), then the tokens.

nanoGPT's train.bin and val.bin are uint16 tokens without a header.

Megatron's data is a .bin file of tokens and an .idx file, the index: b"MMIDIDX\\0\\0", version 1 (uint64), a code for
the type of the tokens (uint8), the numbers of sequences n and of document bounds d (uint64 each), then sizes (n int32,
in tokens), pointers (n int64, in bytes) and bounds (d int64).
"""

import errno
import hashlib
import json
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from data.errors import require

HEADER_BYTES = 256 * 4
FORMATS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}  # magic: (version, dtype)
MEGATRON = b"MMIDIDX\0\0"
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating-point numbers
SPLITS = ("train", "val")
INDEX_BLOCK = 2**24  # sequences of an index that are checked at once
LARGEST_JSON = 2**28  # bytes, enough for the records of a million shards


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """os.open for regular files only, usable as `opener` of open. OSError for a pipe or device: a read could block."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Names `path` in an OSError that names no file, such as that of a write on a full disk."""
    try:
        yield
    except OSError as e:
        if e.strerror and not e.filename:
            e.filename = display_path(Path(path))
        raise


def amount(n: float) -> str:
    """A number of bytes for people: 26712 -> "26.71 kB"."""
    unit, name = next(u for u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")) if n >= u[0] or u[0] == 1)
    return f"{n / unit:,.4g} {name}"


def read_file(path: Path, most: int) -> bytes:
    """The content of a regular file. ValueError if it has more than `most` bytes."""
    with open(path, "rb", opener=open_regular) as f:
        content = f.read(most + 1)
    require(len(content) <= most, f"{display_path(path)} has more than {most:,} bytes; give a smaller file")
    return content


def read_json(path: Path):
    """Reads a JSON file. ValueError if it is malformed or repeats a key; OSError or RecursionError as they come."""

    def unique(pairs: list[tuple]) -> dict:
        if len(pairs) > len(dict(pairs)):
            raise ValueError(f"a key appears twice in the object of {', '.join(key for key, _ in pairs)}"[:200])
        return dict(pairs)

    def finite(word: str):
        raise ValueError(f"{word} is not JSON")

    content = read_file(path, LARGEST_JSON).decode("utf-8")
    return json.loads(content, object_pairs_hook=unique, parse_constant=finite)


class Shard:
    """The tokens of one file by position: shard[a:b] is (b - a,), in the file's own integer type. `kind` describes the
    format, which may record the number of `documents`.

    Tokens are read by pread. For a window of 2 KB a memory map would read up to megabytes ahead and keep them in the
    process's resident memory; and it would kill the process if the file was truncated after it was opened.
    """

    def __init__(self, path: Path, dtype: np.dtype, offset: int, length: int, kind: str, documents: int | None = None):
        self.path, self.dtype, self.length, self.kind, self.documents = path, dtype, length, kind, documents
        self.offset = offset  # bytes before the first token
        self.file = open_regular(path)
        weakref.finalize(self, os.close, self.file)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> np.ndarray:
        size = (part.stop - part.start) * self.dtype.itemsize
        content = os.pread(self.file, size, self.offset + part.start * self.dtype.itemsize)
        check(len(content) == size, self.path, f"was truncated: tokens {part.start} to {part.stop} are missing")
        return np.frombuffer(content, self.dtype)

    def mapped(self) -> np.memmap:
        """All tokens as an array, (N,), for a single pass over them."""
        return np.memmap(self.path, self.dtype, "r", self.offset)


def open_file(path: Path) -> Shard:
    """Opens and checks the tokens of one file. Its format is found by an .idx beside it, the magic and the exact size.
    ValueError for a file that is not complete or of another format, OSError for too many open files."""
    start, size = _read_start(path, HEADER_BYTES)
    check(start, path, "is empty")
    magic, version, count = np.frombuffer(start[:12].ljust(12, b"\0"), dtype="<i4").tolist()
    if (index := path.with_suffix(".idx")).exists():
        dtype, sizes, bounds = read_index(index)
        count = int(sizes.sum(dtype=np.int64))
        expected = count * dtype.itemsize
        _check_size(path, size, expected, f"its .idx gives {expected}")
        return Shard(path, dtype, 0, count, "Megatron's, version 1", len(bounds) - 1)
    if magic in FORMATS:
        known, dtype = FORMATS[magic]
        expected = HEADER_BYTES + count * dtype.itemsize
        whole = size >= HEADER_BYTES
        check(whole, path, f"is truncated: {size} bytes, less than a shard's header of {HEADER_BYTES}")
        check(version == known, path, f"is a shard of version {version}, not {known}")
        _check_size(path, size, expected, f"its header gives {count} tokens, {expected} bytes")
        check(count, path, "holds no tokens")
        return Shard(path, dtype, HEADER_BYTES, count, f"shard {magic} of version {version}")
    known = " or ".join(map(str, FORMATS))
    headerless = path.name in [f"{split}.bin" for split in SPLITS]
    check(headerless, path, f"is not a shard: it begins with {magic}, not with {known}")
    check(size % 2 == 0, path, f"has {size} bytes, an odd number, so it is not a file of uint16 tokens")
    damaged = count > 0 and size in (HEADER_BYTES + 2 * count, HEADER_BYTES + 4 * count)  # by chance only 1 in 2^31
    check(not damaged, path, f"is a shard whose magic is damaged: {magic}")
    return Shard(path, np.dtype("<u2"), 0, size // 2, "no header")


def read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """Reads Megatron's .idx: the tokens' type, the sizes of the n sequences, the document bounds as sequence numbers.
    ValueError unless the sequences follow one another without gaps and the bounds increase from 0 to n."""
    start, size = _read_start(path, 34)
    known = start.startswith(MEGATRON)
    check(known, path, f"is not an index of Megatron: it does not begin with {MEGATRON}")
    check(size >= 34, path, f"is truncated: {size} bytes, less than an index's header of 34")
    version, (n, n_bounds) = int.from_bytes(start[9:17], "little"), np.frombuffer(start[18:], "<u8").tolist()
    check(version == 1, path, f"is an index of version {version}, not 1")
    known = ", ".join(map(str, MEGATRON_DTYPES))
    check(start[17] in MEGATRON_DTYPES, path, f"has the token type {start[17]}, which is none of {known}")
    expected = 34 + 12 * n + 8 * n_bounds
    _check_size(path, size, expected, f"its header gives {expected}")
    content, dtype = np.memmap(path, dtype="u1", mode="r"), np.dtype(MEGATRON_DTYPES[start[17]])
    sizes, pointers, bounds = np.split(content[34:], [4 * n, 12 * n])
    sizes, pointers, bounds = sizes.view("<i4"), pointers.view("<i8"), bounds.view("<i8")
    end, gaps = 0, not n
    for i in range(0, n, INDEX_BLOCK):
        block, starts = sizes[i : i + INDEX_BLOCK], pointers[i : i + INDEX_BLOCK]
        ends = end + np.cumsum(block, dtype=np.int64)
        gaps |= bool(block.min() < 0 or (starts != (ends - block) * dtype.itemsize).any())
        end = int(ends[-1])
    check(not gaps, path, "has sizes and pointers of sequences that do not follow one another")
    ordered = n_bounds and bounds[0] == 0 and bounds[-1] == n and (np.diff(bounds) >= 0).all()
    check(ordered, path, f"has document bounds that do not increase from 0 to its {n} sequences")
    return dtype, sizes, bounds


def _read_start(path: Path, n: int) -> tuple[bytes, int]:
    """The first `n` bytes of a file, and its size in bytes."""
    try:
        with open(path, "rb", opener=open_regular) as f:
            return f.read(n), f.seek(0, os.SEEK_END)
    except OSError as e:
        raise unreadable(path, e) from e


def _check_size(path: Path, size: int, expected: int, source: str) -> None:
    fact = "is truncated" if size < expected else "is too long"
    check(size == expected, path, f"{fact}: {size} bytes, but {source}")


def write_file(path: Path, content: bytes) -> None:
    """Writes a file atomically, and makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_bytes(content)
    fsync(temporary)
    os.replace(temporary, path)


def fsync(path: Path) -> None:
    """Makes the bytes of a file, or the names in a folder, survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb", opener=open_regular) as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def unreadable(path: Path, e: OSError) -> ValueError:
    """`problem` for a file that the system could not read."""
    many = e.errno == errno.EMFILE
    remedy = "raise the limit of open files with ulimit -n, or prepare fewer, larger shards" if many else ""
    return problem(path, f"cannot be read ({e.strerror})", remedy)


def check(condition: object, path: Path, fact: str, remedy: str = "") -> None:
    """Raises the `problem` unless the condition holds."""
    if not condition:
        raise problem(path, fact, remedy)


def problem(path: Path, fact: str, remedy: str = "") -> ValueError:
    """A ValueError of one line: a data set's folder or a file in it, the fact, and the remedy."""
    script = (path if os.path.isdir(path) else path.parent) / "prepare.py"
    remedy = remedy or (f"run python {display_path(script)}" if script.exists() else "copy or prepare it again")
    return ValueError(f"{display_path(path)} {fact}; {remedy}")


def display_path(path: Path) -> str:
    """`path` as a user would type it in the current folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
