"""The tensors of a checkpoint: every rank writes its pieces to a safetensors file, and index.json lists all of them.

A piece is one rank's part of one tensor, a box in it. index.json has for each tensor its dtype and shape and a list of
pieces: the file and the byte where the piece starts, the offsets and sizes of its box, and the SHA-256 of its bytes.

    entries = write(step_dir, "rank_0.safetensors", {"model.w": (part, (4, 0), (8, 3))})     part, offsets, global shape
    index = read_index(step_dir, sha256)
    fill(step_dir, "model.w", index["model.w"], part, offsets)
"""

import hashlib
import json
import os
import re
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.files import open_regular
from engine.checkpoint.state import read_file

LARGEST_INDEX = 2**34  # bytes, enough for the pieces of ten thousand ranks
DTYPES = {  # by the names of safetensors
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Piece(NamedTuple):
    file: str
    start: int
    offsets: list[int]
    sizes: list[int]
    sha256: str


class Saved(NamedTuple):
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece]


def write(folder: Path, file: str, parts: dict[str, tuple[Tensor, tuple, tuple]]) -> dict[str, dict]:
    """Write a safetensors file so that it survives a power failure; returns what index.json has of each tensor.

    parts   name -> (this rank's part, its offsets in the whole tensor, the shape of the whole tensor)
    """
    header, entries, end = {}, {}, 0
    # Large numbers first, so that every piece starts at a multiple of its numbers' size, as a reader that maps it needs
    for name, (part, _, _) in sorted(parts.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        header[name] = {"dtype": NAMES[part.dtype], "shape": list(part.shape), "data_offsets": [end, end + part.nbytes]}
        end += part.nbytes
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with open(folder / file, "wb") as f:
        f.write(len(content).to_bytes(8, "little") + content)
        for name in header:
            part, offsets, shape = parts[name]
            data, start = raw(part.cpu().contiguous()), f.tell()
            piece = Piece(file, start, list(offsets), list(part.shape), hashlib.sha256(data).hexdigest())
            f.write(data)
            entries[name] = {"dtype": NAMES[part.dtype], "shape": list(shape), "pieces": [piece._asdict()]}
        f.flush()
        os.fsync(f.fileno())
    return entries


def own_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """(this rank's part of a tensor or DTensor, which shares its storage; the part's offsets)."""
    x = tensor.detach()
    if not hasattr(x, "placements"):
        return x, (0,) * x.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place

    return x.to_local(), tuple(place(x.shape, x.device_mesh, x.placements)[1])


def raw(x: Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor on the CPU, which share its memory."""
    return x.flatten().view(torch.uint8).numpy()


def merged(entries_of_ranks: list[dict[str, dict]]) -> dict[str, dict]:
    """The content of index.json from what `write` has returned on each rank."""
    index = {}
    for entries in entries_of_ranks:
        for name, entry in entries.items():
            index.setdefault(name, entry | {"pieces": []})["pieces"] += entry["pieces"]
    return index


def read_index(folder: Path, sha256: str) -> dict[str, Saved]:
    """What the directory of a checkpoint holds, by name, checked against the files there. Raises ValueError.

    The checks: every piece lies inside its tensor and in a file of this directory that is long enough, and the sizes of
    a tensor's pieces add up to its size.

    sha256  SHA-256 of index.json, in hexadecimal
    """
    try:
        content = read_file(folder / "index.json", LARGEST_INDEX)
        if sha256 != hashlib.sha256(content).hexdigest():
            raise ValueError("it is not the one that was saved with state.json")
        sizes, index = {}, {}
        for name, entry in json.loads(content).items():
            shape, dtype, complete = tuple(entry["shape"]), DTYPES[entry["dtype"]], 0
            index[name] = Saved(shape, dtype, [Piece(**piece) for piece in entry["pieces"]])
            for file, start, offsets, box, _ in index[name].pieces:
                if not re.fullmatch(r"rank_\d+\.safetensors", file):
                    raise ValueError(f"file {file!r} is not a file of a checkpoint")
                if file not in sizes:
                    sizes[file] = (folder / file).stat().st_size
                spans = list(zip(offsets, box, shape, strict=True))
                if not all(type(n) is int and n >= 0 for span in [(start,), *spans] for n in span):
                    raise ValueError(f"a piece of {name} has a place that is no whole number")
                if start + prod(box) * dtype.itemsize > sizes[file]:
                    raise ValueError(f"{file} is cut off after {sizes[file]} bytes")
                complete += prod(box) if all(offset + size <= whole for offset, size, whole in spans) else -1
            if complete != prod(shape):
                raise ValueError(f"pieces of {name} are missing")
    except Exception as error:  # whatever stands in the file: it may be of a stranger
        raise ValueError(f"index.json: {first_line(error)}") from error
    return index


def fill(folder: Path, name: str, saved: Saved, part: Tensor, offsets: tuple[int, ...]):
    """Copy into `part`, which lies at these offsets in the whole tensor, what the pieces have of it, in place.

    Raises ValueError that names the file if it is not the one that was saved.
    """
    for piece in saved.pieces:
        spans = [
            (max(a, b), min(a + n, b + m))
            for a, n, b, m in zip(offsets, part.shape, piece.offsets, piece.sizes, strict=True)
        ]
        if all(start < end for start, end in spans):
            try:
                source = read_piece(folder, piece, saved.dtype)
            except (OSError, ValueError) as error:
                raise ValueError(f"{piece.file}: {name}: {first_line(error)}") from error
            here, there = (
                tuple(slice(start - begin, end - begin) for (start, end), begin in zip(spans, begins, strict=True))
                for begins in (offsets, piece.offsets)
            )
            part[here].copy_(source[there])


def read_piece(folder: Path, piece: Piece, dtype: torch.dtype) -> Tensor:
    """One piece, verified. Raises ValueError or OSError."""
    tensor = torch.empty(piece.sizes, dtype=dtype)
    with open(folder / piece.file, "rb", opener=open_regular) as file:
        file.seek(piece.start)
        file.readinto(raw(tensor))
    if hashlib.sha256(raw(tensor)).hexdigest() != piece.sha256:
        raise ValueError("its bytes are not those that were saved")
    return tensor


def first_line(error: BaseException) -> str:
    """The first line of the error's message, shortened, after the name of its class unless that is ValueError."""
    lines = str(error).strip().splitlines() or [""]
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return kind + lines[0][:200]
