"""Shared by the commands of data/: flags, how they run, the training command to run next."""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from data import DATA
from data.errors import command, require, say
from data.files import user_path

CONFIGS = {  # data set -> the config file that trains on it
    "pycode": "train_pycode",
    "shakespeare_char": "train_shakespeare_cpu",
    "numbers": "numbers_seq2seq",
    "openwebtext": "train_gpt2",
}


class Parser(argparse.ArgumentParser):
    """An argparse parser that describes itself by `doc`. It raises ValueError for wrong arguments, of one line. It has
    --out, by default the script's folder, `here`."""

    def __init__(self, doc: str, here: str):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(usage=argparse.SUPPRESS, description=doc, formatter_class=raw, allow_abbrev=False)
        self.add_argument("--out", default=here, help="NAME (data/NAME) or a path with a / (default: this folder)")

    def print_help(self, file=None):
        print(self.format_help(), end="", flush=True)  # argparse would keep silent about a full disk

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message[:300]}; write flags as --name=value, --help lists them")


def out_folder(out: str) -> Path:
    """The folder of --out: NAME means data/NAME, and anything with a / is a path."""
    known = out.strip() not in ("", ".", "..") and "://" not in out
    require(known, f"out={out!r} is no folder; pass a name (of a folder in data/) or a path with a /")
    if "/" in out:
        return user_path(out)
    return DATA / out


def next_command(folder: Path) -> str:
    """The command that trains on a data set in minutes, or GPT-2's run on OpenWebText."""
    folder = folder.resolve()
    name = str(folder)
    if folder.parent == DATA:
        name = folder.name
    flags = [f"config/{CONFIGS.get(name, 'train_pycode')}.py"]
    if name not in CONFIGS:
        flags += [f"--dataset={name}", f"--out_dir=out/{folder.name}"]
    return shlex.join(["python", "train.py", *flags])


def run(main: Callable[[], int | None]) -> NoReturn:
    """Runs the main function of a command of data/. What it raises is an error of its user; it answers Ctrl-C."""

    def answering() -> int | None:
        try:
            return main()
        except KeyboardInterrupt:
            say("interrupted; the data are unchanged, and the same command continues or starts again")
            raise

    command(answering, (ValueError, OSError))
