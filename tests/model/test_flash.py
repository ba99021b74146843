"""FlashAttention's kernel of CUDA, without a GPU: PyTorch's operators get a naive implementation for CPUs, which follows
the operators' description and nothing of ops.py. Their schemas, shapes and gradients' formulas are PyTorch's own."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from test_model import T as LENGTH
from test_model import assert_same, between, beside, build, documents, leaves, naive_attention, tokens

import ops
from data.loader import document_starts
from engine.compilation import graphs
from engine.parallel.recomputation import recompute
from model import Inputs
from ops import Mask, attention

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
    out, dtype = torch.full_like(q, math.nan), torch.float64 if q.dtype == torch.float64 else torch.float32
    dense = ends_q is None
    z = torch.full((len(q), q.size(2), max_q) if dense else (q.size(1), len(q)), math.nan, dtype=dtype)
    for of_q, of_k in sequences(q, k, ends_q, ends_k, max_q, max_k):
        scores = scores_of(q[of_q], k[of_k], scale, causal, window_size_left, window_size_right)
        values = v[of_k].repeat_interleave(q.size(-2) // v.size(-2), dim=1).double()
        out[of_q] = torch.einsum("hts,she->the", scores.softmax(-1), values).to(q.dtype)
        if dense:
            z[of_q] = scores.logsumexp(-1).to(dtype)
        else:
            z[:, of_q] = scores.logsumexp(-1).to(dtype)
    return out, z, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), q.new_empty(0)


def backward(
    grad, q, k, v, out, z, ends_q, ends_k, max_q, max_k, dropout, causal, seed, unused, *, scale=None,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert dropout == 0 and all(x.stride(-1) == 1 for x in (q, k, v, out)) and grad.dtype == out.dtype == q.dtype
    dense, G = ends_q is None, q.size(-2) // k.size(-2)
    assert z.is_contiguous() and z.shape == ((len(q), q.size(2), max_q) if dense else (q.size(1), len(q)))
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    for of_q, of_k in sequences(q, k, ends_q, ends_k, max_q, max_k):
        scores = scores_of(q[of_q], k[of_k], scale, causal, window_size_left, window_size_right)
        p = (scores - (z[of_q] if dense else z[:, of_q])[..., None].double()).exp()
        dy, y = grad[of_q].double(), out[of_q].double()
        keys, values = (x[of_k].double().repeat_interleave(G, dim=1) for x in (k, v))
        ds = p * (torch.einsum("the,she->hts", dy, values) - (dy * y).sum(-1).T[..., None]) * scale
        dq[of_q] = torch.einsum("hts,she->the", ds, keys).to(q.dtype)
        for dx, of_each in ((dk, torch.einsum("hts,the->she", ds, q[of_q].double())), (dv, torch.einsum("hts,the->she", p, dy))):
            dx[of_k] = of_each.unflatten(1, (-1, G)).sum(2).to(q.dtype)
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
        monkeypatch.setattr(ops, "takes_flash", lambda device, dtype, width: width % 8 == 0)
        yield SimpleNamespace(calls=calls)


def with_boundaries(of_queries: torch.Tensor, of_keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As a model makes them of what the loader gives."""
    found = document_starts({"docs": of_queries, "source_docs": of_keys})
    starts = found["doc_starts"], found["source_doc_starts"]
    return of_queries, of_keys, *(ops.boundaries(x, y.size(1)) for x, y in zip(starts, (of_queries, of_keys), strict=True))


def test_starts_of_documents():
    """By hand: documents 1 and 4 are missing, and numbers from 6 on belong to no row."""
    docs, source_docs = torch.tensor([[0, 0, 2, 3, 3], [0, 2, 2, 2, 5]]), torch.tensor([[0, 2, 3], [0, 2, 5]])
    found = document_starts({"docs": docs, "source_docs": source_docs, "idx": docs})
    assert found.keys() == {"doc_starts", "source_doc_starts"}
    assert found["doc_starts"].tolist() == [[0, 2, 2, 3, 5, 5, 5, 5], [0, 1, 1, 4, 4, 4, 5, 5]]
    assert found["source_doc_starts"].tolist() == [[0, 1, 1, 2, 3, 3, 3, 3], [0, 1, 1, 2, 2, 2, 3, 3]]
    ends = ops.boundaries(found["doc_starts"], 5)
    assert ends.dtype == torch.int32
    assert ends.tolist() == [0, 2, 2, 3, 5, 5, 5, 5, 5, 6, 6, 9, 9, 9, 10, 10, 10]
    assert document_starts({"idx": docs}) == {}
    assert document_starts({"docs": torch.zeros(2, 3, dtype=torch.int64)})["doc_starts"].tolist() == [[0], [0]]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 3, 140])
@pytest.mark.parametrize("docs", [False, True])
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("Hkv", [4, 2, 1])
def test_flash_equals_naive_attention(flash, causal, window, docs, slots, Hkv):
    """All queries, and the last ones, whose first document lacks queries; results and gradients."""
    for length in (11, 150):
        q, k, v, *pair = leaves((2, 4, length, 8), *[(2, Hkv, length, 8)] * 2, *[(Hkv, 5, 8)] * 2 * slots)
        of_keys, pair = documents(length), pair or None
        for queries in (length, length // 3):
            last, numbers = q[:, :, -queries:], (of_keys[:, -queries:], of_keys) if docs else None
            flash.calls.clear()
            mask = Mask(causal, window, numbers and with_boundaries(*numbers))
            got = attention(last, k, v, 8, mask, slots=pair)
            expected = naive_attention(last, k, v, window, 0.0, None, causal, numbers, pair)
            assert_same(got, expected, (q, k, v, *(pair or ())))
            limit = window - 1 if 0 < window < length else -1
            of_context = docs, causal, limit, 0 if causal else limit
            plain = not docs and limit < 0 and not slots and (queries == length or not causal)
            assert flash.calls == ([] if plain else [(False, False, -1, -1)] * slots + [of_context])


@pytest.mark.parametrize("T,S", [(11, 7), (7, 11), (150, 19)])
@pytest.mark.parametrize("Hkv", [4, 1])
def test_flash_over_a_memory_equals_naive_attention(flash, T, S, Hkv):
    """Queries of one text, and keys of another, which has documents without a query."""
    q, k, v = leaves((2, 4, T, 8), *[(2, Hkv, S, 8)] * 2)
    of_queries, of_keys = documents(T).clamp(max=6), documents(S, seed=1)
    got = attention(q, k, v, 8, Mask(False, docs=with_boundaries(of_queries, of_keys)))
    assert flash.calls == [(True, False, -1, -1)] and (of_keys == 9).any()
    assert_same(got, naive_attention(q, k, v, 0, 0.0, None, False, (of_queries, of_keys)), (q, k, v))


FLAGS = [
    {},
    {"window": 3},
    {"attention": "gqa", "n_kv_head": 1, "pos": "rope", "window": 3, "window_pattern": "SL", "qk_norm": True},
    {"pos": "alibi"},  # in columns of queries and keys
    {"attn_sink": True, "window": 3},
    {"objective": "masked", "window": 3},
    {"objective": "seq2seq", "window": 3},
    {"block": "superblock", "layer": "c.joint_slots,p", "pos": "rope"},
    {"block": "simplified"},
    {"attn_diff": True, "n_head": 4, "n_embd": 32},
]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("how", ["none", "selective"])
def test_models_compute_the_same(flash, monkeypatch, flags, how):
    """Loss and gradients of a model that gets the beginnings of its documents, with and without recomputation, and of
    one whose attention is in strips. Every attention takes the kernel, but attention to a whole memory."""
    found = []
    for kernel in (False, True):
        monkeypatch.setattr(ops, "takes_flash", lambda *_, kernel=kernel: kernel)
        model = build(**{"n_head": 2, "n_embd": 16, "doc_mask": True} | flags)
        for block in model.blocks if how != "none" else ():
            recompute(block, how)
        torch.manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn_like(p)
        given = beside(model)
        loss = model(tokens(2, LENGTH), tokens(2, LENGTH), **given, **document_starts(given))
        assert len(flash.calls) == (0 if not kernel else len(flash.calls)) and all(call[0] for call in flash.calls[::1] if not call[2:] == (-1, -1))
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert len(flash.calls) >= 2
    for ours, strips in zip(*reversed(found), strict=True):
        assert torch.allclose(ours, strips, rtol=1e-9, atol=1e-11)
