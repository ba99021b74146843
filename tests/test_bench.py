"""bench.py: wrong options, child processes that end with it, the parts of --gpu; on fake checkouts and on the CPU."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from conftest import ROOT

import bench
import model as M
from engine import gpu_check

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
CHECK = """
import json, os, signal, sys, time
part = sys.argv[1]
if part == "machine":
    print(json.dumps({"device": "a card", "torch": "2"}))
elif part == "attention":
    print(json.dumps({"case": "a"}))
    print(json.dumps({"case": "a", "float32": 1e-7, "bfloat16": 2e-3}))
    print(json.dumps({"case": "b"}), flush=True)
    time.sleep(600)
elif part == "models":
    print(json.dumps({"case": "c"}), flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
else:
    print(json.dumps({"case": "d"}), json.dumps({"case": "d", "float32": 0.5, "failed": "off"}), sep="\\n")
"""


def checkout(folder: Path, train: str = TRAIN, milliseconds: float = 1) -> Path:
    (folder / "engine").mkdir(parents=True)
    (folder / "train.py").write_text(train.replace("MILLISECONDS", str(milliseconds)))
    (folder / "engine" / "gpu_check.py").write_text(CHECK)
    return folder


@pytest.fixture
def refused(capfd):
    """refused(argv) returns the error line of bench.main(argv)."""

    def call(*argv) -> str:
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            bench.main([str(arg) for arg in argv])
        out, err = capfd.readouterr()
        assert stop.value.code == 2 and out == "", (out, err)
        assert err.startswith("error: ") and err.count("\n") == 1, err
        return err

    return call


# ---- options

GPU = ["--gpu", "--out=x.json"]


@pytest.mark.parametrize(
    "argv,fragments",
    [
        ([], ["nothing to train", "--max_iters"]),
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
        (["--out=x.json", "y"], ["--out=x.json", "--gpu"]),
        (["--gpu"], ["--out", "out/gpu.json"]),
        (["--gpu", "--out="], ["--out= ", ".json"]),
        (["--gpu", "--out=train.py"], ["--out=train.py", ".json"]),
        (["--gpu=1"], ["--gpu", "1"]),
        ([*GPU, "--rounds=2"], ["--gpu", "--rounds"]),
        ([*GPU, "--run=x"], ["--gpu", "--run"]),
        ([*GPU, "--loader=x"], ["--loader", "--gpu"]),
        ([*GPU, "--against=/nope"], ["--against=/nope", "train.py"]),
        ([*GPU, "config/train_gpt2.py"], ["--gpu", "config/train_gpt2.py"]),
        ([*GPU, "--device=mps"], ["--device=mps", "--device=cpu"]),
        ([*GPU, "--device=cpu", "--n_layer=2"], ["--n_layer=2"]),
    ],
    ids=lambda argv: " ".join(argv)[:40],
)
def test_wrong_options(argv, fragments, refused, monkeypatch):
    monkeypatch.setattr(bench, "Child", lambda *_: pytest.fail("something was started"))
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
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("import os; os.abort()", "SIGABRT"),
        ("import sys; sys.exit(7)", "exit code 7"),
    ],
)  # fmt: skip
def test_a_run_that_fails(train, words, refused, tmp_path):
    line = refused(f"--against={checkout(tmp_path / 'a', train)}", "--n_layer=3")
    assert words in line and f"{tmp_path / 'a'}: python train.py --n_layer=3" in line


def test_ratios_and_arguments(tmp_path, monkeypatch, capfd):
    """Two checkouts and two runs, in order and reversed; their steps take 3 and 9 ms."""
    monkeypatch.setattr(bench, "HERE", checkout(tmp_path / "ours", milliseconds=9))
    theirs = checkout(tmp_path / "theirs", milliseconds=3)
    bench.main([f"--against={theirs}", "--run=--a=1 --b='x y'", "--run=", "--rounds=2", "config/c.py"])
    lines = capfd.readouterr().out.splitlines()
    order = [line.partition(": ")[2].rpartition(":")[0] for line in lines[:8]]
    assert order[:4] == order[7:3:-1] and order[0].startswith(f"{theirs} --a=1")
    ratios = [float(line.split(": ")[1].split()[0]) for line in lines[8:]]
    assert 0.6 < ratios[0] < 1.7 and all(0.2 < ratio < 0.7 for ratio in ratios[1:])
    assert (theirs / "seen").read_text().splitlines()[:3] == ["--a=1", "--b=x y", "config/c.py"]


# ---- children


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until(what, seconds: float = 60):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_a_child_ends_with_bench(name, tmp_path):
    """For every end of bench.py. Unless it is SIGKILL, the child's own children and the folder are removed too."""
    (tmp_path / "tmp").mkdir()
    there = checkout(tmp_path / "there", ENDLESS)
    process = subprocess.Popen(
        [sys.executable, "bench.py", f"--against={there}", "x"], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
    )  # fmt: skip
    until((there / "pids").exists)
    child, other = map(int, (there / "pids").read_text().split())
    process.send_signal(getattr(signal, name))
    out, _ = process.communicate(timeout=60)
    until(lambda: gone(child))
    if name == "SIGKILL":
        os.kill(other, signal.SIGKILL)
        return
    until(lambda: gone(other))
    assert process.returncode == 128 + getattr(signal, name) and out == b""
    assert not list((tmp_path / "tmp").iterdir())


# ---- the parts of --gpu


def test_parts_fail_alone(tmp_path, monkeypatch, capfd):
    """One part hangs, one crashes, one is wrong, one is refused; the last succeeds, and the file has all results."""
    monkeypatch.setattr(bench, "HERE", checkout(tmp_path / "ours", "raise SystemExit('error: no room')"))
    monkeypatch.setattr(bench, "SECONDS", dict.fromkeys(bench.SECONDS, 60) | {"attention": 3})
    out, written = tmp_path / "new" / "gpu.json", []
    monkeypatch.setattr(bench, "write", lambda *args, real=bench.write: real(*args) or written.append(out.read_text()))
    with pytest.raises(SystemExit) as stop:
        bench.main(["--gpu", f"--out={out}", f"--against={checkout(tmp_path / 'theirs')}"])
    table, err = capfd.readouterr()
    assert stop.value.code == 1 and err == ""
    report = json.loads(out.read_text())
    parts = report["parts"]
    assert [list(json.loads(text)["parts"]) for text in written] == [list(parts)[:n] for n in range(6)]
    assert report["machine"]["device"] == "a card" and {"date", "commit"} <= report.keys()
    assert parts["attention"]["failed"] == {"b": "time limit of 3 s"} and 3 <= parts["attention"]["seconds"] < 30
    assert parts["attention"]["cases"] == 1 and parts["attention"]["float32"] == [1e-7, "a"]
    assert parts["models"]["failed"] == {"c": "SIGSEGV"}
    assert parts["losses"]["failed"] == {"d": "off"} and parts["losses"]["float32"] == [0.5, "d"]
    assert parts["speed"]["status"] == "failed" and parts["speed"]["text"].endswith("no room")
    assert parts["against"]["status"] == "ok" and 0.5 < parts["against"]["ms_per_step"] < 5
    for name, part in parts.items():
        assert f"\n{name:<12}{part['status']:<8}" in table and part["text"] in table
    seen = dict(arg[2:].split("=") for arg in (tmp_path / "theirs" / "seen").read_text().splitlines())
    assert seen["n_layer"] == "12" and seen["dtype"] == "bfloat16" and seen["device"] == "cuda"


def test_a_file_that_cannot_be_written(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(bench, "HERE", checkout(tmp_path / "ours"))
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file'}: " in refused("--gpu", f"--out={tmp_path / 'file' / 'x.json'}")
    (tmp_path / "x.json").mkdir()
    assert f"{tmp_path}/x" in refused("--gpu", f"--out={tmp_path / 'x.json'}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_gpu_that_is_not_there(tmp_path, refused):
    assert "--device=cpu" in refused("--gpu", f"--out={tmp_path / 'new' / 'x.json'}")
    assert not (tmp_path / "new").exists()


def test_rehearsal_on_the_cpu(tmp_path, monkeypatch, capfd):
    """All parts with tiny shapes: real comparisons and real training."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(bench, "SECONDS", dict.fromkeys(bench.SECONDS, 600))  # also on a busy machine
    bench.main(["--gpu", "--device=cpu", f"--out={tmp_path / 'cpu.json'}"])
    parts = json.loads((tmp_path / "cpu.json").read_text())["parts"]
    assert [part["status"] for part in parts.values()] == ["ok"] * 4, capfd.readouterr().out
    for name, cases in (("attention", 576 // 23 + 1), ("models", None), ("losses", 6)):
        assert parts[name]["cases"] == (cases or len(list(gpu_check.model_cases())) // 23 + 1)
        (single, _), (half, _) = parts[name]["float32"], parts[name]["bfloat16"]
        assert 0 < single < 1e-5 < 1e-3 < half
    assert parts["speed"]["tokens_per_s"] == pytest.approx(64_000 / parts["speed"]["ms_per_step"])
    assert 0 < parts["speed"]["mfu"] < 1 and parts["speed"]["peak_memory_bytes"] > 2**27


# ---- the comparisons


def checked(part: str, capfd, every: int) -> list[dict]:
    capfd.readouterr()
    gpu_check.check(part, torch.device("cpu"), 24, every)
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["case"] for line in lines[::2]] == [line["case"] for line in lines[1::2]]
    return lines[1::2]


def test_a_wrong_number_is_found(monkeypatch, capfd):
    """An error in one dtype alone, a result that is not finite, an exception. A correct kernel passes."""
    right = M.mix

    def wrong(dtype, change):
        return lambda q, *args, **more: right(change(q) if q.dtype == dtype else q, *args, **more)

    def crash(q):
        raise RuntimeError("CUDA error:\n an illegal memory access")

    for dtype, change, words in (
        (torch.float32, lambda q: q * 1.001, "in float32 is off by"),
        (torch.bfloat16, lambda q: q * 1.1, "in bfloat16 is off by"),
        (torch.bfloat16, lambda q: q * torch.nan, "off by 1.0e+99"),
        (torch.float32, crash, "RuntimeError: CUDA error: an illegal memory access"),
    ):
        monkeypatch.setattr(gpu_check, "mix", wrong(dtype, change))
        lines = checked("attention", capfd, every=193)
        assert len(lines) == 3 and all(words in line["failed"] for line in lines)
    monkeypatch.setattr(gpu_check, "mix", right)
    assert all(line.keys() == {"case", "float32", "bfloat16"} for line in checked("attention", capfd, every=193))


def test_a_wrong_block_is_found(monkeypatch, capfd):
    """A new entry of the table is compared without any change to gpu_check."""

    class Wrong(M.Sum):
        def forward(self, s, inputs):
            return super().forward(s, inputs) * (1 if s.dtype == torch.float64 else 1.01)

    def mine(cfg, layer):
        return [Wrong(cfg, attn=M.attention(cfg, layer)), M.Sum(cfg, **M.cross(cfg, layer))]

    monkeypatch.setattr(gpu_check, "BLOCK", {"mine": mine})
    monkeypatch.setitem(M.BLOCK, "mine", mine)
    lines = checked("models", capfd, every=9)
    assert len(lines) > 3 and all("block=mine" in line["case"] and "float32 is off" in line["failed"] for line in lines)


def test_every_entry_of_every_table_has_a_case():
    cases = list(gpu_check.model_cases())
    for block in M.BLOCK:
        for flag, table in (
            ("norm", M.NORM),
            ("norm_placement", M.PLACEMENT),
            ("pos", M.POSITION),
            ("mlp", M.MLP_KIND),
        ):
            assert set(table) <= {case.get(flag) for case in cases if case["block"] == block}
        objectives = set(get_args(get_type_hints(M.ModelConfig)["objective"]))
        assert objectives == {case["objective"] for case in cases if case["block"] == block and "objective" in case}
    pools = {(case.get("pool"), case.get("wiring"), case.get("n_group")) for case in cases}
    assert {("joint", None, None), (None, "series", None), (None, None, 2)} <= pools


@pytest.mark.slow
@pytest.mark.parametrize("part", gpu_check.PARTS)
def test_all_cases_on_the_cpu(part, capfd):
    assert not [line for line in checked(part, capfd, every=1) if "failed" in line]
