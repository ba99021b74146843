"""Several ranks on this machine, forked from a process that has imported everything: torchrun takes ten seconds longer.

launch(2, work, folder, *args)            # work(*args) on both ranks, which find in the environment what torchrun says
exit_codes(2, work, folder, *args)        # the same where they may fail
launch(1, torchrun, folder, work, *args)  # the same under torchrun, whose agent starts two workers
command(["train.py", "--help"], folder)   # a program, as python train.py --help runs it
"""

import faulthandler
import gc
import io
import itertools
import multiprocessing
import os
import pkgutil
import resource
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import connection, forkserver
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from engine.parallel.layout import Slice

ROOT = Path(__file__).parent.parent
IMPORTED = """
    train engine.parallel.pipeline tensorboard.summary.writer.record_writer torch._dynamo
    torch.distributed.fsdp torch.distributed.tensor torch.distributed.tensor.parallel
""".split()
BACKWARD = "engine.parallel.sharded:ShardedModel.backward"  # which is called once a step
OTHERS = []  # files that were open when the server was forked

# Below the ports that a system gives to outgoing connections, which could take one before a rank listens there,
# or between two runs. Other processes of pytest have other ones.
FIRST_PORT = 12000 + 50 * (os.getpid() % 400)
PORTS = itertools.cycle(range(FIRST_PORT, FIRST_PORT + 50))


def is_free(port: int) -> bool:
    with socket.socket() as found:
        try:
            found.bind(("localhost", port))
        except OSError:
            return False
    return True


def launch(size: int, work: Callable, folder: Path, *args, fresh: bool = False) -> str:
    """work(*args) in `size` new processes, which print into files in the folder. Returns what the first one printed.
    Fails if one of them fails. If they are `fresh`, the first two are Pythons of their own, as torchrun starts them:
    these and the others order sets of texts differently. A Python takes 3.5 s of a CPU."""
    codes = exit_codes(size, work, folder, *args, fresh=fresh)
    logs = [folder / f"rank {rank}" for rank in range(size)]
    said = "\n".join(log.read_text()[-3000:] for log in logs if log.exists())
    assert codes == [0] * size, f"exit codes {codes}\n{said}"
    return logs[0].read_text()


def serve(path: str, args: list[str], fds: list[int]) -> int:
    """Makes this process the one that others are forked from: a fork of it waits until it is asked for the first time.
    Takes the place of multiprocessing's spawnv_passfds, and returns the fork's number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        faulthandler.disable()  # which pytest lets write to a file of its own
        opened = {int(name) for name in os.listdir("/dev/fd")}
        OTHERS.extend(opened.difference(range(3), fds))
        redirect(1, 2)
        listener, alive, *key = fds
        asked, _, _ = select.select(fds, [], [])
        if alive in asked:  # all tests have ended, and none has asked
            return 0
        more = {"authkey_r": key[0]} if key else {}  # since Python 3.14
        forkserver.main(listener, alive, IMPORTED, **more)
    finally:
        os._exit(0)


def redirect(out: int, err: int):
    """Give stdout and stderr these files. What loggers of the process that was forked may write to is stderr too."""
    os.dup2(out, 1)
    for fd in (2, *OTHERS):
        os.dup2(err, fd)


def start(target: Callable, all_args: list[tuple]) -> list[multiprocessing.Process]:
    """For each args a new process that calls target(*args)."""
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=target, args=args) for args in all_args]
    for each in processes:
        each.start()
    return processes


def start_fresh(target: Callable, all_args: list[tuple]) -> list[multiprocessing.Process]:
    """As start, but each process is a new Python with another order of sets."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=target, args=args) for args in all_args]
    with pytest.MonkeyPatch.context() as patch:
        for seed, each in enumerate(processes):
            patch.setenv("PYTHONHASHSEED", str(seed))
            each.start()
    return processes


def exit_codes(size: int, work: Callable, folder: Path, *args, fresh: bool = False) -> list[int | None]:
    """Of `size` new processes that call work(*args); None of one that is killed because it ends too late."""
    port = next(filter(is_free, PORTS))
    all_args = [(rank, size, port, folder, work, args) for rank in range(size)]
    n_fresh = 2 if fresh else 0
    ranks = start_fresh(_rank, all_args[:n_fresh]) + start(_rank, all_args[n_fresh:])
    wait_for(ranks)
    codes = [each.exitcode for each in ranks]
    for each in ranks:
        each.kill()
    return codes


def wait_for(ranks: list[multiprocessing.Process]):
    """Wait until all have ended, for ten minutes, or for two minutes after one of them has failed."""
    end = time.monotonic() + 600
    running = ranks
    while running and time.monotonic() < end:
        connection.wait([each.sentinel for each in running], timeout=1)
        if any(each.exitcode for each in ranks):
            end = min(end, time.monotonic() + 120)  # the others end soon, or wait for this one
        running = [each for each in ranks if each.exitcode is None]


def _rank(rank: int, size: int, port: int, folder: Path, work: Callable, args: tuple):
    with open(folder / f"rank {rank}", "a") as log:
        redirect(log.fileno(), log.fileno())
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    join = dist.init_process_group

    def join_once(*args, **kwargs):
        """All runs of this process have one group."""
        if not dist.is_initialized():
            join(*args, **kwargs)

    dist.init_process_group = join_once
    work(*args)
    if dist.is_initialized():
        dist.destroy_process_group()


def command(program: list[str], folder: Path, **options) -> tuple[int, str]:
    """The exit code of a program, such as ["-m", "tools.plot", "--help"], and what it says on stderr."""
    process = begin(program, folder, **options)
    process.join(600)
    return process.exitcode, (folder / "stderr").read_text()


def begin(program: list[str], folder: Path, stdout=os.devnull, unbuffered=False, largest=0) -> multiprocessing.Process:
    """The program's process, with stderr in the folder. `unbuffered`: python's -u, `largest`: most bytes of a file."""
    [process] = start(_command, [(program, stdout, folder / "stderr", unbuffered, largest)])
    return process


def _command(program: list[str], stdout: str, stderr: Path, unbuffered: bool, largest: int):
    new = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    redirect(os.open(stdout, new), os.open(stderr, new))
    out = open(1, "wb", buffering=0 if unbuffered else -1, closefd=False)
    sys.stdout = io.TextIOWrapper(out, write_through=unbuffered)
    sys.__stdout__ = sys.stdout
    sys.stderr = open(2, "w", closefd=False)
    if largest:
        sys.dont_write_bytecode = True  # a part of it would fail all later imports
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    torch.set_num_threads(1)
    os.chdir(ROOT)
    sys.argv = program[program[0] == "-m" :]
    if program[0] == "-m":
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # by engine.start, which is imported already
        sys.modules.pop(program[1], None)  # which a test may have imported
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")


def torchrun(work: Callable, *args, **config):
    """torchrun's agent in this process, and two workers that are forked from it and call work(*args)."""
    config = {"max_restarts": 0} | config  # as on torchrun's command line
    where = {"run_id": "test", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "start_method": "fork"}
    elastic_launch(LaunchConfig(1, 1, 2, **where, **config), work)(*args)


def act_in(call: int, where: str, action: Callable):
    """From now on the second rank begins this call of a function, such as "train:Run.save", with action(*args)."""
    plain = pkgutil.resolve_name(where)
    calls = itertools.count(1)

    def counted(*args):
        if next(calls) == call and os.environ["RANK"] == "1":
            action(*args)
        return plain(*args)

    pytest.MonkeyPatch().setattr(where.replace(":", "."), counted)


def train_until(call: int, number: int, flags: list[str], where: str = BACKWARD):
    """train_main, whose second rank sends itself this signal in this call of a function after its first start."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        act_in(call, where, lambda *_: os.kill(os.getpid(), number))
    train_main(flags)


def train_main(flags: list[str]):
    """train.py with these flags. --dtype=float64, known here alone, makes all tensors in it, and none is cast."""
    import train
    from engine import optim

    with pytest.MonkeyPatch.context() as patch:
        if "--dtype=float64" in flags:
            flags = [flag.replace("float64", "float32") for flag in flags]  # where nothing is cast
            patch.setattr(optim, "iteration_dtype", lambda dtype: torch.float64)
            torch.set_default_dtype(torch.float64)
        gc.freeze()  # so that a run's first collection does not walk all modules and tests: a quarter of a second
        try:
            train.main(flags)
        finally:
            torch.set_default_dtype(torch.float32)


def train_runs(all_flags: list[list[str]], saved: bool = True):
    """train.py with each of these flags, in the same processes. Without `saved`, which is enough for figures,
    checkpoints are written at a save_interval alone."""
    import train

    save = train.Run.save

    def save_at_intervals(run, *args, **kwargs):
        if run.cfg.save_interval:
            save(run, *args, **kwargs)

    if not saved:
        train.Run.save = save_at_intervals
    train.leave = lambda: None
    for flags in all_flags:
        train_main(flags)


def part_of(whole: Tensor, part: Slice) -> Tensor:
    """What a rank holds of a whole tensor, as `part` is placed in another one of this shape."""
    ends = (start + n for start, n in zip(part.offsets, part.tensor.shape, strict=True))
    return whole[tuple(map(slice, part.offsets, ends))]
