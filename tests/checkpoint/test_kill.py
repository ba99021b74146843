"""kill -9 at 207 random instants of runs that save every three steps: nothing is lost, the losses do not change."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT, TINY, figures, gone, metrics, tensors_in, until
from ranks import begin
from test_train import MASKED, MODERN, SEQ2SEQ

from engine.checkpoint import files as checkpoint

COMMON = [*TINY, "--lr_decay_iters=300", "--min_lr=2e-3", "--eval_interval=5", "--eval_iters=6"]
SETTINGS = {  # processes, kills, flags
    "plain": (1, 25, ["--dropout=0.1"]),
    "async": (1, 25, ["--dropout=0.1", "--async_checkpoint=True"]),
    "muon": (1, 25, MODERN),
    "mixture": (1, 25, ["--dataset=TINY:0.7,MORE:0.3"]),
    "masked": (1, 25, MASKED),
    "seq2seq": (1, 25, SEQ2SEQ),
    "ddp": (2, 12, ["--dropout=0.1"]),
    "fsdp": (2, 12, ["--parallel=fsdp", "--async_checkpoint=True"]),
    "torchrun alone": (2, 12, ["--dropout=0.1"]),
    "one worker": (2, 21, ["--dropout=0.1", "--async_checkpoint=True"]),  # torchrun --max_restarts starts both again
}


class Torchrun(subprocess.Popen):
    """train.py under torchrun, with the methods of a multiprocessing.Process."""

    def __init__(self, restarts: int, argv: list[str], log: Path):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", f"--max_restarts={restarts}"]
        with open(log, "w") as file:
            super().__init__(
                [sys.executable, *launcher, "train.py", *argv],
                cwd=ROOT, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip

    def workers(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def is_alive(self) -> bool:
        return self.poll() is None

    def join(self, timeout: float | None = None) -> int:
        return self.wait(timeout)

    @property
    def exitcode(self) -> int | None:
        return self.returncode


def kill(pid: int):
    """Kills the process and waits until it is gone, although torchrun's workers are no children of this process."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid))


def check(out: Path, asynchronous: bool):
    """All that lies there can be read, and it goes as far as metrics.jsonl promises."""
    for step_dir in out.glob("step_*"):
        tensors_in(step_dir)
    lines = metrics(out) if (out / "metrics.jsonl").exists() else []
    saved = max([0, *(line["step"] for line in lines if line["kind"] == "train")]) // 3 * 3 - 3 * asynchronous
    for pointer in ["latest"] * (saved > 0) + ["best"] * (out / "best").exists():
        assert checkpoint.step_of(checkpoint.find(out, pointer)) >= (saved if pointer == "latest" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_killed_runs_go_on(tiny_data, more_data, tmp_path, setting):
    """Every checkpoint directory that a kill leaves can be read, and the next start goes on from the latest one.

    Where torchrun alone is killed its workers train on, and a second run is refused as long as they do.
    """
    processes, kills, flags = SETTINGS[setting]
    asynchronous = "--async_checkpoint=True" in flags
    out, rng, logs = tmp_path / "killed", random.Random(setting), []
    flags = [flag.replace("TINY", str(tiny_data)).replace("MORE", str(more_data)) for flag in flags]
    flags = [*COMMON, f"--dataset={tiny_data}", *flags]

    def start(max_iters: int = 20_000, out: Path = out, save_interval: int = 3):
        logs.append(tmp_path / f"{len(logs)}.log")
        how = "resume" if (out / "latest").exists() else "scratch"
        argv = [*flags, f"--max_iters={max_iters}", f"--out_dir={out}", f"--init_from={how}"]
        argv.append(f"--save_interval={save_interval}")
        if processes > 1:
            return Torchrun(kills * (setting == "one worker"), argv, logs[-1])
        return begin(["train.py", *argv], tmp_path, stdout=logs[-1], unbuffered=True)

    def said() -> str:
        return logs[-1].read_text() if logs[-1].exists() else ""

    def end(process):
        os.kill(process.pid, signal.SIGSTOP)  # torchrun must not start another one now
        workers = process.workers() if processes > 1 else []
        kill(process.pid)
        process.join()
        if setting == "torchrun alone":
            second = start()
            assert second.join(120) == 1
            errors = [line for line in said().splitlines() if line.startswith("error: ")]
            assert len(errors) == 1 and any(f"belongs to process {pid} on" in errors[0] for pid in workers), said()
        for pid in workers:  # torchrun's processes have sessions of their own
            kill(pid)

    def end_one_worker(process):
        until(lambda: len(process.workers()) == 2)
        old = process.workers()
        kill(rng.choice(old))
        until(lambda: len(process.workers()) == 2 and not set(old) & set(process.workers()))
        for pid in (new := process.workers()):  # what lies there must not change while it is checked
            os.kill(pid, signal.SIGSTOP)
        check(out, asynchronous)
        for pid in new:
            os.kill(pid, signal.SIGCONT)

    process = None
    for i in range(kills):
        if process is None:
            process, seen = start(), 0
        if trains := rng.random() < 0.8 or setting == "torchrun alone":  # the others die while starting
            until(lambda p=process, n=seen: "iter " in said()[n:] or not p.is_alive())
        time.sleep(rng.uniform(0, ((2, 1), (10, 4))[processes > 1][trains]))  # seconds
        assert process.is_alive(), f"the run ended by itself before kill {i}:\n{said()}"
        if setting == "one worker" and i < kills - 1:
            end_one_worker(process)
            seen = len(said())
        else:
            process = end(process)
            check(out, asynchronous)

    last = checkpoint.step_of(checkpoint.find(out)) + 20
    for folder, interval in ((out, 3), (tmp_path / "whole", 0)):
        process = start(last, folder, interval)
        process.join()
        assert process.exitcode == 0, said()
    killed, whole = (figures(f) for f in (out, folder))
    assert killed == whole
    assert [line["step"] for line in whole if line["kind"] == "train"] == list(range(last))
