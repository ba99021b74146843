"""Signals ask a run to stop, and all ranks stop after the same step.

A second SIGTERM or SIGINT, after the line that answers the first one, ends the process at once. So does any signal
before the first step, when nothing is lost. Other signals come twice without anybody's hurry: a terminal that is closed
sends SIGHUP by its shell and by the kernel, which torchrun passes on as SIGHUP and SIGTERM.
"""

import os
import signal
import sys
from contextlib import suppress

import torch
import torch.distributed as dist

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
STOPPING = "stopping after this step; press Ctrl-C again to quit now"


class StopSignal:
    """What has come of the signals STOPS. Every rank makes one."""

    def __init__(self, ranks):
        self.name = ""  # of the first signal that this process has caught
        self.listens = False
        self.hurried = False  # whether a SIGTERM or SIGINT has come
        self.size = ranks.size
        self.speaks = ranks.rank == 0
        self.reduction = None

    def listen(self):
        """Catch the signals from now on, but those that are ignored, as SIGHUP by nohup. Further calls do nothing."""
        if not self.listens:
            self.listens = True
            for number in STOPS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, self._catch)

    def _catch(self, number: int, frame):
        """Remember the first signal. Python calls this after its current operation, such as a backward pass."""
        if number in (signal.SIGTERM, signal.SIGINT):
            if self.hurried:
                os._exit(128 + number)
            self.hurried = True
            signal.signal(number, signal.SIG_DFL)  # a second one ends the process also within an operation
        if self.speaks and not self.name:
            erase = "\r\x1b[K" if sys.stderr.isatty() else ""  # the progress bar
            with suppress(OSError):
                os.write(2, f"{erase}{STOPPING}\n".encode())
        self.name = self.name or signal.Signals(number).name

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
