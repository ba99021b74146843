"""Curves of training runs, from their metrics.jsonl, and how they are drawn. plot.py is the command."""

import importlib.util
import itertools
import re
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from configurator import resolve
from data.errors import printable, require
from data.files import new_file, user_path
from engine.config_files import read_file
from engine.metrics import read_metrics
from engine.retired import translated
from flags import Flags
from model import ModelConfig

OF_ONE_RUN = {"out_dir", "seed"}  # flags that do not tell runs apart
LOSSES = {"loss": "training loss", "train_loss": "training loss, evaluated", "val_loss": "validation loss"}
EVALUATED = {"train_loss", "val_loss", "val_bpb"}  # figures of evaluations
GREY = "#7b7b7b"  # of text and axes; all colours have a contrast of at least 3 on white and on black
COLOURS = "#2f80ed", "#d9730d", "#0f9d76", "#d6409f", "#8e63e8", "#8a8a00", "#e5484d", "#1a94b0"
OF_TEXT = "text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"
MATPLOTLIB = dict.fromkeys(OF_TEXT, GREY) | {  # its settings, also for lens.py
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.6,
}  # fmt: skip


@dataclass
class PlotConfig(Flags):
    # --- plot
    y: str = "loss"  # figures of metrics.jsonl, such as loss,val_loss
    x: Literal["tokens", "steps", "seconds", "flops"] = "tokens"  # what the figures are drawn against
    smooth: int = 1  # [>0] number of consecutive logged steps whose mean is a point; evaluations are not smoothed
    ymax: float = 0.0  # highest y of the picture, 0 = that of the figures
    out: str = ""  # picture to write, a .png, .svg or .pdf; empty = plot.png in the first run's folder


class Run(NamedTuple):
    folder: str
    flags: dict[str, Any]
    rows: list[dict[str, Any]]  # of metrics.jsonl


def read_run(folder: str) -> Run:
    metrics = user_path(folder) / "metrics.jsonl"
    config = metrics.with_name("config.py")
    require(metrics.is_file(), f"{folder} has no metrics.jsonl; give the out_dir of a run of train.py")
    settings = read_file(str(config)) if config.is_file() else []
    starts = ("init_from", "scratch"), ("init_from", "resume")  # a run that was resumed is still the same run
    flags = translated({name: value for name, value, _ in settings if (name, value) not in starts})
    rows = list(read_metrics(metrics))
    require(rows, f"{metrics} has no row that can be read; train it first")
    return Run(folder, flags, rows)


def one_spelling(runs: list[Run]):
    """Give runs of one network, which may be spelled in two ways, the flags of the first of them."""
    spelled: dict[str, dict[str, Any]] = {}
    for run in runs:
        of_model = {name: value for name, value in run.flags.items() if name in ModelConfig.__dataclass_fields__}
        network = resolve(ModelConfig, {}, of_model).network
        own = {name: run.flags[name] for name in network if name in run.flags}
        run.flags.update(spelled.setdefault(repr(network), own))


def groups_of(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs that differ only in the seed, by a name: the flags in which they differ from others that use these flags."""
    one_spelling(runs)
    values: dict[str, set] = defaultdict(set)
    for run in runs:
        for name, value in run.flags.items():
            values[name].add(value)
    differ = [name for name, found in values.items() if len(found) > 1 and name not in OF_ONE_RUN]
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        name = ", ".join(f"{flag}={run.flags[flag]}" for flag in differ if flag in run.flags)
        groups[name if run.flags else run.folder].append(run)
    return groups


def places(run: Run, x: str, rows: list[dict[str, Any]]) -> np.ndarray:
    """The x of some rows. That of an evaluation lies between logged steps, in proportion to the steps that are done."""
    steps = np.array([row["step"] for row in rows], float)
    if x == "steps":
        return steps
    figure = "tokens_per_s" if x == "seconds" else x
    logged = [row for row in run.rows if {type(row.get("tokens")), type(row.get(figure))} <= {int, float}]
    require(logged, f"{run.folder}/metrics.jsonl has no logged step with {figure}; set --x=steps")
    place = np.array([0, *(row[figure] for row in logged)], float)
    if x == "seconds":
        tokens = np.diff([0.0, *(row["tokens"] for row in logged)])
        place[1:] = np.cumsum(tokens / place[1:])
    done = np.array([0, *(row["step"] + 1 for row in logged)], float)
    # An evaluation after the last logged step lies on the way to a point far ahead, at the speed of the last interval.
    ahead = [np.append(each, each[-1] + 10**6 * (each[-1] - each[-2])) for each in (done, place)]
    return np.interp(steps + ["tokens" in row for row in rows], *ahead)


def points(run: Run, cfg: PlotConfig, y: str) -> dict[int, tuple[float, float]]:
    """step -> (x, y) of all rows that have y; both are means of cfg.smooth rows that end at this step."""
    rows = [row for row in run.rows if isinstance(row.get(y), (int, float))]
    require(rows, f"{run.folder}/metrics.jsonl has no number {y!r}; name one of its figures with --y, such as val_loss")
    n = 1 if y in EVALUATED else cfg.smooth
    require(n <= len(rows), f"smooth={n} is more than the {len(rows)} logged steps of {run.folder}; set it lower")
    values = places(run, cfg.x, rows), [float(row[y]) for row in rows]
    xs, ys = (np.convolve(each, np.full(n, 1 / n), "valid") for each in values)
    return {row["step"]: (x, y) for row, x, y in zip(rows[n - 1 :], xs, ys, strict=True)}


def draw_line(axes, cfg: PlotConfig, y: str, name: str, runs: list[Run], colour: str):
    """Draw a figure of runs that differ only in the seed: its mean, and a band from the lowest to the highest one."""
    found = [points(run, cfg, y) for run in runs]
    steps = sorted(set.intersection(*map(set, found)))
    require(steps, f"y={y}: {runs[0].folder} and others share no step; draw them one by one")
    xs, ys = np.array([[each[step] for step in steps] for each in found]).transpose(2, 0, 1)  # (runs, steps)
    x = xs.mean(0)
    parts = [name, LOSSES.get(y, y)]
    if cfg.smooth > 1 and y not in EVALUATED:
        parts.append(f"mean of {cfg.smooth} logged steps")
    if len(runs) > 1:
        parts.append(f"mean and range of {len(runs)} runs")
        axes.fill_between(x, ys.min(0), ys.max(0), color=colour, alpha=0.2)
    label = label_of(parts)
    style = "-o" if y in EVALUATED else "-"
    axes.plot(x, ys.mean(0), style, color=colour, label=label, markersize=4)


def label_of(parts: list[str]) -> str:
    """A label for the legend, in lines of 80 characters. matplotlib leaves out labels with _ in front."""
    return re.sub("^_", " _", textwrap.fill(printable(", ".join(filter(None, parts))), 80))


def require_matplotlib():
    require(importlib.util.find_spec("matplotlib"), "matplotlib is not installed; pip install -e .[plots]")


def new_axes(width: float, height: float):
    """matplotlib's Axes of a new Figure, of this size in inches, in the colours of all pictures."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(MATPLOTLIB):
        return Figure(figsize=(width, height)).subplots()


def show_legend(axes):
    """The legend, above the picture."""
    for text in axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, labelcolor=GREY).get_texts():
        text.set_parse_math(False)  # a $ in a name is a $


def draw(cfg: PlotConfig, runs: list[Run]):
    """A matplotlib Figure with a line for each figure of cfg.y of each group of runs."""
    from matplotlib.ticker import EngFormatter

    axes = new_axes(7.2, 4)
    lines = itertools.product(groups_of(runs).items(), cfg.y.split(","))
    for ((name, group), y), colour in zip(lines, itertools.cycle(COLOURS)):
        draw_line(axes, cfg, y, name, group, colour)
    axes.set_xlabel(cfg.x)
    if cfg.x in ("tokens", "flops"):
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    if set(cfg.y.split(",")) <= LOSSES.keys():
        axes.set_ylabel("nats per token")
    if cfg.ymax:
        axes.set_ylim(top=cfg.ymax)
    show_legend(axes)
    return axes.figure


def save(figure, out: Path):
    """Write a Figure into a file, and make its folder. Only a picture that matplotlib has drawn is replaced."""
    kind = out.suffix[1:]
    require(kind in ("png", "svg", "pdf"), f"out={out}: pictures have no kind {kind!r}; end it in .png, .svg or .pdf")
    with new_file(out, b"atplotlib") as file:
        figure.savefig(file, format=kind, dpi=160, transparent=True, bbox_inches="tight")
