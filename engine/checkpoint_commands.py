"""Commands for checkpoints.

    python -m engine.checkpoint consolidate OUT_DIR FILE.safetensors [--which=best]     writes the weights to one file
    python -m engine.checkpoint convert OUT_DIR                                         converts format 1 to format 2

Format 1 had no SHA-256 of each piece.
"""

import hashlib
import json
import math
import os
import shutil
import sys
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from torch import Tensor

from engine import checkpoint
from engine.errors import user_errors
from engine.folder import FolderLock
from model import VOCAB_WEIGHTS

USAGE = (
    "usage: python -m engine.checkpoint consolidate OUT_DIR FILE.safetensors [--which=best], or "
    "python -m engine.checkpoint convert OUT_DIR"
)


def main(argv: list[str]) -> int:
    """Run the command that these arguments make; returns the exit code."""
    match sorted(argv, key=lambda arg: arg.startswith("--")):  # flags last
        case ["consolidate", out_dir, file, *flags] if flags in ([], ["--which=latest"], ["--which=best"]):
            with user_errors():
                path = consolidate(out_dir, file, *(flag.removeprefix("--which=") for flag in flags))
                print(f"{file}: the weights of {path}")
            return 0
        case ["convert", where]:
            with user_errors(), FolderLock() as lock:
                path = Path(os.path.expanduser(where))
                is_step = (path / "state.json").is_file()
                lock.take(path.absolute().parent if is_step else where, make=False)
                converted = convert(where)
                for path in converted:
                    print(f"{path}: now of format {checkpoint.FORMAT}")
                if not converted:
                    print(f"{where}: was of format {checkpoint.FORMAT} already")
            return 0
        case ["-h"] | ["--help"]:
            print(USAGE)
            return 0
    print(f"error: these arguments make no command: {' '.join(argv) or 'none'}; {USAGE}", file=sys.stderr)
    return 2


def consolidate(out_dir: str | Path, file: str | Path, which: str = "latest") -> Path:
    """Write the model's weights to one safetensors file, from any number of ranks; returns the checkpoint's path.

    One process calls it, and its memory must hold the weights. The names are those of the model's parameters. Tied
    weights are written once, as wte.weight and not as head.weight. The file's metadata has `format` (pt), `step`, and
    `flags` (the run's flags as JSON). Raises OSError or ValueError, and leaves no incomplete file then.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise ValueError("safetensors is not installed; pip install safetensors, or pip install -e .") from error
    file = Path(file)
    if file.exists():
        raise FileExistsError(f"{file} is there already; delete it, or name another file")

    def weights(path: Path, state: dict) -> tuple[Path, dict, dict[str, Tensor]]:
        specs = {name: spec for name, spec in checkpoint.shapes(path).items() if name.startswith("model.")}
        if not specs:
            raise ValueError(f"checkpoint {path} holds no weights; give the out_dir of a training run")
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in specs.items()}
        size, free = sum(t.nbytes for t in tensors.values()), shutil.disk_usage(file.parent).free
        if size > free:
            raise OSError(f"{file} needs {size / 1e6:,.0f} MB and its disk has {free / 1e6:,.0f}; make room")
        checkpoint.load(path, tensors)
        return path, state, tensors

    path, state, tensors = checkpoint.read(out_dir, {"flags": dict}, weights, which)
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    for name in tensors.keys() & VOCAB_WEIGHTS:  # without the padding that tp needed
        tensors[name] = tensors[name][: state["flags"]["vocab_size"]]
    partial = file.with_name(f".tmp-{file.name}")
    try:
        metadata = {"format": "pt", "step": str(state["step"]), "flags": json.dumps(state["flags"])}
        partial.touch()
        mode = partial.stat().st_mode
        save_file(tensors, partial, metadata)
        partial.chmod(mode)  # safetensors makes a file that other users cannot read
        checkpoint.fsync(partial)
        partial.rename(file)
    except (OSError, SafetensorError) as error:
        raise OSError(f"cannot write {file}: {error}; see to its folder and the room on its disk") from error
    finally:
        partial.unlink(missing_ok=True)
    checkpoint.fsync(file.parent)
    return path


def convert(where: str | Path) -> list[Path]:
    """Convert all steps of an out_dir, or one step directory; returns the directories that had format 1.

    No run may save there meanwhile, so the command takes the folder's lock. If a step cannot be converted, it stays
    unchanged and the other steps are converted; then the OSError or ValueError of the first such step is raised.
    """
    found = checkpoint.find(where)
    where = Path(os.path.expanduser(where))
    steps = [where] if found == where else [path for path in where.iterdir() if checkpoint.step_of(path) is not None]
    converted, failures = [], []
    for path in sorted(steps):
        try:
            if _convert(path):
                converted.append(path)
        except (OSError, ValueError) as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return converted


def _convert(path: Path) -> bool:
    """Convert one step directory; returns whether it had format 1.

    The files of tensors stay unchanged. First .metadata is replaced, with content that is also valid in format 1, and
    then state.json. So a kill at any instant leaves a valid checkpoint of one of the formats.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex

    from engine.dcp_reader import read_metadata
    from engine.dcp_writer import dump_metadata

    state = checkpoint.read_state(path, formats=(1, checkpoint.FORMAT))
    if state["format"] == checkpoint.FORMAT:
        return False
    try:
        metadata = read_metadata(path, None)
        for name, entry in metadata.state_dict_metadata.items():
            for box in entry.chunks:
                piece = metadata.storage_data[MetadataIndex(name, box.offsets)]
                piece.sha256 = _digest(path, name, piece, tuple(box.sizes), entry.properties.dtype)
    except ValueError as error:
        raise checkpoint.damaged(path, error) from error
    content = dump_metadata(metadata)
    best = state.get("best_val_loss")
    if isinstance(best, float) and not math.isfinite(best):  # which was allowed in format 1
        state["best_val_loss"] = None
    state |= {"format": checkpoint.FORMAT, "metadata_sha256": hashlib.sha256(content).hexdigest()}
    for name, text in ((".metadata", content), ("state.json", json.dumps(state, indent=1).encode())):
        checkpoint.write(path / f".tmp-{name}", text)
        os.replace(path / f".tmp-{name}", path / name)
        checkpoint.fsync(path)
    return True


def _digest(path: Path, name: str, piece: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """SHA-256 of a piece, after the checks that are possible in format 1: the archive's checksums, shape and dtype."""
    from engine.dcp_reader import first_line

    try:
        with open(path / piece.relative_path, "rb") as file:
            file.seek(piece.offset)
            data = file.read(piece.length)
        if ZipFile(BytesIO(data)).testzip():
            raise ValueError("wrong checksum")
        tensor = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise ValueError(f"it holds {tuple(tensor.shape)} {tensor.dtype}")
    except Exception as error:  # a damaged archive can make zipfile and torch.load raise nearly anything
        raise ValueError(f"{piece.relative_path}: {name}: {first_line(error)}") from error
    return hashlib.sha256(data).digest()
