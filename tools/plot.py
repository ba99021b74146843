"""Draw the curves of training runs, from their metrics.jsonl.

    python -m tools.plot out/pycode                                         # the training loss against tokens
    python -m tools.plot out/pycode --y=loss,val_loss --smooth=5 --out=loss.svg
    python -m tools.plot out/a out/b out/c --y=val_loss --x=seconds --ymax=3
    python -m tools.plot out/compare                                        # the differences that tools.compare found
    python -m tools.plot out/compare_1M out/compare_8M --x=flops            # and how losses fall with the cost

The legend names the flags in which the runs differ. Runs that differ only in the seed are one line, their mean, and a
band from the smallest to the largest value. Of several comparisons, the first runs are one line, the second runs
another: the means over the seeds with their 95 % intervals. The legend has the power of the cost that fits the means.
The colours can be read on white and on black.
"""

import itertools
import math
from contextlib import suppress
from dataclasses import replace
from statistics import fmean

import numpy as np

from configurator import parse_positional
from data.errors import command, printable, reason, require, user_errors
from data.files import read_json, user_path
from tools import curves
from tools.compare.table import mean_and_half
from tools.curves import COLOURS, GREY, PlotConfig, new_axes


def own_words(runs: list[dict]) -> list[list[str]]:
    """The arguments of each run that not all of them have."""
    common = set.intersection(*(set(run["arguments"]) for run in runs))
    return [[word for word in run["arguments"] if word not in common] for run in runs]


def names_of(runs: list[dict]) -> list[str]:
    """A name for each run: its own_words, or its number if it has none."""
    return [printable(" ".join(words)) or f"run {number}" for number, words in enumerate(own_words(runs), 1)]


def draw_intervals(folder: str, runs: list[dict]):
    """A matplotlib Figure of the runs of a comparison that have results with a seed of the first one: a point for each
    seed, and a bar over the 95 % interval of their mean. ValueError if the first run is alone."""
    first = runs[0]["seeds"]
    named = zip(runs, names_of(runs), strict=True)
    paired = [(run, name) for run, name in named if run["seeds"].keys() & first.keys()]
    require(len(paired) > 1, f"{folder} has no two runs with results of one seed yet; continue its tools.compare")
    axes = new_axes(7.2, 0.8 + 0.4 * len(paired))
    labels = []
    for place, (run, name) in enumerate(paired):
        losses = {seed: result["loss"] for seed, result in run["seeds"].items()}
        differences = [loss - first[seed]["loss"] for seed, loss in losses.items() if seed in first]
        mean, half = mean_and_half(differences)
        axes.plot(differences, [place] * len(differences), "o", color=COLOURS[0], alpha=0.4, markersize=4)
        axes.errorbar(mean, place, xerr=half, color=COLOURS[1], marker="D", markersize=5, capsize=3)
        labels.append(f"{name}\n{fmean(losses.values()):.3f}")
    axes.axvline(0, color=GREY, linewidth=1)
    axes.set_yticks(range(len(paired)), labels, fontsize=8, parse_math=False)
    axes.invert_yaxis()  # the first run on top
    axes.set_xlabel("loss minus that of the first run with the same seed, and its mean's 95 % interval")
    return axes.figure


def draw_costs(cfg: PlotConfig, comparisons: list[list[dict]]):
    """A matplotlib Figure of how losses fall with the cost of a training: a line for the first run of all comparisons,
    one for their second run, and so on."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator, StrMethodFormatter

    axes = new_axes(7.2, 4)
    lines = zip(names_of_lines(comparisons), zip(*comparisons, strict=True), strict=True)
    for (name, runs), colour in zip(lines, itertools.cycle(COLOURS)):
        points = np.array(sorted(point(cfg, run) for run in runs if run["seeds"]))
        require(len(points) > 1, f"{name}: fewer than two comparisons have results; continue their tools.compare")
        cost, mean, half = points.T
        sound = np.isfinite(points).all() and points[:, :2].min() > 0 and cost[0] < cost[-1]
        require(sound, f"{name}: no line goes through costs of {cost.tolist()} and losses of {mean.tolist()}")
        power = np.polyfit(np.log(cost), np.log(mean), 1)[0]
        label = curves.label_of([name, f"a power of {power:.3f}"])
        axes.errorbar(cost, mean, yerr=half, color=colour, marker="o", markersize=4, capsize=3, label=label)
    axes.set(xscale="log", yscale="log", xlabel=cfg.x, ylabel="nats per token")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.4g}"))
    axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:.4g}"))
    curves.show_legend(axes)
    return axes.figure


def names_of_lines(comparisons: list[list[dict]]) -> list[str]:
    """The name of the first, the second, ... run of all comparisons: the arguments that tell it from other runs in each
    of them. ValueError if the runs of these places differ in more than numbers, such as rates and steps."""
    require(len(set(map(len, comparisons))) == 1, "the comparisons have unequal numbers of runs; draw them one by one")
    names = []
    for number, words in enumerate(zip(*map(own_words, comparisons), strict=True), 1):
        shared = [word for word in words[0] if all(word in other for other in words)]
        names.append(" ".join(shared) or f"run {number}")
        for word in itertools.chain(*words):
            same = word in shared or is_number(word.partition("=")[2])
            require(same, f"run {number} has {word} in one comparison, and not in another; draw them one by one")
    return names


def is_number(text: str) -> bool:
    with suppress(ValueError):
        return math.isfinite(float(text))
    return False


def point(cfg: PlotConfig, run: dict) -> tuple[float, float, float]:
    """The cost of a training, the mean of its seeds' losses, and half of that mean's interval."""
    costs = run["costs"]
    cost = costs["tokens"]
    if cfg.x == "flops":
        cost *= costs["flops_per_token"]
    mean, half = mean_and_half([result["loss"] for result in run["seeds"].values()])
    return float(cost), float(mean), float(half)


def read_comparison(cfg: PlotConfig, folder: str) -> list[dict]:
    """The runs of a comparison. ValueError if one of them has no figures that can be drawn."""
    file = user_path(folder) / "compare.json"
    require(file.is_file(), f"{folder} has no compare.json; draw comparisons without other runs")
    try:
        runs = read_json(file)["runs"]
        names_of(runs)
        for run in runs:
            if run["seeds"]:
                point(cfg, run)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        fact = f"{folder}/compare.json is damaged ({reason(error)})"
        raise ValueError(f"{fact}; delete it, and run its tools.compare again") from None
    return runs


def draw_comparisons(cfg: PlotConfig, folders: list[str]):
    """The picture of one comparison, or of several."""
    comparisons = [read_comparison(cfg, folder) for folder in folders]
    if len(folders) == 1:
        require(replace(cfg, out="") == PlotConfig(), "a comparison is drawn without flags; leave out all but --out")
        return draw_intervals(folders[0], comparisons[0])
    require(cfg.x in ("tokens", "flops"), f"x={cfg.x}: comparisons are drawn against tokens or flops; set --x=flops")
    others = replace(cfg, out="", x="tokens")
    require(others == PlotConfig(), "comparisons are drawn without y, smooth and ymax; leave them out")
    return draw_costs(cfg, comparisons)


def main(argv: list[str] | None = None):
    with user_errors():
        folders, cfg = parse_positional(PlotConfig, argv, __doc__)
        require(folders, "expected the folders of one or more runs, not nothing; --help says more")
        curves.require_matplotlib()
        folders = list({user_path(folder): folder for folder in folders}.values())
        out = user_path(cfg.out or f"{folders[0]}/plot.png")
        if any((user_path(folder) / "compare.json").is_file() for folder in folders):
            figure = draw_comparisons(cfg, folders)
        else:
            figure = curves.draw(cfg, [curves.read_run(folder) for folder in folders])
        curves.save(figure, out)
    print(printable(f"wrote {out}"))


if __name__ == "__main__":
    command(main)
