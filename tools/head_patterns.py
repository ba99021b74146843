"""Heads of attention that follow a known pattern: how much each head attends to the token that the pattern names.

found = scores(model, batches, ["induction", "previous"])      # pattern -> scores of all heads, the best first

A pattern is a function of idx (B, T) that returns, for each query, the position of the token that the head would attend
to, or -1: (B, T).
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import model as M
from model import Model
from ops import Mask

QUALIFIES = 0.4  # the least score of a head that has a pattern
LISTED = 5  # heads of each pattern that are printed


def self_attention(block: M.Block) -> M.Heads | None:
    """The reader of the context in a block, if there is one."""
    return next((m for m in block.modules() if isinstance(m, M.Heads) and not isinstance(m, M.MemoryPool)), None)


def previous(idx: Tensor) -> Tensor:
    """The token before the query."""
    return torch.arange(-1, idx.size(1) - 1, device=idx.device).expand_as(idx)


def induction(idx: Tensor) -> Tensor:
    """The token after the latest earlier occurrence of the query's token, unless it is the query or the one before."""
    order = idx.argsort(dim=1, stable=True)  # equal tokens stand together, in the order of the text
    ordered = idx.gather(1, order)
    earlier = torch.where(ordered[:, 1:] == ordered[:, :-1], order[:, :-1], -2)
    key = torch.full_like(idx, -2).scatter_(1, order[:, 1:], earlier) + 1
    return key.masked_fill(key >= previous(idx), -1)


PATTERN: dict[str, Callable[[Tensor], Tensor]] = {"induction": induction, "previous": previous}


class Score(NamedTuple):
    """The mean attention of a head to the tokens of a pattern, and that of a head with equal weights."""

    score: float
    even: float
    layer: int
    head: int


def attention_to(keys: Tensor, attend: Callable, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """The weights of keys (P, B, T) in Heads.attend's result, (P, B, H, T), and 0 where a key is -1.

    attend is linear in the values. So it is called with columns of the identity matrix in their place, which give the
    weights of as many keys, and once with zeros, which give the part of the slots. No T x T tensor is made.
    """
    S, E = v.shape[2:]
    zeros, found = attend(q, k, torch.zeros_like(v), mask), 0.0
    for first, columns in enumerate(torch.eye(S, -(-S // E) * E, dtype=v.dtype, device=v.device).split(E, dim=1)):
        weights = attend(q, k, columns.expand_as(v).contiguous(), mask) - zeros  # (B, H, T, E)
        place = (keys - first * E)[:, :, None].expand(-1, -1, q.size(1), -1)  # (P, B, H, T)
        each = weights.expand(len(keys), *weights.shape).gather(-1, place.clamp(0, E - 1)[..., None])[..., 0]
        found = found + each * ((place >= 0) & (place < E))
    return found


@torch.no_grad()
def scores(model: Model, batches: Iterable[dict[str, Tensor]], patterns: list[str]) -> dict[str, list[Score]]:
    """The scores of all heads for each pattern, the best first. Rows of a batch without targets are padding."""
    layers = {i: heads for i, block in enumerate(model.blocks) if (heads := self_attention(block))}
    H, P = model.cfg.n_head, len(patterns)
    total = torch.zeros(model.cfg.n_layer, P, H + 1, dtype=torch.float64)
    count = torch.zeros(P, dtype=torch.int64)

    def watch(layer: int, attend: Callable, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        lo, hi = mask.reach(q.size(2), k.size(2), q.device)  # (T,) or (B, T)
        even = ((keys >= lo) & (keys < hi)) / (hi - lo)  # (P, B, T)
        weights = torch.cat((attention_to(keys, attend, q, k, v, mask), even[:, :, None]), dim=2)  # (P, B, H + 1, T)
        total[layer] += weights.sum((1, 3)).cpu()
        return attend(q, k, v, mask)

    with ExitStack() as undo:
        for layer, heads in layers.items():
            heads.attend = partial(watch, layer, heads.attend)
            undo.callback(heads.__delattr__, "attend")
        for batch in batches:
            batch = {name: x[(batch["targets"] >= 0).any(1)] for name, x in batch.items()}
            docs = batch.get("docs", torch.zeros_like(batch["idx"]))
            ids = batch["idx"] + docs * model.cfg.vocab_size  # equal tokens of two documents are not the same
            keys = torch.stack([PATTERN[name](ids) for name in patterns])  # (P, B, T)
            docs = docs.expand_as(keys)
            keys = keys.where(docs.gather(2, keys.clamp(min=0)) == docs, -1)
            count += (keys >= 0).sum((1, 2)).cpu()
            model(**batch)
    mean = (total / count.clamp(min=1)[:, None]).tolist()
    each = {
        name: [
            Score(x, mean[layer][i][H], layer, head) for layer in layers for head, x in enumerate(mean[layer][i][:H])
        ]
        for i, name in enumerate(patterns)
    }
    return {name: sorted(found, reverse=True) for name, found in each.items()}


def print_scores(pattern: str, heads: list[Score]):
    """Print the heads with the highest scores, and how many of all heads have the pattern."""
    meaning = PATTERN[pattern].__doc__
    print(f"\n{pattern}: attention to {meaning[0].lower()}{meaning[1:]}")
    print("layer  head   score  equal weights")
    for score, even, layer, head in heads[:LISTED]:
        print(f"{layer:5}  {head:4}  {score:.4f}         {even:.4f}")
    good = sum(each.score >= QUALIFIES for each in heads)
    best = f"The best is head {heads[0].head} of layer {heads[0].layer} with {heads[0].score:.4f}."
    print(f"Heads with {QUALIFIES} or more: {good} of {len(heads)}. {best}")
