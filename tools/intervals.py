"""The picture of a comparison: how far each loss is from that of the first run. plot.py is the command."""

from pathlib import Path
from typing import NamedTuple

from data.errors import require
from data.files import read_json
from tools.compare.table import mean_and_half
from tools.curves import COLOURS, GREY, MATPLOTLIB


class Row(NamedTuple):
    """A run: its arguments that not all runs have, its mean loss, and its differences to the first run, by seed."""

    label: str
    loss: float
    differences: list[float]


def rows_of(folder: str) -> list[Row]:
    """The runs of a comparison that have results with a seed of the first one. ValueError if it is alone."""
    runs = read_json(Path(folder).expanduser() / "compare.json")["runs"]
    first = runs[0]["seeds"]
    paired = [run for run in runs if run["seeds"].keys() & first.keys()]
    require(len(paired) > 1, f"{folder} has no two runs with results of one seed yet; continue its tools.compare")
    common = set.intersection(*(set(run["arguments"]) for run in paired))
    rows = []
    for run in paired:
        words = [word for word in run["arguments"] if word not in common]
        losses = {seed: result["loss"] for seed, result in run["seeds"].items()}
        differences = [loss - first[seed]["loss"] for seed, loss in losses.items() if seed in first]
        rows.append(Row(" ".join(words) or "run 1", sum(losses.values()) / len(losses), differences))
    return rows


def draw_intervals(rows: list[Row]):
    """A matplotlib Figure: a point for each seed, and a bar over the 95 % interval of their mean."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(MATPLOTLIB):
        axes = Figure(figsize=(7.2, 0.8 + 0.4 * len(rows))).subplots()
    for place, row in enumerate(rows):
        mean, half = mean_and_half(row.differences)
        axes.plot(row.differences, [place] * len(row.differences), "o", color=COLOURS[0], alpha=0.4, markersize=4)
        axes.errorbar(mean, place, xerr=half, color=COLOURS[1], marker="D", markersize=5, capsize=3)
    axes.axvline(0, color=GREY, linewidth=1)
    axes.set_yticks(range(len(rows)), [f"{row.label}\n{row.loss:.3f}" for row in rows], fontsize=8)
    axes.invert_yaxis()  # the first run on top
    axes.set_xlabel("loss minus that of the first run with the same seed, and its mean's 95 % interval")
    return axes.figure
