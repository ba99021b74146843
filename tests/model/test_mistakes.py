"""A known mistake of much copied code: padding masks made as 0 * -inf, or a row of -inf, which is NaN. tests/faults.py
plants it and the others (RoPE or ALiBi without effect, a post-norm that is a pre-norm, ...), and names their tests."""

import pytest
import torch
import torch.nn.functional as F
from models import TINY, build, jitter, tokens

LENGTHS, SOURCES = [11, 5, 1], [4, 9, 1]


def ragged(lengths: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of these lengths filled up with any tokens to (B, width), and document numbers: 1 for padding."""
    return tokens(len(lengths), width), (torch.arange(width) >= torch.tensor(lengths)[:, None]).long()


@pytest.mark.parametrize(
    "objective, masked", [("causal", True), ("causal", False), ("masked", True), ("seq2seq", True)]
)
@pytest.mark.parametrize("flags", [
    {"pos": "rope"},
    {"pos": "alibi", "window": 3},
    {"attn_softcap": 2.0, "window": 4},
    {"block": "parallel", "attention": "mqa", "qk_norm": True},
    {"block": "simplified", "pos": "rope", "window": 3},
    {"block": "simplified_parallel", "pos": "alibi"},
    {"block": "superblock", "layer": "c.own_slots", "n_slot": 3},
], ids=str)  # fmt: skip
def test_padding_makes_no_nan(flags, objective, masked):
    """A padded batch is as good as its texts one by one: logits of real tokens, loss, every gradient; nothing is NaN.

    masked=False: without document numbers, since a causal mask hides padding that comes last.
    """
    if objective != "causal" and flags.get("pos") == "alibi":
        flags = flags | {"pos": "learned"}  # encoders have no ALiBi
    model = build(objective=objective, **flags)
    jitter(model)
    idx, docs = ragged(LENGTHS, TINY["block_size"])
    targets = tokens(*idx.shape).masked_fill(docs.bool(), -1)
    given, alone = {}, [{} for _ in LENGTHS]
    if masked:
        given = dict(docs=docs)
    if objective == "seq2seq":
        source, source_docs = ragged(SOURCES, 10)
        given = dict(docs=torch.zeros_like(idx), source=source, source_docs=source_docs)
        alone = [dict(source=source[i : i + 1, :m]) for i, m in enumerate(SOURCES)]
    logits, loss = model(idx, **given), model(idx, targets, **given)
    assert logits.isfinite().all() and loss.isfinite()
    single = [model(idx[i : i + 1, :n], **alone[i])[0] for i, n in enumerate(LENGTHS)]
    for i, n in enumerate(LENGTHS):
        assert torch.allclose(logits[i, :n], single[i], atol=1e-9)
    expected = F.cross_entropy(torch.cat(single), targets[targets >= 0])
    assert torch.allclose(loss, expected, atol=1e-9)
    got, wanted = (torch.autograd.grad(each, list(model.parameters())) for each in (loss, expected))
    for (name, _), a, b in zip(model.named_parameters(), got, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-9), name
