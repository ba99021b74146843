"""One optimizer step. tools/speed.py, which measures and compares steps, calls it as a whole.

    step = Step(sharded, optimizer, scaler, micro_steps, cfg.grad_clip)
    loss, grad_norm = step(batches, lr)

train.py calls the three parts itself, because it looks at the gradient before the update.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.optim import Optimizer
from engine.parallel.sharded import ShardedModel


@dataclass
class Step:
    """The parts of a step, which every rank makes."""

    sharded: ShardedModel
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    micro_steps: int  # of this rank
    grad_clip: float  # largest norm of the gradient; 0 = no limit

    def __call__(self, batches: Iterator, lr: float) -> tuple[Tensor, Tensor]:
        """Make a step with this learning rate; returns (this rank's mean loss, gradient norm)."""
        self.optimizer.set_lr(lr)
        loss, grad_norm = self.backward(batches), self.clip()
        self.update()
        return loss, grad_norm

    def backward(self, batches: Iterator) -> Tensor:
        """Set the gradient, times the scaler's factor; returns this rank's mean loss."""
        return self.sharded.backward(batches, self.micro_steps, self.scaler)

    def clip(self) -> Tensor:
        """Divide the gradient by the scaler's factor and clip it; returns its norm before the clipping."""
        self.scaler.unscale_(self.optimizer)
        return self.sharded.clip(self.grad_clip)

    def update(self, skip: bool = False):
        """Update the weights, unless the step is to be skipped, and free the gradient."""
        if not skip:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.sharded.model.zero_grad(set_to_none=True)
