"""Draw the curves of training runs, from their metrics.jsonl.

    python -m tools.plot out/pycode                                         # the training loss against tokens
    python -m tools.plot out/pycode --y=loss,val_loss --smooth=5 --out=loss.svg
    python -m tools.plot out/a out/b out/c --y=val_loss --x=seconds --ymax=3
    python -m tools.plot out/compare                                        # the differences that tools.compare found

The legend names the flags in which the runs differ. Runs that differ only in the seed are one line, their mean, and a
band from the smallest to the largest value. The colours can be read on white and on black.
"""

from json import JSONDecodeError
from statistics import fmean

from configurator import parse_positional
from data.errors import command, printable, reason, require, user_errors
from data.files import read_json, user_path
from tools.compare.table import mean_and_half
from tools.curves import COLOURS, GREY, MATPLOTLIB, PlotConfig, draw, read_run, require_matplotlib, save


def draw_intervals(folder: str):
    """A matplotlib Figure of the runs of a comparison that have results with a seed of the first one: a point for each
    seed, and a bar over the 95 % interval of their mean. ValueError if the first run is alone."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    runs = read_json(user_path(folder) / "compare.json")["runs"]
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
        labels.append(f"{printable(words) or 'run 1'}\n{fmean(losses.values()):.3f}")
    axes.axvline(0, color=GREY, linewidth=1)
    axes.set_yticks(range(len(paired)), labels, fontsize=8, parse_math=False)
    axes.invert_yaxis()  # the first run on top
    axes.set_xlabel("loss minus that of the first run with the same seed, and its mean's 95 % interval")
    return axes.figure


def main(argv: list[str] | None = None):
    with user_errors():
        folders, cfg = parse_positional(PlotConfig, argv, __doc__)
        require(folders, "expected the folders of one or more runs, not nothing; --help says more")
        require_matplotlib()
        out = user_path(cfg.out or f"{folders[0]}/plot.png")
        if (user_path(folders[0]) / "compare.json").is_file():
            require(len(folders) == 1, f"{folders[0]} is a comparison of tools.compare; draw it alone")
            try:
                figure = draw_intervals(folders[0])
            except (JSONDecodeError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
                fact = f"{folders[0]}/compare.json is damaged ({reason(error)})"
                raise ValueError(f"{fact}; delete it, and run its tools.compare again") from None
        else:
            runs = [read_run(folder) for folder in dict.fromkeys(folders)]
            figure = draw(cfg, runs)
        save(figure, out)
    print(printable(f"wrote {out}"))


if __name__ == "__main__":
    command(main)
