"""Commands for checkpoints.

python -m engine.checkpoint consolidate OUT_DIR FILE.safetensors [--which=best]      # the weights in one file
python -m engine.checkpoint convert OUT_DIR      # checkpoints of format 3, of an older version, to the present format
"""

import json
import shutil
import signal
from pathlib import Path

import torch
from torch import Tensor

from data.command import Parser
from data.errors import command, printable, require, user_errors
from data.files import amount
from engine.checkpoint import files as checkpoint
from engine.checkpoint.convert import convert


def main(argv: list[str] | None = None):
    with user_errors():
        parser = Parser(__doc__)
        parser.add_argument("command", choices=["consolidate", "convert"])
        parser.add_argument("out_dir", help="a training run, or one of its checkpoints")
        parser.add_argument("file", nargs="?", help="the file that consolidate writes, such as model.safetensors")
        parser.add_argument("--which", choices=("latest", "best"), help="checkpoint that consolidate reads")
        args = parser.parse_args(argv)
        if args.command == "convert":
            require(not args.file and not args.which, "convert takes OUT_DIR alone; it converts every checkpoint in it")
            for path in convert(args.out_dir):
                print(f"{printable(path)} has the present format now")
        else:
            require(args.file, "consolidate writes a file; name it after the folder, such as model.safetensors")
            path = consolidate(args.out_dir, args.file, args.which or "latest")
            print(f"{printable(args.file)}: the weights of {printable(path)}")


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
    command(main)
