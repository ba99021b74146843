"""What the commands of data/ share: flags, errors in one line, the training command to go on with. Imports no numpy."""

import argparse
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

DATA = Path(__file__).resolve().parent
LARGE = 10**8  # tokens, from which on GPT-2's own settings make sense


class Parser(argparse.ArgumentParser):
    """argparse's, whose errors are one line and exit code 2. The description is the first line of `doc`."""

    def __init__(self, doc: str):
        super().__init__(description=doc.splitlines()[0], allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        say(f"error: {message[:300]}; write flags as --name=value, --help lists them")
        raise SystemExit(2)


def out_folder(out: str) -> Path:
    """The folder that --out means: NAME is data/NAME, and whatever has a / is a path."""
    if not out.strip():
        raise ValueError(f"out={out!r} is no folder; pass a name (of a folder in data/) or a path with a /")
    path = os.path.expanduser(out)
    if path.startswith("~"):
        raise ValueError(f"out={out!r} begins with no user's home; pass the path in full, or ./ in front of it")
    return DATA / out if re.fullmatch(r"\w[\w.-]*", out) else Path(path)


def next_command(folder: Path, vocab_size: int, tokens: list[int]) -> str:
    """The command, typed in the repository's folder, that trains on a data set with this machine in minutes.

    `tokens` are the numbers of tokens of the splits. Only with a GPU and many tokens is it a run of days, GPT-2's.
    """
    folder, gpu = folder.resolve(), os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi")
    name = folder.name if folder.parent == DATA else str(folder)
    config, own, block_size = "train_pycode", "pycode", 256
    if gpu and tokens[0] >= LARGE:
        config, own, block_size = "train_gpt2", "openwebtext", 1024
    elif name == "shakespeare_char" and tokens[0] < 2_000_000:  # a larger text is not evaluated in a moment
        config, own, block_size = "train_shakespeare_char" if gpu else "train_shakespeare_cpu", name, 256 if gpu else 64
    flags = [f"config/{config}.py"]
    if name != own:
        flags += [f"--dataset={name}", f"--out_dir=out/{folder.name}"]
    if config == "train_pycode" and vocab_size > 2**14:  # so that the logits take no longer than the blocks
        flags.append(f"--batch_size={max(8 * 2**14 // vocab_size, 1)}")
    if min(tokens) <= block_size:
        flags.append(f"--block_size={2 ** ((min(tokens) - 1).bit_length() - 1)}")
    return shlex.join(["python", "train.py", *flags])


def say(line: str) -> None:
    """Prints one line on stderr, whatever it has in it."""
    print(" ".join(line.split()), file=sys.stderr)


def told(e: Exception) -> str:
    """The message of an error, with a remedy also where it comes from the system."""
    if not isinstance(e, OSError) or not e.strerror:
        return str(e)
    where = f"{e.filename}: " if e.filename else ""
    return f"{where}{e.strerror}; see to the path, its permissions and the room on its disk, then try again"


def run(main: Callable[[], int | None]) -> NoReturn:
    """Exits with main's code. An error is one line and exit code 2, Ctrl-C one and 130, a closed pipe silence and 1."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if sys.stdout:
            sys.stdout.reconfigure(errors="backslashreplace")  # a name need not be UTF-8
        try:
            code = main() or 0
        except SystemExit as e:
            code = e.code
        print(end="", flush=True)
    except BrokenPipeError:  # nobody reads on, as in `| head`
        code = 1
    except (ValueError, OSError) as e:
        say(f"error: {told(e)}")
        code = 2
    except KeyboardInterrupt:
        say("interrupted; the data are as they were, and the same command goes on or starts again")
        code = 130
    try:
        print(end="", flush=True)
    except OSError:  # a closed pipe or a full disk, which the exit would write to once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    raise SystemExit(code)
