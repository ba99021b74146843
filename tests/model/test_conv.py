"""--conv against the sum written out, and what does not go with it. Its rows in other tables: the grid, rolling caches
and compilation in test_model.py, layouts of ranks in test_layouts.py, transformers' caches in test_remote_code.py."""

import pytest
import torch
from models import DOCS, TINY, T, assert_same, build, jitter, tokens

from model import Model, ModelConfig
from tools.heads import contextual_mlp

CONV = {"conv": 4, "pos": "rope"}


def written_out(x: torch.Tensor, weight: torch.Tensor, docs: torch.Tensor) -> torch.Tensor:
    rows = []
    for row, numbers in zip(x, docs.tolist(), strict=True):
        for t in range(len(row)):
            seen = [i for i in range(weight.size(1)) if t - i >= 0 and numbers[t - i] == numbers[t]]
            rows.append(row[t] + sum(weight[:, i] * row[t - i] for i in seen))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("docs", [None, DOCS])
@pytest.mark.parametrize("taps, compiled", [(2, False), (2, True), (4, False), (T + 3, False)])
def test_the_sum_written_out(docs, taps, compiled):
    """What a convolution gives the readers, and its gradients."""
    net, seen = build(**CONV | {"conv": taps, "n_layer": 1}), []
    jitter(net)
    conv = net.blocks[0].sums[1].conv
    conv.register_forward_hook(lambda conv, args, y: seen.append((*args, y)))
    net(tokens(2, T), docs=docs)
    [(x, inputs, _)] = seen
    x = x.detach().requires_grad_()
    conv._forward_hooks.clear()
    f = torch.compile(conv, backend="aot_eager", fullgraph=True) if compiled else conv
    expected = written_out(x, conv.weight, DOCS * 0 if docs is None else docs)
    assert_same(f(x, inputs), expected, [x, conv.weight])


def test_sixteen_bits_round_once():
    """The result is that of float32, rounded; so are the gradients."""
    net, idx = build(torch.float32, **CONV), tokens(2, T)
    jitter(net)
    conv, inputs = net.blocks[0].sums[0].conv, net.inputs(idx, torch.arange(T), torch.empty(0))
    x = torch.randn(2, T, 32).to(torch.bfloat16).requires_grad_()
    wide = x.detach().float().requires_grad_()
    found, expected = conv(x, inputs), conv(wide, inputs)
    assert torch.equal(found, expected.to(torch.bfloat16))
    grad = torch.randn_like(found)
    gradients = torch.autograd.grad(found, [x, conv.weight], grad)
    exact = torch.autograd.grad(expected, [wide, conv.weight], grad.float())
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(gradients, exact, strict=True))


def test_it_begins_as_the_model_without_it():
    """With the same initial weights; each convolution begins at 0 and has a gradient."""
    idx = tokens(2, T)
    net, without = (Model(ModelConfig(**TINY, conv=conv), seed=1) for conv in (4, 0))
    added = {name: p for name, p in net.named_parameters() if name.endswith("conv.weight")}
    assert [p.shape for p in added.values()] == [(32, 4)] * 4 and not any(p.any() for p in added.values())
    others = dict(without.named_parameters())
    assert {*others} | {*added} == {name for name, _ in net.named_parameters()}
    assert torch.equal(net(idx), without(idx))
    net(idx, idx).backward()
    assert all(p.grad.abs().min() > 0 for p in added.values())


def test_a_head_is_read_behind_it():
    net = build(**CONV)
    jitter(net)
    for layer, reader in ((0, ""), (1, "mlp")):  # raises where the units do not give what the reader computes
        contextual_mlp(net, tokens(T), layer, 0, 7, reader=reader)
