"""A process that ends with its parent, or after a time limit, and that reports its failure in one line.

with Child([sys.executable, "train.py", ...], cwd, seconds=60) as run:
    for line in run.lines:
        ...
    print(run.failure() or "success")
"""

import ctypes
import os
import signal
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

LIBC = ctypes.CDLL(None)


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
