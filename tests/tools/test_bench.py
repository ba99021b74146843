"""bench.py: wrong options, child processes that end with it, the table; all on the CPU."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
from helpers import ROOT, gone, until
from torch.utils.flop_counter import FlopCounterMode

import model as M
from engine import device, optim
from engine.parallel import ranks as parallel
from engine.plan import accounting
from tools import bench, child, speed

TRAIN = """
import pathlib, sys, time
pathlib.Path("seen").write_text("\\n".join(sys.argv[1:]))
for n in range(0, 50, 10):
    print(f"iter {n}: loss 1.0", flush=True)
    time.sleep(MILLISECONDS / 100)
"""
ENDLESS = """
import os, pathlib, subprocess, time
other = subprocess.Popen(["sleep", "600"])
pathlib.Path("pids.tmp").write_text(f"{os.getpid()} {other.pid}")
os.replace("pids.tmp", "pids")
time.sleep(600)
"""


def checkout(folder: Path, train: str = TRAIN, milliseconds: float = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(train.replace("MILLISECONDS", str(milliseconds)))
    return folder


@pytest.fixture
def refused(capfd):
    """refused(*argv) returns the error line of bench.main(argv)."""
    return lambda *argv: helpers.refused(bench.main, list(argv), capfd)


# ---- options


@pytest.mark.parametrize(
    "argv,fragments",
    [
        (["--against=."], ["nothing to train", "--max_iters"]),
        (["--run="], ["nothing to train"]),
        (["--rounds=2"], ["nothing to train"]),
        (["--against=/nope", "x"], ["--against=/nope", "train.py"]),
        (["--against=", "x"], ["--against= ", "train.py"]),
        (["--against=bench.py", "x"], ["--against=bench.py", "train.py"]),
        ([f"--against={'a' * 300}", "x"], ["aaa", "too long"]),
        (["--run='", "x"], ["--run='", "quotation"]),
        (['--run=--dataset="a b', "x"], ['--run=--dataset="a b', "quotation"]),
        (["--run=a\\", "x"], ["--run=a", "escaped"]),
        (["--run"], ["--run", "--help"]),
        (["--rounds=0", "x"], ["--rounds=0", "at least 1"]),
        (["--rounds=-1", "x"], ["--rounds=-1"]),
        (["--rounds=1001", "x"], ["--rounds=1001"]),
        (["--rounds=3.5", "x"], ["--rounds", "3.5"]),
        (["--rounds=", "x"], ["--rounds", "''"]),
        (["--rounds"], ["--rounds", "--help"]),
        (["--loader="], ["--loader= ", "pycode"]),
        (["--loader"], ["--loader", "--help"]),
        (["--loader=no_such_set"], ["no_such_set", "pycode"]),
        (["--loader=pycode:0.5,pycode"], ["pycode", "name:weight"]),
        (["--loader=pycode", "--rounds=0"], ["--rounds=0"]),
        (["--loader=pycode", "config/train_pycode.py"], ["--loader", "config/train_pycode.py"]),
        (["--loader=pycode", "--run=x"], ["--loader", "--run"]),
        (["--loader=pycode", "--against=."], ["--loader", "--against"]),
        (["--run=--out_dir=x", "y"], ["--out_dir=x", "bench.py sets"]),
        (["x", "--log_interval=5"], ["--log_interval=5", "bench.py sets"]),
        (["--json", "config/train_pycode.py"], ["--json", "config/train_pycode.py"]),
        (["--json", "--rounds=2"], ["--json", "--rounds"]),
        (["--json", "--loader=pycode"], ["--json", "--loader"]),
        (["--json", "--profile=x.json"], ["--json", "--profile"]),
        (["--config=4L"], ["--config=4L", "4L/128/T64/B12", "make-train"]),
        (["--config="], ["--config= ", "make-train"]),
        (["--config=make-train", "--max_iters=9"], ["--config", "--max_iters=9"]),
        (["--profile=x.json", "--config=4L"], ["--config=4L", "make-train"]),
        (["--profile=x.json", "--against=."], ["--profile", "--against"]),
        (["--profile="], ["--profile= ", ".json"]),
        (["--profile=trace.txt"], ["--profile=trace.txt", ".json"]),
        (["--profile"], ["--profile", "--help"]),
    ],
    ids=lambda argv: " ".join(argv)[:40],
)
def test_wrong_options(argv, fragments, refused, monkeypatch):
    started = (child, "Child"), (speed, "machine"), (speed, "random_data")
    for where, name in started:
        monkeypatch.setattr(where, name, lambda *_: pytest.fail("something was started"))
    line = refused(*argv)
    assert all(fragment in line for fragment in fragments), line


def test_help_that_cannot_be_written(refused, monkeypatch):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert "No space left" in refused("--help")


@pytest.mark.parametrize("tokens", [0, 500, 1025])
def test_data_that_a_loader_cannot_be_measured_on(tokens, tmp_path, refused):
    for split in ("train", "val"):
        np.zeros(tokens, dtype=np.uint16).tofile(tmp_path / f"{split}.bin")
    (tmp_path / "meta.json").write_text('{"vocab_size": 9}')
    assert str(tmp_path) in refused(f"--loader={tmp_path}")


@pytest.mark.parametrize(
    "train,words",
    [
        ("print('iter 0: x')", "fewer than two timings"),
        ("import sys; print('a\\nb', file=sys.stderr); sys.exit('error: what is wrong')", "what is wrong"),
        ("import sys; print('error: what is wrong\\n====', file=sys.stderr); sys.exit(1)", "what is wrong"),
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("import os; os.abort()", "SIGABRT"),
        ("import sys; sys.exit(7)", "exit code 7"),
    ],
)  # fmt: skip
def test_a_run_that_fails(train, words, refused, tmp_path):
    line = refused(f"--against={checkout(tmp_path / 'a', train)}", "--n_layer=3")
    assert words in line and f"{tmp_path / 'a'}: python train.py --n_layer=3" in line


def test_ratios_and_arguments(tmp_path, monkeypatch, capfd):
    """Two checkouts and two runs, in order and reversed. Ratios are those of the times, which are printed with three
    digits, whatever else the machine does meanwhile."""
    monkeypatch.setattr(bench, "ROOT", checkout(tmp_path / "ours", milliseconds=9))
    theirs = checkout(tmp_path / "theirs", milliseconds=3)
    bench.main([f"--against={theirs}", "--run=--a=1 --b='x y'", "--run=", "--rounds=2", "config/c.py"])
    lines = capfd.readouterr().out.splitlines()
    order = [line.partition(": ")[2].rpartition(":")[0] for line in lines[:8]]
    assert order[:4] == order[7:3:-1] and order[0].startswith(f"{theirs} --a=1")
    times = defaultdict(list)
    for name, line in zip(order, lines[:8], strict=True):
        times[name].append(float(line.split()[-4]))
    for name, line in zip(order[1:4], lines[8:], strict=True):
        ratio = median(a / b for a, b in zip(times[order[0]], times[name], strict=True))
        assert line.startswith(f"{name}: ") and float(line.split(": ")[1].split()[0]) == pytest.approx(ratio, rel=0.02)
    assert (theirs / "seen").read_text().splitlines()[:3] == ["--a=1", "--b=x y", "config/c.py"]


class Clock:
    """A clock that stands still; the fake work below moves it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def after(self, seconds: list[float], results):
        """Yields the results, each after so many seconds."""
        for wait, result in zip(seconds, results, strict=True):
            self.now += wait
            yield result


def test_the_first_steps_of_a_run_are_not_timed(monkeypatch):
    """Of ten lines, the first two do not count: ten steps take 5 s before them, and 30 ms after them."""
    lines = Clock(monkeypatch).after([5, 5, 5] + 7 * [0.03], [f"iter {n}: loss 1\n" for n in range(0, 100, 10)])
    run = SimpleNamespace(lines=lines, failure=lambda: "", timed_out=False)
    monkeypatch.setattr(child, "Child", lambda *_: nullcontext(run))
    assert child.measure(ROOT, []) == pytest.approx(3)


def test_ratios_are_the_median_and_the_range_of_the_rounds(monkeypatch, capfd):
    times = {"a": [10, 10, 10], "b": [90, 20, 30]}
    monkeypatch.setattr(bench, "measure", lambda checkout, run: times[run[0]].pop(0))
    bench.compare([Path("x")], [["a"], ["b"]], ["A", "B"], rounds=3)
    said = capfd.readouterr().out.splitlines()
    assert said[-1] == "x B: 0.333 times as fast as x A (0.111 to 0.500)"


# ---- children


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_a_child_ends_with_bench(name, tmp_path):
    """For every end of bench.py. Unless it is SIGKILL, the child's own children and the folder are removed too."""
    (tmp_path / "tmp").mkdir()
    there = checkout(tmp_path / "there", ENDLESS)
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.bench", f"--against={there}", "x"], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
    )  # fmt: skip
    until((there / "pids").exists)
    child, other = map(int, (there / "pids").read_text().split())
    process.send_signal(getattr(signal, name))
    out, _ = process.communicate(timeout=600)
    until(lambda: gone(child))
    if name == "SIGKILL":
        os.kill(other, signal.SIGKILL)
        return
    until(lambda: gone(other))
    assert process.returncode == 128 + getattr(signal, name) and out == b""
    assert not list((tmp_path / "tmp").iterdir())


# ---- the table


@pytest.fixture
def tiny(monkeypatch):
    """Two tiny configurations, one step, so that medians add up, and a CPU whose dtype is bfloat16."""
    small = "--n_layer=1 --n_head=2 --n_embd=16 --block_size=16 --batch_size=4 --vocab_size=65 --compile=False "
    configs = {"small": small + "--optimizer=muon --mlp=swiglu --attention=gqa --n_kv_head=1"}
    monkeypatch.setattr(speed, "CONFIGS", configs | {"dropped": small + "--dropout=0.2"})
    sizes = {"SHARD": 2**17, "BATCHES": 2, "WARM": 1, "LEAST": 1, "MOST": 1, "DECODED": ("small",)}
    for name, value in sizes.items():
        monkeypatch.setattr(speed, name, value)
    monkeypatch.setattr(speed, "peak_flops", lambda device, dtype: 4e12 / dtype.itemsize)
    monkeypatch.setattr(parallel, "fast_bfloat16", lambda: True)
    monkeypatch.setattr(parallel, "resolve_device", lambda *_: torch.device("cpu"))


def test_the_table(tiny, monkeypatch):
    """It has a row per configuration and dtype, its cells are the report's figures, and the report becomes JSON."""
    lines = []
    monkeypatch.setattr(device, "LIMITS", ("SOME_VARIABLE",))
    monkeypatch.setenv("SOME_VARIABLE", "AVX2")
    report = speed.measure(["small", "dropped"], lines.append)
    assert json.loads(json.dumps(report)) == report
    table = "\n".join(lines).splitlines()
    machine = ("CPU (", "; bfloat16 by ", "SOME_VARIABLE=AVX2", torch.__version__, f"{torch.get_num_threads()} thread")
    assert all(word in table[0] for word in (*machine, report["date"]))
    assert "2,000 GFLOP/s in bfloat16" in table[1] and "1,000 GFLOP/s in float32" in table[1]
    assert [(row["configuration"], row["dtype"], row["compiled"]) for row in report["training"]] == [
        (name, dtype, False) for name in ("small", "dropped") for dtype in ("bfloat16", "float32")
    ]
    titles = "training dtype tokens/s MFU ms/step data forward backward optimizer share N-S_GFLOP peak_MiB".split()
    assert table[3].replace("N-S ", "N-S_").replace("peak ", "peak_").split() == titles
    for row, shown in zip(report["training"], table[4:8], strict=True):
        cells = dict(zip(titles, shown.split(), strict=True))
        phases = [row[f"{phase}_ms"] for phase in ("data", "forward", "backward", "optimizer")]
        assert min(phases) > 0 and sum(phases) == pytest.approx(row["ms_per_step"]) and row["steps"] == 1
        assert row["optimizer_share"] == pytest.approx(phases[3] / sum(phases))
        assert row["tokens_per_s"] == pytest.approx(64_000 / row["ms_per_step"])
        flops = accounting.flops(M.Model(speed.flags(row["configuration"])), 16) / 16
        peak = 2e12 if row["dtype"] == "bfloat16" else 1e12
        assert row["mfu"] == pytest.approx(row["tokens_per_s"] * flops / peak)
        assert row["peak_memory_bytes"] > 2**27
        assert (row["newton_schulz_flops"] > 0) == (row["configuration"] == "small")
        assert (cells["training"], cells["dtype"]) == (row["configuration"], row["dtype"])
        for title, figure, step in (
            ("ms/step", "ms_per_step", 0.1),
            ("data", "data_ms", 0.01),
            ("forward", "forward_ms", 0.1),
            ("backward", "backward_ms", 0.1),
            ("optimizer", "optimizer_ms", 0.1),
            ("tokens/s", "tokens_per_s", 1),
        ):
            assert float(cells[title].replace(",", "")) == pytest.approx(row[figure], abs=step)
        assert cells["share"] == f"{row['optimizer_share']:.1%}" and cells["MFU"] == f"{row['mfu']:.1%}"
        assert cells["N-S_GFLOP"] == ("0.00" if row["configuration"] == "small" else "-")
        assert int(cells["peak_MiB"].replace(",", "")) == round(row["peak_memory_bytes"] / 2**20)
    assert table[9].split() == ["decoding", "dtype", "samples", "tokens/s", "last/first"]
    for row, shown in zip(report["decoding"], table[10:12], strict=True):
        rate, ratio = f"{row['tokens_per_s']:,.0f}", f"{row['last_quarter_to_first']:.2f}"
        assert shown.split() == ["small", row["dtype"], str(row["batch_size"]), rate, ratio]
    assert [row["batch_size"] for row in report["decoding"]] == [1, 8]
    assert table[13].startswith(f"loader: {report['loader']['tokens_per_s'] / 1e6:.0f} Mtok/s")


def test_speed_of_decoding_by_hand(tiny, monkeypatch):
    """By a clock that shows 0, 1, 4, 9, ...: the tokens take 1, 3, ..., 31 seconds, and the second row ends at 256."""
    clock = (n * n for n in [*range(9), *range(17)])
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    row = speed.measure_decoding("small", speed.flags("small"), 3)
    assert row["tokens_per_s"] == pytest.approx(3 * 16 / 256)
    assert row["last_quarter_to_first"] == pytest.approx((27 + 29) / (3 + 5))


def test_a_row_has_the_median_of_its_steps(tiny, monkeypatch):
    """Four steps of 10, 40, 20 and 100 ms, each a half in its backward."""
    steps = [{"data": 0, "forward": ms / 4, "backward": ms / 2, "optimizer": ms / 4} for ms in (10, 40, 20, 100)]
    monkeypatch.setattr(speed, "MOST", len(steps))
    monkeypatch.setattr(speed, "LEAST", len(steps))
    monkeypatch.setattr(speed.Training, "timed_step", lambda self: steps.pop(0))
    row = speed.measure_training("dropped", "float32", 1e12)
    assert (row["ms_per_step"], row["backward_ms"], row["optimizer_share"]) == (30, 15, 0.25)
    assert row["tokens_per_s"] == pytest.approx(4 * 16 / 0.030)


def test_the_speed_of_the_loader_by_hand(tiny, tmp_path, monkeypatch):
    """Each look at the clock takes a second. A batch of ours takes 2 s more, the first one, which warms up, 1000."""
    clock = Clock(monkeypatch)
    speed.random_data(tmp_path, 2**17, 65)

    def look() -> float:
        clock.now += 1
        return clock.now

    monkeypatch.setattr(time, "perf_counter", look)
    loader = SimpleNamespace(__next__=clock.after([1000, 2, 2], range(3)).__next__, close=lambda: None)
    monkeypatch.setattr(speed, "Loader", lambda *_, **__: loader)
    assert speed.measure_loader(tmp_path) == (2 * 64 * 1024 / 5, 2 * 64 * 1024)


def test_json_is_all_that_stdout_gets(tiny, capfd):
    bench.main(["--json", "--config=dropped"])
    report = json.loads(capfd.readouterr().out)
    assert {row["configuration"] for row in report["training"]} == {"dropped"} and report["decoding"] == []
    assert {"date", "machine", "peak_flops", "loader"} <= report.keys()


def test_torchrun_is_refused(monkeypatch, refused):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE=2" in refused() and "WORLD_SIZE=2" in refused("--profile=x.json")


def test_without_arguments_all_configurations_are_measured(monkeypatch, capfd):
    monkeypatch.setattr(speed, "measure", lambda names, say: say(" ".join(names)))
    bench.main([])
    assert capfd.readouterr().out == " ".join(speed.CONFIGS) + "\n"


def test_configurations_are_what_their_names_say():
    for name in speed.CONFIGS:
        cfg = speed.flags(name)
        shape = f"{cfg.n_layer}L/{cfg.n_embd}/T{cfg.block_size}/B{cfg.batch_size}"
        assert name in (shape, f"{shape}/dropout{cfg.dropout}", "make-train")
    with torch.device("meta"):
        assert M.Model(speed.flags("make-train")).n_params() == 1_820_928  # as in the README
    assert set(speed.DECODED) <= set(speed.CONFIGS)


def test_a_phase_ends_when_the_device_is_done(monkeypatch):
    """The clock moves in the phases and in the waits for the device alone."""
    now = [0.0]

    def work(seconds: float):
        now[0] += seconds

    def phases(begin):
        for seconds, name in enumerate(("data", "forward", "backward", "optimizer")):
            begin(name)
            work(seconds)
        begin("end")

    run = object.__new__(speed.Training)
    run.phases, run.synchronize = phases, partial(work, 0.5)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert run.timed_step() == {"data": 500, "forward": 1500, "backward": 2500, "optimizer": 3500}


def test_flops_of_newton_schulz(tiny):
    """They equal those that torch counts in the optimizer's step, and in the iteration of one matrix by hand."""
    cfg = speed.flags("small")
    model = M.Model(cfg)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer = optim.build(model, cfg)
    with FlopCounterMode(display=False) as step:
        optimizer.step()
    assert speed.newton_schulz_flops(optimizer) == step.get_total_flops() > 0
    for shape in ((1, 3, 7), (1, 7, 3)):
        with FlopCounterMode(display=False) as iteration:
            optim.orthogonalize(torch.randn(shape), torch.float32)
        weight = torch.nn.Parameter(torch.zeros(shape[1:]))
        muon = optim.Muon({weight: None}, lr=0.1, momentum=0.9, weight_decay=0.0)
        count = speed.newton_schulz_flops(optim.Optimizer({muon: 1.0}))
        assert count == iteration.get_total_flops() == 5 * (2 * 3 * 3 * 7 + 2 * 3 * 3 * 3 + 2 * 3 * 3 * 7)
    assert speed.newton_schulz_flops(optim.build(model, speed.flags("dropped"))) == 0


def test_a_trace(tiny, tmp_path, capfd, refused):
    """It has the operations, and each phase once per step. A file that cannot be written is refused first."""
    path = tmp_path / "new" / "trace.json"
    bench.main([f"--profile={path}", "--config=dropped"])
    out = capfd.readouterr().out
    assert str(path) in out and "dropped in bfloat16" in out and out.count("\n") == 1
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert [names.count(phase) for phase in ("data", "forward", "backward", "optimizer")] == [speed.TRACED] * 4
    assert "aten::embedding" in names
    assert str(path) in refused(f"--profile={path}/x.json", "--config=small")
    (tmp_path / "x.json").mkdir()
    assert f"{tmp_path}/x.json" in refused(f"--profile={tmp_path}/x.json", "--config=small")
