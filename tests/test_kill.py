"""kill -9 at random instants of runs that save every three steps: nothing is lost, and the losses do not change."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, losses

from engine import checkpoint

STEPS = 1200


@pytest.mark.slow
@pytest.mark.parametrize("processes,kills", [(1, 25), (2, 10)])
def test_killed_runs_go_on(run, tiny_data, tmp_path, processes, kills):
    """Every checkpoint directory that a kill leaves can be read, and the next start goes on from the latest one."""
    flags = [f"--max_iters={STEPS}", "--eval_interval=100", "--dropout=0.1"]
    out, rng = tmp_path / "killed", random.Random(0)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] * (processes > 1)

    def start() -> subprocess.Popen:
        how = "resume" if (out / "latest").exists() else "scratch"
        command = [
            *TINY,
            *flags,
            f"--dataset={tiny_data}",
            f"--out_dir={out}",
            "--save_interval=3",
            f"--init_from={how}",
        ]
        return subprocess.Popen(
            [sys.executable, "-u", *launcher, "train.py", *command],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    for kill in range(kills):
        process = start()
        if rng.random() < 0.8:  # the others die while starting
            for line in process.stdout:
                if line.startswith("iter "):
                    break
        time.sleep(rng.uniform(0, 1.5))
        assert process.poll() is None, f"the run ended by itself before kill {kill}: {process.stdout.read()}"
        process.send_signal(signal.SIGSTOP)  # torchrun must not start another one now
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in [process.pid, *map(int, workers)]:  # torchrun's processes have sessions of their own
            os.kill(pid, signal.SIGKILL)
        process.communicate()
        for step_dir in out.glob("step_*[0-9]"):
            checkpoint.load(step_dir, {n: torch.empty(s, dtype=t) for n, (s, t) in checkpoint.shapes(step_dir).items()})

    process = start()
    said = process.communicate(timeout=600)[0]
    assert process.returncode == 0, said
    if processes == 1:
        assert losses(out) == losses(run(*flags))
    else:  # dropout differs between one rank and two: the reference is an undisturbed pair
        command = [*TINY, *flags, f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'whole'}"]
        subprocess.run(
            [sys.executable, *launcher, "train.py", *command],
            cwd=ROOT, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert losses(out) == losses(tmp_path / "whole")
    assert len([line for line in losses(out) if len(line) == 5]) == STEPS
