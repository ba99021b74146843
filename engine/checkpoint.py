"""Checkpoints that survive a crash at any instant, and whose reading runs no code.

    path = save(out_dir, step, tensors, state)      every rank calls it; `tensors` maps names to tensors or DTensors
    path = find(out_dir)                            the step directory that `latest` (or `best`) points to
    state = read_state(path)                        what was given to save, with "step"
    load(path, tensors)                             into the given tensors, in place
    saver = Saver(asynchronous=True)                its save returns at once, and training goes on

    python -m engine.checkpoint consolidate OUT_DIR FILE.safetensors [--which=best]     the weights in one file

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
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model import VOCAB_WEIGHTS

FORMAT = 1
STEP = re.compile(r"step_(\d{8,})")
LEFTOVER = re.compile(r"\.tmp-(step_\d{8,}(\.old)?|latest|best)")
USAGE = "usage: python -m engine.checkpoint consolidate OUT_DIR FILE.safetensors [--which=best]"


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

    out_dir = Path(out_dir)
    final = out_dir / f"step_{step:08d}"
    partial = out_dir / f".tmp-{final.name}"
    text = json.dumps({**state, "format": FORMAT, "step": step}, indent=1)
    writer, planner = dcp.FileSystemWriter(partial), dcp.DefaultSavePlanner()
    if copies is not None:
        planner.lookup_object = lambda index: copies[index.fqn]
        writer.per_thread_copy_ahead = 0  # nothing is on its way from the GPU, whose stream it would wait for
    try:
        _together(lambda: _is_first_rank() and _begin(out_dir, partial), group)
        _run(dcp.save, tensors, group, storage_writer=writer, planner=planner)
        _together(lambda: _is_first_rank() and _commit(partial, final, text, keep_last, best), group)
    except (OSError, ValueError) as error:
        if _is_first_rank():
            shutil.rmtree(partial, ignore_errors=True)
        free = f"{shutil.disk_usage(out_dir).free / 1e6:,.0f} MB free" if out_dir.is_dir() else "no directory"
        raise OSError(
            f"cannot save checkpoint {final} ({free}): {first_line(error)}; earlier checkpoints are untouched: make "
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
        self.saved: int | None = None  # step of the last one that is known to be on the disk
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
            self.saved = step
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
            self.saved = running.result()


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
    where = Path(where).expanduser()
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


def load(path: str | Path, tensors: dict[str, Tensor], rows: dict[str, int] | None = None) -> None:
    """Read the named tensors in place; every rank calls it, whatever world wrote the checkpoint.

    rows    name -> number of rows that are no padding. Such a tensor may have more or fewer rows than the saved one,
            but has at least these; rows that the saved one lacks keep their values.

    Names of the checkpoint that are not asked for are left alone. Raises ValueError, on every rank, for a name that
    the checkpoint lacks, for another shape or dtype, and for damaged files.
    """
    from torch.distributed import checkpoint as dcp

    from engine.dcp_reader import SafeReader

    path = Path(path)

    def check() -> Any:
        metadata = _read_metadata(path)
        for name, tensor in tensors.items():
            entry, least = metadata.state_dict_metadata.get(name), (rows or {}).get(name)
            if entry and least and entry.size[1:] == tensor.shape[1:] and min(entry.size[0], len(tensor)) >= least:
                entry.size = tensor.shape  # what of the saved shards lies outside of it is not read
            saved = f"{tuple(entry.size)} {entry.properties.dtype}" if entry else "absent"
            given = f"{tuple(tensor.shape)} {tensor.dtype}"
            if saved != given:
                raise ValueError(f"{name} is {saved} in checkpoint {path}, {given} here; use the flags of its training")
        return metadata

    metadata = _together(check)

    try:
        _run(dcp.load, tensors, storage_reader=SafeReader(path, metadata))
    except ValueError as error:
        raise _damaged(path, error) from error


def consolidate(out_dir: str | Path, file: str | Path, which: str = "latest") -> Path:
    """Write the model's weights as one safetensors file, whatever ranks saved them; returns the checkpoint's path.

    One process calls it, with room for the weights in memory. Names are those of the model's parameters; where tied
    weights have two, the first stays: wte.weight, and there is no head.weight. The file's metadata has `format` (pt),
    `step`, and `flags`, the run's flags as JSON. Raises OSError or ValueError; there is no half file then.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise ValueError("safetensors is not installed; pip install safetensors, or pip install -e .") from error
    path, file = find(out_dir, which), Path(file)
    if file.exists():
        raise FileExistsError(f"{file} is there already; delete it, or name another file")
    state = read_state(path, {"flags": dict})
    weights = {name: spec for name, spec in shapes(path).items() if name.startswith("model.")}
    if not weights:
        raise ValueError(f"checkpoint {path} holds no weights; give the out_dir of a training run")
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in weights.items()}
    size, free = sum(t.nbytes for t in tensors.values()), shutil.disk_usage(file.parent).free
    if size > free:
        raise OSError(f"{file} needs {size / 1e6:,.0f} MB and its disk has {free / 1e6:,.0f}; make room")
    load(path, tensors)
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    for name in tensors.keys() & VOCAB_WEIGHTS:  # without the padding that a layout needed
        tensors[name] = tensors[name][: state["flags"]["vocab_size"]]
    partial = file.with_name(f".tmp-{file.name}")
    try:
        metadata = {"format": "pt", "step": str(state["step"]), "flags": json.dumps(state["flags"])}
        save_file(tensors, partial, metadata)
        shutil.copymode(path / "state.json", partial)  # safetensors lets nobody else read it
        _fsync(partial)
        partial.rename(file)
    except (OSError, SafetensorError) as error:
        raise OSError(f"cannot write {file}: {error}; see to its folder and the room on its disk") from error
    finally:
        partial.unlink(missing_ok=True)
    _fsync(file.parent)
    return path


def main(argv: list[str]) -> int:
    """The command line; returns the exit code."""
    from configurator import user_errors

    match sorted(argv, key=lambda arg: arg.startswith("--")):  # flags last
        case ["consolidate", out_dir, file, *flags] if flags in ([], ["--which=latest"], ["--which=best"]):
            with user_errors():
                path = consolidate(out_dir, file, *(flag.removeprefix("--which=") for flag in flags))
                print(f"{file}: the weights of {path}")
            return 0
    print(USAGE, file=sys.stderr)
    return 2


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
    """Delete it under a name that nobody reads: a process killed half-way leaves no half checkpoint. What cannot be
    deleted yet, as where another process reads it over NFS, the next save tries again."""
    shutil.rmtree(directory.rename(directory.with_name(f".tmp-{directory.name}")), ignore_errors=True)


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


def _together(action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """action(); if it raises OSError or ValueError on one rank, all ranks raise it: none waits for ever for another."""
    result, error = None, None
    try:
        result = action()
    except (OSError, ValueError) as caught:
        error = caught
    if dist.is_initialized():
        errors: list[Exception | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(errors, error, group)
        error = next((e for e in errors if e is not None), None)
    if error is not None:
        raise error
    return result


def _run(operation: Callable, tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None, **how: Any) -> None:
    """dcp.save or dcp.load; the failure of the first rank that failed is raised by all.

    That of a write can be a RuntimeError, and is made an OSError: those that are left are of collectives, where another
    rank is gone.
    """
    from torch.distributed.checkpoint import CheckpointException

    from engine.dcp_reader import first_line

    # For good, not inside of catch_warnings: that is no matter of one thread.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        operation(dict(tensors), process_group=group, no_dist=not dist.is_initialized(), **how)
    except CheckpointException as failure:
        error = min(failure.failures.items())[1][0]
        raise OSError(first_line(error)) if isinstance(error, RuntimeError) else error from failure


def _read_metadata(path: Path) -> Any:
    from engine.dcp_reader import read_metadata

    try:
        return read_metadata(path)
    except ValueError as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, what: object) -> ValueError:
    return ValueError(f"checkpoint {path} is damaged: {what}; delete this directory to go on from the one before it")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
