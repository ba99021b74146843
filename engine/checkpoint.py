"""Checkpoints that survive a crash at any instant, and whose reading runs no code.

    path = save(out_dir, step, tensors, state)      every rank calls it; `tensors` maps names to tensors or DTensors
    path = find(out_dir)                            the step directory that `latest` (or `best`) points to
    state = read_state(path)                        what was given to save, with "step"
    load(path, tensors)                             into the given tensors, in place
    read(out_dir, kinds, action)                    action(path, state), while another process may be saving
    saver = Saver(asynchronous=True)                its save returns at once, and training goes on

    python -m engine.checkpoint consolidate OUT_DIR FILE.safetensors [--which=best]     the weights in one file
    python -m engine.checkpoint convert OUT_DIR                                         from the format before this one

On disk, where out_dir lies on a file system that all ranks share:

    out_dir/latest, out_dir/best        text files with the name of a step directory
    out_dir/step_00001000/state.json    everything that is no tensor, and the SHA-256 of .metadata
                         /.metadata     torch.distributed.checkpoint's (DCP) table of names, shapes and shards: the
                                        file, offset, length and SHA-256 of each
                         /__0_0.distcp  tensors, one file per rank; a replicated tensor is written once

A name beginning with `.tmp-` is unfinished or half deleted, and the next save removes it. `step_*.old` stands for the
moment in which a step that already exists is replaced.
"""

import functools
import hashlib
import json
import logging
import math
import os
import re
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from data.files import regular
from engine.parallel import is_first_rank, of_first_rank, together

FORMAT = 2
STEP = re.compile(r"step_(\d{8,})")
LEFTOVER = re.compile(r"\.tmp-(step_\d{8,}(\.old)?|latest|best)")
MOST_SAMPLES = 2**40  # that a step can have, far above any real batch
PATIENCE = 60  # seconds for which a reader follows a run that saves faster than it reads
T = TypeVar("T")


class Damaged(ValueError):
    """A checkpoint is not whole; it may also have been replaced or deleted while it was read, see `read`."""


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
    """Write out_dir/step_<step> and point `latest` (and, if asked, `best`) to it; returns its path.

    Ranks may give different names (their random states); a plain tensor that several give is taken to be the same.
    `state` holds JSON values, and rank 0's is written. Of the steps up to this one the newest `keep_last` stay, and
    those that a pointer names. Raises OSError, on every rank, if any rank cannot write; older checkpoints then stay.
    (If a rank is gone, the others raise RuntimeError, as every collective does.)

    group   for the collectives, by default that of all ranks
    copies  this rank's part of every tensor, to be written instead of what `tensors` hold by then
    """
    from torch.distributed import checkpoint as dcp

    from engine.dcp_reader import first_line
    from engine.dcp_writer import DigestWriter

    out_dir = Path(out_dir)
    final = out_dir / f"step_{step:08d}"
    partial = out_dir / f".tmp-{final.name}"
    state = {**state, "format": FORMAT, "step": step}
    json.dumps(state)  # what is no JSON fails here, on every rank
    writer, planner = DigestWriter(partial), dcp.DefaultSavePlanner()
    if copies is not None:
        planner.lookup_object = lambda index: copies[index.fqn]
        writer.per_thread_copy_ahead = 0  # nothing is on its way from the GPU, whose stream it would wait for
    try:
        together(lambda: is_first_rank() and _begin(out_dir, partial), group)
        _run(dcp.save, tensors, group, storage_writer=writer, planner=planner)
        together(lambda: is_first_rank() and _commit(partial, final, state, keep_last, best), group)
    except (OSError, ValueError) as error:
        if is_first_rank():
            shutil.rmtree(partial, ignore_errors=True)
        free = f"{shutil.disk_usage(out_dir).free / 1e6:,.0f} MB free" if out_dir.is_dir() else "no directory"
        reason = getattr(error, "strerror", None) or first_line(error)  # of the system: No space left on device
        raise OSError(
            f"cannot save checkpoint {final}: {reason} ({free} without it); earlier checkpoints are untouched: make "
            "room or give another --out_dir, on a file system that all ranks share, and resume"
        ) from error
    return final


class Saver:
    """`save` for a training loop. Every rank makes one after they have joined, and calls the same methods in turn.

    An asynchronous `save` returns once this rank's part of every tensor is copied to host memory, which stays for the
    next one; a thread runs the function `save`. It is a daemon's thread: a process that fails does not wait for it. Its
    collectives have a group of their own, as those of two threads must not mix; and where ranks wait for a slow disk,
    the timeout of the loop's collectives does not count.

    What the function `save` raises, `save` raises too; after an asynchronous one it is the next `wait` or `save`, which
    then saves nothing.
    """

    def __init__(self, asynchronous: bool):
        self.asynchronous = asynchronous
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.last_written_step: int | None = None  # of the last checkpoint that is known to be on the disk
        self.copies: dict[str, Tensor] = {}
        self.running: Future | None = None

    def save(
        self,
        out_dir: str | Path,
        step: int,
        tensors: dict[str, Tensor],
        state: dict,
        keep_last: int = 2,
        best: bool = False,
    ):
        """As the function `save`; waits for the one before it."""
        self.wait()
        arguments = (out_dir, step, dict(tensors), deepcopy(state), keep_last, best, self.group)
        if not self.asynchronous:
            save(*arguments)
            self.last_written_step = step
            return
        copies = self.copies = {name: _copy(tensor, self.copies.get(name)) for name, tensor in tensors.items()}
        device = -1  # none, to torch.cuda.set_device
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            device = torch.cuda.current_device()
        running = self.running = Future()

        def work():
            try:
                torch.cuda.set_device(device)  # a new thread's would be the first one
                save(*arguments, copies)
                running.set_result(step)
            except BaseException as error:
                running.set_exception(error)

        threading.Thread(target=work, name="checkpoint", daemon=True).start()

    def wait(self):
        """Returns when the last save is on the disk: to be called before the run ends, and before saying so."""
        running, self.running = self.running, None
        if running:
            self.last_written_step = running.result()


def _copy(tensor: Tensor, buffer: Tensor | None) -> Tensor:
    """This rank's part of the tensor in host memory, in `buffer` if it fits; from a GPU it may still be on its way."""
    from torch.distributed.tensor import DTensor

    part = tensor.detach()
    part = part.to_local() if isinstance(part, DTensor) else part
    if buffer is None or (buffer.shape, buffer.stride(), buffer.dtype) != (part.shape, part.stride(), part.dtype):
        buffer = torch.empty_like(part, device="cpu", pin_memory=part.is_cuda)
    return buffer.copy_(part, non_blocking=part.is_cuda)


def find(where: str | Path, which: str = "latest") -> Path:
    """The step directory that the pointer `which` ("latest" or "best") of out_dir names; a step directory is itself.

    If `latest` names a step that is gone (deleted by hand because it was damaged), the newest one left takes its place.
    Raises FileNotFoundError.
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
        for step_dir in (where / name, where / f"{name}.old"):  # .old: of a process killed while it replaced this step
            if STEP.fullmatch(name) and step_dir.is_dir():
                return step_dir
        if not STEP.fullmatch(name):
            break
        time.sleep(0.02 * (attempt < 2))  # a run that saves may have moved the pointer on since
    steps = _steps(where)
    if not steps:
        raise FileNotFoundError(f"no checkpoint in {where}; train with --out_dir={where} --init_from=scratch first")
    if which != "latest":
        raise FileNotFoundError(f"{pointer} names no checkpoint; use the latest, or give one itself: {steps[-1]}")
    if is_first_rank():
        logging.getLogger(__name__).warning("%s names no checkpoint, the newest one is %s", pointer, steps[-1])
    return steps[-1]


def read(where: str | Path, kinds: dict[str, Any], action: Callable[[Path, dict], T], which: str = "latest") -> T:
    """action(path, state) for the checkpoint that find(where, which) gives, with read_state(path, kinds).

    A run that saves meanwhile may delete a step while it is read, or replace it. Then `find` is asked again, and action
    called for what it gives now: only what has stayed in its place is damaged. Every rank calls it, and all get the
    path that the first rank finds; in `action` they may call `shapes` and `load`. Raises what these functions raise,
    and OSError if no step has stayed for long enough during a minute.
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
                f"{where} is saved to faster than it can be read: no checkpoint stayed there for as long as reading "
                f"takes, in {PATIENCE} s; give that run a larger --keep_last or --save_interval"
            )
        try:
            result = action(path, together(functools.partial(read_state, path, kinds)))
            if of_first_rank(functools.partial(_identity, path)) in (identity, None):  # not replaced meanwhile
                return result
        except Damaged as error:
            failed, failure = (path, identity), error


def read_state(path: str | Path, kinds: dict[str, Any] | None = None, formats: tuple[int, ...] = (FORMAT,)) -> dict:
    """What was given to `save`, with "step", "format" and "metadata_sha256", the SHA-256 of the file .metadata.

    kinds    keys that the caller needs, and the type or types of each. An int is a count: True is none, and it lies in
             0 .. 2**62 - 1, so that counting goes on. A float is finite.
    formats  those that the caller can read

    Raises ValueError for another format; Damaged if state.json is missing or no JSON, if such a key is absent or not as
    it must be, if more steps were skipped than made, if samples do not fit the steps, or if the directory has another
    step's name. (A copy may have a name of another form, such as `good`.)
    """
    path = Path(path)
    try:
        state = json.loads(read_file(path / "state.json", 2**26))
        found = state["format"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, f"state.json: {error!r:.200}") from error
    if type(found) is int and found not in formats:
        where = path if step_of(path) is None else path.parent
        convert = f"bring it to format {FORMAT} with python -m engine.checkpoint convert {where}"
        remedy = "update this program" if found > FORMAT else convert
        raise ValueError(f"checkpoint {path} has format {found}, and {FORMAT} is known; {remedy}")
    for key, kind in ({"format": int, "step": int} | (kinds or {})).items():
        if not _fits(state.get(key, ...), kind):
            raise damaged(path, f"state.json: {key} is " + (f"{state[key]!r:.60}" if key in state else "absent"))
    step, skipped = state["step"], state.get("skipped", 0)
    if step_of(path) not in (None, step):
        raise damaged(path, f"state.json: step is {step}, and the directory has the name of {step_of(path)}")
    if kinds and "skipped" in kinds and skipped > step:
        raise damaged(path, f"state.json: skipped is {skipped}, of {step} steps")
    if kinds and "samples" in kinds and not step <= state["samples"] <= step * MOST_SAMPLES:
        raise damaged(path, f"state.json: samples is {state['samples']}, of {step} steps")
    return state


def read_file(path: Path, most: int) -> bytes:
    """Its content; ValueError if it is longer, OSError if it is no regular file, whose content might never end."""
    with open(path, "rb", opener=regular) as f:
        content = f.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content


def _fits(value: Any, kind: Any) -> bool:
    """Whether the value is of this type, or of one of these, and in its range; see `read_state`."""
    if type(value) not in (kind if isinstance(kind, tuple) else (kind,)):
        return False
    return 0 <= value < 2**62 if type(value) is int else type(value) is not float or math.isfinite(value)


def shapes(path: str | Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> (global shape, dtype) of every tensor in the checkpoint; every rank calls it. Raises Damaged."""
    table = together(lambda: _read_metadata(Path(path))).state_dict_metadata
    return {name: (tuple(entry.size), entry.properties.dtype) for name, entry in table.items()}


def load(path: str | Path, tensors: dict[str, Tensor], rows: dict[str, int] | None = None) -> None:
    """Read the named tensors in place; every rank calls it, whatever world wrote the checkpoint.

    rows    name -> number of rows that are no padding. Such a tensor may have more or fewer rows than the saved one,
            but has at least these; rows that the saved one lacks keep their values.

    Names of the checkpoint that are not asked for are left alone. Raises ValueError, on every rank, for a name that
    the checkpoint lacks, and for another shape or dtype; Damaged for files that are.
    """
    from torch.distributed import checkpoint as dcp

    from engine.dcp_reader import SafeReader

    path = Path(path)

    def check() -> Any:
        metadata = _read_metadata(path)
        for name, tensor in tensors.items():
            entry, least = metadata.state_dict_metadata.get(name), (rows or {}).get(name)
            if entry and least and entry.size[1:] == tensor.shape[1:] and least <= min(len(tensor), entry.size[0]):
                entry.size = tensor.shape  # DCP then reads the rows that both have
            saved = f"{tuple(entry.size)} {entry.properties.dtype}" if entry else "absent"
            given = f"{tuple(tensor.shape)} {tensor.dtype}"
            if saved != given:
                raise ValueError(f"{name} is {saved} in checkpoint {path}, {given} here; use the flags of its training")
        return metadata

    metadata = together(check)

    try:
        _run(dcp.load, tensors, storage_reader=SafeReader(path, metadata))
    except ValueError as error:
        raise damaged(path, error) from error


def _begin(out_dir: Path, partial: Path) -> None:
    """An empty `partial`, after clearing away what killed processes left behind."""
    out_dir.mkdir(parents=True, exist_ok=True)
    for entry in list(out_dir.iterdir()):
        if LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink()
    for old in list(out_dir.glob("step_*.old")):
        whole = old.with_suffix("")
        if STEP.fullmatch(whole.name):
            _remove(old) if whole.exists() else old.rename(whole)
    partial.mkdir(exist_ok=True)


def _commit(partial: Path, final: Path, state: dict, keep_last: int, best: bool) -> None:
    """Give the written directory its name, then move the pointers, then prune: each of them is one rename."""
    out_dir, old = final.parent, final.with_name(f"{final.name}.old")
    state["metadata_sha256"] = hashlib.sha256((partial / ".metadata").read_bytes()).hexdigest()
    write(partial / "state.json", json.dumps(state, indent=1).encode())
    _read_metadata(partial)  # are the files of all ranks here, and whole?
    fsync(partial)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    fsync(out_dir)
    for pointer in ["latest", "best"] if best else ["latest"]:
        write(out_dir / f".tmp-{pointer}", f"{final.name}\n".encode())
        os.replace(out_dir / f".tmp-{pointer}", out_dir / pointer)
    fsync(out_dir)
    if old.exists():
        _remove(old)
    # Later steps than this one are from a run that was rewound: they are not ours to prune.
    steps = [path for path in _steps(out_dir) if int(path.name[5:]) <= int(final.name[5:])]
    pointed = [path.read_text().strip() for path in (out_dir / "latest", out_dir / "best") if path.exists()]
    for path in steps[: max(0, len(steps) - keep_last)]:
        if path.name not in pointed:
            _remove(path)


def _remove(directory: Path) -> None:
    """Delete it under a name that nobody reads: a process killed half-way leaves no half checkpoint. What cannot be
    deleted yet, as where another process reads it over NFS, the next save tries again."""
    shutil.rmtree(directory.rename(directory.with_name(f".tmp-{directory.name}")), ignore_errors=True)


def _steps(out_dir: Path) -> list[Path]:
    """The step directories, oldest first."""
    found = [path for path in out_dir.glob("step_*/") if STEP.fullmatch(path.name) and (path / "state.json").is_file()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def step_of(path: Path) -> int | None:
    """The step whose name a directory has, also while it is replaced, as step_00000010.old; None for other names."""
    match = STEP.fullmatch(path.absolute().name.removesuffix(".old"))
    return int(match[1]) if match else None


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    fsync(path)


def fsync(path: Path) -> None:
    """A file's bytes, or a directory's names, outlive a power cut only after this."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _run(operation: Callable, tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None, **how: Any) -> None:
    """dcp.save or dcp.load; the failure of the first rank that failed is raised by all, as it is.

    A RuntimeError is of a collective, where another rank is gone.
    """
    from torch.distributed.checkpoint import CheckpointException

    # For good, not inside of catch_warnings: that is no matter of one thread.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        operation(dict(tensors), process_group=group, no_dist=not dist.is_initialized(), **how)
    except CheckpointException as failure:
        raise min(failure.failures.items())[1][0] from failure


def _read_metadata(path: Path) -> Any:
    from engine.dcp_reader import read_metadata

    sha256 = str(read_state(path).get("metadata_sha256"))
    try:
        return read_metadata(path, sha256)
    except ValueError as error:
        raise damaged(path, error) from error


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a directory from one that takes its place; None if it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def damaged(path: Path, what: object) -> Damaged:
    """The error; it advises nothing that loses data."""
    if not path.is_dir():
        return Damaged(f"checkpoint {path} is gone, or not seen from here; look which one {path.parent} holds now")
    others = [step for step in _steps(path.parent) if step.name != path.name] if step_of(path) is not None else []
    remedy = "bring it back from a copy, or train from the beginning in another --out_dir"
    if others:
        remedy = f"move this directory elsewhere to go on from {others[-1].name}, or bring it back from a copy"
    return Damaged(f"checkpoint {path} is damaged: {what}; {remedy}")


if __name__ == "__main__":
    from engine.checkpoint_commands import main

    sys.exit(main(sys.argv[1:]))
