"""Curves of training runs, from their metrics.jsonl, and how they are drawn. plot.py is the command."""

import importlib.util
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch

from configurator import read_file
from data.errors import require
from data.files import writing
from engine.checkpoint import weights
from engine.metrics import LARGEST, read_metrics
from engine.parallel.ranks import Ranks
from model import Gain, NearIdentity, ShapedPool, Sum

OF_ONE_RUN = {"out_dir", "seed"}  # flags that do not tell runs apart
FIGURES = {  # of metrics.jsonl: name in the picture, unit
    "loss": ("training loss", "nats per token"),
    "train_loss": ("training loss, evaluated", "nats per token"),
    "val_loss": ("validation loss", "nats per token"),
    "val_bpb": ("validation loss", "bits per byte"),
    "lr": ("learning rate", ""),
    "grad_norm": ("norm of the gradient", ""),
    "tokens_per_s": ("speed", "tokens per second"),
    "mfu": ("MFU", "fraction of the peak"),
    "ms_per_step": ("time of a step", "ms"),
    "peak_memory_bytes": ("peak of memory", "bytes"),
}
LOSSES = {"loss", "train_loss", "val_loss"}  # in nats per token
EVALUATED = {"train_loss", "val_loss", "val_bpb"}  # figures of evaluations
AXES = {"tokens": "tokens", "steps": "steps", "seconds": "time of training steps (s)", "flops": "FLOPs"}
METADATA = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # the same picture is the same file
GREY = "#7b7b7b"  # of text and axes; all colours have a contrast of at least 3 on white and on black
COLOURS = "#2f80ed", "#d9730d", "#0f9d76", "#d6409f", "#8e63e8", "#8a8a00", "#e5484d", "#1a94b0"
STYLES = "-", "--", ":", "-."
OF_TEXT = "text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"
MATPLOTLIB = dict.fromkeys(OF_TEXT, GREY) | {  # its settings, also for lens.py
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.6,
    "axes.titlesize": "medium", "svg.hashsalt": "superblock",
}  # fmt: skip


@dataclass
class PlotConfig:
    """The flags of plot.py. ValueError names the flag, its value and the remedy."""

    # --- plot
    y: str = "loss"  # figures of metrics.jsonl with one unit, such as loss,val_loss; bpb = val_bpb
    x: Literal["tokens", "steps", "seconds", "flops"] = "tokens"  # what the figures are drawn against
    smooth: int = 1  # number of consecutive logged steps whose mean is a point
    gains: bool = False  # draw the learned gains of each layer instead, from the latest checkpoints
    ymin: float | Literal["auto"] = "auto"  # lowest y of the picture
    ymax: float | Literal["auto"] = "auto"  # highest y of the picture
    log: Literal["none", "x", "y", "xy"] = "none"  # axes that are logarithmic
    out: str = "out/plot.png"  # file to write, .png, .svg or .pdf

    USED_WHEN: ClassVar = dict.fromkeys("y x smooth ymin ymax log".split(), (lambda c: not c.gains, "gains=False"))

    def __post_init__(self):
        names = ["val_bpb" if name == "bpb" else name for name in self.y.split(",")]
        one_unit = len(names) == 1 or len(names) == len(set(names)) and set(names) <= LOSSES
        require(one_unit, f"y={self.y}: only {', '.join(sorted(LOSSES))} can share a picture; draw one for each figure")
        require(1 <= self.smooth < 2**31, f"smooth={self.smooth} must be at least 1, which draws each logged step")
        fact = f"smooth={self.smooth} has no effect on y={self.y}, as evaluations are not smoothed"
        require(self.smooth == 1 or not set(names) <= EVALUATED, f"{fact}; leave it out, or add loss to y")
        require(Path(self.out).suffix in METADATA, f"out={self.out} must end in {', '.join(METADATA)}")
        limits, given = [x for x in (self.ymin, self.ymax) if x != "auto"], f"ymin={self.ymin} and ymax={self.ymax}"
        require(all(abs(x) <= LARGEST for x in limits), f"{given} must be at most {LARGEST}")
        require(limits == sorted(set(limits)), f"{given} must be in ascending order; swap them")
        require("y" not in self.log or min(limits, default=1) > 0, f"{given} must be above 0 with log={self.log}")
        self.y = ",".join(names)


class Run(NamedTuple):
    folder: str
    flags: dict[str, Any]
    rows: list[dict[str, Any]]  # of metrics.jsonl


class Line(NamedTuple):
    """A line of the picture, and a band from low to high around it. All arrays have its number of points."""

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    colour: str
    style: str  # as matplotlib writes it: -, --o, o


# ---------------------------------------------------------------------------------------------------------------------
# Curves of training


def read_run(folder: str) -> Run:
    metrics, config = (Path(folder).expanduser() / name for name in ("metrics.jsonl", "config.py"))
    require(metrics.is_file(), f"{folder} has no metrics.jsonl; give the out_dir of a run of train.py")
    settings = read_file(str(config)) if config.is_file() else []
    starts = ("init_from", "scratch"), ("init_from", "resume")  # a run that was resumed is still the same run
    flags = {name: value for name, value, _ in settings if (name, value) not in starts}
    rows = [row for row, _ in read_metrics(metrics)]
    require(rows, f"{metrics} has no row that can be read; train it first")
    return Run(folder, flags, rows)


def seed_groups(runs: list[Run]) -> list[list[Run]]:
    """The runs in groups: those that differ only in the seed are in one."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        same = tuple(sorted((name, value) for name, value in run.flags.items() if name not in OF_ONE_RUN))
        groups.setdefault(same or run.folder, []).append(run)
    return list(groups.values())


def names_of(runs: list[Run]) -> list[str]:
    """The flags in which each run differs from those that use the same flag; the folders if that does not tell. A run
    alone needs no name."""
    if len(runs) == 1:
        return [""]
    values = {name: {run.flags[name] for run in runs if name in run.flags} for run in runs for name in run.flags}
    differ = [name for name, found in values.items() if len(found) > 1 and name not in OF_ONE_RUN]
    names = [", ".join(f"{name}={run.flags[name]}" for name in differ if name in run.flags) for run in runs]
    return names if all(names) and len(set(names)) == len(names) else [run.folder for run in runs]


def places(run: Run, x: str, rows: list[dict[str, Any]]) -> np.ndarray:
    """The x of some rows. That of an evaluation lies between logged steps, in proportion to the steps that are done."""
    steps = np.array([row["step"] for row in rows])
    if x == "steps":
        return steps
    done, place, before = [0], [0.0], 0
    names = ["tokens", "tokens_per_s" if x == "seconds" else x]
    for row in run.rows:
        if all(map(row.get, names)):
            done.append(row["step"] + 1)
            place.append(place[-1] + (row["tokens"] - before) / row["tokens_per_s"] if x == "seconds" else row[x])
            before = row["tokens"]
    fact = f"x={x} is not in {run.folder}/metrics.jsonl: no logged step has {' and '.join(dict.fromkeys(names))}"
    require(len(done) > 1, f"{fact}; set --x=steps")
    for ends in (done, place):  # far ahead, at the speed of the last interval, for an evaluation after it
        ends.append(ends[-1] + 10**6 * (ends[-1] - ends[-2]))
    return np.interp(steps + ["tokens" in row for row in rows], done, np.array(place, float))


def points(run: Run, cfg: PlotConfig, y: str) -> dict[int, tuple[float, float]]:
    """step -> (x, y) of all rows that have y; both are means of cfg.smooth rows that end at this step."""
    rows = [row for row in run.rows if isinstance(row.get(y), (int, float))]
    known = sorted({name for row in run.rows for name, value in row.items() if isinstance(value, (int, float))})
    require(rows, f"y={y} is in no row of {run.folder}/metrics.jsonl, which has {', '.join(known)}; use one of them")
    xs, ys = places(run, cfg.x, rows), [float(row[y]) for row in rows]
    if smoothing(y, cfg):
        fact = f"smooth={cfg.smooth} is more than the {len(rows)} logged steps of {run.folder}"
        require(cfg.smooth <= len(rows), f"{fact}; set it to {len(rows) // 4 or 1} or so")
        xs, ys = (np.convolve(each, np.full(cfg.smooth, 1 / cfg.smooth), "valid") for each in (xs, ys))
    steps = [row["step"] for row in rows[-len(ys) :]]
    return dict(zip(steps, zip(xs, ys, strict=True), strict=True))


def curves(cfg: PlotConfig, runs: list[Run]) -> list[Line]:
    """A line for each figure of cfg.y of each group of runs."""
    groups, figures, lines = seed_groups(runs), cfg.y.split(","), []
    for i, (group, name) in enumerate(zip(groups, names_of([group[0] for group in groups]), strict=True)):
        for k, y in enumerate(figures):
            found = [points(run, cfg, y) for run in group]
            steps = sorted(set.intersection(*map(set, found)))
            folders = ", ".join(run.folder for run in group)
            require(steps, f"y={y}: {folders} differ only in the seed, but share no step; draw them one by one")
            xs, ys = np.array([[each[step] for step in steps] for each in found]).transpose(2, 0, 1)  # (runs, steps)
            parts = [name]
            parts += [FIGURES[y][0], smoothing(y, cfg)] if len(figures) > 1 else []
            seeds = {run.flags.get("seed") for run in group}
            kind = "seeds" if len(seeds) == len(group) else "runs"
            parts += [f"mean and range of {len(group)} {kind}"] if len(group) > 1 else []
            colour, style = (i, STYLES[(k + i // len(COLOURS)) % len(STYLES)]) if len(groups) > 1 else (k, "-")
            evaluated = y in EVALUATED
            style = "o" if evaluated and "loss" in figures else style + "o" * evaluated  # points beside a line
            line = xs.mean(0), ys.mean(0), ys.min(0), ys.max(0), COLOURS[colour % len(COLOURS)], style
            lines.append(Line(", ".join(filter(None, parts)), *line))
    return lines


def smoothing(y: str, cfg: PlotConfig) -> str:
    return f"mean of {cfg.smooth} logged steps" if cfg.smooth > 1 and y not in EVALUATED else ""


def y_label(cfg: PlotConfig) -> str:
    if "," in cfg.y:
        return "loss (nats per token)"
    name, unit = FIGURES.get(cfg.y, (cfg.y, ""))
    return "\n".join(filter(None, [f"{name} ({unit})" if unit else name, smoothing(cfg.y, cfg)]))


# ---------------------------------------------------------------------------------------------------------------------
# Gains


def gain_panels(folders: list[str]) -> dict[str, list[Line]]:
    """A panel for each kind of learned gain, with a line over the layers for each run that has it."""
    panels: dict[str, list[Line]] = {}
    flags, gains = zip(*(weights.read(folder, read_gains) for folder in folders), strict=True)
    runs = [Run(folder, own | {"init_from": None}, []) for folder, own in zip(folders, flags, strict=True)]
    for i, (run, name) in enumerate(zip(runs, names_of(runs), strict=True)):
        fact = f"gains=True: {run.folder} has block={run.flags.get('block', 'standard')}, without learned gains"
        require(gains[i], f"{fact}; name runs of block=simplified or simplified_parallel")
        for title, each in gains[i].items():
            title += ": mean and range of heads" * (each.shape[1] > 1)
            line = np.arange(len(each)), each.mean(1), each.min(1), each.max(1), COLOURS[i % len(COLOURS)]
            panels.setdefault(title, []).append(Line(name, *line, STYLES[i % len(STYLES)] + "o"))
    return panels


def read_gains(found: weights.Weights) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The flags of a model, and the gains that every layer has, as {name: (layers, heads or 1)}."""
    ranks, gains = Ranks(0, 1, torch.device("cpu"), torch.float32, compile=False), {}
    blocks = found.load(found.config(), ranks).model.blocks
    for block in blocks:
        for path, m in block.named_modules():
            for name, p in gains_of(m, path).items():
                gains.setdefault(name, []).append(p.detach().numpy())
    return found.flags, {name: np.stack(layers) for name, layers in gains.items() if len(layers) == len(blocks)}


def gains_of(m: torch.nn.Module, path: str) -> dict[str, torch.nn.Parameter]:
    """The gains that a module of a block holds itself, by their names in the picture."""
    if isinstance(m, ShapedPool):
        return {name: getattr(m, name) for name in m.per_head}
    if isinstance(m, Sum):
        found = dict(zip(m.names, m.gains or [m.gain], strict=False)) | {"skip": m.skip}
    elif isinstance(m, NearIdentity):
        found = {f"{path.rpartition('.')[2]}.{kind}": gain for kind, gain in m.named_children()}
    else:
        found = {}
    return {f"gain of {name}": gain.weight for name, gain in found.items() if isinstance(gain, Gain)}


# ---------------------------------------------------------------------------------------------------------------------
# The picture


def require_matplotlib():
    require(importlib.util.find_spec("matplotlib"), "matplotlib is not installed; pip install -e .[plots]")


def draw(panels: dict[str, list[Line]], x_label: str, y_label: str, cfg: PlotConfig):
    """A matplotlib Figure with a panel for each title. cfg has the limits of y and the logarithmic axes."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogFormatter, MaxNLocator

    columns = min(3, len(panels))
    rows, width = -(-len(panels) // columns), 7.2 if columns == 1 else 3.6 * columns
    legend = {line.label: None for lines in panels.values() for line in lines}
    texts = [textwrap.fill(label, int(12 * width)) for label in legend]
    across = max(1, min(len(legend), int(11 * width) // (max(map(len, legend)) + 8)))
    named = -(-len(legend) // across) + "".join(texts).count("\n") if any(legend) else 0  # lines of the legend
    height = (4 if rows == 1 else 2.4 * rows) + 0.22 * named
    with matplotlib.rc_context(MATPLOTLIB):
        figure = Figure(figsize=(width, height), layout="constrained")
        every = figure.subplots(rows, columns, squeeze=False).flat
        for axes in every[len(panels) :]:
            axes.set_visible(False)
        for axes, (title, lines) in zip(every, panels.items(), strict=False):
            for line in lines:
                of_line = {"color": line.colour, "label": line.label, "markersize": 4, "linewidth": 1.6}
                (legend[line.label],) = axes.plot(line.x, line.y, line.style, **of_line)
                if (line.low < line.high).any():
                    fill = axes.vlines if line.style == "o" else axes.fill_between
                    fill(line.x, line.low, line.high, color=line.colour, alpha=0.2)
            axes.set_title(title)
            for axis in set(cfg.log) & {"x", "y"}:
                some = any((getattr(line, axis) > 0).any() for line in lines)
                require(some, f"log={cfg.log}: no {axis} is above 0; leave {axis} out")
                axes.set(**{f"{axis}scale": "log"})
                getattr(axes, f"{axis}axis").set_major_formatter(LogFormatter())  # 2, not 2 x 10^0
                getattr(axes, f"{axis}axis").set_minor_formatter(LogFormatter())
            axes.set_ylim(*(None if limit == "auto" else limit for limit in (cfg.ymin, cfg.ymax)))
            low, high = axes.get_ylim()
            fact = f"ymin={cfg.ymin} and ymax={cfg.ymax} leave no y between them"
            require(low < high, f"{fact}; set the other one too")
            if axes.get_xscale() == "linear":
                axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
            if x_label in ("tokens", "FLOPs"):
                axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        figure.supxlabel(x_label, size="medium")
        figure.supylabel(y_label, size="medium")
        if named:
            figure.legend(legend.values(), texts, loc="outside upper left", ncols=across, frameon=False)
    return figure


def save(figure, file: str):
    """Write a Figure into a file with one of the suffixes in METADATA, and make its folder."""
    out = Path(file).expanduser()
    out.parent.mkdir(parents=True, exist_ok=True)
    with writing(out):
        figure.savefig(out, dpi=160, transparent=True, metadata=METADATA[out.suffix])
