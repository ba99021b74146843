"""The table of tools.compare: losses and costs of runs over seeds, and their paired differences, as Markdown."""

import math
from contextlib import suppress
from statistics import fmean, median, stdev

T95 = (  # 97.5 % quantile of Student's t with 1, 2, ... degrees of freedom
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093,
)  # fmt: skip
TASK = ("dataset", "objective", "corrupt_ratio", "span_length")  # flags; losses of other tasks are not compared
HEADER = ["run", "parameters", "FLOPs per token", "tokens", "seconds", "loss", "bits per byte", "difference", "speed"]


def mean_and_half(differences: list[float]) -> tuple[float, float]:
    """The mean of n differences, and half the width of its 95 % confidence interval (Student's t), 0 for n = 1."""
    n = len(differences)
    if n == 1:
        return differences[0], 0.0
    return fmean(differences), T95[n - 2] * stdev(differences) / math.sqrt(n)


def interval(differences: list[float]) -> str:
    """The mean and its interval, as the table shows them."""
    n = len(differences)
    mean, half = mean_and_half(differences)
    width = f" ± {half:.4f}" if n > 1 else ""
    return f"{mean:+.4f}{width} (n = {n})"


def figure(values: list[float], digits: int, middle=fmean) -> str:
    """The mean, or the median, and the range; "-" if there are no values, or if one is None."""
    if not values or None in values:
        return "-"
    low, text, high = (f"{value:.{digits}f}" for value in (min(values), middle(values), max(values)))
    if low != high:
        text += f" ({low} to {high})"
    return text


def cells(run, first) -> list[str]:
    """The cells of a run.Run, in the order of HEADER. Differences and ratios are those to `first` with equal seeds."""
    results = run.results.values()
    pairs = [(run.results[seed], first.results[seed]) for seed in run.results if seed in first.results]
    same_task = all(getattr(run.cfg, name) == getattr(first.cfg, name) for name in TASK)
    compared = "-"
    if run is not first and same_task and pairs:
        compared = interval([mine["loss"] - other["loss"] for mine, other in pairs])
    losses = figure([each["loss"] for each in results], 4)
    if run.errors and not results:
        losses = "failed (see below)"
    return [
        f"{run.number}: `{run.shown}`".replace("|", "\\|"),
        f"{run.costs.parameters:,}",
        f"{run.costs.flops_per_token / 1e6:,.2f} M",
        f"{run.costs.tokens:,}",
        figure([each["seconds"] for each in results], 1),
        losses,
        figure([each["bits_per_byte"] for each in results], 4),
        compared,
        figure([mine["tokens_per_s"] / other["tokens_per_s"] for mine, other in pairs], 3, median),
    ]


def sweep_notes(settings: list) -> list[str]:
    """What the sweep has found for one --run, which has a run.Run for each setting, and whether to extend it."""
    best = min(settings, key=lambda run: run.first_loss)
    if math.isinf(best.first_loss):  # no result yet
        return []
    losses = ", ".join(f"{run.setting} {run.first_loss:.4f}" for run in settings)
    notes = [f"Run {best.number}, losses at seed 1: {losses}."]
    with suppress(ValueError):  # the values are not numbers
        ordered = sorted(settings, key=lambda run: float(run.setting.partition("=")[2]))
        if best in (ordered[0], ordered[-1]):
            notes.append(f"Run {best.number}: {best.setting} is at an end of the sweep; extend --sweep.")
    return notes


def aligned(lines: list[list[str]]) -> str:
    """A Markdown table, of which the first line is the header, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ""
    for line in [lines[0], ["-" * width for width in widths], *lines[1:]]:
        text += f"| {' | '.join(map(str.ljust, line, widths))} |\n"
    return text
