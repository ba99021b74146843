"""Writes checkpoints that survive a crash at any instant, and reads them without running code that they may hold.

    path = save(out_dir, step, tensors, state)      every rank calls it; `tensors` maps names to tensors or DTensors
    path = find(out_dir)                            the step directory that `latest` (or `best`) names
    state = read_state(path)                        the state that was given to save, with "step"
    index = read_index(path, state)                 name -> shape, dtype and pieces of every tensor
    load(path, tensors)                             reads into the given tensors, in place
    read(out_dir, kinds, action)                    action(path, state), while another process may be saving

Files on disk; out_dir must be on a file system that all ranks share:

    out_dir/latest, out_dir/best        text files with the name of a step directory
    out_dir/step_00001000/state.json    everything except tensors, and the SHA-256 of index.json
                         /index.json    names and shapes of the tensors, and for each piece its file, place and SHA-256
                         /rank_0.safetensors    tensors, one file per rank; a replicated tensor is written once

A name that begins with `.tmp-` is of a directory that is not complete or is being deleted; the next save removes it.
`step_*.old` exists only for the moment in which a step of the same number is replaced.
"""

import functools
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from data.files import amount
from engine.checkpoint import pieces
from engine.checkpoint.pieces import Saved, first_line, own_part
from engine.checkpoint.state import FORMAT, STEP, Damaged, damaged, read_state, step_of, steps_in
from engine.parallel.ranks import is_first_rank, of_first_rank, together

LEFTOVER = re.compile(r"\.tmp-(step_\d{8,}(\.old)?|latest|best)")
PATIENCE = 60  # seconds for which a reader tries again while a run replaces checkpoints faster than it reads them
# These parameters have a row per token id. Under tp they also have rows of padding, and how many depends on the number
# of ranks. So only the first vocab_size rows are compared, read and exported.
VOCAB_WEIGHTS = ("wte.weight", "head.weight", "head.bias")
T = TypeVar("T")


def save(
    out_dir: str | Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict,
    keep_last: int = 2,
    best: bool = False,
    group: dist.ProcessGroup | None = None,
    copies: dict[str, Tensor] | None = None,
) -> Path:
    """Write out_dir/step_<step>, and its name into `latest` and, with `best`, into `best`; returns its path.

    Ranks may give different names, such as those of their random states. If several ranks give the same name with a
    plain tensor, the tensors must be equal. `state` holds JSON values; rank 0's state is written. Of the steps up to
    this one, the newest `keep_last` stay, and those that `latest` or `best` names; the others are deleted.

    Raises OSError on every rank if any rank cannot write; older checkpoints then stay. If a rank has died, the others
    raise RuntimeError, as in every collective.

    group   the process group of the collectives; by default all ranks
    copies  this rank's part of every tensor, which is written instead of the present values of `tensors`
    """
    out_dir = Path(out_dir)
    final = out_dir / f"step_{step:08d}"
    partial = out_dir / f".tmp-{final.name}"
    state = {**state, "step": step}
    json.dumps(state)  # a value that is not JSON fails here, on every rank
    parts = {name: (*own_part(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
    if copies is not None:
        parts = {name: (copies[name], *place) for name, (_, *place) in parts.items()}
    try:
        together(lambda: is_first_rank() and _begin(out_dir, partial), group)
        mine, file = _share(parts, group), f"rank_{dist.get_rank(group) if dist.is_initialized() else 0}.safetensors"
        entries = together(lambda: pieces.write(partial, file, {name: parts[name] for name in mine}), group)
        written = _gather(entries, group)
        together(lambda: is_first_rank() and _commit(partial, final, written, state, keep_last, best), group)
    except (OSError, ValueError) as error:
        if is_first_rank():
            shutil.rmtree(partial, ignore_errors=True)
        free = f"{amount(shutil.disk_usage(out_dir).free)} free" if out_dir.is_dir() else "no directory"
        reason = getattr(error, "strerror", None) or first_line(error)  # such as: No space left on device
        raise OSError(
            f"cannot save checkpoint {final}: {reason} ({free} without it); earlier checkpoints are untouched: make "
            "room or give another --out_dir, on a file system that all ranks share, and resume"
        ) from error
    return final


def find(where: str | Path, which: str = "latest") -> Path:
    """The step directory that the file `which` ("latest" or "best") in `where` names. If `where` is a step directory
    itself, the result is `where`.

    If `latest` names a step that does not exist, for example because it was damaged and the user has deleted it, the
    result is the newest step that exists. Raises FileNotFoundError.
    """
    where = Path(os.path.expanduser(where))
    if not where.is_dir():
        raise FileNotFoundError(f"no directory {where}; train with --out_dir={where} first, or name another --out_dir")
    if (where / "state.json").is_file():
        return where
    pointer = where / which
    for attempt in range(3):
        name = ""
        if pointer.is_file():
            with open(pointer, errors="replace") as f:
                name = f.read(1000).strip()
        for step_dir in (where / name, where / f"{name}.old"):  # .old: a process was killed while it replaced this step
            if STEP.fullmatch(name) and step_dir.is_dir():
                return step_dir
        if not STEP.fullmatch(name):
            break
        time.sleep(0.02 * (attempt < 2))  # a run that saves may have written another name meanwhile
    steps = steps_in(where)
    if not steps:
        raise FileNotFoundError(f"no checkpoint in {where}; train with --out_dir={where} --init_from=scratch first")
    if which != "latest":
        raise FileNotFoundError(f"{pointer} names no checkpoint; use the latest, or give its directory: {steps[-1]}")
    if is_first_rank():
        logging.getLogger(__name__).warning("%s names no checkpoint, the newest one is %s", pointer, steps[-1])
    return steps[-1]


def read(where: str | Path, kinds: dict[str, Any], action: Callable[[Path, dict], T], which: str = "latest") -> T:
    """action(path, state), where path = find(where, which) and state = read_state(path, kinds).

    Another process may delete or replace the step during the reading. Then `find` and `action` are called again, so a
    checkpoint counts as damaged only if it has stayed in its place. Every rank calls this function, and all ranks read
    the path that the first rank finds. `action` may call `read_index` and `load`. Raises the errors of `find`,
    `read_state` and `action`, and OSError if for a minute no step has stayed until it was read.
    """
    end, failed, failure = time.monotonic() + PATIENCE, None, None

    def look() -> tuple[Path, Any, bool]:
        path = find(where, which)
        return path, _identity(path), time.monotonic() < end

    while True:
        path, identity, patient = of_first_rank(look)
        if failure and identity and (path, identity) == failed:
            raise failure
        if not patient:
            raise OSError(
                f"{where} is saved to faster than it can be read: for {PATIENCE} s, each checkpoint was deleted before "
                "it was read; give the run that saves a larger --keep_last or --save_interval"
            )
        try:
            result = action(path, together(functools.partial(read_state, path, kinds)))
            if of_first_rank(functools.partial(_identity, path)) in (identity, None):  # it was not replaced meanwhile
                return result
        except Damaged as error:
            failed, failure = (path, identity), error


def read_index(path: str | Path, state: dict | None = None) -> dict[str, Saved]:
    """name -> shape, dtype and pieces of every tensor in the checkpoint. Every rank calls it. Raises Damaged.

    state   what read_state has read there
    """
    return together(lambda: _read_index(Path(path), state or read_state(path)))


def load(
    path: str | Path,
    tensors: dict[str, Tensor],
    rows: dict[str, int] | None = None,
    index: dict[str, Saved] | None = None,
) -> None:
    """Read the named tensors in place. Every rank calls it; the checkpoint may come from any number of ranks.

    rows    name -> number of rows without padding. Such a tensor may have more or fewer rows than the saved tensor, as
            long as both have these rows. Rows that the saved tensor does not have keep their values.
    index   what read_index has read there

    Other tensors of the checkpoint are ignored. Raises ValueError on every rank if the checkpoint lacks one of the
    names, or if its shape or dtype differs; raises Damaged if files are damaged.
    """
    path, rows = Path(path), rows or {}
    index = read_index(path) if index is None else index

    def check():
        for name, tensor in tensors.items():
            entry, shape = index.get(name), tuple(tensor.shape)
            saved, given = f"{entry.shape} {entry.dtype}" if entry else "absent", f"{shape} {tensor.dtype}"
            if entry and name in rows and entry.shape[1:] == shape[1:]:
                if (rows[name],) <= min(shape[:1], entry.shape[:1]):
                    saved = f"{shape} {entry.dtype}"
            if saved != given:
                raise ValueError(f"{name} is {saved} in checkpoint {path}, {given} here; use the flags of its training")

    def fill():
        for name, tensor in tensors.items():
            try:
                pieces.fill(path, name, index[name], *own_part(tensor))
            except ValueError as error:
                raise damaged(path, error) from error

    together(check)
    together(fill)


def _share(parts: dict[str, tuple], group: dist.ProcessGroup | None) -> list[str]:
    """The names of the parts that this rank writes. Of the ranks that have the same part, the one writes it that has
    least to write so far. Every rank calls it."""
    plans = _gather({name: (tuple(offsets), part.nbytes) for name, (part, offsets, _) in parts.items()}, group)
    holders, to_write, shares = defaultdict(list), [0] * len(plans), [[] for _ in plans]
    for rank, plan in enumerate(plans):
        for name, (offsets, size) in plan.items():
            holders[name, offsets, size].append(rank)
    for (name, _, size), ranks in sorted(holders.items(), key=lambda item: len(item[1])):
        rank = min(ranks, key=to_write.__getitem__)
        shares[rank].append(name)
        to_write[rank] += size
    mine = shares[:1]
    if dist.is_initialized():
        mine = [None]
        dist.scatter_object_list(mine, shares or None, 0, group)
    return mine[0]


def _gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """The values of all ranks on the first rank, [] on the others. Every rank calls it."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size(group) if is_first_rank() else None
    dist.gather_object(value, values, 0, group)
    return values or []


def _begin(out_dir: Path, partial: Path) -> None:
    """Make the directory `partial`, after removing files of processes that were killed."""
    out_dir.mkdir(parents=True, exist_ok=True)
    for entry in list(out_dir.iterdir()):
        if LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink()
    for old in list(out_dir.glob("step_*.old")):
        new = old.with_suffix("")
        if STEP.fullmatch(new.name):
            _remove(old) if new.exists() else old.rename(new)
    partial.mkdir(exist_ok=True)


def _commit(partial: Path, final: Path, written: list[dict], state: dict, keep_last: int, best: bool) -> None:
    """Complete the directory and give it its final name, then update `latest` and `best`, then delete old steps; each
    by one rename."""
    out_dir = final.parent
    complete(partial, written, state)
    replace(partial, final)
    for pointer in ["latest", "best"] if best else ["latest"]:
        write(out_dir / f".tmp-{pointer}", f"{final.name}\n".encode())
        os.replace(out_dir / f".tmp-{pointer}", out_dir / pointer)
    fsync(out_dir)
    # If the user has gone back to an earlier checkpoint, there are later steps. They stay.
    steps = [path for path in steps_in(out_dir) if step_of(path) <= state["step"]]
    pointed = [path.read_text().strip() for path in (out_dir / "latest", out_dir / "best") if path.exists()]
    for path in steps[: max(0, len(steps) - keep_last)]:
        if path.name not in pointed:
            _remove(path)


def complete(partial: Path, written: list[dict], state: dict) -> None:
    """Write index.json and state.json beside the files of the ranks. `written` holds what pieces.write has returned."""
    index = json.dumps(pieces.merged(written)).encode()
    state = {**state, "format": FORMAT, "index_sha256": hashlib.sha256(index).hexdigest()}
    write(partial / "index.json", index)
    write(partial / "state.json", json.dumps(state, indent=1).encode())
    _read_index(partial, state)  # raises Damaged if a file of another rank is missing or not complete
    fsync(partial)


def replace(partial: Path, final: Path) -> None:
    """Give a complete directory its final name. A directory that has this name is deleted."""
    old = final.with_name(f"{final.name}.old")
    if final.exists():
        final.rename(old)
    partial.rename(final)
    fsync(final.parent)
    if old.exists():
        _remove(old)


def _remove(directory: Path) -> None:
    """Delete a directory after renaming it, so that a process that is killed meanwhile leaves no half checkpoint. Files
    that cannot be deleted now, for example because another process reads them over NFS, are left to the next save."""
    shutil.rmtree(directory.rename(directory.with_name(f".tmp-{directory.name}")), ignore_errors=True)


def write(path: Path, content: bytes) -> None:
    """Write a file so that it survives a power failure."""
    path.write_bytes(content)
    fsync(path)


def fsync(path: Path) -> None:
    """Make the bytes of a file, or the names in a directory, survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_index(path: Path, state: dict) -> dict[str, Saved]:
    try:
        return pieces.read_index(path, str(state.get("index_sha256")))
    except ValueError as error:
        raise damaged(path, error) from error


def _identity(path: Path) -> tuple[int, int] | None:
    """Numbers that differ between a directory and another one that has replaced it; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
