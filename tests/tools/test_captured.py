"""Decoding by a step that can be captured, in float64 and with a graph of operations instead of CUDA's, against the
uncached forward."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from model import Model, ModelConfig
from tools.trials import captured

T = 12


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"pos": "sinusoidal", "attention": "mqa"},
        {"pos": "rope", "attention": "gqa", "n_kv_head": 2},
        {"pos": "rope", "window": 3, "window_pattern": "SL", "pos_pattern": "GL", "qk_norm": True},
        {"pos": "alibi", "window": 5, "attn_sink": True},
        {"pos": "alibi", "attn_softcap": 2.0, "attention": "gqa", "n_kv_head": 2},
        {"pos": "none", "attn_diff": True, "attn_gate": "head", "value_residual": True},
        {"block": "simplified", "pos": "rope"},
        {"block": "simplified_parallel", "window": 4},
        {"block": "superblock", "layer": "c.joint_slots,p", "n_slot": 3, "pos": "alibi"},
        {"block": "superblock", "layer": "c.gelu+p", "pos": "rope"},
        {"objective": "seq2seq", "pos": "rope"},
        {"objective": "seq2seq"},
    ],
    ids=str,
)
def test_a_captured_step_is_the_uncached_forward(flags):
    """The third step is traced, and its operations are called again for all later ones: what the host has decided by
    then would be wrong for them."""
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": T, "vocab_size": 61}
    model = Model(ModelConfig(**sizes | flags), 0).double().eval()
    with torch.no_grad():
        for p in model.parameters():  # not only those that begin as identities
            p += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    idx, source = (torch.randint(61, (2, n), generator=torch.Generator().manual_seed(n)) for n in (4, 7))
    source, logits, traced = source if model.encoder else None, [], []

    def capture(step):
        kept = [(m.cache, m.cache.k.clone(), m.cache.v.clone()) for m in caches(model)]
        traced.append(make_fx(step)())
        for cache, k, v in kept:  # tracing makes the step, which CUDA's capture does not
            cache.k.copy_(k), cache.v.copy_(v)
        return traced[0]

    def choose(z):
        logits.append(z.clone())
        return z.argmax(-1)

    new = [*captured(model, idx, T - 3, choose, source, capture)]
    text = torch.cat((idx, torch.stack(new, dim=1)), dim=1)
    assert text.shape == (2, T + 1) and len(traced) == 1
    with torch.no_grad():
        expected = model(text[:, :T], source=source)[:, 3:]
    torch.testing.assert_close(torch.stack(logits, dim=1), expected, rtol=0, atol=1e-9)
    assert not caches(model) and "place" not in vars(model)


def caches(model) -> list:
    return [m for m in model.modules() if getattr(m, "causal", False) and m.cache is not None]
