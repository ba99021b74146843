"""Commands for checkpoints.

python -m engine.checkpoint consolidate OUT_DIR FILE.safetensors [--which=best]      # the weights in one file
python -m engine.checkpoint convert OUT_DIR      # checkpoints of format 3, of an older version, to the present format
"""

import hashlib
import json
import math
import pickle
import re
import shutil
import signal
from collections import defaultdict
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.command import Parser
from data.errors import command, printable, require, user_errors
from data.files import amount, fsync, open_regular, read_file
from engine.checkpoint import contents
from engine.checkpoint import files as checkpoint
from engine.checkpoint.contents import Damaged, Part, damage_in, damaged, first_line, own_part
from engine.checkpoint.folder import locked


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
    Memory must hold the weights. Tied weights are written once, as wte.weight. The file's metadata has `format` (pt),
    `step`, and `flags` (the run's flags as JSON). After an OSError or ValueError there is no incomplete file."""
    file, single = Path(file), which == "best" and (Path(out_dir).expanduser() / "state.json").is_file()
    require(not single, f"--which=best needs the folder of a run, and {out_dir} is one checkpoint; leave --which out")
    if file.exists():
        raise FileExistsError(f"{file} is there already; delete it, or name another file")

    def weights(path: Path, state: dict) -> tuple[Path, dict, dict[str, Tensor]]:
        index, vocab_size = checkpoint.read_index(path, state), state["flags"].get("vocab_size", math.inf)
        tensors = {
            name: torch.empty(checkpoint.unpadded(name, shape, vocab_size), dtype=dtype)
            for name, (shape, dtype, _) in index.items()
            if name.startswith("model.")
        }
        require(tensors, f"checkpoint {path} holds no weights; give the out_dir of a training run")
        size, free = sum(t.nbytes for t in tensors.values()), shutil.disk_usage(file.parent).free
        if size > free:
            raise OSError(f"{file} needs {amount(size)} and its disk has {amount(free)}; make room")
        checkpoint.load(path, tensors, index, vocab_size)
        return path, state, tensors

    path, state, tensors = checkpoint.read(out_dir, {"flags": dict}, weights, which)
    metadata = {"format": "pt", "step": str(state["step"]), "flags": json.dumps(state["flags"])}
    partial = file.with_name(f".tmp-{file.name}")
    try:
        contents.write(partial, {name.removeprefix("model."): own_part(t) for name, t in tensors.items()}, metadata)
        partial.rename(file)
    except OSError as error:
        raise OSError(f"cannot write {file}: {error}; see to its folder and the room on its disk") from error
    finally:
        partial.unlink(missing_ok=True)
    fsync(file.parent)
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Format 3 was that of torch.distributed.checkpoint (DCP): `.metadata`, a pickle with the place of each piece, and one
# file of archives per rank. DCP would unpickle `.metadata` without checks. Here it is rebuilt from inert records, each
# archive is loaded with weights_only=True, and every SHA-256 is compared before that.


def convert(where: str) -> list[Path]:
    """Replace every checkpoint of format 3 in the folder of a run, or the one that `where` is; returns their paths. A
    kill at any instant leaves the old or the new checkpoint. Raises OSError or ValueError."""
    folder, found = Path(where).expanduser().absolute(), {}
    alone = (folder / "state.json").is_file()
    with locked(str(folder.parent if alone else folder), make=False):
        for path in [folder] if alone else sorted(folder.glob("[!.]*/")):
            with suppress(OSError, ValueError, RecursionError):
                state = json.loads(read_file(path / "state.json", contents.LARGEST_STATE))
                if type(state) is dict and state.get("format") == 3:
                    found[path] = state
        require(found, f"{where} holds no checkpoint of format 3, so nothing is converted; name another folder")
        for path, state in found.items():
            convert_step(path, state)
    return list(found)


def convert_step(path: Path, state: dict):
    """Replace the checkpoint, whose state.json holds `state`. The memory must hold what one rank has saved."""
    partial = path.with_name(f".tmp-{path.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        files = read_metadata(path, state.pop("metadata_sha256", None))
        written = []
        for rank, (file, pieces) in enumerate(sorted(files.items())):
            new = partial / f"rank_{rank}.safetensors"
            written += [contents.write(new, {name: read_part(path, file, name, *at) for name, at in pieces.items()})]
        checkpoint.complete(path, written, state)
    except (OSError, Damaged):
        raise
    except Exception as error:  # whatever a stranger has written there
        raise damaged(path, first_line(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_metadata(path: Path, sha256: Any) -> dict[str, dict[str, tuple]]:
    """file -> name of a tensor -> (shape, offsets of the piece, its first byte, length and SHA-256). Raises Damaged
    unless `sha256`, in hexadecimal, is that of .metadata."""
    with damage_in(path, ".metadata"):
        content = read_file(path / ".metadata", contents.LARGEST_INDEX)
        require(sha256 == hashlib.sha256(content).hexdigest(), "it is not the one that was saved with state.json")
        top, files = _Unpickler(BytesIO(content)).load().state, defaultdict(dict)
        for index, info in top["storage_data"].items():
            name, file = index.state["fqn"], info.state["relative_path"]
            require(re.fullmatch(r"[\w-]+\.distcp", file), f"file {file!r} is not a file of a checkpoint")
            entry = top["state_dict_metadata"][name]
            require(type(entry).__name__ == "TensorStorageMetadata", f"entry {name} is no tensor")
            shape, place = entry.state["size"], (info.state["offset"], info.state["length"], info.state["sha256"])
            files[file][name] = shape, index.state.get("offset") or [0] * len(shape), *place
    return files


def read_part(path: Path, file: str, name: str, shape: Any, offsets: Any, start: int, length: int, sha256: Any) -> Part:
    """One piece of the tensor `name`. Raises Damaged."""
    with damage_in(path, f"{file}: {name}"), open(path / file, "rb", opener=open_regular) as f:
        f.seek(start)
        data = f.read(length)
        require(hashlib.sha256(data).digest() == sha256, "its bytes are not those that were saved")
        return Part(torch.load(BytesIO(data), map_location="cpu", weights_only=True).detach(), offsets, shape)


class _Record:
    """Replaces every class and function that the metadata names. It keeps the fields and runs nothing."""

    def __init__(self, *args: Any):
        pass

    def __setstate__(self, state: Any):
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name == "Size":
            return tuple
        return type(name, (_Record,), {})


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # an exception, after which nothing half written stays
    command(main)
