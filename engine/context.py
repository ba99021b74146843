"""Context parallelism, applied from outside: every rank of the group computes one piece of each sequence.

    cut(model, group)       in place: afterwards the model reads piece r of a text, r the rank in the group
    piece(x, group)         that piece of (B, T)

Attention gathers the keys and values of all pieces (arXiv:2407.21783, section 3.3.2), in the slot that the cache of
decoding takes: after positions, so that a piece's keys are what they would be in the whole. A rank keeps those up to
its own end, and its queries are the last of them. The ranks' losses and gradients are averaged like those of
data-parallel ranks. Pieces are in order, so the last rank's attention sees the most keys and takes the longest.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from engine.tensor import AllGather


def check(cfg, n: int):
    """ValueError names the flag that keeps sequences from being cut into n, and the remedy."""
    if cfg.objective != "causal":
        raise ValueError(f"cp={n} needs objective=causal, and it is {cfg.objective}; set cp=1")
    if cfg.doc_mask:
        raise ValueError(f"doc_mask=True does not go with cp={n}; set cp=1, or leave doc_mask out")
    if cfg.block_size % (n * cfg.tp):
        above = -(-cfg.block_size // (n * cfg.tp)) * n * cfg.tp
        raise ValueError(f"cp={n} and tp={cfg.tp} do not divide block_size={cfg.block_size}; set --block_size={above}")


def cut(model: nn.Module, group: dist.ProcessGroup):
    rank, embed = dist.get_rank(group), model.embed
    model.embed = lambda idx, start, *rest: embed(idx, start + rank * idx.size(1), *rest)
    for module in model.modules():
        if hasattr(module, "cache"):
            module.cache = Gathered(group)


def piece(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)]


class Gathered:
    """Keys and values of this rank's piece (B, Hkv, T/n, E) -> those of all pieces up to it, (B, Hkv, S, E)."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.pieces = group, dist.get_rank(group) + 1

    def __call__(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        heads = k.size(1), v.size(1)  # of simplified blocks' values there may be more
        both = AllGather.apply(torch.cat((k, v), dim=1), 2, self.group)
        return both[:, :, : self.pieces * k.size(2)].split(heads, dim=1)
