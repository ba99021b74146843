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
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import torch

from data.errors import require
from data.files import writing
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
        for name, least, most in (("seeds", 1, MOST_SEEDS), ("jobs", 1, 1000), ("eval_iters", 0, 2**31 - 1)):
            value = getattr(self, name)
            require(least <= value <= most, f"{name}={value} must be at least {least} and at most {most}")
        require(self.out.strip(), f"out={self.out!r} must be a folder, such as out/compare")
        name, _, values = self.sweep.partition("=")
        values = values.split(",")
        good = not self.sweep or name and all(values) and len(set(values)) == len(values) > 1
        require(good, f"sweep={self.sweep} must be a flag and two or more values, such as learning_rate=1e-3,2e-3")

    @property
    def swept(self) -> str:
        """The flag that is swept, "" if none is."""
        return self.sweep.partition("=")[0]

    @property
    def settings(self) -> list[str]:
        """The settings of the sweep, such as learning_rate=1e-3; one empty setting without a sweep."""
        return [f"{self.swept}={value}" for value in self.sweep.partition("=")[2].split(",")] if self.sweep else [""]


# ---------------------------------------------------------------------------------------------------------------------
# All runs


class Training:
    """A process of train.py, and the steps that it has logged."""

    def __init__(self, run: Run, setting: str, seed: int):
        self.run, self.setting, self.seed, self.first, self.step = run, setting, seed, None, 0
        self.exit = ExitStack()
        arguments = [sys.executable, "-u", str(HERE / "train.py"), *run.arguments(setting, seed)]
        self.child = self.exit.enter_context(Child(arguments, Path.cwd()))
        self.name = " ".join(filter(None, (f"run {run.number}", setting, f"seed {seed}")))

    def poll(self) -> bool:
        """Read the output that is there; returns whether the process has ended."""
        ended, pipe = self.child.process.poll() is not None, self.child.lines.fileno()
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
        self.stored["measured"], self.changed = None, False
        self.stored["code"] = hashlib.sha256(b"".join(file.read_bytes() for file in CODE)).hexdigest()
        path = self.folder / "compare.json"
        if path.is_file():
            try:
                old = json.loads(path.read_text())
                names = {"match": "match", "eval_iters": "eval_iters", "flags": "run"}  # a later call needs the same
                same = {flag: old[name] == self.stored[name] for name, flag in names.items()}
                self.stored["ms_per_step"] = old["ms_per_step"]
                self.stored["measured"] = old.get("measured")
                self.changed = old.get("code", self.stored["code"]) != self.stored["code"]
                times = old["ms_per_step"] or []
                require(all(1e-9 < ms < 1e9 for ms in times) and len(times) in (0, len(texts)), "these are no timings")
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ValueError(f"{path} is damaged; delete --out={options.out}, or choose another folder") from None
            for name in same:
                advice = "choose another --out, or delete this folder"
                require(same[name], f"--out={options.out} holds a comparison with another --{name}; {advice}")
            if self.changed:
                self.stored["code"] = old["code"]  # so that later calls say it too
                text = f"warning: the code has changed since trainings in --out={options.out}; to repeat them, {advice}"
                print(text, file=sys.stderr)

    def store(self, content: dict):
        """Write compare.json atomically, and make its folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / "compare.tmp"
        with writing(self.folder / "compare.json"):
            temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(self.folder / "compare.json")

    def match(self):
        """Adapt the other runs to the first."""
        first, *others = self.runs
        kind = self.options.match.split(",")
        if "parameters" in kind:
            for run in others:
                run.match_parameters(first.costs.parameters)
        if "seconds" in kind and not self.stored["ms_per_step"] and not self.options.dry_run:
            self.stored["ms_per_step"] = self.time_steps()
            self.store(self.stored)  # later calls take the same number of steps
        times = self.stored["ms_per_step"]
        for run in others:
            if "seconds" in kind:
                run.match_steps(first.costs.steps * times[0] / times[run.number - 1] if times else run.costs.steps)
            elif "flops" in kind:
                run.match_steps(first.costs.flops / (run.costs.tokens_per_step * run.costs.flops_per_token))
            else:
                run.match_steps(first.costs.tokens / run.costs.tokens_per_step)
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

    def unfinished(self, seeds: range) -> list[tuple[Run, str, int]]:
        """The trainings that are left to do with these seeds, as (run, setting, seed). Seed 1 has those of a sweep."""
        every = []
        for seed in seeds:
            for setting in self.options.settings if seed == 1 else [None]:
                every += [(run, run.best if setting is None else setting, seed) for run in self.runs]
        return [training for training in every if training[1] is not None and training[0].load(*training[1:])]

    def stages(self) -> list[range]:
        """The seeds that can be trained together: the best settings are known after seed 1."""
        seeds = range(1, self.options.seeds + 1)
        return [seeds[:1], seeds[1:]] if self.options.sweep else [seeds]

    def show_commands(self):
        """Print the unfinished trainings as commands of a shell."""
        for note in match_notes(self.runs, self.options.match, self.stored["ms_per_step"]):
            print(f"# {note}")
        script = os.path.relpath(HERE / "train.py")
        for seeds in self.stages():
            for run, setting, seed in self.unfinished(seeds):
                print(shlex.join(["python", script, *run.arguments(setting, seed)]))

    def train(self):
        """Make the unfinished trainings, at most --jobs at a time."""
        self.start, self.flops_done = time.monotonic(), 0.0
        handlers = {number: signal.signal(number, self.stop) for number in SIGNALS}
        self.write()  # before the first training, so that another comparison never continues it
        for seeds in self.stages():
            waiting, running = self.unfinished(seeds), []
            try:
                while waiting or running:
                    if self.stopped:
                        print("\nthe trainings in progress are saved; the same command continues", file=sys.stderr)
                        raise SystemExit(128 + self.stopped)
                    while waiting and len(running) < self.options.jobs:
                        running.append(Training(*waiting.pop(0)))
                    select.select([training.child.lines for training in running], [], [], 1)
                    for training in [each for each in running if each.poll()]:
                        running.remove(training)
                        self.finish(training, running)
                    self.show_progress(running)
            finally:  # after a signal, trainings in progress save a checkpoint
                for training in running:
                    training.child.process.terminate()
                for training in running:
                    training.child.process.wait()
                    training.exit.close()
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
        run, key, failure = training.run, (training.setting, training.seed), training.child.failure()
        training.exit.close()
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
        erase = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{erase}{training.name}: {text}; {self.progress(running)}", flush=True)

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

    def show_progress(self, running: list[Training]):
        """Redraw the line of progress, if stderr is a terminal."""
        if sys.stderr.isatty():
            at = [f"{training.name} at step {training.step} of {training.run.costs.steps}" for training in running]
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            text = "; ".join([self.progress(running), *at])[: columns - 1]
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

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
