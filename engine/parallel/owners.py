"""Owners of matrices: which rank orthogonalises the update of which matrix for Muon, and how its parts get there.

owners = Owners({p: Matrix(shape, fused, cuts), ...}, group, dtype)
owners.on_full({p: update, ...}, change)    # change(full updates of the matrices that this rank owns), in place
"""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from model import Fused

Cuts = tuple[tuple[int, int | None], ...]  # see Matrix


class Matrix(NamedTuple):
    """A weight of the full model.

    fused   its logical matrices, see model.Linear
    cuts    how a grid of ranks shares it: (number of ranks, the dimension that they cut, or None if they have copies)
    """

    shape: tuple[int, ...]
    fused: Fused | None
    cuts: Cuts = ()

    @property
    def logical(self) -> list[tuple[int, int]]:
        """(rows, columns) of each logical matrix."""
        *experts, rows, columns = self.shape
        each = [(rows, columns)]
        if self.fused:
            dim, groups, sizes = self.fused
            each = [(groups * n, columns) if dim == 0 else (rows, groups * n) for n in sizes]
        return each * math.prod(experts)

    @property
    def flops(self) -> int:
        """FLOPs of the matrix products of `orthogonalize`."""
        return sum(5 * (4 * min(m) ** 2 * max(m) + 2 * min(m) ** 3) for m in self.logical)


class Part(NamedTuple):
    """A rank's part of a tensor: it lies at these offsets in the whole tensor, which has this shape."""

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def of(self, whole: Tensor) -> Tensor:
        """The same part of another tensor."""
        ends = (start + n for start, n in zip(self.offsets, self.tensor.shape, strict=True))
        return whole[tuple(map(slice, self.offsets, ends))]


def cuts(sizes: Sequence[int], sharded: bool, tp_dim: int | None, ep: int = 1) -> Cuts:
    """Matrix.cuts for the sizes of a mesh's dimensions replicate, shard and tp. `sharded`: FSDP cuts the parameter; tp
    cuts its dimension tp_dim. With ep > 1, so many adjacent ranks of shard have different experts."""
    replicate, shard, tp = sizes
    found = [(replicate, None), (shard // ep, 0 if sharded else None)]
    if ep > 1:
        found.append((ep, 0))
    return (*found, (tp, tp_dim))


def part_of(cuts: Cuts, rank: int) -> tuple[int, ...]:
    """The part of a parameter with these cuts that a rank of all stages holds: equal for ranks that have copies."""
    part = []
    for n, dim in reversed(cuts):
        rank, i = divmod(rank, n)
        if dim is not None:
            part.append(i)
    return rank, *part


@cache
def place(matrix: Matrix, rank: int) -> tuple[tuple[slice, ...], int, int]:
    """(the part of the matrix that a rank holds, its size, the number of the copy to which it belongs). The grid's last
    dimension cuts first, as torch.chunk does."""
    part = [range(n) for n in matrix.shape]
    copy = 0
    for n, dim in reversed(matrix.cuts):
        rank, i = divmod(rank, n)
        if dim is None:
            copy = copy * n + i
        else:
            each = -(-len(part[dim]) // n)
            part[dim] = part[dim][i * each : (i + 1) * each]
    return tuple(slice(p.start, p.stop) for p in part), math.prod(map(len, part)), copy


class Owners:
    """Gives each matrix an owner among the ranks that share it, and sends its updates there and back in `dtype`.

    Each matrix, the largest first, goes to the rank that has the fewest FLOPs so far. If ranks hold copies of a part,
    the rank that belongs to the same copy of the matrix as the owner sends it.
    """

    def __init__(self, matrices: dict[Hashable, Matrix], group: ProcessGroup | None, dtype: torch.dtype):
        self.matrices = matrices
        self.group = group
        self.dtype = dtype
        self.owner: dict[Hashable, int] = {}
        self.ranks = range(math.prod(n for n, _ in next(iter(matrices.values())).cuts))
        loads = [0] * len(self.ranks)
        for key, matrix in sorted(matrices.items(), key=lambda item: -item[1].flops):
            self.owner[key] = rank = loads.index(min(loads))
            loads[rank] += matrix.flops

    def sends(self, key: Hashable, rank: int) -> bool:
        """Whether this rank is one of those that send their parts of an update to the matrix's owner."""
        return place(self.matrices[key], rank)[2] == place(self.matrices[key], self.owner[key])[2]

    def on_full(self, updates: dict, change: Callable[[dict], None]):
        """Replace this rank's parts of the updates by those of the full updates, after `change` has changed each in
        place on its owner."""
        me = dist.get_rank(self.group)
        like = next(iter(updates.values()))
        full = {}
        for key in updates:
            if self.owner[key] == me:
                full[key] = like.new_empty(self.matrices[key].shape, dtype=self.dtype)
        mine = [[key for key in updates if self.owner[key] == rank] for rank in self.ranks]
        sent = [[updates[key] for key in keys if self.sends(key, me)] for keys in mine]
        room = [[self.part(full, key, rank) for key in full if self.sends(key, rank)] for rank in self.ranks]
        self.exchange(like, sent, room)
        change(full)
        parts = [[self.part(full, key, rank) for key in full] for rank in self.ranks]
        self.exchange(like, parts, [[updates[key] for key in keys] for keys in mine])

    def part(self, full: dict, key: Hashable, rank: int) -> Tensor:
        """The part of a full update that a rank holds."""
        return full[key][place(self.matrices[key], rank)[0]]

    def exchange(self, like: Tensor, out: list[list[Tensor]], into: list[list[Tensor]]):
        """Send tensors to each rank, and receive others from each rank."""
        sizes = [[sum(x.numel() for x in tensors) for tensors in each] for each in (into, out)]
        sent = torch.cat([like.new_empty(0, dtype=self.dtype), *(x.flatten().to(self.dtype) for x in chain(*out))])
        received = sent.new_empty(sum(sizes[0]))
        dist.all_to_all_single(received, sent, *sizes, group=self.group)
        for x, flat in zip(chain(*into), received.split([x.numel() for x in chain(*into)]), strict=True):
            x.copy_(flat.view(x.shape))
