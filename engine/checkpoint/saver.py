"""Saves the checkpoints of a training run, and ends the run if one cannot be written or its numbers are not finite."""

import math
from functools import partial
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from data.errors import fail, one_line
from data.lock import lock_again
from engine.checkpoint import files as checkpoint
from engine.checkpoint.file_format import finite, own_part
from engine.config import Config
from engine.metrics import Silent
from engine.parallel.layout import Slice
from engine.parallel.ranks import all_gather, is_first_rank, leave, on_first_rank
from engine.stop_signal import StopSignal


class Checkpoints:
    """Saves the checkpoints of a run, one at a time. Every rank calls the same methods in the same order."""

    def __init__(self, cfg: Config, stop: StopSignal, metrics: Silent, step: int | None, state: dict):
        self.cfg = cfg
        self.stop = stop
        self.metrics = metrics
        self.last_step = step  # of the last checkpoint
        self.best_loss = state["best_val_loss"]  # the lowest validation loss so far
        self.best_step = state["best_step"]  # its step; 0 = one without a checkpoint, or not known

    def is_best(self, step: int, train_loss: float, val_loss: float) -> bool:
        """Whether the validation loss of this step is now the lowest. Losses that are not finite end the run."""
        if not math.isfinite(train_loss) or not math.isfinite(val_loss):
            losses = f"train loss {train_loss}, val loss {val_loss}"
            self.fail(f"the evaluation at step {step} is not finite: {losses}; lower --learning_rate", before=step)
        if self.best_loss is not None and val_loss >= self.best_loss:
            return False
        self.best_loss = val_loss
        self.best_step = step
        return True

    def outcome(self, stopped: bool) -> str:
        """How the run has ended: stopped by a signal, or after its last step."""
        if stopped:
            cause = self.stop.name or "a signal to another rank"
            return f"stopped by {cause} with step {self.last_step} saved"
        name = checkpoint.named_by(Path(self.cfg.out_dir, "best"))
        return f"done; the best val loss is {self.best_loss:.4f}, of {name or 'step 0'}"

    def save(self, step: int, tensors: dict[str, Tensor | Slice], state: dict):
        """Save a checkpoint. If that fails, or a tensor of any rank is not finite, the run ends on all ranks."""
        bad = next((name for name, x in tensors.items() if not finite(own_part(x).tensor)), "")
        for name in filter(None, all_gather(bad)):
            self.fail(f"at step {step}, {name} has numbers that are not finite; lower --learning_rate", before=step)
        state = state | {"best_val_loss": self.best_loss, "best_step": self.best_step}
        try:
            on_first_rank(partial(lock_again, self.cfg.out_dir, "out_dir"))
            checkpoint.save(self.cfg.out_dir, step, tensors, state, self.cfg.keep_last)
        except (OSError, ValueError) as error:
            try:
                if is_first_rank():
                    self.fail(one_line(error), 2)
                raise SystemExit(2) from None
            finally:
                self.stop.finish()
                leave()
        self.last_step = step

    def fail(self, text: str, code: int = 1, before: int = 0) -> NoReturn:
        """End the run with this line. It names the last checkpoint before the step `before`, if that was not finite."""
        good = [path for path in checkpoint.steps_in(Path(self.cfg.out_dir)) if checkpoint.step_of(path) < before]
        if good:
            text += f", and go back to the last good checkpoint, {good[-1]}"
        self.metrics.close()
        fail(text, code)
