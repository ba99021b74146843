"""The picture of a comparison: how far each loss is from that of the first run. plot.py is the command."""

from pathlib import Path
from statistics import fmean

from data.errors import require
from data.files import read_json
from tools.compare.table import mean_and_half
from tools.curves import COLOURS, GREY, MATPLOTLIB


def draw_intervals(folder: str):
    """A matplotlib Figure of the runs of a comparison that have results with a seed of the first one: a point for each
    seed, and a bar over the 95 % interval of their mean. ValueError if the first run is alone."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    runs = read_json(Path(folder).expanduser() / "compare.json")["runs"]
    first = runs[0]["seeds"]
    paired = [run for run in runs if run["seeds"].keys() & first.keys()]
    require(len(paired) > 1, f"{folder} has no two runs with results of one seed yet; continue its tools.compare")
    common = set.intersection(*(set(run["arguments"]) for run in paired))
    with rc_context(MATPLOTLIB):
        axes = Figure(figsize=(7.2, 0.8 + 0.4 * len(paired))).subplots()
    labels = []
    for place, run in enumerate(paired):
        losses = {seed: result["loss"] for seed, result in run["seeds"].items()}
        differences = [loss - first[seed]["loss"] for seed, loss in losses.items() if seed in first]
        mean, half = mean_and_half(differences)
        axes.plot(differences, [place] * len(differences), "o", color=COLOURS[0], alpha=0.4, markersize=4)
        axes.errorbar(mean, place, xerr=half, color=COLOURS[1], marker="D", markersize=5, capsize=3)
        words = " ".join(word for word in run["arguments"] if word not in common)
        labels.append(f"{words or 'run 1'}\n{fmean(losses.values()):.3f}")
    axes.axvline(0, color=GREY, linewidth=1)
    axes.set_yticks(range(len(paired)), labels, fontsize=8)
    axes.invert_yaxis()  # the first run on top
    axes.set_xlabel("loss minus that of the first run with the same seed, and its mean's 95 % interval")
    return axes.figure
