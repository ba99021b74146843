"""Converts checkpoints of format 3 to the present format, without running code that they may hold.

Format 3 was that of torch.distributed.checkpoint (DCP): `.metadata`, a pickle with the place of each piece, and one
file of archives per rank. DCP would unpickle `.metadata` without checks. Here it is rebuilt from inert records, each
archive is loaded with weights_only=True, and every SHA-256 is compared before that.
"""

import hashlib
import json
import pickle
import re
import shutil
from collections import defaultdict
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from data.errors import require
from data.files import open_regular
from engine.checkpoint import files as checkpoint
from engine.checkpoint import pieces
from engine.checkpoint.folder import FolderLock
from engine.checkpoint.pieces import first_line
from engine.checkpoint.state import damaged, read_file


def convert(where: str) -> list[Path]:
    """Replace every checkpoint of format 3 in the folder of a run, or the one that `where` is; returns their paths.

    A kill at any instant leaves the old or the new checkpoint. Raises OSError or ValueError.
    """
    folder = Path(where).expanduser().absolute()
    alone = (folder / "state.json").is_file()
    found = []
    with FolderLock() as lock:
        lock.take(str(folder.parent if alone else folder), make=False)
        for path in [folder] if alone else sorted(folder.glob("[!.]*/")):
            with suppress(OSError, ValueError, RecursionError):
                state = json.loads(read_file(path / "state.json", 2**26))
                if type(state) is dict and state.get("format") == 3:
                    found.append((path, state))
        require(found, f"{where} holds no checkpoint of format 3, so nothing is converted; name another folder")
        for path, state in found:
            convert_step(path, state)
    return [path for path, _ in found]


def convert_step(path: Path, state: dict):
    """Replace the checkpoint, whose state.json holds `state`. The memory must hold what one rank has saved."""
    partial = path.with_name(f".tmp-{path.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        files = read_metadata(path, state.pop("metadata_sha256", None))
        written = [
            pieces.write(partial, f"rank_{rank}.safetensors", read_parts(path / name, files[name]))
            for rank, name in enumerate(sorted(files))
        ]
        checkpoint.complete(partial, written, state)
        checkpoint.replace(partial, path)
    except OSError:
        raise
    except Exception as error:  # whatever a stranger has written there
        raise damaged(path, first_line(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_metadata(path: Path, sha256: Any) -> dict[str, dict[str, tuple]]:
    """file -> name of a tensor -> (shape, offsets of the piece, its first byte, length and SHA-256). Raises ValueError.

    sha256  SHA-256 of .metadata, in hexadecimal
    """
    try:
        content = read_file(path / ".metadata", pieces.LARGEST_INDEX)
        require(sha256 == hashlib.sha256(content).hexdigest(), "it is not the one that was saved with state.json")
        top, files = _Unpickler(BytesIO(content)).load().state, defaultdict(dict)
        for index, info in top["storage_data"].items():
            name, file = index.state["fqn"], info.state["relative_path"]
            require(re.fullmatch(r"[\w-]+\.distcp", file), f"file {file!r} is not a file of a checkpoint")
            entry = top["state_dict_metadata"][name]
            require(type(entry).__name__ == "TensorStorageMetadata", f"entry {name} is no tensor")
            shape, place = entry.state["size"], (info.state["offset"], info.state["length"], info.state["sha256"])
            files[file][name] = shape, index.state.get("offset") or [0] * len(shape), *place
    except Exception as error:  # unpickling garbage can raise any error
        raise ValueError(f".metadata: {first_line(error)}") from error
    return files


def read_parts(file: Path, found: dict[str, tuple]) -> dict[str, tuple]:
    """The pieces in one file, as pieces.write takes them. Raises ValueError."""
    parts = {}
    for name, (shape, offsets, start, length, sha256) in found.items():
        try:
            with open(file, "rb", opener=open_regular) as f:
                f.seek(start)
                data = f.read(length)
            require(hashlib.sha256(data).digest() == sha256, "its bytes are not those that were saved")
            parts[name] = torch.load(BytesIO(data), map_location="cpu", weights_only=True).detach(), offsets, shape
        except Exception as error:  # a malicious archive can make torch.load raise any error
            raise ValueError(f"{file.name}: {name}: {first_line(error)}") from error
    return parts


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
