"""Commands for checkpoints.

python -m engine.checkpoint consolidate OUT_DIR FILE.safetensors [--which=best]     writes the weights to one file
python -m engine.checkpoint convert OUT_DIR     gives checkpoints of an older version, of format 3, the present format
"""

import json
import shutil
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor

from data.files import amount
from engine.checkpoint import files as checkpoint
from engine.checkpoint.convert import convert
from engine.errors import command, user_errors

USAGE = (
    "usage: python -m engine.checkpoint consolidate OUT_DIR FILE.safetensors [--which=best]; "
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
        case ["convert", out_dir]:
            with user_errors():
                for path in convert(out_dir):
                    print(f"{path} has the present format now")
            return 0
        case ["-h"] | ["--help"]:
            print(USAGE)
            return 0
    with user_errors():
        raise ValueError(f"these arguments make no command: {' '.join(argv) or 'none'}; {USAGE}")


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
        index = checkpoint.read_index(path, state)
        specs = {name: saved for name, saved in index.items() if name.startswith("model.")}
        if not specs:
            raise ValueError(f"checkpoint {path} holds no weights; give the out_dir of a training run")
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype, _) in specs.items()}
        size, free = sum(t.nbytes for t in tensors.values()), shutil.disk_usage(file.parent).free
        if size > free:
            raise OSError(f"{file} needs {amount(size)} and its disk has {amount(free)}; make room")
        checkpoint.load(path, tensors, {}, index)
        return path, state, tensors

    path, state, tensors = checkpoint.read(out_dir, {"flags": dict}, weights, which)
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    for name in tensors.keys() & checkpoint.VOCAB_WEIGHTS:  # without the padding that tp needed
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


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # an exception, after which nothing half written stays
    command(lambda: sys.exit(main(sys.argv[1:])))
