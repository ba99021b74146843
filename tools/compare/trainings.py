"""Makes the trainings of a comparison, in an order that is fair, and writes their table."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, product
from pathlib import Path
from typing import Literal

import torch

from data.errors import require, say
from data.files import check_own, read_json, user_path, write_file
from engine.device import device_name, resolve_device
from flags import Flags
from tools.compare.run import Run
from tools.compare.table import HEADER, aligned, cells, sweep_notes
from tools.training_process import ROOT, Child, measure

CODE = [ROOT / name for name in ("model.py", "ops.py", "flags.py", "train.py", "configurator.py")]
CODE += sorted([*(ROOT / "data").glob("*.py"), *(ROOT / "engine").rglob("*.py")])  # not the scripts of data sets


@dataclass
class CompareConfig(Flags):
    # --- compare
    run: str = ""  # arguments of train.py; repeat the flag, and all runs are compared with the first
    common: str = ""  # arguments of every run, such as --device=cpu; flags in --run win, config files do not
    seeds: int = 1  # [>0] [<=20] number of trainings of each run, with --seed=1, 2, ...
    sweep: str = ""  # a flag and its values, such as learning_rate=1e-3,2e-3,4e-3; each run gets its best one
    match: Literal[  # the cost that all runs have in common
        "tokens", "flops", "seconds", "parameters", "parameters,flops", "parameters,seconds"
    ] = "tokens"
    eval_iters: int = 0  # batches of the evaluation at the end of each training, 0 = the whole validation set
    jobs: int = 1  # [>0] trainings at the same time; they share the threads
    out: str = "out/compare"  # folder of the trainings and the table

    def __post_init__(self):
        """Set `folder`, `swept`, the flag of the sweep or "", and `settings`, such as learning_rate=1e-3 or ""."""
        super().__post_init__()
        require(self.out.strip(), f"out={self.out!r} must be a folder, such as out/compare")
        self.folder = user_path(self.out)
        self.swept, _, values = self.sweep.partition("=")
        self.settings = [""]
        if self.sweep:
            values = values.split(",")
            good = self.swept and all(values) and len(set(values)) == len(values) > 1
            require(good, f"sweep={self.sweep} must be a flag and two or more values, such as learning_rate=1e-3,2e-3")
            self.settings = [f"{self.swept}={value}" for value in values]


class Comparison:
    """All runs, whose `texts` are arguments of train.py, each with its settings of the sweep, and their trainings."""

    def __init__(self, options: CompareConfig, texts: list[str]):
        self.options = options
        self.candidates: list[list[Run]] = []  # of each --run, one for each setting of the sweep
        for number, text in enumerate(texts, 1):
            self.candidates.append([Run(number, text, setting, options) for setting in options.settings])
        self.firsts = [first for first, *_ in self.candidates]  # each run with the first setting of the sweep
        self.children: list[Child] = []  # of the trainings so far
        self.stopped = False  # by a signal
        code = hashlib.sha256(b"".join(file.read_bytes() for file in CODE)).hexdigest()
        self.stored = {"match": options.match, "eval_iters": options.eval_iters, "code": code}
        for run in self.firsts:
            names = sorted(run.cfg.sources.keys() - {options.swept})
            self.stored[f"run {run.number}"] = {name: getattr(run.cfg, name) for name in names}
        path = options.folder / "compare.json"
        check_own(path.is_file(), options.folder, "out")
        try:
            old = dict(read_json(path)) if path.is_file() else self.stored
            times = old.get("ms_per_step") or [1] * len(texts)
            require(len(times) == len(texts) and all(0 < float(ms) < 1e99 for ms in times), f"ms_per_step={times}")
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"{path} is damaged ({error}); delete it, or choose another --out") from None
        for name, value in self.stored.items():
            fact = f"{options.folder} holds a comparison with another {name}"
            require(old.get(name) == value, f"{fact}; choose another --out, or delete this folder")
        self.stored = {"measured": "Nothing is measured yet.", "ms_per_step": None} | old

    @property
    def runs(self) -> list[Run]:
        """Each run with the best setting so far."""
        return [min(settings, key=lambda run: run.first_loss) for settings in self.candidates]

    def match(self):
        """Adapt the other runs to the first."""
        runs = self.firsts
        if "parameters" in self.options.match:
            for run in runs[1:]:
                run.match_parameters(runs[0].costs.parameters)
        costs = [run.costs.tokens_per_step for run in runs]  # of a step
        if "flops" in self.options.match:
            costs = [run.costs.tokens_per_step * run.costs.flops_per_token for run in runs]
        if "seconds" in self.options.match:
            if not self.stored["ms_per_step"]:
                self.stored["ms_per_step"] = self.time_steps()
                self.write()  # later calls take the same number of steps
            costs = self.stored["ms_per_step"]
        for run, cost in zip(runs[1:], costs[1:], strict=True):
            run.match_steps(runs[0].cfg.max_iters * costs[0] / cost)
        for first, *others in self.candidates:
            for run in others:
                run.changed = first.changed
                run.update()
                fact = f"--sweep={self.options.sweep}: {self.options.swept} changes the costs of run {run.number}"
                require(run.costs == first.costs, f"{fact}; give each value its own --run")

    def time_steps(self) -> list[float]:
        """The milliseconds per step of each run: the faster of two timings, as other programs only slow a run down.
        Evaluations and saves, which a run may ask for, are no part of it."""
        fixed = ["--eval_interval=0", "--save_interval=0", "--seed=1", "--init_from=scratch"]
        lines = [[*run.line(), *fixed] for run in self.firsts]
        times = [measure(ROOT, line, lines=8, cwd=Path.cwd()) for line in 2 * lines]  # "iter N:", one per 10 steps
        return list(map(min, times[: len(lines)], times[len(lines) :]))

    def stages(self) -> Iterator[list[tuple[Run, int]]]:
        """Yields the trainings that are left, as (run, seed): with seed 1, then others, with the best settings."""
        yield [(run, 1) for run in chain.from_iterable(zip(*self.candidates, strict=True)) if run.load(1)]
        later = product(range(2, self.options.seeds + 1), self.runs)
        yield [(run, seed) for seed, run in later if run.load(seed)]

    def train(self):
        """Make the unfinished trainings, at most --jobs at a time."""
        self.write()  # before the first training, so that another comparison never continues it
        with ThreadPoolExecutor(self.options.jobs) as pool:
            try:
                for left in self.stages():
                    for (run, seed), failure in zip(left, pool.map(self.make, left), strict=True):
                        self.finish(run, seed, failure)
            except BaseException:  # such as Ctrl-C
                self.stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                for child in self.children:
                    child.process.terminate()
                say("the trainings in progress save a checkpoint; the same command continues")
                raise

    def make(self, training: tuple[Run, int]) -> str:
        """Make a training in a process of its own; returns why it has failed, or ""."""
        run, seed = training
        with Child([sys.executable, str(ROOT / "train.py"), *run.arguments(seed)], Path.cwd()) as child:
            self.children.append(child)
            if self.stopped:
                return ""
            child.start()
            child.lines.read()  # until it ends
            return child.failure()

    def finish(self, run: Run, seed: int, failure: str):
        """Read the figures of a training that has ended, and write the table."""
        if missing := run.load(seed):
            run.errors[seed] = failure or missing
            text = f"failed: {run.errors[seed]}"
        else:
            threads = os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())
            where = f"{device_name(resolve_device(run.cfg.device))}, {threads} thread(s), torch {torch.__version__}"
            self.stored["measured"] = f"Measured on {datetime.now():%Y-%m-%d}: {where}, {self.options.jobs} at a time."
            text = f"loss {run.results[seed]['loss']:.4f}, {run.results[seed]['seconds']:.1f} s"
        self.write()
        print(f"{run.folder(seed).name}: {text}", flush=True)

    def write(self) -> str:
        """Write compare.json and compare.md into the folder, which is made; returns the text of the latter."""
        runs = self.runs
        notes = [self.stored["measured"], "docs/hacking.md explains the columns."]
        if self.options.common:
            notes.append(f"All runs have `{self.options.common}`.")
        for run in runs[1:]:
            flags = " ".join(f"--{name}={value}" for name, value in run.changed.items())
            notes.append(f"Run {run.number}, --match={self.options.match}: {flags or 'no flag changes'}.")
        if self.options.sweep:
            notes += chain.from_iterable(map(sweep_notes, self.candidates))
        for run in runs:
            notes += [f"Run {run.number}, seed {seed} failed: {text}" for seed, text in run.errors.items()]
        table = aligned([HEADER, *(cells(run, runs[0]) for run in runs)])
        text = "\n".join([table, *(f"* {note}" for note in notes), ""])
        rows = [{"arguments": run.line(), "costs": run.costs._asdict(), "seeds": run.results} for run in runs]
        content = json.dumps(self.stored | {"runs": rows}, indent=1) + "\n"
        write_file(self.options.folder / "compare.json", content.encode())
        write_file(self.options.folder / "compare.md", text.encode())
        return text
