"""tools.compare: the order of trainings, resume, sweeps, failures, --match, intervals; once with the real train.py."""

import json
import math
import os
import runpy
import shlex
import signal
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest

from configurator import parse
from engine.config import Config
from tests.helpers import TINY, gone, losses, metrics, refused, until
from tests.ranks import begin, start
from tools.compare import table as compare_table
from tools.compare import trainings as compare
from tools.compare.__main__ import main

# Its loss is (log10(learning_rate) + 2)^2 + seed / 100, and 1 more for --block=parallel. It makes 3 steps of 20 ms, or
# of 10 ms for --block=parallel.
QUICK = """
import json, math, os, pathlib, signal, sys, time
flags = dict(arg[2:].split("=", 1) for arg in sys.argv[1:])
here, out, steps = pathlib.Path(__file__).parent, pathlib.Path(flags["out_dir"]), int(flags["max_iters"])
rate, parallel = float(flags.get("learning_rate", 1e-2)), flags.get("block") == "parallel"
with open(here / "calls", "a") as f:
    f.write(json.dumps([out.name, flags["init_from"], os.getpid()]) + "\\n")
out.mkdir(exist_ok=True)
(out / "latest").write_text("step_00000001")
print("iter 0: loss 1", flush=True)
if (here / "slow").exists() and out.name == (here / "slow").read_text():
    signal.signal(signal.SIGTERM, lambda *_: ((out / "saved").touch(), sys.exit(0)))
    if (here / "signal").exists():
        os.kill(os.getppid(), signal.SIGINT)
    for _ in range(6000):
        time.sleep(0.1)
if rate > 1 and not (here / "mended").exists():
    sys.exit("error: the loss is not finite; lower --learning_rate")
loss = (math.log10(rate) + 2) ** 2 + int(flags["seed"]) / 100 + parallel
rows = [{"step": n, "kind": "train", "ms_per_step": 10 if parallel else 20} for n in range(steps)]
rows += [{"step": steps, "kind": "eval", "val_loss": loss, "val_bpb": 2 * loss}]
(out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""
FLAGS = [flag for flag in TINY if not flag.startswith(("--eval", "--learning_rate"))]
FLAGS += ["--max_iters=3", "--warmup_iters=1", "--min_lr=0"]
TWO = "+1.0000 ± 0.0000 (n = 2)"


class Fake:
    """tools.compare with the quick train.py, in one folder."""

    def __init__(self, folder: Path, data: Path):
        self.folder = folder
        self.out = folder / "out"
        (folder / "train.py").write_text(QUICK)
        self.common = f"--common={shlex.join([*FLAGS, f'--dataset={data}'])}"

    def __call__(self, *flags: str, runs=("", "--block=parallel")) -> int:
        """The exit code."""
        return main(self.line(*flags, runs=runs))

    def line(self, *flags: str, runs=("", "--block=parallel")) -> list[str]:
        return [*(f"--run={run}" for run in runs), self.common, f"--out={self.out}", *flags]

    def calls(self) -> list[str]:
        """The trainings that were started since the last call of this method, in order, resumed ones with a star."""
        path = self.folder / "calls"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        path.unlink(missing_ok=True)
        return [name + "*" * (start == "resume") for name, start, _ in lines]

    def table(self) -> dict:
        return json.loads((self.out / "compare.json").read_text())


@pytest.fixture
def fake(tmp_path, tiny_data, monkeypatch):
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Fake(tmp_path, tiny_data)


def test_wrong_options(fake, monkeypatch, capfd):
    monkeypatch.setattr(compare, "Child", lambda *_: pytest.fail("a training was started"))
    for flags, words in (
        (["--seeds=2"], ["--run", "config/pycode_standard.py"]),
        (["--run=", "--seeds=21"], ["seeds=21", "must be <=20"]),
        (["--run=", "--sweep=learning_rate=1e-3,1e-3"], ["two or more"]),
        (["--run=--beta1=0.8", "--sweep=beta1=0.7,0.9"], ["--run=--beta1=0.8", "tools.compare sets --beta1"]),
        (["--run=", "--out=s3://bucket/x"], ["out='s3://bucket/x' (command line): an address"]),
        (["--run=", "--sweep=mlp_ratio=2,4"], ["mlp_ratio", "costs", "--run"]),
        (["--run=x.py", "--common=--seed=3"], ["--run=x.py --common=--seed=3: tools.compare sets --seed; "]),
        (["--run=--batch_ramp=8:9"], ["batch_ramp=8:9", "leave it out"]),
        (["--run=", "--run=--max_iters=4"], ["--run=--max_iters=4", "tokens are to be equal, which needs max_iters=3"]),
        (["--run=", "--run=--n_layer=3 --n_embd=32", "--match=parameters"], ["parameters are", "leave n_embd out"]),
    ):
        refused(main, fake.line(*flags, runs=()), capfd, words)
    assert not fake.out.exists()
    fake.out.mkdir()
    (fake.out / "meta.json").touch()
    assert "meta.json was not written by this command; " in refused(main, fake.line(), capfd)
    (fake.out / "meta.json").unlink()
    for content in ("{", "[3]", '{"ms_per_step": 3}', '{"ms_per_step": [1, 0]}', '{"ms_per_step": [1, "a"]}'):
        (fake.out / "compare.json").write_text(content)
        assert f"{fake.out / 'compare.json'} is damaged (" in refused(main, fake.line(), capfd)
    os.truncate(fake.out / "compare.json", 40 * 2**30)
    assert "compare.json is damaged (" in refused(main, fake.line(), capfd)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE is set; start tools.compare without" in refused(main, fake.line(), capfd)


def rows(fake: Fake) -> list[list[str]]:
    """The cells of the printed table."""
    lines = (fake.out / "compare.md").read_text().splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:] if line.startswith("|")]


def test_seeds_are_interleaved_and_the_table_is_right(fake, capfd):
    assert fake("--seeds=3") == 0
    assert fake.calls() == [f"run{run}-seed{seed}" for seed in (1, 2, 3) for run in (1, 2)]
    first, second = rows(fake)
    costs = [f"{parameters(2, 16):,}", f"{flops_per_token(2, 16) / 1e6:.2f} M", "384"]  # 3 steps of 4 2 16 tokens
    assert first == ["1: ``", *costs, "0.1", "0.0200 (0.0100 to 0.0300)", "0.0400 (0.0200 to 0.0600)", "-", "1.000"]
    assert second[0] == "2: `--block=parallel`"
    assert second[5] == "1.0200 (1.0100 to 1.0300)"
    assert second[7:] == ["+1.0000 ± 0.0000 (n = 3)", "2.000"]
    seeds = [run["seeds"] for run in fake.table()["runs"]]
    assert seeds[1]["2"] == pytest.approx(dict(loss=1.02, bits_per_byte=2.04, seconds=0.03, tokens_per_s=12800))
    assert seeds[0]["1"]["seconds"] == pytest.approx(3 * 0.020)
    written = (fake.out / "compare.md").read_text()
    assert f"* {fake.table()['measured']}" in written
    assert capfd.readouterr().out.splitlines() == [
        "run1-seed1: loss 0.0100, 0.1 s",
        "run2-seed1: loss 1.0100, 0.0 s",
        "run1-seed2: loss 0.0200, 0.1 s",
        "run2-seed2: loss 1.0200, 0.0 s",
        "run1-seed3: loss 0.0300, 0.1 s",
        "run2-seed3: loss 1.0300, 0.0 s",
        *f"\n{written}\nIt is in {fake.out}/compare.md and compare.json.".splitlines(),
    ]
    assert compare_table.figure([1.0, 1.1, 3.0], 3, statistics.median) == "1.100 (1.000 to 3.000)"


def test_finished_trainings_are_not_repeated(fake, tmp_path, monkeypatch, capfd):
    code = tmp_path / "model.py"
    code.write_text("a")
    monkeypatch.setattr(compare, "CODE", [code])
    assert fake() == 0
    assert fake() == 0
    assert fake.calls() == ["run1-seed1", "run2-seed1"]
    assert rows(fake)[1][7] == "+1.0000 (n = 1)"
    assert fake("--seeds=2") == 0  # more seeds may follow
    assert fake.calls() == ["run1-seed2", "run2-seed2"]
    for flags, runs, word in (
        ([], ["", "--block=superblock"], "another run 2"),
        (["--match=flops"], ["", "--block=parallel"], "another match"),
        (["--eval_iters=7"], ["", "--block=parallel"], "another eval_iters"),
    ):
        assert word in refused(main, fake.line(*flags, runs=runs), capfd)
    assert "another run 1" in refused(main, fake.line(f"{fake.common} --dropout=0.1"), capfd)
    code.write_text("b")
    assert "another code; choose another --out" in refused(main, fake.line(), capfd)
    assert fake.calls() == []


def test_ctrl_c_lets_trainings_save(fake, capfd):
    (fake.folder / "slow").write_text("run1-seed1")
    (fake.folder / "signal").touch()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let their background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            fake("--seeds=2")
    finally:
        signal.signal(signal.SIGINT, before)
    said = "the trainings in progress save a checkpoint; the same command continues"
    assert said in capfd.readouterr().err.splitlines()
    assert (fake.out / "run1-seed1" / "saved").exists()
    (fake.folder / "slow").unlink()
    assert fake("--seeds=2") == 0
    assert fake.calls() == ["run1-seed1", "run1-seed1*", "run2-seed1", "run1-seed2", "run2-seed2"]


def test_signals_reach_the_command(monkeypatch, capfd):
    """Imports let Ctrl-C end the process at once; while trainings run, it, SIGTERM and SIGHUP are an exception."""
    monkeypatch.setattr(sys, "argv", ["tools.compare", "--help"])
    monkeypatch.delitem(sys.modules, "tools.compare.__main__")  # of which runpy would warn
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    try:
        with pytest.raises(SystemExit):
            runpy.run_module("tools.compare", run_name="__main__")
        assert all(signal.getsignal(number) is signal.default_int_handler for number in numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_training_that_would_start_as_the_others_end(fake, monkeypatch):
    """A signal has come after its process was made, and before it was among those that are asked to save."""
    child = mock.Mock()
    monkeypatch.setattr(compare, "Child", lambda *_: nullcontext(child))
    comparison = compare.Comparison(parse(compare.CompareConfig, [fake.common, f"--out={fake.out}"]), [""])
    comparison.stopped = True
    comparison.make((comparison.firsts[0], 1))
    child.start.assert_not_called()


def compared(folder: Path, argv: list[str]):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    compare.ROOT = folder
    main(argv)


def test_a_killed_comparison_goes_on(fake, capfd):
    (fake.folder / "slow").write_text("run2-seed1")
    calls = fake.folder / "calls"
    [process] = start(compared, [(fake.folder, fake.line())])
    until(lambda: (calls.exists() and calls.read_text().count("\n") == 2) or not process.is_alive())
    assert process.is_alive()
    assert "process" in refused(main, fake.line(), capfd)  # another process compares in this folder
    process.kill()
    process.join()
    pid = json.loads(calls.read_text().splitlines()[1])[2]
    until(lambda: gone(pid))  # the training does not outlive tools.compare
    (fake.folder / "slow").unlink()
    assert fake() == 0
    assert fake.calls() == ["run1-seed1", "run2-seed1", "run2-seed1*"]


def test_a_run_that_fails(fake, capfd):
    assert fake("--seeds=2", runs=["", "--learning_rate=10", "--block=parallel"]) == 1
    assert len(fake.calls()) == 6
    table = (fake.out / "compare.md").read_text()
    assert "Run 2, seed 2 failed: the loss is not finite; lower --learning_rate" in table
    assert [row[5:8:2] for row in rows(fake)][1:] == [["failed (see below)", "-"], ["1.0150 (1.0100 to 1.0200)", TWO]]
    assert "run2-seed1: failed: the loss is not finite" in capfd.readouterr().out
    (fake.folder / "mended").touch()
    assert fake("--seeds=2", runs=["", "--learning_rate=10", "--block=parallel"]) == 0
    assert fake.calls() == ["run2-seed1*", "run2-seed2*"]
    assert rows(fake)[1][5] != "failed (see below)"


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_sweep(jobs, fake):
    """The best value is 1e-2. At seed 1 all values are trained, then the best one with the other seeds."""
    sweep = "--sweep=learning_rate=1e-3,1e-2,1e-1,2"
    assert fake(sweep, "--seeds=2", f"--jobs={jobs}") == 1  # 2 diverges
    calls = fake.calls()
    swept = [f"run{run}-learning_rate={rate}-seed1" for rate in ("1e-3", "1e-2", "1e-1", "2") for run in (1, 2)]
    assert sorted(calls[:8]) == sorted(swept) if jobs > 1 else calls[:8] == swept
    assert sorted(calls[8:]) == [f"run{run}-learning_rate=1e-2-seed2" for run in (1, 2)]
    table = (fake.out / "compare.md").read_text()
    assert [row[0] for row in rows(fake)] == ["1: `--learning_rate=1e-2`", "2: `--block=parallel --learning_rate=1e-2`"]
    assert [row[5:8:2] for row in rows(fake)] == [
        ["0.0150 (0.0100 to 0.0200)", "-"],
        ["1.0150 (1.0100 to 1.0200)", TWO],
    ]
    assert [run["arguments"][-1] for run in fake.table()["runs"]] == 2 * ["--learning_rate=1e-2"]  # for the picture
    losses = "learning_rate=1e-3 1.0100, learning_rate=1e-2 0.0100, learning_rate=1e-1 1.0100, learning_rate=2 inf"
    assert f"Run 1, losses at seed 1: {losses}." in table
    assert "extend --sweep" not in table


def test_every_setting_of_a_sweep_is_matched(fake):
    options = [f"{fake.common} --max_iters=100", f"--out={fake.out}", "--sweep=learning_rate=1e-3,1e-2"]
    comparison = compare.Comparison(parse(compare.CompareConfig, options), ["", "--batch_size=8"])
    comparison.match()
    assert [[run.cfg.max_iters for run in each] for each in comparison.candidates] == [[100, 100], [50, 50]]
    notes = comparison.write()
    assert "* Run 2, --match=tokens: --max_iters=50 --warmup_iters=1.\n" in notes
    assert "losses at seed 1" not in notes  # nothing is trained yet


def test_the_edge_of_a_sweep_is_told(fake):
    assert fake("--sweep=learning_rate=1e-3,1e-4,1e-2") == 0
    table = (fake.out / "compare.md").read_text()
    assert "Run 2: learning_rate=1e-2 is at an end of the sweep" in table
    assert table.count("extend --sweep") == 2
    fake.calls()
    assert fake("--sweep=learning_rate=1e-1,1e-2,1e-3,1e-4") == 0  # an extended sweep goes on
    assert len(fake.calls()) == 2
    assert "extend --sweep" not in (fake.out / "compare.md").read_text()


def test_other_tasks_have_no_difference(fake, more_data):
    masked = "--objective=masked --corrupt_ratio="
    others = f"{masked}0.5", f"{masked}0.3 --dataset={more_data}", ""
    assert fake(runs=(f"{masked}0.3", f"{masked}0.3 --n_layer=1", *others)) == 0
    assert [row[7] == "-" for row in rows(fake)] == [True, False, True, True, True]
    assert compare_table.figure([None, None], 4) == "-"  # bits per byte of a masked model


def runs(fake, *flags: str, texts: list[str], common: str = "") -> list[compare.Run]:
    """The runs as --match has adapted them."""
    options = parse(compare.CompareConfig, [f"{fake.common} {common}", f"--out={fake.out}", *flags])
    comparison = compare.Comparison(options, texts)
    comparison.match()
    return comparison.firsts


def parameters(layers: int, width: int) -> int:
    """Of a standard block without biases on 257 bytes and 16 positions, tied."""
    return (257 + 16) * width + layers * (12 * width**2 + 2 * width) + width


def flops_per_token(layers: int, width: int) -> int:
    """6 per weight of a matrix, and 12 T C per layer for the scores and the values."""
    return 6 * (257 * width + layers * 12 * width**2) + layers * 12 * 16 * width


def test_the_time_of_a_step_is_the_median_after_the_warm_up(fake):
    """The first two of ten logged steps do not count."""
    (run,) = runs(fake, texts=[""])
    rows = [{"step": n, "ms_per_step": ms} for n, ms in enumerate((900, 800, 7, 3, 5, 100, 6, 4, 2, 50))]
    rows.append({"step": 3, "kind": "eval", "val_loss": 1.5, "val_bpb": None})
    run.folder(1).mkdir(parents=True)
    file = run.folder(1) / "metrics.jsonl"
    file.write_text("".join(json.dumps(row | {"step": 2}) + "\n" for row in rows))
    assert "of its last step" in run.load(1)
    assert not run.results  # an evaluation before it does not finish a training
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run.load(1) == ""
    assert run.first_loss == 1.5
    figures = run.results[1]
    assert figures["seconds"] == pytest.approx(3 * 5.5e-3)
    assert figures["tokens_per_s"] == pytest.approx(4 * 2 * 16 / 5.5e-3)


def test_match_tokens(fake):
    """Twice the batch takes half the steps; the schedule follows in proportion, rounded down."""
    schedule = "--max_iters=1000 --warmup_iters=25 --schedule=wsd --cooldown_iters=301 --lr_decay_iters=900"
    first, second, third = runs(fake, texts=["", "--batch_size=8", "--batch_size=3"], common=schedule)
    assert first.changed == {}
    assert second.costs.tokens == first.costs.tokens == 1000 * 4 * 2 * 16
    assert second.changed == {"max_iters": 500, "warmup_iters": 12, "cooldown_iters": 150, "lr_decay_iters": 450}
    assert third.changed == {"max_iters": 1333, "warmup_iters": 33, "cooldown_iters": 401, "lr_decay_iters": 1199}


def test_match_parameters_and_flops(fake):
    """First the width, then the steps of a model of this width."""
    common = "--n_embd=64 --max_iters=100 --warmup_iters=1"
    first, second = runs(fake, "--match=parameters,flops", texts=["", "--n_layer=5"], common=common)
    width = second.changed["n_embd"]
    assert width < 64
    assert abs(second.costs.parameters / first.costs.parameters - 1) < 0.05
    steps = 100 * flops_per_token(2, 64) / flops_per_token(5, width)
    assert second.changed["max_iters"] == round(steps) != 100


@pytest.mark.parametrize("text,unit", [
    ("--n_layer=5", 2), ("--n_layer=1 --n_head=4", 4), ("--n_layer=3 --pos=rope", 4),
    ("--n_layer=3 --pos=sinusoidal --n_head=1", 2),
])  # fmt: skip
def test_match_parameters(text, unit, fake):
    """The nearest of all widths, found by trying each."""
    first, second = runs(fake, "--match=parameters", texts=["", text], common="--n_embd=64")
    layers = second.cfg.n_layer
    table = 16 * (second.cfg.pos != "learned")  # rows of learned positions that it does not have

    def of(width: int) -> int:
        return parameters(layers, width) - table * width

    near = min(range(unit, 300, unit), key=lambda width: abs(of(width) - parameters(2, 64)))
    assert second.cfg.n_embd == second.changed["n_embd"] == near
    assert second.costs == (of(near), flops_per_token(layers, near), *first.costs[2:])


def test_match_seconds(fake, monkeypatch, capfd):
    """The first run takes 20 ms per step at best and the second 30, so the second has two thirds of the steps."""
    times = {"1": [20, 25], "2": [40, 30]}
    called = []

    def measure(checkout, args, lines, cwd):
        assert cwd == Path.cwd()
        cfg = parse(Config, args)
        assert (cfg.eval_interval, cfg.save_interval, cfg.seed) == (0, 0, 1)  # only training is timed
        called.append("2" if "--block=parallel" in args else "1")
        return times[called[-1]].pop(0)

    monkeypatch.setattr(compare, "measure", measure)
    fake.out.mkdir()
    texts = ["--save_interval=3", "--block=parallel --eval_interval=2"]
    flags = {"texts": texts, "common": "--max_iters=60 --warmup_iters=9"}
    _, second = runs(fake, "--match=seconds", **flags)
    assert called == ["1", "2", "1", "2"]
    assert second.changed == {"max_iters": 40, "warmup_iters": 6}
    _, again = runs(fake, "--match=seconds", **flags)  # without a new timing
    assert len(called) == 4
    assert again.changed == second.changed


def test_interval_by_hand():
    assert compare_table.interval([0.5]) == "+0.5000 (n = 1)"
    # deviation sqrt(0.02), divided by sqrt(2); variance 10 / 4
    assert compare_table.interval([0.1, 0.3]) == f"+0.2000 ± {12.706 * 0.1:.4f} (n = 2)"
    assert compare_table.interval([1, 2, 3, 4, 5]) == f"+3.0000 ± {2.776 * math.sqrt(2.5 / 5):.4f} (n = 5)"


def test_quantiles_of_students_t():
    """Half of 95 % lies between 0 and the quantile: Simpson's rule over the density."""
    n = 2000
    for freedom, end in enumerate(compare_table.T95, 1):
        density = [(1 + (i * end / n) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(n + 1)]
        area = (density[0] + density[-1] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2])) * end / n / 3
        scale = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
        assert scale * area == pytest.approx(0.475, abs=1e-4), freedom


def test_a_real_training(tiny_data, tmp_path, run, monkeypatch):
    """It equals a run that is started by hand. Its process is forked, so that it need not import torch."""

    def forked(argv: list[str], cwd: Path) -> nullcontext:
        process = begin(argv[1:], tmp_path)
        process.join()
        return nullcontext(mock.Mock(failure=lambda: f"exit code {process.exitcode}" * bool(process.exitcode)))

    monkeypatch.setattr(compare, "Child", forked)
    flags = [*FLAGS, "--learning_rate=1e-2", f"--dataset={tiny_data}"]
    main([f"--run={shlex.join(flags)}", f"--out={tmp_path / 'compared'}"])
    (row,) = json.loads((tmp_path / "compared" / "compare.json").read_text())["runs"]
    found = row["seeds"]["1"]
    alone = run(*flags, "--seed=1", "--eval_interval=0", "--eval_iters=0")
    last = metrics(alone)[-1]
    assert (found["loss"], found["bits_per_byte"]) == (last["val_loss"], last["val_bpb"])
    assert losses(tmp_path / "compared" / "run1-seed1") == losses(alone)
