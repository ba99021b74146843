"""One checkpoint: a directory with state.json, index.json and the file rank_N.safetensors of each rank.

state.json has everything except tensors, see STATE. index.json has for each tensor its dtype and shape and a list of
pieces. A piece is a box, one rank's part of a tensor: its file and first byte, offsets, sizes, and SHA-256.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.errors import reason, require
from data.files import open_regular, read_file
from engine.parallel.layout import Slice
from engine.retired import translated

FORMAT = 4  # of state.json, index.json and the names of parameters
STEP = re.compile(r"step_\d{8,}")
SCALER = {
    "scale": float, "growth_factor": float, "backoff_factor": float, "growth_interval": int, "_growth_tracker": int,
}  # fmt: skip
STATE = {  # what state.json has -> its type, several types, [the type of all items] or {key: type}, which may be empty
    "step": int, "samples": int, "skipped": int, "ranks": int, "norms": [float], "best_val_loss": (float, NoneType),
    "best_step": int,  # whose loss that is; 0 = one without a checkpoint, or not known
    "flags": dict, "scaler": SCALER, "tokenizer": (dict, NoneType), "tokenizer_hash": (str, NoneType),
    "index_sha256": str,  # of index.json
    # Sources are as now since this sample; samples read and weight of each, and hashes of their shards, also of val
    "data": {"since": int, "read": [int], "weights": [int], "hashes": [str], "val": [str]},
}  # fmt: skip
LARGEST_STATE = 2**26  # bytes
LARGEST_INDEX = 2**34  # bytes; that of ten thousand ranks has fewer
DTYPES = {  # by the names of safetensors
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Damaged(ValueError):
    """A checkpoint is not complete. Another process may also have replaced or deleted it while it was read."""


class Piece(NamedTuple):
    """A part that is in a file."""

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


@contextmanager
def damage_in(path: Path, file: str) -> Iterator[None]:
    """Replaces any error by Damaged, which names the file; what is in it may be a stranger's. No remedy loses data."""
    try:
        yield
    except Exception as error:
        text = f"checkpoint {path} is gone, or not seen from here; look which one {path.parent} holds now"
        if path.is_dir():
            remedy = f"bring it back from a copy, or move it out of {path.parent} to go on from the one before it"
            kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
            text = f"checkpoint {path} is damaged: {file}: {kind}{reason(error)}; {remedy}"
        raise Damaged(text) from error


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step in the name of a directory, such as step_00000010."""
    return int(path.name[5:])


def steps_in(out_dir: Path) -> list[Path]:
    """The directories of complete steps, the oldest step first."""
    found = [path for path in out_dir.glob("step_*/") if STEP.fullmatch(path.name) and (path / "state.json").is_file()]
    return sorted(found, key=step_of)


def read_state(path: Path) -> dict:
    """The state that was given to `save`, with "step", "format" and "index_sha256". ValueError for another format.
    Damaged if state.json is missing or no JSON, or if a key of STATE is missing or impossible."""
    with damage_in(path, "state.json"):
        state = json.loads(read_file(path / "state.json", LARGEST_STATE))
        found = state["format"]
        require(type(found) is int, f"format is {found!r:.60}")
    if found != FORMAT:
        remedy = "use the version of this program that wrote it, or train again in another --out_dir"
        raise ValueError(f"checkpoint {path} has format {found}, and this program reads format {FORMAT}; {remedy}")
    state = {"norms": [], "data": {}, "best_step": 0} | state  # keys that are newer than format 4 have defaults
    with damage_in(path, "state.json"):
        for key, kind in STATE.items():
            require(key in state, f"{key} is absent")
            require(_fits(state[key], kind), f"{key} is {state[key]!r:.60}")
        data = state["data"]
        lengths = {len(data.get(key, [])) for key in ("read", "weights", "hashes")}
        require(len(lengths) == 1, f"data is {data!r:.60}")
    state["flags"] = translated(state["flags"])
    return state


def _fits(value: Any, kind: Any) -> bool:
    """Whether the value is of a kind of STATE. Numbers are finite and not negative, an int is below 2**43, so that
    counting and seeds made of it can go on."""
    if type(kind) is list:
        return type(value) is list and all(_fits(item, kind[0]) for item in value)
    if type(kind) is dict:
        known = type(value) is dict and value.keys() in (set(), kind.keys())
        return known and all(_fits(item, kind[key]) for key, item in value.items())
    if type(value) is int:
        return kind is int and 0 <= value < 2**43
    if type(value) is float:
        return isinstance(value, kind) and 0 <= value < math.inf
    return type(value) is not bool and isinstance(value, kind)


def own_part(x: Tensor | Slice) -> Slice:
    """A Slice as it is, or a whole tensor as one, which shares its storage."""
    if isinstance(x, Slice):
        return x
    return Slice(x.detach(), (0,) * x.dim(), tuple(x.shape))


def write(file: Path, parts: dict[str, Slice], metadata: dict[str, str] | None = None) -> dict[str, dict]:
    """Write a safetensors file so that it survives a power failure; returns what index.json has of each tensor."""
    header = {"__metadata__": metadata} if metadata else {}
    # Large numbers first, so that every piece starts at a multiple of its numbers' size, as a reader that maps it needs
    names = sorted(parts, key=lambda name: (-parts[name].tensor.itemsize, name))
    end = 0
    for name in names:
        x = parts[name].tensor
        header[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [end, end + x.nbytes]}
        end += x.nbytes
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    entries = {}
    with open(file, "wb") as f:
        f.write(len(content).to_bytes(8, "little") + content)
        for name in names:
            x, offsets, shape = parts[name]
            data = raw(x.cpu().contiguous())
            piece = Piece(file.name, f.tell(), list(offsets), list(x.shape), hashlib.sha256(data).hexdigest())
            f.write(data)
            entries[name] = {"dtype": NAMES[x.dtype], "shape": list(shape), "pieces": [piece._asdict()]}
        f.flush()
        os.fsync(f.fileno())
    return entries


def finite(x: Tensor) -> bool:
    """Whether all numbers are finite. Needs no memory; one NaN makes both ends NaN."""
    return x.numel() == 0 or all(end.isfinite() for end in x.aminmax())


def raw(x: Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor on the CPU, which share its memory."""
    return x.flatten().view(torch.uint8).numpy()


def read_index(path: Path, state: dict) -> dict[str, Saved]:
    """What the directory of a checkpoint with this state holds, by name. Raises Damaged unless every piece lies inside
    its tensor and its file, and the sizes of a tensor's pieces add up to its size."""
    with damage_in(path, "index.json"):
        content = read_file(path / "index.json", LARGEST_INDEX)
        digest = hashlib.sha256(content).hexdigest()
        require(digest == state["index_sha256"], "it is not the one that was saved with state.json")
        sizes = {file.name: file.stat().st_size for file in path.glob("rank_*.safetensors")}
        return {name: _saved(name, entry, sizes) for name, entry in json.loads(content).items()}


def _saved(name: str, entry: dict, sizes: dict[str, int]) -> Saved:
    """An entry of index.json; `sizes` are those of the files beside it, by name."""
    saved = Saved(tuple(entry["shape"]), DTYPES[entry["dtype"]], [Piece(**piece) for piece in entry["pieces"]])
    for piece in saved.pieces:
        numbers = [piece.start, *piece.offsets, *piece.sizes]
        require(all(type(n) is int and n >= 0 for n in numbers), f"a piece of {name} has no whole numbers")
        require(piece.file in sizes, f"there is no file {piece.file!r:.60} of ranks")
        end = piece.start + math.prod(piece.sizes) * saved.dtype.itemsize
        require(end <= sizes[piece.file], f"{piece.file} is cut off after {sizes[piece.file]} bytes")
        for offset, size, whole in zip(piece.offsets, piece.sizes, saved.shape, strict=True):
            require(offset + size <= whole, f"a piece of {name} lies outside of it")
    complete = sum(math.prod(piece.sizes) for piece in saved.pieces)
    require(complete == math.prod(saved.shape), f"pieces of {name} are missing")
    return saved


def divide(index: dict[str, Saved], asked: list[dict[str, tuple]]) -> list[dict[str, Saved]]:
    """What each rank needs of the index: pieces that overlap the parts, (offsets, sizes), that it asks for by name."""
    found: list[dict[str, Saved]] = [{} for _ in asked]
    for name, saved in index.items():
        pieces = {(tuple(each.offsets), tuple(each.sizes)): [each] for each in saved.pieces}  # of each part
        there = np.array([(each.offsets, each.sizes) for each in saved.pieces]).T  # (dimensions, 2, pieces)
        for part in {parts[name] for parts in asked if name in parts} - pieces.keys():  # those of another layout
            overlap = np.ones(len(saved.pieces), dtype=bool)
            for a, n, (b, m) in zip(*part, there, strict=False):  # `load` refuses other numbers of dimensions
                overlap &= (a < b + m) & (b < a + n)
            pieces[part] = [saved.pieces[i] for i in overlap.nonzero()[0]]
        for parts, needed in zip(asked, found, strict=True):
            if name in parts:
                needed[name] = saved._replace(pieces=pieces[parts[name]])
    return found


def fill(path: Path, name: str, saved: Saved, part: Slice):
    """Copy into a part, in place, what the pieces of the saved tensor `name` have of it. Raises Damaged if a piece that
    is read is not the one that was saved."""
    for piece in saved.pieces:
        places = zip(part.offsets, part.tensor.shape, piece.offsets, piece.sizes, strict=True)
        spans = [(max(a, b), min(a + n, b + m)) for a, n, b, m in places]  # of the tensor, which both have
        if all(start < end for start, end in spans):
            source = torch.empty(piece.sizes, dtype=saved.dtype)
            with damage_in(path, f"{piece.file}: {name}"), open(path / piece.file, "rb", opener=open_regular) as f:
                f.seek(piece.start)
                f.readinto(raw(source))
                same = hashlib.sha256(raw(source)).hexdigest() == piece.sha256
                require(same, "its bytes are not those that were saved")
            part.tensor[_box(spans, part.offsets)].copy_(source[_box(spans, piece.offsets)])


def _box(spans: list[tuple[int, int]], offsets: tuple[int, ...] | list[int]) -> tuple[slice, ...]:
    """These spans of a tensor, as slices of a part that begins at the offsets."""
    return tuple(slice(start - offset, end - offset) for (start, end), offset in zip(spans, offsets, strict=True))
