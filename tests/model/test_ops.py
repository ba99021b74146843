"""Models compute the same when each function of ops.py is replaced by the formula of its docstring, written naively."""

import hashlib
import inspect
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_model import GRID, T, beside, build, changes, jitter, tokens

import model as M
import ops


def visible(mask: ops.Mask, T: int, S: int) -> torch.Tensor:
    """(T, S), or (B, 1, T, S) with documents: whether a query sees a key."""
    distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
    seen = (distance.abs() < (mask.window or T + S)) & ((distance >= 0) | (not mask.causal))
    return seen if mask.docs is None else seen & (mask.docs[0][:, None, :, None] == mask.docs[1][:, None, None, :])


def attention(q, k, v, D, mask, softcap=0.0, dropout=0.0, slots=None, strips=None, phi=None):
    assert dropout == 0
    T, S, H = q.size(2), k.size(2), q.size(1)
    seen = visible(mask, T, S).expand(len(q), H, T, S)
    if slots is not None:
        k, v = (torch.cat((x.expand(len(q), -1, -1, -1), y), dim=2) for x, y in zip(slots, (k, v), strict=True))
        n = k.size(2) - S
        seen = F.pad(seen, (n, 0), value=True)
    k, v = (x.repeat_interleave(H // x.size(1), dim=1) for x in (k, v))
    scores = capped(q[..., :D] @ k[..., :D].mT / math.sqrt(D), softcap) + q[..., D:] @ k[..., D:].mT / math.sqrt(D)
    if phi is not None:
        weights = phi(scores, seen.sum(-1, keepdim=True, dtype=q.dtype))
        return (weights * seen[..., : weights.size(-1)]) @ v
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v


def uniform_attention(q, k, v, D, mask, strips=None):
    return attention(torch.cat((0 * q[..., :D], q[..., D:]), dim=-1), k, v, D, mask)


def capped(x, cap):
    return cap * torch.tanh(x / cap) if cap else x


def cross_entropy(x, weight, targets, softcap=0.0, chunk=0, of_chunk=None, z_loss=0.0):
    logits = capped(x @ weight.T, softcap)
    log_p = logits.log_softmax(-1)
    of_target = log_p[torch.arange(len(x)), targets]
    z = z_loss * (logits.exp().sum(-1).log() ** 2 * (targets >= 0)).sum()
    return -(of_target * (targets >= 0)).sum() + z - z.detach()


def normal(key, shape, start, size, device):
    index = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    index = index[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
    x = index + np.uint64(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    first, second = (x >> np.uint64(32)).astype(float), (x & np.uint64(2**32 - 1)).astype(float)
    numbers = np.sqrt(-2 * np.log((first + 0.5) / 2**32)) * np.cos(2 * np.pi * second / 2**32)
    return torch.from_numpy(numbers).float()


def by_expert(expert, n):
    rows = [(e, row) for row, e in enumerate(expert.tolist())]
    ends = [sum(e <= last for e, _ in rows) for last in range(n)]
    return torch.tensor([row for _, row in sorted(rows)]), torch.tensor(ends)


def grouped_linear(x, weight, bias, ends, loop=None):
    expert = [sum(end <= row for end in ends.tolist()) for row in range(len(x))]
    return torch.stack([weight[e] @ row + (0 if bias is None else bias[e]) for e, row in zip(expert, x, strict=True)])


NAIVE = {
    "by_expert": by_expert,
    "grouped_linear": grouped_linear,
    "wide_linear": lambda x, w, b: x @ w.T + (0 if b is None else b),
    "attention": attention,
    "uniform_attention": uniform_attention,
    "capped": capped,
    "cross_entropy": cross_entropy,
    "normal": normal,
    "dropped": lambda x, p: x * (torch.rand_like(x) >= p) / (1 - p),
    "squared_relu": lambda x: x.clamp(min=0) ** 2,
    "rotate": lambda x, cos, sin: x * cos + torch.cat((*reversed(x.chunk(2, -1)),), dim=-1) * sin,
    "rms_norm": lambda x, w, eps: x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w,
    "layer_norm": lambda x, w, b, eps: (
        (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + eps).sqrt() * w
        + (0 if b is None else b)
    ),
    "at_least_float32": lambda x: x,
    "matmul_dtype": lambda x: x.dtype,
    "wide_stream": lambda flag, device, dtype: True,
    "chunk_loss": None,  # handed to cross_entropy
    "boundaries": None,  # of CUDA's documents, see test_flash.py
}


def test_every_function_has_its_formula():
    used = set(re.findall(r"\bops\.(\w+)", inspect.getsource(M)))
    assert {name for name in used if inspect.isfunction(getattr(ops, name, None))} == NAIVE.keys()


def figures(flags: dict) -> list[torch.Tensor]:
    """The loss, the gradients of all parameters of a model of float64, and the logits, without gradients."""
    model = build(**flags)
    jitter(model)
    torch.manual_seed(2)
    idx, targets = tokens(2, T), tokens(2, T)
    targets[0, 3:6] = -1
    given = beside(model)
    loss = model(idx, targets, **given)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        return [loss.detach(), *grads, model(idx, **given)]


HALF = [pytest.param(row, marks=[pytest.mark.slow] * (i % 2)) for i, row in enumerate(GRID)]  # meets all formulas


@pytest.mark.parametrize("flags", HALF, ids=changes)
def test_the_grid_by_formulas(flags, monkeypatch):
    with torch.random.fork_rng():
        ours = figures(flags)
    for name, f in NAIVE.items():
        monkeypatch.setattr(ops, name, f)
    theirs = figures(flags)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9 * max(1.0, b.abs().max()))
