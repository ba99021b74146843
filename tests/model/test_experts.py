"""Experts against transformers' blocks by copied weights, and a dense MLP; tests/naive.py has them one by one."""

import itertools
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers

import ops
from engine.parallel.tensor import row_parallel
from engine.plan.accounting import flops, n_read
from flags import READER
from model import Experts, Inputs, Model, ModelConfig
from tests.model.test_references import (
    ROUNDED,
    C,
    H,
    L,
    T,
    V,
    assert_same,
    call,
    in_turn,
    jitter,
    stream,
    trained,
)

E = 6  # experts
WIDTH = 40  # hidden units of each
SIZE = dict(n_layer=L, n_head=H, n_embd=C, block_size=T, vocab_size=V, n_expert=E)


def random(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    return jitter(module)


def test_experts_are_those_of_transformers():
    """DeepSeek-V3's, in test_families.py Mixtral's and Qwen's. Theirs compute the router's scores in float32."""
    config = transformers.DeepseekV3Config(
        hidden_size=C, hidden_act="silu", moe_intermediate_size=WIDTH, n_routed_experts=E, num_local_experts=E,
        num_experts_per_tok=3, n_group=1, topk_group=1, n_shared_experts=2, routed_scaling_factor=1.0,
    )  # fmt: skip
    theirs = random(transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE(config))
    bias = torch.randn(E, dtype=torch.float64)
    theirs.gate.e_score_correction_bias.copy_(bias)
    shared = theirs.shared_experts
    routed = theirs.experts
    weights = {
        "router.weight": theirs.gate.weight,
        "up.weight": in_turn(*routed.gate_up_proj.chunk(2, dim=1)),
        "down.weight": routed.down_proj,
        "shared.up.weight": in_turn(shared.gate_proj.weight, shared.up_proj.weight),
        "shared.down.weight": shared.down_proj.weight,
        "balance.bias": bias,
    }
    flags = SIZE | dict(mlp="swiglu", n_expert_active=3, router="sigmoid", n_expert_shared=2)
    cfg = ModelConfig(**flags, expert_ratio=1.5 * WIDTH / C)  # of which a gated map takes two thirds
    ours = random(Experts(cfg, 0, READER["e"]))
    x = stream()
    assert_same(call(ours, weights, x, Inputs()), theirs(x), trained(theirs) | {"x": x}, ROUNDED)


@pytest.mark.parametrize("ends", [[7, 7, 20, 24], [0, 0, 24, 24], [24] * 4])
@pytest.mark.parametrize("dtype, width", [(torch.float32, 16), (torch.float32, 17), (torch.bfloat16, 16)])
def test_grouped_products_are_those_of_each_group(ends, dtype, width):
    """PyTorch's kernel and the loop, for experts without tokens too, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 16, generator=generator).to(dtype).requires_grad_()
    w = torch.randn(4, width, 16, generator=generator).to(dtype).requires_grad_()
    b = torch.randn(4, width, generator=generator).to(dtype).requires_grad_()
    y = ops.grouped_linear(x, w, b, torch.tensor(ends), None)
    groups = []
    start = 0
    for i, end in enumerate(ends):
        groups.append(F.linear(x[start:end], w[i], b[i]))
        start = end
    expected = torch.cat(groups)
    tolerance = {"atol": 1e-5}
    if dtype == torch.bfloat16:
        tolerance = {"atol": 0.1, "rtol": 0.02}
    assert torch.allclose(y, expected, **tolerance)
    grad = torch.randn(y.shape, generator=generator).to(dtype)
    found = torch.autograd.grad(y, [x, w, b], grad)
    for ours, theirs in zip(found, torch.autograd.grad(expected, [x, w, b], grad), strict=True):
        assert torch.allclose(ours, theirs, **tolerance)


def test_under_tp_experts_keep_the_loop_of_compilation():
    loop = Mock(side_effect=ops.linear_by_linear)
    layer = SimpleNamespace(weight=torch.ones(2, 3, 3), bias=torch.ones(2, 3), loop=loop)
    y = row_parallel(layer, 2, torch.ones(4, 3), torch.tensor([1, 4]))
    assert loop.called
    assert torch.equal(y, torch.full((4, 3), 3.5))


def test_a_token_reads_its_share_of_the_parameters():
    """Two of six experts, in the matrix products too; with a shared one each has a third of the units, not a half. Each
    has a bias of its result, and the router one."""
    router = L * E * C
    for bias, shared in itertools.product((False, True), (0, 1)):
        dense = Model(ModelConfig(**SIZE | {"n_expert": 0, "mlp_ratio": 3, "bias": bias}), seed=0)
        assert n_read(dense) == dense.n_params()
        flags = SIZE | {"n_expert_shared": shared, "mlp_ratio": 3, "bias": bias}
        sparse = Model(ModelConfig(**flags), seed=0)
        assert n_read(sparse) == dense.n_params() + router + L * E + bias * L * (E + (1 + shared) * C)
        assert flops(sparse, T) == flops(dense, T) + 6 * T * router
