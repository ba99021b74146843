"""Draw the curves of training runs, from their metrics.jsonl.

    python -m tools.plot out/pycode                                         # the training loss against tokens
    python -m tools.plot out/pycode --y=loss,val_loss --smooth=5 --out=loss.svg
    python -m tools.plot out/a out/b out/c --y=val_loss --x=seconds --ymax=3

The legend names the flags in which the runs differ. Runs that differ only in the seed are one line, their mean, and a
band from the smallest to the largest value. The colours can be read on white and on black.
"""

import sys
from pathlib import Path

from configurator import parse
from data.errors import command, require, user_errors
from tools.curves import PlotConfig, curves, draw, read_run, require_matplotlib, save


def main(argv: list[str] | None = None):
    argv = sys.argv[1:] if argv is None else argv
    with user_errors():
        cfg = parse(PlotConfig, [each for each in argv if each.startswith("-")], __doc__)
        folders = list(dict.fromkeys(each for each in argv if not each.startswith("-")))
        require(folders, "no run is given; name the out_dir of a run, such as python -m tools.plot out/pycode")
        require_matplotlib()
        save(draw(curves(cfg, [read_run(folder) for folder in folders]), cfg), cfg.out)
    print(f"wrote {Path(cfg.out).expanduser()}")


if __name__ == "__main__":
    command(main)
