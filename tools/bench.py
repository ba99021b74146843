"""Measures how fast this machine trains, decodes and loads data, and compares training runs and checkouts.

    python -m tools.bench                                                 # a table for this machine, 90 seconds
    python -m tools.bench --config=make-train --json                      # one configuration of it, as JSON
    python -m tools.bench --config=make-train --profile=out/trace.json    # where the time of a step goes
    python -m tools.bench config/train_shakespeare_cpu.py --max_iters=300
    python -m tools.bench --against=../nanoGPT --rounds=3 config/train_shakespeare_char.py --device=cpu ...
    python -m tools.bench --run=config/pycode_gpt2.py --run=config/pycode_llama.py --max_iters=60 --cooldown_iters=5
    python -m tools.bench --loader=openwebtext

Without arguments of train.py, the table has a row per configuration (CONFIGS in tools/speed.py) in the dtype of
--dtype=auto, and in float32 if that differs; then the speed of decoding, and of the loader on random tokens.
docs/running.md describes its columns. --profile writes a trace of three steps for Chrome or Perfetto.

With arguments of train.py, whole runs are timed. `python train.py` gets the arguments of each --run, followed by the
arguments behind the options. With --against, another checkout runs too, which must know these flags: one of superblock
does, and nanoGPT knows the flags that both have. The speed is computed from the times at which the lines "iter N:"
appear, so start-up and the first steps do not count. Set eval_interval above max_iters to leave evaluations out. Runs
alternate (A B C, then C B A), because the speed of a shared machine drifts. Quote the ratios, which compare runs of the
same round.

--loader reads batches of 64 x 1024 tokens from a data set that fits in memory, then as many in nanoGPT's way: with a
new memory map for each batch, and two copies of every sequence, as inputs and as targets.
"""

import argparse
import json
import shlex
import signal
import sys
from functools import partial
from pathlib import Path
from statistics import median

from data.command import Parser
from data.errors import command, require, user_errors
from tools.child import ROOT, measure, stop

RESERVED = ("--out_dir=", "--log_interval=")  # arguments of train.py that bench.py sets
COMPANIONS = {  # option -> the only options that go with it
    "loader": {"rounds"},
    "json": {"config"},
    "profile": {"config"},
    "config": {"json", "profile"},
}


def compare(checkouts: list[Path], runs: list[list[str]], names: list[str], rounds: int):
    """Prints the speed of each run in each checkout, and their speed relative to the first."""
    entries = [(checkout, name, run) for checkout in checkouts for name, run in zip(names, runs, strict=True)]
    times: list[list[float]] = [[] for _ in entries]
    for number in range(rounds):
        order = list(zip(entries, times, strict=True))
        for (checkout, name, run), of_run in order if number % 2 == 0 else reversed(order):
            of_run.append(measure(checkout, run))
            print(f"round {number + 1}: {checkout} {name}: {of_run[-1]:.2f} ms per step", flush=True)
    for (checkout, name, _), of_run in list(zip(entries, times, strict=True))[1:]:
        ratios = [b / a for a, b in zip(of_run, times[0], strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        than = f"{entries[0][0]} {entries[0][1]}"
        print(f"{checkout} {name}: {median(ratios):.3f} times as fast as {than} ({spread})", flush=True)


def read(argv: list[str] | None) -> tuple[argparse.Namespace, list[list[str]]]:
    """Parses the options and the arguments of each run of train.py. ValueError names a wrong one."""
    parser = Parser(__doc__)
    parser.add_argument("--against", help="folder of another checkout with a train.py")
    parser.add_argument("--run", action="append", help="arguments of one run; repeat the option to compare runs")
    parser.add_argument("--rounds", type=int, help="how often all runs are measured (default 3)")
    parser.add_argument("--loader", metavar="DATASET", help="measure the loader instead of training")
    parser.add_argument("--json", action="store_true", help="print the table's figures as one JSON object")
    parser.add_argument("--profile", metavar="FILE.json", help="write a trace of some steps instead of the table")
    parser.add_argument("--config", metavar="NAME", help="the only configuration of the table, or that of --profile")
    options, args = parser.parse_known_args(argv)
    given = {name for name, value in vars(options).items() if value not in (None, False)}
    for name, allowed in COMPANIONS.items():
        others = [f"--{other}" for other in sorted(given - allowed - {name})] + args
        require(name not in given or not others, f"--{name} does not go with {' '.join(others)}; leave one of them out")
    profile = options.profile is None or options.profile.endswith(".json")
    require(profile, f"--profile={options.profile} must be a .json file, such as out/trace.json")
    require(options.loader != "", "--loader= names no data set; give one, such as pycode")
    options.rounds = 3 if options.rounds is None else options.rounds
    require(1 <= options.rounds <= 1000, f"--rounds={options.rounds} must be at least 1 and at most 1000")
    if options.against is not None:
        there = options.against and (Path(options.against) / "train.py").is_file()
        require(there, f"--against={options.against} holds no train.py; give the folder of a checkout")
        options.against = Path(options.against).resolve()
    if options.loader or given <= {"json", "profile", "config"} and not args:
        return options, []
    runs, options.run = [], options.run or [""]
    for text in options.run:
        try:
            run = shlex.split(text) + args
        except ValueError as error:
            raise ValueError(f"--run={text}: {error}; correct its quotation marks") from None
        require(run, "there is nothing to train; give train.py's arguments, such as a config file and --max_iters=100")
        own = [arg for arg in run if arg.startswith(RESERVED)]
        require(not own, f"{' '.join(own)} is an argument that bench.py sets; leave it out")
        runs.append(run)
    return options, runs


def main(argv: list[str] | None = None):
    with user_errors():
        options, runs = read(argv)
        if runs:
            checkouts = [options.against] * bool(options.against) + [ROOT]
            return compare(checkouts, runs, options.run, options.rounds)
        from tools import speed  # here, because torch is slow to import

        if options.loader:
            for number in range(options.rounds):
                text = speed.loader_text(*speed.measure_loader(options.loader))
                print(f"round {number + 1}: {text}", flush=True)
        elif options.profile is not None:
            print(speed.write_trace(options.config or "make-train", Path(options.profile)))
        else:
            names = [options.config] if options.config is not None else list(speed.CONFIGS)
            report = speed.measure(names, (lambda line: None) if options.json else partial(print, flush=True))
            if options.json:
                print(json.dumps(report, indent=1))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if sys.stdout:
        sys.stdout.reconfigure(errors="replace")  # an argument may be no UTF-8
    command(main)
