"""Trains several models with several seeds, and writes a table of their losses, costs and speeds.

    python -m tools.compare --run=config/pycode_standard.py --run="config/pycode_standard.py --block=parallel" --seeds=3
    python -m tools.compare --run=... --run=... --sweep=learning_rate=1e-3,2e-3,4e-3 --match=flops --out=out/rates

Each --run holds arguments of train.py, and each training is an ordinary run of train.py in its own folder below --out.
The same command continues a comparison that was ended: it skips the trainings that are finished and resumes the others.
The table, which docs/hacking.md describes, is printed and written to --out. The exit code is 1 if a training failed.
"""

import os
import sys
from itertools import chain

import torch

from configurator import parse
from data.errors import command, printable, require, user_errors
from data.lock import locked
from tools.compare.trainings import CompareConfig, Comparison


def main(argv: list[str]):
    with user_errors():
        options = parse(CompareConfig, argv, __doc__)
        texts = [arg.removeprefix("--run=") for arg in argv if arg.startswith("--run=")]
        require(texts, "--run is missing; give train.py's arguments, such as --run=config/pycode_standard.py")
        require("WORLD_SIZE" not in os.environ, "WORLD_SIZE is set; start tools.compare without torchrun")
        if options.jobs > 1:
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // options.jobs)))
        with locked(options.out, "out"):
            comparison = Comparison(options, texts)
            comparison.match()
            comparison.train()
            print(f"\n{comparison.write()}\nIt is in {printable(options.out)}/compare.md and compare.json.", flush=True)
        return int(any(run.errors for run in chain.from_iterable(comparison.candidates)))


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), interruptible=True)  # so that the trainings are saved
