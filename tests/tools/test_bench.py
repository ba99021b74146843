"""bench.py: wrong options, ratios of whole runs, child processes that end with it, the table; all on the CPU."""

import os
import signal
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from data.lock import locked
from engine import optim
from engine.parallel import ranks as parallel
from engine.parallel.sharded import ShardedModel
from engine.plan import accounting
from model import Model
from tests import ranks
from tests.helpers import ROOT, gone, refused, until
from tools import bench, speed, training_process

TRAIN = """
import pathlib, sys, time
pathlib.Path("seen").write_text("\\n".join(sys.argv[1:]))
for n in range(0, 50, 10):
    print(f"iter {n}: loss 1.0", flush=True)
    time.sleep(0.01)
"""
ENDLESS = """
import os, pathlib, subprocess, sys, time
other = subprocess.Popen(["sleep", "600"])
[out] = [arg.removeprefix("--out_dir=") for arg in sys.argv if arg.startswith("--out_dir=")]
pathlib.Path("seen.tmp").write_text(f"{os.getpid()} {other.pid} {out}")
os.replace("seen.tmp", "seen")
time.sleep(600)
"""


def checkout(folder: Path, train: str = TRAIN) -> Path:
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(train)
    return folder


def test_wrong_options(monkeypatch, capfd):
    monkeypatch.setattr(training_process, "Child", lambda *_: pytest.fail("something was started"))
    monkeypatch.setattr(speed, "ms_per_step", lambda *_: pytest.fail("something was measured"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for argv, fragments in (
        (["--against=."], ["nothing to train", "--max_iters"]),
        (["--rounds=0", "x"], ["rounds=0", "must be >0"]),
        (["--config=4L"], ["config=4L", "4L/128/T64/B12", "4L/192/T256/B8"]),
        (["--config=4L/192/T256/B8", "--max_iters=9"], ["config=4L/192/T256/B8", "leave one out"]),
        (["--config=124M"], ["config=124M", "needs a GPU with CUDA"]),
    ):
        refused(bench.main, argv, capfd, fragments)
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun says
    refused(bench.main, [], capfd, ["WORLD_SIZE is above 1"])


def test_a_run_that_fails(capfd, tmp_path):
    for train, words in (
        ("print('iter 0: x')", "fewer than two timings"),
        ("import sys; print('error: what is wrong\\n====', file=sys.stderr); sys.exit(1)", "what is wrong"),
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("import os; os.abort()", "SIGABRT"),
    ):
        there = checkout(tmp_path / words, train)
        argv = [f"--against={there}", "--n_layer=3"]
        refused(bench.main, argv, capfd, [words, f"{there}: python train.py --n_layer=3"])


def test_the_order_and_the_arguments_of_runs(tmp_path, monkeypatch, capfd):
    """Two checkouts and two runs, in order and reversed."""
    monkeypatch.setattr(bench, "ROOT", checkout(tmp_path / "ours"))
    theirs = checkout(tmp_path / "theirs")
    bench.main([f"--against={theirs}", "--run=--a=1 --b='x y'", "--run=", "--rounds=2", "config/c.py"])
    lines = capfd.readouterr().out.splitlines()
    order = [line.partition(": ")[2].rpartition(":")[0] for line in lines[:8]]
    assert order[:4] == order[7:3:-1]
    assert order[0].startswith(f"{theirs} --a=1")
    assert [line.partition(": ")[0] for line in lines[8:]] == order[1:4]
    *given, out, log = (theirs / "seen").read_text().splitlines()
    assert given == ["--a=1", "--b=x y", "config/c.py"]
    assert out.startswith("--out_dir=")
    assert log == "--log_interval=10"


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """A clock that stands still; the fake work of a test moves it."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def test_the_first_steps_of_a_run_are_not_timed(clock, monkeypatch):
    """Of ten lines, the first two do not count: ten steps take 5 s before them, and 30 ms after them."""

    def lines():
        for n in range(10):
            clock.now += 5 if n < 3 else 0.03
            yield f"iter {10 * n}: loss 1\n"

    run = SimpleNamespace(lines=lines(), failure=lambda: "", start=lambda: None)
    monkeypatch.setattr(training_process, "Child", lambda *_: nullcontext(run))
    assert training_process.measure(ROOT, []) == pytest.approx(3)


def test_ratios_are_the_median_and_the_range_of_the_rounds(monkeypatch, capfd):
    times = {"a": [10, 10, 10], "b": [90, 20, 30]}
    monkeypatch.setattr(bench, "measure", lambda checkout, run: times[run[0]].pop(0))
    bench.compare([Path("x")], [("A", ["a"]), ("B", ["b"])], rounds=3)
    said = capfd.readouterr().out.splitlines()
    assert said[-1] == "x B: 0.333 times as fast as x A (0.111 to 0.500)"


def test_what_a_killed_timing_has_left_goes_with_the_next_one(tmp_path, monkeypatch):
    """The folder of one that still runs, whose lock is held, stays."""
    monkeypatch.setattr(training_process, "TEMPORARY", tmp_path / "of-bench-")
    for name in ("of-bench-01234567", "of-bench-abcdefgh"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").touch()
    with locked(tmp_path / "of-bench-abcdefgh", "dir"):
        training_process.measure(checkout(tmp_path / "there"), [])
    assert {path.name for path in tmp_path.iterdir()} == {"of-bench-abcdefgh", "there"}


def test_nothing_starts_before_the_block(tmp_path):
    """A signal may come between the process and the block at whose end it is killed with all that it has started."""
    early = training_process.Child(["touch", "early"], tmp_path)
    early.process.communicate("")  # as if this process had ended
    assert not (tmp_path / "early").exists()
    with training_process.Child(["touch", "started"], tmp_path) as run:
        run.start()
        assert run.failure() == ""
        assert (tmp_path / "started").exists()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_child_ends_with_bench(number, tmp_path):
    """And so do the child's own children and the folder."""
    there = checkout(tmp_path / "there", ENDLESS)
    process = ranks.begin(["-m", "tools.bench", f"--against={there}", "x"], there, stdout=str(there / "stdout"))
    until((there / "seen").exists)
    own, other, out = (there / "seen").read_text().split()
    os.kill(process.pid, number)
    process.join(600)
    until(lambda: gone(int(own)) and gone(int(other)))
    assert process.exitcode == 128 + signal.SIGINT
    assert not Path(out).parent.exists()
    assert (there / "stdout").read_text() + (there / "stderr").read_text() == ""


@pytest.fixture
def tiny(monkeypatch):
    """One tiny configuration, for a CPU whose dtype is bfloat16."""
    shape = "--n_layer=1 --n_head=2 --n_embd=16 --block_size=16 --batch_size=4 --vocab_size=65"
    monkeypatch.setattr(speed, "CONFIGS", {"small": f"{shape} --device=cpu --compile=False"})
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    monkeypatch.setattr(parallel, "agreed_dtype", lambda flag, _: getattr(torch, flag.replace("auto", "bfloat16")))


def test_the_table(tiny, monkeypatch, capsys):
    """A row of training for each dtype, whose share is that of its own peak, and rows of decoding."""
    peaks = {torch.bfloat16: 2e9, torch.float32: 1e9}
    monkeypatch.setattr(speed, "measured_peak", lambda device, dtype: peaks[dtype])
    bench.main([])
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in said[3:5]] == [["small", "bfloat16"], ["small", "float32"]]
    flops = 4 * accounting.flops(Model(speed.flags("small")), 16)
    for line, peak in zip(said[3:5], peaks.values(), strict=True):
        tokens_per_s, ms, share = map(float, line.replace(",", "").rstrip("%").split()[2:])
        assert tokens_per_s == pytest.approx(1000 * 4 * 16 / ms, rel=0.1)
        assert share == pytest.approx(100 * flops * tokens_per_s / 64 / peak, rel=0.01, abs=0.06)
    assert [line.split()[::3] for line in said[7:]] == [["small", "1"], ["small", "8"]]


def test_a_gpu_has_two_more_columns(monkeypatch):
    """GPT-2 in bfloat16, 25 ms a step. The peak of the memory is that of this training alone."""
    peak = [80.0]  # GiB, of the row before
    monkeypatch.setattr(speed, "resolve_device", lambda flag: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.clear())
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: max(peak) * 2**30)
    monkeypatch.setattr(speed, "ms_per_step", lambda cfg: peak.append(6.5) or 25.0)
    for name, mfu in (("NVIDIA H100 80GB HBM3", "42.5%"), ("unknown", "nan%")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        row = speed.training_row("124M", "bfloat16", 8e14).split()
        assert row == ["124M", "bfloat16", "491,520", "25.0", "52.5%", mfu, "6.50"]


def test_the_peak_is_that_of_a_product(clock, monkeypatch):
    """2 x 1024^3 FLOPs in two seconds."""

    def product(x, _):
        clock.now += 2.0
        return x

    monkeypatch.setattr(speed, "Timer", partial(speed.Timer, timer=lambda: clock.now))
    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    assert speed.measured_peak(torch.device("cpu"), torch.float32) == pytest.approx(2.0**30)


def test_a_step_is_the_median_of_the_rounds(tiny, clock, monkeypatch):
    """Two rounds to warm up, then rounds of three steps, which take 10 s at least."""
    seconds = [*[100] * 6, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    monkeypatch.setattr(speed, "SECONDS", 10.0)
    monkeypatch.setattr(speed, "Timer", partial(speed.Timer, timer=lambda: clock.now))
    calls = iter(seconds)

    def backward(self, loader, micro_steps, scaler):
        clock.now += next(calls)

    monkeypatch.setattr(ShardedModel, "backward", backward)
    monkeypatch.setattr(ShardedModel, "clip", lambda self, limit: None)
    monkeypatch.setattr(optim, "build", lambda *_: Mock())
    assert speed.ms_per_step(speed.flags("small", "float32")) == 2000
    assert next(calls, None) is None
