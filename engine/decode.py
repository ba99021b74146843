"""Continues texts, token by token, with a cache of keys and values.

for tokens in generate(model, idx, 100, lambda logits: logits.argmax(-1)):      # idx (B, T), tokens (B,)
"""

import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from data.errors import require
from model import POSITION, Heads, Model, Neighbours, NoEmbedding, Rope

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
    """Give the heads empty caches for the keys and values of `length` tokens and of the memory, and neighbours theirs;
    0 = none."""
    for m in model.modules():
        if isinstance(m, Heads):
            m.cache = KVCache(length) if length and (m.causal or m.reader.source == "memory") else None
        if isinstance(m, Neighbours):
            m.cache = RowCache(m.reach) if length else None


class TextReader:
    """Reads a text piece by piece with caches of `length` tokens, and computes the logits of its next token."""

    def __init__(self, model: Model, length: int, memory: Tensor | None):
        self.model = model
        self.n_params = model.n_params()
        self.threads = torch.get_num_threads()
        self.length = length
        self.memory = memory
        self.heads = [m for m in model.modules() if isinstance(m, Heads) and m.causal]
        self.clear()

    def clear(self):
        """Forget the text."""
        set_caches(self.model, self.length)
        self.start = 0  # the position of the first token in the caches; keys that RoPE has rotated keep theirs
        self.end = 0  # the number of tokens in the caches

    def read(self, idx: Tensor) -> Tensor:
        """Appends the tokens idx (B, T) to the text; returns the logits of the token after it, (B, V)."""
        self.limit_threads(idx)
        for piece in idx.split(self.model.cfg.block_size, dim=1):
            T = piece.size(1)
            if T > self.length - self.end:
                self.drop_oldest()
            x = self.model.hidden(piece, self.start + self.end, memory=self.memory)
            self.end += T
        return self.model.logits(x[:, -1])

    def limit_threads(self, idx: Tensor):
        """Few products are computed in one thread of a CPU, unless the user has set OMP_NUM_THREADS. Several are not
        faster, and beside another busy process they wait for each other: docs/results.md has the figures."""
        if idx.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            few = self.n_params * idx.numel() < FEW
            torch.set_num_threads(1 if few else self.threads)

    def drop_oldest(self):
        """Keep only the keys that the next query sees."""
        kept = self.model.cfg.block_size - 1
        for m in self.heads:
            m.cache.keep(kept, m.head_dim)
        if any(isinstance(m.position, Rope) for m in self.heads):
            self.start += self.end - kept
        self.end = kept


@torch.inference_mode()
def generate(
    model: Model, idx: Tensor, max_new_tokens: int, choose: Callable, source: Tensor | None = None, roll: bool = False
) -> Iterator[Tensor]:
    """Continues idx (B, T): yields max_new_tokens times the next tokens (B,), which choose(logits (B, V)) returns.

    While the text fits in block_size, a token costs one cached step. After that, the context is the last block_size
    tokens, as in nanoGPT: all positions change with each token, so it costs a forward of the full context. With
    roll, a token still costs one cached step, which is the forward of the whole text with window=block_size.
    """
    limit = model.cfg.block_size
    pos = model.cfg.pos
    require(model.cfg.objective != "masked", "objective=masked does not continue a text; it fills blanks in one")
    fact = f"overflow=roll does not work with pos={pos}, which has no positions beyond block_size={limit}"
    require(not roll or POSITION[pos][0] is NoEmbedding, f"{fact}; set overflow=recompute")
    length = min(limit * (1 + roll), idx.size(1) + max_new_tokens)
    reader = TextReader(model, length, model.encode(source))
    windows = [m.window for m in reader.heads]
    if roll:
        for m in reader.heads:
            m.window = min(m.window or limit, limit)
    new = idx
    text = idx[:, -limit:]
    try:
        for _ in range(max_new_tokens):
            if reader.end + new.size(1) > length and not roll:
                new = text
                reader.clear()
            new = choose(finite(reader.read(new)))[:, None]
            text = torch.cat((text, new), dim=1)[:, -limit:]
            yield new[:, 0]
    finally:
        torch.set_num_threads(reader.threads)
        set_caches(model, 0)
        for m, window in zip(reader.heads, windows, strict=True):
            m.window = window
