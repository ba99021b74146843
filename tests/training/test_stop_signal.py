"""Signals: which ones save and stop, which end the process, and that all ranks stop at the same step."""

import os
import signal
import time

import pytest
import torch

import train
from engine.checkpoint import files as checkpoint
from engine.parallel import ranks as parallel
from engine.parallel.sharded import ShardedModel
from engine.stop_signal import STOPPING, StopSignal
from tests.helpers import IN_FLOAT64, TINY, distance, losses, state_of, steps_of, tensors_in
from tests.ranks import BACKWARD, act_in, begin, exit_codes, launch, train_until

ALONE = parallel.Ranks(0, 1, torch.device("cpu"), torch.float32, False)


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGHUP], ids=["head", "tee", "closed"])
def test_a_pipe_that_nobody_reads_any_more(number, tiny_data, tmp_path, run):
    """`| head -3` ends the run like a SIGTERM. A terminal sends Ctrl-C to `| tee` too, which then reads nothing, and
    SIGHUP when it is closed."""
    flags = [*TINY, f"--dataset={tiny_data}", "--max_iters=100000", "--lr_decay_iters=40", "--log_interval=1"]
    os.mkfifo(tmp_path / "pipe")
    process = begin(["train.py", *flags, f"--out_dir={tmp_path / 'cut'}"], tmp_path, stdout=tmp_path / "pipe")
    with open(tmp_path / "pipe") as lines:
        next(line for line in lines if line.startswith("iter 5:"))
        if number is not None:
            os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "stderr").read_text() == f"{STOPPING}\n"
    step = state_of(tmp_path / "cut")["step"]
    assert step >= 6
    assert steps_of(tmp_path / "cut") == steps_of(run(f"--max_iters={step}", "--lr_decay_iters=40", out="whole"))


def train_with_a_signal_in_an_evaluation(flags: list[str]):
    """train.py, whose second rank alone gets a signal in the second batch of the second evaluation; its tenth fails."""
    loss = "engine.parallel.sharded:ShardedModel.loss"
    first = 21 + 8  # batches of train and val in the first evaluation
    act_in(first + 10, loss, lambda *_: 1 / 0)
    train_until(first + 2, signal.SIGTERM, flags, loss)


def test_a_signal_in_an_evaluation(run, tiny_data, tmp_path):
    """torchrun kills its workers 30 s after it. The resumed run evaluates again, as if nothing had been."""
    flags = ["--max_iters=8", "--eval_interval=6", "--eval_iters=42", IN_FLOAT64]
    common = [*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'cut'}"]
    said = launch(2, train_with_a_signal_in_an_evaluation, tmp_path, [*common, *flags])
    assert checkpoint.find(tmp_path / "cut").name == "step_00000006"
    assert "stopped by a signal to another rank" in said
    assert "with step 6 saved" in said
    assert len(losses(tmp_path / "cut")) == 1 + 6  # no second evaluation
    run("--init_from=resume", *flags, out="cut")
    assert distance(losses(tmp_path / "cut"), losses(run(*flags, out="whole"))) < 1e-9


def train_with_a_signal_in_the_first_step(flags: list[str]):
    def backward(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    ShardedModel.backward = backward
    train.main(flags)


def test_a_signal_in_the_first_step(tiny_data, tmp_path):
    """Which may compile for minutes: nothing would be lost, so the process ends at once."""
    flags = [*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'out'}", "--eval_iters=1"]
    assert exit_codes(1, train_with_a_signal_in_the_first_step, tmp_path, flags) == [-signal.SIGTERM]
    assert "Traceback" not in (tmp_path / "rank 0").read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_is_answered(rank, capfd, in_this_process):
    """By rank 0, after whose message a second signal has its default action: it ends the process."""
    stop = StopSignal(parallel.Ranks(rank, 2, torch.device("cpu"), torch.float32, False))
    stop.listen()
    signal.raise_signal(signal.SIGINT)
    stop.listen()
    assert stop.name == "SIGINT"
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert capfd.readouterr().err == ("" if rank else f"{STOPPING}\n")


def test_signals_that_come_twice_by_themselves(capfd, monkeypatch, in_this_process):
    """A terminal that is closed sends SIGHUP by the shell and by the kernel, and torchrun turns two of them into SIGHUP
    and SIGTERM; Slurm may send SIGUSR1 again. Only a second SIGTERM or SIGINT ends the process at once."""
    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)
    stop = StopSignal(ALONE)
    stop.listen()
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
        signal.raise_signal(number)
        assert stop.name == "SIGHUP"
        assert stop.agreed()
        assert not exits
    signal.raise_signal(signal.SIGINT)
    assert exits == [128 + signal.SIGINT]
    assert capfd.readouterr().err.startswith(f"{STOPPING}\n")


def test_a_signal_that_is_ignored_stays_ignored(in_this_process):
    """As nohup does with SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopSignal(ALONE)
    stop.listen()
    signal.raise_signal(signal.SIGHUP)
    assert not stop.agreed()


def test_two_signals_at_once_end_the_process(monkeypatch, in_this_process):
    """torchrun passes two Ctrl-C on as SIGINT and SIGTERM, and Python calls both handlers after one long operation."""
    exits = []
    both = {signal.SIGINT, signal.SIGTERM}
    monkeypatch.setattr(os, "_exit", exits.append)
    StopSignal(ALONE).listen()
    signal.pthread_sigmask(signal.SIG_BLOCK, both)
    for number in both:
        signal.raise_signal(number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
    assert exits in ([128 + signal.SIGINT], [128 + signal.SIGTERM])


@pytest.mark.parametrize("call, where, steps", [(6, BACKWARD, {6, 7, 8}), (1, "engine.checkpoint.files:save", {4})])
def test_ranks_agree_on_the_step_at_which_they_stop(call, where, steps, tiny_data, tmp_path):
    """Although one alone gets the signal. After a save there is no further step, which would have to be saved again."""
    flags = [*TINY, f"--dataset={tiny_data}", "--max_iters=100000", f"--out_dir={tmp_path / 'cut'}"]
    said = launch(2, train_until, tmp_path, call, signal.SIGTERM, [*flags, "--eval_interval=4"], where)
    assert "stopped by a signal to another rank" in said
    saved = state_of(tmp_path / "cut")
    assert saved["step"] in steps
    assert saved["ranks"] == 2
    assert {f"rng.{rank}.cpu" for rank in (0, 1)} <= tensors_in(tmp_path / "cut").keys()
