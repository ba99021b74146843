"""Continues texts, token by token, with a cache of keys and values.

for tokens in generate(model, idx, 100, lambda logits: logits.argmax(-1)):      # idx (B, T), tokens (B,)
"""

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from model import POSITION, Inputs, Model, NoEmbedding, Pool, Rope, require


class KVCache:
    """Keeps the keys and values of `length` positions, which earlier calls have computed."""

    def __init__(self, length: int):
        self.length, self.end, self.k, self.v = length, 0, None, None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v (B, heads, T, E) of new positions -> k and v of all positions so far, (B, heads, S, E)."""
        if self.k is None:
            self.k, self.v = (x.new_empty(*x.shape[:2], self.length, x.size(3)) for x in (k, v))
        start, self.end = self.end, self.end + k.size(2)
        self.k.narrow(2, start, k.size(2)).copy_(k), self.v.narrow(2, start, k.size(2)).copy_(v)
        return self.k.narrow(2, 0, self.end), self.v.narrow(2, 0, self.end)

    def keep(self, length: int, width: int):
        """Moves the last `length` keys and values to the front. Key columns from `width` on, ALiBi's, stay in place."""
        for x in (self.k[..., :width], self.v):
            x[:, :, :length] = x[:, :, self.end - length : self.end].clone()
        self.end = length

    def once(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The result of compute(), which only the first call computes."""
        if self.k is None:
            self.k, self.v = compute()
        return self.k, self.v


def set_caches(model: Model, length: int):
    """Give the heads empty caches for the keys and values of `length` tokens and of the memory; 0 = none."""
    for m in model.modules():
        if isinstance(m, Pool):
            m.cache = KVCache(length) if length and (m.causal or m.reader.source == "memory") else None


@torch.inference_mode()
def generate(
    model: Model, idx: Tensor, max_new_tokens: int, choose: Callable, source: Tensor | None = None, roll: bool = False
) -> Iterator[Tensor]:
    """Continues idx (B, T): yields max_new_tokens times the next tokens (B,), which choose(logits (B, V)) returns.

    While the text fits in block_size, a token costs one cached step. After that, the context is the last block_size
    tokens, as in nanoGPT: all positions change with each token, so it costs a forward of the full context. With
    roll, a token still costs one cached step, which is the forward of the whole text with window=block_size.
    """
    pos, limit = model.cfg.pos, model.cfg.block_size
    heads = [m for m in model.modules() if isinstance(m, Pool) and m.causal]
    require(model.cfg.objective != "masked", "objective=masked does not continue a text; it fills blanks in one")
    require(not roll or POSITION[pos][0] is NoEmbedding, f"pos={pos} ends at block_size={limit}; recompute")
    memory, length = model.encode(source), min(limit * (1 + roll), idx.size(1) + max_new_tokens)
    new, text, table, start, end = idx, deque([idx], maxlen=limit), None, 0, 0  # the cache has [start, start + end)
    set_caches(model, length)
    windows = [m.window for m in heads]
    for m in heads if roll else ():
        m.window = min(m.window or limit, limit)
    try:
        for _ in range(max_new_tokens):
            if end + new.size(1) > length and not roll:
                new, end = torch.cat(tuple(text), dim=1)[:, -limit:], 0
                text = deque([new], maxlen=limit)
                set_caches(model, length)
            for piece in new.split(limit, dim=1):
                if (T := piece.size(1)) > length - end:  # a full cache keeps the keys that the next query sees
                    moved, end = end - (limit - 1), limit - 1
                    for m in heads:
                        m.cache.keep(end, m.head_dim)
                    if any(isinstance(m.position, Rope) for m in heads):  # rotated keys stay at their positions
                        start, table = start + moved, None
                x, t = model.embed(piece, start + end)
                table = model.table(start + torch.arange(length, device=t.device), x) if table is None else table
                here = tuple(each[..., end : end + T, :] for each in table)
                x, end = model.through_blocks(x, Inputs(here, None, memory)), end + T
            new = choose(model.logits(x[:, -1]))[:, None]
            text.append(new)
            yield new[:, 0]
    finally:
        set_caches(model, 0)
        for m, window in zip(heads, windows, strict=True):
            m.window = window
