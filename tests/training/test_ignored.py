"""No flag of a run is silently ignored. One of the optimizer or the schedule changes what a run computes, or it is
refused. Of the others, a run reads those that their rules do not call useless, and no others change it."""

import sys
from functools import cache
from itertools import repeat
from typing import get_type_hints

import pytest
import torch

import train
from configurator import parse
from engine import optim
from engine.config import Config
from engine.parallel.ranks import Ranks, join
from engine.parallel.sharded import ShardedModel
from engine.plan import plan
from flags import documented, unused
from tests.helpers import TINY, figures, weights_in
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


def in_sections(*sections: str) -> set[str]:
    return {name for name, flag in documented(Config).items() if flag.section in sections}


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


@pytest.mark.parametrize("name", sorted(in_sections("optimizer", "schedule") - OTHERS))
def test_no_flag_is_ignored(name):
    """If this fails, refuse the flag where it has no effect, by a rule in its comment."""
    effects = [effect(row, name) for row in ROWS]
    assert "something" in effects
    assert [row for row, seen in zip(ROWS, effects, strict=True) if seen == "nothing"] == []


# ---- All flags but those of the network: what reads them while a run trains

RUNS = [
    "",
    "--schedule=constant --conv=3 --n_expert=4 --router_balance=bias",
    "--schedule=wsd --optimizer=muon --objective=seq2seq --block_size=64",
]
PLANNED = "--plan=True --world_size=2 --vocab_size=11"
ELSEWHERE = {  # flags that these runs do not read -> what does
    "wandb_project": "test_wandb_gets_the_figures_of_tensorboard",
    "wandb_run_name": "test_wandb_gets_the_figures_of_tensorboard",
    "always_save_checkpoint": "test_save_policy",
    "backend": "several ranks on GPUs",
    "collective_timeout": "several ranks, see below",
}
# The modules that read every flag, to check it, to write it, or to compare it with a checkpoint's; and the estimate of
# a run's memory, which changes no run.
READ_ALL = "flags", "configurator", "dataclasses", "engine.help", "engine.resume", "engine.plan.estimate"
OF_RUN = {name for name, flag in documented(Config).items() if not flag.section.startswith("model")}
SHARES = {name for name in in_sections("data") if KINDS[name] is float}  # which change the data


@pytest.fixture
def read(monkeypatch) -> set[str]:
    """The flags that are read from now on, but by what checks them."""
    names = set()

    def noting(cfg, name: str):
        if name in OF_RUN:
            reader = sys._getframe(1)
            checks = reader.f_code.co_name.startswith(("check_", "__post_init__"))
            if not checks and reader.f_globals["__name__"] not in READ_ALL:
                names.add(name)
        return object.__getattribute__(cfg, name)

    monkeypatch.setattr(Config, "__getattribute__", noting, raising=False)
    return names


@pytest.mark.parametrize("flags", RUNS)
def test_a_flag_in_effect_is_read_and_others_have_none(flags, read, run, tmp_path, monkeypatch):
    """If a flag of yours is not read here, name a run above that reads it, or in ELSEWHERE the test of what it does."""
    flags = ["--max_iters=3", "--warmup_iters=1", *flags.split()]
    resolve = train.resolve
    cfg = parse(Config, [*TINY, *flags])
    idle = OF_RUN & {*unused(cfg)}
    out = run(*flags)
    assert OF_RUN - idle - read - ELSEWHERE.keys() == set()
    before = figures(out), weights_in(out)
    for name in sorted(idle & read | SHARES - idle):

        def behind_the_rules(*args, name=name):
            made = resolve(*args)
            setattr(made, name, other(name, getattr(made, name)))
            return made

        monkeypatch.setattr(train, "resolve", behind_the_rules)
        try:
            run(*flags, out=name)
        except SystemExit:  # another rule refuses the value
            continue
        after = figures(tmp_path / name), weights_in(tmp_path / name)
        same = after[0] == before[0] and all(map(torch.equal, after[1].values(), before[1].values()))
        assert same == (name in idle), name


def test_a_flag_of_ranks_is_read(read, pretended):
    cfg = Config(**BASE | {"parallel": "fsdp", "batch_size": 4})
    ShardedModel(cfg, join(cfg))
    assert in_sections("ranks, of torchrun") - read == {"backend"}


def test_a_flag_of_a_plan_is_read(read):
    report = plan.report(plan.Plan(parse(Config, PLANNED.split())))
    assert "2 x h100" in report
    assert in_sections("plan") - read == {"plan"}  # by train.main, see above


def test_every_flag_is_in_effect_in_one_of_these():
    settings = [parse(Config, flags.split()) for flags in (*RUNS, "--parallel=fsdp", PLANNED)]
    never = set.intersection(*({*unused(cfg)} for cfg in settings))
    assert never & OF_RUN == set(), "name a run in RUNS in which it is in effect"
