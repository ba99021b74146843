"""Makes the trainings of a comparison, in an order that is fair, and writes their table.

comparison = compare(CompareConfig(seeds=3, out="out/blocks"), ["config/train_pycode.py", "config/pycode_sas.py"])
rows = comparison.rows()        # as in compare.json
"""

import hashlib
import json
import os
import re
import select
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from data.errors import require
from data.files import write_file, writing
from engine.checkpoint.folder import locked
from engine.device import machine, resolve_device
from tools.child import Child, measure
from tools.compare.run import Run
from tools.compare.table import MOST_SEEDS, markdown, match_notes, row_notes, summary

HERE = Path(__file__).resolve().parents[2]
CODE = [HERE / name for name in ("model.py", "ops.py", "train.py", "configurator.py")]
CODE += sorted([*(HERE / "data").glob("*.py"), *(HERE / "engine").rglob("*.py")])  # not the scripts of data sets
SIGNALS = (signal.SIGINT, signal.SIGTERM)
TIMED_LINES, ROUNDS = 8, 2  # of --match=seconds: lines "iter N:", one per 10 steps, and how often each run is timed


@dataclass
class CompareConfig:
    """The flags of tools.compare. ValueError names the flag, its value and the remedy."""

    # --- compare
    run: str = ""  # arguments of train.py; repeat the flag, and all runs are compared with the first
    common: str = ""  # arguments of every run, such as --device=cpu; flags in --run win, config files do not
    seeds: int = 1  # number of trainings of each run, with --seed=1, 2, ...
    sweep: str = ""  # a flag and its values, such as learning_rate=1e-3,2e-3,4e-3; each run gets its best one
    match: Literal[  # the cost that all runs have in common
        "tokens", "flops", "seconds", "parameters", "parameters,flops", "parameters,seconds"
    ] = "tokens"
    eval_iters: int = 0  # batches of the evaluation at the end of each training, 0 = the whole validation set
    jobs: int = 1  # trainings at the same time; they share the threads
    out: str = "out/compare"  # folder of the trainings and the table
    dry_run: bool = False  # print the commands that are left to do, and start nothing

    def __post_init__(self):
        """Set `swept`, the flag of the sweep or "", and `settings`, such as learning_rate=1e-3; "" without it."""
        for name, least, most in (("seeds", 1, MOST_SEEDS), ("jobs", 1, 1000), ("eval_iters", 0, 2**31 - 1)):
            value = getattr(self, name)
            require(least <= value <= most, f"{name}={value} must be at least {least} and at most {most}")
        require(self.out.strip(), f"out={self.out!r} must be a folder, such as out/compare")
        self.swept, _, values = self.sweep.partition("=")
        values = values.split(",")
        good = not self.sweep or self.swept and all(values) and len(set(values)) == len(values) > 1
        require(good, f"sweep={self.sweep} must be a flag and two or more values, such as learning_rate=1e-3,2e-3")
        self.settings = [f"{self.swept}={value}" for value in values] if self.sweep else [""]


# ---------------------------------------------------------------------------------------------------------------------
# All runs


class Training(Child):
    """A process of train.py, and the steps that it has logged."""

    close = Child.__exit__

    def __init__(self, run: Run, setting: str, seed: int):
        super().__init__([sys.executable, "-u", str(HERE / "train.py"), *run.arguments(setting, seed)], Path.cwd())
        self.run, self.setting, self.seed, self.first, self.step = run, setting, seed, None, 0
        self.name = " ".join(filter(None, (f"run {run.number}", setting, f"seed {seed}")))

    def poll(self) -> bool:
        """Read the output that is there; returns whether the process has ended."""
        ended, pipe = self.process.poll() is not None, self.lines.fileno()
        while select.select([pipe], [], [], 0)[0] and (said := os.read(pipe, 2**16)):
            for step in re.findall(rb"^iter (\d+):", said, re.MULTILINE):
                self.step = int(step)
                self.first = self.step if self.first is None else self.first
        return ended

    @property
    def flops(self) -> float:
        """The FLOPs of the steps that this process has made."""
        return (self.step - (self.first or 0)) / self.run.costs.steps * self.run.costs.flops


class Comparison:
    """All runs, and their trainings in order."""

    def __init__(self, options: CompareConfig, texts: list[str]):
        self.options, self.folder, self.stopped = options, Path(options.out).expanduser(), 0
        self.runs = [Run(number, text, options) for number, text in enumerate(texts, 1)]
        flags = [{name: getattr(run.cfg, name) for name in sorted(run.cfg.sources)} for run in self.runs]
        self.stored = {"match": options.match, "eval_iters": options.eval_iters, "flags": flags, "ms_per_step": None}
        code = hashlib.sha256(b"".join(file.read_bytes() for file in CODE)).hexdigest()
        self.stored |= {"measured": None, "code": code}
        path, advice = self.folder / "compare.json", "choose another --out, or delete this folder"
        if path.is_file():
            try:
                old = self.stored | json.loads(path.read_text())
                times = old["ms_per_step"] or []
                require(all(1e-9 < ms < 1e9 for ms in times) and len(times) in (0, len(texts)), "these are no timings")
            except (ValueError, TypeError, RecursionError):
                raise ValueError(f"{path} is damaged; delete --out={options.out}, or choose another folder") from None
            for name, flag in {"match": "match", "eval_iters": "eval_iters", "flags": "run"}.items():
                same = old[name] == self.stored[name]
                require(same, f"--out={options.out} holds a comparison with another --{flag}; {advice}")
            self.stored = old  # also its hash of the code, so that later calls say it too
        self.changed = self.stored["code"] != code
        if self.changed:
            text = f"warning: the code has changed since trainings in --out={options.out}; to repeat them, {advice}"
            print(text, file=sys.stderr)

    def store(self, content: dict):
        """Write compare.json atomically, and make its folder."""
        with writing(path := self.folder / "compare.json"):
            write_file(path, (json.dumps(content, indent=1) + "\n").encode())

    def match(self):
        """Adapt the other runs to the first."""
        first, kind = self.runs[0].costs, self.options.match.split(",")
        if "parameters" in kind:
            for run in self.runs[1:]:
                run.match_parameters(first.parameters)
        costs = [run.costs.tokens_per_step * (run.costs.flops_per_token if "flops" in kind else 1) for run in self.runs]
        if "seconds" in kind:
            if not self.stored["ms_per_step"] and not self.options.dry_run:
                self.stored["ms_per_step"] = self.time_steps()
                self.store(self.stored)  # later calls take the same number of steps
            costs = self.stored["ms_per_step"] or []
        for run, cost in zip(self.runs[1:], costs[1:], strict=False):  # costs of a step
            run.match_steps(first.steps * costs[0] / cost)
        for run in self.runs:
            for setting in filter(None, run.settings):
                advice = f"{self.options.swept} changes the costs of run {run.number}; give each value its own --run"
                require(run.costs_of(setting) == run.costs, f"--sweep={self.options.sweep}: {advice}")

    def time_steps(self) -> list[float]:
        """The milliseconds per step of each run: the fastest of its timings, which are made in the order A B B A."""
        times = [[] for _ in self.runs]
        for number in range(ROUNDS):
            order = list(zip(self.runs, times, strict=True))
            for run, of_run in order if number % 2 == 0 else reversed(order):
                arguments = ["--eval_interval=0", *run.line(), "--seed=1", "--init_from=scratch"]
                of_run.append(measure(HERE, arguments, lines=TIMED_LINES, cwd=Path.cwd()))
                print(f"timing {number + 1} of {ROUNDS}, run {run.number}: {of_run[-1]:.2f} ms per step", flush=True)
        return [min(of_run) for of_run in times]  # other programs on the machine only slow a run down

    def stages(self) -> Iterator[list[tuple[Run, str, int]]]:
        """Yields the trainings that are left to do and can be made together, as (run, setting, seed). The trainings of
        a sweep with seed 1 come first, as the other seeds take its best settings."""
        left = []
        for seed in range(1, self.options.seeds + 1):
            if seed == 2 and self.options.sweep:
                yield left
                left = []
            every = [(run, setting) for setting in self.options.settings for run in self.runs]
            if seed > 1:
                every = [(run, run.best) for run in self.runs if run.best is not None]
            left += [(run, setting, seed) for run, setting in every if run.load(setting, seed)]
        yield left

    def show_commands(self):
        """Print the unfinished trainings as commands of a shell."""
        for note in match_notes(self.runs, self.options.match, self.stored["ms_per_step"]):
            print(f"# {note}")
        script = os.path.relpath(HERE / "train.py")
        for left in self.stages():
            for run, setting, seed in left:
                print(shlex.join(["python", script, *run.arguments(setting, seed)]))

    def train(self):
        """Make the unfinished trainings, at most --jobs at a time."""
        self.start, self.flops_done = time.monotonic(), 0.0
        self.line = tqdm(bar_format="{desc}", disable=None, leave=False, dynamic_ncols=True)  # on a terminal
        handlers = {number: signal.signal(number, self.stop) for number in SIGNALS}
        self.write()  # before the first training, so that another comparison never continues it
        for waiting in self.stages():
            running = []
            try:
                while waiting or running:
                    if self.stopped:
                        print("\nthe trainings in progress are saved; the same command continues", file=sys.stderr)
                        raise SystemExit(128 + self.stopped)
                    while waiting and len(running) < self.options.jobs:
                        running.append(Training(*waiting.pop(0)))
                    select.select([training.lines for training in running], [], [], 1)
                    for training in [each for each in running if each.poll()]:
                        running.remove(training)
                        self.finish(training, running)
                    at = [f"{each.name} at step {each.step} of {each.run.costs.steps}" for each in running]
                    self.line.set_description_str("; ".join([self.progress(running), *at]))
            finally:  # after a signal, trainings in progress save a checkpoint
                for training in running:
                    training.process.terminate()
                for training in running:
                    training.process.wait()
                    training.close()
        self.line.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def stop(self, number: int, frame):
        """Ask `train` to end. A second signal ends this process at once, and the trainings with it.

        An exception here could leave a lock of subprocess.Popen taken, for which `wait` would then wait for ever.
        """
        self.stopped = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    def finish(self, training: Training, running: list[Training]):
        """Read the figures of a training that has ended, and write the table."""
        run, key, failure = training.run, (training.setting, training.seed), training.failure()
        training.close()
        if missing := run.load(*key):
            run.errors[key] = failure or missing
            text = f"failed: {run.errors[key]}"
        else:
            training.step = run.costs.steps
            self.flops_done += run.costs.evaluation
            self.stored["measured"] = self.circumstances()
            text = f"loss {run.results[key]['loss']:.4f}, {run.results[key]['seconds']:.1f} s"
        self.flops_done += training.flops
        self.write()
        with self.line.external_write_mode():
            print(f"{training.name}: {text}; {self.progress(running)}", flush=True)

    def progress(self, running: list[Training]) -> str:
        """How many trainings are done, and the time left, which is estimated from their FLOPs."""
        total = len(self.options.settings) + self.options.seeds - 1  # of each run
        done = [len(run.results) + len(run.errors) for run in self.runs]
        work = [run.costs.flops + run.costs.evaluation for run in self.runs]
        left = sum(flops * (total - n) for flops, n in zip(work, done, strict=True))
        left -= sum(training.step / training.run.costs.steps * training.run.costs.flops for training in running)
        rate = (self.flops_done + sum(training.flops for training in running)) / (time.monotonic() - self.start)
        time_left = f", about {timedelta(seconds=round(left / rate))} left" if rate and left > 0 else ""
        return f"{sum(done)} of {total * len(self.runs)} trainings done{time_left}"

    def circumstances(self) -> str:
        """When and where a training has just ended."""
        facts = machine(resolve_device(self.runs[0].cfg.device))
        threads = os.environ.get("OMP_NUM_THREADS", facts["threads"])
        where = f"{facts['device']}, {threads} thread(s), torch {facts['torch']}, {self.options.jobs} at a time"
        return f"Measured on {datetime.now():%Y-%m-%d}: {where}."

    def rows(self) -> list[dict]:
        """The figures of each run, see `summary`."""
        return [summary(run, self.runs[0]) for run in self.runs]

    def write(self) -> str:
        """Write compare.json and compare.md; returns the text of the latter."""
        rows = self.rows()
        notes = [self.stored["measured"]] if self.stored["measured"] else []
        notes += ["Some trainings were made with other code than the first ones."] if self.changed else []
        notes += [f"All runs also have `{self.options.common}`."] if self.options.common else []
        evaluated = f"{self.options.eval_iters} batches" if self.options.eval_iters else "the whole set"
        notes += [f"Evaluations read {evaluated}."]
        notes += match_notes(self.runs, self.options.match, self.stored["ms_per_step"]) + row_notes(rows)
        text = markdown(rows, self.options.swept) + "".join(f"* {note}\n" for note in notes)
        self.store(self.stored | {"notes": notes, "runs": rows})
        (self.folder / "compare.md").write_text(text)
        return text


def compare(options: CompareConfig, texts: list[str]) -> Comparison:
    """Make the trainings that are left of a comparison, or print them. texts: the arguments of train.py of each run."""
    size = os.environ.get("WORLD_SIZE", "1")
    require(size == "1", f"WORLD_SIZE={size}: each training is a single process; start tools.compare without torchrun")
    with ExitStack() as cleanup:
        if not options.dry_run:
            try:
                cleanup.enter_context(locked(options.out))
            except ValueError as error:
                raise ValueError(str(error).replace("out_dir", "out")) from None
        if options.jobs > 1:
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // options.jobs)))
        comparison = Comparison(options, texts)
        comparison.match()
        if options.dry_run:
            comparison.show_commands()
        else:
            comparison.train()
            print(f"\n{comparison.write()}\nThe table is in {options.out}/compare.md and compare.json.", flush=True)
    return comparison
