"""The table of tools.compare: figures of runs over seeds, their paired differences, and both as Markdown.

row = summary(run, first)       # run, first: run.Run
print(markdown([row, ...], "learning_rate"))
"""

import math
from statistics import fmean, median, stdev

T95 = (  # 97.5 % quantile of Student's t with 1, 2, ... degrees of freedom
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093,
)  # fmt: skip
MOST_SEEDS = len(T95) + 1
TASK = ("dataset", "objective", "corrupt_ratio", "span_length")  # flags; losses of other tasks are not compared
LEGEND = """
* Loss: nats per token of the validation set; mean and range over the seeds. Bits per byte likewise.
* Difference: the loss minus that of run 1 with the same seed; mean over n seeds ± half of its 95 % confidence interval
  (Student's t). A single seed has no interval, and a run with another data set or objective no difference.
* Relative speed: tokens per second divided by those of run 1 with the same seed; median and range over the seeds.
"""


def spread(values: list[float]) -> dict | None:
    """The mean, median and range of values; None if there are none, or if one is None."""
    if not values or None in values:
        return None
    return {"mean": fmean(values), "median": median(values), "min": min(values), "max": max(values)}


def interval(differences: list[float]) -> dict | None:
    """The mean of n differences, and half the width of its 95 % confidence interval (Student's t), None for n = 1."""
    if not differences:
        return None
    n = len(differences)
    half = T95[n - 2] * stdev(differences) / math.sqrt(n) if n > 1 else None
    return {"n": n, "mean": fmean(differences), "half_width": half}


def edge(best: str, settings: list[str]) -> str:
    """Which of the settings NAME=NUMBER the best one is, "smallest" or "largest"; "" if it is between them."""
    try:
        values = {setting: float(setting.partition("=")[2]) for setting in settings}
    except ValueError:  # the values are not numbers
        return ""
    return {min(values.values()): "smallest", max(values.values()): "largest"}.get(values.get(best), "")


def summary(run, first) -> dict:
    """The figures of a run.Run over its seeds. Differences and ratios are those to `first` with the same seed."""
    mine, other = run.of_seeds(), first.of_seeds()
    pairs = [(mine[seed], other[seed]) for seed in sorted(mine.keys() & other.keys())]
    same_task = all(getattr(run.cfg, name) == getattr(first.cfg, name) for name in TASK)
    return {
        "number": run.number,
        "run": run.text,
        "arguments": run.line(),
        "matched": run.changed,
        "parameters": run.costs.parameters,
        "flops_per_token": run.costs.flops_per_token,
        "steps": run.costs.steps,
        "tokens": run.costs.tokens,
        **{key: spread([figures[key] for figures in mine.values()]) for key in ("seconds", "loss", "bits_per_byte")},
        "difference": interval([a["loss"] - b["loss"] for a, b in pairs]) if same_task else None,
        "relative_speed": spread([a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs]),
        "best": run.best if mine and run.best else None,
        "edge": edge(run.best, run.settings),
        "sweep": {s: run.results.get((s, 1), {}).get("loss") for s in run.settings if s},
        "seeds": mine,
        "errors": [{"setting": s, "seed": seed, "error": text} for (s, seed), text in run.errors.items()],
    }


def match_notes(runs: list, match: str, times: list[float] | None) -> list[str]:
    """The flags that --match has changed in each run.Run, and its costs relative to the first one's.

    times   milliseconds per step of each run, for --match=seconds
    """
    first = runs[0].costs
    notes = [f"--match={match}: run 1 keeps its flags."]
    if "seconds" in match and not times:
        return [*notes, "A timing of each run will settle max_iters of the other runs."]
    for run in runs[1:]:
        costs = run.costs
        ratios = {"parameters": costs.parameters / first.parameters, "tokens": costs.tokens / first.tokens}
        ratios["FLOPs"] = costs.flops / first.flops
        if times:
            ratios["seconds"] = costs.steps * times[run.number - 1] / (first.steps * times[0])
        flags = " ".join(f"--{name}={value}" for name, value in run.changed.items())
        than = ", ".join(f"{name} {100 * (ratio - 1):+.2f} %" for name, ratio in ratios.items())
        notes.append(f"Run {run.number}: {flags or 'no flag changes'}; compared with run 1: {than}.")
    return notes


def row_notes(rows: list[dict]) -> list[str]:
    """What the summaries say about the sweep's edges, and about trainings that failed."""
    notes = []
    if rows[0]["sweep"]:
        notes.append("The sweep was trained with seed 1, and the best value of each run with the other seeds too.")
    for row in rows:
        if row["edge"]:
            advice = "a value beyond it may be better; extend --sweep"
            notes.append(f"Run {row['number']}: {row['best']} is the {row['edge']} value of the sweep, and {advice}.")
        for error in row["errors"]:
            which = " ".join(filter(None, (error["setting"], f"seed {error['seed']}")))
            notes.append(f"Run {row['number']}, {which} failed: {error['error']}")
    return notes


def markdown(rows: list[dict], swept: str) -> str:
    """The table of these summaries, then that of the sweep if there is one, and a legend. swept: the flag, or ""."""
    header = ["run", "parameters", "FLOPs per token", "tokens", "seconds", "loss", "bits per byte"]
    header += ["difference from run 1", "relative speed"] + [f"best {swept}"] * bool(swept)
    text = aligned([header, *map(cells, rows)])
    if swept:
        settings = list(rows[0]["sweep"])
        lines = [[str(row["number"]), *(sweep_cell(row, setting) for setting in settings)] for row in rows]
        text += "\nLoss at seed 1, by value of the sweep:\n\n" + aligned([["run", *settings], *lines])
    return text + LEGEND


def cells(row: dict) -> list[str]:
    """A run's cells; the last one is that of the sweep, if there is one."""
    loss = figure(row["loss"], 4)
    if row["loss"] is None and row["errors"]:
        loss = "failed (see below)"
    difference, compared = row["difference"], "-"
    if row["number"] > 1 and difference:
        half = f"± {difference['half_width']:.4f} " if difference["n"] > 1 else ""
        compared = f"{difference['mean']:+.4f} {half}(n = {difference['n']})"
    best = (row["best"] or "").partition("=")[2] or "-"
    best += f" (the {row['edge']})" if row["edge"] else ""
    return [
        f"{row['number']}: " + f"`{row['run']}`" * bool(row["run"]), f"{row['parameters']:,}",
        f"{row['flops_per_token'] / 1e6:,.2f} M", f"{row['tokens']:,}", figure(row["seconds"], 1), loss,
        figure(row["bits_per_byte"], 4), compared, figure(row["relative_speed"], 3, "median"),
    ] + [best] * bool(row["sweep"])  # fmt: skip


def figure(values: dict | None, digits: int, middle: str = "mean") -> str:
    """The mean, or the median, and the range."""
    if values is None:
        return "-"
    low, high = (f"{values[name]:.{digits}f}" for name in ("min", "max"))
    return f"{values[middle]:.{digits}f}" + (f" ({low} to {high})" if low != high else "")


def sweep_cell(row: dict, setting: str) -> str:
    """The loss of a setting, in bold for the best one."""
    failed = any(error["setting"] == setting for error in row["errors"])
    loss = row["sweep"][setting]
    text = f"{loss:.4f}" if loss is not None else "failed" if failed else "-"
    return f"**{text}**" if setting == row["best"] else text


def aligned(lines: list[list[str]]) -> str:
    """A Markdown table, of which the first line is the header, with columns of equal width."""
    lines = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    rows = ([f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
