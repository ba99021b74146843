"""Writes checkpoints that survive a crash at any instant, and reads them without running code that they may hold.

out_dir must be on a file system that all ranks share. It has a directory step_00001000 for each checkpoint, see
file_format.py, and the text files `latest` and `best` with the name of such a directory. What is not complete or is
being deleted has a name with `.tmp-`, which the next save removes; `step_*.old` is a step that is being replaced.
"""

import hashlib
import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from data.errors import reason, require, say
from data.files import fsync, read_file, user_path, write_file
from engine.checkpoint import file_format
from engine.checkpoint.file_format import STEP, Damaged, Saved, own_part, read_state, step_name, step_of, steps_in
from engine.parallel.layout import Slice
from engine.parallel.ranks import gather, is_first_rank, on_every_rank, on_first_rank, scatter

LEFTOVER = re.compile(r"\.tmp-(step_\d{8,}(\.old)?|(latest|best)(-\w+)?)|step_\d{8,}\.old|\.shared_\w+")
TRIES = 100  # of a reader, while a run deletes checkpoints before they are read
LARGEST_NAME = 1000  # bytes of latest and best
VOCAB_WEIGHTS = ("wte.weight", "head.weight")  # parameters with a row per token id, see `unpadded`
T = TypeVar("T")
say_once = cache(say)  # a start looks for its checkpoint several times


def save(out_dir: str | Path, step: int, tensors: dict[str, Tensor | Slice], state: dict, keep_last: int = 2):
    """Write out_dir/step_<step>, its name into `latest`, and that of state["best_step"] into `best`. Every rank calls
    it with tensors by name, each a part or, equal on all ranks that have it, a whole one. Rank 0's `state`, see
    file_format.STATE, is written. Of the steps up to this one, the newest `keep_last` stay, and the two so named.
    OSError on every rank if one cannot write; older checkpoints stay."""
    final = Path(out_dir) / step_name(step)
    partial_step = final.with_name(f".tmp-{final.name}")
    parts = {name: own_part(tensor) for name, tensor in tensors.items()}
    rank = dist.get_rank() if dist.is_initialized() else 0
    file = partial_step / f"rank_{rank}.safetensors"
    try:
        on_first_rank(partial(_begin, partial_step))
        written = gather(on_every_rank(partial(file_format.write, file, _share(parts))))
        on_first_rank(partial(_commit, final, written, state | {"step": step}, keep_last))
    except (OSError, ValueError) as error:
        if is_first_rank():
            shutil.rmtree(partial_step, ignore_errors=True)
        remedy = "make room, see that all ranks share the folder, and start again"
        if steps_in(final.parent):
            remedy += " with --init_from=resume"
        fact = f"cannot save checkpoint {final}: {reason(error)}; earlier checkpoints are untouched"
        raise OSError(f"{fact}; {remedy}") from error


def find(where: str | Path) -> Path:
    """The step directory that `where` means: itself; the one that a file RUN/latest or RUN/best names; of a run's
    folder, that of `latest`, or the newest if the user has deleted it. Raises FileNotFoundError."""
    where = user_path(where)
    if (where / "state.json").is_file():
        return where
    pointer = where / "latest" if where.is_dir() else where
    run = pointer.parent
    if pointer.name not in ("latest", "best") or not run.is_dir():
        raise FileNotFoundError(f"no directory {where}; give the out_dir of a run, or one of its checkpoints")
    for _ in range(3):  # a run that saves may write another name meanwhile
        name = named_by(pointer)
        for found in (run / name, run / f"{name}.old"):  # .old: a process was killed while it replaced this step
            if STEP.fullmatch(name) and found.is_dir():
                return found
    steps = steps_in(run)
    if not steps:
        remedy = "give the out_dir of a run that has one, or train first, with --init_from=scratch"
        if (run / "config.json").is_file():
            remedy = f"a model of Hugging Face is named hf:{run}"
        raise FileNotFoundError(f"no checkpoint in {run}; {remedy}")
    if pointer.name == "best":
        raise FileNotFoundError(f"{pointer} names no checkpoint; use the latest one, {steps[-1]}")
    say_once(f"warning: {pointer} names no checkpoint, the newest one is {steps[-1]}")
    return steps[-1]


def named_by(pointer: Path) -> str:
    """The name in the file latest or best, "" if there is no such file."""
    if not pointer.is_file():
        return ""
    return read_file(pointer, LARGEST_NAME).decode(errors="replace").strip()


def read(where: str | Path, action: Callable[[Path, dict], T]) -> T:
    """action(path, state), where path = find(where) and state = read_state(path). Every rank calls it, and all ranks
    read the path that the first rank finds. What looks damaged is looked for and read once more, because the run may
    have deleted or replaced it meanwhile. Raises Damaged, or OSError if each one was deleted before it was read."""
    failed = None
    for _ in range(TRIES):
        path = on_first_rank(partial(find, where))
        try:
            return action(path, on_every_rank(partial(read_state, path)))
        except Damaged:
            if path == failed:
                raise
            failed = path
    raise OSError(f"{where} is saved to faster than it can be read; give the run that saves a larger --keep_last")


def read_index(path: Path, state: dict, tensors: dict[str, Tensor | Slice]) -> dict[str, Saved]:
    """name -> shape, dtype and pieces of those of the tensors that are in the checkpoint with this state. Every rank
    calls it. The first one reads the index, and sends each rank the pieces that its parts need. Raises Damaged."""
    parts = {name: own_part(tensor) for name, tensor in tensors.items()}
    asked = gather({name: (part.offsets, tuple(part.tensor.shape)) for name, part in parts.items()})
    return scatter(lambda: file_format.divide(file_format.read_index(path, state), asked))


def load(path: Path, tensors: dict[str, Tensor | Slice], index: dict[str, Saved], vocab_size: float = math.inf):
    """Read the named tensors in place, from a checkpoint of any number of ranks with this index. Every rank calls it.
    Rows of padding behind the `vocab_size` rows of the vocabulary's weights may be more or fewer, see `unpadded`; those
    that were not saved become 0. ValueError on every rank if a name is absent, its shape or dtype differs, or a tensor
    is not finite; Damaged for damaged files."""
    parts = {name: own_part(tensor) for name, tensor in tensors.items()}

    def check_and_fill():
        for name, part in parts.items():
            saved = index.get(name)
            dtype = part.tensor.dtype
            same_shape = saved and unpadded(name, saved.shape, vocab_size) == unpadded(name, part.shape, vocab_size)
            if not same_shape or saved.dtype != dtype:
                found = f"{saved.shape} {saved.dtype}" if saved else "absent"
                fact = f"{name} is {found} in checkpoint {path}, {part.shape} {dtype} here"
                raise ValueError(f"{fact}; use the flags of its training")
        for name, part in parts.items():
            if index[name].shape != part.shape:
                part.tensor.zero_()
            file_format.fill(path, name, index[name], part)
            fact = f"{name} in checkpoint {path} has numbers that are not finite"
            require(file_format.finite(part.tensor), f"{fact}; use an earlier checkpoint")

    on_every_rank(check_and_fill)


def unpadded(name: str, shape: tuple[int, ...], vocab_size: float) -> tuple[int, ...]:
    """The shape of a tensor without the rows of padding that the vocabulary's weights and their optimizer states have
    under tp. How many these are depends on the number of ranks."""
    if shape and name.partition(".")[2].startswith(VOCAB_WEIGHTS):
        return (min(shape[0], vocab_size), *shape[1:])
    return shape


def _share(parts: dict[str, Slice]) -> dict[str, Slice]:
    """Those of the parts that this rank writes; ranks that have the same parts take turns. All ranks call it."""
    # With the shape, because an empty part has the offsets of another one
    boxes = [repr((name, part.offsets, part.tensor.shape)).encode() for name, part in parts.items()]
    held = gather([hashlib.blake2b(box, digest_size=16).digest() for box in boxes])  # shorter than boxes
    holders = defaultdict(list)
    for rank, hashes in enumerate(held):
        for box in hashes:
            holders[box].append(rank)
    writer = {box: ranks[turn % len(ranks)] for turn, (box, ranks) in enumerate(holders.items())}
    mine = scatter(lambda: [[writer[box] == rank for box in hashes] for rank, hashes in enumerate(held)])
    return {name: parts[name] for name, turn in zip(parts, mine, strict=True) if turn}


def _begin(partial_step: Path):
    """Make this directory, after removing what processes left that were killed."""
    out_dir = partial_step.parent
    out_dir.mkdir(parents=True, exist_ok=True)
    for old in list(out_dir.glob("step_*.old")):
        if LEFTOVER.fullmatch(old.name) and not old.with_suffix("").exists():
            old.rename(old.with_suffix(""))
    for entry in list(out_dir.iterdir()):
        if LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
            with suppress(OSError):  # what is no folder, such as a link
                entry.unlink()
    partial_step.mkdir(exist_ok=True)


def _commit(final: Path, written: list[dict], state: dict, keep_last: int):
    """Complete a step, then update `best` and `latest`, then delete old steps; each by one rename. `written` is what
    file_format.write has returned on each rank."""
    out_dir = final.parent
    partial_step = final.with_name(f".tmp-{final.name}")
    _write_index(partial_step, written, state)
    old = final.with_name(f"{final.name}.old")
    if final.exists():
        final.rename(old)
    partial_step.rename(final)
    fsync(out_dir)
    if old.exists():
        _remove(old)
    best = out_dir / "best"
    if state["best_step"]:
        write_file(best, f"{step_name(state['best_step'])}\n".encode())
    elif named_by(best) >= final.name:  # a later step, from which the run has gone back
        best.unlink()
    write_file(out_dir / "latest", f"{final.name}\n".encode())  # last: a run that is killed before finds its best again
    fsync(out_dir)
    # If the user has gone back to an earlier checkpoint, there are later steps. They stay.
    steps = [path for path in steps_in(out_dir) if step_of(path) <= state["step"]]
    pointed = [named_by(out_dir / "latest"), named_by(out_dir / "best")]
    for path in steps[:-keep_last]:
        if path.name not in pointed:
            _remove(path)


def _write_index(partial_step: Path, written: list[dict], state: dict):
    """Write index.json and state.json beside the files of the ranks, and check that these are complete."""
    index = {}
    for entries in written:
        for name, entry in entries.items():
            index.setdefault(name, entry | {"pieces": []})["pieces"] += entry["pieces"]
    text = json.dumps(index).encode()
    state = state | {"format": file_format.FORMAT, "index_sha256": hashlib.sha256(text).hexdigest()}
    write_file(partial_step / "index.json", text)
    write_file(partial_step / "state.json", json.dumps(state, indent=1).encode())
    file_format.read_index(partial_step, state)
    fsync(partial_step)


def _remove(directory: Path):
    """Delete a directory after renaming it, so that a process that is killed meanwhile leaves no half checkpoint. Files
    that cannot be deleted now, for example because another process reads them over NFS, are left to the next save."""
    shutil.rmtree(directory.rename(directory.with_name(f".tmp-{directory.name}")), ignore_errors=True)
