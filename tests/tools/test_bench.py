"""bench.py: wrong options, ratios of whole runs, child processes that end with it."""

import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.lock import locked
from tests import ranks
from tests.helpers import ROOT, gone, refused, until
from tools import bench, training_process

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
    for argv, fragments in (
        ([], ["nothing to train", "--max_iters"]),
        (["--against=."], ["nothing to train", "--max_iters"]),
        (["--rounds=0", "x"], ["rounds=0", "must be >0"]),
    ):
        refused(bench.main, argv, capfd, fragments)


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
