"""The model against independent references: naive attention, closed forms, counts by hand, its own uncached self."""

import itertools
import math
import random
from typing import get_args, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import model as M
from model import Model, ModelConfig, mix

TABLES = {  # every axis of the model: flag -> its values, read from the tables themselves
    "block": list(M.BLOCK),
    "norm": list(M.NORM),
    "norm_placement": list(M.PLACEMENT),
    "pos": list(M.POSITION),
    "mlp": list(M.MLP_KIND),
}
AXES = TABLES | {
    "attention": [{}, {"attention": "gqa", "n_kv_head": 2}, {"attention": "mqa"}],
    "window": [{}, {"window": 3}, {"window": 5, "window_pattern": "SL"}],
    "attn_softcap": [0.0, 2.0],
    "logit_softcap": [0.0, 3.0],
    "qk_norm": [False, True],
    "bias": [False, True],
    "simplified_value_proj": ["first", "all", "none"],
    "superblock": [
        {},
        {"wiring": "series"},
        {"pool": "joint", "n_slot": 5},
        {"pool": "joint"},
        {"n_group": 2},
        {"n_group": 4, "wiring": "series"},
    ],
    "tie_weights": [True, False],
    "loss_chunk": [0, 7],
}
TINY = dict(n_layer=2, n_head=4, n_embd=32, block_size=13, vocab_size=29)


def combinations() -> list[dict]:
    """The whole product of the axes that meet inside attention, then random rows until every pair of values is met."""
    rng = random.Random(0)
    inner = ["pos", "attention", "window"]
    rows = [
        {axis: rng.choice(values) for axis, values in AXES.items()} | dict(zip(inner, chosen, strict=True))
        for chosen in itertools.product(*(AXES[axis] for axis in inner))
    ]

    def pairs(row: dict) -> set:
        return {(a, str(row[a]), b, str(row[b])) for a, b in itertools.combinations(AXES, 2)}

    missing = {(a, str(x), b, str(y)) for a, b in itertools.combinations(AXES, 2) for x in AXES[a] for y in AXES[b]}
    missing -= set().union(*map(pairs, rows))
    while missing:
        row = {axis: rng.choice(values) for axis, values in AXES.items()}
        if pairs(row) & missing:
            missing -= pairs(row)
            rows.append(row)
    return [flatten(row) for row in rows]


def flatten(row: dict) -> dict:
    flat = {}
    for axis, value in row.items():
        flat |= value if isinstance(value, dict) else {axis: value}
    return flat


def build(dtype=torch.float64, **flags) -> Model:
    torch.manual_seed(1)
    return Model(ModelConfig(**TINY | flags)).to(dtype).eval()


def jitter(model: Model):
    """Off the initial point, where parts of a simplified block are the identity and their gradients are zero."""
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn_like(p)


def name(row: dict) -> str:
    return ",".join(str(v) for v in row.values())


GRID = combinations()


@pytest.mark.parametrize("flags", GRID, ids=name)
def test_grid(flags):
    """Causality, initial loss, gradients everywhere, cached decoding equal to uncached, beyond block_size as well."""
    model, T = build(**flags), TINY["block_size"]
    torch.manual_seed(2)
    idx = torch.randint(TINY["vocab_size"], (2, T + 1))
    x, y = idx[:, :-1], idx[:, 1:]
    assert abs(model(x, y).item() - math.log(TINY["vocab_size"])) < 0.35
    jitter(model)
    logits = model(x)

    changed = x.clone()
    changed[:, 7] = (changed[:, 7] + 1) % TINY["vocab_size"]
    difference = (model(changed) - logits).abs().amax(dim=(0, 2))
    assert difference[:7].max() < 1e-12, "the past sees the future"
    assert difference[7] > 1e-9, "a token does not see itself"
    seen = M.ModelConfig(**TINY | flags).layer_window(0) or T
    assert difference[7 + min(seen, T - 7) - 1] > 1e-12, "the future does not see the past"

    loss = model(x, y)
    assert torch.allclose(loss, F.cross_entropy(logits.flatten(0, 1), y.flatten()), atol=1e-9)
    loss.backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert not dead, f"no gradient reaches {dead}"

    cached = []
    for _ in model.generate(idx[:, :4], T + 2, lambda logits: cached.append(logits) or logits.argmax(-1)):
        pass
    text = idx[:, :4]
    for step in cached:
        expected = model(text[:, -T:])[:, -1]
        assert torch.allclose(step, expected, atol=1e-9), f"cached decoding differs at length {text.size(1)}"
        text = torch.cat((text, expected.argmax(-1, keepdim=True)), dim=1)


@pytest.mark.parametrize("flags", GRID[:: len(GRID) // 10], ids=name)
def test_compiles_as_one_graph(flags):
    torch._dynamo.reset()
    model = build(torch.float32, **flags)
    idx = torch.randint(TINY["vocab_size"], (2, TINY["block_size"]))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(idx), model(idx), atol=1e-5)


@pytest.mark.parametrize("flags", [{}, {"block": "parallel", "pos": "rope", "window": 5, "mlp": "swiglu"}], ids=name)
def test_compiled_block_trains_alike(flags):
    """torch.compile per block with the real backend: same loss and gradients as eager."""
    torch._dynamo.reset()
    idx = torch.randint(TINY["vocab_size"], (2, TINY["block_size"] + 1))
    grads = []
    for compiled in (False, True):
        model = build(torch.float32, **flags).train()
        if compiled:
            for block in model.blocks:
                block.compile(fullgraph=True)
        model(idx[:, :-1], idx[:, 1:]).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(*grads, atol=1e-5)


def test_literals_are_the_tables():
    hints = get_type_hints(ModelConfig)
    for flag, values in TABLES.items():
        assert set(get_args(hints[flag])) == set(values), flag


# ---- attention


def naive_attention(q, k, v, window=0, softcap=0.0, slopes=None):
    """From the equations, with every matrix materialised: q (B, H, T, D), k and v (B, Hkv, S, D)."""
    H, T, D = q.shape[1:]
    S = k.size(2)
    distance = torch.tensor([[i + S - T - j for j in range(S)] for i in range(T)])
    hidden = (distance < 0) | (distance >= (window or S))
    out = []
    for h in range(H):
        g = h * k.size(1) // H
        scores = torch.einsum("btd,bsd->bts", q[:, h], k[:, g]) / math.sqrt(D)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            scores = scores - slopes[h] * distance
        out.append(torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1) @ v[:, g])
    return torch.stack(out, dim=1)


@pytest.mark.parametrize("T,S", [(11, 11), (1, 11)])
@pytest.mark.parametrize("Hkv", [6, 2, 1])
@pytest.mark.parametrize("window", [0, 1, 3, 4, 10, 11])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("alibi", [False, True])
def test_mix_equals_naive_attention(T, S, Hkv, window, softcap, alibi):
    torch.manual_seed(0)
    B, H, D = 2, 6, 4
    q, k, v = (torch.randn(B, heads, n, D, dtype=torch.float64) for heads, n in ((H, T), (Hkv, S), (Hkv, S)))
    for x in (q, k, v):
        x.requires_grad_()
    slopes = M.alibi_slopes(H).double() if alibi else None
    expected = naive_attention(q, k, v, window, softcap, slopes)
    rotate = M.Alibi(ModelConfig(n_head=H, n_embd=H * D)) if alibi else M.Unrotated(ModelConfig())
    at = rotate.table(torch.arange(S), torch.float64)
    Q, K, V = rotate(F.pad(q, (0, 0, S - T, 0)), k, v, at)  # every query's own position, then the last T of them
    got = mix(Q[:, :, S - T :], K, V, D, window, softcap)[..., :D]
    assert torch.allclose(got, expected, atol=1e-10)
    weight = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad((got * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-10)


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_long_attention_crosses_strips_and_windows(window, softcap):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 150, 2, dtype=torch.float64) for heads in (2, 1, 1))
    assert torch.allclose(mix(q, k, v, 2, window, softcap), naive_attention(q, k, v, window, softcap), atol=1e-10)


def test_dropout_in_attention_keeps_the_mean():
    """On CPU attention dropout takes the strips: its mean over draws is the attention without it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3))
    draws = torch.stack([mix(q, k, v, 4, dropout=0.3) for _ in range(1500)])
    assert torch.allclose(draws.mean(0), mix(q, k, v, 4), atol=0.1)
    assert draws.std(0).min() > 1e-3


class Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **kwargs or {})
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"pos": "alibi"},
        {"pos": "rope", "window": 100},
        {"attention": "mqa", "window": 100, "pos": "alibi"},
        {"attn_softcap": 5.0},
        {"dropout": 0.1},
        {"block": "simplified", "window": 100},
        {"block": "simplified_parallel", "pos": "alibi"},
        {"block": "superblock", "pool": "joint", "n_slot": 32},
    ],
    ids=name,
)
def test_no_square_tensor(flags):
    T = 1024
    model = Model(ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=T, vocab_size=16, **flags))
    idx = torch.randint(16, (1, T))
    with Largest() as largest:
        model(idx, idx).backward()
    assert T < largest.numel < T * T / 2
    model.eval()
    with Largest() as largest, torch.no_grad():
        list(model.generate(idx[:, :900], 2, lambda logits: logits.argmax(-1)))
    assert T < largest.numel < T * T / 2


# ---- positions


def test_rope_is_relative_and_applied():
    """Scores depend on the distance only, equal a rotation by complex numbers, and do depend on it."""
    torch.manual_seed(0)
    cfg = ModelConfig(n_head=2, n_embd=16, pos="rope", rope_theta=100.0)
    rope, D = M.Rope(cfg), 8
    q, k = torch.randn(2, 1, 2, 1, D, dtype=torch.float64)

    def score(i, j):
        table_i, table_j = (rope.table(torch.tensor([t]), torch.float64) for t in (i, j))
        return (rope(q, q, q, table_i)[0] * rope(k, k, k, table_j)[1]).sum(-1)

    assert torch.allclose(score(3, 1), score(103, 101), atol=1e-9)
    assert (score(3, 1) - score(3, 2)).abs().min() > 1e-6
    frequencies = 100.0 ** (-torch.arange(D // 2, dtype=torch.float64) / (D // 2))
    as_complex = torch.complex(q[..., : D // 2], q[..., D // 2 :]) * torch.exp(1j * 5 * frequencies)
    turned = rope(q, q, q, rope.table(torch.tensor([5]), torch.float64))[0]
    assert torch.allclose(turned, torch.cat((as_complex.real, as_complex.imag), dim=-1), atol=1e-12)


@pytest.mark.parametrize("pos", ["rope", "alibi", "learned", "sinusoidal"])
def test_every_position_encoding_breaks_permutation_symmetry(pos):
    """Without positions one layer cannot tell the order of the past; with any of them it can."""
    first, swapped = torch.tensor([[3, 5, 7, 9]]), torch.tensor([[5, 3, 7, 9]])
    order = {p: (build(pos=p, n_layer=1)(first) - build(pos=p, n_layer=1)(swapped))[0, -1] for p in (pos, "none")}
    assert order[pos].abs().max() > 1e-7 and order["none"].abs().max() < 1e-12


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8, 12, 16, 20, 25])
def test_alibi_slopes(n):
    """Published recipe, written another way: ratio 2^(-8/p), then every other slope of the next power of two."""

    def power_of_two(p):
        return [2.0 ** (-(2.0 ** -(math.log2(p) - 3)) * (i + 1)) for i in range(p)]

    p = 2 ** math.floor(math.log2(n))
    expected = power_of_two(p) + power_of_two(2 * p)[0::2][: n - p]
    assert M.alibi_slopes(n).tolist() == pytest.approx(expected)


def test_alibi_columns_are_exact_far_out_in_bfloat16():
    """Two columns hold j exactly to 65,535 in bfloat16; scores of neighbours still differ by the slope."""
    alibi = M.Alibi(ModelConfig(n_head=8, n_embd=8 * 64))
    t = torch.tensor([40000, 40001, 40200])
    q = torch.zeros(1, 8, 3, 64, dtype=torch.bfloat16)
    Q, K, _ = alibi(q, q, q, alibi.table(t, torch.bfloat16))
    scores = (Q[:, :, :1].double() @ K.double().mT)[0, :, 0] / 8  # (H, S), sqrt(D) = 8
    difference = scores - scores[:, :1]
    expected = M.alibi_slopes(8)[:, None] * torch.tensor([0.0, 1.0, 200.0])
    assert torch.allclose(difference.float(), expected, rtol=1e-3)


def test_sinusoidal_closed_form():
    model = build(pos="sinusoidal")
    x = torch.zeros(1, 4, 32, dtype=torch.float64)
    got = model.pos(x, torch.arange(4))[0]
    for t, i in itertools.product(range(4), range(16)):
        assert got[t, i].item() == pytest.approx(math.sin(t / 10000 ** (2 * i / 32)))
        assert got[t, 16 + i].item() == pytest.approx(math.cos(t / 10000 ** (2 * i / 32)))


# ---- norms and blocks


def hand_block(model, x, placement):
    """One standard block written out, with an arbitrary norm function."""
    block = model.blocks[0]

    def branch(x, f, norms):
        norm = norms.before if placement in ("pre", "sandwich") else norms.total
        n = lambda z: F.rms_norm(z, (z.size(-1),), norm.weight, 1e-5)  # noqa: E731
        if placement == "pre":
            return x + f(n(x))
        if placement == "post":
            return n(x + f(x))
        return x + F.rms_norm(f(n(x)), (x.size(-1),), norms.after.weight, 1e-5)

    x = branch(x, lambda z: block.attn(z, ()), block.norm_attn)
    return branch(x, block.mlp, block.norm_mlp)


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
def test_norm_placement(placement):
    model = build(norm="rmsnorm", norm_placement=placement, pos="none", n_layer=1)
    for p in model.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    assert torch.allclose(model.blocks[0](x, ()), hand_block(model, x, placement), atol=1e-10)


def test_final_norm_only_where_the_stream_is_not_normalised():
    final = {p: not isinstance(build(norm_placement=p).norm, torch.nn.Identity) for p in M.PLACEMENT}
    assert final == {"pre": True, "post": False, "sandwich": True, "none": False}


def test_parallel_block_equation():
    model = build(block="parallel", pos="none", bias=True)
    block, x = model.blocks[0], torch.randn(2, 5, 32, dtype=torch.float64)
    n = F.layer_norm(x, (32,), block.norm.before.weight, block.norm.before.bias)
    assert torch.allclose(block(x, ()), x + block.attn(n, ()) + block.mlp(n), atol=1e-12)


def test_qk_norm_makes_scores_blind_to_scale():
    model = build(qk_norm=True, pos="none", n_layer=1)
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    attn = model.blocks[0].attn
    before = attn(x, ())
    with torch.no_grad():
        for n in range(4):  # q and k rows of each head, not v's
            attn.qkv.weight.view(4, 3, 8, 32)[n, :2] *= 100
    assert torch.allclose(attn(x, ()), before, atol=1e-3)


@pytest.mark.parametrize("kind,f", [("gelu", F.gelu), ("relu", F.relu), ("relu2", lambda x: F.relu(x) ** 2)])
def test_plain_mlp(kind, f):
    model = build(mlp=kind)
    mlp, x = model.blocks[0].mlp, torch.randn(3, 2, 32, dtype=torch.float64)
    assert mlp.up.weight.shape == (128, 32)
    assert torch.allclose(mlp(x), f(x @ mlp.up.weight.T) @ mlp.down.weight.T)


@pytest.mark.parametrize("kind,f", [("swiglu", F.silu), ("geglu", F.gelu)])
def test_gated_mlp(kind, f):
    model = build(mlp=kind)
    mlp, x = model.blocks[0].mlp, torch.randn(3, 2, 32, dtype=torch.float64)
    gate, up = mlp.up.weight.split(mlp.up.weight.size(0) // 2)
    assert torch.allclose(mlp(x), (f(x @ gate.T) * (x @ up.T)) @ mlp.down.weight.T)


@pytest.mark.parametrize("C,expected", [(768, 2048), (4096, 10944), (32, 85)])
def test_gated_width_matches_parameters(C, expected):
    assert ModelConfig(n_head=2, n_embd=C, mlp="swiglu").hidden_dim == expected
    assert ModelConfig(n_head=2, n_embd=C, mlp="gelu").hidden_dim == 4 * C


# ---- loss


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("chunk", [1, 5, 26, 1000])
def test_chunked_loss_equals_the_whole(softcap, chunk):
    torch.manual_seed(0)
    reference, model = (build(logit_softcap=softcap, loss_chunk=c) for c in (10**6, chunk))
    for p in model.parameters():
        torch.nn.init.normal_(p)
    reference.load_state_dict(model.state_dict())
    idx, targets = torch.randint(29, (2, 2, 13))
    targets[0, 3:6] = -1
    a, b = model(idx, targets), reference(idx, targets)
    assert torch.allclose(a, b, atol=1e-10)
    a.backward(), b.backward()
    for (n, p), r in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p.grad, r.grad, atol=1e-9), n
    with torch.no_grad():
        assert torch.allclose(model(idx, targets), b)


# ---- accounting, initialisation, configuration


def on_meta(**flags) -> Model:
    with torch.device("meta"):
        return Model(ModelConfig(**flags))


def test_gpt2_has_its_published_parameters():
    gpt2 = dict(vocab_size=50257, bias=True)
    assert on_meta(**gpt2).n_params() == 124_439_808
    assert on_meta(n_layer=48, n_head=25, n_embd=1600, **gpt2).n_params() == 1_557_611_200


def test_parameters_and_flops_counted_by_hand():
    L, H, Hkv, C, T, V, W = 6, 8, 2, 512, 256, 1000, 64
    D, hidden = C // H, 1344  # 2/3 * 4 * 512 = 1365.3, to a multiple of 64
    model = on_meta(
        n_layer=L, n_head=H, n_embd=C, block_size=T, vocab_size=V, attention="gqa", n_kv_head=Hkv, mlp="swiglu",
        norm="rmsnorm", pos="rope", qk_norm=True, tie_weights=False, window=W, window_pattern="SSL",
    )  # fmt: skip
    matrices = L * (C * (H + 2 * Hkv) * D + C * C + 3 * C * hidden) + V * C
    vectors = L * (2 * C + 2 * D) + C
    assert model.n_params() == matrices + V * C + vectors
    visible = (4 * W + 2 * T) * H * D  # four of six layers slide
    assert model.flops_per_token() == 6 * matrices + 12 * visible


def test_initial_standard_deviations():
    torch.manual_seed(0)
    model = Model(ModelConfig(n_layer=8, n_head=4, n_embd=256, block_size=64, vocab_size=512, bias=True))
    for n, p in model.named_parameters():
        if p.dim() == 2:
            expected = 0.02 / math.sqrt(16) if n.endswith(("attn.out.weight", "mlp.down.weight")) else 0.02
            assert p.std().item() == pytest.approx(expected, rel=0.05), n
            assert abs(p.mean().item()) < expected / 10, n
        else:
            assert (p == (0 if n.endswith("bias") else 1)).all(), n


def test_head_is_tied_or_not():
    tied, untied = build(), build(tie_weights=False)
    assert tied.head.weight is tied.wte.weight and untied.head.weight is not untied.wte.weight
    assert untied.n_params() - tied.n_params() == 29 * 32


@pytest.mark.parametrize("flags,fragments", [
    ({"n_embd": 30}, ["n_embd=30", "n_head=4"]),
    ({"n_layer": 0}, ["n_layer=0"]),
    ({"window": -1}, ["window=-1"]),
    ({"dropout": 1.0}, ["dropout=1.0"]),
    ({"attention": "gqa"}, ["n_kv_head=0", "attention=gqa", "[1, 2, 4]"]),
    ({"attention": "gqa", "n_kv_head": 3}, ["n_kv_head=3", "n_head=4"]),
    ({"attention": "mqa", "n_kv_head": 2}, ["n_kv_head=2", "attention=mqa"]),
    ({"n_kv_head": 2}, ["n_kv_head=2", "attention=mha", "gqa"]),
    ({"pos": "rope", "n_embd": 36}, ["pos=rope", "9"]),
    ({"pos": "sinusoidal", "n_embd": 35, "n_head": 5}, ["pos=sinusoidal", "35"]),
    ({"window_pattern": "SSL"}, ["window_pattern='SSL'", "window=0"]),
    ({"window": 4, "window_pattern": "SX"}, ["window_pattern='SX'"]),
    ({"mlp_ratio": 0.0}, ["mlp_ratio=0.0"]),
    ({"rope_theta": -1.0}, ["rope_theta=-1.0"]),
    ({"vocab_size": 0}, ["vocab_size=0"]),
], ids=str)  # fmt: skip
def test_impossible_flags_are_named(flags, fragments):
    with pytest.raises(ValueError) as error:
        build(**flags)
    assert "\n" not in str(error.value)
    for fragment in fragments:
        assert fragment in str(error.value)


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="14 tokens.*block_size=13"):
        build()(torch.zeros(1, 14, dtype=torch.int64))
