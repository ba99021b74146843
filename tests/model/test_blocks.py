"""Simplified blocks and the superblock against their equations, every matrix materialised, and against each other."""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import model as M
from configurator import parse
from engine.config import Config
from engine.decode import KVCache
from model import Inputs
from tests.models import (
    DOCS,
    SOURCE_DOCS,
    TINY,
    S,
    T,
    assert_same,
    beside,
    build,
    jitter,
    leaves,
    naive_attention,
    tokens,
)

SAS = ["simplified", "simplified_parallel"]
C, H = TINY["n_embd"], TINY["n_head"]


def inputs_of(net, docs=None, memory=None, memory_docs=None):
    table = net.position_table(torch.arange(T), torch.float64)
    return Inputs(table, memory=memory) if docs is None else Inputs(table, (docs, docs), memory, (docs, memory_docs))


def heads_of(reader: M.Heads, q, k, v, inputs: Inputs) -> torch.Tensor:
    """(B, T, C): the reader's heads on these q, k and v, without its projections."""
    reader.project, reader.out = lambda x, inputs: (q, k, v), torch.nn.Identity()
    return reader(None, inputs)


# ---- simplified


def naive_shaped(net, attn, x, window, slopes, docs):
    """(alpha I + beta softmax - gamma C) V per head, with I and C as T x T matrices."""
    D, Hkv = C // H, net.cfg.kv_heads
    qk = attn.qk(x).view(2, T, Hkv, H // Hkv + 1, D)
    q = qk[..., :-1, :].reshape(2, T, H, D).transpose(1, 2)
    k = qk[..., -1, :].transpose(1, 2)
    if net.cfg.qk_norm:
        q, k = attn.q_norm(q), attn.k_norm(k)
    if net.cfg.pos == "rope":
        q, k, _ = attn.position(q, k, k, inputs_of(net).table)
    value = x
    if isinstance(attn.value, M.NearIdentity):
        value = attn.value.skip.weight * x + attn.value.resid.weight * x @ attn.value.weight.T
    eye, out = torch.eye(T, dtype=torch.float64).expand(2, 1, T, T), []
    causal, docs = net.cfg.objective != "masked", None if docs is None else (docs, docs)
    for h in range(H):
        v, content = value[..., h * D : (h + 1) * D], (q[:, h, None], k[:, h * Hkv // H, None])
        no_content = [torch.zeros_like(z) for z in content]
        softmax, uniform = (
            naive_attention(*pair, eye, window, 0.0, slopes and [slopes[h]], causal, docs)[:, 0]
            for pair in (content, no_content)
        )
        out.append((attn.alpha[h] * eye[:, 0] + attn.beta[h] * softmax - attn.gamma[h] * uniform) @ v)
    y = torch.cat(out, dim=-1)
    if isinstance(attn.out, M.NearIdentity):
        y = attn.out.skip.weight * y + attn.out.resid.weight * y @ attn.out.weight.T
    return y


VARIANTS = [
    {},
    {"pos": "rope", "qk_norm": True},
    {"pos": "alibi"},
    {"window": 4},
    {"window": 4, "pos": "alibi", "attention": "gqa", "n_kv_head": 2},
    {"attention": "mqa", "bias": True},
    {"simplified_value_proj": "all"},
    {"simplified_value_proj": "none"},
]


def both_ways(variants: list[dict]) -> list[dict]:
    """Each of the variants as a causal model and, but for ALiBi, as an encoder."""
    ways = itertools.product(variants, ["causal", "masked"])
    return [flags | {"objective": way} for flags, way in ways if way == "causal" or flags.get("pos") != "alibi"]


@pytest.mark.parametrize("flags", both_ways(VARIANTS), ids=str)
@pytest.mark.parametrize("docs", [None, DOCS], ids=["whole", "docs"])
def test_shaped_attention_equals_its_matrices(flags, docs):
    """Of both layers; the first one may have other values than those above."""
    net = build(block="simplified", **flags)
    jitter(net)
    slopes = M.alibi_slopes(H).double().tolist() if net.cfg.pos == "alibi" else None
    for block in net.blocks:
        attn, [x] = block.sums[0].attn, leaves((2, T, C))
        expected = naive_shaped(net, attn, x, net.cfg.window, slopes, docs)
        assert_same(attn(x, inputs_of(net, docs)), expected, [x, *attn.parameters()], atol=1e-9)


@pytest.mark.parametrize("block", SAS)
def test_the_whole_network_of_the_paper(block):
    """The paper's setting against the equations of its authors' code (arXiv:2311.01906), from the parameters alone."""
    sizes = ["--n_layer=3", f"--n_head={H}", f"--n_embd={C}", f"--block_size={T}", f"--vocab_size={TINY['vocab_size']}"]
    cfg = parse(Config, ["config/sas_18l_768.py", f"--block={block}", *sizes])
    net, idx = M.Model(cfg).double(), tokens(2, T)
    jitter(net)
    w = dict(net.named_parameters())
    past = torch.ones(T, T, dtype=torch.float64).tril()
    uniform = past / past.sum(-1, keepdim=True)

    def rms_norm(x, weight):
        return weight * x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-5)

    def attention(x, name, first):
        q, k = (x @ w[f"{name}.qk.weight"].T + w[f"{name}.qk.bias"]).unflatten(-1, (H, 2, C // H)).unbind(3)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(C // H)
        alpha, beta, gamma = (w[f"{name}.{gain}"][:, None, None] for gain in ("alpha", "beta", "gamma"))
        A = alpha * torch.eye(T) + beta * scores.masked_fill(past == 0, -math.inf).softmax(-1) - gamma * uniform
        if first:
            W = w[f"{name}.value.resid.weight"] * w[f"{name}.value.weight"]
            x = x @ (W + w[f"{name}.value.skip.weight"] * torch.eye(C)).T
        return torch.einsum("bhij,bjhd->bihd", A, x.unflatten(-1, (H, -1))).flatten(2)

    def mlp(x, name):
        return F.relu(x @ w[f"{name}.up.weight"].T) @ w[f"{name}.down.weight"].T

    x = w["wte.weight"][idx] + w["pos.wpe.weight"]
    for i in range(3):
        one, two = f"blocks.{i}.sums.0", f"blocks.{i}.sums.1"
        n = rms_norm(x, w[f"{one}.before.weight"])
        if block == "simplified":
            x = w[f"{one}.gain.weight"] * attention(n, f"{one}.attn", i == 0)
            part = mlp(rms_norm(x, w[f"{two}.before.weight"]), f"{two}.mlp")
            x = w[f"{two}.skip.weight"] * x + w[f"{two}.gain.weight"] * part
        else:
            x = w[f"{one}.gains.0.weight"] * attention(n, f"{one}.attn", i == 0)
            x = x + w[f"{one}.gains.1.weight"] * mlp(n, f"{one}.mlp")
    expected = F.layer_norm(x, (C,), w["norm.weight"], w["norm.bias"]) @ w["wte.weight"].T
    assert_same(net(idx), expected, list(net.parameters()), atol=1e-9)


@pytest.mark.parametrize("block", ["parallel", "superblock", *SAS])
@pytest.mark.parametrize("placement,used", [
    ("pre", "before"), ("post", "total"), ("sandwich", "before after"), ("none", ""),
])  # fmt: skip
def test_norms_around_branches_and_gains(block, placement, used):
    """Where each norm stands: a gain of one branch is inside of the norm that both branches share, else outside."""

    def norms(module):
        def norm(name, z):
            return F.rms_norm(z, (C,), getattr(module, name).weight, 1e-5) if name in used.split() else z

        return (partial(norm, name) for name in ("before", "after", "total"))

    kind = {"norm": "rmsnorm"} if used else {}
    net = build(block=block, norm_placement=placement, pos="none", **kind)
    jitter(net)
    (one, *two), [x], inputs = net.blocks[1].sums, leaves((2, T, C)), Inputs()
    before, after, total = norms(one)
    if block == "simplified":
        s = total(one.gain.weight * after(one.attn(before(x), inputs)))
        before, after, total = norms(two[0])
        expected = total(two[0].skip.weight * s + two[0].gain.weight * after(two[0].mlp(before(s), inputs)))
    else:
        attn, mlp = (reader(before(x), inputs) for reader in (one.attn, one.mlp))
        if block not in SAS:
            expected = total(x + after(attn + mlp))
        else:
            expected = total(after(one.gains[0].weight * attn + one.gains[1].weight * mlp))
    assert torch.allclose(net.blocks[1](x, inputs), expected, atol=1e-12)


@pytest.mark.parametrize("block", SAS)
def test_without_norms_one_stays(block):
    """The first one, in the encoder as well."""
    net = build(block=block, objective="seq2seq", norm_placement="none")
    norms = {name for name, m in net.named_modules() if isinstance(m, torch.nn.LayerNorm | torch.nn.RMSNorm)}
    assert norms == {"first_norm", "encoder.first_norm"}
    jitter(net)
    idx, source, read = tokens(2, T), tokens(2, S), []
    for stack in (net.encoder, net):
        stack.blocks[0].register_forward_pre_hook(lambda _, args: read.append(args[0]))
    net(idx, source=source)
    for stack, x, text in zip((net.encoder, net), read, (source, idx), strict=True):
        expected = F.layer_norm(net.embed(text, 0)[0], (C,), stack.first_norm.weight)
        assert torch.allclose(x, expected, atol=1e-12)


@pytest.mark.parametrize("flags", [
    {"pos": "none", "n_kv_head": 4},
    {"pos": "rope", "n_kv_head": 2, "qk_norm": True, "bias": True},
    {"pos": "rope", "n_kv_head": 1, "attn_softcap": 0.5, "window": 2},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("docs", [None, (DOCS, SOURCE_DOCS)], ids=["whole", "docs"])
def test_cross_attention_equals_naive_attention(flags, docs):
    """Neither positions nor a window nor order come into it."""
    net = build(objective="seq2seq", attention="gqa", **flags)
    jitter(net)
    x, memory = leaves((2, T, C), (2, S, C))
    branch = net.blocks[1].sums[1]
    attn, n = branch.cross, F.layer_norm(x, (C,), branch.before.weight, branch.before.bias)
    q = attn.q(n).unflatten(-1, (H, C // H)).transpose(1, 2)
    k, v = (y.transpose(1, 2) for y in attn.kv(memory).unflatten(-1, (-1, 2, C // H)).unbind(3))
    y = naive_attention(attn.q_norm(q), attn.k_norm(k), v, 0, net.cfg.attn_softcap, None, False, docs)
    of_text, of_memory = docs or (None, None)
    got = branch(x, inputs_of(net, of_text, memory, of_memory))
    assert_same(got, x + attn.out(y.transpose(1, 2).flatten(2)), [x, memory, *branch.parameters()])


# ---- superblock


GENERALISES = [  # layer of the superblock, the block that it is then, objective
    ("c,p", "standard", "causal"),
    ("c,p", "standard", "masked"),
    ("c,p", "standard", "seq2seq"),
    ("c+p", "parallel", "causal"),
    ("c+p", "parallel", "masked"),
    ("m,c+p", "parallel", "seq2seq"),
]


@pytest.mark.parametrize("flags", [{"bias": True}, {"mlp": "swiglu", "attention": "gqa", "n_kv_head": 2}], ids=str)
@pytest.mark.parametrize("layer,block,objective", GENERALISES)
def test_superblock_is_the_block_it_generalises(layer, block, objective, flags):
    """Of one seed, both begin with the same weights; of the same weights, they have the same logits and gradients."""
    flags = TINY | flags | dict(pos="rope", objective=objective)
    known, ours = (
        M.Model(M.ModelConfig(**flags | each), seed=7).double() for each in ({"block": block}, {"block": layer})
    )
    for (name, first), other in zip(known.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(first, other), name
    jitter(known)
    ours.load_state_dict(known.state_dict())
    idx, given = tokens(2, 13), beside(known, docs=objective != "causal")
    assert torch.allclose(ours(idx, **given), known(idx, **given), atol=1e-10)
    for net in (known, ours):
        net(idx, idx, **given).backward()
    for (name, expected), got in zip(known.named_parameters(), ours.parameters(), strict=True):
        assert torch.allclose(got.grad, expected.grad, atol=1e-10), name


SLOTTED = both_ways([{"pos": "none"}, {"pos": "alibi"}, {"pos": "rope"}])


@pytest.mark.parametrize("window,Hkv", [(0, 4), (3, 2)])
@pytest.mark.parametrize("flags", SLOTTED, ids=str)
@pytest.mark.parametrize("docs", [None, DOCS], ids=["whole", "docs"])
@pytest.mark.parametrize("kind", ["own", "joint"])
def test_joint_pool_from_scores_written_out(window, flags, Hkv, docs, kind):
    """Slots have no position and are always visible. In a softmax of their own, they meet queries without one."""
    flags = flags | dict(window=window, attention="gqa", n_kv_head=Hkv)
    if docs is not None and (kind, flags["pos"]) != ("joint", "rope"):  # which has other results for a packed document
        flags["doc_mask"] = True
    net = build(block=f"c.{kind}_slots", n_slot=5, **flags)
    jitter(net)
    heads, D = net.blocks[0].sums[0].attn, C // H
    q, k, v = leaves((2, H, T, D), (2, Hkv, T, D), (2, Hkv, T, D))
    Q, K, slopes, slots = q, k, None, (heads.slot_k, heads.slot_v)
    if net.cfg.pos == "rope":
        Q, K, _ = heads.position(q, k, v, inputs_of(net).table)
    if net.cfg.pos == "alibi":
        slopes = M.alibi_slopes(H).double()
    mask = net.cfg.objective == "causal", docs if docs is None else (docs, docs)
    if kind == "joint":
        expected = naive_attention(Q, K, v, window, 0.0, slopes, *mask, slots)
    else:
        of_slots = naive_attention(q, *(slot.expand(2, -1, -1, -1) for slot in slots), causal=False)
        expected = naive_attention(Q, K, v, window, 0.0, slopes, *mask) + of_slots
    got = heads_of(heads, q, k, v, inputs_of(net, docs))
    assert_same(got, expected.transpose(1, 2).flatten(2), (*slots, q, k, v))


@pytest.mark.parametrize("flags", [{"window": 300, "attn_softcap": 1.5}, {"attention": "gqa", "n_kv_head": 2}], ids=str)
def test_alibi_beside_slots_in_a_long_text(flags):
    """600 positions, where the columns of the bias have carried over twice, as a whole and decoded in three pieces."""
    T, D = 600, C // H
    joint = dict(block="c.joint_slots", n_slot=5)
    net = build(**joint, pos="alibi", block_size=T, n_layer=1, **flags)
    jitter(net)
    heads, Hkv = net.blocks[0].sums[0].attn, net.cfg.kv_heads
    q, k, v = leaves((1, H, T, D), (1, Hkv, T, D), (1, Hkv, T, D))
    slopes, slots = M.alibi_slopes(H).double(), (heads.slot_k, heads.slot_v)
    expected = naive_attention(q, k, v, net.cfg.window, net.cfg.attn_softcap, slopes, slots=slots)
    expected = expected.transpose(1, 2).flatten(2)
    inputs = Inputs(net.position_table(torch.arange(T), torch.float64))
    assert_same(heads_of(heads, q, k, v, inputs), expected, (*slots, q, k, v))
    with torch.no_grad():
        heads.cache, pieces = KVCache(T), []
        for start, end in ((0, 460), (460, 599), (599, 600)):
            inputs = Inputs(net.position_table(torch.arange(start, end), torch.float64))
            pieces.append(heads_of(heads, *(x[:, :, start:end] for x in (q, k, v)), inputs))
        assert torch.allclose(torch.cat(pieces, dim=1), expected, atol=1e-10)
