"""The readers of a superblock's layer: how a string is read, and every choice from its formula."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

import model as M
from configurator import try_flags
from engine.optim import hidden_matrices
from engine.plan.accounting import flops
from model import Inputs
from tests.models import DOCS, TINY, assert_same, build, jitter, leaves, naive_attention

C, H, T, D = TINY["n_embd"], TINY["n_head"], TINY["block_size"], TINY["n_embd"] // TINY["n_head"]


def shape_of(layer: str, **flags) -> list[list[list[str]]]:
    cfg = M.ModelConfig(**TINY | {"block": layer} | flags)
    try_flags(cfg)
    return [[[r.name for r in each] for each in cfg.sums(layer)] for layer in range(len(cfg.strings))]


def pool(layer: str, **flags) -> tuple[M.Model, M.Heads | M.MLP]:
    """A model with weights away from the initial ones, and the first reader of its first layer."""
    net = build(block=layer, **{"pos": "none"} | flags)
    jitter(net)
    each = net.blocks[0].sums[0]
    return net, getattr(each, each.names[0])


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
    ("p;c", {"objective": "seq2seq", "n_encoder_layer": 1}, "a layer has no c"),
    ("2c", {}, "attn takes 2 of 4 heads"),
    ("2p,c", {}, "mlp takes 2 of the units"),
    ("c/3", {}, "attn takes 1/3 of 4 heads"),
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


def test_parts_have_their_share_of_heads_and_units():
    net = build(block="3c/4+p/2,c/4+p/2", n_embd=64, mlp="swiglu")
    first, second = net.blocks[0].sums
    assert first.attn.qkv.weight.shape == (3 * 48, 64) and second.attn2.out.weight.shape == (64, 16)
    units = [each.weight.size(1) for each in (first.mlp.down, second.mlp2.down)]
    assert units == [64, 64]  # 170.67 / 2, to a multiple of 64


def test_halves_do_what_the_whole_does():
    """Two halves of the heads and of the hidden units in one sum, with the rows and columns of the whole: one sum."""
    whole, _ = pool("c+p", pos="rope")
    halves, _ = pool("c/2+c/2+p/2+p/2", pos="rope")
    for a, b in zip(whole.blocks, halves.blocks, strict=True):
        (a,), (b,) = a.sums, b.sums
        b.before.load_state_dict(a.before.state_dict())
        for half, (attn, mlp) in enumerate(((b.attn, b.mlp), (b.attn2, b.mlp2))):
            for ours, theirs, names in ((attn, a.attn, ("qkv", "out")), (mlp, a.mlp, ("up", "down"))):
                for dim, name in enumerate(names):
                    weight = getattr(theirs, name).weight.chunk(2, dim)[half]
                    getattr(ours, name).weight.data.copy_(weight)
    for name in ("wte", "norm"):
        halves.get_submodule(name).load_state_dict(whole.get_submodule(name).state_dict())
    idx = torch.randint(TINY["vocab_size"], (2, T))
    assert torch.allclose(halves(idx), whole(idx), atol=1e-10)


def test_outputs_begin_smaller_where_more_readers_write():
    """0.02 / sqrt(number of readers of all layers); slots beside the context are one more."""
    for layer, n in (("c,p", 6), ("c/2+p/2,c/2+p/2", 12), ("c;c,p", 4), ("c.own_slots", 6)):
        net = build(block=layer, n_layer=3, n_embd=64, n_head=4)
        assert net.blocks[0].sums[0].attn.out.initial["weight"].std == 0.02 / math.sqrt(n)


# ---- formulas


MAPS = {"sigmoid": torch.sigmoid, "relu": F.relu, "gelu": F.gelu, "relu2": lambda x: F.relu(x) ** 2}


@pytest.mark.parametrize("flags,T", [
    ({}, 13),
    ({"window": 3}, 300),
    ({"attention": "gqa", "n_kv_head": 2, "attn_softcap": 1.5}, 300),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("objective", ["causal", "masked"])
@pytest.mark.parametrize("phi", MAPS)
def test_a_map_over_the_context_from_scores_written_out(phi, objective, flags, T):
    """relu(s) / n (arXiv:2309.08586), sigmoid(s - log n) (2409.04431), where a query sees n tokens."""
    net, attn = pool(f"c.{phi}", objective=objective, block_size=T, **flags)
    Hkv, window, cap = net.cfg.kv_heads, flags.get("window") or T, flags.get("attn_softcap")
    (x,) = leaves((2, T, C))
    docs = torch.cat((DOCS, torch.full((2, T - 13), 9)), dim=1)
    rows = attn.qkv.weight.unflatten(0, (Hkv, H // Hkv + 2, D))
    distance = torch.arange(T)[:, None] - torch.arange(T)
    seen = (distance.abs() < window) & ((objective == "masked") | (distance >= 0)) & (docs[:, :, None] == docs[:, None])
    n, out = seen.sum(-1, keepdim=True).double(), []
    for h in range(H):
        group, member = divmod(h, H // Hkv)
        q, k, v = (x @ rows[group, i].T for i in (member, -2, -1))
        scores = q @ k.mT / math.sqrt(D)
        scores = cap * torch.tanh(scores / cap) if cap else scores
        weights = torch.sigmoid(scores - n.log()) if phi == "sigmoid" else MAPS[phi](scores) / n
        out.append((weights * seen) @ v)
    expected = torch.cat(out, dim=-1) @ attn.out.weight.T
    assert_same(attn(x, Inputs(docs=(docs, docs))), expected, [x, *attn.parameters()])


@pytest.mark.parametrize("out", ["matrix", "none"])
@pytest.mark.parametrize("source,query", [("c", "heads"), ("c", "stream"), ("s", "heads")])
def test_queries_and_outputs_without_a_matrix(source, query, out):
    """softmax(q k^T / sqrt(D)) v of heads whose queries, or whose results, are slices of the stream."""
    _, attn = pool(f"{source}.{query}.{out}+c", **{"n_slot": 5} if source == "s" else {})
    (x,) = leaves((2, T, C))

    def heads(n: int, i: int, weight: torch.Tensor) -> torch.Tensor:
        """Those of the i-th of n matrices whose rows for each head stand in turn."""
        return (x @ weight.unflatten(0, (H, n, D))[:, i].flatten(0, 1).T).unflatten(2, (H, -1)).transpose(1, 2)

    if source == "s":
        q = heads(1, 0, attn.q.weight)
        k, v = (slot.expand(2, -1, -1, -1) for slot in (attn.slot_k, attn.slot_v))
    elif query == "heads":
        q, k, v = (heads(3, i, attn.qkv.weight) for i in range(3))
    else:
        q = x.unflatten(2, (H, -1)).transpose(1, 2)
        k, v = (heads(2, i, attn.kv.weight) for i in range(2))
    expected = naive_attention(q, k, v, causal=source == "c").transpose(1, 2).flatten(2)
    if out == "matrix":
        expected = expected @ attn.out.weight.T
    assert_same(attn(x, Inputs()), expected, [x, *attn.parameters()])


@pytest.mark.parametrize("phi", ["softmax", "sigmoid", "gelu", "swiglu"])
@pytest.mark.parametrize("out", ["matrix", "none"])
def test_units_from_their_weights(phi, out):
    """f(x W1^T + b1) W2^T + b2."""
    _, mlp = pool(f"p.{phi}.{out}+c", n_embd=32, bias=True)
    (x,) = leaves((2, T, C))
    scores = x @ mlp.up.weight.T + mlp.up.bias
    if phi == "softmax":
        hidden = (scores / math.sqrt(C)).softmax(-1)
    elif phi == "swiglu":  # without the unit of 64, which needs a width of 64, pairs of gate and value alternate
        gate, value = scores.unflatten(-1, (-1, 2)).unbind(-1)
        hidden = F.silu(gate) * value
    else:
        hidden = MAPS[phi](scores)
    expected = hidden @ mlp.down.weight.T + mlp.down.bias
    if out == "matrix":
        expected = expected @ mlp.out.weight.T + mlp.out.bias
    assert_same(mlp(x, Inputs()), expected, [x, *mlp.parameters()])


@pytest.mark.parametrize("phi", ["relu2", "sigmoid", "swiglu"])
def test_a_map_over_slots(phi):
    """Heads that read learned keys through a map: no normaliser, and two keys of a gated kind for each value."""
    _, slots = pool(f"s.{phi}+c", n_slot=5, attention="gqa", n_kv_head=2)
    (x,) = leaves((2, T, C))
    q = (x @ slots.q.weight.T).unflatten(2, (2, 2, D)).permute(0, 2, 3, 1, 4)  # (B, Hkv, G, T, D)
    scores = q @ slots.slot_k[:, None].mT / math.sqrt(D)
    weights = F.silu(scores[..., :5]) * scores[..., 5:] if phi == "swiglu" else MAPS[phi](scores)
    y = (weights @ slots.slot_v[:, None]).permute(0, 3, 1, 2, 4).flatten(2)
    assert_same(slots(x, Inputs()), y @ slots.out.weight.T, [x, *slots.parameters()])


@pytest.mark.parametrize("slots,mlp,keys", [
    ("s+c", "p+c", 1), ("s.swiglu+c", "p.swiglu+c", 2), ("c.own_slots", "p+c", 1),
])  # fmt: skip
def test_slots_have_as_many_parameters_as_an_mlp(slots, mlp, keys):
    """To half a slot of each head."""
    (_, slots), (_, mlp) = pool(slots), pool(mlp)
    surplus = slots.slot_k.numel() + slots.slot_v.numel() - sum(p.numel() for p in mlp.parameters())
    assert abs(surplus) <= (keys + 1) * H * D / 2


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
    cross, (x, memory) = net.blocks[0].sums[1].cross, leaves((1, 3, C), (1, 2, C))
    numbers = torch.tensor([[0, 1, 1]]), torch.tensor([[0, 0]])
    y = cross(x, Inputs(memory=memory, memory_docs=numbers))
    assert y[0, 0].abs().max() > 0 and torch.equal(y[0, 1:], torch.zeros(2, C, dtype=x.dtype))


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
