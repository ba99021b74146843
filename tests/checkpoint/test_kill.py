"""kill -9 at 149 random instants of runs that save every three steps: nothing is lost, the losses do not change."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from engine.checkpoint import files as checkpoint
from tests.helpers import TINY, figures, gone, metrics, tensors_in, until
from tests.ranks import begin
from tests.training.test_train import MASKED, MODERN, SEQ2SEQ

COMMON = [*TINY, "--lr_decay_iters=300", "--min_lr=2e-3", "--eval_interval=5", "--eval_iters=6"]
SETTINGS = {  # processes, kills, flags
    "plain": (1, 25, ["--dropout=0.1"]),
    "muon": (1, 25, MODERN),
    "mixture": (1, 25, ["--dataset=TINY:0.7,MORE:0.3"]),
    "masked": (1, 25, MASKED),
    "seq2seq": (1, 25, SEQ2SEQ),
    "ddp": (2, 12, ["--dropout=0.1"]),
    "fsdp": (2, 12, ["--parallel=fsdp"]),
}
INTERVAL = 3  # steps between two saves
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def kill(pid: int):
    """Kills the process and its children, once it can start no others, and waits until they are gone."""
    os.kill(pid, signal.SIGSTOP)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for each in (pid, *map(int, children)):
        os.kill(each, signal.SIGKILL)
        until(lambda each=each: gone(each))


def check(out: Path):
    """All that lies there can be read, and it goes as far as metrics.jsonl promises."""
    for step_dir in out.glob("step_*"):
        tensors_in(step_dir)
    lines = metrics(out) if (out / "metrics.jsonl").exists() else []
    last = max([0, *(line["step"] for line in lines if line["kind"] == "train")])
    saved = last // INTERVAL * INTERVAL
    if saved:
        assert checkpoint.step_of(checkpoint.find(out / "latest")) >= saved
    if (out / "best").exists():
        checkpoint.find(out / "best")


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_killed_runs_go_on(tiny_data, more_data, tmp_path, setting):
    """Every checkpoint directory that a kill leaves can be read, and the next start goes on from the latest one."""
    processes, kills, flags = SETTINGS[setting]
    out = tmp_path / "killed"
    log = tmp_path / "log"
    rng = random.Random(setting)
    flags = [flag.replace("TINY", str(tiny_data)).replace("MORE", str(more_data)) for flag in flags]
    flags = [*COMMON, f"--dataset={tiny_data}", *flags]

    def start(out: Path, max_iters: int, save_interval: int):
        log.write_text("")
        how = "resume" if (out / "latest").exists() else "scratch"
        argv = ["train.py", *flags, f"--max_iters={max_iters}", f"--out_dir={out}", f"--init_from={how}"]
        argv.append(f"--save_interval={save_interval}")
        if processes > 1:
            argv = [*TORCHRUN, *argv]
        return begin(argv, tmp_path, stdout=log, unbuffered=True)

    starting, training = (2, 1) if processes == 1 else (10, 4)  # most seconds before a kill
    for i in range(kills):
        process = start(out, 20_000, INTERVAL)
        if rng.random() < 0.8:
            until(lambda p=process: "iter " in log.read_text() or not p.is_alive())
            time.sleep(rng.uniform(0, training))
        else:
            time.sleep(rng.uniform(0, starting))
        assert process.is_alive(), f"the run ended by itself before kill {i}:\n{log.read_text()}"
        kill(process.pid)
        process.join()
        check(out)

    last = checkpoint.step_of(checkpoint.find(out)) + 20
    whole = tmp_path / "whole"
    for folder, interval in ((out, INTERVAL), (whole, 0)):
        process = start(folder, last, interval)
        process.join()
        assert process.exitcode == 0, log.read_text()
    expected = figures(whole)
    assert figures(out) == expected
    assert [line["step"] for line in expected if line["kind"] == "train"] == list(range(last))
