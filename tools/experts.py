"""Which tokens an expert reads, counted for tools/lens.py.

reads = reads_of_tokens(model, experts, batches)        # of all experts of a reader
best = preferred(reads, expert=2, most=24)              # the tokens that one of them reads more than others
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import model as M
from tools.heads import without_padding


class Preferred(NamedTuple):
    """A token that an expert reads more often than it reads the mean token."""

    token: int
    reads: int  # occurrences of the token that the expert reads
    share: float  # of all occurrences of the token
    excess: float  # see `preferred`


@torch.no_grad()
def reads_of_tokens(model: M.Model, experts: M.Experts, batches: Iterable[dict[str, Tensor]]) -> Tensor:
    """How many occurrences of each token each expert reads, and in the last column how many there are: (V, E + 1).
    `experts` is a reader of the model's blocks. Rows of a batch without targets are padding."""
    E, own, chosen = model.cfg.n_expert, experts.choose, []
    reads = torch.zeros(model.cfg.vocab_size, E + 1, dtype=torch.int64)
    experts.choose = lambda p: chosen.append(own(p)) or chosen[-1]
    try:
        for batch in map(without_padding, batches):
            model(**batch)
            columns = F.pad(chosen.pop(), (0, 1), value=E)  # (N, k + 1)
            places = batch["idx"].flatten()[:, None] * (E + 1) + columns
            reads += places.flatten().bincount(minlength=reads.numel()).view_as(reads).cpu()
    finally:
        del experts.choose
    return reads


def preferred(reads: Tensor, expert: int, most: int) -> list[Preferred]:
    """The `most` tokens with the largest excess over 0, the largest first, for the result of reads_of_tokens.

    The excess of a token is the number of its occurrences that the expert reads, minus the number that it would read of
    any tokens: occurrences times the share of all tokens that the expert reads. So a token comes first that is frequent
    and that the expert reads more than others.
    """
    own, all_of = reads[:, expert].double(), reads[:, -1].double()
    excess = own - all_of * (own.sum() / all_of.sum())
    best = excess.argsort(descending=True, stable=True)[:most]
    numbers = best, reads[best, expert], own[best] / all_of[best], excess[best]
    return [Preferred(*row) for row in zip(*(x.tolist() for x in numbers), strict=True) if row[-1] > 0]
