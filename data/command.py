"""Shared by the commands of data/: flags, how they run, the training command to run next. Imports no numpy."""

import argparse
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from data import DATA
from data.errors import command, require, say

LARGE = 10**8  # tokens of training data, from which GPT-2's own settings make sense


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


def ready_tokenizer(kind: str) -> str:
    """The type of a flag --tokenizer without the kinds that are built from the texts, char and bpe."""
    if kind not in ("byte", "gpt2") and not kind.startswith("hf:"):
        raise argparse.ArgumentTypeError(f"{kind[:80]!r} is not byte, gpt2 or hf:DIR")
    return kind


def out_folder(out: str) -> Path:
    """The folder of --out: NAME means data/NAME, and anything with a / is a path."""
    require(out.strip(), f"out={out!r} is not a folder; pass a name (of a folder in data/) or a path with a /")
    path = os.path.expanduser(out)
    at_home = path.startswith("~")
    require(not at_home, f"out={out!r} does not begin with a user's home; pass the full path, or ./ in front of it")
    require(out not in (".", ".."), f"out={out!r} is not a name; write a path with a /, such as ./data_of_mine")
    return Path(path) if "/" in path else DATA / out


def next_command(folder: Path, vocab_size: int, tokens: list[int], pairs: bool = False) -> str:
    """The command that trains on a data set in minutes on this machine, or with a GPU and LARGE tokens GPT-2's run,
    which takes days. `tokens` are the numbers of tokens of the splits; windows of pairs may be longer."""
    folder, gpu = folder.resolve(), os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi")
    name = folder.name if folder.parent == DATA else str(folder)
    config, own, block_size = "train_pycode", "pycode", 256
    if gpu and tokens[0] >= LARGE:
        config, own, block_size = "train_gpt2", "openwebtext", 1024
    elif name == "shakespeare_char" and tokens[0] < 2_000_000:  # a larger text takes long to evaluate
        config, own, block_size = "train_shakespeare_char" if gpu else "train_shakespeare_cpu", name, 256 if gpu else 64
    elif name == "numbers":
        config, own = "numbers_seq2seq", name
    flags = [f"config/{config}.py"]
    if name != own:
        flags += [f"--dataset={name}", f"--out_dir=out/{folder.name}"]
    if config == "train_pycode" and vocab_size > 2**14:  # so that the logits cost no more than the blocks
        flags.append(f"--batch_size={max(8 * 2**14 // vocab_size, 1)}")
    if min(tokens) <= block_size and not pairs:
        flags.append(f"--block_size={2 ** ((min(tokens) - 1).bit_length() - 1)}")
    return shlex.join(["python", "train.py", *flags])


def run(main: Callable[[], int | None]) -> NoReturn:
    """Runs the main function of a command of data/. What it raises is an error of its user; it answers Ctrl-C."""

    def answering() -> int | None:
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name may be invalid UTF-8
        try:
            return main()
        except KeyboardInterrupt:
            say("interrupted; the data are unchanged, and the same command continues or starts again")
            raise

    signal.signal(signal.SIGINT, signal.default_int_handler)
    command(answering, (ValueError, OSError))
