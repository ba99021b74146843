"""Gates, value residuals, maps of the scores and persistent memory against transformers and x-transformers, by
copied weights. All in float64, of which the references compute parts in float32.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn as nn
from test_references import (
    FUTURE,
    HKV,
    ROUNDED,
    C,
    H,
    L,
    T,
    V,
    assert_same,
    call,
    group_major,
    jitter,
    put,
    stream,
    trained,
)
from torch import Tensor

from model import Attention, Inputs, Model, ModelConfig

D = C // H
GQA = dict(n_layer=L, n_head=H, n_embd=C, block_size=T, vocab_size=V, attention="gqa", n_kv_head=HKV, pos="rope")


@pytest.fixture(scope="module")
def x_transformers():
    return pytest.importorskip("x_transformers.x_transformers", reason="run pip install -e .[test]")


def test_a_gate_of_elements_is_that_of_qwen3_next():
    """Their q_proj holds the queries and the gate of a head in turn, and their norms of q and k have gains 1 + w."""
    hf = pytest.importorskip("transformers", "5", reason="needs transformers >= 5; run pip install -e .[test]")
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    sizes = dict(hidden_size=C, num_attention_heads=H, num_key_value_heads=HKV, head_dim=D, num_hidden_layers=L)
    config = hf.Qwen3NextConfig(**sizes, attention_dropout=0.0, rms_norm_eps=1e-5)
    config._attn_implementation = "eager"
    theirs = jitter(module.Qwen3NextAttention(config, 1))
    q, gate = theirs.q_proj.weight.unflatten(0, (H, 2, D)).unbind(1)
    weights = {"qkv.weight": group_major(q.flatten(0, 1), theirs.k_proj.weight, theirs.v_proj.weight, groups=HKV)}
    weights |= {"gate.weight": gate.flatten(0, 1), "out.weight": theirs.o_proj.weight}
    weights |= {f"{name}.weight": 1 + getattr(theirs, name).weight for name in ("q_norm", "k_norm")}
    cfg = ModelConfig(**GQA, attn_gate="element", qk_norm=True)
    ours, x, t = Attention(cfg, layer=1).double(), stream(), torch.arange(T)
    angle = t[:, None] * 10000.0 ** (-torch.arange(D // 2, dtype=x.dtype) / (D // 2))
    angle = torch.cat((angle, angle), dim=1)
    mask = torch.zeros(1, 1, T, T, dtype=x.dtype).masked_fill(FUTURE, -math.inf)
    expected, _ = theirs(x, (angle.cos()[None], angle.sin()[None]), mask)
    got = call(ours, weights, x, Model(cfg).double().inputs(None, t, x))
    assert_same(got, expected, trained(theirs) | {"x": x}, ROUNDED)


def of_x_transformers(theirs: nn.Module, slots: bool = False) -> dict[str, Tensor]:
    weights = put("qkv", theirs.to_q, theirs.to_k, theirs.to_v, merge=partial(group_major, groups=H))
    return weights | put("out", theirs.to_out) | ({"slot_k": theirs.mem_k, "slot_v": theirs.mem_v} if slots else {})


PLAIN = dict(n_layer=L, n_head=H, n_embd=C, block_size=T, vocab_size=V, pos="none")


@pytest.mark.parametrize("options, flags", [
    ({"gate_values": True, "gate_values_headwise": True}, {"attn_gate": "head"}),
    ({"gate_values": True}, {"attn_gate": "element"}),
    ({"num_mem_kv": 3}, {"block": "superblock", "layer": "c.joint_slots", "n_slot": 3}),
    ({"sigmoid": True}, {"block": "superblock", "layer": "c.sigmoid"}),
])  # fmt: skip
def test_attention_is_that_of_x_transformers(options, flags, x_transformers):
    """Their sigmoid has no bias; -log n of a query that sees n tokens is given to it."""
    theirs = jitter(x_transformers.Attention(C, dim_head=D, heads=H, causal=True, **options))
    cfg = ModelConfig(**PLAIN, **flags)
    ours, x = Attention(cfg, 0, cfg.readers[0][0]).double(), stream()
    weights = of_x_transformers(theirs, slots="num_mem_kv" in options)
    if "attn_gate" in flags:
        weights |= put("gate", theirs.to_v_gate)
    bias = -torch.arange(1, T + 1, dtype=x.dtype).log()[:, None].expand(T, T) if "sigmoid" in options else None
    assert_same(call(ours, weights, x, Inputs()), theirs(x, attn_bias=bias), trained(theirs) | {"x": x}, ROUNDED)


def test_value_residuals_are_those_of_x_transformers(x_transformers):
    """Its mix is one half, with which ours begins. The gains of its norms are 1 + g."""
    options = dict(add_value_residual=True, learned_value_residual_mix=False, use_rmsnorm=True, ff_no_bias=True)
    theirs = jitter(x_transformers.Decoder(dim=C, depth=L, heads=H, attn_dim_head=D, **options))
    ours = Model(ModelConfig(**PLAIN, norm="rmsnorm", norm_eps=0.0, value_residual=True)).double()
    weights, x = {"norm.weight": 1 + theirs.final_norm.g}, stream()
    for i in range(L):
        (norms, attn, _), (more, mlp, _) = theirs.layers[2 * i : 2 * i + 2]
        one, two = f"blocks.{i}.sums.0", f"blocks.{i}.sums.1"
        weights |= {f"{one}.before.weight": 1 + norms[0].g, f"{two}.before.weight": 1 + more[0].g}
        weights |= {f"{one}.attn.{name}": w for name, w in of_x_transformers(attn).items()}
        weights |= {f"{two}.mlp.up.weight": mlp.ff[0][0].weight, f"{two}.mlp.down.weight": mlp.ff[-1].weight}
        weights |= {f"{one}.attn.mix.{n}.weight": torch.full((1,), 0.5).double() for n in (0, 1) if i}
    weights |= {name: p for name, p in ours.named_parameters() if name.startswith("wte.")}
    ours.forward = lambda x: ours.through_blocks(x, Inputs())
    assert_same(call(ours, weights, x), theirs(x), trained(theirs) | {"x": x}, ROUNDED)


def test_the_mix_of_values_begins_with_halves():
    net = Model(ModelConfig(**PLAIN, value_residual=True), seed=1)
    gains = {name: p.item() for name, p in net.named_parameters() if ".mix." in name}
    assert set(gains.values()) == {0.5} and len(gains) == 2 * (L - 1)
