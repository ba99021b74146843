"""Simplified blocks and the superblock against their equations, every matrix materialised, and against each other."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_model import assert_same, beside, build, jitter, leaves, naive_attention, tokens

import model as M
from configurator import Config
from engine import optim
from model import At

SAS = ["simplified", "simplified_parallel"]
T, C, H = 11, 32, 4


def stream(*shape) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def at(net, docs=None, memory=None, memory_docs=None):
    table = net.rotate.table(torch.arange(T), torch.float64)
    return At(table, memory=memory) if docs is None else At(table, (docs, docs), memory, (docs, memory_docs))


DOCS = torch.tensor([[0] * 4 + [2] * 7, [0] * 8 + [1] + [2] * 2])


# ---- simplified


def naive_shaped(net, attn, x, window, slopes, docs):
    """(alpha I + beta softmax - gamma C) V per head, with I and C as T x T matrices."""
    D, Hkv = C // H, net.cfg.kv_heads
    qk = attn.qk(x).view(2, T, Hkv, H // Hkv + 1, D)
    q = qk[..., :-1, :].reshape(2, T, H, D).transpose(1, 2)
    k = qk[..., -1, :].transpose(1, 2)
    if net.cfg.qk_norm:
        q, k = attn.heads.q_norm(q), attn.heads.k_norm(k)
    if net.cfg.pos == "rope":
        q, k, _ = attn.heads.rotate(q, k, k, at(net).table)
    value = x
    if isinstance(attn.value, M.NearIdentity):
        value = attn.value.skip * x + attn.value.resid * x @ attn.value.weight.T
    eye, out = torch.eye(T, dtype=torch.float64).expand(2, 1, T, T), []
    causal, docs = net.cfg.objective != "masked", None if docs is None else (docs, docs)
    for h in range(H):
        v, content = value[..., h * D : (h + 1) * D], (q[:, h, None], k[:, h * Hkv // H, None])
        no_content = [torch.zeros_like(z) for z in content]
        softmax, uniform = (
            naive_attention(*pair, eye, window, 0.0, slopes and [slopes[h]], causal, docs)[:, 0]
            for pair in (content, no_content)
        )
        heads = attn.heads
        out.append((heads.alpha[h] * eye[:, 0] + heads.beta[h] * softmax - heads.gamma[h] * uniform) @ v)
    y = torch.cat(out, dim=-1)
    if isinstance(attn.out, M.NearIdentity):
        y = attn.out.skip * y + attn.out.resid * y @ attn.out.weight.T
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
both_ways = pytest.mark.parametrize("objective", ["causal", "masked"])


@pytest.mark.parametrize("flags", VARIANTS, ids=str)
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("docs", [None, DOCS], ids=["whole", "docs"])
@both_ways
def test_shaped_attention_equals_its_matrices(flags, layer, docs, objective):
    net = build(block="simplified", objective=objective, **flags)
    jitter(net)
    attn, x = net.blocks[layer].attn, stream(2, T, C)
    slopes = M.alibi_slopes(H).double().tolist() if net.cfg.pos == "alibi" else None
    expected = naive_shaped(net, attn, x, net.cfg.window, slopes, docs)
    assert_same(attn(x, at(net, docs)), expected, [x, *attn.parameters()], atol=1e-9)


@pytest.mark.parametrize("flags", [*VARIANTS, *({"pos": p, "window": w} for p in M.POSITION for w in (0, 3))], ids=str)
@pytest.mark.parametrize("docs", [None, DOCS], ids=["whole", "docs"])
@both_ways
def test_shaped_attention_starts_as_the_identity(flags, docs, objective):
    net, x = build(block="simplified", objective=objective, **flags), stream(2, T, C)
    for block in net.blocks:
        assert torch.allclose(block.attn(x, at(net, docs)), x, atol=1e-12)


def test_the_centring_matrix_sees_no_future():
    """Values of 1 up to each row and a huge one behind it: the mean must not move."""
    v = torch.ones(1, 1, T, 2, dtype=torch.float64)
    v[:, :, -1] = 1e6
    q = torch.zeros(1, 1, T, 2, dtype=torch.float64)
    assert torch.allclose(M.uniform_mix(q, q, v, 2, M.Mask())[:, :, :-1], torch.ones(T - 1, 2, dtype=torch.float64))


@pytest.mark.parametrize("objective", ["causal", "seq2seq"])
def test_simplified_equations(objective):
    """A decoder's cross-attention stands between the two, or before both."""
    x, where = stream(2, T, C), At(memory=stream(2, 7, C) / 2)
    net = build(block="simplified", norm="rmsnorm", pos="none", objective=objective)
    jitter(net)
    b = net.blocks[1]
    norm = lambda n, z: F.rms_norm(z, (C,), n.before.weight, 1e-5)  # noqa: E731
    s = b.cross(b.g_attn * b.attn(norm(b.norm_attn, x), where), where)
    assert torch.allclose(b(x, where), b.g_skip * s + b.b_ff * b.mlp(norm(b.norm_mlp, s)), atol=1e-12)
    net = build(block="simplified_parallel", norm="rmsnorm", pos="none", objective=objective)
    jitter(net)
    b = net.blocks[1]
    n = norm(b.norm, b.cross(x, where))
    assert torch.allclose(b(x, where), b.g_attn * b.attn(n, where) + b.b_ff * b.mlp(n), atol=1e-12)


@pytest.mark.parametrize("block", ["parallel", *SAS])
@pytest.mark.parametrize(
    "placement,used", [("pre", "before"), ("post", "total"), ("sandwich", "before after"), ("none", "")]
)
def test_norms_around_branches_and_gains(block, placement, used):
    """Where each norm stands: a gain of one branch is inside of the norm that both branches share, else outside."""

    def norms(module):
        def norm(name, z):
            return F.rms_norm(z, (C,), getattr(module, name).weight, 1e-5) if name in used.split() else z

        return (partial(norm, name) for name in ("before", "after", "total"))

    net = build(block=block, norm="rmsnorm" if used else "none", norm_placement=placement, pos="none")
    jitter(net)
    b, x, where = net.blocks[1], stream(2, T, C), At()
    if block == "simplified":
        before, after, total = norms(b.norm_attn)
        s = total(b.g_attn * after(b.attn(before(x), where)))
        before, after, total = norms(b.norm_mlp)
        expected = total(b.g_skip * s + b.b_ff * after(b.mlp(before(s))))
    else:
        before, after, total = norms(b.norm)
        attn, mlp = b.attn(before(x), where), b.mlp(before(x))
        expected = total(x + after(attn + mlp) if block == "parallel" else after(b.g_attn * attn + b.b_ff * mlp))
    assert torch.allclose(b(x, where), expected, atol=1e-12)


@pytest.mark.parametrize("block", SAS)
def test_simplified_initial_values(block):
    """After every kind of initialisation, so that none overwrites the zeros."""
    net = build(block=block, simplified_beta_ff=0.25)
    for again in (False, True):
        if again:
            net.init_weights(5)
        for i, b in enumerate(net.blocks):
            qk = b.attn.qk.weight.view(H, 2, C // H, C)
            assert (qk[:, 0] == 0).all() and qk[:, 1].std().item() == pytest.approx(0.02, rel=0.1)
            for gain in (b.attn.heads.alpha, b.attn.heads.beta, b.attn.heads.gamma):
                assert gain.shape == (H,) and (gain == 1).all()
            assert b.b_ff.item() == pytest.approx(0.25) and b.g_attn.item() == 1
            assert [n for n, _ in b.attn.named_parameters() if "value" in n or "out" in n] == [
                "value.weight", "value.skip", "value.resid",
            ] * (i == 0)  # fmt: skip


@pytest.mark.parametrize("block", SAS)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_no_gain_decays(block, optimizer):
    net = build(block=block, simplified_value_proj="all")
    names = {p: n for n, p in net.named_parameters()}
    decays = {
        names[p].rpartition(".")[2]: group["weight_decay"] > 0
        for group in optim.build(net, Config(optimizer=optimizer)).param_groups
        for p in group["params"]
    }
    gains = {"alpha", "beta", "gamma", "g_attn", "b_ff", "skip", "resid"} | ({"g_skip"} if block == SAS[0] else set())
    assert gains <= decays.keys() and not any(decays[gain] for gain in gains)


@pytest.mark.parametrize("block", SAS)
@pytest.mark.parametrize("off", [{"norm": "none"}, {"norm_placement": "none"}], ids=str)
def test_without_norms_one_stays(block, off):
    norms = [
        n for n, m in build(block=block, **off).named_modules() if isinstance(m, torch.nn.LayerNorm | torch.nn.RMSNorm)
    ]
    assert len(norms) == 1 and norms[0].startswith("blocks.0.")


def test_sas_p_saves_parameters():
    """Values and projections are a sixth of a layer's matrices; the first layer keeps its values."""

    def count(**flags):
        with torch.device("meta"):
            return M.Model(M.ModelConfig(vocab_size=256, n_layer=12, **flags))

    standard, sas = count(), count(block="simplified_parallel", norm="rmsnorm")
    saved = standard.n_params() - sas.n_params()
    assert saved / standard.n_params() > 0.15
    assert saved == 12 * 2 * 768**2 - 768**2 + (25 * 768 - 13 * 768) - 12 * (3 * 12 + 2) - 2


# ---- cross-attention

S = 7  # tokens of a source
MEMORY_DOCS = torch.tensor([[0] * 5 + [2] * 2, [0, 1, 1, 1, 2, 2, 2]])


def naive_memory(heads, q, kv, softcap=0.0, docs=None):
    """Heads over a memory from q (B, T, C) and the keys and values of each group side by side, (B, S, 2 Hkv D)."""
    q = q.unflatten(-1, (H, C // H)).transpose(1, 2)
    k, v = (x.transpose(1, 2) for x in kv.unflatten(-1, (-1, 2, C // H)).unbind(3))
    y = naive_attention(heads.q_norm(q), heads.k_norm(k), v, 0, softcap, None, False, docs)
    return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("pos", ["alibi", "rope"])
@pytest.mark.parametrize("Hkv", [4, 2, 1])
@pytest.mark.parametrize("extra", [{}, {"qk_norm": True, "bias": True}, {"attn_softcap": 0.5, "window": 2}], ids=str)
@pytest.mark.parametrize("docs", [None, (DOCS, MEMORY_DOCS)], ids=["whole", "docs"])
def test_cross_attention_equals_naive_attention(pos, Hkv, extra, docs):
    """Neither positions nor a window nor order come into it."""
    net = build(objective="seq2seq", pos=pos, attention="gqa", n_kv_head=Hkv, **extra)
    jitter(net)
    x, memory = leaves((2, T, C), (2, S, C))
    branch = net.blocks[1].cross
    attn, n = branch.attn, F.layer_norm(x, (C,), branch.norm.before.weight, branch.norm.before.bias)
    (pool,) = attn.pools
    y = naive_memory(pool.heads, attn.into(n), pool.kv(memory), net.cfg.attn_softcap, docs)
    of_text, of_memory = docs or (None, None)
    got = branch(x, at(net, of_text, memory, of_memory))
    assert_same(got, x + attn.out(y), [x, memory, *branch.parameters()])


def test_memory_is_one_more_pool_of_a_superblock():
    """W_out [ heads over the context ; heads over the memory ; f(W_in x) ], each with rows and columns of its own."""
    net, Hkv = build(objective="seq2seq", block="superblock", attention="gqa", n_kv_head=2, pos="none"), 2
    jitter(net)
    x, memory = leaves((2, T, C), (2, S, C))
    ((pools,),) = net.blocks[0].readers
    context, of_memory, _ = pools.pools
    of_context, q, hidden = pools.into.weight.unflatten(0, (Hkv, -1)).split([32, 16, 64], dim=1)  # (Hkv, rows, C)
    columns = [w.flatten(1) for w in pools.out.weight.unflatten(1, (Hkv, -1)).split([16, 16, 64], dim=2)]
    q_k_v = (x @ of_context.flatten(0, 1).T).unflatten(-1, (Hkv, 4, 8))
    heads = [q_k_v[:, :, :, part].flatten(2, 3).transpose(1, 2) for part in (slice(2), slice(2, 3), slice(3, 4))]
    ys = (
        naive_attention(*heads).transpose(1, 2).flatten(2),
        naive_memory(of_memory.heads, x @ q.flatten(0, 1).T, of_memory.kv(memory)),
        F.gelu(x @ hidden.flatten(0, 1).T),
    )
    expected = sum(y @ w.T for y, w in zip(ys, columns, strict=True))
    assert_same(pools(x, At(memory=memory)), expected, [x, memory, *pools.parameters()])


# ---- superblock


def group_major(groups: int, *rows: torch.Tensor) -> torch.Tensor:
    """Pieces (groups * n_i, ...) -> (groups * sum n_i, ...): every piece's rows of group 0, then of group 1, ..."""
    return torch.cat([x.unflatten(0, (groups, -1)) for x in rows], dim=1).flatten(0, 1)


def copy(target: torch.nn.Linear, *sources: torch.nn.Linear, weight=lambda w: w, bias=lambda b: b):
    """Fills target with what weight and bias make of the sources'."""
    target.weight.copy_(weight(*(source.weight for source in sources)))
    if target.bias is not None:
        target.bias.copy_(bias(*(source.bias for source in sources)))


def kinds(mlp: M.MLP, up: torch.Tensor) -> list[torch.Tensor]:
    """Rows of an MLP's `up` -> those of all gates, those of all values; or all, where there are no gates."""
    _, groups, sizes = mlp.up.fused
    return [x.flatten(0, 1) for x in up.unflatten(0, (groups, -1)).split(sizes, dim=1)]


def copy_standard(a: M.StandardBlock, b: M.Superblock):
    """Of wiring=series: each pool has its own matrices."""
    first, *cross, second = (reader for (reader,) in b.readers)
    mlp = lambda up: group_major(second.into.fused[1], *kinds(a.mlp, up))  # noqa: E731
    copy(first.into, a.attn.qkv), copy(first.out, a.attn.out)
    copy(second.into, a.mlp.up, weight=mlp, bias=mlp), copy(second.out, a.mlp.down)
    norms = [a.norm_attn, a.norm_mlp]
    if cross:
        cross[0].load_state_dict(a.cross.attn.state_dict())
        norms.insert(1, a.cross.norm)
    for source, target in zip(norms, b.norms, strict=True):
        target.load_state_dict(source.state_dict())


def copy_parallel(a: M.ParallelBlock, b: M.Superblock):
    """Of wiring=parallel: the rows of a group side by side, and so the columns."""
    ((both,),) = b.readers
    rows = lambda qkv, up: group_major(both.into.fused[1], qkv, *kinds(a.mlp, up))  # noqa: E731
    copy(both.into, a.attn.qkv, a.mlp.up, weight=rows, bias=rows)
    columns = lambda *w: group_major(both.into.fused[1], *(x.T for x in w)).T  # noqa: E731
    copy(both.out, a.attn.out, a.mlp.down, weight=columns, bias=torch.add)
    b.norms[0].load_state_dict(a.norm.state_dict())


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("heads", [{}, {"attention": "gqa", "n_kv_head": 2}, {"attention": "mqa"}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "wiring,block,objective",
    [
        ("series", "standard", "causal"),
        ("series", "standard", "masked"),
        ("series", "standard", "seq2seq"),
        ("parallel", "parallel", "causal"),
        ("parallel", "parallel", "masked"),
    ],
)
def test_superblock_is_the_block_it_generalises(wiring, block, objective, mlp, heads, bias):
    """Weights copied from the standard or the parallel model: same logits, same gradients."""
    flags = dict(mlp=mlp, mlp_ratio=3.0, pos="rope", bias=bias, objective=objective, **heads)
    known, ours = build(block=block, **flags), build(block="superblock", wiring=wiring, **flags)
    jitter(known)
    with torch.no_grad():
        for stack in ("blocks", "encoder.blocks") if known.encoder else ("blocks",):
            for a, b in zip(known.get_submodule(stack), ours.get_submodule(stack), strict=True):
                {"standard": copy_standard, "parallel": copy_parallel}[block](a, b)
        for name in ("wte", "norm", "pos") + (("encoder.norm",) if known.encoder else ()):
            ours.get_submodule(name).load_state_dict(known.get_submodule(name).state_dict())
    idx, given = tokens(2, 13), beside(known, docs=objective != "causal")
    assert torch.allclose(ours(idx, **given), known(idx, **given), atol=1e-10)
    if wiring == "parallel" and not bias:
        for net in (known, ours):
            net(idx, idx, **given).backward()
        got, attn, mlp = ours.blocks[0].readers[0][0].into.weight.grad, known.blocks[0].attn, known.blocks[0].mlp
        rows = group_major(ours.cfg.kv_heads, attn.qkv.weight.grad, *kinds(mlp, mlp.up.weight.grad))
        assert torch.allclose(got, rows, atol=1e-10)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("pos", ["none", "alibi", "rope"])
@pytest.mark.parametrize("Hkv", [4, 2])
@both_ways
@pytest.mark.parametrize("docs", [None, DOCS], ids=["whole", "docs"])
def test_joint_pool_is_one_softmax(window, pos, Hkv, objective, docs):
    """Slots and context under one softmax, from scores written out; slots are always visible and have no position."""
    net = build(
        block="superblock", pool="joint", n_slot=5, pos=pos, window=window, objective=objective,
        attention="gqa", n_kv_head=Hkv,
    )  # fmt: skip
    jitter(net)
    heads = net.blocks[0].readers[0][0].pools[0].heads
    D, slopes = C // H, M.alibi_slopes(H).double()
    q, k, v = stream(2, H, T, D), stream(2, Hkv, T, D) * 2, stream(2, Hkv, T, D) - 1
    Q, K, _ = heads.rotate(q, k, v, at(net).table) if pos == "rope" else (q, k, v)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    hidden = (distance.abs() >= (window or T)) | ((objective == "causal") & (distance < 0))
    if docs is not None:
        hidden = hidden | (docs[:, :, None] != docs[:, None])
    out = []
    for h in range(H):
        g = h * Hkv // H
        context = Q[:, h] @ K[:, g].mT / math.sqrt(D) - (slopes[h] * distance.abs() if pos == "alibi" else 0)
        context = context.masked_fill(hidden, -math.inf)
        weights = torch.cat((Q[:, h] @ heads.slot_k[g].T / math.sqrt(D), context), dim=-1).softmax(-1)
        out.append(weights[..., :5] @ heads.slot_v[g] + weights[..., 5:] @ v[:, g])
    assert_same(heads(q, k, v, at(net, docs)), torch.cat(out, dim=-1), (heads.slot_k, heads.slot_v, q, k))


@pytest.mark.parametrize(
    "flags", [{}, {"window": 300}, {"attn_softcap": 1.5}, {"attention": "gqa", "n_kv_head": 2}], ids=str
)
def test_alibi_beside_slots_in_a_long_text(flags):
    """600 positions, where the columns of the bias have carried over twice: slots and context under one softmax with
    its matrix and its bias written out, for the whole text, and decoded in pieces of 460, 139 and 1 tokens."""
    T, D = 600, C // H
    net = build(block="superblock", pool="joint", n_slot=5, pos="alibi", block_size=T, n_layer=1, **flags)
    jitter(net)
    heads, Hkv = net.blocks[0].readers[0][0].pools[0].heads, net.cfg.kv_heads
    q, k, v = leaves((1, H, T, D), (1, Hkv, T, D), (1, Hkv, T, D))
    slopes, slots = M.alibi_slopes(H).double(), (heads.slot_k, heads.slot_v)
    expected = naive_attention(q, k, v, net.cfg.window, net.cfg.attn_softcap, slopes, slots=slots)
    expected = expected.transpose(1, 2).flatten(2)
    assert_same(heads(q, k, v, At(net.rotate.table(torch.arange(T), torch.float64))), expected, (*slots, q, k, v))
    with torch.no_grad():
        heads.cache, pieces = M.KVCache(T), []
        for start, end in ((0, 460), (460, 599), (599, 600)):
            table = net.rotate.table(torch.arange(start, end), torch.float64)
            pieces.append(heads(*(x[:, :, start:end] for x in (q, k, v)), At(table)))
        assert torch.allclose(torch.cat(pieces, dim=1), expected, atol=1e-10)


def test_joint_pool_without_context_is_a_softmax_mlp():
    """Context keys that no query likes leave softmax(q K^T) V over the slots."""
    q, k, v = stream(1, 2, T, 4), stream(1, 2, T, 4), stream(1, 2, T, 4)
    slots = F.pad(stream(2, 6, 4), (0, 1)), F.pad(stream(2, 6, 4), (0, 1))
    q, k = torch.cat((q, torch.ones(1, 2, T, 1)), -1), torch.cat((k, torch.full((1, 2, T, 1), -1e6)), -1)
    got = M.mix(q.double(), k.double(), F.pad(v, (0, 1)), 4, M.Mask(), slots=slots)
    expected = (q[..., :4] @ slots[0][..., :4].mT / 2).softmax(-1) @ slots[1][..., :4]
    assert torch.allclose(got[..., :4], expected, atol=1e-10)


def test_grouped_mlp_is_block_diagonal():
    net = build(block="superblock", n_group=4, mlp="swiglu", bias=True, pos="none")
    jitter(net)
    mlp, x = net.blocks[0].readers[0][1], stream(2, T, C)
    up = mlp.up.weight.unflatten(0, (4, 2, -1))  # group, gate or up, hidden, input
    F4 = up.size(2)
    gate, lin = (torch.block_diag(*up[:, i]) for i in range(2))
    b = mlp.up.bias.view(4, 2, F4)
    h = F.silu(x @ gate.T + b[:, 0].flatten()) * (x @ lin.T + b[:, 1].flatten())
    expected = h @ torch.block_diag(*mlp.down.weight.unflatten(0, (4, -1))).T + mlp.down.bias
    assert torch.allclose(mlp(x, At()), expected, atol=1e-12)


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("heads", [{}, {"attention": "mqa"}], ids=str)
def test_superblock_parameters(mlp, heads):
    """Separate: the standard block's less one norm. Joint: the same number to within a slot per head."""

    def count(**flags):
        with torch.device("meta"):
            cfg = M.ModelConfig(vocab_size=256, n_embd=256, n_head=8, n_layer=4, mlp=mlp, **heads, **flags)
            return M.Model(cfg).n_params()

    assert count(block="superblock") == count() - 4 * 256
    assert abs(count(block="superblock", pool="joint") - count(block="superblock")) <= 4 * 8 * 2 * 32


def test_one_matrix_in_and_one_out():
    linear = [m for m in build(block="superblock").blocks[0].modules() if isinstance(m, torch.nn.Linear)]
    assert len(linear) == 2
