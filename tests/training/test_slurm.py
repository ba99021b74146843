"""config/slurm/train.sbatch with a pretended Slurm of two nodes, and a pretended torchrun."""

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers import ROOT, until

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait $pid || code=$?; done
exit ${code:-0}
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then echo first; echo second; else echo "scontrol $*" >> "$LOG"; fi
"""
PYTHON = """#!/bin/bash
if [[ $1 == -c ]]; then exec {python} "$@"; fi
echo "torchrun $SLURM_NODEID $*" >> "$LOG"
if [[ $SLURM_NODEID != 0 ]]; then exit {code}; fi
bash -c 'trap "echo saved >> \\"$LOG\\"; exit 0" TERM; echo ready >> "$LOG"; {work}' &
wait $!
exit {code}
"""


@pytest.fixture
def job(tmp_path):
    """job(*flags) starts the script; torchrun's worker works until it is told to stop, or fails with a code."""
    log = tmp_path / "log"
    started = []

    def call(*flags: str, code: int = 0) -> subprocess.Popen:
        log.unlink(missing_ok=True)
        work = "exit" if code else "while true; do sleep 0.1; done"
        python = PYTHON.format(python="echo" if code else sys.executable, code=code, work=work)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", python)):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        slurm = {"JOB_ID": "4242", "NNODES": "2", "JOB_NODELIST": "two", "GPUS_ON_NODE": "4", "CPUS_ON_NODE": "32"}
        env = {f"SLURM_{name}": value for name, value in slurm.items()}
        env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": f"{tmp_path}/python", "TMPDIR": str(tmp_path)}
        process = subprocess.Popen(
            ["bash", "config/slurm/train.sbatch", f"--out_dir={tmp_path}/out", *flags],
            cwd=ROOT, env=os.environ | env | {"LOG": str(log)}, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    call.log = lambda: log.read_text().splitlines() if log.exists() else []
    yield call
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # the session of its own that it was started in
        except ProcessLookupError:
            pass


def test_the_signal_saves_and_queues_again(job, tmp_path):
    """Both nodes meet at the first one; a job that starts on a run goes on with it."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "latest").write_text("step_00000100")
    process = job("config/train_gpt2.py", "--seed=3")
    until(lambda: "ready" in job.log())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=600) == 0
    torchruns = sorted(line for line in job.log() if line.startswith("torchrun"))
    assert [line for line in job.log() if line not in torchruns] == ["ready", "saved", "scontrol requeue 4242"]
    flags = f"train.py --out_dir={tmp_path}/out config/train_gpt2.py --seed=3 --init_from=resume"
    ring = "--nnodes=2 --nproc_per_node=4 --max_restarts=3 --rdzv_id=4242 --rdzv_backend=c10d"
    assert torchruns == [
        f"torchrun {node} -m torch.distributed.run {ring} --rdzv_endpoint=first:24242 --rdzv_conf=is_host={1 - node} "
        + flags
        for node in (0, 1)
    ]


def test_a_failure_is_not_queued_again(job):
    assert job(code=7).wait(timeout=600) == 7
    assert not any("requeue" in line or "resume" in line for line in job.log())
