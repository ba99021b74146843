"""Trains the baselines of docs/baselines.md, with tuned learning rates, and writes its figures: `make baselines`.

    python -m tools.baselines                            # two hours on 2 cores; a stopped call continues
    python -m tools.baselines --table=kinds --out=out/kinds --seeds=5    # other variants, see TABLES
    python -m tools.baselines --steps=30 --seeds=1 --out=out/rehearsal   # writes OUT/baselines.md only

The two learning rates of a variant are found by coordinate search with seed 1. tools/compare makes the trainings.
"""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from configurator import Config, parse
from data.errors import command, require, user_errors
from data.files import write_file
from flags import Flags
from tools.child import words_of
from tools.compare import trainings
from tools.compare.table import aligned, cells, error_notes

PAGE = Path(__file__).resolve().parents[1] / "docs" / "baselines.md"
TABLES = {  # --table -> name of a variant -> arguments of train.py; muon_lr and learning_rate where the search begins
    "blocks": {
        "standard": ("config/pycode_standard.py", 0.005, 0.006),
        "parallel": ("config/pycode_standard.py --block=parallel", 0.005, 0.006),
        "superblock in series, 2 groups": ("config/pycode_superblock.py --layer=c,p --n_group=2", 0.005, 0.006),
        "superblock in series, 4 groups": ("config/pycode_superblock.py --layer=c,p --n_group=4", 0.005, 0.006),
        "superblock, 2 groups": ("config/pycode_superblock.py --n_group=2", 0.01, 0.012),
        "superblock, 4 groups": ("config/pycode_superblock.py --n_group=4", 0.01, 0.012),
        "superblock, joint pool": ("config/pycode_superblock_joint.py", 0.01, 0.012),
        "SAS": ("config/pycode_sas.py", 0.02, 0.006),
        "SAS-P": ("config/pycode_sas_p.py", 0.02, 0.006),
        "Llama-like": ("config/pycode_llama.py", 0.01, 0.048),
        "GPT-2-like": ("config/pycode_gpt2.py", 0.04, 0.003),
        "masked (BERT-like)": ("config/pycode_bert.py", 0.01, 0.048),
        "seq2seq (T5-like)": ("config/pycode_t5.py", 0.005, 0.012),
    },
}
LAYERS = {  # other tables -> values of --layer, and further flags
    "kinds": ["c,p", "c/2+p/2,c/2+p/2", "c/2+p/4,c/2+3p/4", "c/2,c/2+p", "c/2,c/2,p/2,p/2"]
    + ["c.none+p --n_layer=6 --mlp_ratio=2.34", "c.none+p --n_layer=8 --mlp_ratio=1.5"],
    "way": ["c,p", "c.stream,p", "c,p;s,p", "c.relu2,p", "c.none,p"]
    + ["c,p.heads", "c,c.stream.relu2.none", "c,p.softmax", "c,p.matrix", "c,c"],
}
for name, layers in LAYERS.items():
    superblock = "config/pycode_standard.py --block=superblock --layer="
    TABLES[name] = {each: (f"{superblock}{each}", 0.005, 0.006) for each in layers}
GRID = {
    "muon_lr": [0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08],
    "learning_rate": [0.0015, 0.003, 0.006, 0.012, 0.024, 0.048],
}


@dataclass
class BaselinesConfig(Flags):
    """The flags of baselines.py. ValueError names the flag, its value and the remedy."""

    # --- baselines
    table: Literal["blocks", "kinds", "way"] = "blocks"  # only blocks writes docs/baselines.md
    out: str = "out/baselines"  # folder of all trainings
    steps: int = 450  # [>=30] optimizer steps of a full training; a short one makes a third of them
    seeds: int = 3  # [>0] [<=20] number of final trainings of each variant
    jobs: int = 2  # [>0] trainings at the same time; they share the threads
    common: str = "--compile=True"  # arguments of every training

    def __post_init__(self):
        super().__post_init__()
        for name in ("max_iters", "warmup_iters", "cooldown_iters", *GRID):
            require(f"--{name}=" not in self.common, f"common={self.common}: baselines.py sets {name}; leave it out")
        first = next(iter(starting_points(self).values()))
        try:
            parse(Config, words_of("common", arguments(self, first, self.steps)))
        except ValueError as error:
            raise ValueError(f"common={self.common}: {error}") from None


class Point(NamedTuple):
    """A variant and its learning rates."""

    variant: str
    muon_lr: float
    learning_rate: float


def starting_points(options: BaselinesConfig) -> dict[str, Point]:
    """Where the search of each variant begins."""
    return {variant: Point(variant, *rates) for variant, (_, *rates) in TABLES[options.table].items()}


def neighbours(point: Point, name: str) -> list[Point]:
    """The point and those beside it on the grid of one learning rate."""
    grid = GRID[name]
    at = grid.index(getattr(point, name))
    return [point._replace(**{name: rate}) for rate in grid[max(at - 1, 0) : at + 2]]


def search(
    options: BaselinesConfig, name: str, best: dict[str, Point], steps: int, eval_iters: int
) -> dict[Point, float]:
    """Move the best point of each variant along one learning rate; returns all losses, infinite where one failed. The
    best points are trained with their neighbours until all of these are known, then the points of the table."""
    starts = starting_points(options)
    losses: dict[Point, float] = {}
    while True:
        near = [each for point in best.values() for each in neighbours(point, name)]
        missing = [point for point in near if point not in losses]
        if not missing:
            missing = [point for point in starts.values() if point not in losses]
        if not missing:
            return losses
        runs = run_compare(options, f"{name}-{len(losses)}", missing, steps, eval_iters=eval_iters).runs
        losses |= zip(missing, (run.first_loss for run in runs), strict=True)
        for variant in best:
            best[variant] = min((point for point in losses if point.variant == variant), key=losses.get)


def arguments(options: BaselinesConfig, point: Point, steps: int) -> str:
    """The arguments of train.py for a variant with these learning rates."""
    variant, *rates = point
    flags = {"max_iters": steps, "warmup_iters": max(1, 20 * steps // 450), "cooldown_iters": steps // 3}
    flags |= zip(GRID, rates, strict=True)
    own, _, _ = TABLES[options.table][variant]
    return " ".join([own, options.common, *(f"--{name}={value}" for name, value in flags.items())])


def run_compare(options: BaselinesConfig, name: str, points: list[Point], steps: int, **more) -> trainings.Comparison:
    """Train these points, in a folder below --out. A training may diverge; other failures end the program."""
    folder = f"{options.out}/{name}"
    runs = [arguments(options, point, steps) for point in points]
    with user_errors():
        comparison = trainings.compare(trainings.CompareConfig(out=folder, jobs=options.jobs, **more), runs)
        for run in comparison.runs:
            bad = [cause for cause in run.errors.values() if "is not finite" not in cause]
            require(not bad, f"{folder}, run {run.number}: {' '.join(bad)}; the same command tries it again")
    return comparison


def page(text: str, best: dict[str, Point], runs: list, measured: str) -> str:
    """`text`, that of docs/baselines.md, with new figures between each <!-- name --> and <!-- end -->."""
    lines = [["variant", *GRID, "parameters", "loss", "bits per byte", "difference from standard"]]
    for (variant, *rates), run in zip(best.values(), runs, strict=True):
        _, parameters, _, _, _, loss, bits, difference, _ = cells(run, runs[0])
        marks = [" !" if rate in (grid[0], grid[-1]) else "" for rate, grid in zip(rates, GRID.values(), strict=True)]
        shown = [f"{rate}{mark}" for rate, mark in zip(rates, marks, strict=True)]
        lines.append([variant, *shown, parameters, loss, bits, difference])
    end = "--eval_interval=0 --eval_iters=0 --seed=1 --out_dir=out/baseline"
    commands = [f"python train.py {run.text} {end}{run.number}" for run in runs]
    parts = {
        "measured": measured,
        "losses": aligned(lines) + "\n" + "".join(f"* {note}\n" for note in error_notes(runs)),  # which have diverged
        "commands": "\n".join(["```", *commands, "```"]),
    }
    for name, part in parts.items():
        head, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{head}<!-- {name} -->\n\n{part.strip()}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def main(argv: list[str] | None = None):
    with user_errors():
        options = parse(BaselinesConfig, argv, __doc__)
    best = starting_points(options)
    search(options, "learning_rate", best, options.steps // 3, eval_iters=60)
    search(options, "muon_lr", best, options.steps, eval_iters=0)
    final = run_compare(options, "final", list(best.values()), options.steps, seeds=options.seeds)
    if options.table != "blocks":
        return  # tools.compare has printed its table, and the page is written by hand
    target = PAGE if options == BaselinesConfig() else Path(options.out).expanduser() / PAGE.name
    write_file(target, page(PAGE.read_text(), best, final.runs, final.stored["measured"]).encode())
    print(f"The page is {target}.")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # an exception, after which tools.compare removes its lock
    command(main)
