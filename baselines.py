"""Trains the baselines of docs/baselines.md, with tuned learning rates, and writes that page: `make baselines`.

    python baselines.py                            # under two hours on 2 cores; a stopped call continues
    python baselines.py --steps=30 --seeds=1       # a rehearsal, which writes OUT/baselines.md only

Each variant has two learning rates: muon_lr for the hidden matrices, and learning_rate for all else. They are found by
coordinate search with seed 1 and short trainings: first muon_lr, then learning_rate. A coordinate starts with three
values of its grid, and the search goes on to the next value while the best one is the last that was tried. Short
trainings favour large rates. So full trainings with seed 1 then try the next smaller muon_lr while the loss falls.
compare.py makes the trainings, in folders below --out.
"""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import compare
import plot
from configurator import parse
from engine.compare_table import aligned, cells
from engine.errors import command, require, user_errors

HERE = Path(__file__).resolve().parent
VARIANTS = {  # name in the table -> arguments of train.py
    "standard": "config/train_pycode.py",
    "parallel": "config/train_pycode.py --block=parallel",
    "superblock in series, 2 groups": "config/pycode_superblock.py --wiring=series --n_group=2",
    "superblock in series, 4 groups": "config/pycode_superblock.py --wiring=series --n_group=4",
    "superblock, 2 groups": "config/pycode_superblock.py --n_group=2",
    "superblock, 4 groups": "config/pycode_superblock.py --n_group=4",
    "superblock, joint pool": "config/pycode_superblock_joint.py",
    "SAS": "config/pycode_sas.py",
    "SAS-P": "config/pycode_sas_p.py",
    "Llama-like": "config/pycode_llama.py",
    "GPT-2-like": "config/pycode_gpt2.py",
    "masked (BERT-like)": "config/pycode_bert.py",
    "seq2seq (T5-like)": "config/pycode_t5.py",
}
DRAWN = [*list(VARIANTS)[:3], "superblock, joint pool", "SAS", "SAS-P", "Llama-like"]
GRID = {"muon_lr": [0.005, 0.01, 0.02, 0.04, 0.08], "learning_rate": [0.00075, 0.0015, 0.003, 0.006, 0.012, 0.024]}
SHORT = "--max_iters={0} --warmup_iters={1} --cooldown_iters={2}"
INTRODUCTION = """# Baselines: what each block reaches

This page is for readers who ask whether a block helps. `make baselines` writes it. It makes {searched} trainings of
{short} steps and {full} of {steps} steps to find two learning rates per variant, then trains each variant for {steps}
steps with {n} seeds. The data is `pycode` (bytes of Python's standard library). Width, depth, optimizer (Muon) and
schedule are those of `config/train_pycode.py`. A CPU with AMX, as here, multiplies matrices in bfloat16.

{measured}

`superblock` with one group computes what `parallel` computes, and in series what `standard` computes, from the same
initial weights (`tests/test_blocks.py::test_equal_blocks_begin_with_equal_weights`), so their rows are those two.
"""
MEANING = """
* muon_lr, learning_rate: the best values of the search below; at an end of the grid they are marked with `!`.
* Loss: nats per byte on the whole validation set; mean and range over {n} seeds. The losses of `masked` and `seq2seq`
  are those of restored bytes, so they have no difference from `standard`.
* If a full training of the search has the best values, it is also the final training with seed 1. So seed 1 has helped
  to choose muon_lr.
* Difference: the loss minus that of `standard` with the same seed; mean ± half of the 95 % confidence interval
  (Student's t).

[superblock.md](superblock.md) has the speeds of the blocks, and what was tried for the joint pool.
"""


@dataclass
class BaselinesConfig:
    """The flags of baselines.py. ValueError names the flag, its value and the remedy."""

    # --- baselines
    out: str = "out/baselines"  # folder of all trainings
    steps: int = 450  # optimizer steps of the final trainings; those of the search make a third of them
    seeds: int = 3  # number of final trainings of each variant
    jobs: int = 2  # trainings at the same time; they share the threads
    common: str = ""  # arguments of every training, such as --dtype=float32

    def __post_init__(self):
        require(self.steps >= 30, f"steps={self.steps} must be at least 30")
        compare.CompareConfig(out=self.out, seeds=self.seeds, jobs=self.jobs)


class Search:
    """The coordinate search of all variants at the same time.

    losses    (variant, muon_lr, learning_rate) -> the loss of a short training, infinite if it failed
    full      the same of full trainings
    folders   the same points -> the folder of the full training, relative to --out
    best      variant -> {"muon_lr": its best value so far, "learning_rate": likewise}
    """

    def __init__(self, options: BaselinesConfig):
        self.options, self.losses, self.full, self.folders, self.rounds = options, {}, {}, {}, 0
        self.best = {variant: {name: values[2] for name, values in GRID.items()} for variant in VARIANTS}
        for name in GRID:
            while missing := self.missing(name):
                self.losses |= self.train(missing, options.steps // 3, "--eval_iters=60")
                for variant in VARIANTS:
                    found = self.tried(variant, name)
                    self.best[variant][name] = min(found, key=found.get)
        self.lower_muon_lr()

    def tried(self, variant: str, name: str) -> dict[float, float]:
        """Value of this learning rate -> loss, for the values tried with the best value of the other one."""
        points = {value: self.point(variant, name, value) for value in GRID[name]}
        return {value: self.losses[point] for value, point in points.items() if point in self.losses}

    def missing(self, name: str) -> list[tuple]:
        """The points to train next: the best value of each variant and its neighbours on the grid."""
        points = []
        for variant in VARIANTS:
            at = GRID[name].index(self.best[variant][name])
            points += [self.point(variant, name, value) for value in GRID[name][max(at - 1, 0) : at + 2]]
        return [point for point in points if point not in self.losses]

    def point(self, variant: str, name: str, value: float) -> tuple:
        """The variant with its best rates, but this value of one of them."""
        return (variant, *(self.best[variant] | {name: value}).values())

    def lower_muon_lr(self):
        """Lower the best muon_lr of each variant while full trainings agree."""
        values = GRID["muon_lr"]
        left = list(VARIANTS)
        while left := [variant for variant in left if self.best[variant]["muon_lr"] > values[0]]:
            pairs = {}
            for variant in left:
                now = self.best[variant]["muon_lr"]
                smaller = values[values.index(now) - 1]
                pairs[variant] = [self.point(variant, "muon_lr", value) for value in (now, smaller)]
            missing = [point for pair in pairs.values() for point in pair if point not in self.full]
            self.full |= self.train(missing, self.options.steps, "--eval_iters=0")
            self.folders |= {point: f"search{self.rounds}/run{n}-seed1" for n, point in enumerate(missing, 1)}
            left = [variant for variant, (now, smaller) in pairs.items() if self.full[smaller] < self.full[now]]
            for variant in left:
                self.best[variant]["muon_lr"] = pairs[variant][1][1]

    def train(self, points: list[tuple], steps: int, evaluation: str) -> dict[tuple, float]:
        """The losses of trainings at these points, with seed 1."""
        self.rounds += 1
        runs = [arguments(self.options, variant, rates, steps) for variant, *rates in points]
        rows = run_compare(self.options, f"search{self.rounds}", runs, [evaluation])
        return {p: row["loss"]["mean"] if row["loss"] else float("inf") for p, row in zip(points, rows, strict=True)}


def table(losses: dict[tuple, float]) -> str:
    """Losses of a search, as Markdown."""
    ordered = sorted(losses.items(), key=lambda item: (list(VARIANTS).index(item[0][0]), item[0][1:]))
    return aligned([["variant", *GRID, "loss"]] + [[*map(str, point), f"{loss:.4f}"] for point, loss in ordered])


def arguments(options: BaselinesConfig, variant: str, rates: list[float], steps: int) -> str:
    """The arguments of train.py for a variant with these learning rates."""
    schedule = SHORT.format(steps, max(1, 20 * steps // 450), steps // 3)
    rates = " ".join(f"--{name}={rate}" for name, rate in zip(GRID, rates, strict=True))
    return f"{VARIANTS[variant]} {options.common} {schedule} {rates}".replace("  ", " ")


def run_compare(options: BaselinesConfig, name: str, runs: list[str], more: list[str]) -> list[dict]:
    """Train these runs with compare.py; returns its rows."""
    folder = f"{options.out}/{name}"
    try:
        compare.main([*(f"--run={run}" for run in runs), *more, f"--jobs={options.jobs}", f"--out={folder}"])
    except SystemExit as end:
        if end.code != 1:  # 1 means that a training has failed; its row says why
            raise
    return json.loads((Path(folder).expanduser() / "compare.json").read_text())["runs"]


def page(options: BaselinesConfig, search: Search, rows: list[dict], measured: str) -> str:
    """The text of docs/baselines.md."""
    header = ["variant", *GRID, "parameters", "loss", "bits per byte", "difference from standard"]
    lines = [header]
    for variant, row in zip(VARIANTS, rows, strict=True):
        _, parameters, _, _, _, loss, bits, difference, _ = cells(row)
        best = search.best[variant].items()
        rates = [f"{rate}{' !' * (rate in (GRID[name][0], GRID[name][-1]))}" for name, rate in best]
        lines.append([variant, *rates, parameters, loss, bits, difference])
    text = INTRODUCTION.format(
        searched=len(search.losses),
        full=len(search.full),
        short=options.steps // 3,
        n=options.seeds,
        steps=options.steps,
        measured=measured,
    )
    text += "\n" + aligned(lines) + MEANING.format(n=options.seeds)
    text += "\n![Training losses of seven variants against tokens](baselines.png)\n"
    text += f"\nThe picture has the means and ranges of {options.seeds} seeds, without the first fifth of the tokens.\n"
    text += "\n## The commands\n\nThe trainings with seed 1; `make train` prepares the data:\n\n"
    text += "```\n" + "".join(f"python train.py {row['run']} --seed=1\n" for row in rows) + "```\n"
    text += "\n## The search\n\nThe losses are those of 60 batches of the validation set, with seed 1:\n\n"
    text += table(search.losses)
    if search.full:
        text += "\nFull trainings with seed 1, from the best muon_lr downwards; losses of the whole set:\n\n"
        text += table(search.full)
    return text


def picture(rows: list[dict]):
    """A matplotlib Figure of training losses: a line per variant of DRAWN, the mean of its seeds, without the start."""
    cfg, lines = plot.PlotConfig(smooth=10), []
    for variant, row in zip(VARIANTS, rows, strict=True):
        if variant in DRAWN and row["seeds"]:
            i = DRAWN.index(variant)
            colour, style = plot.COLOURS[i], plot.STYLES[i % 2]
            runs = [
                plot.read_run(f["folder"])._replace(flags={"run": variant, "seed": seed})
                for seed, f in row["seeds"].items()
            ]
            (line,) = plot.curves(cfg, runs)
            late = line.x > line.x[-1] / 5
            parts = (each[late] for each in (line.x, line.y, line.low, line.high))
            lines.append(plot.Line(variant, *parts, colour, style))
    return plot.draw({"": lines}, plot.AXES[cfg.x], plot.y_label(cfg))


def main(argv: list[str] | None = None):
    with user_errors():
        options = parse(BaselinesConfig, argv, __doc__)
        require(importlib.util.find_spec("matplotlib"), "matplotlib is not installed; pip install -e .[plots]")
    search = Search(options)
    folder = Path(options.out).expanduser()
    (folder / "final").mkdir(parents=True, exist_ok=True)
    for number, variant in enumerate(VARIANTS, 1):  # a full training of the search is the final one with seed 1
        trained = search.folders.get((variant, *search.best[variant].values()), "")
        link = folder / "final" / f"run{number}-seed1"
        if trained and not link.exists():
            link.symlink_to(Path("..", trained), target_is_directory=True)
    runs = [arguments(options, variant, search.best[variant].values(), options.steps) for variant in VARIANTS]
    rows = run_compare(options, "final", runs, [f"--seeds={options.seeds}"])
    measured = json.loads((folder / "final" / "compare.json").read_text())["notes"][0]
    target = HERE / "docs" / "baselines.md" if options == BaselinesConfig() else folder / "baselines.md"
    target.write_text(page(options, search, rows, measured))
    picture(rows).savefig(target.with_suffix(".png"), dpi=160, transparent=True)
    print(f"The page is {target}.")


if __name__ == "__main__":
    command(main)
