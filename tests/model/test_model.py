"""The model against independent references: naive attention, closed forms, counts by hand, its own uncached self."""

import ast
import copy
import itertools
import math
import random
import re
from collections import Counter, defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from families import LAYERS
from helpers import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import model as M
import ops
from engine import decode
from engine.decode import generate, set_caches
from engine.parallel.tensor import sharded_dim
from engine.plan.accounting import attention_kernels, flops
from flags import READER, unused
from model import Model, ModelConfig
from ops import Mask, attention, attention_kernel

TABLES = {  # every axis of the model: flag -> its values, read from the tables themselves
    "block": list(M.BLOCK),
    "norm": list(M.NORM),
    "norm_placement": list(M.PLACEMENT),
    "pos": list(M.POSITION),
    "mlp": list(M.MLP_KIND),
}
TINY = dict(n_layer=2, n_head=4, n_embd=32, block_size=13, vocab_size=29)


USUAL = {field.name: field.default for field in fields(ModelConfig)}


def choices(kind) -> list:
    """The values of a Literal, a bool, or a union of them; none of a number or a text."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [False, True] if kind is bool else [value for part in get_args(kind) for value in choices(part)]


def numbers(flags: dict) -> dict[str, list]:
    """The values of flags that are numbers or texts beside these other flags."""
    return {
        "head_dim": [0] if flags["block"].startswith("simplified") else [0, 6, 12],
        "n_kv_head": [2 if flags["attention"] == "gqa" else 0],
        "n_encoder_layer": [1],
        "window": [0, 3],
        "window_pattern": ["", "SL"],
        "attn_softcap": [0.0, 2.0],
        "logit_softcap": [0.0, 3.0],
        "embed_scale": [1.0, 3.0],
        "norm_eps": [1e-5, 1e-3],
        "n_group": [1, 2, 4],
        "n_slot": [0, 5],
        "n_expert": [0, 4],
        "n_expert_shared": [0, 1],
        "n_dense_layer": [0, 1],
        "layer": ["c+p", *LAYERS],
        "rope_scaling": ["", "yarn:4"],
        "rope_theta_local": [1e4, 7.0],
        "pos_pattern": {"rope": ["", "LGN", "NG"], "alibi": ["", "NG"]}.get(flags["pos"], [""]),
        "loss_chunk": [0, 7],
    }


def draw(cls: type[ModelConfig], axes: dict[str, list], rng: random.Random) -> dict | None:
    """Random values of the flags that have an effect together; None if they contradict each other."""
    flags = {name: rng.choice(values) for name, values in axes.items()}
    flags |= {name: rng.choice(values) for name, values in numbers(flags).items()}
    cfg = object.__new__(cls)
    vars(cfg).update(USUAL | flags)
    try:
        idle = unused(cfg)
        flags = {name: v for name, v in flags.items() if name not in idle}
        M.try_flags(cls(**TINY, **flags))
    except ValueError:
        return None
    return flags


def combinations(cls: type[ModelConfig] = ModelConfig, drawn: int = 2000) -> list[dict]:
    """Rows of flags in which every two values of two flags meet that any of many random rows has, as do all positions,
    kinds of heads and windows. The next row is the one with most pairs that no row has yet."""
    axes, rng = {name: choices(kind) for name, kind in get_type_hints(cls).items() if choices(kind)}, random.Random(0)
    pool = [row for row in (draw(cls, axes, rng) for _ in range(drawn)) if row]
    columns = {value: i for i, value in enumerate(dict.fromkeys((k, v) for row in pool for k, v in row.items()))}
    has = torch.zeros(len(pool), len(columns))
    for i, row in enumerate(pool):
        has[i, [columns[value] for value in row.items()]] = 1
    missing = (has.T @ has > 0).float()
    rows = []

    def take(some: list[int]):
        best = some[((has[some] @ missing) * has[some]).sum(1).argmax()]
        rows.append(pool[best])
        missing[torch.outer(has[best], has[best]) > 0] = 0

    inside = defaultdict(list)  # what meets inside attention
    for i, row in enumerate(pool):
        inside[tuple(row.get(k) for k in ("pos", "pos_pattern", "attention", "window", "window_pattern"))].append(i)
    for some in inside.values():
        take(some)
    while missing.any():
        take(list(range(len(pool))))
    return rows


def changes(row: dict) -> str:
    """The flags of a row that are not as usual, as its name."""
    return ",".join(f"{k}={v}" for k, v in row.items() if v != USUAL[k])


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
T, S = TINY["block_size"], 11  # of a text and of a source
# The second row ends in one that might be padding
DOCS = torch.tensor([[0] * 5 + [4] * 8, [0] * 8 + [1] * 2 + [2] * 3])
SOURCE_DOCS = torch.tensor([[0] * 3 + [4] * 8, [0] * 6 + [1] * 4 + [2]])


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(TINY["vocab_size"], shape)


def beside(model: Model, docs: bool = True) -> dict[str, torch.Tensor]:
    """What the model takes besides two rows of T tokens."""
    torch.manual_seed(3)
    given = {"source": tokens(2, S)} if model.encoder else {}
    if docs:
        given |= {"docs": DOCS} | ({"source_docs": SOURCE_DOCS} if model.encoder else {})
    return given


@pytest.mark.parametrize("flags", GRID, ids=changes)
def test_grid(flags):
    """Roles, initial loss, loss and gradients, documents, and of each objective who sees whom and what is generated."""
    model = build(**flags)
    for parameter, _ in model.named_parameters():
        sharded_dim(model, parameter)  # refuses, by name, what --tp could not cut
    torch.manual_seed(2)
    idx, targets = tokens(2, T), tokens(2, T)
    targets[0, 3:6] = targets[1, 10:] = -1
    assert abs(model(idx, targets, **beside(model, docs=False)).item() - math.log(TINY["vocab_size"])) < 0.35
    jitter(model)
    for docs in (False, True):
        check_loss(model, idx, targets, **beside(model, docs))
    with torch.no_grad():
        check_documents_alone(model, idx, **beside(model))
        for docs in (False, True):
            CHECK[flags["objective"]](model, idx, **beside(model, docs))


@pytest.mark.parametrize("objective", ["causal", "masked", "seq2seq"])
@pytest.mark.parametrize("flags", [{}, {"window": 3}], ids=name)
def test_a_block_may_give_its_readers_other_windows(flags, objective, monkeypatch):
    """Two windows in one sum: the model sees as far as the wider one, whatever the flags say."""

    def two(cfg, layer):
        near, far = M.Attention(cfg, layer), M.Attention(cfg, layer)
        near.window, far.window = 2, 4
        return [
            M.Sum(cfg, near=near, far=far),
            M.Sum(cfg, **M.cross(cfg, layer)),
            M.Sum(cfg, mlp=M.MLP(cfg, layer)),
        ]

    monkeypatch.setitem(M.BLOCK, "two", two)
    assert reach(build(block="two", **flags)) == 3 + 3
    encoder = {"n_encoder_layer": 1} if objective == "seq2seq" else {}
    test_grid({"block": "two", "objective": objective, "pos": "rope"} | encoder | flags)


def check_loss(model, idx, targets, **given):
    """Targets of -1 are left out; the gradient reaches every parameter and is finite."""
    loss, logits = model(idx, targets, **given), model(idx, **given)
    assert logits.isfinite().all()
    assert torch.allclose(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1), atol=1e-9)
    model.zero_grad()
    loss.backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not 0 < p.grad.abs().max() < math.inf]
    assert not dead, f"no gradient, or no finite one, reaches {dead}"


def check_documents_alone(model, idx, docs, source=None, source_docs=None):
    """A row's first document gives what it gives without the rest of the row, be that other documents or padding;
    the others, which stand elsewhere then, do so where only distances count."""
    together = model(idx, docs=docs, source=source, source_docs=source_docs)
    distances = model.cfg.pos in ("rope", "alibi", "none") and not model.cfg.placed_slots
    relative = model.cfg.doc_positions or distances
    for row in range(2):
        for number in docs[row].unique() if relative else [0]:
            here = docs[row] == number
            alone = {} if source is None else {"source": source[row][source_docs[row] == number][None]}
            assert torch.allclose(together[row][here], model(idx[row][here][None], **alone)[0], atol=1e-9)


def check_causal(model, idx, docs=None):
    check_reach(lambda x: model(x, docs=docs), idx, between(6, 6 + reach(model)) & within(docs, docs, 6))
    if docs is None:
        check_decoding(model, idx[:, :4])


def check_masked(model, idx, docs=None):
    seen = between(6 - reach(model), 6 + reach(model))
    check_reach(lambda x: model(x, docs=docs), idx, seen & within(docs, docs, 6))


def check_seq2seq(model, idx, source, docs=None, source_docs=None):
    of_text = between(6, 6 + reach(model)) & within(docs, docs, 6)
    check_reach(lambda x: model(x, docs=docs, source=source, source_docs=source_docs), idx, of_text)
    of_source = within(docs, source_docs, 6)
    check_reach(lambda x: model(idx, docs=docs, source=x, source_docs=source_docs), source, of_source)
    if docs is None:
        check_decoding(model, idx[:, :4], source=source)


CHECK = {"causal": check_causal, "masked": check_masked, "seq2seq": check_seq2seq}


def reach(model: Model) -> int:
    """How far apart two tokens can be of which one sees the other."""
    sums = [each for block in model.blocks for each in block.sums]
    read = [[m for m in each.children() if isinstance(m, M.Heads) and m.reader.source == "context"] for each in sums]
    windows = [[m.window for m in readers] for readers in read]
    return sum(max((window - 1 if window else T for window in each), default=0) for each in windows)


def between(first: int, last: int) -> torch.Tensor:
    t = torch.arange(T)
    return (t >= first) & (t <= last)


def within(docs, of_changed, place: int) -> torch.Tensor:
    """(2, T), True in the document of what is changed at a place."""
    return torch.ones(2, T, dtype=torch.bool) if docs is None else docs == of_changed[:, place, None]


def check_reach(f, ids, seen):
    """Another token at place 6 moves exactly the outputs f(ids) at seen (2, T)."""
    changed = ids.clone()
    changed[:, 6] = (changed[:, 6] + 1) % TINY["vocab_size"]
    moved = (f(changed) - f(ids)).abs().amax(dim=2)
    assert (moved[~seen] < 1e-12).all(), f"sees what it must not: {moved}"
    assert (moved[seen] > 1e-12).all(), f"does not see what it should: {moved}"


def check_decoding(model, prompt, n=T, **source):
    """Cached decoding of n tokens gives what the uncached gives, beyond block_size as well. Up to there, one forward
    has the logits of every length."""
    text, steps = decoded(model, prompt, n, **source)
    limit = model.cfg.block_size
    whole = model(text[:, :limit], **source)
    for length, step in enumerate(steps.unbind(1), prompt.size(1)):
        if length <= limit:
            expected = whole[:, length - 1]
        else:
            expected = model(text[:, length - limit : length], **source)[:, -1]
        assert torch.allclose(step, expected, atol=1e-9), f"cached decoding differs at length {length}"


def decoded(model, prompt, n, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """The text (B, T + n), and the logits (B, n, V) from which its last n tokens were chosen."""
    steps = []
    for _ in generate(model, prompt, n, lambda logits: steps.append(logits) or logits.argmax(-1), **options):
        pass
    steps = torch.stack(steps, dim=1)
    assert steps.size(1) == n
    return torch.cat((prompt, steps.argmax(-1)), dim=1), steps


@pytest.mark.parametrize("pos", M.POSITION)
@pytest.mark.parametrize("length", [T, T + 1, 3 * T])
def test_the_context_of_a_long_prompt_is_its_end(pos, length):
    """A prompt that fills block_size, or is longer."""
    model = build(pos=pos)
    jitter(model)
    check_decoding(model, tokens(2, length), 4)


SLOTS = {"block": "superblock", "layer": "c.own_slots", "n_slot": 5}
JOINT = SLOTS | {"layer": "c.joint_slots"}


@pytest.mark.parametrize("prompt,size", [(1, 8), (5, 8), (8, 8), (9, 8), (21, 8), (3, 1), (150, 140)])
@pytest.mark.parametrize(
    "flags",
    [
        {"pos": "rope", "attention": "gqa", "n_kv_head": 2},
        {"pos": "rope", "qk_norm": True, "norm": "rmsnorm", "mlp": "relu2"},
        {"pos": "rope", **SLOTS},
        {"pos": "rope", **JOINT},
        {"pos": "rope", "block": "simplified"},
        {"pos": "alibi", "window": 3, "window_pattern": "SL", **JOINT},
        {"pos": "alibi", "block": "simplified", "attention": "mqa"},
        {"pos": "alibi", "attn_softcap": 2.0},
        {"pos": "none", "window": 400},
        {"pos": "none", "block": "simplified_parallel", "window": 3},
        {"pos": "rope", "objective": "seq2seq", "n_encoder_layer": 1},
    ],
    ids=name,
)
def test_a_rolling_cache_is_a_window(flags, prompt, size):
    """Decoding with a rolling cache, from prompts shorter and longer than block_size, equals uncached forwards of the
    whole text by a model whose layers see at most block_size tokens."""
    model = build(block_size=size, **flags)
    jitter(model)
    whole = build(**flags | {"block_size": 1024})
    whole.load_state_dict(model.state_dict())
    for m in whole.modules():
        if isinstance(m, M.Heads) and m.causal:
            m.window = min(m.window or size, size)
    source = {"source": tokens(2, min(size, 7))} if model.encoder else {}
    text, steps = decoded(model, tokens(2, prompt), min(3 * size, 150) + 2, **source, roll=True)
    assert all(m.window in (0, flags.get("window")) for m in model.modules() if isinstance(m, M.Heads))  # as before
    with torch.no_grad():
        expected = whole(text[:, :-1], **source)[:, prompt - 1 :]
    assert torch.allclose(steps, expected, atol=1e-9)


@pytest.mark.parametrize("pos", ["rope", "alibi", "none"])
def test_far_positions_of_a_rolling_cache_are_exact(pos):
    """In float32, the logits after 3,000 tokens, when the cache has been moved 370 times, equal those of the last eight
    tokens alone in float64."""
    model = build(block_size=8, pos=pos, n_layer=1)
    jitter(model)
    text, last = tokens(1, 3000), []
    given = iter(text[0, 4:, None])
    each = copy.deepcopy(model).float()
    for _ in generate(each, text[:, :4], 2990, lambda z: last.append(z) or next(given), roll=True):
        del last[:-1]
    with torch.no_grad():
        assert torch.allclose(last[0].double(), model(text[:, 2985:2993])[:, -1], atol=1e-5)


@pytest.mark.parametrize("pos", ["learned", "sinusoidal"])
def test_positions_that_end_do_not_roll(pos):
    with pytest.raises(ValueError, match=f"pos={pos}, which .*block_size={T}; set overflow=recompute"):
        next(generate(build(pos=pos), tokens(1, 4), 1, lambda z: z.argmax(-1), roll=True))


@pytest.mark.parametrize(
    "flags",
    [
        {"pos": "none", "attn_softcap": 2.0},
        {"pos": "rope", "attn_softcap": 2.0, "window": 140, "window_pattern": "SL", "attention": "mqa"},
        {"pos": "alibi", "attn_softcap": 2.0, **SLOTS},
        {"pos": "alibi", "window": 140, **JOINT},
        {"pos": "alibi", "attn_softcap": 2.0, "block": "simplified"},
        {"pos": "rope", "attn_softcap": 2.0, "objective": "seq2seq", "n_encoder_layer": 1},
    ],
    ids=name,
)
def test_texts_of_several_strips(flags):
    """Decoding a text of more than two strips of attention, up to block_size and beyond, is the uncached forward; so
    are pieces of several strips that come after a cache. Each of its documents gives what it gives alone."""
    T, idx = 300, tokens(2, 292)
    model = build(block_size=T, **flags)
    jitter(model)
    source = {"source": tokens(2, 270)} if model.encoder else {}
    with torch.no_grad():
        check_decoding(model, idx, 12, **source)
        memory = model.encode(source.get("source"))
        set_caches(model, T)
        pieces = [model.hidden(idx[:, a:b], a, memory=memory) for a, b in ((0, 20), (20, 292))]
        set_caches(model, 0)
        assert torch.allclose(torch.cat(pieces, dim=1), model.hidden(idx, memory=memory), atol=1e-9)
        numbers, of_source = (torch.arange(n).expand(2, n) // 110 for n in (292, 270))
        together = model(idx, docs=numbers, **source, source_docs=of_source if source else None)
        for number in range(3):
            here, there = (slice(110 * number, min(110 * number + 110, n)) for n in (292, 270))
            alone = model(idx[:, here], **{each: x[:, there] for each, x in source.items()})
            assert torch.allclose(together[:, here], alone, atol=1e-9), number


COMPILED = [  # what a few rows of the grid might miss
    {"objective": "causal", "block": "superblock", "layer": "c.own_slots", "pos": "alibi"},
    {"objective": "masked", "block": "simplified", "pos": "rope", "window": 3},
    {"objective": "seq2seq", "block": "superblock", "pos": "rope", "attention": "mqa"},
]


@pytest.mark.parametrize("flags", [*COMPILED, GRID[5]], ids=changes)
def test_compiles_as_one_graph(flags):
    """One layer for each string, for the time that more would take; same outputs and gradients as eager."""
    torch._dynamo.reset()
    n = 1 + (flags.get("layer", "").count(";") or flags.get("value_residual", False))
    layers = {"n_layer": n, "n_dense_layer": 0}
    if flags["objective"] == "seq2seq":
        layers["n_encoder_layer"] = n
    model, idx = build(**flags | layers), tokens(2, T)
    given = beside(model, docs=flags["objective"] != "causal")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(compiled(idx, **given), model(idx, **given), list(model.parameters()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("flags", [{}, {"block": "parallel", "pos": "rope", "window": 5, "mlp": "swiglu"}], ids=name)
def test_compiled_block_trains_alike(flags):
    """torch.compile per block with the real backend: same logits and gradients as eager."""
    torch._dynamo.reset()
    model, idx = build(**flags), tokens(2, T)
    expected = model(idx)
    for block in model.blocks:
        block.compile(fullgraph=True)
    assert_same(model(idx), expected, list(model.parameters()), rtol=1e-9, atol=1e-9)


def test_literals_are_the_tables():
    hints = get_type_hints(ModelConfig)
    for flag, values in (TABLES | {"objective": CHECK}).items():
        assert set(get_args(hints[flag])) == set(values), flag


# ---- attention


def naive_attention(q, k, v, window=0, softcap=0.0, slopes=None, causal=True, docs=None, slots=None):
    """From the equations, with every matrix materialised: q (B, H, T, D), k and v (B, Hkv, S, D), docs (B, T) and
    (B, S), slots (Hkv, M, D) each."""
    H, T, D = q.shape[1:]
    S = k.size(2)
    distance = torch.tensor([[i + S - T - j for j in range(S)] for i in range(T)])
    hidden = (distance.abs() >= (window or T + S)) | (causal & (distance < 0))
    if docs is not None:
        hidden = hidden | (docs[0][:, :, None] != docs[1][:, None, :])
    out = []
    for h in range(H):
        g = h * k.size(1) // H
        scores = torch.einsum("btd,bsd->bts", q[:, h], k[:, g]) / math.sqrt(D)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            scores = scores - slopes[h] * distance.abs()
        scores, values = scores.masked_fill(hidden, -math.inf), v[:, g]
        if slots is not None:
            of_slots = torch.einsum("btd,md->btm", q[:, h], slots[0][g]) / math.sqrt(D)
            if softcap:
                of_slots = softcap * torch.tanh(of_slots / softcap)
            scores = torch.cat((of_slots, scores), dim=-1)
            values = torch.cat((slots[1][g].expand(len(v), -1, -1), values), dim=1)
        out.append(torch.softmax(scores, dim=-1) @ values)
    return torch.stack(out, dim=1)


def leaves(*shapes: tuple[int, ...], dtype=torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def assert_same(got, expected, wanted, rtol=1e-10, atol=1e-10):
    """The same values, and the same gradients of what is wanted."""
    assert torch.allclose(got, expected, rtol, atol)
    weight = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), wanted) for y in (got, expected)), strict=True):
        assert torch.allclose(a, b, rtol, atol)


@pytest.mark.parametrize("T,S", [(11, 11), (1, 11), (4, 11)])
@pytest.mark.parametrize("Hkv", [6, 2, 1])
@pytest.mark.parametrize("window", [0, 1, 3, 4, 10, 11])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("alibi", [False, True])
def test_attention_equals_naive_attention(T, S, Hkv, window, softcap, alibi):
    B, H, D = 2, 6, 4
    q, k, v = leaves((B, H, T, D), (B, Hkv, S, D), (B, Hkv, S, D))
    slopes = M.alibi_slopes(H).double() if alibi else None
    position = M.Alibi(ModelConfig(n_head=H, n_embd=H * D)) if alibi else M.AttentionPosition(ModelConfig())
    table = position.table(torch.arange(S), torch.float64)
    Q, K, V = position(F.pad(q, (0, 0, S - T, 0)), k, v, table)  # every query's own position, then the last T of them
    got = attention(Q[:, :, S - T :], K, V, D, Mask(window=window), softcap)[..., :D]
    assert_same(got, naive_attention(q, k, v, window, softcap, slopes), (q, k, v))


def documents(length: int, seed: int = 0) -> torch.Tensor:
    """Numbers (2, length) of up to four documents, with gaps between the numbers."""
    torch.manual_seed(seed)
    n = min(4, length)
    return 3 * torch.cat((torch.arange(n).expand(2, -1), torch.randint(n, (2, length - n))), dim=1).sort().values


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 3, 140])
@pytest.mark.parametrize("docs", [False, True])
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_attention_equals_naive_attention_under_every_mask(causal, window, docs, slots, softcap):
    """Few tokens, and several strips of them, whose documents and windows cross the strips."""
    for length, H, Hkv in ((11, 4, 4), (11, 4, 2), (270, 2, 1)):
        q, k, v, *pair = leaves(*((2, heads, length, 2) for heads in (H, Hkv, Hkv)), *[(Hkv, 5, 2)] * 2 * slots)
        numbers = (documents(length),) * 2 if docs else None
        pair = pair or None
        got = attention(q, k, v, 2, Mask(causal, window, numbers), softcap, slots=pair)
        expected = naive_attention(q, k, v, window, softcap, None, causal, numbers, pair)
        assert_same(got, expected, (q, k, v, *(pair or ())))
        for queries in (length // 3, 1):
            last, of_last = q[:, :, -queries:], numbers and (numbers[0][:, -queries:], numbers[1])
            got = attention(last, k, v, 2, Mask(causal, window, of_last), softcap, slots=pair)
            expected = naive_attention(last, k, v, window, softcap, None, causal, of_last, pair)
            assert_same(got, expected, (q, k, v, *(pair or ())))


@pytest.mark.parametrize("T,S", [(11, 7), (7, 11), (1, 11), (270, 19), (140, 270)])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("docs", [False, True])
@pytest.mark.parametrize("Hkv", [4, 2, 1])
def test_attention_over_a_memory_equals_naive_attention(T, S, softcap, docs, Hkv):
    """As many queries as there are, over as many keys as there are, whose documents are other tokens."""
    q, k, v = leaves(*((2, heads, length, 2) for heads, length in ((4, T), (Hkv, S), (Hkv, S))))
    numbers = (documents(T), documents(S, seed=1)) if docs else None
    got = attention(q, k, v, 2, Mask(causal=False, docs=numbers), softcap)
    assert_same(got, naive_attention(q, k, v, 0, softcap, None, False, numbers), (q, k, v))


def test_dropout_in_attention_keeps_the_mean():
    """On CPU attention dropout takes the strips: its mean over draws is the attention without it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3))
    draws = torch.stack([attention(q, k, v, 4, Mask(), dropout=0.3) for _ in range(1500)])
    assert torch.allclose(draws.mean(0), attention(q, k, v, 4, Mask()), atol=0.1)
    assert draws.std(0).min() > 1e-3


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropped_elements(p):
    """They are a fraction p of all, independent of their neighbours and of the next draw. The others grow, so that the
    mean stays, and their gradients with them."""
    torch.manual_seed(0)
    x = torch.rand(400, 999).add_(1).requires_grad_()
    torch.manual_seed(1)
    y, again = ops.dropped(x, p), ops.dropped(x, p).detach()
    kept = (y != 0).double()
    assert torch.allclose(y[y != 0].double(), x[y != 0].double() / kept.mean(), rtol=0.01)
    assert abs(kept.mean() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / x.numel()) + 1 / 65536
    for other in (again != 0, *(kept.flatten().roll(n).view_as(kept) for n in (1, 2, 3, 4, 999))):
        both = (kept * other).mean() - (1 - p) ** 2
        assert abs(both) < 4 * (1 - p) / math.sqrt(x.numel()) + 2e-5
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0) and torch.allclose(x.grad * x.detach(), y.detach())
    torch.manual_seed(1)
    assert torch.equal(ops.dropped(x, p), y) and torch.equal(ops.dropped(x, 0.0), x)
    assert ops.dropped(x.bfloat16(), p).dtype == torch.bfloat16 and ops.dropped(x, 0.999999).isfinite().all()


def test_a_model_of_bfloat16_parameters_trains():
    """Not under autocast: gradients of all parameters, those of the norms among them, are near float32's."""
    flags, grads = {"norm": "rmsnorm", "qk_norm": True, "pos": "rope", "mlp": "relu2"}, []
    for dtype in (torch.float32, torch.bfloat16):
        lm, ids = build(dtype, **flags), tokens(2, 13)
        lm(ids, ids).backward()
        grads.append(torch.cat([p.grad.flatten().float() for p in lm.parameters()]))
    assert (grads[1] - grads[0]).norm() < 0.05 * grads[0].norm()


def test_the_residual_stream_has_the_dtype_of_the_flag():
    for flag, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        seen, lm = set(), build(torch.float32, norm="rmsnorm", qk_norm=True, pos="rope", fp32_residual=flag)
        for block in lm.blocks:
            block.register_forward_hook(lambda _, args, y, seen=seen: seen.update((args[0].dtype, y.dtype)))
        with torch.autocast("cpu", torch.bfloat16):
            lm(torch.zeros(1, 8, dtype=torch.int64))
        assert seen == {dtype}


PLAIN, PAST, CPU, CUDA = (270, 270), (140, 270), ("cpu", "float32", 8), ("cuda", "bfloat16", 8)
KERNEL = [  # kernel; queries and keys: of a text, or of its end; device, dtype, width of a head; mask and options
    ("full", PLAIN, CPU, {}),
    ("full", PLAIN, CPU, {"causal": False}),
    ("full", PLAIN, CPU, {"window": 270}),
    ("full", (1, 270), CPU, {"window": 5}),
    ("full", PLAIN, CUDA, {"dropout": 0.1}),
    ("window", PLAIN, CPU, {"window": 100}),
    ("flash", PLAIN, CUDA, {"window": 100, "causal": False}),
    ("flash", PAST, CUDA, {"window": 100}),
    ("varlen", PAST, CUDA, {"docs": 4, "window": 100, "causal": False}),
    ("joined", PAST, CUDA, {"docs": 4, "window": 100, "slots": True}),
    ("joined", PAST, CUDA, {"slots": True}),
    ("strips", PLAIN, CUDA, {"slots": True, "dropout": 0.1}),
    ("strips", PLAIN, ("cuda", "float32", 8), {"docs": 4}),
    ("flash", PAST, CUDA, {"dropout": 0.1}),
    ("joined", PAST, CPU, {}),
    ("joined", PAST, CPU, {"slots": True}),
    ("joined", PLAIN, ("cpu", "bfloat16", 8), {"slots": True, "causal": False}),
    ("strips", PLAIN, CPU, {"docs": True}),
    ("strips", PLAIN, CPU, {"causal": False, "window": 100}),
    ("strips", PAST, CPU, {"window": 100}),
    ("strips", PAST, ("cuda", "float32", 8), {"window": 100}),
    ("strips", PLAIN, CPU, {"window": 100, "slots": True}),
    ("strips", PAST, ("cuda", "bfloat16", 12), {}),
    ("naive", PLAIN, CPU, {"softcap": 2.0}),
    ("naive", PLAIN, CPU, {"dropout": 0.1}),
    ("naive", PAST, CPU, {"causal": False, "slots": True, "softcap": 2.0}),
]


def spy_on_kernels(monkeypatch) -> list[str]:
    """The answers of attention_kernel to attention, from now on."""
    answers, kernel = [], ops.attention_kernel
    monkeypatch.setattr(ops, "attention_kernel", lambda *args: answers.append(kernel(*args)) or answers[-1])
    return answers


class Answer(Exception):
    """The kernel that attention would take."""


@pytest.mark.parametrize("kernel,lengths,where,options", KERNEL, ids=str)
def test_each_kernel_is_taken_when_the_table_says_so(monkeypatch, kernel, lengths, where, options):
    """On fake tensors, which may be on a GPU that is not there: attention goes no farther than the answer."""
    device, dtype, D = where
    softcap, dropout = (options.get(x, 0.0) for x in ("softcap", "dropout"))
    docs, slots = (options.get(x, False) for x in ("docs", "slots"))  # 4: with their boundaries

    def answer(*args):
        raise Answer(attention_kernel(*args))

    monkeypatch.setattr(ops, "attention_kernel", answer)
    with FakeTensorMode(), torch.no_grad():
        q, k = (torch.empty(1, 2, n, D, device=device, dtype=getattr(torch, dtype)) for n in lengths)
        numbers, pair = None, None
        if docs:
            numbers = tuple(torch.zeros(1, n, device=device, dtype=torch.int64) for n in lengths)
        if docs == 4:
            starts = torch.zeros(1, 3, device=device, dtype=torch.int64)
            numbers = *numbers, *(ops.boundaries(starts, n) for n in lengths)
        if slots:
            pair = (k.new_empty(2, 5, D),) * 2
        mask = Mask(options.get("causal", True), options.get("window", 0), numbers)
        with pytest.raises(Answer, match=f"^{kernel}$"):
            attention(q, k, k, D, mask, softcap, dropout, pair)


def test_more_documents_than_a_grid_of_cuda_has_places():
    for n, kernel in ((2**16, "varlen"), (2**16 + 1, "strips")):  # one more than the documents
        mask = Mask(docs=(torch.zeros(1), torch.zeros(1), torch.zeros(n)))
        assert attention_kernel(mask, 9, 9, False, False, 0.0, "cuda", True) == kernel


def test_the_examples_have_every_kernel_of_the_table():
    rows = [line.split()[0] for line in attention_kernel.__doc__.split("kernel    when")[1].splitlines()[1:8]]
    assert len(rows) == 7 and {kernel for kernel, *_ in KERNEL} == set(rows)


@pytest.mark.parametrize("flags,said", [
    ({}, "full (2 layers)"),
    ({"window": 3, "window_pattern": "SL"}, "window (1 layer), full (1 layer)"),
    ({"window": 13}, "full (2 layers)"),
    ({"window": 3, "objective": "masked"}, "strips (2 layers)"),
    ({"attn_softcap": 5.0}, "naive (2 layers)"),
    ({"dropout": 0.1}, "naive (2 layers)"),
    ({"doc_mask": True}, "strips (2 layers)"),
    ({"window": 3, **SLOTS}, "window (2 layers), full (2 layers)"),
    ({"pos": "alibi", **JOINT}, "joined (2 layers)"),
    ({"block": "simplified", "window": 3}, "window (2 layers)"),
    ({"objective": "seq2seq", "window": 3}, "window (2 layers), full (2 layers), strips (2 layers)"),
    ({"objective": "seq2seq", "block": "parallel", "doc_mask": True}, "strips (6 layers)"),
], ids=str)  # fmt: skip
def test_the_kernels_of_a_model_are_those_that_training_takes(monkeypatch, flags, said):
    model = build(torch.float32, **flags).train()
    source = S if model.encoder else 0
    assert attention_kernels(model, T, source, "cpu", torch.float32) == said
    answers = spy_on_kernels(monkeypatch)
    model(tokens(2, T), tokens(2, T), **beside(model, docs=model.cfg.doc_mask))
    assert Counter(answers) == {kernel: int(n) for kernel, n in re.findall(r"(\w+) \((\d+) layers?\)", said)}


@pytest.mark.parametrize("device,pieces,flags,said", [
    ("cuda", 1, {"dropout": 0.1}, "full (2 layers)"),
    ("cuda", 1, {"window": 3, "dropout": 0.1}, "flash (2 layers)"),
    ("cuda", 1, {"window": 3, "doc_mask": True}, "varlen (2 layers)"),
    ("cuda", 1, SLOTS, "full (4 layers)"),
    ("cuda", 1, JOINT, "joined (2 layers)"),
    ("cuda", 1, {"attn_softcap": 5.0}, "naive (2 layers)"),
    ("cpu", 4, {}, "joined (2 layers)"),
    ("cpu", 4, {"window": 3}, "strips (2 layers)"),
    ("cpu", 4, {"doc_mask": True}, "strips (2 layers)"),
    ("cuda", 4, {"window": 3}, "flash (2 layers)"),
    ("cuda", 4, {"n_head": 1, "n_embd": 256, "pos": "rope"}, "flash (2 layers)"),
    ("cuda", 4, {"n_head": 1, "n_embd": 256, "pos": "alibi"}, "strips (2 layers)"),  # wider than flash allows
], ids=str)  # fmt: skip
def test_the_kernels_of_a_model_elsewhere(device, pieces, flags, said):
    """On a GPU; and of pieces of a text, as under context parallelism, whose queries see the keys of earlier ones."""
    assert attention_kernels(build(**flags), 12, 0, device, torch.bfloat16, pieces=pieces) == said


@pytest.mark.parametrize("block", ["parallel", "superblock"])
def test_every_reader_has_a_dropout_of_its_own(block):
    """The branches' sum loses each branch at other places: some entries keep one of the two alone."""
    net = build(torch.float64, block=block, dropout=0.5, pos="none").train()
    (both,) = net.blocks[0].sums
    for name, value in (("attn", 1.0), ("mlp", 10.0)):
        reader = getattr(both, name)
        reader.forward = lambda x, inputs, value=value: torch.full_like(x, value)
    s = torch.zeros(2, 12, net.cfg.n_embd, dtype=torch.float64)
    assert set(both(s, M.Inputs()).unique().tolist()) == {0.0, 2.0, 20.0, 22.0}


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
        {"attention": "mqa", "window": 100, "pos": "alibi"},
        {"attn_softcap": 5.0},
        {"dropout": 0.1},
        {"block": "simplified", "window": 100},
        {"block": "simplified_parallel", "pos": "alibi"},
        {"block": "superblock", "layer": "c.joint_slots", "n_slot": 32},
        {"objective": "masked", "window": 100},
        {"objective": "masked", "block": "simplified"},
        {"objective": "masked", "block": "superblock", "layer": "c.own_slots", "n_slot": 32, "attn_softcap": 5.0},
        {"objective": "seq2seq", "block": "superblock", "layer": "c.own_slots", "n_slot": 32, "pos": "rope"},
    ],
    ids=name,
)
@pytest.mark.parametrize("docs", [False, True])
def test_no_square_tensor(flags, docs):
    T = 1024
    model = Model(ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=T, vocab_size=16, **flags))
    idx, numbers = torch.randint(16, (1, T)), torch.arange(T)[None] // 300
    source = {"source": idx} if model.encoder else {}
    of_docs = {"docs": numbers, "source_docs": numbers if source else None} if docs else {}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        with Largest() as largest:
            model(idx, idx, **source, **of_docs).backward()
    assert T < largest.numel < 0.6 * T * T  # strips of 256 rows, two heads
    assert sum(kept) < 1.5 * T * T, "the strips' matrices are kept for the backward"  # of a layer, or two
    if docs or model.cfg.objective == "masked":
        return
    model.eval()
    with Largest() as largest, torch.no_grad():
        list(generate(model, idx[:, :900], 2, lambda logits: logits.argmax(-1), **source))
    assert T < largest.numel < 0.6 * T * T  # strips of 256 rows, two heads


@pytest.mark.parametrize("dtype,masked,heads", [("float32", False, 4), ("bfloat16", False, 2), ("bfloat16", True, 4)])
def test_groups_are_copied_where_no_kernel_of_a_gpu_knows_them(monkeypatch, dtype, masked, heads):
    """On fake tensors, which may be on a GPU that is not there."""
    calls = []
    attention = lambda q, k, v, mask, **options: calls.append((k.size(1), v.size(1), options["enable_gqa"]))  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    with FakeTensorMode():
        q, k = (torch.empty(2, n, 32, 16, device="cuda", dtype=getattr(torch, dtype)) for n in (4, 2))
        ops.fused_attention(q, k, k, torch.empty(32, 32, device="cuda", dtype=torch.bool) if masked else None)
    assert calls == [(heads, heads, heads == 2)]


@pytest.mark.parametrize("user", [True, False])
def test_cudnn_computes_only_self_attention_with_a_backward(monkeypatch, user):
    """cuDNN is allowed if the sizes repeat: not with a mask, for other queries than keys, or without a gradient. A user
    who turns it off keeps it off; an error leaves it as it was."""
    seen, sdpa = [], F.scaled_dot_product_attention

    def recorder(*args, **options):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return sdpa(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorder)
    q, k = torch.randn(2, 2, 3, 8, 16, requires_grad=True)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    torch.backends.cuda.enable_cudnn_sdp(user)
    try:
        for queries, m, grad in (
            (8, None, True), (8, None, False), (8, mask, True), (1, None, True), (1, mask[-1:], False),
        ):  # fmt: skip
            with torch.set_grad_enabled(grad):
                ops.fused_attention(q[:, :, -queries:], k, k, m, is_causal=queries == 8 and m is None)
            assert torch.backends.cuda.cudnn_sdp_enabled() == user
        assert seen == [user, False, False, False, False]
        with pytest.raises(RuntimeError):
            ops.fused_attention(q, k, k, mask[:, :5])
        assert torch.backends.cuda.cudnn_sdp_enabled() == user and seen.pop() is False
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("softcap,z_loss", [(0.0, 0.0), (3.0, 0.0), (3.0, 0.2)])
def test_the_compiled_loss_of_a_chunk(softcap, z_loss):
    torch.manual_seed(0)
    logits, targets = 3 * torch.randn(8, 100), torch.randint(-1, 100, (8,))
    exact = logits.double().requires_grad_()
    z = ops.capped(exact, softcap)
    total = F.cross_entropy(z, targets, ignore_index=-1, reduction="sum")
    (total + z_loss * (z.logsumexp(-1).square() * (targets >= 0)).sum()).backward()
    for f in (ops.chunk_loss, torch.compile(ops.chunk_loss, dynamic=False, fullgraph=True)):
        found, slope = f(logits.clone(), targets, softcap, True, z_loss)
        assert found.item() == pytest.approx(total.item(), rel=1e-6) and f(logits, targets, softcap, False)[1] is None
        assert torch.allclose(slope.double(), exact.grad, atol=1e-6)


def test_caches_have_the_length_of_the_text(monkeypatch):
    lengths = []
    model = Model(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=32, vocab_size=11)).eval()
    monkeypatch.setattr(decode, "KVCache", lambda length, real=decode.KVCache: lengths.append(length) or real(length))
    for prompt, new in ((4, 5), (30, 2), (30, 9)):
        list(generate(model, torch.zeros(1, prompt, dtype=torch.int64), new, lambda logits: logits.argmax(-1)))
    lengths = [length for length in lengths if length]  # 0 when decoding ends
    assert lengths[:2] == [9, 32] and set(lengths[2:]) == {32}


# ---- positions


@pytest.mark.parametrize("scaling", [
    ":::", "linear", "linear:2:3", "linear:1_0", "linear: 2", "linear:-2", "linear:0", "linear:inf", "linear:1e-320",
    "linear:\u0662", "linear:.", "Linear:2", "llama3:8:4:1:8192", "yarn:4:16:32:1:9", "yarn:1e300",
])  # fmt: skip
def test_a_wrong_rope_scaling_is_refused_in_one_line(scaling):
    with pytest.raises(ValueError, match="^rope_scaling=.*: no known scaling; set it to linear:F, "):
        build(pos="rope", rope_scaling=scaling)


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


@pytest.mark.parametrize("C,expected", [(768, 2048), (4096, 10944), (32, 85)])
def test_gated_width_matches_parameters(C, expected):
    for mlp, width in (("swiglu", expected), ("gelu", 4 * C)):
        assert M.hidden_units(ModelConfig(n_head=2, n_embd=C, mlp=mlp), READER["p"]) == width


# ---- loss


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("chunk", [1, 5, 26, 1000])
def test_the_loss_in_chunks(softcap, z_loss, chunk):
    """Against cross_entropy and logsumexp of all logits. The z-loss is in the gradient alone."""
    model = build(logit_softcap=softcap, loss_chunk=chunk, z_loss=z_loss)
    for p in model.parameters():
        torch.nn.init.normal_(p)
    idx, targets = torch.randint(29, (2, 2, 13))
    targets[0, 3:6] = -1
    logits = model(idx)[targets >= 0]
    plain = F.cross_entropy(logits, targets[targets >= 0])
    expected = plain + z_loss * logits.logsumexp(-1).square().mean()
    loss, parameters = model(idx, targets), list(model.parameters())
    assert loss.item() == pytest.approx(plain.item(), rel=1e-12)
    with torch.no_grad():
        assert model(idx, targets).item() == pytest.approx(plain.item(), rel=1e-12)
    for p, q in zip(*(torch.autograd.grad(each, parameters) for each in (loss, expected)), strict=True):
        assert torch.allclose(p, q, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("trained", ["head", "all but the head", "nothing"])
def test_chunked_loss_of_frozen_parameters(trained):
    """Trained parameters have the gradients that they have together; without autograd, no chunk computes a gradient."""
    model, idx = build(loss_chunk=5, tie_weights=False), tokens(2, 13)
    model(idx, idx).backward()
    whole = {name: p.grad for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = None
        p.requires_grad_(trained != "nothing" and (name == "head.weight") == (trained == "head"))
    calls = []
    model.chunk_loss = lambda *args: calls.append(args[-1]) or ops.chunk_loss(*args)
    loss = model(idx, idx)
    if trained != "nothing":
        loss.backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, whole[name]) if p.requires_grad else p.grad is None, name
    with torch.no_grad():
        model(idx, idx)
    assert len(calls) == 12 and not any(calls[6:])


def test_the_chunks_of_a_gpu_hold_a_gib():
    """5248 rows of GPT-2's vocabulary, where a CPU takes 640."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for V in (257, 32000, 50304, 2**30):
        for device, most in ((cpu, 2**27), (gpu, 2**30)):
            rows = ops.rows_at_once(0, V, device)
            assert 4 * V * rows <= max(most, 4 * V) and 4 * V * (rows + 128) > most
    assert (ops.rows_at_once(0, 50304, cpu), ops.rows_at_once(0, 50304, gpu)) == (640, 5248)


def test_chunks_have_one_size():
    """The fewest that divide the rows, below twice as many as are needed, so that one graph is compiled for all."""
    for n, most, rows in ((12288, 5248, 4096), (65536, 5248, 4096), (100, 640, 100), (26, 5, 5), (24, 5, 4), (7, 1, 1)):
        assert ops.equal_rows(n, most) == rows
    for n, most in itertools.product(range(1, 60), repeat=2):
        rows = ops.equal_rows(n, most)
        assert rows <= most and (n % rows == 0 or rows == most) and -(-n // rows) < 2 * -(-n // most)
    torch._dynamo.reset()
    graphs, of_chunk = [], lambda *args: ops.chunk_loss(*args)  # noqa: E731
    of_chunk = torch.compile(of_chunk, backend=lambda graph, inputs: graphs.append(graph) or graph, dynamic=False)
    x, W = torch.randn(24, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    targets = torch.randint(9, (24,))
    ops.cross_entropy(x, W, targets, chunk=10, of_chunk=of_chunk).backward()
    expected = torch.autograd.grad(F.cross_entropy(x @ W.T, targets, reduction="sum"), (x, W))
    assert len(graphs) == 1
    assert torch.allclose(x.grad, expected[0], atol=1e-6) and torch.allclose(W.grad, expected[1], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_16_bits_are_summed_in_float32(dtype):
    """A CPU converts each product; CUDA's own overload, seen on fake tensors, needs no copy. The first product is
    written, and the second one added."""
    a, b = torch.randn(3, 5).to(dtype), torch.randn(5, 4).to(dtype)
    out, called = torch.full((3, 4), math.nan), []
    ops.product_(out, a, b, add=False)
    ops.product_(out, a, b, add=True)
    assert out.dtype == torch.float32 and torch.allclose(out, 2 * (a.float() @ b.float()), rtol=0.02, atol=0.02)

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            if "mm" in f.name():
                called.append((f.name(), [x.dtype for x in args if isinstance(x, torch.Tensor)], kwargs["out"] is out))
                return out
            return f(*args, **(kwargs or {}))

    with FakeTensorMode(), torch.device("cuda"):
        out, a, b = torch.empty(3, 4), torch.empty(3, 5, dtype=torch.bfloat16), torch.empty(5, 4, dtype=torch.bfloat16)
        with Recorder():
            ops.product_(out, a, b, add=False)
            ops.product_(out, a, b, add=True)
    wide, narrow = torch.float32, torch.bfloat16
    assert called == [
        ("aten::mm.dtype_out", [narrow, narrow], True),
        ("aten::addmm.dtype_out", [wide, narrow, narrow], True),
    ]


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
    assert flops(model, T) == T * (6 * matrices + 12 * visible)


@pytest.mark.parametrize("T", [100, 40])
def test_flops_of_an_encoder_counted_by_hand(T):
    """A window reaches to both sides, and no farther than the text."""
    L, H, C, V, W, M = 3, 4, 64, 1000, 30, 5
    model = on_meta(
        n_layer=L, n_head=H, n_embd=C, block_size=128, vocab_size=V, attention="mqa", bias=True, window=W,
        window_pattern="LSS", objective="masked", block="superblock", layer="c.own_slots", n_slot=M,
    )  # fmt: skip
    matrices = L * (C * (C + 2 * C // H) + C * C) + V * C
    scores = T * (2 * min(T, 59) + T + L * M) * C  # as many multiplications as the weighted sum
    assert flops(model, T) == 6 * T * matrices + 12 * scores


def test_parameters_and_flops_of_an_encoder_and_decoder_counted_by_hand():
    L, E, H, Hkv, C, T, S, V, W = 3, 5, 8, 2, 256, 128, 96, 1000, 40
    wide = C + 2 * C * Hkv // H
    flags = dict(n_layer=L, n_encoder_layer=E, n_head=H, n_embd=C, block_size=T, vocab_size=V, objective="seq2seq")
    for block in ("standard", "superblock"):
        model = on_meta(**flags, attention="gqa", n_kv_head=Hkv, pos="rope", window=W, mlp_ratio=3.0, block=block)
        mlp, kv = 2 * C * 3 * C, C * 2 * C * Hkv // H
        encoder, decoder = E * (C * wide + C * C + mlp), L * (C * wide + C * C + mlp + C * C + C * C)
        norms = {"standard": 2 * E + 3 * L, "superblock": E + 2 * L}[block] + 2
        assert model.n_params() == encoder + decoder + L * kv + V * C + norms * C
        weights = S * (encoder + L * kv) + T * (decoder + V * C)
        scores = (E * S * (2 * W - 1) + L * T * (W + S)) * C
        assert flops(model, T, source=S) == 6 * weights + 12 * scores


def drawn_at(std: float, **flags) -> list[torch.Tensor]:
    sizes = dict(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=512)
    return list(Model(ModelConfig(**sizes, **flags, init_std=std), 1).parameters())


@pytest.mark.parametrize(
    "flags",
    [{}, {"scaled_init": False}, {"block": "simplified"}, {"objective": "seq2seq"}, {"n_expert": 2}]
    + [{"block": "superblock", "layer": layer} for layer in ("c.own_slots", "c,p.matrix")],
    ids=str,
)
def test_init_std_scales_all_that_is_drawn(flags):
    """Also output layers and slots. Values that are not drawn stay; the embedding has the flag's standard deviation."""
    usual, other = drawn_at(0.02, **flags), drawn_at(0.006, **flags)
    for p, q in zip(usual, other, strict=True):
        constant = p.std() == 0 if p.numel() > 1 else True
        torch.testing.assert_close(q, p if constant else 0.3 * p, rtol=1e-5, atol=0)
    assert max(q.std().item() for q in other if q.shape == (512, 64)) == pytest.approx(0.006, rel=0.05)


@pytest.mark.parametrize("values,resid", [("first", 1.0), ("all", 0.2)])
@pytest.mark.parametrize("block", ["simplified", "simplified_parallel"])
def test_initial_values_of_simplified_blocks(block, values, resid):
    """Every parameter: W_Q and the near identities' W are 0, no linear layer shrinks with depth, and the gains."""
    C, H, D = 256, 4, 64
    flags = dict(block=block, simplified_value_proj=values, simplified_beta_ff=0.3, attention="gqa", n_kv_head=2)
    model, seen = Model(ModelConfig(n_layer=3, n_head=H, n_embd=C, block_size=64, vocab_size=512, **flags), 1), set()
    g_attn, b_ff = {"simplified": ("0.gain", "1.gain"), "simplified_parallel": ("0.gains.0", "0.gains.1")}[block]
    others = {"value.resid.weight": resid, "out.resid.weight": resid, f"sums.{b_ff}.weight": 0.3}
    for n, p in model.named_parameters():
        kind = ".".join(n.split(".")[-2:])
        seen |= {n.partition("sums.")[2], kind}
        if kind == "qk.weight":  # two groups of two heads' queries and one's keys
            q, k = p.view(2, 3, D, C).split((2, 1), dim=1)
            assert (q == 0).all() and k.std().item() == pytest.approx(0.02, rel=0.05)
        elif kind in ("value.weight", "out.weight"):
            assert (p == 0).all(), n
        elif kind in ("up.weight", "down.weight", "wte.weight", "wpe.weight"):
            assert p.std().item() == pytest.approx(0.02, rel=0.05), n
        else:
            gain = next((value for name, value in others.items() if n.endswith(name)), 1.0)
            assert p.dim() == 1 and torch.equal(p, torch.full_like(p, gain)), n
    assert {"0.attn.value.resid.weight", "0.attn.value.skip.weight", "0.attn.alpha"} <= seen
    assert {f"{g_attn}.weight", f"{b_ff}.weight"} <= seen and ("1.skip.weight" in seen) == (block == "simplified")


def test_initial_values_of_slots():
    """As large as keys and values of a stream whose channels have variance 1, which a matrix of N(0, 0.02) makes."""
    flags = dict(block="superblock", layer="c.own_slots", n_slot=300)
    model = Model(ModelConfig(n_layer=2, n_head=4, n_embd=256, block_size=64, vocab_size=512, **flags), 1)
    slots = [p for n, p in model.named_parameters() if "slot" in n]
    assert len(slots) == 4
    for p in slots:
        assert p.shape == (4, 300, 64) and p.std().item() == pytest.approx(0.02 * 16, rel=0.02)
        assert abs(p.mean().item()) < 0.01
    assert len({p[0, 0, 0].item() for p in slots}) == 4  # each has numbers of its own


@pytest.mark.parametrize("block", M.BLOCK)
@pytest.mark.parametrize("pos", [pos for pos in M.POSITION if pos != "alibi"])  # which is causal alone
@pytest.mark.parametrize("norm_placement", ["pre", "post"])
def test_encoder_is_a_masked_model_without_head(block, pos, norm_placement):
    flags = dict(block=block, pos=pos, norm_placement=norm_placement, window=4, window_pattern="SL")
    both = build(objective="seq2seq", n_encoder_layer=3, **flags)
    alone = build(objective="masked", n_layer=3, **flags)
    jitter(both)
    weights = {n: p for n, p in both.state_dict().items() if n.startswith(("wte", "pos", "head"))}
    weights |= {n.removeprefix("encoder."): p for n, p in both.state_dict().items() if n.startswith("encoder.")}
    alone.load_state_dict(weights)
    source = tokens(2, T)
    for docs in (None, DOCS):
        assert torch.allclose(both.encode(source, docs), alone.hidden(source, docs=docs), atol=1e-12)


@pytest.mark.parametrize("flags,fragments", [
    ({"n_embd": 30}, ["n_embd=30", "n_head=4"]),
    ({"n_layer": 0}, ["n_layer=0"]),
    ({"n_encoder_layer": -1, "objective": "seq2seq"}, ["n_encoder_layer=-1"]),
    ({"window": -1}, ["window=-1"]),
    ({"dropout": 1.0}, ["dropout=1.0"]),
    ({"attention": "gqa"}, ["n_kv_head=0", "attention=gqa", "[1, 2, 4]"]),
    ({"attention": "gqa", "n_kv_head": 3}, ["n_kv_head=3", "n_head=4"]),
    ({"attention": "mqa", "n_kv_head": 2}, ["n_kv_head=2", "attention=mqa"]),
    ({"n_kv_head": 2}, ["n_kv_head=2", "attention=mha", "gqa"]),
    ({"pos": "rope", "n_embd": 36}, ["pos=rope", "9"]),
    ({"pos": "sinusoidal", "n_embd": 35, "n_head": 5}, ["pos=sinusoidal", "35"]),
    ({"window": 4, "window_pattern": "SX"}, ["window_pattern=SX"]),
    ({"mlp_ratio": 0.0}, ["mlp_ratio=0.0"]),
    ({"block": "standard", "n_group": 2}, ["n_group=2", "only with block=superblock"]),
    ({"rope_theta": -1.0}, ["rope_theta=-1.0"]),
    ({"vocab_size": 0}, ["vocab_size=0"]),
], ids=str)  # fmt: skip
def test_impossible_flags_are_named(flags, fragments):
    with pytest.raises(ValueError) as error:
        build(**flags)
    assert "\n" not in str(error.value)
    for fragment in fragments:
        assert fragment in str(error.value)


IDX, LONG = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 14, dtype=torch.int64)


@pytest.mark.parametrize("objective,idx,given,said", [
    ("causal", LONG, {}, "14 tokens.*block_size=13"),
    ("seq2seq", IDX, {"source": LONG}, "14 tokens.*block_size=13"),
    ("causal", IDX, {"source": IDX}, "^objective=causal reads no source$"),
    ("masked", IDX, {"source": IDX}, "^objective=masked reads no source$"),
    ("seq2seq", IDX, {}, "^objective=seq2seq needs a source$"),
    ("seq2seq", IDX, {"source": IDX, "docs": IDX}, "docs and source_docs go together"),
    ("seq2seq", IDX, {"source": IDX, "source_docs": IDX}, "docs and source_docs go together"),
])  # fmt: skip
def test_what_a_model_does_not_take_is_refused(objective, idx, given, said):
    with pytest.raises(ValueError, match=said):
        build(objective=objective)(idx, **given)


def test_masked_does_not_continue_a_text():
    with pytest.raises(ValueError, match="^objective=masked does not continue a text; it fills blanks in one$"):
        next(generate(build(objective="masked"), IDX, 1, lambda logits: logits.argmax(-1)))


# ---- seams


def stored_attributes(file: Path) -> set[tuple[str, str]]:
    """(object, attribute) of every assignment to an attribute in a file."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
    return {(ast.unparse(node.value), node.attr) for node in nodes if isinstance(node.ctx, ast.Store)}


def test_engine_replaces_the_seams_and_nothing_else():
    """Among the attributes that model.py defines, engine/ assigns exactly those in the table of docs/hacking.md."""
    of_modules = {name for owner, name in stored_attributes(ROOT / "model.py") if owner == "self"}
    for kind in vars(M).values():
        if isinstance(kind, type) and issubclass(kind, torch.nn.Module):
            of_modules |= set(vars(kind))
    stored = set().union(*(stored_attributes(file) for file in (ROOT / "engine").rglob("*.py")))
    replaced = {name for owner, name in stored if owner not in ("self", "ctx", "cfg")} & of_modules
    table = (ROOT / "docs" / "hacking.md").read_text().partition("## Seams")[2].splitlines()
    named = set(re.findall(r"[.](\w+)", " ".join(line.split("|")[1] for line in table if line.startswith("|"))))
    assert named == replaced | {"blocks", "pos", "head"}  # of pipeline.elsewhere, by their paths


# ---- initial weights


@given(st.data())
@settings(max_examples=60)
def test_a_part_of_the_initial_weights_is_that_part_of_the_whole(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=3)))
    start = tuple(data.draw(st.integers(0, n)) for n in shape)
    size = tuple(data.draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True))
    longer = (shape[0] + data.draw(st.integers(0, 3)), *shape[1:])  # as with padding
    whole = ops.normal("0 x", longer, (0,) * len(shape), shape, "cpu")
    part = whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
    assert torch.equal(ops.normal("0 x", shape, start, size, "cpu"), part)


def test_large_arrays_are_drawn_in_strips():
    whole = ops.normal("0 x", (3000, 50), (0, 0), (3000, 50), "cpu")  # 2^16 numbers at once
    assert torch.equal(torch.cat([ops.normal("0 x", (3000, 50), (i, 0), (1, 50), "cpu") for i in range(3000)]), whole)
