"""Token files: the formats, and how a file is recognised, checked and mapped. Also helpers of data/ for paths.

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

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


def read_json(path: Path):
    """Reads a JSON file. ValueError if it is malformed or repeats a key; OSError or RecursionError as they come."""

    def unique(pairs: list[tuple]) -> dict:
        if len(pairs) > len(dict(pairs)):
            raise ValueError(f"a key appears twice in the object of {', '.join(key for key, _ in pairs)}"[:200])
        return dict(pairs)

    def finite(word: str):
        raise ValueError(f"{word} is not JSON")

    with open(path, "rb", opener=open_regular) as f:
        content = f.read(LARGEST_JSON + 1)
    if len(content) > LARGEST_JSON:
        raise ValueError(f"it has more than {LARGEST_JSON} bytes")
    return json.loads(content.decode("utf-8"), object_pairs_hook=unique, parse_constant=finite)


def map_file(folder: Path, name: str) -> np.memmap:
    """Maps the tokens of one file, checked. Its format is found by an .idx beside it, the magic and the exact size."""
    path = folder / name
    try:
        with open(path, "rb", opener=open_regular) as f:
            start = f.read(HEADER_BYTES)
            size = f.seek(0, os.SEEK_END)
    except OSError as e:
        raise unreadable(folder, name, e) from e
    if not start:
        raise problem(folder, name, "is empty")
    magic, version, count = header(start)
    if path.with_suffix(".idx").exists():
        dtype, sizes, _ = read_index(path.with_suffix(".idx"))
        expected, offset = int(sizes.sum(dtype=np.int64)) * dtype.itemsize, 0
        if size != expected:
            fact = "is truncated" if size < expected else "is too long"
            raise problem(folder, name, f"{fact}: {size} bytes, but its .idx gives {expected}")
    elif magic in FORMATS:
        known, dtype = FORMATS[magic]
        expected, offset = HEADER_BYTES + count * dtype.itemsize, HEADER_BYTES
        if size < HEADER_BYTES:
            raise problem(folder, name, f"is truncated: {size} bytes, less than a shard's header of {HEADER_BYTES}")
        if version != known:
            raise problem(folder, name, f"is a shard of version {version}, not {known}")
        if size != expected:
            fact = "is truncated" if size < expected else "is too long"
            raise problem(folder, name, f"{fact}: {size} bytes, but its header gives {count} tokens, {expected} bytes")
        if not count:
            raise problem(folder, name, "holds no tokens")
    elif name in [f"{split}.bin" for split in SPLITS]:
        dtype, offset = np.dtype("<u2"), 0
        if size % dtype.itemsize:
            raise problem(folder, name, f"has {size} bytes, an odd number, so it is not a file of uint16 tokens")
        if count > 0 and size in (HEADER_BYTES + 2 * count, HEADER_BYTES + 4 * count):  # by chance only 1 in 2^31
            raise problem(folder, name, f"is a shard whose magic is damaged: {magic}")
    else:
        known = " or ".join(map(str, FORMATS))
        raise problem(folder, name, f"is not a shard: it begins with {magic}, not with {known}")
    return np.memmap(path, dtype=dtype, mode="r", offset=offset)


def header(start: bytes) -> list[int]:
    """Magic, version and number of tokens, from the first bytes of a shard."""
    return np.frombuffer(start[:12].ljust(12, b"\0"), dtype="<i4").tolist()


def read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """Reads Megatron's .idx: the tokens' type, the sizes of the n sequences, the document bounds as sequence numbers.

    ValueError unless the sequences follow one another without gaps and the bounds increase from 0 to n.
    """
    folder, name = path.parent, path.name
    try:
        with open(path, "rb", opener=open_regular) as f:
            start = f.read(34)
            size = f.seek(0, os.SEEK_END)
    except OSError as e:
        raise unreadable(folder, name, e) from e
    if not start.startswith(MEGATRON):
        raise problem(folder, name, f"is not an index of Megatron: it does not begin with {MEGATRON}")
    if size < 34:
        raise problem(folder, name, f"is truncated: {size} bytes, less than an index's header of 34")
    version, (n, n_bounds) = int.from_bytes(start[9:17], "little"), np.frombuffer(start[18:], "<u8").tolist()
    if version != 1:
        raise problem(folder, name, f"is an index of version {version}, not 1")
    if start[17] not in MEGATRON_DTYPES:
        known = ", ".join(map(str, MEGATRON_DTYPES))
        raise problem(folder, name, f"has the token type {start[17]}, which is none of {known}")
    expected = 34 + 12 * n + 8 * n_bounds
    if size != expected:
        fact = "is truncated" if size < expected else "is too long"
        raise problem(folder, name, f"{fact}: {size} bytes, but its header gives {expected}")
    content, dtype = np.memmap(path, dtype="u1", mode="r"), np.dtype(MEGATRON_DTYPES[start[17]])
    sizes, pointers, bounds = (
        content[a:b].view(t)
        for a, b, t in (
            (34, 34 + 4 * n, "<i4"), (34 + 4 * n, 34 + 12 * n, "<i8"), (34 + 12 * n, expected, "<i8")
        )
    )  # fmt: skip
    end, gaps = 0, not n
    for i in range(0, n, INDEX_BLOCK):
        block, starts = sizes[i : i + INDEX_BLOCK], pointers[i : i + INDEX_BLOCK]
        ends = end + np.cumsum(block, dtype=np.int64)
        gaps |= bool(block.min() < 0 or (starts != (ends - block) * dtype.itemsize).any())
        end = int(ends[-1])
    if gaps:
        raise problem(folder, name, "has sizes and pointers of sequences that do not follow one another")
    if not n_bounds or bounds[0] != 0 or bounds[-1] != n or (np.diff(bounds) < 0).any():
        raise problem(folder, name, f"has document bounds that do not increase from 0 to its {n} sequences")
    return dtype, sizes, bounds


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb", opener=open_regular) as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def unreadable(folder: Path, name: str, e: OSError) -> ValueError:
    """`problem` for a file that the system could not read."""
    many = e.errno == errno.EMFILE
    remedy = "raise the limit of open files with ulimit -n, or prepare fewer, larger shards" if many else ""
    return problem(folder, name, f"cannot be read ({e.strerror})", remedy)


def problem(folder: Path, name: str, fact: str, remedy: str = "") -> ValueError:
    """A ValueError of one line: the file `name` of a data set (or the folder, for ""), the fact, and the remedy."""
    script = folder / "prepare.py"
    remedy = remedy or (f"run python {display_path(script)}" if script.exists() else "copy or prepare it again")
    return ValueError(f"{display_path(folder / name)} {fact}; {remedy}")


def display_path(path: Path) -> str:
    """`path` as a user would type it in the current folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
