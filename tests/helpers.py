"""Functions that several tests share: flags of a tiny run, what it logs, comparisons, the error line of a command."""

import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data.files import Shard
from engine.checkpoint import contents
from engine.checkpoint import files as checkpoint

ROOT = Path(__file__).parent.parent
TINY = [
    "--n_layer=2", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=4", "--gradient_accumulation_steps=2",
    "--max_iters=40", "--eval_interval=20", "--eval_iters=2", "--warmup_iters=5", "--learning_rate=1e-2",
    "--device=cpu", "--dtype=float32", "--compile=False",
]  # fmt: skip


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def state_of(where: Path) -> dict:
    """state.json of a checkpoint, or of a run's latest one."""
    return checkpoint.read_state(checkpoint.find(where))


def edit_state(where: Path, **changes):
    """Replace keys of it."""
    file = checkpoint.find(where) / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def holds_files(folder: Path) -> bool:
    """Whether a folder has any file but that of its lock."""
    return any(path.is_file() and path.name != ".lock" for path in folder.rglob("*"))


def tensors_in(where: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, or of a run's latest one, each read as a whole."""
    path = checkpoint.find(where)
    index = contents.read_index(path, checkpoint.read_state(path))
    tensors = {name: torch.empty(saved.shape, dtype=saved.dtype) for name, saved in index.items()}
    checkpoint.load(path, tensors, index)
    return tensors


def weights_in(where: Path) -> dict[str, torch.Tensor]:
    return {name[6:]: x for name, x in tensors_in(where).items() if name.startswith("model.")}


TIMES = {"tokens_per_s", "mfu", "ms_per_step", "peak_memory_bytes"}


def figures(folder: Path) -> list[dict]:
    """All that a run has logged but what measures time and memory."""
    return [{key: line[key] for key in line.keys() - TIMES} for line in metrics(folder)]


def losses(folder: Path) -> list[tuple]:
    """What must not depend on time or place: (step, loss, ...) of logged steps, (step, train, val) of evaluations."""
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "train_loss", "val_loss", "val_bpb", "skipped")
    return [tuple(line[key] for key in keys if key in line) for line in metrics(folder)]


def steps_of(folder: Path) -> list[tuple]:
    """The `losses` of the logged steps, without those of evaluations."""
    return [line for line in losses(folder) if len(line) == 5]


def distance(lines: list[tuple], exact: list[tuple]) -> float:
    """The largest difference of two runs' `losses`, relative to the second's. There are three lines at least."""
    assert len(lines) == len(exact) >= 3
    pairs = [pair for a, b in zip(lines, exact, strict=True) for pair in zip(a, b, strict=True)]
    assert all((a is None) == (b is None) for a, b in pairs)
    return max(abs(a - b) / (abs(b) or 1) for a, b in pairs if b is not None)


IN_FLOAT64 = "--dtype=float64"


def in_both(runs: dict[str, list[str]]) -> list[tuple[str, list[str]]]:
    """The flags of each run, by name, and the same for float64."""
    return [pair for name, flags in runs.items() for pair in ((name, flags), (f"{name}, wide", [*flags, IN_FLOAT64]))]


def assert_same_but_for_rounding(folder: Path, alone: dict[str, Callable[..., list[tuple]]], in_float32: list[str]):
    """The `losses` of the runs that `in_both` has named are those that alone[name](*flags) has of one process: in
    float64 to 1e-9; in float32, which only some runs are `in_float32`, they may differ from float64 ten times as much
    as the worst of these does in one process, as that depends on the CPU."""
    exact = {name: call(IN_FLOAT64) for name, call in alone.items()}
    for name in alone:
        assert (error := distance(losses(folder / f"{name}, wide"), exact[name])) < 1e-9, f"{name}: {error} in float64"
    usual = max([distance(alone[name](), exact[name]) for name in in_float32], default=0.0)
    for name in in_float32:
        assert (error := distance(losses(folder / name), exact[name])) < 10 * usual, f"{name}: {error}, usual: {usual}"


def shards_of(*arrays: np.ndarray) -> list[Shard]:
    """Headerless files of these tokens, which are gone with the shards."""
    shards = []
    for array in arrays:
        with tempfile.NamedTemporaryFile() as f:
            array.tofile(f)
            f.flush()
            shards.append(Shard(Path(f.name), array.dtype, 0, len(array)))
    return shards


def read_all(stream) -> list[int]:
    """All tokens of a split."""
    return stream.read(0, len(stream)).tolist()


def assert_rounds_alike(got, plain, exact, what: str):
    """Tensors or lists of n numbers: got and plain are two computations of the same in bfloat16, exact is a finer one.
    CPUs round differently, so the errors of got are compared with plain's: at most three times as large, and a mean of
    n roundings more; and at least a hundredth, as those of another dtype would not be. A common factor that is smaller
    than the errors of single numbers shows in the projection on exact, where roundings average out."""
    got, plain, exact = (torch.as_tensor(x).detach().double().flatten() for x in (got, plain, exact))
    unit, size, root = torch.finfo(torch.bfloat16).eps / 2, exact.norm(), len(exact) ** 0.5
    error, usual = ((x - exact).norm() / size for x in (got, plain))
    limit = 3 * usual + unit / root
    assert usual / 100 <= error <= limit, f"{what} errs by {error:.1e} of its size, bfloat16 explains {limit:.1e}"
    factor, limit = 1 + (got - plain) @ exact / size**2, unit + 4 * usual / root
    assert abs(factor - 1) <= limit, f"{what} is {factor:.4f} times what it should be, bfloat16 explains {limit:.4f}"


class Operations(TorchDispatchMode):
    """Calls note(operator, args, kwargs, result) of each operation on tensors."""

    def __init__(self, note: Callable):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        result = f(*args, **(kwargs or {}))
        self.note(f, args, kwargs, result)
        return result


class Bomb:
    """Whoever unpickles it makes a file BOOM in the present folder."""

    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path('BOOM').touch()",)


def refused(main: Callable, argv: list, capture, fragments: Iterable[str] = ()) -> str:
    """The line on stderr with which main(argv) ends, with code 2; it has all fragments. `capture`: capsys or capfd."""
    capture.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in argv])
    out, err = capture.readouterr()
    assert stop.value.code == 2, (out, err)
    assert err.startswith("error: ") and len(err.strip().splitlines()) == 1 and "Traceback" not in err, err
    assert all(fragment in err for fragment in fragments), err
    return err


def gone(pid: int) -> bool:
    """Whether the process has ended. Nobody may have asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end between the two calls of reading a file
        return True


def changes_until_killed(action: Callable, last: int = 10**9) -> int:
    """Runs action in a fork that is killed before its `last` change of files; sys.audit("change") is one too. Returns
    how many it has begun."""
    read, write = os.pipe()
    if (process := os.fork()) == 0:
        numbers = itertools.count(1)

        def hook(event, args):
            written = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            changes = written or event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "change")
            if changes and "__pycache__" not in str(args):
                os.write(write, b".")
                if next(numbers) == last:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.stdout = sys.stderr = open(os.devnull, "w")
        sys.addaudithook(hook)
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    assert os.waitpid(process, 0)[1] in (0, signal.SIGKILL)
    with open(read, "rb") as begun:
        return len(begun.read())


def until(what: Callable[[], bool]):
    """Waits until what() is true."""
    end = time.monotonic() + 600
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)
