"""Trains several models with several seeds, and writes a table of their losses, costs and speeds.

    python -m tools.compare --run=config/train_pycode.py --run="config/train_pycode.py --block=parallel" --seeds=3
    python -m tools.compare --run=... --run=... --sweep=learning_rate=1e-3,2e-3,4e-3 --match=flops --out=out/rates
    python -m tools.compare --run=... --run=... --dry_run=True             # prints the commands and starts nothing

Each --run holds arguments of train.py, and each training is an ordinary run of train.py in its own folder below --out.
The same command continues a comparison that was ended: it skips the trainings that are finished and resumes the others.
The table is printed, and written to compare.md and compare.json in --out. The exit code is 1 if a training failed.

Seed 1 of all runs is trained first, then seed 2, and so on, because the speed of a shared machine drifts. A sweep is
trained with seed 1; the best value of each run is then trained with the other seeds. --match says which cost all runs
have in common: the first run keeps its flags, and n_embd (for parameters) and then max_iters of the others follow, with
the schedule in proportion. docs/compare.md has the details, and describes the table.
"""

import signal
import sys

from configurator import parse
from data.errors import command, require, user_errors
from tools.child import stop
from tools.compare.trainings import SIGNALS, CompareConfig, compare


def main(argv: list[str] | None = None):
    argv = sys.argv[1:] if argv is None else argv
    with user_errors():
        for arg in argv:
            require(arg.startswith("-"), f"{arg} is an argument of train.py; write --run={arg}")
        options = parse(CompareConfig, argv, __doc__)
        texts = [arg.removeprefix("--run=") for arg in argv if arg.startswith("--run=")]
        require(texts, "--run is missing; give train.py's arguments, such as --run=config/train_pycode.py")
        if any(run.errors for run in compare(options, texts).runs):
            raise SystemExit(1)


if __name__ == "__main__":
    for number in SIGNALS:
        signal.signal(number, stop)
    command(main)
