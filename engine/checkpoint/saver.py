"""Saves the checkpoints of a training run, at once or in a thread, and ends the run if one cannot be written."""

import math
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from data.errors import fail
from engine.checkpoint import files as checkpoint
from engine.checkpoint.contents import Part, own_part
from engine.metrics import Silent
from engine.parallel.ranks import is_first_rank, leave
from engine.stop_signal import StopSignal


class Checkpoints:
    """Saves the checkpoints of a run, one at a time. Every rank calls the same methods in the same order.

    With async_checkpoint, `save` returns when this rank's tensors are copied to host memory. A thread writes them, with
    a process group of its own; the next save uses the same memory. A process that fails does not wait for the thread.
    """

    def __init__(self, cfg, stop: StopSignal, metrics: Silent, step: int | None, best_loss: float | None):
        self.cfg = cfg
        self.stop = stop
        self.metrics = metrics
        self.last_queued_step = step  # of the last checkpoint that was given to `save`; it may still be unwritten
        self.last_written_step = step  # of the last checkpoint that is known to be on the disk
        self.best_loss = best_loss  # the lowest validation loss so far
        self.diverged_step: int | None = None  # the last one whose evaluation was not finite
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.copies: dict[str, Tensor] = {}
        self.writing: Future | None = None  # the last checkpoint's

    def is_best(self, step: int, train_loss: float, val_loss: float) -> bool:
        """Whether these losses of a step are finite, and the validation loss is now the lowest."""
        if not math.isfinite(train_loss) or not math.isfinite(val_loss):
            self.diverged_step = step
            return False
        if self.best_loss is not None and val_loss >= self.best_loss:
            return False
        self.best_loss = val_loss
        return True

    def outcome(self, stopped: bool) -> str:
        """How the run has ended: stopped by a signal, or after its last step."""
        if stopped:
            cause = self.stop.name or "a signal to another rank"
            return f"stopped by {cause} with step {self.last_written_step} saved"
        if self.best_loss is None:
            return "done; no evaluation was finite"
        name = checkpoint.named_by(Path(self.cfg.out_dir, "best"))
        return f"done; the best val loss is {self.best_loss:.4f}, of {name or 'step 0'}"

    def end_nonfinite(self, bad: int, first: int, last: int) -> NoReturn:
        """End the run because the loss or its gradient was not finite at step `bad`, which read these samples."""
        self.wait()
        fact = f"the loss or its gradient is not finite at step {bad} (samples {first} to {last})"
        saved = self.last_written_step
        if saved is None:
            known = "nothing is saved yet"
        elif saved == self.diverged_step:
            known = f"the loss of the checkpoint of step {saved} is not finite either, so go back to one before it"
        elif saved == bad:
            known = f"the checkpoint of step {saved} has the weights of this step, so go back to one before it"
        else:
            known = f"the checkpoint of step {saved} is good"
        remedy = "lower --learning_rate, or leave such steps out with --skip_nonfinite=True"
        self.fail(f"{fact}; {known}; {remedy}")

    def save(self, step: int, tensors: dict[str, Tensor], state: dict, is_best: bool):
        """Save a checkpoint after the one before it; `is_best`: its loss is the lowest so far."""
        self.wait()
        self.last_queued_step = step
        self.writing = writing = Future()
        state = state | {"best_val_loss": self.best_loss}

        def write(tensors: dict[str, Tensor | Part]):
            try:
                checkpoint.save(self.cfg.out_dir, step, tensors, state, self.cfg.keep_last, is_best, self.group)
                writing.set_result(step)
            except BaseException as error:
                writing.set_exception(error)

        if self.cfg.async_checkpoint:
            copies = {name: self.copy(name, own_part(x)) for name, x in tensors.items()}
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            threading.Thread(target=write, args=(copies,), name="checkpoint", daemon=True).start()
        else:
            write(tensors)
            self.wait()

    def copy(self, name: str, part: Part) -> Part:
        """The part with a copy of its tensor in host memory. A copy from a GPU may still be under way."""
        x = part.tensor
        if name not in self.copies:
            self.copies[name] = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
        return part._replace(tensor=self.copies[name].copy_(x, non_blocking=x.is_cuda))

    def wait(self):
        """Wait until the checkpoint under way is written. If it has failed, on all ranks, the run ends."""
        if self.writing is None:
            return
        try:
            self.last_written_step = self.writing.result()
        except OSError as error:
            try:
                if is_first_rank():
                    self.fail(str(error), 2)
                raise SystemExit(2) from None
            finally:
                self.stop.finish()
                leave()

    def fail(self, text: str, code: int = 1) -> NoReturn:
        """End the run with this error and exit code."""
        self.metrics.close()
        fail(text, code)
