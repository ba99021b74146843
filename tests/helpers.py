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
from engine.checkpoint import file_format
from engine.checkpoint import files as checkpoint

ROOT = Path(__file__).parent.parent
TINY = [
    "--n_layer=2", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=4", "--gradient_accumulation_steps=2",
    "--max_iters=40", "--eval_interval=20", "--eval_iters=2", "--warmup_iters=5", "--learning_rate=1e-2",
    "--device=cpu", "--dtype=float32", "--compile=False",
]  # fmt: skip


def metrics(folder: Path) -> list[dict]:
    """The lines of a run's log."""
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def state_of(where: Path) -> dict:
    """state.json of a checkpoint, or of a run's latest one."""
    return checkpoint.read_state(checkpoint.find(where))


def edit_state(where: Path, **changes):
    """Replace keys of a checkpoint's state.json."""
    file = checkpoint.find(where) / "state.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps(state | changes))


def holds_files(folder: Path) -> bool:
    """Whether a folder has any file but that of its lock."""
    return any(path.is_file() and path.name != ".lock" for path in folder.rglob("*"))


def tensors_in(where: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, or of a run's latest one, each read as a whole."""
    path = checkpoint.find(where)
    index = file_format.read_index(path, checkpoint.read_state(path))
    tensors = {name: torch.empty(saved.shape, dtype=saved.dtype) for name, saved in index.items()}
    checkpoint.load(path, tensors, index)
    return tensors


def weights_in(where: Path) -> dict[str, torch.Tensor]:
    """The parameters of a checkpoint, or of a run's latest one, by their names in the model."""
    tensors = tensors_in(where)
    return {name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")}


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
    assert len(exact) >= 3, f"only {len(exact)} lines are compared"
    largest = 0.0
    for line, expected in zip(lines, exact, strict=True):
        for number, right in zip(line, expected, strict=True):
            if right is None:
                assert number is None, f"{line} instead of {expected}"
            else:
                largest = max(largest, abs(number - right) / (abs(right) or 1))
    return largest


IN_FLOAT64 = "--dtype=float64"


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
    unit = torch.finfo(torch.bfloat16).eps / 2
    size = exact.norm()
    root = len(exact) ** 0.5
    error = (got - exact).norm() / size
    usual = (plain - exact).norm() / size
    limit = 3 * usual + unit / root
    assert error <= limit, f"{what} errs by {error:.1e} of its size, bfloat16 explains {limit:.1e}"
    assert error >= usual / 100, f"{what} errs by {error:.1e} of its size, which is too little for bfloat16"
    factor = 1 + (got - plain) @ exact / size**2
    limit = unit + 4 * usual / root
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
    assert stop.value.code == 2, f"exit code {stop.value.code}\n{out}\n{err}"
    assert err.startswith("error: "), err
    assert len(err.strip().splitlines()) == 1, f"more than a line:\n{err}"
    for fragment in fragments:
        assert fragment in err, f"{fragment!r} is not in:\n{err}"
    return err


def gone(pid: int) -> bool:
    """Whether the process has ended. Nobody may have asked for its exit code yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it may end between the two calls of reading a file
        return True
    state, *_ = stat.rpartition(")")[2].split()
    return state == "Z"


def changes_until_killed(action: Callable, last: int = 10**9) -> int:
    """Runs action in a fork that is killed before its `last` change of files; sys.audit("change") is one too. Returns
    how many it has begun."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        numbers = itertools.count(1)

        def hook(event: str, args: tuple):
            if is_change(event, args):
                os.write(write, b".")
                if next(numbers) == last:
                    os.kill(os.getpid(), signal.SIGKILL)

        nowhere = open(os.devnull, "w")
        sys.stdout = nowhere
        sys.stderr = nowhere
        sys.addaudithook(hook)
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    _, status = os.waitpid(process, 0)
    assert status in (0, signal.SIGKILL), f"the fork ended with status {status}"
    with open(read, "rb") as begun:
        return len(begun.read())


def is_change(event: str, args: tuple) -> bool:
    """Whether an event of sys.audit begins a change of files, but for those that Python compiles."""
    if "__pycache__" in str(args):
        return False
    if event == "open":
        _, _, flags = args
        return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))
    return event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "change")


def until(what: Callable[[], bool]):
    """Waits until what() is true."""
    end = time.monotonic() + 600
    while not what():
        assert time.monotonic() < end, "it has not become true in ten minutes"
        time.sleep(0.05)
