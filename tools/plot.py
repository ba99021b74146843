"""Draw the curves of training runs, from their metrics.jsonl.

    python -m tools.plot out/pycode                                         # the training loss against tokens
    python -m tools.plot out/pycode --y=loss,val_loss --smooth=5 --out=loss.svg
    python -m tools.plot out/a out/b out/c --y=val_loss --x=seconds --ymax=3
    python -m tools.plot out/compare                                        # the differences that tools.compare found

The legend names the flags in which the runs differ. Runs that differ only in the seed are one line, their mean, and a
band from the smallest to the largest value. The colours can be read on white and on black.
"""

from pathlib import Path

from configurator import parse_positional
from data.errors import command, require, user_errors
from tools.curves import PlotConfig, draw, read_run, require_matplotlib, save
from tools.intervals import draw_intervals


def main(argv: list[str] | None = None):
    with user_errors():
        folders, cfg = parse_positional(PlotConfig, argv, __doc__)
        require(folders, "expected the folders of one or more runs, not nothing; --help says more")
        require_matplotlib()
        out = Path(cfg.out or f"{folders[0]}/plot.png").expanduser()
        if (Path(folders[0]).expanduser() / "compare.json").is_file():
            require(len(folders) == 1, f"{folders[0]} is a comparison of tools.compare; draw it alone")
            figure = draw_intervals(folders[0])
        else:
            runs = [read_run(folder) for folder in dict.fromkeys(folders)]
            figure = draw(cfg, runs)
        save(figure, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    command(main)
