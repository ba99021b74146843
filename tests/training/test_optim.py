"""Schedules and Muon against references written here; test_oracle.py has whole runs, and AdamW."""

import re
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
import torch.nn as nn

from engine.config import Config
from engine.optim import OPTIMIZER, Muon, build, learning_rate, orthogonalize
from engine.parallel.sharded import ShardedModel, load_biases
from model import Model, ModelConfig
from tests import oracle
from tests.helpers import assert_rounds_alike


def config(**flags) -> SimpleNamespace:
    """Flags that may be such as no run has."""
    usual = dict(learning_rate=1e-3, min_lr=1e-4, warmup_iters=10, max_iters=110)
    return SimpleNamespace(**vars(Config()) | usual | flags)


def tiny(**flags) -> Model:
    sizes = dict(n_layer=1, n_head=4, n_embd=16, block_size=8, vocab_size=16)
    return Model(ModelConfig(**sizes | flags), seed=1)


@pytest.mark.parametrize("flags, rates", [
    (dict(lr_decay_iters=100, cooldown_iters=40), {10: 1.0, 60: 1.0, 80: 0.55, 99: 0.1225, 100: 0.1, 5000: 0.1}),
    (dict(max_iters=100), {80: 1.0, 81: 0.955, 90: 0.55}),  # cool-down over the last fifth
    (dict(max_iters=100, lr_decay_iters=50), {40: 1.0, 41: 0.91, 45: 0.55}),  # of the schedule
    (dict(warmup_iters=0, max_iters=1), {0: 1.0}),
    (dict(schedule="cosine", warmup_iters=0, max_iters=1), {0: 1.0}),
    (dict(schedule="cosine", max_iters=10), {10: 0.1}),
], ids=str)  # fmt: skip
def test_schedules_at_key_points(flags, rates):
    """From 1e-3 to 1e-4, in units of 1e-3. The oracle's runs have the middle of a cosine, and all three kinds."""
    cfg = config(**{"schedule": "wsd"} | flags)
    assert {step: 1e3 * learning_rate(step, cfg) for step in rates} == pytest.approx(rates)


VECTORS = "norm|before|bias|gain|skip|resid|alpha|beta|gamma"


@pytest.mark.parametrize("optimizer", OPTIMIZER)
def test_matrices_decay_and_every_parameter_is_in_one_group(optimizer):
    """So do slots, of three dimensions, but no bias of experts, of two; what balances experts is in no group."""
    slots = tiny(block="c.own_slots", qk_norm=True, conv=4)
    experts = tiny(n_expert=4, bias=True)
    for model in (tiny(block="simplified"), slots, experts):
        groups = build(model, config(optimizer=optimizer, balance_rate=0.25)).param_groups
        grouped = [p for group in groups for p in group["params"]]
        assert len(grouped) == len(set(grouped))
        assert set(grouped) == {*model.parameters()} - {*load_biases(model)}
        names = {p: name for name, p in model.named_parameters()}
        decayed = {names[p] for group in groups if group["weight_decay"] for p in group["params"]}
        assert decayed == {name for name in names.values() if not re.search(VECTORS, name)}
    assert sum("slot" in name for name, _ in slots.named_parameters()) == 2
    assert len([*load_biases(experts)]) == 1


@pytest.mark.parametrize("optimizer", OPTIMIZER)
@pytest.mark.parametrize("conv_lr, ratio", [(0.0, 1.0), (4e-3, 4.0)])
def test_convolutions_may_have_a_learning_rate_of_their_own(optimizer, conv_lr, ratio):
    """One step of Adam moves a number by its learning rate, whatever its gradient is."""
    model = tiny(conv=4, n_layer=2)
    model.blocks[0].conv = torch.nn.Linear(2, 2, bias=False)  # whose name decides nothing
    torch.nn.init.zeros_(model.blocks[0].conv.weight)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build(model, config(optimizer=optimizer, conv_lr=conv_lr, weight_decay=0.0))
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    optimizer.set_lr(5e-4)  # half of learning_rate
    optimizer.step()
    moved = {}
    for name, p in model.named_parameters():
        moved[name] = float((before[name] - p.detach()).mean())
    taps = [moved.pop(name) for name in before if ".sums." in name and name.endswith("conv.weight")]
    assert taps == pytest.approx(4 * [ratio * 5e-4])
    others = [moved[name] for name in ("wte.weight", "blocks.0.conv.weight")]
    assert others == pytest.approx(2 * [5e-4])


@pytest.mark.parametrize("optimizer", OPTIMIZER)
def test_the_biases_of_experts_move_by_a_rate_of_their_own(optimizer):
    """Whatever the schedule says, and without weight decay or state."""
    model = tiny(n_expert=4)
    (bias,) = load_biases(model)
    parts = build(model, config(optimizer=optimizer, balance_rate=0.25))
    parts.set_lr(1e-3)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    bias.grad = torch.tensor([-0.5, 1.0, 0.0, 1e-7])
    parts.step()
    assert bias.tolist() == [0.25, -0.25, 0.0, 0.0]
    assert all(p.isfinite().all() for p in model.parameters())  # Muon's, whose gradients are zero
    assert not any("balance" in name for name in parts.state_tensors(model))


def test_loads_are_no_gradients():
    """The norm of the gradient leaves out the biases of experts, and clipping leaves them as they are."""
    sharded = object.__new__(ShardedModel)
    sharded.model = tiny(n_layer=2, n_expert=4)
    sharded.ranks_differ = False
    sharded.loads = biases = load_biases(sharded.model)
    for p in sharded.model.parameters():
        p.grad = torch.full_like(p, 2.0)
    others = sharded.model.n_params() - sum(p.numel() for p in biases)
    assert torch.allclose(sharded.clip(0.5), torch.tensor(2.0 * others**0.5))
    assert len(biases) == 2
    assert all((p.grad == 2.0).all() for p in sharded.loads)
    for p in sharded.model.parameters():
        assert p in sharded.loads or (p.grad < 0.1).all()


@pytest.mark.parametrize("largest", [2**28, 1, 1500])  # numbers in a batch: of all matrices, of one, of four experts
@pytest.mark.parametrize("flags, where, matrices", [
    ({"attention": "gqa", "n_kv_head": 2}, "0.attn.qkv", lambda w: w.view(2, 4, 4, 16).split((2, 1, 1), dim=1)),
    ({"mlp": "swiglu"}, "1.mlp.up", lambda w: w.view(-1, 2, 16).unbind(1)),
    ({"mlp": "swiglu", "n_expert": 3}, "1.experts.up", lambda w: w.view(3, -1, 2, 16).transpose(1, 2).flatten(0, 1)),
], ids=["grouped heads", "swiglu", "experts"])  # fmt: skip
def test_muon_splits_what_the_model_computes_with(flags, where, matrices, largest, monkeypatch):
    """q, k and v, a gate and its values, which are rows of one weight: each matrix alone."""
    monkeypatch.setattr(Muon, "LARGEST", largest)
    model = tiny(**flags)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    weight = model.get_submodule(f"blocks.0.sums.{where}").weight
    before = weight.detach().clone()
    cfg = config(optimizer="muon", muon_lr=1.0, weight_decay=0.0, muon_momentum=0.0)
    [*build(model, cfg).parts][-1].step()
    for update, gradient in zip(matrices(before - weight.detach()), matrices(weight.grad), strict=True):
        update, gradient = (x.flatten(0, -2).double() for x in (update, gradient))
        scale = max(1, update.size(0) / update.size(1)) ** 0.5
        torch.testing.assert_close(update, scale * oracle.newton_schulz(gradient), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 64, 16), (2, 16, 64), (1, 24, 96)])
def test_orthogonalize(shape, dtype):
    """Against the post's iteration in float64."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    y = orthogonalize(x, dtype)
    assert y.dtype == dtype
    assert orthogonalize(torch.zeros(shape), dtype).abs().max() == 0
    expected = torch.stack([oracle.newton_schulz(m) for m in x.double()])
    if dtype == torch.bfloat16:
        plain = torch.stack([oracle.newton_schulz(m) for m in x.to(dtype)])
        return assert_rounds_alike(y, plain, expected, "U V^T")
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", get_args(get_type_hints(Config)["optimizer"]))
def test_an_update_of_any_optimizer(kind):
    """A part of a parameter is updated as in the whole, which FSDP rests on."""
    torch.manual_seed(0)
    start = torch.randn(6, 4)
    grads = [torch.randn(6, 4) for _ in range(3)]

    def after(rows: slice, grads: list[torch.Tensor], decay: float = 0.0) -> torch.Tensor:
        p = nn.Parameter(start[rows].clone())
        optimizer = OPTIMIZER[kind].rest([{"params": [p], "weight_decay": decay}], 0.01, (0.9, 0.95))
        for grad in grads:
            p.grad = grad[rows].clone()
            optimizer.step()
        return p.detach()

    whole = slice(None)
    change = after(whole, grads[:1]) - start
    assert (change * grads[0] < 0).all()
    decayed = after(whole, [torch.zeros(6, 4)], decay=0.5)
    assert (decayed.abs() < start.abs()).all()
    parts = [after(rows, grads, decay=0.5) for rows in (slice(0, 2), slice(2, 6))]
    assert torch.allclose(torch.cat(parts), after(whole, grads, decay=0.5), rtol=1e-5)
