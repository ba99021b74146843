"""No flag of the optimizer or the schedule is silently ignored: it changes what a run computes, or it is refused."""

from functools import cache
from itertools import repeat
from typing import get_type_hints

import pytest
import torch

from engine import optim
from engine.config import Config
from engine.parallel.ranks import Ranks
from engine.parallel.sharded import ShardedModel
from flags import documented
from tests.models import choices

BASE = dict(
    n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=11, batch_size=2, gradient_accumulation_steps=1,
    max_iters=10, warmup_iters=2, learning_rate=0.01, grad_clip=0.1,
)  # fmt: skip
ROWS = [
    {"schedule": "cosine", "optimizer": "adamw", "conv": 3},
    {"schedule": "wsd", "optimizer": "muon", "n_expert": 4, "router_balance": "bias"},
    {"schedule": "constant", "optimizer": "muon"},
    {"schedule": "constant", "optimizer": "adamw"},
]
OTHERS = {"batch_ramp", "skip_nonfinite", "spike_factor"}  # which change what is read, or leave out single steps
KINDS = get_type_hints(Config)
FLAGS = [name for name, flag in documented(Config).items() if flag.section in ("optimizer", "schedule")]


def other(name: str, now):
    """Another value of a flag."""
    if values := choices(KINDS[name]):
        return next(value for value in values if value != now)
    if KINDS[name] is int:
        return now + 1 if now else 4
    return now / 2 or 0.25


@cache
def trained(flags: tuple) -> list[torch.Tensor]:
    """The weights after a few steps on one batch, and the states of the optimizers."""
    cfg = Config(**BASE | dict(flags))
    sharded = ShardedModel(cfg, Ranks(0, 1, torch.device("cpu"), torch.float32, False))
    sharded.init_weights(cfg.seed)
    optimizer = optim.build(sharded.model, cfg, sharded)
    scaler = torch.amp.GradScaler(enabled=False)
    idx = torch.arange(16).view(2, 8) % 11
    for step in range(cfg.max_iters):
        optimizer.set_lr(optim.learning_rate(step, cfg))
        sharded.backward(repeat({"idx": idx, "targets": idx}), 1, scaler)
        sharded.clip(cfg.grad_clip)
        optimizer.step()
        sharded.model.zero_grad()
    return [*sharded.model.state_dict().values(), *optimizer.state_tensors(sharded.model).values()]


def effect(row: dict, name: str) -> str:
    """What another value of a flag does beside those of a row: something, nothing, or it is refused."""
    changed = row | {name: other(name, getattr(Config(**BASE | row), name))}
    try:
        results = trained(tuple(changed.items()))
    except ValueError:
        return "refused"
    before = trained(tuple(row.items()))
    same = len(results) == len(before) and all(map(torch.equal, results, before))
    return "nothing" if same else "something"


@pytest.mark.parametrize("name", sorted({*FLAGS} - OTHERS))
def test_no_flag_is_ignored(name):
    """If this fails, refuse the flag where it has no effect, by a rule in its comment."""
    effects = [effect(row, name) for row in ROWS]
    assert "something" in effects
    assert [row for row, seen in zip(ROWS, effects, strict=True) if seen == "nothing"] == []
