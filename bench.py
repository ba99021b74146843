"""Training speed of this checkout; of this and another one; of several runs against each other. Or the loader's.

    python bench.py config/train_shakespeare_cpu.py --max_iters=300
    python bench.py --against=../nanoGPT --rounds=3 config/train_shakespeare_char.py --device=cpu --compile=False ...
    python bench.py --run=config/pycode_gpt2.py --run=config/pycode_llama.py --max_iters=60 --cooldown_iters=5
    python bench.py --loader=openwebtext

The arguments behind the options go to `python train.py` as they are, with those of each --run in front of them. Another
checkout must know them too: one of superblock does, and nanoGPT knows the flags that we share. The speed is read from
the moments at which the lines "iter N:" appear, so start-up and the first steps do not count; an eval_interval above
max_iters keeps evaluations out. Runs alternate (A B C, then C B A), because a shared machine's speed drifts: quote the
ratios, which are taken within a round.

--loader reads batches of 64 x 1024 tokens of a data set that fits in memory, and the same number in nanoGPT's way: a
new memory map for each batch, of which every sequence is copied twice, as inputs and as targets.
"""

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

SKIP = 0.2  # of the steps, at the beginning: warm-up


def measure(checkout: Path, args: list[str]) -> float:
    """Milliseconds per step of one run of checkout/train.py. Its own error message goes to stderr; exit code 2."""
    marks: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as out_dir:
        command = [sys.executable, "-u", "train.py", *args, f"--out_dir={out_dir}/run", "--log_interval=10"]
        process = subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            if found := re.match(r"iter (\d+):", line):
                marks.append((int(found[1]), time.perf_counter()))
        process.wait()
    marks = marks[int(SKIP * len(marks)) :]
    if process.returncode or len(marks) < 2:
        print(
            f"error: {checkout}: {' '.join(command[2:])} gave no timings; see above, or raise --max_iters",
            file=sys.stderr,
        )
        raise SystemExit(2)
    (first, start), (last, end) = marks[0], marks[-1]
    return 1000 * (end - start) / (last - first)


def measure_loader(name: str, batches: int = 200) -> tuple[float, float]:
    """Million tokens per second of our loader and of nanoGPT's way, after a tenth as many batches to warm up."""
    from contextlib import closing

    import numpy as np
    import torch

    from data.loader import Loader
    from data.objective import Causal
    from data.shards import open_data

    B, T = 64, 1024
    data = open_data(name)
    stream = data.split("train")
    shard = max(stream.shards, key=len)

    def theirs() -> None:
        tokens = np.memmap(shard.path, shard.dtype, mode="r", offset=shard.offset, shape=(len(shard),))
        starts = torch.randint(len(tokens) - T, (B,))
        for first in (0, 1):
            torch.stack([torch.from_numpy(tokens[i + first : i + first + T].astype(np.int64)) for i in starts])

    speeds = []
    with closing(Loader(stream, Causal(data.vocab_size, data.eot, T), B)) as loader:
        for fetch in (loader.__next__, theirs):
            for number in range(-batches // 10, batches):
                if number == 0:
                    start = time.perf_counter()
                fetch()
            speeds.append(batches * B * T / (time.perf_counter() - start) / 1e6)
    return tuple(speeds)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--against", type=Path, help="folder of another checkout, with a train.py")
    parser.add_argument("--run", action="append", default=[], help="arguments of one run to compare; repeat it")
    parser.add_argument("--rounds", type=int, default=3, help="of all runs (default 3)")
    parser.add_argument("--loader", metavar="DATASET", help="measure the loader instead of training")
    options, args = parser.parse_known_args()
    if options.loader:
        for number in range(options.rounds):
            try:
                ours, theirs = measure_loader(options.loader)
            except ValueError as e:
                print(f"error: {e}", file=sys.stderr)
                raise SystemExit(2) from None
            print(f"round {number + 1}: {ours:.0f} Mtok/s, {theirs:.0f} in nanoGPT's way: {ours / theirs:.1f} times")
        return
    here = Path(__file__).parent
    checkouts = ([options.against] if options.against else []) + [here]
    entries = [(checkout, run) for checkout in checkouts for run in options.run or [""]]
    times: dict[tuple[Path, str], list[float]] = {entry: [] for entry in entries}
    for number in range(options.rounds):
        for checkout, run in entries if number % 2 == 0 else reversed(entries):
            times[checkout, run].append(measure(checkout, shlex.split(run) + args))
            print(f"round {number + 1}: {checkout} {run}: {times[checkout, run][-1]:.2f} ms per step", flush=True)
    first = times[entries[0]]
    for (checkout, run), of_run in list(times.items())[1:]:
        ratios = [b / a for a, b in zip(of_run, first, strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"{checkout} {run}: {median(ratios):.3f} times as fast as {entries[0][0]} {entries[0][1]} ({spread})")


if __name__ == "__main__":
    main()
