"""A process that ends with its parent, or after a time limit, and that reports its failure in one line.

with Child([sys.executable, "train.py", ...], cwd, seconds=60) as run:
    for line in run.lines:
        ...
    print(run.failure() or "success")
ms = measure(checkout, ["config/train_pycode.py"])    # the speed of train.py in such a process
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # this checkout
LIBC = ctypes.CDLL(None)
WARMUP = 0.2  # fraction of the timings, at the beginning, that is ignored


def kill_with_parent():
    """Called in a child process: asks Linux to kill it when its parent ends, even if the parent is killed."""
    if hasattr(LIBC, "prctl"):
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Child:
    """A context of a process in its own group. The whole group is killed at the block's end, or after `seconds`."""

    def __init__(self, command: list[str], cwd: Path, seconds: float | None = None):
        self.seconds, self.timed_out, self.errors = seconds, False, tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=self.errors, text=True, errors="replace",
            start_new_session=True, preexec_fn=kill_with_parent,
        )  # fmt: skip
        self.lines = self.process.stdout
        self.timer = threading.Timer(seconds or threading.TIMEOUT_MAX, self.time_out)
        self.timer.daemon = True
        self.timer.start()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_):
        self.timer.cancel()
        self.kill()
        self.process.wait()
        self.lines.close()
        self.errors.close()

    def time_out(self):
        self.timed_out = True
        self.kill()

    def kill(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def failure(self) -> str:
        """Waits for the end. Returns "" on success, else the cause and the last line of stderr, or its last error."""
        code = self.process.wait()
        self.errors.seek(0)
        said = [line for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]
        said = [line for line in said if line.startswith("error: ")] or said  # torchrun says more after an error
        last = said[-1].removeprefix("error: ")[:500] if said and not self.timed_out else ""
        how = f"time limit of {self.seconds} s" if self.timed_out else signal.Signals(-code).name if code < 0 else ""
        return ": ".join(filter(None, (how, last))) or f"exit code {code}" if code else ""


def stop(number: int, frame):
    """A handler of signals: exits so that the child is killed and its folder removed."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def measure(
    checkout: Path, args: list[str], seconds: float | None = None, lines: int | None = None, cwd: Path | None = None
) -> float:
    """Runs checkout/train.py and returns milliseconds per step.

    Relative paths in args begin in the folder cwd, by default the checkout. The run is ended after `seconds`, or after
    `lines` lines "iter N:". ValueError if it failed or printed too few.
    """
    marks: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(checkout).resolve() / "train.py")
        command = [sys.executable, "-u", script, *args, f"--out_dir={folder}/run", "--log_interval=10"]
        with Child(command, cwd or checkout, seconds) as run:
            for line in run.lines:
                if found := re.match(r"iter (\d+):", line):
                    marks.append((int(found[1]), time.perf_counter()))
                    if len(marks) == lines:
                        break
            failure = "" if len(marks) == lines else run.failure()
    marks = marks[int(WARMUP * len(marks)) :]
    if len(marks) < 2 or failure and not run.timed_out:
        why = failure or "printed fewer than two timings after its first steps; raise --max_iters"
        raise ValueError(f"{checkout}: python train.py {' '.join(args)}: {why}")
    (first, start), (last, end) = marks[0], marks[-1]
    return 1000 * (end - start) / (last - first)
