"""Writes the weights of a training run, or of one of its checkpoints, to one safetensors file.

python -m engine.checkpoint consolidate OUT_DIR FILE [--which=best]         # FILE is such as model.safetensors
"""

import json
import math
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from configurator import parse_positional
from data.errors import command, printable, require, user_errors
from data.files import fsync
from engine.checkpoint import contents
from engine.checkpoint import files as checkpoint
from engine.checkpoint.contents import own_part


@dataclass
class ConsolidateConfig:
    """The flags of consolidate."""

    # --- checkpoint
    which: Literal["latest", "best"] = "latest"  # which checkpoint of the run


def main(argv: list[str] | None = None):
    with user_errors():
        (_, out_dir, file), options = parse_positional(ConsolidateConfig, "consolidate OUT_DIR FILE", argv, __doc__)
        path = consolidate(out_dir, file, options.which)
        print(f"{printable(file)}: the weights of {printable(path)}")


def consolidate(out_dir: str | Path, file: str | Path, which: str = "latest") -> Path:
    """Write the model's weights to one safetensors file, from any number of ranks; returns the checkpoint's path.
    Memory must hold the weights. Tied weights are written once, as wte.weight. The file's metadata has `format` (pt),
    `step`, and `flags` (the run's flags as JSON). After an OSError or ValueError there is no incomplete file."""
    file = Path(file)
    if file.exists():
        raise FileExistsError(f"{file} is there already; delete it, or name another file")
    path, state, weights = checkpoint.read(out_dir, {"flags": dict}, read_weights, which)
    metadata = {"format": "pt", "step": str(state["step"]), "flags": json.dumps(state["flags"])}
    partial = file.with_name(f".tmp-{file.name}")
    try:
        contents.write(partial, {name.removeprefix("model."): own_part(t) for name, t in weights.items()}, metadata)
        partial.rename(file)
    except OSError as error:
        raise OSError(f"cannot write {file}: {error}; see to its folder and the room on its disk") from error
    finally:
        partial.unlink(missing_ok=True)
    fsync(file.parent)
    return path


def read_weights(path: Path, state: dict) -> tuple[Path, dict, dict[str, Tensor]]:
    """(path, state, the weights of this checkpoint without the padding that tp needed)."""
    index = checkpoint.read_index(path, state)
    vocab_size = state["flags"].get("vocab_size", math.inf)
    weights = {}
    for name, saved in index.items():
        if name.startswith("model."):
            weights[name] = torch.empty(checkpoint.unpadded(name, saved.shape, vocab_size), dtype=saved.dtype)
    require(weights, f"checkpoint {path} holds no weights; give the out_dir of a training run")
    checkpoint.load(path, weights, index, vocab_size)
    return path, state, weights


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # an exception, after which nothing half written stays
    command(main)
