"""One optimizer step, the watch over its gradient, and a trace of some steps."""

import gc
import math
import statistics
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.config import Config
from engine.metrics import tried
from engine.parallel.ranks import Ranks

MOST_LEFT_OUT = 50  # steps in a row that are not finite, after which the run ends
NEVER = torch.iinfo(torch.int64).max  # larger than the number of any step
SMALLEST_SCALE = 2**-14  # of float16's gradients: it begins with 2^16, and each infinite gradient halves it
FIRST = 5  # steps of this process before the first one in a trace, which compile or connect the ranks


def is_finite(loss: Tensor, grad_norm: Tensor, scaler: torch.amp.GradScaler, ranks: Ranks) -> Tensor:
    """Whether the step is finite on all ranks. With a scaler, an infinite gradient may only mean that its scale was too
    large, so there the loss decides, as long as the scale is no tiny one."""
    if scaler.is_enabled():
        scale = scaler._get_scale_async()  # on the device: get_scale would wait for it
        return torch.isfinite(ranks.sum(loss.clone())) & (scale > SMALLEST_SCALE)
    return torch.isfinite(grad_norm)  # which is the same on all ranks


class Watch:
    """Watches the gradients of a run, for steps that are to be left out, and for the first one that is not finite.

    With cfg.spike_factor, a step is left out if the norm of its gradient is above so many times the median of the last
    100 norms, of which there must be 20. Norms of such steps are among them, so that a change that lasts becomes usual.
    """

    LAST = 100
    LEAST = 20

    def __init__(self, cfg: Config, device: torch.device, norms: list[float]):
        self.cfg = cfg
        self.norms: list[float] = []  # the last ones, which a checkpoint keeps
        if cfg.spike_factor:  # otherwise, those of the checkpoint would grow old
            self.norms = norms
        self.not_finite = 0  # steps in a row, up to now, that were left out because they were not finite
        self.bad_step = torch.full((), NEVER, device=device)  # on the device, so that the host need not wait for it

    def reason_to_skip(self, step: int, finite: Tensor, grad_norm: Tensor) -> str:
        """Why this step is to be left out, "" if it is not. Every rank calls it with the same values."""
        if self.cfg.skip_nonfinite and not finite:
            self.not_finite += 1
            if self.not_finite == MOST_LEFT_OUT:
                self.bad_step.fill_(step + 1 - MOST_LEFT_OUT)
            return "its loss or its gradient is not finite"
        self.not_finite = 0
        self.bad_step = torch.where(finite, self.bad_step, self.bad_step.clamp(max=step))
        if not self.cfg.spike_factor:
            return ""
        return self.spike(grad_norm.item())

    def first_bad_step(self) -> int | None:
        """The first step that was not finite and not left out, or the first of 50 that were. Waits for the device."""
        bad = int(self.bad_step)
        return None if bad == NEVER else bad

    def spike(self, norm: float) -> str:
        """What is wrong with a step of this norm if it is a spike, otherwise ""."""
        if not math.isfinite(norm):
            return ""
        last = self.norms
        self.norms = [*last, norm][-self.LAST :]
        usual = statistics.median(last) if len(last) >= self.LEAST else math.inf
        if norm > self.cfg.spike_factor * usual > 0:
            times = norm / usual
            return f"the norm of its gradient, {norm:.3g}, is {times:.1f} times the median of the last ones"
        return ""


def collect_garbage():
    """Collect Python's garbage. The first call freezes what is alive, and turns automatic collections off: they come at
    different times on each rank, and all other ranks wait."""
    gc.collect()
    if gc.isenabled():
        gc.freeze()
        gc.disable()


def tracing(cfg: Config, say) -> torch.profiler.profile:
    """A context that traces cfg.profile_steps steps into trace.json in out_dir. Its step() is called before every step
    of the run. A run that ends earlier writes the steps that it has made."""
    path = Path(cfg.out_dir, "trace.json")

    def write(profiler: torch.profiler.profile):
        if tried("the trace", partial(profiler.export_chrome_trace, str(path))):
            say(f"trace in {path}, for https://ui.perfetto.dev")

    schedule = torch.profiler.schedule(wait=FIRST, warmup=1, active=cfg.profile_steps, repeat=1)
    return torch.profiler.profile(schedule=schedule, on_trace_ready=write)
