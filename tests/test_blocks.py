"""Simplified blocks and the superblock against their equations, every matrix materialised, and against each other."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_model import build, jitter, naive_attention

import model as M
from configurator import Config
from engine import optim

SAS = ["simplified", "simplified_parallel"]
T, C, H = 11, 32, 4


def stream(*shape) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def table(net):
    return net.rotate.table(torch.arange(T), torch.float64)


# ---- simplified


def naive_shaped(net, attn, x, window, slopes):
    """(alpha I + beta softmax - gamma C) V per head, with I and C as T x T matrices."""
    D, Hkv = C // H, net.cfg.kv_heads
    qk = attn.qk(x).view(2, T, Hkv, H // Hkv + 1, D)
    q = qk[..., :-1, :].reshape(2, T, H, D).transpose(1, 2)
    k = qk[..., -1, :].transpose(1, 2)
    if net.cfg.qk_norm:
        q, k = attn.heads.q_norm(q), attn.heads.k_norm(k)
    if net.cfg.pos == "rope":
        q, k, _ = attn.heads.rotate(q, k, k, table(net))
    value = x
    if isinstance(attn.value, M.NearIdentity):
        value = attn.value.skip * x + attn.value.resid * x @ attn.value.weight.T
    eye, out = torch.eye(T, dtype=torch.float64), []
    for h in range(H):
        v = value[..., h * D : (h + 1) * D]
        flat = torch.zeros(1, 1, T, D, dtype=torch.float64)
        uniform = naive_attention(flat, flat, eye[None, None, :, :], window, 0.0, slopes and [slopes[h]])[0, 0]
        softmax = naive_attention(
            q[:, h : h + 1], k[:, h * Hkv // H, None], eye.expand(2, 1, T, T), window, 0.0, slopes and [slopes[h]]
        )[:, 0]
        heads = attn.heads
        out.append((heads.alpha[h] * eye + heads.beta[h] * softmax - heads.gamma[h] * uniform) @ v)
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


@pytest.mark.parametrize("flags", VARIANTS, ids=str)
@pytest.mark.parametrize("layer", [0, 1])
def test_shaped_attention_equals_its_matrices(flags, layer):
    net = build(block="simplified", **flags)
    jitter(net)
    attn, x = net.blocks[layer].attn, stream(2, T, C)
    slopes = M.alibi_slopes(H).double().tolist() if net.cfg.pos == "alibi" else None
    expected, got = naive_shaped(net, attn, x, net.cfg.window, slopes), attn(x, table(net))
    assert torch.allclose(got, expected, atol=1e-10)
    weight, wanted = stream(2, T, C).detach(), [x, *attn.parameters()]
    for a, b in zip(
        torch.autograd.grad((got * weight).sum(), wanted),
        torch.autograd.grad((expected * weight).sum(), wanted),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-9)


@pytest.mark.parametrize("flags", VARIANTS, ids=str)
def test_shaped_attention_starts_as_the_identity(flags):
    net, x = build(block="simplified", **flags), stream(2, T, C)
    for block in net.blocks:
        assert torch.allclose(block.attn(x, table(net)), x, atol=1e-12)


def test_the_centring_matrix_sees_no_future():
    """Values of 1 up to each row and a huge one behind it: the mean must not move."""
    v = torch.ones(1, 1, T, 2, dtype=torch.float64)
    v[:, :, -1] = 1e6
    q = torch.zeros(1, 1, T, 2, dtype=torch.float64)
    assert torch.allclose(M.uniform_mix(q, q, v, 2)[:, :, :-1], torch.ones(T - 1, 2, dtype=torch.float64))


def test_simplified_equations():
    x = stream(2, T, C)
    net = build(block="simplified", norm="rmsnorm", pos="none")
    jitter(net)
    b = net.blocks[1]
    norm = lambda n, z: F.rms_norm(z, (C,), n.before.weight, 1e-5)  # noqa: E731
    s = b.g_attn * b.attn(norm(b.norm_attn, x), ())
    assert torch.allclose(b(x, ()), b.g_skip * s + b.b_ff * b.mlp(norm(b.norm_mlp, s)), atol=1e-12)
    net = build(block="simplified_parallel", norm="rmsnorm", pos="none")
    jitter(net)
    b = net.blocks[1]
    n = norm(b.norm, x)
    assert torch.allclose(b(x, ()), b.g_attn * b.attn(n, ()) + b.b_ff * b.mlp(n), atol=1e-12)


@pytest.mark.parametrize("block", SAS)
def test_simplified_initial_values(block):
    """After every kind of initialisation, so that none overwrites the zeros."""
    net = build(block=block, simplified_beta_ff=0.25)
    for again in (False, True):
        if again:
            net.init_weights()
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


# ---- superblock


def group_major(groups: int, *rows: torch.Tensor) -> torch.Tensor:
    """Pieces (groups * n_i, ...) -> (groups * sum n_i, ...): every piece's rows of group 0, then of group 1, ..."""
    return torch.cat([x.unflatten(0, (groups, -1)) for x in rows], dim=1).flatten(0, 1)


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("heads", [{}, {"attention": "gqa", "n_kv_head": 2}, {"attention": "mqa"}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wiring,block", [("series", "standard"), ("parallel", "parallel")])
def test_superblock_is_the_block_it_generalises(wiring, block, mlp, heads, bias):
    """Weights copied from the standard or the parallel model: same logits, same gradients."""
    flags = dict(mlp=mlp, mlp_ratio=3.0, pos="rope", bias=bias, **heads)
    known, ours = build(block=block, **flags), build(block="superblock", wiring=wiring, **flags)
    jitter(known)
    Hkv = ours.cfg.kv_heads
    for a, b in zip(known.blocks, ours.blocks, strict=True):
        with torch.no_grad():
            norms = [a.norm_attn, a.norm_mlp] if block == "standard" else [a.norm]
            for source, target in zip(norms, b.norms, strict=True):
                target.load_state_dict(source.state_dict())
            for part in ("weight", "bias") if bias else ("weight",):
                qkv, up = getattr(a.attn.qkv, part), getattr(a.mlp.up, part)
                hidden = up.chunk(len(up) // ours.cfg.hidden_dim)
                out, down = a.attn.out.weight.T, a.mlp.down.weight.T
                if block == "standard":
                    (first,), (second,) = b.readers
                    getattr(first.into, part).copy_(qkv)
                    getattr(second.into, part).copy_(group_major(Hkv, *hidden))
                    first.out.weight.copy_(out.T)
                    second.out.weight.copy_(down.T)
                    if bias:
                        first.out.bias.copy_(a.attn.out.bias)
                        second.out.bias.copy_(a.mlp.down.bias)
                else:
                    ((both,),) = b.readers
                    getattr(both.into, part).copy_(group_major(Hkv, qkv, *hidden))
                    both.out.weight.copy_(group_major(Hkv, out, down).T)
                    if bias:
                        both.out.bias.copy_(a.attn.out.bias + a.mlp.down.bias)
    with torch.no_grad():
        for name in ("wte", "norm", "pos"):
            getattr(ours, name).load_state_dict(getattr(known, name).state_dict())
    idx = torch.randint(29, (2, 13))
    assert torch.allclose(ours(idx), known(idx), atol=1e-10)
    if wiring == "parallel" and not bias:
        for net in (known, ours):
            net(idx, idx).backward()
        got, attn, up = ours.blocks[0].readers[0][0].into.weight.grad, known.blocks[0].attn, known.blocks[0].mlp.up
        hidden = up.weight.grad.chunk(len(up.weight) // ours.cfg.hidden_dim)
        assert torch.allclose(got, group_major(Hkv, attn.qkv.weight.grad, *hidden), atol=1e-10)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("pos", ["none", "alibi", "rope"])
@pytest.mark.parametrize("Hkv", [4, 2])
def test_joint_pool_is_one_softmax(window, pos, Hkv):
    """Slots and context under one softmax, from scores written out; slots are always visible and have no position."""
    flags = {} if Hkv == 4 else {"attention": "gqa", "n_kv_head": Hkv}
    net = build(block="superblock", pool="joint", n_slot=5, pos=pos, window=window, **flags)
    jitter(net)
    heads = net.blocks[0].readers[0][0].pools[0].heads
    D, slopes = C // H, M.alibi_slopes(H).double()
    q, k, v = stream(2, H, T, D), stream(2, Hkv, T, D) * 2, stream(2, Hkv, T, D) - 1
    Q, K, _ = heads.rotate(q, k, v, table(net)) if pos == "rope" else (q, k, v)
    out = []
    for h in range(H):
        g = h * Hkv // H
        distance = torch.arange(T)[:, None] - torch.arange(T)
        context = Q[:, h] @ K[:, g].mT / math.sqrt(D) - (slopes[h] * distance if pos == "alibi" else 0)
        context = context.masked_fill((distance < 0) | (distance >= (window or T)), -math.inf)
        weights = torch.cat((Q[:, h] @ heads.slot_k[g].T / math.sqrt(D), context), dim=-1).softmax(-1)
        out.append(weights[..., :5] @ heads.slot_v[g] + weights[..., 5:] @ v[:, g])
    expected = torch.cat(out, dim=-1)
    got = heads(q, k, v, table(net))
    assert torch.allclose(got, expected, atol=1e-10)
    for p in (heads.slot_k, heads.slot_v, q, k):
        a, b = (torch.autograd.grad(y.sin().sum(), p, retain_graph=True)[0] for y in (got, expected))
        assert torch.allclose(a, b, atol=1e-10)


def test_joint_pool_without_context_is_a_softmax_mlp():
    """Context keys that no query likes leave softmax(q K^T) V over the slots."""
    q, k, v = stream(1, 2, T, 4), stream(1, 2, T + 6, 4) * 1.5, stream(1, 2, T + 6, 4)
    bias = torch.cat((torch.zeros(6), torch.full((T,), -1e6)))[:, None].expand(1, 2, -1, 1).double()
    got = M.mix(torch.cat((q, torch.ones(1, 2, T, 1)), -1), torch.cat((k, bias), -1), F.pad(v, (0, 1)), 4, slots=6)
    expected = (q @ k[:, :, :6].mT / 2).softmax(-1) @ v[:, :, :6]
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
    assert torch.allclose(mlp(x, ()), expected, atol=1e-12)


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
