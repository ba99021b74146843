"""contextual_mlp against the readers' outputs, for new blocks and positions too, and against the bare matrices."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import gelu

import model as M
from tests.models import build, changes, grid, jitter
from tools.heads import contextual_mlp

ATTENTION = [{}, {"attention": "gqa", "n_kv_head": 2}, {"attention": "mqa"}]
OBJECTIVES = [{"objective": "causal"}, {"objective": "masked"}, {"objective": "seq2seq", "n_encoder_layer": 1}]
ALONE = {"doc_mask": False, "doc_positions": False}  # a text is one document
GRID = [row | ALONE for row in grid() if not row.get("n_expert")]
T = 13
C = 32
D = 8


def sharp(**flags) -> M.Model:
    """Weights large enough that the scores differ by more than rounding and the softcap bends them."""
    net = build(**flags)
    jitter(net)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith(("qk.weight", "qkv.weight", "cross.q.weight")):
                p *= 4
    return net


def text(net: M.Model, length: int = T) -> torch.Tensor:
    torch.manual_seed(length)
    return torch.randint(net.cfg.vocab_size, (length,))


def read(net: M.Model, layer: int, head: int, position: int, reader: str = ""):
    """contextual_mlp of the text, beside a source where there is an encoder."""
    source = text(net, 9) if net.encoder else None
    return contextual_mlp(net, text(net), layer, head, position, source, reader)


def bias_of(pool: M.MultiHeadAttention | M.MLP) -> torch.Tensor | float:
    """What a reader gives whatever it reads."""
    last = pool.down if pool.reader.units else pool.out
    bias = getattr(last, "bias", None)
    if bias is None:
        return 0.0
    return pool.out(bias) if pool.reader.units and pool.reader.out == "matrix" else bias


@pytest.mark.parametrize("flags", GRID, ids=changes)
def test_heads_add_up_to_their_reader(flags):
    """Sum of h_i a_i over all heads is the reader's output without its bias; of an MLP, h_i is phi of b_i . x."""
    net = sharp(**flags)
    for layer, t in ((0, 6), (1, 12)):
        pools = {name: getattr(each, name) for each in net.blocks[layer].sums for name in each.names}
        for name, pool in pools.items():
            heads = 1 if pool.reader.units else pool.n_head
            seen = []
            with pool.register_forward_hook(lambda _, inputs, y, seen=seen: seen.append((inputs[0][0], y[0]))):
                units = [read(net, layer, head, t, name) for head in range(heads)]
            x, y = seen[0]
            total = sum(hidden @ outgoing for _, outgoing, hidden in units)
            assert total.abs().max() > 1e-7, "the reader does nothing, so this test sees nothing"
            assert torch.allclose(total, y[t] - bias_of(pool), rtol=0, atol=1e-10)
            incoming, outgoing, hidden = units[0]
            assert incoming.shape == outgoing.shape == (len(hidden), C)
            if pool.reader.units and pool.reader.phi in ("mlp", "relu2") and net.cfg.mlp == "gelu":
                score = incoming @ x[t] + (0.0 if pool.up.bias is None else pool.up.bias)
                expected = torch.relu(score) ** 2 if pool.reader.phi == "relu2" else gelu(score)
                assert torch.allclose(hidden, expected, atol=1e-12)


BARE = [{"pos": "none"}, {"pos": "rope"}, {"pos": "rope", "qk_norm": True}]
BY_HAND = [p | a | o for p, (a, o) in itertools.product(BARE, zip(ATTENTION, OBJECTIVES, strict=True))]
BY_HAND += [{"pos": "alibi"}, {"pos": "none", "attn_softcap": 0.5}]


@pytest.mark.parametrize("flags", BY_HAND, ids=str)
def test_weights_by_hand(flags):
    """b_i = W_Q^T R W_K x_i / sqrt(D), R the turn by the distance, a_i = W_O W_V x_i / Z, h_i = exp of the score."""
    net = sharp(**flags)
    groups = net.cfg.kv_heads
    for layer, head, t in ((0, 3, 12), (1, 2, 6), (1, 1, 0)):
        attn = net.blocks[layer].sums[0].attn
        seen = []
        with attn.register_forward_hook(lambda _, inputs, y, seen=seen: seen.append(inputs[0][0])):
            incoming, outgoing, hidden = read(net, layer, head, t)
        rows = attn.qkv.weight.detach().view(groups, -1, D, C)
        g = head * groups // 4
        W_Q = rows[g, head - g * 4 // groups]
        W_K = rows[g, -2]
        W_V = rows[g, -1]
        W_O = attn.out.weight.detach()[:, head * D : (head + 1) * D]
        x = seen[0]
        visible = x if net.cfg.objective == "masked" else x[: t + 1]
        keys = visible @ W_K.T
        if net.cfg.qk_norm:
            q = W_Q @ x[t]
            keys = keys / (keys.square().mean(-1, keepdim=True) + 1e-5).sqrt() * attn.k_norm.weight.detach()
            W_Q = attn.q_norm.weight.detach()[:, None] * W_Q / (q.square().mean() + 1e-5).sqrt()
        if net.cfg.pos == "rope":  # pairs as complex numbers
            frequency = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
            angle = (torch.arange(len(visible))[:, None] - t) * frequency
            pairs = torch.complex(keys[:, : D // 2], keys[:, D // 2 :]) * torch.polar(torch.ones_like(angle), angle)
            keys = torch.cat((pairs.real, pairs.imag), dim=-1)
        b = keys @ W_Q / math.sqrt(D)
        score = b @ x[t]
        if cap := net.cfg.attn_softcap:
            score = cap * torch.tanh(score / cap)
        if net.cfg.pos == "alibi":
            score = score - 2.0 ** (-8 * (head + 1) / 4) * (t - torch.arange(len(visible)))
        units = score.exp()
        assert torch.allclose(incoming, b, rtol=1e-10, atol=1e-12)
        assert torch.allclose(outgoing, visible @ W_V.T @ W_O.T / units.sum(), rtol=1e-10, atol=1e-12)
        assert torch.allclose(hidden, units, rtol=1e-10)


EXPERTS = {"block": "c,p;s,e", "n_slot": 5, "n_expert": 4}


@pytest.mark.parametrize("flags, place, words", [
    ({}, {"layer": 2}, r"layer=2 must be in 0 \.\. 1$"),
    ({}, {"head": 4}, r"head=4 must be in 0 \.\. 3$"),
    ({}, {"position": T}, rf"position={T} must be in 0 \.\. {T - 1}$"),
    ({}, {"position": -1}, r"position=-1 must be in 0 \.\. \d+$"),
    (EXPERTS, {}, "layer 1 has no attention to the context; .* reader: slots, experts$"),
    (EXPERTS, {"reader": "experts"}, "reader=experts cannot be read in layer 1; it has slots$"),
], ids=str)  # fmt: skip
def test_what_is_not_there_is_refused(flags, place, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        read(sharp(**flags), **{"layer": 1, "head": 0, "position": 6} | place)


def test_what_its_units_do_not_say_is_refused():
    """Here a variant of attention whose results are twice as large."""
    net = sharp()
    attn = net.blocks[1].sums[0].attn
    read_once = attn.read
    attn.read = lambda *given: 2 * read_once(*given)
    with pytest.raises(ValueError, match="^layer=1 head=2 computes something else .* a flag of Attention"):
        read(net, 1, 2, 6)
