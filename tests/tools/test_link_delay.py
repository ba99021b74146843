"""bench.py --link_delay: the number of delayed collectives, counted by hand and by the plan; losses; the table."""

import json
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT, TINY, figures
from ranks import launch, train_runs

from configurator import Config, parse
from engine.plan import plan
from tools import bench, speed
from tools.child import Child

# TINY has 2 layers, 2 micro-batches of 4 x 16 tokens. Of a micro-batch, the embedding, the last norm and a chunk of the
# loss take 2 collectives each; a sum of a block takes 4, two of them in the backward. Of a step, the gradients of uncut
# parameters and their norm take one each.
MODELS = {  # name -> (flags, collectives of a step)
    "standard": ("", 2 * (2 * 2 * 4 + 6) + 2),
    "parallel": ("--block=parallel", 2 * (2 * 4 + 6) + 2),
    "superblock": ("--block=superblock", 2 * (2 * 4 + 6) + 2),
    "chunks": ("--block=superblock --loss_chunk=3", 2 * (2 * 4 + 4 + 32 * 2) + 2),  # of 64 tokens, 2 each
    "wide norm": ("--qk_norm=True --qk_norm_width=model", 2 * (2 * (2 * 4 + 2 * 2) + 6) + 2),  # of queries and keys
    "muon": ("--optimizer=muon", 2 * (2 * 2 * 4 + 6) + 2 + 2),  # updates travel to their owners and back
    # a layer tells how many rows come, and sends them there and back, in the backward too; a rank has one micro-batch
    "experts": ("--tp=1 --n_expert=4 --ep=2", 2 * (1 + 2 + 2) + 1),
    "no gains": ("--norm=none --pos=rope", 2 * (2 * 2 * 4 + 6) + 1),
}


def delayed_runs(delays: list[float], runs: list[list[str]], result: Path):
    """Per run the (collectives, milliseconds, loss) of each step and, in all of it, the waits in seconds."""
    plain = [(place, name, getattr(place, name)) for place, names in speed.COLLECTIVES.items() for name in names]
    train_runs([])  # keeps the process group from run to run
    speed.parallel.leave = lambda: None
    found = []
    for flags in runs:
        waits, lines = [], []
        sleep = partial(lambda into, seconds: into.append(seconds) if seconds else None, waits)
        speed.time = SimpleNamespace(sleep=sleep, perf_counter=time.perf_counter)
        speed.print = lambda line, flush, into=lines: into.append(json.loads(line))
        speed.train_rank(delays, flags)
        found.append((lines, waits))
        for place, name, function in plain:
            setattr(place, name, function)
    if found[0][0]:  # the first rank prints
        result.write_text(json.dumps(found))


def flags_of(name: str, tiny_data: Path) -> list[str]:
    return [*TINY, f"--dataset={tiny_data}", "--tp=2", "--max_iters=4", "--warmup_iters=1", *MODELS[name][0].split()]


def test_every_collective_of_a_step_waits_and_is_planned(tiny_data, tmp_path, many):
    """Steps 0 and 2 have no delay, steps 1 and 3 have 2 ms. The losses are those without delays, for all kinds of
    collectives."""
    runs = {name: flags_of(name, tiny_data) for name in MODELS}
    launch(2, delayed_runs, tmp_path, [0.0, 2.0], list(runs.values()), tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    many(2, *((name, runs[name]) for name in ("chunks", "muon", "experts")))
    for (name, flags), ((steps,), waits) in zip(runs.items(), found, strict=True):
        by_hand = MODELS[name][1]
        assert [calls for calls, *_ in steps] == [by_hand] * 4, name
        assert waits == [0.002] * 2 * by_hand, name
        assert plan.estimate(replace(parse(Config, flags), world_size=2, vocab_size=257)).collectives == by_hand, name
        if (tmp_path / name).exists():
            trained = [line["loss"] for line in figures(tmp_path / name) if "loss" in line]
            assert [loss for *_, loss in steps] == trained, name


@pytest.mark.parametrize("tp,by_hand", [(1, 0), (4, 2 * (2 * 4 + 4 + 32 * 2) + 2)])
def test_the_plan_counts_only_collectives_of_several_ranks(tp, by_hand):
    """One rank computes a loss in chunks with the function of several."""
    cfg = parse(Config, [*TINY, "--n_head=4", "--block=superblock", "--vocab_size=257", "--loss_chunk=3", f"--tp={tp}"])
    cfg.world_size = tp
    assert plan.estimate(cfg).collectives == by_hand


def test_the_table(tiny_data, monkeypatch, capfd):
    """Two processes under torchrun, with the ratios of their times."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    args = [*TINY, f"--dataset={tiny_data}", "--max_iters=15", "--eval_interval=100"]
    bench.main(["--link_delay=20,5", "--run=--block=superblock --tp=2", *args])
    titles, *rows = capfd.readouterr().out.splitlines()
    assert len(rows) == 3 and titles.split()[-1] == "run"
    rows = [row.split(maxsplit=7) for row in rows]
    milliseconds = [float(row[4]) for row in rows]
    for row, delay, ms in zip(rows, (0, 5, 20), milliseconds, strict=True):
        assert row[:4] == ["2", "30", "30", str(delay)] and row[7] == "--block=superblock --tp=2"
        assert float(row[5]) == pytest.approx(ms / milliseconds[0], rel=0.01)
        assert float(row[6]) == pytest.approx(1 + 30 * delay / milliseconds[0], rel=0.01)
        assert ms >= 30 * delay


def test_the_error_of_a_rank_is_one_line(tiny_data, monkeypatch, capfd):
    said = "echo a warning >&2; echo 'error: dtype=float16' >&2; echo more of torchrun >&2; exit 1"
    failing = partial(Child, ["bash", "-c", said], ROOT)
    monkeypatch.setattr(speed, "Child", lambda *_: failing())
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--link_delay=5", "--tp=2", *TINY, f"--dataset={tiny_data}"])
    error = capfd.readouterr().err
    assert error.startswith("error: --link_delay: ") and error.endswith(": dtype=float16\n") and error.count("\n") == 1


def test_too_few_steps_for_a_median(tiny_data, monkeypatch, capfd):
    finished = SimpleNamespace(lines=["a line of torchrun\n", json.dumps([[30, 1.0, 5.0]] * 9)], failure=lambda: "")
    monkeypatch.setattr(speed, "Child", lambda *_: nullcontext(finished))
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--link_delay=5", "--tp=2", *TINY, f"--dataset={tiny_data}"])
    assert "too few steps; raise --max_iters" in capfd.readouterr().err
