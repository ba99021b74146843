"""Measures how fast this machine trains, and compares training runs and checkouts.

    python -m tools.bench config/train_pycode.py --max_iters=60 --cooldown_iters=5
    python -m tools.bench --against=../nanoGPT config/train_shakespeare_char.py --device=cpu ...
    python -m tools.bench --run=config/pycode_gpt2.py --run=config/pycode_llama.py --max_iters=60 --cooldown_iters=5

`python train.py` gets the arguments of each --run, then all that are no flags of tools.bench, then an --out_dir and a
--log_interval of tools.bench. With --against, another checkout runs too, which must know these flags. Start-up and the
first steps do not count. Runs alternate (A B C, then C B A), because the speed of a shared machine drifts. Quote the
ratios, which compare runs of the same round.
"""

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

from configurator import parse
from data.errors import command, require, user_errors
from flags import Flags
from tools.training_process import ROOT, measure, words_of


@dataclass
class BenchConfig(Flags):
    # --- bench
    run: str = ""  # arguments of train.py; repeat the flag to compare runs
    against: str = ""  # folder of another checkout with a train.py, such as ../nanoGPT
    rounds: int = 3  # [>0] how often each run is measured


def read(argv: list[str]) -> tuple[BenchConfig, list[tuple[str, list[str]]]]:
    """The flags; and the text of each --run with all arguments of its train.py."""
    names = {f"--{field.name}" for field in fields(BenchConfig)} | {"-h", "--help"}
    own = [arg for arg in argv if arg.partition("=")[0] in names]
    shared = [arg for arg in argv if arg not in own]
    cfg = parse(BenchConfig, own, __doc__)
    texts = [arg.removeprefix("--run=") for arg in own if arg.startswith("--run=")]
    runs = []
    for text in texts or [""]:
        run = words_of("run", text) + shared
        require(run, "there is nothing to train; give train.py's arguments, such as a config file and --max_iters=100")
        runs.append((text, run))
    return cfg, runs


def compare(checkouts: list[Path], runs: list[tuple[str, list[str]]], rounds: int):
    """Prints the speed of each run in each checkout, and their speed relative to the first."""
    entries = [(f"{checkout} {text}", checkout, run) for checkout in checkouts for text, run in runs]
    times = {entry[0]: [] for entry in entries}
    for number in range(1, rounds + 1):
        for name, checkout, run in entries:
            times[name].append(measure(checkout, run))
            print(f"round {number}: {name}: {times[name][-1]:.2f} ms per step", flush=True)
        entries.reverse()
    (first, of_first), *others = times.items()
    for name, of_run in others:
        ratios = [b / a for a, b in zip(of_run, of_first, strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"{name}: {median(ratios):.3f} times as fast as {first} ({spread})", flush=True)


def main(argv: list[str] | None = None):
    with user_errors():
        cfg, runs = read(sys.argv[1:] if argv is None else argv)
        checkouts = [ROOT]
        if cfg.against:
            checkouts.insert(0, Path(cfg.against).resolve())
        compare(checkouts, runs, cfg.rounds)


if __name__ == "__main__":
    command(main, interruptible=True)  # so that the child and its folder go
