"""Checkpoints that survive a crash at any instant, and whose reading runs no code.

    path = save(out_dir, step, tensors, state)      every rank calls it; `tensors` maps names to tensors or DTensors
    path = find(out_dir)                            the step directory that `latest` (or `best`) points to
    state = read_state(path)                        what was given to save, with "step"
    load(path, tensors)                             into the given tensors, in place

On disk, where out_dir lies on a file system that all ranks share:

    out_dir/latest, out_dir/best        text files with the name of a step directory
    out_dir/step_00001000/state.json    everything that is no tensor
                         /.metadata     torch.distributed.checkpoint's (DCP) table of names, shapes, shards and offsets
                         /__0_0.distcp  tensors, one file per rank; a replicated tensor is written once

A name beginning with `.tmp-` is unfinished or half deleted, and the next save removes it. `step_*.old` stands for the
moment in which a step that already exists is replaced.
"""

import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FORMAT = 1
STEP = re.compile(r"step_(\d{8,})")
LEFTOVER = re.compile(r"\.tmp-(step_\d{8,}(\.old)?|latest|best)")


def save(
    out_dir: str | Path, step: int, tensors: dict[str, Tensor], state: dict, keep_last: int = 2, best: bool = False
) -> Path:
    """Write out_dir/step_<step> and point `latest` (and, if asked, `best`) to it; returns its path.

    Ranks may give different names (their random states); a plain tensor that several give is taken to be the same.
    `state` holds JSON values, and rank 0's is written. Of the steps up to this one the newest `keep_last` stay, and
    those that a pointer names. Raises OSError, on every rank, if any rank cannot write; older checkpoints then stay.
    """
    from torch.distributed import checkpoint as dcp

    from engine.dcp_reader import first_line

    out_dir = Path(out_dir)
    final = out_dir / f"step_{step:08d}"
    partial = out_dir / f".tmp-{final.name}"
    text = json.dumps({**state, "format": FORMAT, "step": step}, indent=1)
    try:
        _together(lambda: _is_first_rank() and _begin(out_dir, partial))
        _run(dcp.save, dict(tensors), storage_writer=dcp.FileSystemWriter(partial))
        _together(lambda: _is_first_rank() and _commit(partial, final, text, keep_last, best))
    except (OSError, ValueError, RuntimeError) as error:
        if _is_first_rank():
            shutil.rmtree(partial, ignore_errors=True)
        free = f"{shutil.disk_usage(out_dir).free / 1e6:,.0f} MB free" if out_dir.is_dir() else "no directory"
        raise OSError(
            f"cannot save checkpoint {final} ({free}): {first_line(error)}; earlier checkpoints are untouched: make "
            "room or give another --out_dir, on a file system that all ranks share, and resume"
        ) from error
    return final


def find(where: str | Path, which: str = "latest") -> Path:
    """The step directory that the pointer `which` ("latest" or "best") of out_dir names; a step directory is itself.

    If `latest` names a step that is gone (deleted by hand because it was damaged), the newest one left takes its place.
    Raises FileNotFoundError.
    """
    where = Path(where)
    if not where.is_dir():
        raise FileNotFoundError(f"no directory {where}; train with --out_dir={where} first, or name another --out_dir")
    if (where / "state.json").is_file():
        return where
    pointer = where / which
    name = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
    for step_dir in (where / name, where / f"{name}.old"):  # .old: the process was killed while it replaced this step
        if STEP.fullmatch(name) and step_dir.is_dir():
            return step_dir
    steps = _steps(where)
    if not steps:
        raise FileNotFoundError(f"no checkpoint in {where}; train with --out_dir={where} --init_from=scratch first")
    if which != "latest":
        raise FileNotFoundError(f"{pointer} names no checkpoint; use the latest, or give one itself: {steps[-1]}")
    if _is_first_rank():
        logging.getLogger(__name__).warning("%s names no checkpoint, the newest one is %s", pointer, steps[-1])
    return steps[-1]


def read_state(path: str | Path, kinds: dict[str, Any] | None = None) -> dict:
    """What was given to `save`, with "step" and "format".

    kinds   keys that the caller needs, and the type or types of each
    Raises ValueError if state.json is missing or damaged, or if such a key is absent or of another type.
    """
    path = Path(path)
    try:
        state = json.loads((path / "state.json").read_text())
        newer = state["format"] > FORMAT
        wrong = [key for key, kind in ({"step": int} | (kinds or {})).items() if not isinstance(state[key], kind)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, f"state.json: {error!r}") from error
    if newer:
        raise ValueError(f"checkpoint {path} has format {state['format']}, known is {FORMAT}; update this program")
    if wrong:
        raise _damaged(path, f"state.json: {wrong[0]} is {state[wrong[0]]!r:.60}")
    return state


def shapes(path: str | Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> (global shape, dtype) of every tensor in the checkpoint. Raises ValueError if it is damaged."""
    table = _read_metadata(Path(path)).state_dict_metadata
    return {name: (tuple(entry.size), entry.properties.dtype) for name, entry in table.items()}


def load(path: str | Path, tensors: dict[str, Tensor]) -> None:
    """Read the named tensors in place; every rank calls it, whatever world wrote the checkpoint.

    Names of the checkpoint that are not asked for are left alone. Raises ValueError, on every rank, for a name that
    the checkpoint lacks, for another shape or dtype, and for damaged files.
    """
    from torch.distributed import checkpoint as dcp

    from engine.dcp_reader import SafeReader

    path = Path(path)

    def check() -> Any:
        metadata = _read_metadata(path)
        for name, tensor in tensors.items():
            entry = metadata.state_dict_metadata.get(name)
            saved = f"{tuple(entry.size)} {entry.properties.dtype}" if entry else "absent"
            given = f"{tuple(tensor.shape)} {tensor.dtype}"
            if saved != given:
                raise ValueError(f"{name} is {saved} in checkpoint {path}, {given} here; use the flags of its training")
        return metadata

    metadata = _together(check)

    try:
        _run(dcp.load, dict(tensors), storage_reader=SafeReader(path, metadata))
    except ValueError as error:
        raise _damaged(path, error) from error


def _begin(out_dir: Path, partial: Path) -> None:
    """An empty `partial`, after clearing away what killed processes left behind."""
    out_dir.mkdir(parents=True, exist_ok=True)
    for entry in list(out_dir.iterdir()):
        if LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for old in list(out_dir.glob("step_*.old")):
        whole = old.with_suffix("")
        if STEP.fullmatch(whole.name):
            _remove(old) if whole.exists() else old.rename(whole)
    partial.mkdir()


def _commit(partial: Path, final: Path, text: str, keep_last: int, best: bool) -> None:
    """Give the written directory its name, then move the pointers, then prune: each of them is one rename."""
    out_dir, old = final.parent, final.with_name(f"{final.name}.old")
    _read_metadata(partial)  # are the files of all ranks here, and whole?
    _write(partial / "state.json", text)
    _fsync(partial)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    _fsync(out_dir)
    for pointer in ["latest", "best"] if best else ["latest"]:
        _write(out_dir / f".tmp-{pointer}", f"{final.name}\n")
        os.replace(out_dir / f".tmp-{pointer}", out_dir / pointer)
    _fsync(out_dir)
    if old.exists():
        _remove(old)
    # Later steps than this one are from a run that was rewound: they are not ours to prune.
    steps = [path for path in _steps(out_dir) if int(path.name[5:]) <= int(final.name[5:])]
    pointed = [path.read_text().strip() for path in (out_dir / "latest", out_dir / "best") if path.exists()]
    for path in steps[: max(0, len(steps) - keep_last)]:
        if path.name not in pointed:
            _remove(path)


def _remove(directory: Path) -> None:
    """Delete it under a name that nobody reads: a process killed half-way leaves no half checkpoint."""
    shutil.rmtree(directory.rename(directory.with_name(f".tmp-{directory.name}")))


def _steps(out_dir: Path) -> list[Path]:
    """The step directories, oldest first."""
    found = [path for path in out_dir.glob("step_*/") if STEP.fullmatch(path.name) and (path / "state.json").is_file()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    _fsync(path)


def _fsync(path: Path) -> None:
    """A file's bytes, or a directory's names, outlive a power cut only after this."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _together(action: Callable[[], Any]) -> Any:
    """action(); if it raises OSError or ValueError on one rank, all ranks raise it: none waits for ever for another."""
    result, error = None, None
    try:
        result = action()
    except (OSError, ValueError) as caught:
        error = caught
    if dist.is_initialized():
        errors: list[Exception | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        error = next((e for e in errors if e is not None), None)
    if error is not None:
        raise error
    return result


def _run(operation: Callable, tensors: dict[str, Tensor], **storage: Any) -> None:
    """dcp.save or dcp.load; the failure of the first rank that failed is raised by all."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            operation(tensors, no_dist=not dist.is_initialized(), **storage)
    except CheckpointException as failure:
        raise min(failure.failures.items())[1][0] from failure


def _read_metadata(path: Path) -> Any:
    from engine.dcp_reader import read_metadata

    try:
        return read_metadata(path)
    except ValueError as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, what: object) -> ValueError:
    return ValueError(f"checkpoint {path} is damaged: {what}; delete this directory to go on from the one before it")
