"""metrics.jsonl compared with an uninterrupted run, TensorBoard with metrics.jsonl, the bar on a simulated terminal."""

import io
import json
import math
import os
import re
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import engine.evaluation
import engine.metrics
from engine.config import Config
from engine.device import gpu_peak, peak_flops, peak_memory_bytes
from engine.metrics import Metrics, truncate_metrics
from tests.helpers import losses
from tests.helpers import metrics as lines

CPU = torch.device("cpu")


def open_metrics(folder, step=0, tokens=0, peak=1e9):
    cfg = Config(out_dir=str(folder), max_iters=20, block_size=16, pos="rope")
    return Metrics(cfg, SimpleNamespace(flops_per_token=1000.0, peak_flops=peak), CPU, step, tokens)


def loss_at(step):
    return math.exp(-step / 7) / 3  # a float of many digits


def loop(metrics, steps, stop):
    """The order of train.py: at the top of a step an evaluation if it is due, then training and log."""
    for step in range(*steps):
        if step % 5 == 0:
            with metrics.paused():
                metrics.evaluation(step, loss_at(step) + 1, loss_at(step) + 2, None)
        if step == stop:
            break
        if step % 2 == 0:
            metrics.log(step, loss_at(step), 1e-3, 0.5, 100 * (step + 1), {})
    metrics.close()


def test_one_line_per_step_with_all_digits(tmp_path, capsys):
    """JSON has no nan and inf, which are null. The console has no control characters off a terminal."""
    metrics = open_metrics(tmp_path / "deep" / "out")
    loss = 0.1 + 0.2 + 1e-17
    metrics.log(0, loss, 1e-3, 0.5, 640, {"epoch": 0.25})
    metrics.log(10, math.nan, 1e-3, math.inf, 7040, {"skipped": 3})
    metrics.evaluation(12, 1 / 3, 2 / 3, None)
    metrics.close()
    first, second, evaluation = lines(tmp_path / "deep" / "out")
    fields = "step kind loss lr grad_norm tokens flops tokens_per_s mfu ms_per_step peak_memory_bytes".split()
    assert list(first) == [*fields, "epoch"]
    assert list(second) == [*fields, "skipped"]
    assert first["loss"] == loss
    assert first["flops"] == 640_000
    assert second["loss"] is None
    assert second["grad_norm"] is None
    assert evaluation == {"step": 12, "kind": "eval", "train_loss": 1 / 3, "val_loss": 2 / 3, "val_bpb": None}
    out, err = capsys.readouterr()
    _, left_out, evaluated = out.splitlines()
    assert left_out.endswith(", grad norm inf, skipped 3")
    assert evaluated == "step 12: train loss 0.3333, val loss 0.6667"
    assert err == ""
    assert not any(c in out for c in "\r\x1b")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc, which Linux has")
def test_the_peak_of_memory_is_in_bytes():
    peak = 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])
    assert 0.9 * peak < peak_memory_bytes(CPU) < 1.9 * peak


@pytest.mark.parametrize("stop", [4, 5, 10, 13, 15])
@pytest.mark.parametrize("further", [0, 3])
def test_resume_leaves_what_the_uninterrupted_run_leaves(tmp_path, stop, further):
    """A run saves at step `stop` and dies `further` steps later, in the middle of a line."""
    loop(open_metrics(tmp_path / "whole"), (0, 21), 20)
    loop(open_metrics(tmp_path / "cut"), (0, 21), stop + further)
    with open(tmp_path / "cut" / "metrics.jsonl", "a") as f:
        f.write('{"step": 4, "lo')
    loop(open_metrics(tmp_path / "cut", step=stop, tokens=100 * stop), (stop, 21), 20)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 15
    assert [(x["step"], x["tokens"]) for x in lines(tmp_path / "cut") if "tokens" in x] == [
        (step, 100 * (step + 1)) for step in range(0, 20, 2)
    ]
    assert scalars(tmp_path / "cut") == from_jsonl(tmp_path / "cut")
    assert sorted(os.listdir(tmp_path / "cut"))[-1] == "metrics.jsonl"  # no temporary file stays


def test_truncation_drops_what_is_no_line_of_ours(tmp_path):
    path = tmp_path / "metrics.jsonl"
    damaged = b'{"step": 2, "lo\n\xff\n[3]\n7\n{"a": 1}\n\n{"step": 1' + b"0" * 400 + b"}\n"
    damaged += b'{"step": 2, "a": ' + b"[" * 100_000 + b"\n"
    path.write_bytes(b'{"step": 1, "loss": 2.5}\n' + damaged + b'{"step": 3}\n{"step": 4}\n')
    truncate_metrics(path, 4)
    assert path.read_text() == '{"step": 1, "loss": 2.5}\n{"step": 3}\n'  # older lines without a kind stay


def scalars(folder):
    """{tag: [(step, value)]}, by TensorBoard's own reader."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def from_jsonl(folder):
    expected = {}
    for line in lines(folder):
        assert line["kind"] == ("train" if "loss" in line else "eval")
        for key, value in line.items():
            if key not in ("step", "kind") and value is not None:
                value = torch.tensor(value, dtype=torch.float32).item()  # the precision of an event
                expected.setdefault(f"{line['kind']}/{key}", []).append((line["step"], value))
    return expected


def test_wandb_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="wandb_log=True: wandb is not installed; pip install wandb, or set wandb_log"):
        engine.metrics.Wandb(tmp_path, Config(wandb_log=True))


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        return 2

    def rows(self):
        """On the screen: a text after \\r stands in place of what is before it, which spaces have erased."""
        return [row.rpartition("\r")[2].rstrip() for row in self.getvalue().split("\n")]


def test_bar_on_a_terminal(tmp_path, monkeypatch):
    """With stdout and stderr on one terminal, lines are complete, the bar is the last row, and close() removes it."""
    clock = [0.0]
    terminal = Terminal()
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((80, 25)))
    metrics = open_metrics(tmp_path, peak=None)
    for step in (0, 4, 9):
        clock[0] += 60
        metrics.log(step, 2.0, 1e-3, 0.5, 100 * (step + 1), {})
    metrics.say("saved")
    *above, bar = terminal.rows()
    rate = "02:00<02:13, 13.33s/step"  # 10 more steps at 9 in 120 s
    assert re.fullmatch(rf" 50%\|.+\| 10/20 \[{rate}, loss 2.0000, 8 tok/s\]", bar)
    assert [line.split(",")[0] for line in above] == [*(f"iter {n}: loss 2.0000" for n in (0, 4, 9)), "saved"]
    assert "mfu" not in terminal.getvalue()
    metrics.close()
    assert terminal.rows()[-1] == ""


def test_what_is_to_be_typed_next_has_quotation_marks(tmp_path, capsys):
    metrics = open_metrics(tmp_path / "a run")
    metrics.end("stopped by SIGTERM with step 7 saved", stopped=True)
    metrics.close()
    resume = f"python train.py --out_dir='{tmp_path / 'a run'}' --init_from=resume"
    assert capsys.readouterr().out == f"stopped by SIGTERM with step 7 saved; go on with {resume}\n"


@pytest.mark.parametrize("name, half, tf32", [
    ("NVIDIA A10G", 70e12, 35e12),
    ("NVIDIA A10", 125e12, 62.5e12),
    ("NVIDIA H100 PCIe", 756e12, 378e12),
    ("NVIDIA GH200 480GB", 989.4e12, 494.7e12),
    ("Tesla V100-SXM2-16GB", 125e12, None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
])  # fmt: skip
def test_gpu_table(name, half, tf32):
    assert peak_flops(CPU, torch.float32) is None
    assert gpu_peak(name, torch.bfloat16) == half
    assert gpu_peak(name, torch.float32) == tf32


def pretend_wandb(monkeypatch, init):
    """A stand-in for the package, which a run imports."""
    wandb = ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    wandb.init = init
    monkeypatch.setitem(sys.modules, "wandb", wandb)


def test_wandb_gets_the_figures_of_tensorboard(run, tmp_path, monkeypatch):
    """One run, which a resume continues, with our flags and its name."""
    started = []
    logged = []
    ends = SimpleNamespace(log=lambda row, step: logged.append((step, row)), finish=lambda: logged.append("end"))
    pretend_wandb(monkeypatch, lambda **options: started.append(options) or ends)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "wandb_id").write_text("another")  # of a run that never saved
    out = run("--wandb_log=True", "--wandb_project=letters", "--max_iters=2")
    run("--wandb_log=True", "--wandb_project=letters", "--init_from=resume", "--max_iters=4", "--wandb_run_name=again")
    assert [s["name"] for s in started] == ["out", "again"]
    assert {s["project"] for s in started} == {"letters"}
    assert started[0]["id"] == started[1]["id"] != "another"
    assert started[1]["config"]["max_iters"] == 4
    assert logged.count("end") == 2
    got = [(each[0], floats(each[1])) for each in logged if each != "end"]
    written = [(row["step"], floats(row, f"{row['kind']}/")) for row in lines(out)]
    assert len(written) > 4
    assert all(each in got for each in written)


def floats(row: dict, prefix: str = "") -> dict[str, float]:
    return {prefix + key: x for key, x in row.items() if isinstance(x, float)}


@pytest.mark.parametrize("name", ["log", "finish"])
def test_nothing_decorative_ends_a_run(run, monkeypatch, capsys, name):
    """A logger that fails is left out with one line; figures and random numbers are as without."""
    flags = ["--dropout=0.1", "--max_iters=6", "--eval_interval=3"]
    plain = run(*flags, out="plain")
    fail = Mock(side_effect=RuntimeError("planted\nfailure"))
    logger = SimpleNamespace(**{"log": lambda *_, **__: None, "finish": print} | {name: fail})
    pretend_wandb(monkeypatch, lambda **options: logger)
    monkeypatch.setattr(engine.metrics.Events, "scalars", fail)
    capsys.readouterr()
    assert losses(run(*flags, "--wandb_log=True", out="broken")) == losses(plain)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("warning: ") and "planted failure" in line for line in lines), lines


@pytest.mark.interop
def test_wandb_keeps_the_losses_of_a_run(run, monkeypatch):
    """The package itself, offline: its file has every loss of metrics.jsonl."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = run("--wandb_log=True", "--max_iters=4")
    (file,) = out.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    for row in lines(out):
        assert row["kind"] == "eval" or json.dumps(row["loss"]).encode() in content
