"""Ways to compute that no user gets: the parts of `tools.gpu` measure whether they are faster than those in the code.

tokens = captured(model, idx, n, choose)                # as engine.decode.generate: a CUDA graph of one token
y = flex_attention(q, k, v, D, mask, softcap)           # as ops.attention: FlexAttention
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from engine.decode import KVCache, set_caches
from model import Inputs, Model, Pool
from ops import Mask

flex._validate_device = lambda *_: None  # which refuses a backward on CPUs, though its operators have one


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, D: int, mask: Mask, softcap: float = 0.0, slots: None = None
) -> Tensor:
    """ops.attention for as many queries as keys, without windows, documents and slots. Compiled on a GPU."""

    def changed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        capped = softcap * (score / softcap).tanh() if softcap else score
        return capped if mask.slopes is None else capped - mask.slopes[h] * (i - j).abs()

    shape, past = (None, None, q.size(2), k.size(2), q.device), lambda b, h, i, j: i >= j
    blocks = flex.create_block_mask(past, *shape) if mask.causal else None
    compute = torch.compile(flex.flex_attention) if q.is_cuda else flex.flex_attention
    return compute(q, k, v, changed, blocks, D**-0.5, enable_gqa=q.size(1) != k.size(1))


class LastCache(KVCache):
    """A cache of constant shape, whose last entry is the newest."""

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.k is None:
            self.k, self.v = (x.new_zeros(*x.shape[:2], self.length, x.size(3)) for x in (k, v))
        for old, new in ((self.k, k), (self.v, v)):
            old.copy_(torch.cat((old[:, :, 1:], new), dim=2))
        return self.k, self.v


@torch.no_grad()
def captured(
    model: Model, idx: Tensor, n: int, choose: Callable, source: Tensor | None = None, capture: Callable | None = None
) -> Iterator[Tensor]:
    """generate within block_size, a token of the text at a time, by a step whose kernels, shapes and places are the
    same for all tokens. From the third token on, capture(step) is called instead: on a GPU, a CUDA graph of it, unless
    the host waits for experts."""
    capture = capture or (cuda_graph if idx.is_cuda and not model.cfg.n_expert else lambda step: step)
    memory, at, token = model.encode(source), torch.zeros_like(idx[0, :1]), idx[:, :1].clone()
    set_caches(model, length := min(idx.size(1) + n - 1, model.cfg.block_size))
    for m in (m for m in model.modules() if isinstance(m, Pool) and m.causal):
        m.cache = LastCache(length)
    places = torch.arange(length, device=idx.device)
    table, model.place = model.table(places, model.embed(token, 0)[0]), lambda t: at

    def step() -> Tensor:
        empty = (places < length - 1 - at).expand(len(idx), -1)  # keys at the front, as a document before the text's
        inputs = Inputs(tuple(x.index_select(-2, at) for x in table), (0 * token, -empty.long()), memory)
        return model.logits(model.through_blocks(model.embed(token, 0)[0], inputs)[:, -1])

    for i in range(1, length + 1):
        step = capture(step) if i == 3 else step
        logits = step()
        at += 1
        token.copy_((idx[:, i] if i < idx.size(1) else choose(logits))[:, None])
        if i >= idx.size(1):
            yield token[:, 0].clone()
    set_caches(model, 0)
    del model.place


def cuda_graph(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A call that replays the kernels of a step, whose result is always at the same place."""
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        result = step()
    return lambda: graph.replay() or result
