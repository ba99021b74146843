"""One checkpoint: a directory with state.json, index.json and the file rank_N.safetensors of each rank.

state.json has everything except tensors, and the SHA-256 of index.json. index.json has for each tensor its dtype and
shape and a list of pieces. A piece is one rank's part of one tensor, a box in it: the file and the byte where the piece
starts, the offsets and sizes of the box, and the SHA-256 of its bytes.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.errors import require
from data.files import open_regular, read_file

FORMAT = 4  # of state.json, index.json and the names of parameters
STEP = re.compile(r"step_(\d{8,})")
MOST_SAMPLES = 2**40  # of one step, far above any real batch
LARGEST_STATE, LARGEST_INDEX = 2**26, 2**34  # bytes; the index of ten thousand ranks has fewer
DTYPES = {  # by the names of safetensors
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Damaged(ValueError):
    """A checkpoint is not complete. Another process may also have replaced or deleted it while it was read."""


class Part(NamedTuple):
    """One rank's part of a tensor: it lies at these offsets in the whole tensor, which has this shape."""

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


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


def damaged(path: Path, reason: object) -> Damaged:
    """The error for a damaged checkpoint. Its remedies lose no data."""
    if not path.is_dir():
        return Damaged(f"checkpoint {path} is gone, or not seen from here; look which one {path.parent} holds now")
    remedy = "bring it back from a copy, or train from the beginning in another --out_dir"
    others = [step for step in steps_in(path.parent) if step.name != path.name]
    if others and step_of(path) is not None:
        remedy = f"move this directory elsewhere to go on from {others[-1].name}, or bring it back from a copy"
    return Damaged(f"checkpoint {path} is damaged: {reason}; {remedy}")


@contextmanager
def damage_in(path: Path, file: str) -> Iterator[None]:
    """Replaces any error by Damaged, which names the file; what stands in it may be of a stranger."""
    try:
        yield
    except Exception as error:
        raise damaged(path, f"{file}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first line of the error's message, shortened, after the name of its class unless that is ValueError."""
    lines = str(error).strip().splitlines() or [""]
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return kind + lines[0][:200]


def step_of(path: Path) -> int | None:
    """The step in the name of a directory, such as step_00000010, or step_00000010.old while it is replaced; None for a
    directory with another kind of name."""
    match = STEP.fullmatch(path.absolute().name.removesuffix(".old"))
    return int(match[1]) if match else None


def steps_in(out_dir: Path) -> list[Path]:
    """The directories of complete steps, the oldest step first."""
    found = [path for path in out_dir.glob("step_*/") if STEP.fullmatch(path.name) and (path / "state.json").is_file()]
    return sorted(found, key=step_of)


def read_state(path: str | Path, kinds: dict[str, Any] | None = None) -> dict:
    """The state that was given to `save`, with "step", "format" and "index_sha256", the SHA-256 of index.json. `kinds`
    has the keys that the caller needs, and the type or types of each.

    Raises ValueError for another format. Raises Damaged if state.json is missing or is not JSON, if such a key is
    missing or impossible, or if the directory has the name of another step.
    """
    path, kinds = Path(path), {"format": int, "step": int} | (kinds or {})
    with damage_in(path, "state.json"):
        state = json.loads(read_file(path / "state.json", LARGEST_STATE))
        found = state["format"]
    if type(found) is int and found != FORMAT:
        remedy = "train again in another --out_dir, or use the version of this program that wrote it"
        if found > FORMAT:
            remedy = "update this program"
        raise ValueError(f"checkpoint {path} has format {found}, and this program reads format {FORMAT}; {remedy}")
    with damage_in(path, "state.json"):
        for key, kind in kinds.items():
            require(key in state, f"{key} is absent")
            require(_fits(state[key], kind), f"{key} is {state[key]!r:.60}")
        step = state["step"]
        require(step_of(path) in (None, step), f"step is {step}, and the directory has the name of {step_of(path)}")
        for key, least, most in (("skipped", 0, step), ("samples", step, step * MOST_SAMPLES)):
            if key in kinds:
                require(least <= state[key] <= most, f"{key} is {state[key]}, of {step} steps")
    return state


def _fits(value: Any, kind: Any) -> bool:
    """Whether the value has this type, or one of these types. An int must lie in 0 .. 2**62 - 1, so that counting can
    go on, and a float must be finite."""
    if type(value) not in (kind if isinstance(kind, tuple) else (kind,)):
        return False
    if type(value) is int:
        return 0 <= value < 2**62
    return type(value) is not float or math.isfinite(value)


def own_part(x: Tensor | Part) -> Part:
    """This rank's part of a tensor or DTensor, which shares its storage. A Part is returned as it is."""
    if isinstance(x, Part):
        return x
    x = x.detach()
    if not hasattr(x, "placements"):
        return Part(x, (0,) * x.dim(), tuple(x.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place

    return Part(x.to_local(), tuple(place(x.shape, x.device_mesh, x.placements)[1]), tuple(x.shape))


def write(file: Path, parts: dict[str, Part], metadata: dict[str, str] | None = None) -> dict[str, dict]:
    """Write a safetensors file so that it survives a power failure; returns what index.json has of each tensor."""
    header, entries, end = {"__metadata__": metadata} if metadata else {}, {}, 0
    # Large numbers first, so that every piece starts at a multiple of its numbers' size, as a reader that maps it needs
    names = sorted(parts, key=lambda name: (-parts[name].tensor.itemsize, name))
    for name in names:
        x, start = parts[name].tensor, end
        end += x.nbytes
        header[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with open(file, "wb") as f:
        f.write(len(content).to_bytes(8, "little") + content)
        for name in names:
            x, offsets, shape = parts[name]
            data, start = raw(x.cpu().contiguous()), f.tell()
            piece = Piece(file.name, start, list(offsets), list(x.shape), hashlib.sha256(data).hexdigest())
            f.write(data)
            entries[name] = {"dtype": NAMES[x.dtype], "shape": list(shape), "pieces": [piece._asdict()]}
        f.flush()
        os.fsync(f.fileno())
    return entries


def raw(x: Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor on the CPU, which share its memory."""
    return x.flatten().view(torch.uint8).numpy()


def read_index(path: Path, state: dict) -> dict[str, Saved]:
    """What the directory of a checkpoint with this state holds, by name. Raises Damaged unless every piece lies inside
    its tensor and in a file there that is long enough, and the sizes of a tensor's pieces add up to its size."""
    with damage_in(path, "index.json"):
        content = read_file(path / "index.json", LARGEST_INDEX)
        digest = hashlib.sha256(content).hexdigest()
        require(digest == state.get("index_sha256"), "it is not the one that was saved with state.json")
        sizes, index = {}, {}
        for name, entry in json.loads(content).items():
            shape, dtype, complete = tuple(entry["shape"]), DTYPES[entry["dtype"]], 0
            index[name] = Saved(shape, dtype, [Piece(**piece) for piece in entry["pieces"]])
            for file, start, offsets, box, _ in index[name].pieces:
                require(re.fullmatch(r"rank_\d+\.safetensors", file), f"file {file!r} is not a file of a checkpoint")
                if file not in sizes:
                    sizes[file] = (path / file).stat().st_size
                spans = list(zip(offsets, box, shape, strict=True))
                whole = all(type(n) is int and n >= 0 for span in [(start,), *spans] for n in span)
                require(whole, f"a piece of {name} has a place that is no whole number")
                end = start + math.prod(box) * dtype.itemsize
                require(end <= sizes[file], f"{file} is cut off after {sizes[file]} bytes")
                inside = all(offset + size <= most for offset, size, most in spans)
                complete += math.prod(box) if inside else -1
            require(complete == math.prod(shape), f"pieces of {name} are missing")
    return index


def fill(path: Path, name: str, saved: Saved, part: Part):
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
            here, there = (
                tuple(slice(start - begin, end - begin) for (start, end), begin in zip(spans, begins, strict=True))
                for begins in (part.offsets, piece.offsets)
            )
            part.tensor[here].copy_(source[there])
