"""A process that ends with its parent and reports its failure in one line, and the speed of train.py in one."""

import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from data.lock import temporary_folder

ROOT = Path(__file__).resolve().parents[1]  # this checkout
TEMPORARY = Path(tempfile.gettempdir(), "superblock-")  # beginning of the folders of timings
LIBC = ctypes.CDLL(None)
WARMUP = 0.2  # fraction of the timings, at the beginning, that is ignored


def kill_with_parent():
    """Called in a child process: asks Linux to kill it when its parent ends, even if the parent is killed."""
    if hasattr(LIBC, "prctl"):
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Child(AbstractContextManager):
    """A context of a process in its own group, which is killed at the block's end. It begins with `start`: if a signal
    raises an exception before the block, there is only a shell that waits, and ends with this process."""

    def __init__(self, command: list[str], cwd: Path):
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            ["sh", "-c", 'read line && exec "$@"', "sh", *command], cwd=cwd, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.errors, text=True, errors="replace",
            start_new_session=True, preexec_fn=kill_with_parent,
        )  # fmt: skip
        self.lines = self.process.stdout

    def __exit__(self, *_):
        with self.process, self.errors:  # which waits for the end
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def start(self):
        print(file=self.process.stdin, flush=True)

    def failure(self) -> str:
        """Waits for the end. Returns "" on success, else the last error or line on stderr, or the exit code."""
        code = self.process.wait()
        if code == 0:
            return ""
        self.errors.seek(0)
        said = [line for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        last = (errors or said or [f"exit code {code}"])[-1][:500]  # torchrun says more after an error
        return f"{signal.Signals(-code).name}: {last}" if code < 0 else last


def words_of(flag: str, text: str) -> list[str]:
    """The arguments in the value of a flag, as a shell splits them."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"--{flag}={text}: {error}; correct its quotation marks") from None


def measure(checkout: Path, args: list[str], lines: int | None = None, cwd: Path | None = None) -> float:
    """Runs checkout/train.py, up to `lines` lines "iter N:", and returns milliseconds per step. ValueError if it failed
    or printed too few. Relative paths in args begin in the folder cwd, by default the checkout."""
    marks = []
    failure = ""
    with temporary_folder(TEMPORARY) as folder:
        script = str(Path(checkout).resolve() / "train.py")
        command = [sys.executable, "-u", script, *args, f"--out_dir={folder}/run", "--log_interval=10"]
        with Child(command, cwd or checkout) as run:
            run.start()
            for line in run.lines:
                if found := re.match(r"iter (\d+):", line):
                    marks.append((int(found[1]), time.perf_counter()))
                    if len(marks) == lines:
                        break
            else:
                failure = run.failure()
    marks = marks[int(WARMUP * len(marks)) :]
    if len(marks) < 2:
        failure = failure or "printed fewer than two timings after its first steps; raise --max_iters"
    if failure:
        raise ValueError(f"{checkout}: python train.py {' '.join(args)}: {failure}")
    (first, start), (last, end) = marks[0], marks[-1]
    return 1000 * (end - start) / (last - first)
