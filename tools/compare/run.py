"""A run of tools.compare with one value of the sweep: its flags, its costs, and the figures of its trainings."""

import math
import os
from bisect import bisect_left
from pathlib import Path
from statistics import median
from typing import NamedTuple

from configurator import read_flags, resolve
from data.errors import require
from engine import settle
from engine.config import Config
from engine.metrics import read_metrics
from engine.plan import accounting
from tools.training_process import WARMUP, words_of

RESERVED = ("out_dir", "seed", "init_from", "eval_iters", "eval_only", "plan")  # flags that tools.compare sets
SCALED = ("warmup_iters", "cooldown_iters", "lr_decay_iters")  # flags that change with max_iters


class Costs(NamedTuple):
    parameters: int
    flops_per_token: float  # of forward and backward
    tokens_per_step: int
    tokens: int


class Run:
    """A --run with arguments of train.py, `text`, and a setting of the sweep, such as learning_rate=1e-3, or ""."""

    def __init__(self, number: int, text: str, setting: str, options):
        self.number = number
        self.setting = setting
        self.options = options  # a CompareConfig
        self.changed: dict[str, int] = {}  # flags that --match has set
        self.results: dict[int, dict] = {}  # by seed
        self.errors: dict[int, str] = {}  # by seed
        self.first_loss = math.inf  # with seed 1, by which a setting of the sweep is chosen
        self.own = words_of("run", text)
        self.args = words_of("common", options.common) + self.own
        if setting:
            self.args.append(f"--{setting}")
        self.name = f"--run={text} --common={options.common}".removesuffix(" --common=")
        names = [arg.lstrip("-").partition("=")[0] for arg in self.args]
        for name in (*RESERVED, options.swept):
            most = 0 if name in RESERVED else 1
            require(names.count(name) <= most, f"{self.name}: tools.compare sets --{name}; leave it out")
        self.shown = " ".join(filter(None, (text, setting and f"--{setting}")))
        self.update()

    def update(self):
        self.cfg = self.read()
        self.costs = self.costs_of()

    def line(self) -> list[str]:
        """The arguments of train.py that describe the model and its training."""
        return self.args + [f"--{name}={value}" for name, value in self.changed.items()]

    def read(self, *more: str) -> Config:
        """The flags of `line` and of further arguments. ValueError names the run."""
        try:
            return resolve(Config, read_flags(Config, [*self.line(), *more]))
        except (ValueError, OSError) as error:
            raise ValueError(f"{self.name}: {error}") from None

    def costs_of(self, *more: str) -> Costs:
        """The costs of a training, also with further arguments."""
        cfg = self.read(*more)
        require(not cfg.batch_ramp, f"batch_ramp={cfg.batch_ramp}: the steps of a comparison are equal; leave it out")
        _, objective = settle.by_data(cfg)
        model = accounting.skeleton(cfg)
        flops_per_token = accounting.flops(model, *objective.lengths) / cfg.block_size
        tokens_per_step = cfg.batch_size * cfg.gradient_accumulation_steps * cfg.block_size
        return Costs(model.n_params(), flops_per_token, tokens_per_step, cfg.max_iters * tokens_per_step)

    def change(self, name: str, value: int):
        """Set a flag as --match asks. ValueError if --run sets it to another value."""
        if value != getattr(self.cfg, name):
            given = any(arg.startswith(f"--{name}=") for arg in self.own)
            fact = f"{self.options.match} are to be equal, which needs {name}={value} here"
            require(not given, f"{self.name}: {fact}; leave {name} out, or choose another --match")
            self.changed[name] = value

    def match_parameters(self, wanted: int):
        """Set n_embd to the width with which the number of parameters is nearest to `wanted`."""
        width = self.cfg.n_embd
        unit = self.cfg.n_head
        if self.cfg.pos in ("rope", "sinusoidal"):
            unit *= 2  # heads, or the stream, of even size

        def parameters(n_embd: int) -> int:
            return self.costs_of(f"--n_embd={n_embd}").parameters

        widths = range(width % unit or unit, 16 * width, unit)
        larger = bisect_left(widths, wanted, key=parameters)  # or the end
        some = 1 + 64 // unit  # where the width is a multiple of 64, hidden units are too, and may be fewer
        near = widths[max(larger - some, 0) : larger + some]
        self.change("n_embd", min(near, key=lambda n_embd: abs(parameters(n_embd) - wanted)))
        self.update()

    def match_steps(self, steps: float):
        """Set max_iters to the nearest integer, and the other flags of the schedule in proportion."""
        old = self.cfg.max_iters
        new = max(1, round(steps))
        if new == old:
            return
        self.change("max_iters", new)
        for name in SCALED:
            if value := getattr(self.cfg, name):
                self.changed[name] = max(1, value * new // old)
        self.update()

    def folder(self, seed: int) -> Path:
        name = "-".join(filter(None, (f"run{self.number}", self.setting, f"seed{seed}")))
        return self.options.folder / name.replace(os.sep, "_")

    def arguments(self, seed: int) -> list[str]:
        """All arguments of a training. Those before the run's own are defaults, which flags in --run may replace."""
        folder = self.folder(seed)
        steps = self.cfg.max_iters
        defaults = ["--keep_last=1", "--eval_interval=0"]
        defaults += [f"--save_interval={max(1, steps // 10)}", f"--log_interval={max(1, steps // 100)}"]
        start = "resume" if (folder / "latest").exists() else "scratch"
        fixed = {"eval_iters": self.options.eval_iters, "seed": seed, "out_dir": folder, "init_from": start}
        return [*defaults, *self.line(), *(f"--{name}={value}" for name, value in fixed.items())]

    def load(self, seed: int) -> str:
        """Read the figures of a training from its metrics.jsonl; returns why it has none, "" if it is finished."""
        file = self.folder(seed) / "metrics.jsonl"
        rows = list(read_metrics(file)) if file.is_file() else []
        last = [row for row in rows if type(row.get("val_loss")) in (int, float) and row["step"] == self.cfg.max_iters]
        times = [row["ms_per_step"] for row in rows if type(row.get("ms_per_step")) in (int, float)]
        if not last or not times:
            return "it has no finite validation loss of its last step"
        ms = median(times[int(WARMUP * len(times)) :])
        self.results[seed] = {
            "loss": last[-1]["val_loss"], "bits_per_byte": last[-1].get("val_bpb"),
            "seconds": ms * self.cfg.max_iters / 1000, "tokens_per_s": 1000 * self.costs.tokens_per_step / ms,
        }  # fmt: skip
        if seed == 1:
            self.first_loss = last[-1]["val_loss"]
        return ""
