"""Token files: their formats, and how a file is recognised, checked and mapped. Also helpers for files and paths.

A shard is the file that llm.c and modded-nanogpt read: 256 little-endian int32 (magic 20240520 and version 1 for
uint16, magic 20240801 and version 7 for uint32; the number of tokens; zeros), then the tokens.

nanoGPT's train.bin and val.bin are uint16 tokens without a header.

Megatron's data is a .bin file of tokens and an .idx file: b"MMIDIDX\\0\\0", version 1 (uint64), a code for their type
(uint8), the numbers n and d (uint64 each), n sizes in tokens (int32), n pointers in bytes and d bounds (int64 each).
"""

import errno
import hashlib
import json
import os
import re
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data.errors import require

HEADER_BYTES = 256 * 4
FORMATS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}  # magic: (version, dtype)
MEGATRON = b"MMIDIDX\0\0"
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating-point numbers
SPLITS = ("train", "val")
NO_FSYNC = {errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP}  # of file systems that cannot sync a folder
# By these files a data set, run, checkpoint, comparison or model is known, or they would be replaced by one of another
KINDS = r"(meta|state|config|compare|tokenizer)\.json|metrics\.jsonl|(train|val)_\w+\.bin|vocab\.bpe|config\.py"
LARGEST_JSON = 2**28  # bytes, enough for the records of a million shards


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """os.open for regular files only, usable as `opener` of open. OSError for a pipe or device: a read could block."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
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


def read_file(path: Path, most: int) -> bytes:
    """The content of a regular file. ValueError if it has more than `most` bytes."""
    with open(path, "rb", opener=open_regular) as f:
        size = os.fstat(f.fileno()).st_size
        if size > most:
            raise ValueError(f"{display_path(path)} has {size:,} bytes, more than {most:,}; give a smaller file")
        return f.read()  # which asks for as much memory as the file has; read(most) asks for `most`


def read_json(path: Path):
    """The content of a JSON file. ValueError if it is malformed; OSError or RecursionError as they come."""
    return json.loads(decoded(display_path(path), read_file(path, LARGEST_JSON)))


def decoded(where: str, content: bytes, offset: int = 0) -> str:
    """The UTF-8 text of a file from the byte `offset` on, without the mark of the byte order that it may begin with.
    ValueError names the first byte that is no text."""
    require(b"\0" not in content, f"{where} holds NUL bytes, as archives and UTF-16 do; unpack or convert it")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as e:
        fact = f"{where} is not UTF-8 text: byte {offset + e.start} is {content[e.start]:#04x}"
        raise ValueError(f"{fact}; convert it, for example with iconv, unpack it, or leave it out") from None
    return text if offset else text.removeprefix("\ufeff")


class Shard:
    """The tokens of one file by position: shard[a:b] is (b - a,), in the file's own integer type. Tokens are read by
    pread. For a window of 2 KB a memory map would read up to megabytes ahead and keep them in the process's resident
    memory; and it would kill the process if the file was truncated after it was opened."""

    def __init__(self, path: Path, dtype: np.dtype, offset: int, length: int):
        self.path = path
        self.dtype = dtype
        self.offset = offset  # bytes before the first token
        self.length = length
        self.file = open_regular(path)
        weakref.finalize(self, os.close, self.file)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> np.ndarray:
        size = (part.stop - part.start) * self.dtype.itemsize
        content = os.pread(self.file, size, self.offset + part.start * self.dtype.itemsize)
        if len(content) != size:
            raise problem(self.path, f"was truncated: tokens {part.start} to {part.stop} are missing")
        return np.frombuffer(content, self.dtype)


def open_file(path: Path) -> Shard:
    """Opens and checks the tokens of one file. Its format is found by an .idx beside it, the magic and the exact size.
    ValueError for a file that is not complete or of another format, OSError for one that cannot be read."""
    start, size = _read_start(path, 12)
    index = path.with_suffix(".idx")
    if index.exists():
        dtype, count = read_index(index)
        _check_size(path, size, count * dtype.itemsize)
        return Shard(path, dtype, 0, count)
    magic, version, count = np.frombuffer(start.ljust(12, b"\0"), dtype="<i4").tolist()
    if magic in FORMATS:
        known, dtype = FORMATS[magic]
        check(version == known, path, f"is a shard of version {version}, not {known}")
        _check_size(path, size, HEADER_BYTES + count * dtype.itemsize)
        return Shard(path, dtype, HEADER_BYTES, count)
    headerless = path.stem in SPLITS and size % 2 == 0
    known = " or ".join(map(str, FORMATS))
    check(headerless, path, f"is no shard, which begins with {known}, and no train.bin or val.bin of uint16 tokens")
    return Shard(path, np.dtype("<u2"), 0, size // 2)


def read_index(path: Path) -> tuple[np.dtype, int]:
    """Reads Megatron's .idx: the tokens' type, and the number of tokens."""
    start, size = _read_start(path, 34)
    known = len(start) == 34 and start[:17] == MEGATRON + (1).to_bytes(8, "little")
    check(known, path, "is no index of Megatron of version 1")
    dtype = MEGATRON_DTYPES.get(start[17])
    check(dtype, path, f"has the token type {start[17]}, and known are {', '.join(map(str, MEGATRON_DTYPES))}")
    n, n_bounds = np.frombuffer(start[18:], "<u8").tolist()
    _check_size(path, size, 34 + 12 * n + 8 * n_bounds)
    return np.dtype(dtype), int(np.fromfile(path, "<i4", n, offset=34).sum(dtype=np.int64))


def _read_start(path: Path, n: int) -> tuple[bytes, int]:
    """The first `n` bytes of a file, and its size in bytes."""
    with open(path, "rb", opener=open_regular) as f:
        return f.read(n), os.fstat(f.fileno()).st_size


def _check_size(path: Path, size: int, expected: int):
    fact = f"has {size} bytes, and its header or .idx gives {expected}, so it is truncated or too long"
    check(size == expected, path, fact)


def write_file(path: Path, content: bytes):
    """Writes a file atomically, and makes its folder; see new_file."""
    with new_file(path) as f:
        f.write(content)


@contextmanager
def new_file(path: Path, mark: bytes = b"") -> Iterator[BinaryIO]:
    """A file that is open for writing, and takes the place of `path` at the end; after an error it is gone. It is new
    and follows no link, and what a killed process has left goes. OSError, which names `path`, also at once. ValueError
    if a file would be replaced that has content without the bytes `mark`, which all files of its kind have."""
    temporary = path.with_name(f".tmp-{path.name[:200]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "Not a regular file")
        if mark and path.exists():
            with open(path, "rb") as old:
                check(mark in (old.read(2**24) or mark), path, "was not written by this command", "name another file")
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.strerror and error.filename in (None, str(temporary), str(path.parent)):  # not a message of ours
            error.filename = display_path(path)
        raise
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def fsync(path: Path):
    """Makes the bytes of a file, or the names in a folder, survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_FSYNC:
            raise
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", opener=open_regular) as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check(condition: object, path: Path, fact: str, remedy: str = ""):
    if not condition:
        raise problem(path, fact, remedy)


def check_own(own: bool, folder: Path, flag: str):
    """ValueError if a folder is not the `own` one of a command, and has a file of KINDS."""
    for file in sorted(folder.glob("*")):
        free = own or not re.fullmatch(KINDS, file.name)
        check(free, file, "was not written by this command", f"choose another --{flag}, or move it elsewhere")


def problem(path: Path, fact: str, remedy: str = "") -> ValueError:
    """A ValueError of one line: a data set's folder or a file in it, the fact, and the remedy."""
    script = (path if os.path.isdir(path) else path.parent) / "prepare.py"
    if not remedy:
        remedy = f"run python {display_path(script)}" if script.exists() else "copy or prepare it again"
    return ValueError(f"{display_path(path)} {fact}; {remedy}")


def user_path(path: str | Path) -> Path:
    """The path with the home folder in place of ~, which stays where there is none: Path.expanduser would raise."""
    return Path(os.path.expanduser(path))


def display_path(path: Path) -> str:
    """`path` as a user would type it in the current folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
