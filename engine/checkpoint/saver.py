"""Saves the checkpoints of a training run, and ends the run if one cannot be written.

Every rank makes a Checkpoints and calls the same methods in the same order.
"""

import math
import threading
from concurrent.futures import Future
from copy import deepcopy
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from data.errors import fail
from engine.checkpoint import files as checkpoint
from engine.checkpoint.contents import own_part
from engine.metrics import Silent
from engine.parallel import ranks as parallel
from engine.parallel.ranks import Ranks
from engine.stop_signal import StopSignal


class Checkpoints:
    """Saves the checkpoints of a run, one at a time, and ends the run if one cannot be written.

    last_queued_step    step of the last checkpoint that was given to `save`; it may still be unwritten
    last_written_step   step of the last checkpoint that is known to be on the disk
    best_loss           lowest validation loss so far
    """

    def __init__(self, cfg, ranks: Ranks, stop: StopSignal, metrics: Silent, step: int | None, best_loss):
        self.cfg, self.ranks, self.stop, self.metrics = cfg, ranks, stop, metrics
        self.saver = Saver(cfg.async_checkpoint)
        self.last_queued_step = self.saver.last_written_step = step
        self.best_loss = best_loss

    @property
    def last_written_step(self) -> int | None:
        return self.saver.last_written_step

    def is_best(self, val_loss: float) -> bool:
        """Whether this validation loss is finite and lower than all before it. If so, it is the lowest from now on."""
        if not math.isfinite(val_loss) or (self.best_loss is not None and val_loss >= self.best_loss):
            return False
        self.best_loss = val_loss
        return True

    def save(self, step: int, tensors: dict[str, Tensor], state: dict, is_best: bool):
        """Save a checkpoint, after the previous checkpoint is written; `is_best`: its loss is the lowest so far."""
        self.wait()
        state = state | {"best_val_loss": self.best_loss}
        self.saver.save(self.cfg.out_dir, step, tensors, state, self.cfg.keep_last, is_best)
        self.last_queued_step = step
        if not self.cfg.async_checkpoint:
            self.wait()

    def wait(self):
        """Wait until the checkpoint under way is written. If it has failed, which all ranks notice together, the run
        ends after the first rank's report."""
        try:
            self.saver.wait()
        except OSError as error:
            try:
                if self.ranks.first:
                    self.fail(str(error), 2)
                raise SystemExit(2) from None
            finally:
                self.stop.finish()
                parallel.leave()

    def fail(self, text: str, code: int = 1) -> NoReturn:
        """End the run with this error and exit code."""
        self.metrics.close()
        fail(text, code)


class Saver:
    """Calls checkpoint.save at once or, asynchronously, in a thread while training continues.

    An asynchronous `save` returns when this rank's part of every tensor is copied to host memory; the next save uses
    the same buffers. The thread is a daemon, so a process that fails does not wait for it. Its collectives use a
    process group of their own, because collectives of two threads must not mix. So the timeout of the training loop's
    collectives does not apply to ranks that wait for a slow disk.
    """

    def __init__(self, asynchronous: bool):
        self.asynchronous = asynchronous
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.last_written_step: int | None = None
        self.copies: dict[str, Tensor] = {}
        self.running: Future | None = None

    def save(
        self, out_dir: str | Path, step: int, tensors: dict[str, Tensor], state: dict, keep_last: int = 2,
        best: bool = False,
    ):  # fmt: skip
        """Call checkpoint.save with these arguments. The next `wait` or `save` raises its error; that `save` saves
        nothing."""
        self.wait()
        device = -1  # torch.cuda.set_device(-1) does nothing
        if self.asynchronous:
            parts = {name: own_part(x) for name, x in tensors.items()}
            self.copies = {name: _copy(part.tensor, self.copies.get(name)) for name, part in parts.items()}
            tensors = {name: part._replace(tensor=self.copies[name]) for name, part in parts.items()}
            state = deepcopy(state)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
                device = torch.cuda.current_device()
        running = self.running = Future()

        def work():
            try:
                torch.cuda.set_device(device)  # otherwise a new thread uses the first GPU
                checkpoint.save(out_dir, step, tensors, state, keep_last, best, self.group)
                running.set_result(step)
            except BaseException as error:
                running.set_exception(error)

        if self.asynchronous:
            threading.Thread(target=work, name="checkpoint", daemon=True).start()
        else:
            work()

    def wait(self):
        """Wait until the last checkpoint is written. To be called before the run ends."""
        running, self.running = self.running, None
        if running:
            self.last_written_step = running.result()


def _copy(part: Tensor, buffer: Tensor | None) -> Tensor:
    """A copy of the tensor in host memory, in `buffer` if that has the right shape. The copy from a GPU may still be
    under way when this function returns."""
    if buffer is None or (buffer.shape, buffer.stride(), buffer.dtype) != (part.shape, part.stride(), part.dtype):
        buffer = torch.empty_like(part, device="cpu", pin_memory=part.is_cuda)
    return buffer.copy_(part, non_blocking=part.is_cuda)
