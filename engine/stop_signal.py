"""SIGTERM and SIGINT ask a run to stop, and all ranks stop after the same step.

    with StopSignal(ranks) as stop:
        while not stop.agreed():
            ...                             # one step
            stop.unsaved_steps = True       # from now on a signal lets the run save first
        stop.finish()                       # before the process group ends

A second signal ends the process at once. So does the first one while there are no unsaved steps.
"""

import os
import signal
import sys
import threading
from contextlib import suppress

import torch
import torch.distributed as dist

STOPPING = "stopping after this step; press Ctrl-C again to quit now"
STOPPED = "stopped at once: nothing was computed that is not saved"


class StopSignal:
    """A context manager that catches SIGTERM and SIGINT. Every rank makes one."""

    def __init__(self, ranks):
        self.name = ""  # of the first signal that this process has caught
        self.unsaved_steps = False
        self.size = ranks.size
        self.speaks = ranks.first
        self.reduction = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._catch)
        reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        signal.set_wakeup_fd(self.writer)
        self.thread = threading.Thread(target=self._answer, args=(reader,), daemon=True)
        self.thread.start()

    def _catch(self, number: int, frame):
        """Remember the signal, and give it back its default action, so that a second one ends the process."""
        self.name = self.name or signal.Signals(number).name
        # The other signal keeps its handler: if both have come at once, Python would print a traceback.
        signal.signal(number, signal.SIG_DFL)

    def _answer(self, reader: int):
        """Tell the user at once that a signal has come. This runs in a thread of its own, because the main thread calls
        `_catch` only after its current operation, which may be a long backward pass."""
        asked = False
        while number := os.read(reader, 1):
            if self.speaks and not asked:
                erase = "\r\x1b[K" if sys.stderr.isatty() else ""  # the progress bar
                text = STOPPING if self.unsaved_steps else STOPPED
                with suppress(OSError):
                    os.write(sys.stderr.fileno(), f"{erase}{text}\n".encode())
            if asked or not self.unsaved_steps:
                os._exit(128 + number[0])
            asked = True
        os.close(reader)

    def agreed(self) -> bool:
        """Whether all ranks stop here. Every rank calls it equally often, and gets the same answer in the same call.
        The ranks exchange in one call whether a signal has come, and read the result in the next call. So the exchange
        overlaps with the computation, and the answer is True in the call after the one that follows the signal."""
        if self.size == 1:
            return bool(self.name)
        stop = False
        if self.reduction is not None:
            self.reduction.wait()
            stop = bool(self.flag)
        self.flag = torch.tensor([float(bool(self.name))])  # on the CPU: the host never waits for the GPU here
        self.reduction = dist.all_reduce(self.flag, op=dist.ReduceOp.MAX, async_op=True)
        return stop

    def drain(self) -> bool:
        """Whether all ranks stop here because of any signal so far. Every rank calls it, after a long operation. The
        first call of `agreed` reads what the ranks exchanged before the operation, the second what came during it."""
        return self.agreed() or self.agreed()

    def finish(self):
        """Wait for the last exchange. To be called before the process group ends."""
        if self.reduction is not None:
            self.reduction.wait()

    def __enter__(self) -> "StopSignal":
        return self

    def __exit__(self, *error):
        signal.set_wakeup_fd(-1)
        os.close(self.writer)
        self.thread.join(10)  # on a busy machine a run can end before the thread has said what it is there for
