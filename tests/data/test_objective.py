"""Corruption compared with naive loops that undo it, with all choices enumerated, and with the sizes of T5."""

from collections import Counter
from itertools import groupby, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.hashing import hash64
from data.objective import OBJECTIVE, Causal, Masked, Seq2Seq
from model import Model, ModelConfig

V = 1000
KEYS = hash64(np.arange(20_000, dtype=np.uint64))


def texts(n: int, T: int, eot_share: float, seed: int = 0) -> torch.Tensor:
    """(n, T+1) random ids below V; 0 is end-of-text."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, V, (n, T + 1))
    tokens[rng.random(tokens.shape) < eot_share] = 0
    return torch.from_numpy(tokens)


def numbers(text: list[int], eot: int = 0) -> list[int]:
    """The document number of each token, by a loop."""
    result, number = [], 0
    for token in text:
        number += token == eot
        result.append(number)
    return result


def chi_square(counts: list[int], expected: list[float]):
    """Asserts that the chi-square statistic of the counts is below its mean plus five standard deviations."""
    freedom = len(expected) - 1
    distance = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    assert distance < freedom + 5 * (2 * freedom) ** 0.5, counts


sizes = given(
    st.integers(2, 40), st.integers(1, 5), st.floats(0.01, 0.99), st.floats(1, 9), st.sampled_from([0, 0.1, 0.6, 1]),
    st.integers(0, 10**6),
)  # fmt: skip


def test_causal_is_the_window_itself():
    window = texts(3, 8, 0.3)
    batch = Causal(V, 0, 8)(window, KEYS[:3])
    assert batch.keys() == {"text"} and batch["text"] is window  # no copy
    assert Causal(V, 0, 8).lengths == (8, 0) and Causal(V, 0, 8).extra_ids == 0
    docs = Causal(V, 0, 8, doc_mask=True)(window, KEYS[:3])["docs"]
    assert docs.tolist() == [numbers(row[:-1]) for row in window.tolist()]


@sizes
@settings(max_examples=50)
def test_masked_can_be_undone(T, B, ratio, span_length, eot_share, seed):
    """Targets replaced in idx give the window. There are exactly m targets, or fewer if the window has fewer tokens."""
    window, objective = texts(B, T, eot_share, seed), Masked(V, 0, T, True, ratio)
    before = window.clone()
    batch = objective(window, KEYS[seed % 1000 :][:B])
    assert batch.keys() == {"idx", "targets", "docs"} and all(t.dtype == torch.int64 for t in batch.values())
    assert torch.equal(window, before) and objective.lengths == (T, 0) and objective.extra_ids == 1
    for row, idx, targets, docs in zip(window.tolist(), *(batch[name].tolist() for name in batch), strict=True):
        row = row[:-1]
        assert [x if y == -1 else y for x, y in zip(idx, targets, strict=True)] == row
        assert sum(y != -1 for y in targets) == min(max(1, round(ratio * T)), sum(x != 0 for x in row))
        assert 0 not in targets and 0 <= min(idx) and max(idx) <= V
        assert docs == numbers(row)


def test_every_set_of_positions_is_chosen_as_often():
    """All 15 sets of two of six positions are equally likely; with an end-of-text in the window, the 10 without it."""
    for row, n_sets in (([1, 2, 3, 4, 5, 6, 7], 15), ([1, 2, 0, 4, 5, 6, 7], 10)):
        targets = Masked(V, 0, 6, corrupt_ratio=0.3)(torch.tensor([row] * len(KEYS)), KEYS)["targets"]
        counts = Counter(map(tuple, targets.tolist()))
        assert len(counts) == n_sets
        chi_square(list(counts.values()), [len(KEYS) / n_sets] * n_sets)


def test_what_stands_in_the_place_of_a_target():
    """At every position: 80 % the mask, 10 % any of the 8 ids (also the original), 10 % the original."""
    batch = Masked(8, None, 16, corrupt_ratio=0.5)(torch.full((len(KEYS), 17), 3), KEYS)
    shares = np.full(9, 0.1 / 8)
    shares[8], shares[3] = 0.8, 0.1 + 0.1 / 8
    for position in range(16):
        idx = batch["idx"][:, position][batch["targets"][:, position] == 3]
        assert abs(len(idx) / len(KEYS) - 0.5) < 5 * 0.5 / len(KEYS) ** 0.5
        chi_square(torch.bincount(idx, minlength=9).tolist(), (len(idx) * shares).tolist())
    both = (batch["idx"][:, 0] == 8) & (batch["idx"][:, 1] == 8)  # both chosen: 8/16 * 7/15; both masked: 0.8 ** 2
    p = 0.5 * 7 / 15 * 0.8**2
    assert abs(both.double().mean() - p) < 5 * (p * (1 - p) / len(KEYS)) ** 0.5


@sizes
@settings(max_examples=50)
def test_seq2seq_can_be_undone(T, B, ratio, span_length, eot_share, seed):
    """The spans inserted in source in place of their sentinels give the window and its documents."""
    window, objective = texts(B, T, eot_share, seed), Seq2Seq(V, 0, T, True, ratio, span_length)
    before = window.clone()
    batch = objective(window, KEYS[seed % 1000 :][:B])
    m = min(max(1, round(ratio * T)), T - 1)
    k = max(1, min(round(m / span_length), m, T - m))
    assert torch.equal(window, before) and all(t.dtype == torch.int64 for t in batch.values())
    assert objective.lengths == (m + k, T - m + k) and max(objective.lengths) <= T and objective.extra_ids == k + 1
    shapes = {"text": (B, m + k + 1), "source": (B, T - m + k), "docs": (B, m + k), "source_docs": (B, T - m + k)}
    assert {name: tuple(t.shape) for name, t in batch.items()} == shapes
    for row, *rest in zip(window.tolist(), *(batch[name].tolist() for name in shapes), strict=True):
        answer, source, docs, source_docs = rest
        number = numbers(row[:-1])
        spans, document = {}, {}
        assert answer[-1] == V + k
        for token, doc in zip(answer[:-1], docs, strict=True):
            if token >= V:
                sentinel = token
                assert sentinel == V + len(spans)
                spans[sentinel], document[sentinel] = [], doc
            else:
                spans[sentinel].append(token)
            assert doc == document[sentinel]
        assert len(spans) == k and all(spans.values())
        rebuilt = []
        for token, doc in zip(source, source_docs, strict=True):
            assert doc == number[len(rebuilt)] and doc == document.get(token, doc)
            rebuilt += spans.pop(token) if token >= V else [token]
        assert rebuilt == row[:-1] and not spans
        assert docs == sorted(docs) and source_docs == sorted(source_docs) and set(docs) <= set(source_docs)


@pytest.mark.parametrize("T,ratio,span_length", [(7, 0.43, 1.5), (6, 0.5, 3), (6, 0.5, 1), (2, 0.5, 1), (5, 0.9, 1)])
def test_every_choice_of_spans_is_as_likely(T, ratio, span_length):
    """All masks of T tokens with m ones in k runs, enumerated."""
    objective = Seq2Seq(V, None, T, corrupt_ratio=ratio, span_length=span_length)
    source = objective(torch.arange(T + 1).expand(len(KEYS), -1), KEYS)["source"].tolist()
    counts = Counter(tuple(t not in row for t in range(T)) for row in source)
    masks = [mask for mask in product([False, True], repeat=T) if sum(mask) == objective.m]
    masks = [mask for mask in masks if sum(inside for inside, _ in groupby(mask)) == objective.k]
    assert set(counts) == set(masks)
    chi_square([counts[mask] for mask in masks], [len(KEYS) / len(masks)] * len(masks))


def test_sizes_of_t5():
    """T5 turns 568 raw tokens into 512 of source and 114 of target, each with an end-of-sequence token. Our source has
    none, and our target ends with a sentinel instead, which is not an input."""
    assert Seq2Seq(32000, 1, 568).lengths == (113, 511)


@pytest.mark.parametrize("name", OBJECTIVE)
def test_a_row_depends_on_its_own_key_and_window_only(name):
    objective, window, keys = OBJECTIVE[name](V, 0, 64, True), texts(200, 64, 0.05), KEYS[:200]
    batch = objective(window, keys)
    shuffled = np.random.default_rng(1).permutation(200)[:50]
    again = objective(window[torch.from_numpy(shuffled)], keys[shuffled])
    assert batch.keys() == again.keys()
    assert OBJECTIVE[name](V, 0, 64)(window, keys).keys() == batch.keys() - {"docs", "source_docs"}
    for tensor, other in zip(batch.values(), again.values(), strict=True):
        assert torch.equal(tensor[torch.from_numpy(shuffled)], other)
    if name != "causal":
        same = objective(window[:1].repeat(200, 1), keys)
        rows = torch.cat([tensor for name, tensor in same.items()], dim=1)
        assert len(rows.unique(dim=0)) == 200


@pytest.mark.parametrize("pos", ["learned", "sinusoidal"])
@pytest.mark.parametrize("name", OBJECTIVE)
def test_a_packed_document_is_as_if_alone(name, pos):
    """With doc_positions, a window with several documents has the logits and gradients of the single documents in a
    model without document masks."""
    window = texts(2, 24, 0)
    window[0, [5, 14]] = window[1, [0, 1, 12]] = 0  # the first row begins inside a document
    objective = OBJECTIVE[name](V, 0, 24, True, 0.5, 2)
    batch = objective(window, KEYS[:2])
    idx = batch["text"][:, :-1] if "text" in batch else batch["idx"]
    docs, source, source_docs = batch["docs"], batch.get("source"), batch.get("source_docs")
    assert all(len(set(row)) > 1 for row in docs.tolist())  # for seq2seq, the documents with a span

    def model(**flags) -> Model:
        shape = dict(n_layer=2, n_head=2, n_embd=8, block_size=24, vocab_size=V + objective.extra_ids)
        torch.manual_seed(1)
        return Model(ModelConfig(**shape, objective=name, pos=pos, **flags)).double()

    torch.manual_seed(2)
    weights = torch.randn(2, idx.size(1), V + objective.extra_ids, dtype=torch.float64)  # of the logits
    packed, plain = model(doc_mask=True, doc_positions=True), model()
    logits = packed(idx, docs=docs, source=source, source_docs=source_docs)
    (logits * weights).sum().backward()
    for row in range(2):
        for number in docs[row].unique():
            here = docs[row] == number
            of_it = None if source is None else source[row][source_docs[row] == number][None]
            alone = plain(idx[row][here][None], source=of_it)[0]
            assert torch.allclose(logits[row][here], alone, rtol=0, atol=1e-10)
            (alone * weights[row][here]).sum().backward()
    for (which, p), q in zip(packed.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=0, atol=1e-10), which


@pytest.mark.parametrize("flags, words", [
    ({"corrupt_ratio": 0.0}, "corrupt_ratio=0.0 "), ({"corrupt_ratio": 1.0}, "corrupt_ratio=1.0 "),
    ({"span_length": 0.9}, "span_length=0.9 "), ({"block_size": 1}, "block_size=1 "),
    ({"eot": None, "doc_mask": True}, "doc_mask=True needs data with an end-of-text id; "),
])  # fmt: skip
def test_what_does_not_fit(flags, words):
    with pytest.raises(ValueError, match=f"^{words}[^\n]*$"):
        Seq2Seq(**{"vocab_size": V, "eot": 0, "block_size": 8} | flags)
