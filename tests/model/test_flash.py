"""FlashAttention without a GPU: for CPUs, PyTorch's operators get a naive implementation of their description."""

import itertools
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import ops
from data.loader import document_starts
from engine.parallel.context import mask_of_piece
from engine.parallel.recomputation import recompute
from model import Inputs
from ops import Mask, attention
from tests.models import T as LENGTH
from tests.models import assert_same, beside, build, documents, jitter, leaves, naive_attention, spy_on_kernels, tokens

aten = torch.ops.aten


def sequences(q, k, ends_q, ends_k, max_q, max_k) -> list[tuple]:
    """Indices of the queries and keys of each sequence. The kernel reads and writes no others."""
    if ends_q is None:
        assert q.dim() == k.dim() == 4 and (q.size(1), k.size(1)) == (max_q, max_k) and len(q) == len(k)
        return [(row, row) for row in range(len(q))]
    assert q.dim() == k.dim() == 3 and ends_q.shape == ends_k.shape and ends_q.dim() == 1
    for ends, total, most in ((ends_q, len(q), max_q), (ends_k, len(k), max_k)):
        assert ends.dtype == torch.int32 and ends.is_contiguous() and ends[0] == 0 and ends[-1] == total
        assert 0 <= ends.diff().min() and ends.diff().max() <= most
    slices = ([slice(a, b) for a, b in itertools.pairwise(ends.tolist())] for ends in (ends_q, ends_k))
    return list(zip(*slices, strict=True))


def seen(T, S, causal, left, right) -> torch.Tensor:
    """Whether query i, aligned with key i + S - T, sees key j: at most `left` before and `right` after; -1: any."""
    distance = torch.arange(S) - (torch.arange(T)[:, None] + S - T)
    right = 0 if causal else right
    return (distance >= (-left if left >= 0 else -T - S)) & (distance <= (right if right >= 0 else T + S))


def scores_of(q, k, scale, causal, left, right) -> torch.Tensor:
    """q (T, H, E), k (S, Hkv, E) -> (H, T, S)."""
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
    scores = torch.einsum("the,she->hts", q.double(), k.double()) * scale
    return scores.masked_fill(~seen(len(q), len(k), causal, left, right), -math.inf)


def forward(
    q, k, v, ends_q, ends_k, max_q, max_k, dropout, causal, debug, *, scale=None, window_size_left=None,
    window_size_right=None, **more,
):  # fmt: skip
    assert dropout == 0 and not debug and not any(x is not None for x in more.values())
    assert all(x.stride(-1) == 1 and x.size(-1) % 8 == 0 and x.dtype == q.dtype for x in (q, k, v))
    out = torch.full_like(q, math.nan)
    dense = ends_q is None
    shape = (len(q), q.size(2), max_q) if dense else (q.size(1), len(q))
    z = torch.full(shape, math.nan, dtype=torch.promote_types(q.dtype, torch.float32))
    for of_q, of_k in sequences(q, k, ends_q, ends_k, max_q, max_k):
        scores = scores_of(q[of_q], k[of_k], scale, causal, window_size_left, window_size_right)
        values = v[of_k].repeat_interleave(q.size(-2) // v.size(-2), dim=1).double()
        out[of_q] = torch.einsum("hts,she->the", scores.softmax(-1), values).to(q.dtype)
        if dense:
            z[of_q] = scores.logsumexp(-1).to(z.dtype)
        else:
            z[:, of_q] = scores.logsumexp(-1).to(z.dtype)
    return out, z, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), q.new_empty(0)


def backward(
    grad, q, k, v, out, z, ends_q, ends_k, max_q, max_k, dropout, causal, seed, unused, *, scale=None,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert dropout == 0 and all(x.stride(-1) == 1 for x in (q, k, v, out)) and grad.dtype == out.dtype == q.dtype
    dense = ends_q is None
    G = q.size(-2) // k.size(-2)
    assert z.is_contiguous() and z.shape == ((len(q), q.size(2), max_q) if dense else (q.size(1), len(q)))
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    for of_q, of_k in sequences(q, k, ends_q, ends_k, max_q, max_k):
        scores = scores_of(q[of_q], k[of_k], scale, causal, window_size_left, window_size_right)
        p = (scores - (z[of_q] if dense else z[:, of_q])[..., None].double()).exp()
        dy = grad[of_q].double()
        y = out[of_q].double()
        keys = k[of_k].double().repeat_interleave(G, dim=1)
        values = v[of_k].double().repeat_interleave(G, dim=1)
        ds = p * (torch.einsum("the,she->hts", dy, values) - (dy * y).sum(-1).T[..., None]) * scale
        dq[of_q] = torch.einsum("hts,she->the", ds, keys).to(q.dtype)
        of_heads = torch.einsum("hts,the->she", ds, q[of_q].double())
        dk[of_k] = of_heads.unflatten(1, (-1, G)).sum(2).to(q.dtype)
        of_heads = torch.einsum("hts,the->she", p, dy)
        dv[of_k] = of_heads.unflatten(1, (-1, G)).sum(2).to(q.dtype)
    return dq, dk, dv


@pytest.fixture
def flash(monkeypatch):
    """CPUs have the operators. `calls` has, for each call, whether it has documents, and the limits of its window."""
    calls = []

    def noting(*args, window_size_left, window_size_right, **more):
        calls.append((args[3] is not None, args[8], window_size_left, window_size_right))
        window = dict(window_size_left=window_size_left, window_size_right=window_size_right)
        return forward(*args, **window, **more)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", noting, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        monkeypatch.setattr(ops, "takes_flash", lambda device, dtype, width, dropout=0.0: width % 8 == 0)
        monkeypatch.setattr(ops, "takes_products", lambda *_: False)
        yield SimpleNamespace(calls=calls)


def with_boundaries(of_queries: torch.Tensor, of_keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As a model makes them of what the loader gives."""
    starts = document_starts({"docs": of_queries, "source_docs": of_keys})
    ends_of_queries = ops.boundaries(starts["doc_starts"], of_queries.size(1))
    ends_of_keys = ops.boundaries(starts["source_doc_starts"], of_keys.size(1))
    return of_queries, of_keys, ends_of_queries, ends_of_keys


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 3, 140])
@pytest.mark.parametrize("docs", [False, True])
@pytest.mark.parametrize("slots", [False, True])
def test_flash_equals_naive_attention(flash, causal, window, docs, slots):
    """All queries, and the last ones, whose first document lacks queries; results and gradients."""
    for length, H, Hkv, gap in ((11, 2, 2, 1), (11, 4, 2, 3), (150, 2, 1, 1)):
        q, k, v, *pair = leaves((2, H, length, 8), *[(2, Hkv, length, 8)] * 2, *[(Hkv, 5, 8)] * 2 * slots)
        of_keys = gap * documents(length) // 3  # also of documents whose numbers follow each other
        pair = pair or None
        for queries in (length, length // 3):
            last = q[:, :, -queries:]
            numbers = (of_keys[:, -queries:], of_keys) if docs else None
            flash.calls.clear()
            mask = Mask(causal, window, numbers and with_boundaries(*numbers))
            got = attention(last, k, v, 8, mask, slots=pair)
            expected = naive_attention(last, k, v, window, 0.0, causal, numbers, pair)
            assert_same(got, expected, (q, k, v, *(pair or ())))
            limit = window - 1 if 0 < window < length else -1
            of_context = docs, causal, limit, 0 if causal else limit
            limited = docs or limit >= 0
            called = not slots if limited else causal and (slots or queries < length)
            assert flash.calls == [of_context] * called


@pytest.mark.parametrize("T,S", [(11, 7), (7, 11), (150, 19)])
@pytest.mark.parametrize("Hkv", [4, 1])
def test_flash_over_a_memory_equals_naive_attention(flash, T, S, Hkv):
    """Queries of one text, and keys of another, which has documents without a query."""
    q, k, v = leaves((2, 4, T, 8), *[(2, Hkv, S, 8)] * 2)
    of_queries = documents(T).clamp(max=6)
    of_keys = documents(S, seed=1)
    got = attention(q, k, v, 8, Mask(False, docs=with_boundaries(of_queries, of_keys)))
    assert flash.calls == [(True, False, -1, -1)]
    assert (of_keys == 9).any()
    assert_same(got, naive_attention(q, k, v, 0, 0.0, False, (of_queries, of_keys)), (q, k, v))


FLAGS = [
    {},
    {"attention": "gqa", "n_kv_head": 1, "pos": "rope", "window": 3, "window_pattern": "SL", "qk_norm": True},
    {"pos": "alibi"},  # in columns of queries and keys
    {"objective": "seq2seq", "window": 3},
    {"block": "simplified"},
]


def step(flags: dict, recomputed: bool = False) -> list[torch.Tensor]:
    """Loss and gradients of a model of float64 that gets documents, and the beginnings of them."""
    model = build(**{"n_head": 2, "n_embd": 16, "doc_mask": True} | flags)
    for block in model.blocks if recomputed else ():
        recompute(block, "selective")
    jitter(model)
    given = beside(model)
    loss = model(tokens(2, LENGTH), tokens(2, LENGTH), **given, **document_starts(given))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


assert_close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_models_compute_the_same(flash, monkeypatch, flags):
    """As in strips, with and without recomputation, which keeps what the kernel computes."""
    answers = spy_on_kernels(monkeypatch)
    ours = step(flags)
    assert set(answers) == {"varlen"}
    calls = len(flash.calls)
    assert_close(step(flags, recomputed=True), ours)
    assert len(flash.calls) == 2 * calls
    monkeypatch.setattr(ops, "takes_flash", lambda *_: False)
    assert_close(ours, step(flags))
    assert len(flash.calls) == 2 * calls


def test_compiled_models_compute_the_same(flash):
    """A sum is a whole graph: one for the first number of documents, and one for all others."""
    torch._dynamo.reset()
    flags = {"n_head": 2, "n_embd": 16, "doc_mask": True, "n_layer": 1, "window": 3}
    model = build(**flags)
    attn = model.blocks[0].sums[0]
    compiled = torch.compile(attn, backend="aot_eager", fullgraph=True)
    counts = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    (x,) = leaves((2, LENGTH, 16))
    table = model.position_table(torch.arange(LENGTH), torch.float64)
    for n in (2, 4, 8):
        numbers = torch.arange(LENGTH).expand(2, -1) * n // LENGTH
        inputs = Inputs(table, with_boundaries(numbers, numbers))
        assert_same(compiled(x, inputs), attn(x, inputs), [x, *attn.parameters()])
    assert counts["unique_graphs"] - before <= 2
    torch._dynamo.reset()


@pytest.mark.parametrize("docs", [False, True])
def test_the_operators_take_the_arguments(docs):
    """Of tensors without values: those that PyTorch knows of CUDA, with PyTorch's own formula of the gradient."""
    q, k = (torch.empty(2, n, 24, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for n in (4, 2))
    ends = ops.boundaries(torch.zeros(2, 8, device="meta", dtype=torch.int64), 24) if docs else None
    mask = Mask(True, 5, (q, k, ends, ends) if docs else None)
    y = ops.flash_attention(q, k, k, mask, 0.25, 0.0)
    assert y.shape == q.shape and y.dtype == q.dtype
    assert [grad.shape for grad in torch.autograd.grad(y, (q, k), y)] == [q.shape, k.shape]


@pytest.mark.parametrize("window", [0, 5])
def test_pieces_of_a_text_with_documents(flash, window):
    """Under --cp, the queries of a piece see the keys before its end: as rows of the whole text's attention."""
    docs = documents(24)
    q, k, v = (torch.randn(len(docs), 2, 24, 8, dtype=torch.float64) for _ in range(3))
    whole = Mask(True, window, with_boundaries(docs, docs))
    expected = ops.attention(q, k, v, 8, Mask(True, window, (docs, docs)))
    for begin in range(0, 24, 4):
        piece = mask_of_piece(whole, begin, end := begin + 4)
        y = ops.attention(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], 8, piece)
        torch.testing.assert_close(y, expected[:, :, begin:end])
    assert len(flash.calls) == 6


def test_what_takes_flash(monkeypatch):
    monkeypatch.setattr(torch._C, "_get_flash_sdp_enabled", lambda: True)
    assert ops.takes_flash("cuda", torch.bfloat16, 64)
    assert not ops.takes_flash("cuda", torch.bfloat16, 36)
    assert ops.takes_flash("cuda", torch.bfloat16, 256)
    assert ops.takes_flash("cuda", torch.bfloat16, 192, dropout=0.1)
    assert not ops.takes_flash("cuda", torch.bfloat16, 256, dropout=0.1)  # some GPUs would return no gradient
    assert not ops.takes_flash("cuda", torch.float32, 64)
    assert not ops.takes_flash("cpu", torch.bfloat16, 64)
    monkeypatch.setattr(torch._C, "_get_flash_sdp_enabled", lambda: False)  # by a user
    assert not ops.takes_flash("cuda", torch.bfloat16, 64)
