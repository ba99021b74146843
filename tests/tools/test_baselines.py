"""baselines.py: the coordinate search against an exhaustive one, and the page, with a formula for tools.compare."""

import itertools
import math
import re
import shlex
from copy import copy
from types import SimpleNamespace

import pytest
from helpers import refused

from configurator import Config, parse
from tools import baselines
from tools.compare import trainings
from tools.compare.run import Costs, Run

BLOCKS = baselines.TABLES["blocks"]
DEFAULTS = parse(Config, [])


@pytest.fixture
def formula(monkeypatch, tmp_path):
    """The comparisons, as a loss that is quadratic in the logarithms of both rates; returns its calls and the loss.

    The optimum of the first variant is at the start of its search, that of the second at a corner of the grid, and of
    the others at other points. SAS-P fails at muon_lr=0.04. That of SAS lies at its start, but only in full trainings.
    """
    optimum = dict(zip(BLOCKS, itertools.product(*baselines.GRID.values()), strict=False))
    optimum["standard"], optimum["parallel"] = BLOCKS["standard"][1:], (0.08, 0.0015)
    known = {v: text for table in baselines.TABLES.values() for v, (text, *_) in table.items()}
    calls = []

    def loss(variant: str, muon_lr: float, learning_rate: float, full: bool = True) -> float:
        best = BLOCKS["SAS"][1:] if full and variant == "SAS" else optimum.get(variant, (0.005, 0.006))
        if variant == "SAS-P" and muon_lr == 0.04:
            return float("inf")
        return 1 + math.log(muon_lr / best[0]) ** 2 + math.log(learning_rate / best[1]) ** 2

    def compare(options: trainings.CompareConfig, runs: list[str]) -> SimpleNamespace:
        out = options.out
        calls.append((out, runs))
        found = []
        for number, text in enumerate(runs, 1):
            run = object.__new__(Run)
            flags = dict(arg[2:].split("=") for arg in text.split() if arg.startswith("--"))
            variant = max((v for v in known if text.startswith(known[v])), key=lambda v: len(known[v]))
            rates = float(flags["muon_lr"]), float(flags["learning_rate"])
            run.first_loss = loss(variant, *rates, full=flags["max_iters"] == "450")
            run.number, run.text, run.shown, run.cfg = number, text, text, copy(DEFAULTS)
            run.cfg.objective = variant if "T5" in variant else "causal"
            run.costs, run.results, run.errors = Costs(1000 + number, 1e6, 1, 9), {}, {1: "the loss is not finite"}
            if run.first_loss < float("inf"):
                figures = {"bits_per_byte": None, "seconds": 1.0, "tokens_per_s": 1.0}
                losses = {1: run.first_loss, 2: run.first_loss + number / 100}
                run.results, run.errors = {seed: figures | {"loss": x} for seed, x in losses.items()}, {}
            found.append(run)
        (tmp_path / out.removeprefix(f"{tmp_path}/")).mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(runs=found, stored={"measured": "Measured somewhere."})

    monkeypatch.setattr(trainings, "compare", compare)
    return calls, loss


def test_the_search_finds_what_an_exhaustive_one_finds(formula, tmp_path):
    """The loss is a sum of two functions of one rate each, so the coordinate search finds its minimum."""
    calls, loss = formula
    options = baselines.BaselinesConfig(out=str(tmp_path))
    best = baselines.starting_points(options)
    for name, steps, eval_iters in (("learning_rate", 150, 60), ("muon_lr", 450, 0)):
        losses = baselines.search(options, name, best, steps, eval_iters)
        points = [run for _, runs in calls for run in runs if f"--max_iters={steps} " in run]
        assert len(points) == len(set(points)) == len(losses)  # nothing is trained twice
        of_standard = [point[1:] for point in losses if point[0] == "standard"]
        assert len(of_standard) == 3 and BLOCKS["standard"][1:] in of_standard
        assert all(f"--warmup_iters={20 * steps // 450} --cooldown_iters={steps // 3}" in run for run in points)
    for variant, *found in best.values():
        if variant != "SAS-P":
            grid = itertools.product(*baselines.GRID.values())
            assert tuple(found) == min(grid, key=lambda rates: loss(variant, *rates)), variant
    tried = [muon_lr for variant, muon_lr, _ in losses if variant == "parallel"]
    assert tried == [0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.005]  # and the start of the search
    of_sas = [point[1:] for point in losses if point[0] == "SAS"]
    assert {rate for _, rate in of_sas} == {0.003, 0.006} and {(0.01, 0.006), (0.04, 0.006)} <= set(of_sas)
    failed = [loss for (variant, muon_lr, _), loss in losses.items() if (variant, muon_lr) == ("SAS-P", 0.04)]
    assert failed == [float("inf")] and best["SAS-P"][1] != 0.04


def test_the_page(formula, tmp_path, capsys):
    calls, _ = formula
    baselines.main([f"--out={tmp_path}", "--seeds=2"])
    assert calls[-1][0] == f"{tmp_path}/final" and "--max_iters=450 --warmup_iters=20" in calls[-1][1][0]
    text = (tmp_path / "baselines.md").read_text()
    prose = [re.split("<!-- (?:[^e].*|end) -->", each)[::2] for each in (text, baselines.PAGE.read_text())]
    assert prose[0] == prose[1] and len(prose[0]) == 4 and text.count("<!-- ") == 6
    row = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
           for line in text.split("## The commands")[0].splitlines() if line.startswith("| ")}  # fmt: skip
    assert row["standard"] == ["0.005", "0.006", "1,001", "1.0050 (1.0000 to 1.0100)", "-", "-"]
    half = 12.706 * 0.01 / 2  # two differences, 0 and 0.01: the quantile times their deviation over sqrt(2)
    assert row["parallel"][:2] == ["0.08 !", "0.0015 !"] and row["parallel"][5] == f"+0.0050 ± {half:.4f} (n = 2)"
    assert row["seq2seq (T5-like)"][5] == "-" and list(row)[0] == "variant" and "Measured somewhere." in text
    written = text.partition("<!-- commands -->")[2].partition("<!-- end -->")[0]
    commands = [line for line in written.splitlines() if line.startswith("python train.py ")]
    configs = [parse(Config, shlex.split(line)[2:]) for line in commands]
    assert len({cfg.out_dir for cfg in configs}) == len(BLOCKS) and configs[1].block == "parallel"
    assert all((cfg.seed, cfg.eval_iters, cfg.eval_interval) == (1, 0, 0) for cfg in configs)
    rates = [[cell.removesuffix(" !") for cell in row[variant][:2]] for variant in BLOCKS]
    assert [[str(cfg.muon_lr), str(cfg.learning_rate)] for cfg in configs] == rates
    assert str(tmp_path / "baselines.md") in capsys.readouterr().out
    before = calls.copy()
    baselines.main([f"--out={tmp_path}", "--seeds=2"])  # a second call makes the same calls of tools.compare
    assert calls == before * 2 and (tmp_path / "baselines.md").read_text() == text


def test_a_training_that_does_not_end_ends_the_search(formula, monkeypatch, tmp_path, capsys):
    """Its loss is unknown, so the search cannot go on."""
    fine = trainings.compare

    def compare(options: trainings.CompareConfig, runs: list[str]) -> SimpleNamespace:
        comparison = fine(options, runs)
        comparison.runs[1].errors = {1: "run out of memory"}
        return comparison

    monkeypatch.setattr(trainings, "compare", compare)
    error = refused(baselines.main, [f"--out={tmp_path}"], capsys)
    assert len(formula[0]) == 1
    assert "run 2: run out of memory; the same command tries it again" in error


@pytest.mark.parametrize("table", baselines.TABLES)
def test_variants_are_runs_of_equal_tokens(table):
    options = baselines.BaselinesConfig(table=table)
    for variant in baselines.TABLES[table]:
        cfg = parse(Config, shlex.split(baselines.arguments(options, (variant, 0.02, 0.003), 450)))
        assert cfg.batch_size * cfg.gradient_accumulation_steps * cfg.block_size == 2048
        assert (cfg.warmup_iters, cfg.cooldown_iters, cfg.optimizer) == (20, 150, "muon")
        assert table == "blocks" or cfg.layer == variant.split()[0]


def test_other_tables_search_but_leave_the_page_alone(formula, tmp_path):
    page, calls = baselines.PAGE.read_text(), formula[0]
    baselines.main([f"--out={tmp_path}", "--table=kinds", "--common=--n_layer=8"])
    final, runs = calls[-1]
    assert final == f"{tmp_path}/final" and not list(tmp_path.glob("*.md")) and baselines.PAGE.read_text() == page
    assert all(" --n_layer=8 " in run for run in runs)


def test_bad_flags(tmp_path, capsys):
    for flags, said in (
        ("--steps=29", "steps=29"),
        ("--seeds=0", "seeds=0 (command line): must be >0"),
        ("--common=--n_head=5", "common=--n_head=5"),
        ("--common=--muon_lr=0.1", "muon_lr; leave it out"),
    ):
        assert said in refused(baselines.main, [f"--out={tmp_path / 'none'}", flags], capsys)
    assert not (tmp_path / "none").exists()
