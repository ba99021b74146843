"""Reads checkpoints of torch.distributed.checkpoint (DCP) without running any code that a file may hold.

DCP's own reader unpickles `.metadata` without checks, and loads entries that are no tensors with weights_only=False, so
an untrusted checkpoint can run any code. This reader rebuilds the metadata from inert records, refuses entries that are
no tensors, and loads each tensor with weights_only=True. It compares the SHA-256 of each shard with the metadata, and
the SHA-256 of the metadata with state.json, so it never reads a file of another checkpoint.

Import this module only where it is needed: it imports DCP, which takes a second.
"""

import hashlib
import pickle
import re
from functools import cache
from io import BytesIO
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from data.files import open_regular

# All names that a .metadata file may refer to, besides torch.Size and the dtypes (pathlib._local: Python 3.13).
KNOWN_NAMES = {
    "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata TensorProperties ChunkStorageMetadata"
    " BytesStorageMetadata MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "pathlib": "PosixPath WindowsPath",
    "pathlib._local": "PosixPath WindowsPath",
}


class SafeReader(FileSystemReader):
    """Reads tensors for DCP, given metadata that `read_metadata` has checked. Raises ValueError naming the file."""

    def __init__(self, path: Path, metadata: Metadata):
        super().__init__(path)
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan, planner):
        for item in plan.items:
            shard = self.storage_data[item.storage_index]
            try:
                with open(self.path / shard.relative_path, "rb") as file:
                    file.seek(shard.offset)
                    data = file.read(shard.length)
                if hashlib.sha256(data).digest() != shard.sha256:
                    raise ValueError("its bytes are not those that were saved")
                _copy(data, item, planner.resolve_tensor(item).detach())
            except Exception as error:  # a malicious archive can make torch.load raise any error
                raise ValueError(f"{shard.relative_path}: {item.storage_index.fqn}: {first_line(error)}") from error
        done = torch.futures.Future()
        done.set_result(None)
        return done


def _copy(data: bytes, item: Any, target: Tensor) -> None:
    """Copy the part of a saved shard that DCP's ReadItem `item` names into `target`, which has the part's shape."""
    shard = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        shard = shard.narrow(dim, offset, length)
    if (shard.shape, shard.dtype) != (target.shape, target.dtype):  # copy_ would broadcast and convert
        raise ValueError(f"it holds {tuple(shard.shape)} {shard.dtype}")
    target.copy_(shard)


class _Record:
    """Replaces every class that the metadata names. It keeps the fields and runs nothing."""

    def __init__(self, *args: Any):
        pass

    def __setstate__(self, state: Any):
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch", "Size"):
            return tuple
        if name in KNOWN_NAMES.get(module, "").split():
            return type(name, (_Record,), {})
        raise ValueError(f"it refers to {module}.{name}, which no checkpoint needs")


def read_metadata(path: Path, sha256: str) -> Metadata:
    """The table of tensors in the checkpoint directory, checked against the files there. Raises ValueError.

    The checks: every shard lies inside its tensor and in a file of this directory that is long enough, and the sizes of
    a tensor's shards add up to its size.

    sha256  SHA-256 of .metadata, in hexadecimal
    """
    try:
        with open(path / ".metadata", "rb", opener=open_regular) as f:
            content = f.read()
        if sha256 != hashlib.sha256(content).hexdigest():
            raise ValueError("it is not the one that was saved with state.json")
        top = _Unpickler(BytesIO(content)).load().state
        size = cache(lambda name: (path / name).stat().st_size)
        shards, tensors = {}, {}
        for index, info in top["storage_data"].items():
            name, offset, length = (info.state[field] for field in ("relative_path", "offset", "length"))
            if not re.fullmatch(r"[\w-]+\.distcp", name) or info.state.get("transform_descriptors"):
                raise ValueError(f"file {name!r} is not a file of a checkpoint")
            if not 0 <= offset <= offset + length <= size(name):
                raise ValueError(f"{name} is cut off after {size(name)} bytes")
            key = MetadataIndex(index.state["fqn"], index.state.get("offset"))
            digest = info.state.get("sha256")
            shards[key] = SimpleNamespace(relative_path=name, offset=offset, length=length, sha256=digest)
        for name, entry in top["state_dict_metadata"].items():
            if type(entry).__name__ != "TensorStorageMetadata":
                raise ValueError(f"entry {name} is no tensor")
            shape, dtype = torch.Size(entry.state["size"]), entry.state["properties"].state[0]
            boxes = [
                (torch.Size(box.state["offsets"]), torch.Size(box.state["sizes"])) for box in entry.state["chunks"]
            ]
            complete = isinstance(dtype, torch.dtype) and sum(prod(sizes) for _, sizes in boxes) == prod(shape)
            for offsets, sizes in boxes:
                spans = zip(offsets, sizes, shape, strict=True)
                complete &= all(0 <= start <= start + size <= end for start, size, end in spans)
                complete &= MetadataIndex(name, offsets) in shards
            if not complete:
                raise ValueError(f"shards of {name} are missing")
            chunks = [ChunkStorageMetadata(*box) for box in boxes]
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, chunks)
    except Exception as error:  # unpickling garbage can raise any error
        raise ValueError(f".metadata: {first_line(error)}") from error
    return Metadata(tensors, storage_data=shards)


def first_line(error: BaseException) -> str:
    """The first line of the error's message, shortened, after the name of its class unless that is ValueError."""
    lines = str(error).strip().splitlines() or [""]
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return kind + lines[0][:200]
