"""Shared by the commands of data/: flags, how they run, the training command to run next. Imports no numpy."""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from data import DATA
from data.errors import command, require, say

CONFIGS = {  # data set -> the config file that trains on it, and its block_size
    "pycode": ("train_pycode", 256),
    "shakespeare_char": ("train_shakespeare_cpu", 64),
    "numbers": ("numbers_seq2seq", 256),
    "openwebtext": ("train_gpt2", 1024),
}


class Parser(argparse.ArgumentParser):
    """An argparse parser that describes itself by `doc`. It raises ValueError for wrong arguments, of one line. The
    scripts in a folder `here` have --out, by default this folder."""

    def __init__(self, doc: str, here: str = ""):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(usage=argparse.SUPPRESS, description=doc, formatter_class=raw, allow_abbrev=False)
        if here:
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
        return Path(os.path.expanduser(out))
    return DATA / out


def next_command(folder: Path, tokens: list[int], pairs: bool = False) -> str:
    """The command that trains on a data set in minutes, or GPT-2's run on OpenWebText. `tokens` are the numbers of
    tokens of the splits; windows of pairs may be longer."""
    folder = folder.resolve()
    name = str(folder)
    if folder.parent == DATA:
        name = folder.name
    config, block_size = CONFIGS.get(name, CONFIGS["pycode"])
    flags = [f"config/{config}.py"]
    if name not in CONFIGS:
        flags += [f"--dataset={name}", f"--out_dir=out/{folder.name}"]
    if min(tokens) <= block_size and not pairs:
        flags.append(f"--block_size={min(tokens) - 1}")
    return shlex.join(["python", "train.py", *flags])


def run(main: Callable[[], int | None]) -> NoReturn:
    """Runs the main function of a command of data/. What it raises is an error of its user; it answers Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # not as during the imports

    def answering() -> int | None:
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name may be invalid UTF-8
        try:
            return main()
        except KeyboardInterrupt:
            say("interrupted; the data are unchanged, and the same command continues or starts again")
            raise

    command(answering, (ValueError, OSError))
