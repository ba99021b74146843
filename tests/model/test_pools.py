"""The readers of a superblock's layer: how a string is read, and what tests/naive.py does not compute of them."""

import math
import re

import pytest
import torch

import model as M
from configurator import try_flags
from engine.optim import hidden_matrices
from engine.plan.accounting import flops
from model import Inputs
from tests.models import TINY, build, leaves

C = TINY["n_embd"]
T = TINY["block_size"]
D = C // TINY["n_head"]


def shape_of(layer: str, **flags) -> list[list[list[str]]]:
    cfg = M.ModelConfig(**TINY | {"block": layer} | flags)
    try_flags(cfg)
    return [[[r.name for r in each] for each in cfg.sums(layer)] for layer in range(len(cfg.strings))]


# ---- strings


SEQ2SEQ = {"objective": "seq2seq"}


@pytest.mark.parametrize("layer,flags,expected", [
    ("c,p", {}, [[["attn"], ["mlp"]]]),
    ("c+p", {}, [[["attn", "mlp"]]]),
    ("p/2,c,p/2", {}, [[["mlp"], ["attn"], ["mlp2"]]]),
    ("c/2+p/2,c/2+p/2", {}, [[["attn", "mlp"], ["attn2", "mlp2"]]]),
    ("c+s,p;c", {}, [[["attn", "slots"], ["mlp"]], [["attn"]]]),
    ("m,c+p", SEQ2SEQ, [[["cross"], ["attn", "mlp"]]]),
    ("p,c+p,c", SEQ2SEQ, [[["mlp"], ["attn", "mlp2"], ["cross"], ["attn2"]]]),  # behind the context
])  # fmt: skip
def test_a_string_names_the_readers_of_each_sum(layer, flags, expected):
    assert shape_of(layer, **flags) == expected


@pytest.mark.parametrize("layer,flags,said", [
    ("", {}, "block='': '' is no reader"),
    ("c/0", {}, "'c/0' is no reader"),
    ("c" + ",p" * 5000, {}, "more than 1000 characters"),
    ("c.tanh", {}, ".tanh is no switch; known are heads, stream,"),
    ("c.relu.gelu", {}, "'c.relu.gelu' makes one choice twice"),
    ("p", {}, "block=p with n_layer=2: a layer has no c"),
    ("m,c", {}, "set objective=seq2seq"),
    ("p;c", {"n_layer": 1}, "more strings than layers"),
    ("2c", {}, "attn takes 2 of 4 heads"),
    ("2p,c", {}, "mlp takes 2 of the units"),
    ("c/4", {"attention": "gqa", "n_kv_head": 2}, "attn takes 1/4 of 4 heads and of 2 key/value heads"),
    ("c.stream/2", {}, "2 heads of 8 channels are not as wide as the stream"),
    ("c.swiglu", {}, "attn.swiglu needs two keys for each value"),
    ("c.relu.own_slots", {}, "slots stand beside the softmax of a c"),
    ("c.relu", {"pos": "alibi"}, "needs a softmax, not .relu"),
    ("c/2", {"pos": "alibi"}, "the slopes are those of all heads"),
])  # fmt: skip
def test_what_a_layer_cannot_be_is_refused(layer, flags, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        shape_of(layer, **flags)


def test_outputs_begin_smaller_where_more_readers_write():
    """0.02 / sqrt(number of readers of all layers); slots beside the context are one more."""
    for layer, n in (("c,p", 6), ("c/2+p/2,c/2+p/2", 12), ("c;c,p", 4), ("c.own_slots", 6)):
        net = build(block=layer, n_layer=3, n_embd=64, n_head=4)
        assert net.blocks[0].sums[0].attn.out.initial["weight"].std == 0.02 / math.sqrt(n)


def test_the_matrix_behind_units():
    """It writes to the stream: its initial values are scaled and Muon trains it; the units' outputs are not scaled."""
    net = build(block="p.matrix+c", n_embd=64)
    mlp = net.blocks[0].sums[0].mlp
    assert mlp.down.initial["weight"].std == 0.02
    assert mlp.out.initial["weight"].std == 0.02 / math.sqrt(4)
    assert {mlp.up.weight, mlp.down.weight, mlp.out.weight} <= hidden_matrices(net).keys()


@pytest.mark.parametrize("phi", ["relu", "sigmoid"])
def test_a_query_that_sees_nothing_reads_nothing(phi):
    """A document of the text that is not in the memory: as with a softmax, 0 and not nan."""
    net = build(block=f"c,m.{phi}", objective="seq2seq", n_encoder_layer=1)
    cross = net.blocks[0].sums[1].cross
    x, memory = leaves((1, 3, C), (1, 2, C))
    docs = (torch.tensor([[0, 1, 1]]), torch.tensor([[0, 0]]))
    y = cross(x, Inputs(memory=memory, memory_docs=docs))
    assert y[0, 0].abs().max() > 0
    assert torch.equal(y[0, 1:], torch.zeros(2, C, dtype=x.dtype))


def test_flops_count_what_a_layer_multiplies():
    """6 per weight and token, and 12 per head, channel, key and token: of each query to T tokens, 5 slots."""
    net = build(block="c/2,s/4+p.matrix", n_slot=5, n_layer=1, conv=3)
    weights = sum(p.numel() for name, p in net.named_parameters() if p.dim() == 2 and "wpe" not in name)
    assert flops(net, T) == 6 * T * weights + 12 * T * D * (2 * T + 1 * 5)


@pytest.mark.parametrize("layer", ["c.stream", "c.stream.relu+p", "c.stream.own_slots", "c,s"])
def test_queries_of_the_stream_work_in_mixed_precision(layer):
    """The stream is in float32 there, and keys and values in 16 bits. A pool has at least one slot."""
    sizes = {} if layer == "c.stream" else {"mlp_ratio": 0.01}
    net = build(torch.float32, block=layer, fp32_residual=True, **sizes)
    idx = torch.randint(TINY["vocab_size"], (2, T))
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(idx, idx)
    loss.backward()
    assert loss.item() == pytest.approx(net(idx, idx).item(), abs=0.05)
    assert all(p.grad.isfinite().all() for p in net.parameters())
