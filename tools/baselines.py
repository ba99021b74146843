"""Trains the baselines of docs/baselines.md, with tuned learning rates, and writes its figures: `make baselines`.

    python -m tools.baselines                            # two hours on 2 cores; a stopped call continues
    python -m tools.baselines --table=kinds --out=out/kinds --seeds=5    # other variants, see TABLES
    python -m tools.baselines --steps=30 --seeds=1 --out=out/rehearsal   # writes OUT/baselines.md only

Each variant has two learning rates: muon_lr for the hidden matrices, and learning_rate for all else. They are found by
coordinate search with seed 1 (docs/baselines.md): first learning_rate with short trainings, then muon_lr with full
ones, because short trainings favour a muon_lr that is too large for full ones. They can also favour a learning_rate
that is too large, so the best rates of the last search get a full training too. tools/compare makes the trainings.
"""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configurator import parse
from data.errors import command, require, user_errors
from tools import curves
from tools.compare import trainings
from tools.compare.table import aligned, cells, row_notes

PAGE = Path(__file__).resolve().parents[1] / "docs" / "baselines.md"
TABLES = {  # --table -> name of a variant -> arguments of train.py; muon_lr and learning_rate where the search begins
    "blocks": {
        "standard": ("config/train_pycode.py", 0.005, 0.006),
        "parallel": ("config/train_pycode.py --block=parallel", 0.005, 0.006),
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
    "depth": ["c,p", "c+p"],
    "way": ["c,p", "c.stream,p", "c,p;s,p", "c.relu2,p", "c.none,p"]
    + ["c,p.heads", "c,c.stream.relu2.none", "c,p.softmax", "c,p.matrix", "c,c"],
}
ATTENTION = "attn_gate=none attn_gate=head attn_gate=element attn_sink=True attn_diff=True value_residual=True".split()
SUPERBLOCK = "config/train_pycode.py --block=superblock"
for name, layers in LAYERS.items():
    TABLES[name] = {each: (f"{SUPERBLOCK} --layer={each}", 0.005, 0.006) for each in layers}
TABLES["attention"] = {flag: (f"config/train_pycode.py --{flag}", 0.005, 0.006) for flag in ATTENTION}
DRAWN = [*list(TABLES["blocks"])[:3], "superblock, joint pool", "SAS", "SAS-P", "Llama-like"]
GRID = {
    "muon_lr": [0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08],
    "learning_rate": [0.0015, 0.003, 0.006, 0.012, 0.024, 0.048],
}


@dataclass
class BaselinesConfig:
    """The flags of baselines.py. ValueError names the flag, its value and the remedy."""

    # --- baselines
    table: Literal["blocks", "kinds", "depth", "way", "attention"] = "blocks"  # only blocks writes docs/baselines.md
    out: str = "out/baselines"  # folder of all trainings
    steps: int = 450  # optimizer steps of a full training; a short one makes a third of them
    seeds: int = 3  # number of final trainings of each variant
    jobs: int = 2  # trainings at the same time; they share the threads
    common: str = "--compile=True"  # arguments of every training

    def __post_init__(self):
        require(self.steps >= 30, f"steps={self.steps} must be at least 30")
        for name in ("max_iters", "warmup_iters", "cooldown_iters", *GRID):
            require(f"--{name}=" not in self.common, f"common={self.common}: baselines.py sets {name}; leave it out")
        trainings.CompareConfig(out=self.out, seeds=self.seeds, jobs=self.jobs)


class Search:
    """The coordinate search of all variants at the same time.

    best      variant -> {"muon_lr": its best value so far, "learning_rate": likewise}
    losses    learning rate that was searched -> {(variant, muon_lr, learning_rate): loss, infinite if it failed}
    folders   (variant, muon_lr, learning_rate) -> folder of the last training there, relative to --out
    """

    def __init__(self, options: BaselinesConfig):
        self.options, self.folders, self.rounds = options, {}, 0
        self.starts = [(variant, *start) for variant, (_, *start) in TABLES[options.table].items()]
        self.best = {variant: dict(zip(GRID, start, strict=True)) for variant, *start in self.starts}
        self.losses = {
            "learning_rate": self.search("learning_rate", options.steps // 3, 60),
            "muon_lr": self.search("muon_lr", options.steps, 0),
        }

    def search(self, name: str, steps: int, eval_iters: int) -> dict[tuple, float]:
        """Find the best values of this learning rate; returns the losses."""
        losses = {}
        while missing := self.missing(name, losses):
            self.rounds += 1
            runs = [arguments(self.options, variant, rates, steps) for variant, *rates in missing]
            folder = f"search{self.rounds}"
            rows = run_compare(self.options, folder, runs, eval_iters=eval_iters).rows()
            for number, (point, row) in enumerate(zip(missing, rows, strict=True), 1):
                losses[point] = row["loss"]["mean"] if row["loss"] else float("inf")
                self.folders[point] = f"{folder}/run{number}-seed1"
            for variant in self.best:
                best = min((point for point in losses if point[0] == variant), key=losses.get)
                self.best[variant] = dict(zip(GRID, best[1:], strict=True))
        return losses

    def missing(self, name: str, losses: dict[tuple, float]) -> list[tuple]:
        """The points to train next: the best ones and their neighbours on the grid, and when these are known, the
        points at which the search began."""
        near = []
        for variant, best in self.best.items():
            at = GRID[name].index(best[name])
            near += [(variant, *(best | {name: value}).values()) for value in GRID[name][max(at - 1, 0) : at + 2]]
        return [point for point in near if point not in losses] or [p for p in self.starts if p not in losses]


def arguments(options: BaselinesConfig, variant: str, rates: list[float], steps: int) -> str:
    """The arguments of train.py for a variant with these learning rates."""
    schedule = f"--max_iters={steps} --warmup_iters={max(1, 20 * steps // 450)} --cooldown_iters={steps // 3}"
    rates = " ".join(f"--{name}={rate}" for name, rate in zip(GRID, rates, strict=True))
    return " ".join(filter(None, [TABLES[options.table][variant][0], options.common, schedule, rates]))


def run_compare(options: BaselinesConfig, name: str, runs: list[str], **more: int) -> trainings.Comparison:
    """Train these runs, in a folder below --out. A training may diverge; other failures end the program."""
    folder = f"{options.out}/{name}"
    with user_errors():
        comparison = trainings.compare(trainings.CompareConfig(out=folder, jobs=options.jobs, **more), runs)
        for row in comparison.rows():
            causes = [each["error"] for each in row["errors"]] or ([] if row["loss"] else ["it was not made"])
            bad = [cause for cause in causes if "is not finite" not in cause]
            require(not bad, f"{folder}, run {row['number']}: {' '.join(bad)}; the same command tries it again")
    return comparison


def page(text: str, options: BaselinesConfig, search: Search, rows: list[dict], measured: str) -> str:
    """`text`, that of docs/baselines.md, with new figures between each <!-- name --> and <!-- end -->."""
    lines = [["variant", *GRID, "parameters", "loss", "bits per byte", "difference from standard"]]
    for variant, row in zip(search.best, rows, strict=True):
        _, parameters, _, _, _, loss, bits, difference, _ = cells(row)
        best = search.best[variant].items()
        rates = [f"{rate}{' !' * (rate in (GRID[name][0], GRID[name][-1]))}" for name, rate in best]
        lines.append([variant, *rates, parameters, loss, bits, difference])
    n, steps = {name: len(found) for name, found in search.losses.items()}, options.steps
    made = f"The search made {n['learning_rate']} trainings of {steps // 3} steps for learning_rate and "
    made += f"{n['muon_lr']} of {steps} steps\nfor muon_lr. Then each variant has {options.seeds} of {steps}."
    end = "--eval_interval=0 --eval_iters=0 --seed=1 --out_dir=out/baseline"
    parts = {
        "measured": f"{measured}\n\n{made}",
        "losses": aligned(lines) + "\n" + "".join(f"* {note}\n" for note in row_notes(rows)),  # which have diverged
        "commands": "\n".join(["```", *(f"python train.py {row['run']} {end}{row['number']}" for row in rows), "```"]),
        "grids": "\n".join(f"* Grid of {name}: {', '.join(map(str, values))}." for name, values in GRID.items()),
    }
    order = list(search.best)
    for name, losses in search.losses.items():
        points = sorted(losses, key=lambda point: (order.index(point[0]), point[1:]))
        parts[name] = aligned([["variant", *GRID, "loss"], *([*map(str, p), f"{losses[p]:.4f}"] for p in points)])
    for name, part in parts.items():
        head, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{head}<!-- {name} -->\n\n{part.strip()}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def picture(rows: list[dict]):
    """A matplotlib Figure of training losses: a line per variant of DRAWN, the mean of its seeds, without the start."""
    cfg, lines = curves.PlotConfig(smooth=10), []
    drawn = {name: row for name, row in zip(TABLES["blocks"], rows, strict=True) if name in DRAWN and row["seeds"]}
    runs = [
        curves.read_run(figures["folder"])._replace(flags={"run": variant, "seed": seed})
        for variant, row in drawn.items()
        for seed, figures in row["seeds"].items()
    ]
    for i, (variant, line) in enumerate(zip(drawn, curves.curves(cfg, runs), strict=True)):
        late = line.x > line.x[-1] / 5
        parts = {name: getattr(line, name)[late] for name in ("x", "y", "low", "high")}
        lines.append(line._replace(label=variant, style=curves.STYLES[i % 2], **parts))
    return curves.draw({"": lines}, curves.AXES[cfg.x], curves.y_label(cfg), cfg)


def main(argv: list[str] | None = None):
    with user_errors():
        options = parse(BaselinesConfig, argv, __doc__)
        curves.require_matplotlib()
    search = Search(options)
    folder = Path(options.out).expanduser()
    (folder / "final").mkdir(parents=True, exist_ok=True)
    # The best training of the search is the final one with seed 1.
    for number, (variant, best) in enumerate(search.best.items(), 1):
        link = folder / "final" / f"run{number}-seed1"
        link.unlink(missing_ok=True)
        found = search.folders[(variant, *best.values())]
        link.symlink_to(Path("..", found), target_is_directory=True)
    runs = [arguments(options, variant, best.values(), options.steps) for variant, best in search.best.items()]
    final = run_compare(options, "final", runs, seeds=options.seeds)
    if options.table != "blocks":
        return  # tools.compare has printed its table, and the page is written by hand
    rows, measured = final.rows(), final.stored["measured"]
    target = PAGE if options == BaselinesConfig() else folder / PAGE.name
    with user_errors():
        drawn = picture(rows)
    curves.save(drawn, str(target.with_suffix(".png")))
    target.write_text(page(PAGE.read_text(), options, search, rows, measured))
    print(f"The page is {target}.")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # an exception, after which tools.compare removes its lock
    command(main)
