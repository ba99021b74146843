"""Corruption compared with the oracle's, with all choices enumerated, and with the sizes of T5."""

from collections import Counter
from itertools import groupby, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.hashing import hash64
from data.objective import OBJECTIVE, Masked, Seq2Seq
from model import Model, ModelConfig
from tests import oracle

V = 1000
KEYS = hash64(np.arange(20_000, dtype=np.uint64))


def texts(n: int, T: int, eot_share: float, seed: int = 0) -> torch.Tensor:
    """(n, T+1) random ids below V; 0 is end-of-text."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, V, (n, T + 1))
    tokens[rng.random(tokens.shape) < eot_share] = 0
    return torch.from_numpy(tokens)


def chi_square(counts: list[int], expected: list[float]):
    freedom = len(expected) - 1
    distance = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    assert distance < freedom + 5 * (2 * freedom) ** 0.5, counts


@pytest.mark.parametrize("name", OBJECTIVE)
@pytest.mark.parametrize("doc_mask", [False, True])
@given(
    st.integers(2, 40), st.integers(1, 5), st.floats(0.01, 0.99), st.floats(1, 9), st.sampled_from([0, 0.1, 0.6, 1]),
    st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=50)
def test_a_batch_is_the_oracles(name, doc_mask, T, B, ratio, span_length, eot_share, seed):
    window = texts(B, T, eot_share, seed)
    keys = KEYS[seed % 1000 :][:B]
    before = window.clone()
    objective = OBJECTIVE[name](V, 0, T, doc_mask, ratio, span_length)
    batch = objective(window, keys)
    assert torch.equal(window, before)
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    f = SimpleNamespace(own_vocab=V, eot=0, doc_mask=True, block_size=T, corrupt_ratio=ratio, span_length=span_length)
    rows = [getattr(oracle, name)(f, row, int(key)) for row, key in zip(window.tolist(), keys, strict=True)]
    wanted = rows[0].keys()
    if not doc_mask:
        wanted -= {"docs", "source_docs"}
    assert {key: x.tolist() for key, x in batch.items()} == {key: [row[key] for row in rows] for key in wanted}
    assert objective.lengths == (len(rows[0]["idx"]), len(rows[0].get("source", [])))
    assert max(objective.lengths) <= T
    own_ids = {"causal": 0, "masked": 1, "seq2seq": oracle.span_counts(f)[1] + 1}
    assert objective.extra_ids == own_ids[name]


def test_what_stands_in_the_place_of_a_target():
    """At every position: 80 % the mask, 10 % any of the 8 ids (also the original), 10 % the original."""
    batch = Masked(8, None, 16, corrupt_ratio=0.5)(torch.full((len(KEYS), 17), 3), KEYS)
    shares = np.full(9, 0.1 / 8)
    shares[8] = 0.8
    shares[3] = 0.1 + 0.1 / 8
    for position in range(16):
        idx = batch["idx"][:, position][batch["targets"][:, position] == 3]
        assert abs(len(idx) / len(KEYS) - 0.5) < 5 * 0.5 / len(KEYS) ** 0.5
        chi_square(torch.bincount(idx, minlength=9).tolist(), (len(idx) * shares).tolist())
    both = (batch["idx"][:, 0] == 8) & (batch["idx"][:, 1] == 8)  # both chosen: 8/16 * 7/15; both masked: 0.8 ** 2
    p = 0.5 * 7 / 15 * 0.8**2
    assert abs(both.double().mean() - p) < 5 * (p * (1 - p) / len(KEYS)) ** 0.5


@pytest.mark.parametrize("T,ratio,span_length", [(7, 0.43, 1.5), (6, 0.5, 3), (6, 0.5, 1), (2, 0.5, 1), (5, 0.9, 1)])
def test_every_choice_of_spans_is_as_likely(T, ratio, span_length):
    objective = Seq2Seq(V, None, T, corrupt_ratio=ratio, span_length=span_length)
    source = objective(torch.arange(T + 1).expand(len(KEYS), -1), KEYS)["source"].tolist()
    counts = Counter(tuple(t not in row for t in range(T)) for row in source)
    masks = [mask for mask in product([False, True], repeat=T) if sum(mask) == objective.m]
    masks = [mask for mask in masks if sum(inside for inside, _ in groupby(mask)) == objective.k]
    assert set(counts) == set(masks)
    chi_square([counts[mask] for mask in masks], [len(KEYS) / len(masks)] * len(masks))


def test_sizes_of_t5():
    """T5's are 512 and 114 with an end-of-sequence token each. We have none, and the last sentinel is no input."""
    assert Seq2Seq(32000, 1, 568).lengths == (113, 511)


@pytest.mark.parametrize("pos", ["learned", "sinusoidal"])
@pytest.mark.parametrize("name", OBJECTIVE)
def test_a_packed_document_is_as_if_alone(name, pos):
    window = texts(2, 24, 0)
    window[0, [5, 14]] = window[1, [0, 1, 12]] = 0  # the first row begins inside a document
    objective = OBJECTIVE[name](V, 0, 24, True, 0.5, 2)
    batch = objective(window, KEYS[:2])
    idx = batch["idx"]
    docs = batch["docs"]
    source = batch.get("source")
    source_docs = batch.get("source_docs")
    assert all(len(set(row)) > 1 for row in docs.tolist())  # for seq2seq, the documents with a span

    def model(**flags) -> Model:
        shape = dict(n_layer=2, n_head=2, n_embd=8, block_size=24, vocab_size=V + objective.extra_ids)
        torch.manual_seed(1)
        return Model(ModelConfig(**shape, objective=name, pos=pos, **flags)).double()

    torch.manual_seed(2)
    weights = torch.randn(2, idx.size(1), V + objective.extra_ids, dtype=torch.float64)  # of the logits
    packed = model(doc_mask=True, doc_positions=True)
    plain = model()
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
