"""A run of tools.compare: its flags, its costs, and the figures of its trainings."""

import os
import shlex
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from configurator import Config, parse
from data.errors import require
from data.objective import open_with_objective
from engine.metrics import read_metrics
from engine.plan import accounting
from model import Model
from tools.child import WARMUP

RESERVED = ("out_dir", "seed", "init_from", "eval_iters", "eval_only", "plan")  # flags that tools.compare sets
SCALED = ("warmup_iters", "cooldown_iters", "lr_decay_iters")  # flags that change with max_iters


class Costs(NamedTuple):
    """What a training costs; flops_per_token counts forward and backward, evaluation the FLOPs of the final one."""

    parameters: int
    flops_per_token: float
    tokens_per_step: int
    steps: int
    evaluation: float

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def flops(self) -> float:
        return self.tokens * self.flops_per_token


class Run:
    """One --run, whose arguments of train.py are `text`. options: a trainings.CompareConfig.

    changed     flags that --match has set, with their values
    results     (setting of the sweep, seed) -> figures of a finished training
    errors      (setting of the sweep, seed) -> error of a training that has failed
    """

    def __init__(self, number: int, text: str, options):
        self.number, self.text, self.options, self.settings = number, text, options, options.settings
        self.changed, self.results, self.errors = {}, {}, {}
        try:
            self.own = shlex.split(text)
            self.args = shlex.split(options.common) + self.own
        except ValueError as error:
            raise ValueError(f"--run={text} --common={options.common}: {error}; correct its quotation marks") from None
        for arg in [*self.args, f"--{self.options.swept}"]:
            name = arg.lstrip("-").partition("=")[0]
            require(name not in RESERVED, f"--run={text}: {arg} is a flag that tools.compare sets; leave it out")
        swept = [arg for arg in self.args if options.sweep and arg.startswith(f"--{options.swept}=")]
        require(not swept, f"--run={text}: {' '.join(swept)} is a flag that --sweep sets; leave it out")
        self.update()

    def update(self):
        """Set the flags and the costs of the training, also after `change`."""
        self.cfg, self.costs = self.read(), self.costs_of()

    def costs_of(self, setting: str = "") -> Costs:
        """The costs of a training with this setting."""
        cfg, eval_iters = self.read(setting), self.options.eval_iters
        require(not cfg.batch_ramp, f"batch_ramp={cfg.batch_ramp}: the steps of a comparison are equal; leave it out")
        data, objective, cfg.vocab_size = open_with_objective(cfg)
        with torch.device("meta"):
            whole_model = Model(cfg)
        flops_per_token = accounting.flops(whole_model, *objective.lengths) / cfg.block_size
        tokens_per_step = cfg.batch_size * cfg.gradient_accumulation_steps * cfg.block_size
        batch, whole = cfg.batch_size * cfg.block_size, len(data.split("val"))
        evaluated = 2 * eval_iters * batch if eval_iters else whole + min(whole, 100 * batch)  # validation and training
        evaluation = evaluated * flops_per_token / 3  # a forward only
        return Costs(whole_model.n_params(), flops_per_token, tokens_per_step, cfg.max_iters, evaluation)

    def line(self, setting: str = "") -> list[str]:
        """The arguments of train.py that describe the model and its training, with a setting of the sweep."""
        changed = [f"{name}={value}" for name, value in self.changed.items()]
        return self.args + [f"--{each}" for each in (*changed, setting) if each]

    def read(self, setting: str = "") -> Config:
        """The flags of `line`. ValueError names the run."""
        try:
            return parse(Config, self.line(setting))
        except (ValueError, OSError) as error:
            raise ValueError(f"--run={self.text}: {error}") from None

    def change(self, name: str, value: int):
        """Set a flag as --match asks. ValueError if --run sets it to another value."""
        if value != getattr(self.cfg, name):
            given = any(arg.startswith(f"--{name}=") for arg in self.own)
            advice = f"--match={self.options.match} needs {name}={value} here; leave {name} out"
            require(not given, f"--run={self.text}: {advice}")
            self.changed[name] = value

    def match_parameters(self, wanted: int):
        """Set n_embd to the width with which the number of parameters is nearest to `wanted`."""
        width, heads = self.cfg.n_embd, self.cfg.n_head

        def parameters(n_embd: int) -> int:
            return self.costs_of(f"n_embd={n_embd}").parameters

        def possible(n_embd: int) -> bool:
            with suppress(ValueError):
                return bool(self.read(f"n_embd={n_embd}"))
            return False

        # Heads, RoPE and groups ask for multiples of a number, which is the smallest step to a possible width.
        unit = next((n for n in range(heads, 65 * heads, heads) if possible(width + n)), heads)
        widths = range(width % unit or unit, 16 * width, unit)
        larger = min(bisect_left(widths, wanted, key=parameters), len(widths) - 1)
        near = widths[max(larger - 1, 0) : larger + 1]
        self.change("n_embd", min(near, key=lambda n_embd: abs(parameters(n_embd) - wanted)))
        self.update()

    def match_steps(self, steps: float):
        """Set max_iters to the nearest integer, and the other flags of the schedule in proportion."""
        old, new = self.cfg.max_iters, max(1, round(steps))
        if new == old:
            return
        self.change("max_iters", new)
        for name in SCALED:
            if value := getattr(self.cfg, name):
                self.changed[name] = max(1, value * new // old)
        self.update()

    def folder(self, setting: str, seed: int) -> Path:
        name = f"run{self.number}-" + f"{setting}-" * bool(setting) + f"seed{seed}"
        return Path(self.options.out).expanduser() / name.replace(os.sep, "_")

    def arguments(self, setting: str, seed: int) -> list[str]:
        """All arguments of a training. Those before the run's own are defaults, which flags in --run may replace."""
        folder, steps = self.folder(setting, seed), self.cfg.max_iters
        defaults = ["--keep_last=1", "--eval_interval=0"]
        defaults += [f"--save_interval={max(1, steps // 10)}", f"--log_interval={max(1, steps // 100)}"]
        start = "resume" if (folder / "latest").exists() else "scratch"
        fixed = {"eval_iters": self.options.eval_iters, "seed": seed, "out_dir": folder, "init_from": start}
        return [*defaults, *self.line(setting), *(f"--{name}={value}" for name, value in fixed.items())]

    def load(self, setting: str, seed: int) -> str:
        """Read the figures of a training from its metrics.jsonl; returns why it has none, "" if it is finished."""
        file = self.folder(setting, seed) / "metrics.jsonl"
        rows = [row for row, _ in read_metrics(file)] if file.is_file() else []
        last = [row for row in rows if "val_loss" in row and row["step"] == self.cfg.max_iters]
        times = [row["ms_per_step"] for row in rows if row.get("ms_per_step")]
        if not last or not times:
            return "it ended before its last step"
        if last[-1]["val_loss"] is None:
            return "its validation loss is not finite"
        ms = median(times[int(WARMUP * len(times)) :])
        self.results[setting, seed] = {
            "folder": str(file.parent), "loss": last[-1]["val_loss"], "bits_per_byte": last[-1].get("val_bpb"),
            "seconds": ms * self.cfg.max_iters / 1000, "tokens_per_s": 1000 * self.costs.tokens_per_step / ms,
        }  # fmt: skip
        return ""

    @property
    def best(self) -> str | None:
        """The setting with the lowest loss at seed 1, which the other seeds take: "" without a sweep, FLAG=BEST while
        trainings of the sweep are left to do, None if all of them have failed."""
        if not self.options.sweep:
            return ""
        if any((setting, 1) not in self.results | self.errors for setting in self.settings):
            return f"{self.options.swept}=BEST"
        losses = {s: self.results[s, 1]["loss"] for s in self.settings if (s, 1) in self.results}
        return min(losses, key=losses.get, default=None)

    def of_seeds(self) -> dict[int, dict]:
        """seed -> figures of the finished trainings with the best setting."""
        return {seed: figures for (setting, seed), figures in sorted(self.results.items()) if setting == self.best}
