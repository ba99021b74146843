"""tools.gpu: its cases on this machine's device, wrong numbers that they find, and calls that go on."""

import io
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from helpers import ROOT, refused
from ranks import start, train_main
from test_bench import checkout

import model as M
import ops
from configurator import Config, parse
from engine import optim
from engine.parallel.ranks import check_layout
from tools import gpu, gpu_cases, speed
from tools.child import Child
from tools.gpu_cases import Part

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU, PLACE = torch.device("cpu"), gpu_cases.Place(DEVICE)
CARD = '{"device": "a card", "torch": "2", "driver": "5.1", "cudnn": 9, "gpus": 3}'
MACHINE = f"print('{CARD}')"
PROGRAM = "import sys; sys.path += ['tests', 'tests/tools']; import test_gpu; test_gpu.program(sys.argv[1:])"


def small(place) -> dict:
    return {"float32": 3e-7}


def kill(place):
    os.kill(os.getpid(), signal.SIGKILL)


def wait(place):
    Path(f"{place.against}/pid").write_text(str(os.getpid()))
    time.sleep(600)


def mended(place) -> dict:
    return {} if Path(f"{place.against}/mended").exists() else {"failed": "broken"}


def measure_and(die, place) -> dict:
    for n in (1, 2):
        place.note({"MFU": 0.1 * n})
    return die(place)


PARTS = {  # of PROGRAM; tests choose some of them
    "dies": Part("", 60, dict(a=partial(measure_and, kill), b=partial(measure_and, lambda place: 1 / 0))),
    "hangs": Part("", 60, dict(a=small, b=kill, c=lambda _: {"float32": 0.0})),
    "crashes": Part("", 60, dict(a=small, b=kill, c=lambda _: {"failed": "CUDA error"}, d=lambda _: {"float32": 1e-7})),
    "raises": Part("", 60, dict(a=lambda _: 1 / 0)),
    "is refused": Part("", 60, dict(a=kill)),
    "works": Part("", 60, dict(a=lambda _: {"tokens/s": 1000.5, "losses": [1.0], "MFU": None, "attention": 0.25})),
    "waits": Part("", 300, dict(a=wait)),
    "is mended": Part("", 60, dict(a=mended)),
    "against": Part("", 240, dict(speed=gpu_cases.compare)),
    "two": Part("", 60, dict(a=lambda _: {}), 2),
    "four": Part("", 60, dict(a=lambda _: {}), 4),
}


def program(argv: list[str]):
    """The process of a part."""
    gpu.PARTS = PARTS
    sys.exit(1) if "--part=is refused" in argv else gpu.main(argv)


class Forked:
    """A Child that is forked, because torch is slow to start. Signals count as time limits if they should."""

    late, said = False, CARD

    def __init__(self, command: list[str], cwd: Path, seconds: int):
        self.argv, self.lines, self.timed_out = (
            command[3:],
            io.StringIO(self.said),
            False,
        )

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_):
        pass

    def failure(self) -> str:
        if self.argv[0] == "cuda":  # the question which machine it is
            return ""
        process = multiprocessing.get_context("fork").Process(target=program, args=(self.argv,))
        process.start()
        process.join()
        self.timed_out = self.late and process.exitcode < 0
        return f"exit code {process.exitcode}" if process.exitcode else ""


@pytest.fixture
def call(tmp_path, monkeypatch):
    """call("works", ...) runs tools.gpu with these parts; returns the exit code and the file as it is then."""
    monkeypatch.setattr(gpu, "Child", Forked)
    against = checkout(tmp_path / "theirs", milliseconds=3)

    def run(*names: str, flags: Sequence[str] = ()) -> tuple[int, gpu.Log]:
        monkeypatch.setattr(gpu, "PARTS", {name: PARTS[name] for name in names})
        with pytest.raises(SystemExit) as stop:
            gpu.main([f"--out={tmp_path / 'new' / 'gpu.jsonl'}", f"--against={against}", *flags])
        return int(stop.value.code), gpu.Log(tmp_path / "new" / "gpu.jsonl")

    return run


def begun(log: gpu.Log) -> list[str]:
    """The cases in the order in which they began."""
    lines = [json.loads(line) for line in log.file.read_text().splitlines() if line.endswith("}")]
    return [f"{line['part']} {line['case']}" for line in lines if not {"machine", "seconds", "figures"} & line.keys()]


# ---- parts and calls


@pytest.mark.no_jitter
def test_parts_fail_alone(call, tmp_path, capfd):
    """One crashes in one case and breaks CUDA in another, one does not start, one raises; the others succeed."""
    code, log = call("crashes", "is refused", "raises", "works")
    said, err = capfd.readouterr()
    assert code == 1 and err == ""
    found = {part: {case: log.results[part, case].get("failed") for case in log.cases(part)} for part in gpu.PARTS}
    assert found["crashes"] == {"a": None, "b": "exit code -9", "c": "CUDA error", "d": None}
    assert found["is refused"] == {"a": "the start: exit code 1"} and found["works"] == {"a": None}
    assert found["raises"] == {"a": "ZeroDivisionError: division by zero"}
    first = [f"crashes {case}" for case in "abcd"] + ["raises a", "works a"]
    assert begun(log) == [*first, "crashes b", "raises a"]  # once more
    status, text, figures = log.summary("crashes")
    assert status == "failed" and figures == {"float32": 3e-7} and "2 failed; b: exit code -9" in text
    assert log.summary("works")[:2] == ("ok", "tokens/s 1,000, attention 0.25")
    for part in gpu.PARTS:
        status, text, _ = log.summary(part)
        assert f"\n{part:<34}{status:<8}" in said and text in said


def test_figures_stay_if_a_case_ends_early(call, monkeypatch, capfd):
    """Those that it has noted, with a crash or a time limit; a new attempt begins without them."""
    code, log = call("dies")
    assert code == 1 and log.summary("dies")[0] == "failed" and begun(log) == ["dies a", "dies b", "dies a"]
    assert [log.results["dies", case]["figures"] for case in "ab"] == [{"MFU": 0.2}] * 2
    assert log.summary("dies")[1].startswith("MFU 0.2; 2 failed; a: exit code -9; b: ZeroDivisionError")
    log.add(part="dies", case="a")
    assert gpu.Log(log.file).results["dies", "a"]["figures"] == {}
    log.add(part="dies", case="a", figures={"MFU": 0.3})
    assert gpu.Log(log.file).cases("dies")["a"] == "left"
    assert gpu.Log(log.file).results["dies", "a"]["figures"] == {"MFU": 0.3}


def test_speed_is_known_after_each_round(rehearsal, monkeypatch):
    """Also if the next round breaks."""
    notes, steps = [], speed.Training.steps

    def until_the_third(run, n):
        if len(notes) > 2:
            raise RuntimeError("out of memory")
        return steps(run, n)

    monkeypatch.setattr(speed.Training, "steps", until_the_third)
    with pytest.raises(RuntimeError, match="out of memory"):
        gpu_cases.speed("", PLACE._replace(note=notes.append))
    first, *rounds = notes
    assert len(rounds) == 2 and first.keys() == {"seconds of the first steps"}
    assert all({"tokens/s", "ms per step", "MFU", "GiB", *first} <= found.keys() for found in rounds)


def test_a_case_without_enough_time_goes_on(call, monkeypatch, capfd):
    """A case that a time limit cuts has failed only if it was the first of its process."""
    monkeypatch.setattr(Forked, "late", True)
    times = itertools.count(step=0.1)  # of each look at the clock
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(gpu, "SECONDS", 60.25)  # time for one process
    code, log = call("hangs")
    assert code == 0 and log.summary("hangs")[0] == "left" and begun(log) == ["hangs a", "hangs b"]
    assert "2 of 3 cases left" in log.summary("hangs")[1] and "1 parts are left" in capfd.readouterr().out
    code, log = call("hangs")
    assert code == 0 and begun(log)[2:] == ["hangs c"]
    code, log = call("hangs")
    assert code == 1 and log.results["hangs", "b"]["failed"] == "exit code -9" and begun(log)[3:] == ["hangs b"]
    assert "parts are left" not in capfd.readouterr().out.splitlines()[-1]


def test_a_process_that_takes_too_long():
    with Child(["sleep", "600"], ROOT, 0.2) as child:
        assert child.failure() == "time limit of 0.2 s"


def test_the_next_call_goes_on(call, tmp_path, monkeypatch, capfd):
    """A call starts no part that could end after its time; the next one does the rest, and then what has failed."""
    names = ["works", "is mended", "against"]
    monkeypatch.setattr(gpu, "SECONDS", 59)
    code, log = call(*names)
    assert (code, log.results) == (0, {}) and "3 parts are left" in capfd.readouterr().out
    monkeypatch.setattr(gpu, "SECONDS", 100)
    code, log = call(*names)
    assert code == 1 and begun(log) == ["works a", "is mended a", "is mended a"]
    assert "is mended                         failed" in capfd.readouterr().out
    (tmp_path / "theirs" / "mended").touch()
    code, log = call("works", "is mended")
    assert code == 0 and begun(log)[3:] == ["is mended a"] and "left" not in capfd.readouterr().out
    with open(log.file, "a") as file:
        file.write('\n{"part": "works", "ca')  # a machine has stopped here
    code, log = call("works", "is mended", "raises")
    assert code == 1 and begun(log)[4:] == ["raises a", "raises a"] and len(log.calls) == 4


def test_nanogpt_is_timed_with_the_same_flags(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_cases, "ROOT", checkout(tmp_path / "here", milliseconds=9))
    theirs = checkout(tmp_path / "theirs", milliseconds=3)
    measure, times = gpu_cases.measure, iter([90.0, 30.0])
    monkeypatch.setattr(gpu_cases, "measure", lambda *args: (measure(*args), next(times))[1])
    found = gpu_cases.compare(gpu_cases.Place(torch.device("cuda"), str(theirs)))
    assert found["times nanoGPT's speed"] == 30 / 90 and found["ms per step"] == 90
    seen = [(folder / "seen").read_text().splitlines()[:-2] for folder in (tmp_path / "here", theirs)]
    assert seen[0] == seen[1] and {"--n_layer=12", "--compile=True", "--device=cuda"} <= {*seen[0]}


def test_parts_that_need_more_gpus_wait(call, monkeypatch):
    monkeypatch.setattr(
        gpu, "start_process", lambda cfg, name, todo, gpus: gpu.Log(cfg.out).add(part=name, case="a", seconds=1)
    )
    _, log = call("works", "two", "four")
    assert {part for part, _ in log.results} == {"works", "two"}


def test_what_is_refused(call, tmp_path, monkeypatch, capfd):
    """Wrong flags, results of another card, a file that cannot be written or has no results."""
    for flag, words in (
        ("--out=x.json", "x.json (command line) must be a .jsonl file"), ("--against=/nope", "holds no train.py"),
        ("--part=x", "must be one of: numbers; 124M"), ("--device=mps", "mps"), ("--n_layer=2", "n_layer"),
    ):  # fmt: skip
        assert words in refused(gpu.main, [flag], capfd)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "file").touch()
    (tmp_path / "x.jsonl").mkdir()
    assert "has no results" in refused(gpu.main, [f"--out={tmp_path / 'empty.jsonl'}", "--report=True"], capfd)
    assert "names no machine" in refused(gpu.main, [f"--out={tmp_path / 'empty.jsonl'}", "--part=numbers"], capfd)
    _, log = call("works")
    for name in ("file/x.jsonl", "x.jsonl"):
        assert f"{tmp_path}/" in refused(gpu.main, [f"--out={tmp_path / name}"], capfd)
    log.calls[0]["machine"]["device"] = "another"
    log.add(**log.calls[0])
    assert f"out={log.file} has results of another, and here is a card" in refused(
        gpu.main, [f"--out={log.file}"], capfd
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_gpu_that_is_not_there(tmp_path, capfd):
    said = refused(gpu.main, [f"--out={tmp_path / 'new' / 'x.jsonl'}"], capfd)
    assert "--device=cpu" in said and f"(torch {torch.__version__}" in said
    assert not (tmp_path / "new").exists()


def test_torch_says_what_is_wrong(tmp_path, monkeypatch, capfd):
    """Of an old driver its version and torch's warning; of a compiler that fails its cause, unless none is wanted."""

    class Cuda:
        def is_available():
            warnings.warn(
                "CUDA initialization: The NVIDIA driver on your system is too old\n(found 12020)", stacklevel=1
            )
            return False

    file = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build"
    monkeypatch.setattr(torch, "cuda", Cuda)
    exists, read = Path.exists, Path.read_text
    monkeypatch.setattr(Path, "exists", lambda path: "nvidia" in str(path) or exists(path))
    monkeypatch.setattr(Path, "read_text", lambda path: file if "nvidia" in str(path) else read(path))
    gpu.describe("cuda", "compile")
    monkeypatch.undo()
    monkeypatch.setattr(gpu, "Child", Forked)
    monkeypatch.setattr(Forked, "said", capfd.readouterr().out)
    said = refused(gpu.main, [f"--out={tmp_path / 'x.jsonl'}"], capfd)
    assert "driver 535.104.05): CUDA initialization: The NVIDIA driver on your system is too old (found 12020);" in said
    broken = json.loads(CARD) | {"compiler": "no gcc"}
    monkeypatch.setattr(Forked, "said", json.dumps(broken))
    said = refused(gpu.main, [f"--out={tmp_path / 'x.jsonl'}"], capfd)
    assert "does not work on this GPU: no gcc; install gcc" in said and "pass --compile=False" in said
    assert not (tmp_path / "x.jsonl").exists()


def test_the_compiler_is_tried_once(monkeypatch, capfd):
    """On a GPU, and not if nothing is to be compiled."""
    tried = []

    def try_compiler(device):
        tried.append(device)
        raise ValueError("no gcc")

    monkeypatch.setattr(gpu, "machine", lambda device: {"device": "a card"})
    monkeypatch.setattr(gpu, "use_private_folder", lambda: None)
    monkeypatch.setattr(gpu, "try_compiler", try_compiler)
    for args in (("cuda", "compile"), ("cuda", ""), ("cpu", "compile")):
        gpu.describe(*args)
    first, *others = (json.loads(line) for line in capfd.readouterr().out.splitlines())
    assert first["compiler"] == "no gcc" and tried == [torch.device("cuda")]
    assert others == [{"device": "a card", "warnings": ""}] * 2


def test_nothing_is_compiled_without_a_compiler(call, tmp_path, monkeypatch):
    """--compile=False reaches the parts' processes, and train.py here and there."""
    monkeypatch.setattr(gpu_cases, "ROOT", checkout(tmp_path / "here", milliseconds=9))
    code, log = call("works", "against", flags=["--compile=False"])
    assert code == 0 and "driver 5.1, nothing compiled, " in gpu.page(log, "")
    for folder in ("here", "theirs"):
        seen = (tmp_path / folder / "seen").read_text().split()
        assert seen.index("--compile=False") > seen.index("--compile=True")  # the last one counts


def call_that_waits(out: Path, theirs: Path):
    signal.signal(signal.SIGTERM, gpu.stop)
    gpu.MACHINE, gpu.WORKER, gpu.PARTS = MACHINE, ["-c", PROGRAM], {"waits": PARTS["waits"]}
    sys.stdout = open(os.devnull, "w")
    gpu.main([f"--out={out}", f"--against={theirs}"])


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_a_signal_leaves_a_file_that_the_next_call_reads(tmp_path, monkeypatch):
    """SIGTERM while a part runs: the part's process ends, and the case is tried again."""
    out, theirs = tmp_path / "new" / "gpu.jsonl", checkout(tmp_path / "a")
    [process] = start(call_that_waits, [(out, theirs)])
    end = time.monotonic() + 600
    while not (theirs / "pid").exists() or not (theirs / "pid").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    process.terminate()
    process.join(300)
    assert process.exitcode == 128 + signal.SIGTERM
    child = Path(f"/proc/{(theirs / 'pid').read_text()}/stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"
    log = gpu.Log(out)
    assert begun(log) == ["waits a"] and "seconds" not in log.results["waits", "a"]
    monkeypatch.setattr(gpu, "PARTS", PARTS)
    assert log.todo("waits") == (["a"], True) and log.summary("waits")[0] == "left"


# ---- docs/gpu.md


def test_the_page_has_the_report(tmp_path, monkeypatch, capfd):
    """Every part has a row; a cell is empty or has the part's text; marks are reached or not. Text above stays."""
    log = gpu.Log(tmp_path / "x.jsonl")
    log.add(machine={"device": "a card", "torch": "2"}, device="cuda", date="2026-01-02T00:00:00", commit="abc")
    log.add(part="124M", case="speed", seconds=1.0, figures={"MFU": 0.51}, failed="the profiler | x")
    log.add(part="against", case="speed", seconds=1.0, figures={"times nanoGPT's speed": 1.1})
    log.add(part="numbers", case=next(iter(gpu.PARTS["numbers"].cases(DEVICE))), seconds=1.0, figures={"float32": 1e-7})
    page = tmp_path / "docs" / "gpu.md"
    page.parent.mkdir()
    page.write_text("# Title\n\nText.\n" + gpu.HEADING + "\nstale")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    gpu.main(["--report=True", f"--out={log.file}"])
    text = page.read_text()
    assert text.startswith("# Title\n\nText.\n" + gpu.HEADING) and "stale" not in text
    assert "a card, torch 2, 2026-01-02, commit abc." in text
    assert "| 50 % MFU | MFU 0.51: yes |" in text and "times nanoGPT's speed 1.1: no |" in text
    assert "| failed: MFU 0.51; 1 failed; speed: the profiler / x |" in text and "| left: float32 1e-07; " in text
    assert text.count(gpu.EMPTY) == len(gpu.PARTS) - 3
    for name in gpu.PARTS:
        assert f"\n| {name} | " in text


def test_the_page_of_this_checkout_has_all_rows(tmp_path):
    text = (ROOT / "docs" / "gpu.md").read_text()
    rows, expected = (
        [line.split(" | ")[:2] for line in each.splitlines() if line.startswith("| ")]
        for each in (text, gpu.page(gpu.Log(tmp_path / "x.jsonl"), text))
    )
    assert rows == expected


# ---- the cases


@pytest.fixture
def rehearsal(monkeypatch):
    """One thread, few steps, and no compiler unless there is a GPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        for where, name, value in ((gpu_cases, "WARM", 1), (gpu_cases, "LENGTH", 1), (speed, "BATCHES", 2)):
            monkeypatch.setattr(where, name, value)
        monkeypatch.setattr(gpu_cases, "peak_flops", lambda *_: 1e12)
    yield
    torch.set_num_threads(threads)


SLOW = {name for name in gpu_cases.PARTS if name in gpu_cases.ROWS or ", no " in name or name == "layout one GPU"}
SLOW -= {"124M, Muon", "124M, T=4096, documents"}
COMPILED = {"compiled", "FlexAttention"}
ALONE = {"checkpoints", "against"} | {name for name, part in gpu_cases.PARTS.items() if part.gpus > 1}
CASES = [
    pytest.param(part, case, marks=[pytest.mark.no_jitter] * (part in COMPILED) + [pytest.mark.slow] * (part in SLOW))
    for part in gpu_cases.PARTS
    if part not in ALONE
    for case in gpu_cases.PARTS[part].cases(DEVICE)
]


@pytest.mark.parametrize("part,case", CASES)
def test_a_case(part, case, rehearsal):
    """The case of tools.gpu itself, on a GPU if there is one. Figures are as large as they should be."""
    found = gpu_cases.PARTS[part].cases(DEVICE)[case](PLACE)
    assert "failed" not in found
    if part == "numbers":
        assert 0 < found["float32"] < 1e-5 < 1e-3 < found.get("bfloat16", 1e-2)
    elif part == "compiled":
        assert found["float32"] < 1e-4 and found["graphs in all"] >= found["graphs of the first step"] > 0
    elif "losses" in found:
        cfg = parse(Config, gpu_cases.flags(gpu_cases.ROWS.get(part, ""), DEVICE.type))
        tokens = cfg.batch_size * cfg.block_size * cfg.gradient_accumulation_steps
        assert found["tokens/s"] == pytest.approx(1000 * tokens / found["ms per step"])
        assert 0 < found["MFU"] < 1 and found["GPUs"] == 1 and 0.1 < found["GiB"] < 50
        assert len(found["losses"]) == gpu_cases.WARM + gpu_cases.ROUNDS * gpu_cases.LENGTH == len(found["norms"])
        assert sum(found[kind] for kind in gpu_cases.CLASSES if kind in found) == pytest.approx(1)
        assert found["products"] > 0 and found["attention by FlashAttention"] > 0  # a CPU's kernel, too
    else:
        assert all(0 <= x < (1e-2 if part == "training" else 1e12) for x in found.values())


def test_the_shares_name_the_attention():
    """Names as the profiler has them on an H100; only what runs on the GPU counts."""
    names = {
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1": "attention by cuDNN",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<64>": "attention by FlashAttention",
        "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::Params)": "other attention",
        "triton_poi_fused__scaled_dot_product_cudnn_attention_add_3": "compiled kernels",
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT": "products",
    }
    kind = gpu_cases.DeviceType
    events = [SimpleNamespace(key=name, device_type=kind.CUDA, self_device_time_total=1) for name in names]
    events.append(SimpleNamespace(key="aten::mm", device_type=kind.CPU, self_cpu_time_total=100))
    for event in events:
        event.is_user_annotation = False
    shares = gpu_cases.kernel_shares(SimpleNamespace(key_averages=lambda: events), True)
    assert shares == dict.fromkeys(names.values(), 1 / len(names))


def test_every_kind_of_comparison_is_rehearsed():
    kinds = {case.partition(":")[0] for part in gpu_cases.PARTS.values() for case in part.cases(torch.device("cpu"))}
    assert {*gpu_cases.NUMBERS, *gpu_cases.RUNS, *gpu_cases.COMPILED} <= kinds
    assert len(gpu_cases.PARTS["numbers"].cases(torch.device("cuda"))) > 576 + 200


def test_every_family_is_trained():
    cases = [parse(Config, [*args, "--n_head=4", "--n_embd=32"]) for args in gpu_cases.FAMILIES.values()]
    assert len(cases) == 48
    for flag, names in (("block", M.BLOCK), ("optimizer", optim.OPTIMIZER)):
        assert set(names) == {getattr(case, flag) for case in cases}


def test_a_wrong_training_is_found(rehearsal, monkeypatch):
    """Another weight decay in the second run, that of the device."""
    calls, build = [], optim.build

    def wrong(model, cfg, *args):
        calls.append(cfg)
        cfg.weight_decay *= 1 + 0.5 * (len(calls) % 2 == 0)
        return build(model, cfg, *args)

    monkeypatch.setattr(optim, "build", wrong)
    kind = gpu_cases.RUNS["runs"]._replace(limits={"float32": 1e-6}, every=23)
    assert all("failed" in case(PLACE) for case in Part("", 0, {"runs": kind}).cases(CPU).values())


def test_checkpoints(rehearsal, monkeypatch):
    """Here train.py runs in this process. A resume that differs is found, in each of the three comparisons."""
    wrong, handlers = [], {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def train_py(folder, runs):
        for name, args in runs.items():
            seed = ["--seed=5", "--learning_rate=1e-3"] if wrong and "resume" in args else []
            train_main([*args.split(), f"--out_dir={folder}/{name}", *seed])

    monkeypatch.setattr(gpu_cases, "train_py", train_py)
    assert gpu_cases.checkpoints(PLACE) == dict.fromkeys(("resume", "from CPU to GPU", "from GPU to CPU"), 0.0)
    wrong.append(True)
    assert gpu_cases.checkpoints(PLACE)["failed"].count("is off by") == 3
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_train_py_says_why_a_run_fails(tmp_path):
    with pytest.raises(ValueError, match="train.py --no_such=1 .*no such flag"):
        gpu_cases.train_py(str(tmp_path), {"a": "--no_such=1"})


def test_the_flags_of_every_row_go_together():
    """Of the GPU's shapes, too; layouts are checked for 2, 4 and 8 GPUs."""
    for args in gpu_cases.ROWS.values():
        parse(Config, [*gpu_cases.flags(args, "cuda"), "--vocab_size=50304"])
    for name, args in gpu_cases.LAYOUTS.items():
        part = gpu_cases.PARTS[f"layout {name}"]
        for size in (1, 2, 4, 8):
            if size >= part.gpus > 1 or size == part.gpus:
                check_layout(parse(Config, gpu_cases.flags(f"{args} --gradient_accumulation_steps=8", "cuda")), size)


def test_the_first_call_has_time_for_the_numbers_and_the_first_row():
    first = ["numbers", "124M", "training", "compiled"]
    assert list(gpu.PARTS)[:5] == [*first, "checkpoints"]
    assert sum(gpu.PARTS[name].seconds for name in first) <= gpu.SECONDS
    assert gpu.PARTS["checkpoints"].seconds > 1.5 * 90  # it took 90 s on a busy machine: eight starts of train.py


def test_layouts_are_compared_with_one_gpu(monkeypatch):
    one, every = (
        {"losses": [5.0, 4.0], "norms": [1.0, 2.0], "dtype": "float32"},
        ("the first losses", "losses", "norms"),
    )
    for factors, wrong in (
        ([1 + 1e-6, 1 - 1e-6], ()), ([1.01] * 2, every), ([1.0, float("nan")], every),
        ([1 + 1e-4, 1.0], every[:1]),
    ):  # fmt: skip
        found = {key: [x * f for x, f in zip(one[key], factors, strict=True)] for key in ("losses", "norms")}
        monkeypatch.setattr(gpu_cases, "speed", lambda *_, found=found: one | found)
        result = gpu_cases.layout("", PLACE._replace(found={"layout one GPU": one}))
        failed = result.get("failed", "").split("; ") if wrong else [result.get("failed")]
        assert all(f"{name}: off by" in result["failed"] for name in wrong) and len(failed) == max(1, 2 * len(wrong))
    assert "not compared" in gpu_cases.layout("", PLACE)["failed"]


@pytest.mark.slow
def test_rehearsal_on_the_cpu(tmp_path, monkeypatch, capfd):
    """Slow: all parts but nanoGPT's, as processes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(gpu, "SECONDS", 10**5)
    monkeypatch.setattr(gpu, "PARTS", {name: part._replace(seconds=600) for name, part in gpu_cases.PARTS.items()})
    with pytest.raises(SystemExit) as stop:
        gpu.main(["--device=cpu", f"--out={tmp_path / 'cpu.jsonl'}"])
    parts = {part for part, _ in gpu.Log(tmp_path / "cpu.jsonl").results}
    assert stop.value.code == 0 and parts == gpu_cases.PARTS.keys() - {"against"}, capfd.readouterr().out


# ---- the comparisons


def checked(kind: str, every: int) -> list[dict]:
    part = Part("", 0, {kind: gpu_cases.NUMBERS[kind]._replace(every=every)})
    return [gpu.attempt(case, gpu_cases.Place(CPU)) for case in part.cases(CPU).values()]


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
        monkeypatch.setattr(gpu_cases, "attention", wrong(dtype, change))
        lines = checked("attention", every=193)
        assert len(lines) == 3 and all(words in line["failed"] for line in lines)
    monkeypatch.setattr(gpu_cases, "attention", right)
    assert all(line.keys() == {"float32", "bfloat16"} for line in checked("attention", every=193))


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
    """A new entry of the table is compared without any change to the cases."""

    class Wrong(M.Sum):
        def forward(self, s, inputs):
            return super().forward(s, inputs) * (1 if s.dtype == torch.float64 else 1.01)

    def mine(cfg, layer):
        return [Wrong(cfg, attn=M.Pool(cfg, layer)), M.Sum(cfg, **M.cross(cfg, layer))]

    monkeypatch.setattr(gpu_cases, "BLOCK", {"mine": mine})
    monkeypatch.setitem(M.BLOCK, "mine", mine)
    lines = checked("models", every=9)
    assert len(lines) > 3 and all("float32 is off" in line["failed"] for line in lines)


def test_every_entry_of_every_table_has_a_case():
    cases = list(gpu_cases.model_cases())
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
    layers = {(case.get("layer"), case.get("n_group")) for case in cases}
    assert {*((layer, None) for layer in gpu_cases.LAYERS), (None, 2)} <= layers


@pytest.mark.slow
@pytest.mark.parametrize("kind", gpu_cases.NUMBERS)
def test_all_cases_on_the_cpu(kind):
    assert not [line for line in checked(kind, every=1) if "failed" in line]
