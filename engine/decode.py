"""Continues texts, token by token, with a cache of keys and values.

for tokens in generate(model, idx, 100, lambda logits: logits.argmax(-1)):      # idx (B, T), tokens (B,)
"""

import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from data.errors import require
from model import Model, MultiHeadAttention, Neighbours

FEW = 100_000_000  # multiplications of a step for which one thread of a CPU is enough


def finite(logits: Tensor) -> Tensor:
    """The logits. ValueError if they are not finite, as no token can be drawn then."""
    if not logits.isfinite().all():
        remedy = "use an earlier checkpoint, or train with a lower --learning_rate"
        raise ValueError(f"the model's logits are not finite, so it writes no text; {remedy}")
    return logits


class KVCache:
    """Keeps the keys and values of `length` positions, which earlier calls have computed."""

    def __init__(self, length: int):
        self.length = length
        self.end = 0
        self.k = None
        self.v = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v (B, heads, T, E) of new positions -> k and v of all positions so far, (B, heads, S, E)."""
        if self.k is None:
            self.k, self.v = (x.new_empty(*x.shape[:2], self.length, x.size(3)) for x in (k, v))
        start = self.end
        self.end += k.size(2)
        self.k[:, :, start : self.end] = k
        self.v[:, :, start : self.end] = v
        return self.k[:, :, : self.end], self.v[:, :, : self.end]

    def once(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The result of compute(), which only the first call computes."""
        if self.k is None:
            self.k, self.v = compute()
        return self.k, self.v


class RowCache:
    """Keeps the last n rows that earlier calls have read."""

    def __init__(self, n: int):
        self.n = n
        self.kept = None

    def extend(self, x: Tensor) -> Tensor:
        """x (..., T, C) -> the n rows before x, which are 0 before the text, and x: (..., n + T, C)."""
        if self.kept is None:
            self.kept = x.new_zeros(*x.shape[:-2], self.n, x.size(-1))
        rows = torch.cat((self.kept, x), dim=-2)
        self.kept = rows[..., -self.n :, :].clone()
        return rows


def set_caches(model: Model, length: int):
    """Give heads empty caches for the keys and values of `length` tokens (0 = none) and the memory, and neighbours."""
    for m in model.modules():
        if isinstance(m, MultiHeadAttention):
            m.cache = KVCache(length) if length and (m.causal or m.reader.source == "memory") else None
        if isinstance(m, Neighbours):
            m.cache = RowCache(m.reach) if length else None


def limit_threads(idx: Tensor, n_params: int, threads: int):
    """Few products are computed in one thread of a CPU, and others in so many `threads`, unless the user has set
    OMP_NUM_THREADS. With few, several are not faster, and beside another busy process they wait for each other."""
    if idx.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        few = n_params * idx.numel() < FEW
        torch.set_num_threads(1 if few else threads)


@torch.inference_mode()
def generate(
    model: Model, idx: Tensor, max_new_tokens: int, choose: Callable, source: Tensor | None = None
) -> Iterator[Tensor]:
    """Continues idx (B, T): yields max_new_tokens times the next tokens (B,), which choose(logits (B, V)) returns.

    While the text fits in block_size, a token costs one cached step. After that, the context is the last block_size
    tokens, as in nanoGPT: all positions change with each token, so it costs a forward of the full context.
    """
    limit = model.cfg.block_size
    require(model.cfg.objective != "masked", "objective=masked does not continue a text; it fills blanks in one")
    length = min(limit, idx.size(1) + max_new_tokens)
    memory = model.encode(source)
    n_params = model.n_params()
    threads = torch.get_num_threads()
    text = idx[:, -limit:]
    new = text
    end = 0  # the number of tokens in the caches
    set_caches(model, length)
    try:
        for _ in range(max_new_tokens):
            if end + new.size(1) > length:
                new = text
                end = 0
                set_caches(model, length)
            limit_threads(new, n_params, threads)
            x = model.hidden(new, end, memory=memory)
            end += new.size(1)
            new = choose(finite(model.logits(x[:, -1])))[:, None]
            text = torch.cat((text, new), dim=1)[:, -limit:]
            yield new[:, 0]
    finally:
        torch.set_num_threads(threads)
        set_caches(model, 0)
