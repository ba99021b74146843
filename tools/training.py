"""A training run without files, for measurements: the model, the optimizer and the loader of train.py, and its steps.

random_data(folder, tokens, vocab_size)  # cfg.dataset names the folder
with closing(Training(cfg)) as run:
    loss, grad_norm = run.step()
"""

import ctypes
import gc
import json
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configurator import Config
from data.loader import Loader
from data.objective import open_with_objective
from engine import compilation, optim
from engine.parallel import ranks as parallel
from engine.parallel.sharded import ShardedModel
from engine.step import Step


def random_data(folder: str | Path, tokens: int, vocab_size: int, length: int = 1024):
    """Write a data set: random tokens, small ids most often, in documents of `length` tokens on average."""
    rng, folder = np.random.default_rng(0), Path(folder)
    ids = (vocab_size * rng.random(tokens, dtype=np.float32) ** 8).astype(np.uint16)
    ids[rng.random(tokens, dtype=np.float32) < 1 / length] = vocab_size - 1
    for split, part in (("train", ids), ("val", ids[: 2**16])):
        part.tofile(folder / f"{split}.bin")
    (folder / "meta.json").write_text(json.dumps({"vocab_size": vocab_size, "eot": vocab_size - 1}))


class Training:
    """A run's parts, and how many steps it has made."""

    def __init__(self, cfg: Config):
        data, objective, cfg.vocab_size = open_with_objective(cfg)
        parallel.check_flags(cfg)
        self.ranks = ranks = parallel.join(cfg)
        if ranks.compile:
            torch._dynamo.reset()  # the graphs of other configurations would count towards the limit of recompilations
            torch._dynamo.utils.counters.clear()
        self.cfg, self.done, self.graphs = cfg, 0, {}  # graphs that torch.compile has made
        self.synchronize = getattr(torch, ranks.device.type).synchronize
        torch.manual_seed(cfg.seed)
        self.sharded = ShardedModel(cfg, ranks)
        self.sharded.init_weights(cfg.seed)
        self.parts_of_step = Step(cfg, self.sharded)
        part = self.parts_of_step.micro_steps, ranks.data_rank, ranks.data_size
        self.loader = Loader(data.split("train"), objective, cfg.batch_size, *part, cfg.seed, ranks.device)
        self.close = self.loader.close

    def step(self) -> tuple[Tensor, Tensor]:
        """Make a step; returns (this rank's mean loss, gradient norm)."""
        made = self.parts_of_step(self.loader, optim.learning_rate(self.done, self.cfg))
        self.done += 1
        graphs = compilation.graphs() if self.ranks.compile else 0
        self.graphs = {"graphs of the first step": graphs} | self.graphs | {"graphs in all": graphs}
        return made

    def steps(self, n: int) -> tuple[list[Tensor], list[Tensor]]:
        """Make n steps; returns their losses (this rank's means) and their gradient norms."""
        losses, norms = zip(*(self.step() for _ in range(n)), strict=True)
        return [*losses], [*norms]

    def phases(self, begin: Callable[[str], None]):
        """Make a step of one batch. Calls begin(name) where a phase begins: data, forward, backward, optimizer, end."""
        model, parts = self.sharded.model, self.parts_of_step
        hooks = [
            model.register_forward_pre_hook(lambda *_: begin("forward")),
            model.register_forward_hook(lambda *_: begin("backward")),
        ]
        begin("data")
        parts.backward(self.loader)
        begin("optimizer")
        parts.clip()
        parts.update()
        begin("end")
        for hook in hooks:
            hook.remove()

    def timed_step(self) -> dict[str, float]:
        """Make a step. Returns the milliseconds of each phase."""
        names, marks = [], []

        def begin(name: str):
            self.synchronize()
            names.append(name)
            marks.append(time.perf_counter())

        self.phases(begin)
        return {name: 1000 * (b - a) for name, (a, b) in zip(names, pairwise(marks), strict=False)}


def reset_peak_memory(device: torch.device):
    """Make engine.device.peak_memory_bytes count from now on. Outside of Linux, a CPU's peak stays the process's."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # gives freed memory back to the system; only glibc has it
        Path("/proc/self/clear_refs").write_text("5")  # 5 = set the peak to the memory in use now
