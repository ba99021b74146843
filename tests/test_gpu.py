"""bench.py --gpu: its parts on the CPU with tiny shapes, wrong numbers that it finds, and calls that go on."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from conftest import ROOT
from test_bench import checkout

import model as M
import ops
import train
from configurator import Config, parse
from engine import optim
from tools import bench, bench_table, gpu_check, gpu_report, gpu_runs
from tools.gpu_runs import Part

CPU = torch.device("cpu")
MACHINE = """
import json
print(json.dumps({"device": "a card", "torch": "2", "gpus": 3}))
"""
PROGRAM = """
import json, os, pathlib, signal, sys, time
part, device, first = sys.argv[1:]
pathlib.Path("calls").open("a").write(f"{part} {first}\\n")
def say(**line):
    print(json.dumps(line), flush=True)
if part == "hangs":
    if first == "0":
        say(case="a"), say(case="a", float32=1e-7, bfloat16=2e-3)
    if first != "2":
        say(case="b")
        time.sleep(600)
    say(case="c"), say(case="c", float32=1e-8, bfloat16=2e-3)
elif part == "crashes":
    for number, case in enumerate("abcd"):
        if number >= int(first):
            say(case=case)
            if case == "b":
                os.kill(os.getpid(), signal.SIGSEGV)
            say(case=case, float32=number * 1e-7, **({"failed": "broken"} if case == "c" else {}))
            if case == "c":
                sys.exit(1)
elif part == "is refused":
    sys.exit("error: no room")
elif part == "waits":
    pathlib.Path("pid").write_text(str(os.getpid()))
    time.sleep(600)
elif part == "is mended" and not pathlib.Path("mended").exists():
    sys.exit(7)
else:
    print("{a line of a library}")
    print("[1")
    say(**{"tokens/s": 1000.5, "losses": [1.0], "MFU": None}), say(attention=0.25)
"""
YES = lambda device, first: iter(())  # noqa: E731  a part that has a process


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A checkout whose parts are those of PROGRAM; tests choose some of them."""
    folder = checkout(tmp_path / "here", milliseconds=9)
    (folder / "tools").mkdir()
    (folder / "tools" / "gpu_check.py").write_text(MACHINE)
    (folder / "tools" / "gpu_runs.py").write_text(PROGRAM)
    monkeypatch.setattr(gpu_report, "ROOT", folder)
    return folder


def call(monkeypatch, out: Path, names: dict[str, int] | list[str], *argv: str) -> tuple[int, dict]:
    """bench.py --gpu with these parts; returns the exit code and the parts in the file."""
    limits = names if isinstance(names, dict) else dict.fromkeys(names, 60)
    monkeypatch.setattr(
        gpu_report, "PARTS", {name: Part("", n, YES if n < 200 else None) for name, n in limits.items()}
    )
    with pytest.raises(SystemExit) as stop:
        bench.main(["--gpu", f"--out={out}", *argv])
    return int(stop.value.code), json.loads(out.read_text())["parts"]


def started(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


# ---- parts and calls


@pytest.mark.no_jitter
def test_parts_fail_alone(here, tmp_path, monkeypatch, capfd):
    """One part hangs, one crashes in one case and breaks its process in another, one is refused; the others succeed,
    and the file has what is known at any time."""
    out, written = tmp_path / "new" / "gpu.json", []
    write = gpu_report.write_json
    monkeypatch.setattr(
        gpu_report, "write_json", lambda *args: write(*args) or written.append(json.loads(out.read_text()))
    )
    names = {"hangs": 3, "crashes": 60, "is refused": 60, "works": 60, "against": 240}
    code, parts = call(monkeypatch, out, names, f"--against={checkout(tmp_path / 'theirs', milliseconds=3)}")
    said, err = capfd.readouterr()
    assert code == 1 and err == ""
    assert [list(report["parts"]) for report in written[1::2]] == [list(names)[: n + 1] for n in range(5)]
    assert all(list(report["parts"].values())[-1]["text"] == "did not end" for report in written[1::2])
    assert parts["hangs"]["failed"] == {} and 3 <= parts["hangs"]["seconds"] < 30
    assert parts["hangs"]["status"] == "left" and "some cases are left" in parts["hangs"]["text"]
    assert parts["hangs"]["cases"] == 1 and parts["hangs"]["float32"] == 1e-7 and parts["hangs"]["bfloat16"] == 2e-3
    assert parts["crashes"]["failed"] == {"b": "SIGSEGV", "c": "broken"}
    assert parts["crashes"]["cases"] == 4 and parts["crashes"]["float32"] == 3e-7
    assert [line for line in started(here) if line.startswith("crashes")] == ["crashes 0", "crashes 2", "crashes 3"]
    assert parts["is refused"]["failed"] == {"the start": "no room"}
    assert (
        parts["works"]["status"] == "ok"
        and parts["works"]["tokens/s"] == 1000.5
        and parts["works"]["attention"] == 0.25
    )
    ratio = parts["against"]["times nanoGPT's speed"]
    assert parts["against"]["status"] == "ok" and 0.2 < ratio < 0.7
    for name, part in parts.items():
        assert f"\n{name:<27}{part['status']:<8}" in said and part["text"] in said
    assert "SIGSEGV" in parts["crashes"]["text"] and parts["works"]["text"] == "tokens/s 1,000, attention 0.25"
    seen = [
        dict(arg[2:].split("=") for arg in (tmp_path / name / "seen").read_text().splitlines())
        for name in ("here", "theirs")
    ]
    assert all(args["n_layer"] == "12" and args["compile"] == "True" and args["device"] == "cuda" for args in seen)


def test_a_part_without_enough_time_goes_on_with_the_next_case(here, tmp_path, monkeypatch, capfd):
    """The first call ends one case, and the second begins with the next one, which hangs. The third has the last case,
    and the fourth tries all of them again."""
    hung = {"b": "time limit of 3 s"}
    for first, code, cases, failed in ((0, 0, 1, {}), (1, 1, 2, hung), (2, 1, 3, hung), (0, 0, 1, {})):
        found, parts = call(monkeypatch, tmp_path / "gpu.json", {"hangs": 3})
        assert found == code and parts["hangs"]["cases"] == cases and parts["hangs"]["failed"] == failed
        assert parts["hangs"]["float32"] == 1e-7 and started(here)[-1] == f"hangs {first}"
        assert ("left" in parts["hangs"]) == ("1 parts are left" in capfd.readouterr().out) == (first != 2)
    assert parts["hangs"]["tries"] == 2


def test_the_next_call_goes_on(here, tmp_path, monkeypatch, capfd):
    """A call starts no part that could end after its time; the next one does the rest, and then once more the parts
    that have failed, but not a third time unless the commit differs."""
    out = tmp_path / "gpu.json"
    names = {"works": 60, "is refused": 60, "is mended": 60, "works too": 60}
    monkeypatch.setattr(gpu_report, "SECONDS", 59)
    assert call(monkeypatch, out, names) == (0, {}) and "4 parts are left" in capfd.readouterr().out
    monkeypatch.setattr(gpu_report, "SECONDS", 1000)
    code, parts = call(monkeypatch, out, list(names)[:3])
    assert code == 1 and [part["status"] for part in parts.values()] == ["ok", "failed", "failed"]
    assert parts["is mended"]["text"] == "; 1 failed; the start: exit code 7"
    (here / "mended").touch()
    code, parts = call(monkeypatch, out, names)
    assert started(here)[3:] == ["works too 0", "is refused 0", "is mended 0"]
    assert code == 1 and parts["is mended"]["status"] == "ok" and parts["is refused"]["tries"] == 2
    call(monkeypatch, out, names)
    assert len(started(here)) == 6 and "left" not in capfd.readouterr().out
    subprocess.run(
        "git init -q . && git -c user.name=a -c user.email=b commit -q --allow-empty -m c", shell=True, cwd=here
    )
    _, parts = call(monkeypatch, out, names)
    assert started(here)[6:] == ["is refused 0"] and parts["is refused"]["tries"] == 1
    assert parts["is refused"]["commit"] != parts["works"]["commit"]


def test_parts_that_need_more_gpus_wait(here, tmp_path, monkeypatch):
    parts = {"one": Part("", 60, YES), "two": Part("", 60, YES, 2), "four": Part("", 60, YES, 4)}
    monkeypatch.setattr(gpu_report, "PARTS", parts)
    with pytest.raises(SystemExit):
        bench.main(["--gpu", f"--out={tmp_path / 'x.json'}"])
    assert set(json.loads((tmp_path / "x.json").read_text())["parts"]) == {"one", "two"}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"parts": 3}', '{"machine": {"device": "a card"}, "parts": {"works": 1}}']
)
def test_a_damaged_file_is_kept_and_all_runs_again(text, here, tmp_path, monkeypatch, capfd):
    out = tmp_path / "gpu.json"
    out.write_text(text)
    code, parts = call(monkeypatch, out, ["works"])
    assert code == 0 and parts["works"]["status"] == "ok"
    assert out.with_suffix(".damaged").read_text() == text and "no report of --gpu" in capfd.readouterr().out


def refused(capfd, *argv: str) -> str:
    """The error line of bench.py."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        bench.main(list(argv))
    out, err = capfd.readouterr()
    assert stop.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, (out, err)
    return err


def test_files_that_are_refused(here, tmp_path, monkeypatch, capfd):
    """Results of another card, and paths that cannot be written."""
    out = tmp_path / "gpu.json"
    call(monkeypatch, out, ["works"])
    (here / "tools" / "gpu_check.py").write_text(MACHINE.replace("a card", "another"))
    line = refused(capfd, "--gpu", f"--out={out}")
    assert f"--out={out} has results of a card, and here is another" in line
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file'}" in refused(capfd, "--gpu", f"--out={tmp_path / 'file' / 'x.json'}")
    (tmp_path / "x.json").mkdir()
    assert f"{tmp_path}/x" in refused(capfd, "--gpu", f"--out={tmp_path / 'x.json'}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_gpu_that_is_not_there(tmp_path, capfd):
    assert "--device=cpu" in refused(capfd, "--gpu", f"--out={tmp_path / 'new' / 'x.json'}")
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_a_signal_leaves_a_file_that_the_next_call_reads(here, tmp_path, monkeypatch):
    """SIGTERM while a part runs: the part's process ends, the file says so, and the part is tried again."""
    out = tmp_path / "gpu.json"
    script = "from tools import bench, gpu_report as g; from pathlib import Path; import signal\n"
    script += "signal.signal(signal.SIGTERM, bench.stop)\n"
    script += f"g.ROOT = Path({str(here)!r}); g.PARTS = {{'waits': g.PARTS['124M'], 'works': g.PARTS['124M']}}\n"
    script += f"bench.main(['--gpu', '--out={out}'])"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not (here / "pid").exists() or not (here / "pid").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    child = Path(f"/proc/{(here / 'pid').read_text()}/stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"
    assert json.loads(out.read_text())["parts"]["waits"]["text"] == "did not end"
    (here / "tools" / "gpu_runs.py").write_text(PROGRAM.replace('"waits"', '"x"'))
    code, parts = call(monkeypatch, out, ["waits", "works"])
    assert code == 0 and parts["waits"]["tries"] == 2 and started(here) == ["waits 0", "works 0", "waits 0"]


# ---- docs/gpu.md


def test_the_page_has_the_report(tmp_path, monkeypatch, capfd):
    """Every part has a row; a cell is empty or has the part's text; marks are reached or not. Text above stays."""
    done = {"status": "ok", "tries": 1, "commit": "abc", "seconds": 1.0}
    parts = {
        "124M": done | {"text": "MFU 0.51 | x", "MFU": 0.51},
        "against": done | {"text": "y", "times nanoGPT's speed": 1.1},
    }
    report = {"date": "2026-01-02T00:00:00", "machine": {"device": "a card", "torch": "2"}, "parts": parts}
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "gpu.md").write_text("# Title\n\nText.\n" + gpu_report.HEADING + "\nstale")
    (tmp_path / "x.json").write_text(json.dumps(report))
    monkeypatch.setattr(bench, "HERE", tmp_path)
    bench.main([f"--report={tmp_path / 'x.json'}"])
    text = (tmp_path / "docs" / "gpu.md").read_text()
    assert text.startswith("# Title\n\nText.\n" + gpu_report.HEADING) and "stale" not in text
    assert "a card, torch 2, 2026-01-02, commit abc." in text
    assert "| 50 % MFU | MFU 0.51: yes |" in text and "times nanoGPT's speed 1.1: no |" in text
    assert "| ok: MFU 0.51 / x |" in text and text.count(gpu_report.EMPTY) == len(gpu_runs.PARTS) - 2
    for name in gpu_runs.PARTS:
        assert f"\n| {name} | " in text


def test_the_page_of_this_checkout_has_all_rows():
    page = ROOT / "docs" / "gpu.md"
    rows = [
        line.split(" | ")[:2] for line in gpu_report.page(None, page.read_text()).splitlines() if line.startswith("| ")
    ]
    assert rows == [line.split(" | ")[:2] for line in page.read_text().splitlines() if line.startswith("| ")]


# ---- the parts themselves


@pytest.fixture
def one_thread(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def results(name: str) -> tuple[dict, dict]:
    """(lines of the cases by name, figures) of a part on the CPU, in this process."""
    cases, figures = {}, {}
    for line in gpu_runs.PARTS[name].run(CPU, 0):
        line = json.loads(json.dumps(line))
        if "case" not in line:
            figures |= line
        elif len(line) > 1:
            cases[line.pop("case")] = line
    return cases, figures


def test_numbers(one_thread):
    cases, _ = results("numbers")
    assert len(cases) == 576 // 23 + 1 + len(list(gpu_check.model_cases())) // 23 + 1 + 4 + 4
    assert not any("failed" in line for line in cases.values()), cases
    for line in cases.values():
        assert 0 < line.get("float32", 1e-6) < 1e-5 < 1e-3 < line.get("bfloat16", 1e-2)


def test_training(one_thread, monkeypatch):
    """20 steps on the device equal those on the CPU; an optimizer, a scaler or a clipping that differs is found."""
    some = gpu_runs.RUNS["runs"]._replace(every=23)
    monkeypatch.setitem(gpu_runs.RUNS, "runs", some)
    check = partial(gpu_check.check, gpu_runs.RUNS, CPU)
    lines = [line for line in check() if len(line) > 1]
    optimizers = {line["case"].split("; ")[-1] for line in lines if ";" in line["case"]}
    assert len(lines) == 5 and optimizers == {"adamw", "muon"}
    assert not any("failed" in line for line in lines), lines
    calls, build = [], optim.build

    def wrong(model, cfg, *args):
        calls.append(cfg)
        cfg.weight_decay *= 1 + 0.5 * (len(calls) % 2 == 0)  # of the second run, that of the device
        return build(model, cfg, *args)

    monkeypatch.setattr(optim, "build", wrong)
    monkeypatch.setitem(gpu_runs.RUNS, "runs", some._replace(limits={"float32": 1e-6}))
    assert all("failed" in line for line in check() if "float32" in line)


def test_every_family_is_trained():
    cases = [parse(Config, [*args, "--n_head=4", "--n_embd=32"]) for args in gpu_runs.FAMILIES.values()]
    assert len(cases) == 48
    for flag, names in (("block", M.BLOCK), ("optimizer", optim.OPTIMIZER)):
        assert set(names) == {getattr(case, flag) for case in cases}


@pytest.mark.no_jitter
def test_compiled(one_thread, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setitem(gpu_runs.COMPILED, "compiled", gpu_runs.COMPILED["compiled"]._replace(every=5))
    (line,) = results("compiled")[0].values()
    assert (
        line["float32"] < 1e-4
        and line["graphs in all"] >= line["graphs of the first step"] > 0
        and "failed" not in line
    )


def test_checkpoints(one_thread, monkeypatch):
    """Here train.py runs in this process. A resume that differs is found, in each of the three comparisons."""
    wrong, handlers = [], {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def train_py(folder, runs):
        for name, args in runs.items():
            seed = ["--seed=5", "--learning_rate=1e-3"] if wrong and "resume" in args else []
            train.main([*args.split(), f"--out_dir={folder}/{name}", *seed])

    monkeypatch.setattr(train, "peak_flops", lambda *_: 1e9)
    monkeypatch.setattr(gpu_runs, "train_py", train_py)
    cases, _ = results("checkpoints")
    assert [line.get("resume", line.get("float32")) for line in cases.values()] == [0.0] * 3
    assert not any("failed" in line for line in cases.values())
    wrong.append(True)
    assert all("is off by" in line["failed"] for line in results("checkpoints")[0].values())
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_train_py_says_why_a_run_fails(tmp_path):
    with pytest.raises(ValueError, match="train.py --no_such=1 .*no such flag"):
        gpu_runs.train_py(str(tmp_path), {"a": "--no_such=1"})


def test_speed(one_thread, monkeypatch):
    for name, n in (("WARM", 1), ("LENGTH", 1)):
        monkeypatch.setattr(gpu_runs, name, n)
    monkeypatch.setattr(gpu_runs, "peak_flops", lambda *_: 1e12)
    for name in ("124M", "124M, Muon", "124M, T=4096, documents"):
        _, found = results(name)
        assert found["tokens/s"] == pytest.approx(1000 * found_tokens(name) / found["ms per step"])
        assert 0 < found["MFU"] < 1 and found["GPUs"] == 1 and 0.1 < found["GiB"] < 50
        assert len(found["losses"]) == 4 == len(found["norms"]) and 5 < found["losses"][0] < 6
        assert sum(found[kind] for kind in gpu_runs.CLASSES if kind in found) == pytest.approx(1)
        assert found["products"] > 0 and found["attention"] > 0


def found_tokens(name: str) -> int:
    args = gpu_runs.flags(gpu_runs.ROWS.get(name, ""), "cpu")
    cfg = parse(Config, args)
    return cfg.batch_size * cfg.block_size * cfg.gradient_accumulation_steps


def test_decoding_and_loading(one_thread, monkeypatch):
    monkeypatch.setattr(bench_table, "BATCHES", 2)
    _, found = results("decoding and loading")
    assert len(found) == 5 and all(x > 0 for x in found.values())


def test_the_flags_of_every_row_go_together():
    """Of the GPU's shapes, too; layouts are checked for 2, 4 and 8 GPUs."""
    from engine.parallel.ranks import check_layout

    for args in gpu_runs.ROWS.values():
        parse(Config, [*gpu_runs.flags(args, "cuda"), "--vocab_size=50304"])
    for name, args in gpu_runs.LAYOUTS.items():
        part = gpu_runs.PARTS[f"layout {name}"]
        for size in (1, 2, 4, 8):
            if size >= part.gpus > 1 or size == part.gpus:
                check_layout(parse(Config, gpu_runs.flags(f"{args} --gradient_accumulation_steps=8", "cuda")), size)


def test_the_first_call_has_time_for_the_numbers_and_the_first_row():
    first = ["numbers", "124M", "training", "compiled", "checkpoints"]
    assert list(gpu_runs.PARTS)[:5] == first and sum(gpu_runs.PARTS[name].seconds for name in first) <= 480


def test_layouts_are_compared_with_one_gpu():
    one = {"losses": [5.0, 4.0], "norms": [1.0, 2.0], "dtype": "float32", "failed": {}}
    every = {"the first losses", "losses", "norms"}
    for factors, wrong in (
        ([1 + 1e-6, 1 - 1e-6], set()), ([1.01] * 2, every), ([1.0, float("nan")], every),
        ([1 + 1e-4, 1.0], {"the first losses"}),
    ):  # fmt: skip
        found = {key: [x * f for x, f in zip(one[key], factors, strict=True)] for key in ("losses", "norms")}
        gpu_report.compare_layout("layout tp", found := one | found | {"failed": {}}, one)
        assert set(found["failed"]) == wrong and gpu_report.describe(found)
    gpu_report.compare_layout("layout tp", lost := {"failed": {"the start": "x"}}, one)
    assert lost == {"failed": {"the start": "x"}}
    for reference in ({}, {"losses": [1.0]}):
        gpu_report.compare_layout("layout tp", alone := one | {"failed": {}}, reference)
        assert "not compared" in alone["failed"]["losses"]


def test_the_program_of_a_part(tmp_path):
    """One part as its process."""
    command = [sys.executable, "-m", "tools.gpu_runs", "numbers", "cpu", "43"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert (
        done.returncode == 0
        and lines[-1]["case"] == "optimizer=muon, mlp=swiglu, bias=True"
        and "bfloat16" in lines[-1]
    )


@pytest.mark.slow
def test_rehearsal_on_the_cpu(tmp_path, monkeypatch, capfd):
    """Slow: all parts but nanoGPT's, as processes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(gpu_report, "SECONDS", 10**5)
    monkeypatch.setattr(
        gpu_report, "PARTS", {name: part._replace(seconds=600) for name, part in gpu_runs.PARTS.items()}
    )
    with pytest.raises(SystemExit) as stop:
        bench.main(["--gpu", "--device=cpu", f"--out={tmp_path / 'cpu.json'}"])
    parts = json.loads((tmp_path / "cpu.json").read_text())["parts"]
    assert stop.value.code == 0 and parts.keys() == gpu_runs.PARTS.keys() - {"against"}, capfd.readouterr().out


# ---- the comparisons


def checked(kind: str, every: int) -> list[dict]:
    lines = list(gpu_check.check({kind: gpu_check.NUMBERS[kind]._replace(every=every)}, CPU))
    assert [line["case"] for line in lines[::2]] == [line["case"] for line in lines[1::2]]
    return lines[1::2]


def test_a_wrong_number_is_found(monkeypatch):
    """An error in one dtype alone, a result that is not finite, an exception. A correct kernel passes."""
    right = ops.attention

    def wrong(dtype, change):
        return lambda q, *args, **more: right(change(q) if q.dtype == dtype else q, *args, **more)

    def crash(q):
        raise RuntimeError("an illegal\n memory access")

    for dtype, change, words in (
        (torch.float32, lambda q: q * 1.001, "in float32 is off by"),
        (torch.bfloat16, lambda q: q * 1.1, "in bfloat16 is off by"),
        (torch.bfloat16, lambda q: q * torch.nan, "off by 1.0e+99"),
        (torch.float32, crash, "RuntimeError: an illegal memory access"),
    ):
        monkeypatch.setattr(gpu_check, "attention", wrong(dtype, change))
        lines = checked("attention", every=193)
        assert len(lines) == 3 and all(words in line["failed"] for line in lines)
    monkeypatch.setattr(gpu_check, "attention", right)
    assert all(line.keys() == {"case", "float32", "bfloat16"} for line in checked("attention", every=193))


def test_a_broken_context_ends_the_process(monkeypatch):
    """After the case's line, because no later call of CUDA would work."""

    def crash(*args, **more):
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(gpu_check, "attention", crash)
    lines, check = [], gpu_check.check({"attention": gpu_check.NUMBERS["attention"]}, CPU, 3)
    with pytest.raises(SystemExit) as stop:
        lines.extend(check)
    assert stop.value.code == 1


def test_a_wrong_optimizer_is_found(monkeypatch):
    """AdamW with another beta1 in float32, and Muon whose updates are 10 % too large in bfloat16."""
    adamw, muon = torch._fused_adamw_, optim.orthogonalize

    def wrong(params, *args, beta1, **more):
        return adamw(params, *args, beta1=beta1 * (1 if params[0].dtype == torch.float64 else 0.99), **more)

    monkeypatch.setattr(torch, "_fused_adamw_", wrong)
    assert all("float32 is off by" in line["failed"] for line in checked("adamw", every=1))
    monkeypatch.setattr(torch, "_fused_adamw_", adamw)
    monkeypatch.setattr(optim, "orthogonalize", lambda x, dtype: muon(x, dtype) * (1 + 0.1 * (dtype == torch.bfloat16)))
    assert all("bfloat16 is off by" in line["failed"] for line in checked("others", every=1))


def test_a_wrong_block_is_found(monkeypatch):
    """A new entry of the table is compared without any change to gpu_check."""

    class Wrong(M.Sum):
        def forward(self, s, inputs):
            return super().forward(s, inputs) * (1 if s.dtype == torch.float64 else 1.01)

    def mine(cfg, layer):
        return [Wrong(cfg, attn=M.context_pool(cfg, layer)), M.Sum(cfg, **M.cross(cfg, layer))]

    monkeypatch.setattr(gpu_check, "BLOCK", {"mine": mine})
    monkeypatch.setitem(M.BLOCK, "mine", mine)
    lines = checked("models", every=9)
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
@pytest.mark.parametrize("kind", gpu_check.NUMBERS)
def test_all_cases_on_the_cpu(kind):
    assert not [line for line in checked(kind, every=1) if "failed" in line]
