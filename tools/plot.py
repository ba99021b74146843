"""Draw the curves of training runs, from their metrics.jsonl.

    python -m tools.plot out/pycode                                         # the training loss against tokens
    python -m tools.plot out/pycode --y=loss,val_loss --smooth=5 --out=loss.svg
    python -m tools.plot out/a out/b out/c --y=val_loss --x=seconds         # several runs
    python -m tools.plot out/a out/b --log=x --ymax=2 --out=loss.pdf
    python -m tools.plot out/sas --gains=True                               # the learned gains of simplified blocks

The legend names the flags in which the runs differ. Runs that differ only in the seed are one line, their mean, and a
band from the smallest to the largest value. A logged step is one batch, so its loss is noisy; --smooth=N draws the mean
of N consecutive logged steps. Evaluations are not smoothed.

The picture is transparent, and its colours can be read on white and on black. matplotlib is needed: pip install -e
.[plots]
"""

import sys
from pathlib import Path

from configurator import parse
from data.errors import command, require, user_errors
from tools.curves import AXES, PlotConfig, curves, draw, gain_panels, read_run, require_matplotlib, save, y_label


def main(argv: list[str] | None = None):
    argv = sys.argv[1:] if argv is None else argv
    with user_errors():
        cfg = parse(PlotConfig, [each for each in argv if each.startswith("-")], __doc__)
        folders = list(dict.fromkeys(each for each in argv if not each.startswith("-")))
        advice = "name the out_dir of one or more runs, such as python -m tools.plot out/pycode"
        require(folders, f"no run is given; {advice}")
        require_matplotlib()
        if cfg.gains:
            panels, labels = gain_panels(folders), ("layer", "learned gain")
        else:
            panels = {"": curves(cfg, [read_run(folder) for folder in folders])}
            labels = AXES[cfg.x], y_label(cfg)
        save(draw(panels, *labels, cfg), cfg.out)
    print(f"wrote {Path(cfg.out).expanduser()}")


if __name__ == "__main__":
    command(main)
