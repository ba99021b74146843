"""Owners of matrices: which rank orthogonalises the update of which matrix for Muon, and how its parts get there.

owners = Owners({p: Weight(shape, cuts), ...}, group, dtype)
owners.on_full({p: update, ...}, change)    # change(full updates of the matrices that this rank owns), in place
"""

import math
from collections.abc import Callable, Hashable
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def local(x: Tensor) -> Tensor:
    """This rank's part of x, a tensor or a DTensor."""
    return x.to_local() if hasattr(x, "to_local") else x


class Weight(NamedTuple):
    """A weight of the full model, and how a grid of ranks shares it."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, int | None], ...]  # (ranks, the dimension that they cut, or None if they have copies)

    @property
    def work(self) -> int:
        """What an orthogonalisation costs: FLOPs, up to a factor that is much the same for all weights."""
        return math.prod(self.shape) * min(self.shape[-2:])


class Part(NamedTuple):
    """A rank's part of a tensor: it lies at these offsets in the whole tensor, which has this shape."""

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@cache
def place(weight: Weight, rank: int) -> tuple[tuple[slice, ...], int]:
    """(the part of the weight that a rank holds, the number of the copy to which it belongs). The grid's last dimension
    cuts first, as torch.chunk does."""
    part = [range(n) for n in weight.shape]
    copy = 0
    for n, dim in reversed(weight.cuts):
        rank, i = divmod(rank, n)
        if dim is None:
            copy = copy * n + i
        else:
            each = -(-len(part[dim]) // n)
            part[dim] = part[dim][i * each : (i + 1) * each]
    return tuple(slice(p.start, p.stop) for p in part), copy


class Owners:
    """Gives each matrix an owner among the ranks of the group, which share it, and sends its updates there and back in
    `dtype`. Each matrix, the largest first, goes to the rank that has the least work so far. If several ranks hold one
    part, the one in the owner's copy of the matrix sends it."""

    def __init__(self, matrices: dict[Hashable, Weight], group: ProcessGroup, dtype: torch.dtype):
        self.matrices = matrices
        self.group = group
        self.dtype = dtype
        self.owner: dict[Hashable, int] = {}
        self.ranks = range(dist.get_world_size(group))
        loads = [0] * len(self.ranks)
        for key, matrix in sorted(matrices.items(), key=lambda item: -item[1].work):
            self.owner[key] = rank = loads.index(min(loads))
            loads[rank] += matrix.work

    def sends(self, key: Hashable, rank: int) -> bool:
        """Whether this rank is one of those that send their parts of an update to the matrix's owner."""
        matrix = self.matrices[key]
        return place(matrix, rank)[1] == place(matrix, self.owner[key])[1]

    def on_full(self, updates: dict, change: Callable[[dict], None]):
        """Replace this rank's parts of the updates by those of the full ones, each changed by its owner, in place."""
        me = dist.get_rank(self.group)
        like = next(iter(updates.values()))
        owned = [[key for key in updates if self.owner[key] == rank] for rank in self.ranks]  # by each rank
        full = {key: like.new_empty(self.matrices[key].shape, dtype=self.dtype) for key in owned[me]}
        sent = [[updates[key] for key in keys if self.sends(key, me)] for keys in owned]
        room = [[self.part(full, key, rank) for key in full if self.sends(key, rank)] for rank in self.ranks]
        self.exchange(like, sent, room)
        change(full)
        changed = [[self.part(full, key, rank) for key in full] for rank in self.ranks]
        self.exchange(like, changed, [[updates[key] for key in keys] for keys in owned])

    def part(self, full: dict, key: Hashable, rank: int) -> Tensor:
        """The part of a full update that a rank holds."""
        return full[key][place(self.matrices[key], rank)[0]]

    def exchange(self, like: Tensor, out: list[list[Tensor]], into: list[list[Tensor]]):
        """Send the tensors out[r] to rank r, and receive into[r] from it."""
        empty = like.new_empty(0, dtype=self.dtype)  # for torch.cat, if this rank sends nothing
        sent = torch.cat([empty, *(x.flatten().to(self.dtype) for x in chain(*out))])
        n_out = [sum(x.numel() for x in tensors) for tensors in out]
        n_into = [sum(x.numel() for x in tensors) for tensors in into]
        received = sent.new_empty(sum(n_into))
        dist.all_to_all_single(received, sent, n_into, n_out, group=self.group)
        for x in chain(*into):
            flat, received = received.tensor_split([x.numel()])
            x.copy_(flat.view(x.shape))
