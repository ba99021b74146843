"""Training speed of this checkout, or of this and another one in turn.

    python bench.py config/train_shakespeare_cpu.py --max_iters=300
    python bench.py --against=../nanoGPT --rounds=3 config/train_shakespeare_char.py --device=cpu --compile=False ...

The arguments behind the options go to `python train.py` of each checkout as they are, so both must know them: another
checkout of superblock does, and nanoGPT knows the flags that we share. A checkout's speed is read from the moments at
which its lines "iter N:" appear, so start-up and the first steps do not count; an eval_interval above max_iters keeps
evaluations out. Runs alternate (A B, then B A), because a shared machine's speed drifts: quote the ratio.
"""

import argparse
import re
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="folder of the other checkout, with a train.py")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each checkout (default 3)")
    options, args = parser.parse_known_args()
    here = Path(__file__).parent
    checkouts = [here] + ([options.against] if options.against else [])
    times: dict[Path, list[float]] = {checkout: [] for checkout in checkouts}
    for number in range(options.rounds):
        for checkout in checkouts if number % 2 == 0 else reversed(checkouts):
            times[checkout].append(measure(checkout, args))
            print(f"round {number + 1}: {checkout}: {times[checkout][-1]:.2f} ms per step", flush=True)
    if options.against:
        ratios = [b / a for a, b in zip(*times.values(), strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"{here} is {median(ratios):.3f} times as fast as {options.against} ({spread})")


if __name__ == "__main__":
    main()
