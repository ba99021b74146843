"""Owners of matrices: which rank orthogonalises the update of which matrix for Muon, and how its parts get there.

owners = Owners({p: Matrix(shape, fused, cuts), ...}, group, dtype)
for some in owners.rounds(updates, largest):
    arrive = owners.gather(some, updates, full)     # parts -> full updates of the matrices that this rank owns
    arrive = owners.scatter(some, updates, full)    # and back
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache
from itertools import product, zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from model import Fused


class Matrix(NamedTuple):
    """A weight of the full model.

    fused   its logical matrices, see model.Linear
    cuts    how a grid of ranks shares it: (number of ranks, the dimension that they cut, or None if they have copies)
    """

    shape: tuple[int, ...]
    fused: Fused | None
    cuts: tuple[tuple[int, int | None], ...] = ()

    @property
    def logical(self) -> list[tuple[int, int]]:
        """(rows, columns) of each logical matrix."""
        *experts, rows, columns = self.shape
        dim, groups, sizes = self.fused or (0, 1, (rows,))
        each = [(groups * n, columns) if dim == 0 else (rows, groups * n) for n in sizes]
        return each * math.prod(experts)

    @property
    def flops(self) -> int:
        """FLOPs of the matrix products of `orthogonalize`."""
        return sum(5 * (4 * min(m) ** 2 * max(m) + 2 * min(m) ** 3) for m in self.logical)


def cuts(sizes: Sequence[int], sharded: bool, tp_dim: int | None, ep: int = 1) -> tuple[tuple[int, int | None], ...]:
    """Matrix.cuts for the sizes of a mesh's dimensions replicate, shard and tp. `sharded`: FSDP cuts the parameter; tp
    cuts its dimension tp_dim. With ep > 1, so many adjacent ranks of shard have different experts."""
    (replicate, shard, tp), dim = sizes, 0 if sharded else None
    return (replicate, None), (shard // ep, dim), *([(ep, 0)] if ep > 1 else []), (tp, tp_dim)


@cache
def place(matrix: Matrix, rank: int) -> tuple[tuple[slice, ...], int, int]:
    """(the part of the matrix that a rank holds, its size, the number of the copy to which it belongs). The grid's last
    dimension cuts first, as torch.chunk does."""
    part, copy = [range(n) for n in matrix.shape], 0
    for n, dim in reversed(matrix.cuts):
        rank, i = divmod(rank, n)
        if dim is None:
            copy = copy * n + i
        else:
            each = -(-len(part[dim]) // n)
            part[dim] = part[dim][i * each : (i + 1) * each]
    return tuple(slice(p.start, p.stop) for p in part), math.prod(map(len, part)), copy


def portions(keys: list, sizes: dict[Hashable, int], largest: int) -> Iterator[list]:
    """The keys in portions of at most `largest` numbers, or of one key, to limit the memory."""
    some, size = [], 0
    for key in keys:
        if some and size + sizes[key] > largest:
            yield some
            some, size = [], 0
        some.append(key)
        size += sizes[key]
    yield some


class Owners:
    """Gives each matrix an owner among the ranks that share it, and sends its updates there and back in `dtype`.

    Each matrix, the largest first, goes to the rank that has the fewest FLOPs so far. If ranks hold copies of a part,
    the rank that belongs to the same copy of the matrix as the owner sends it.
    """

    def __init__(self, matrices: dict[Hashable, Matrix], group: dist.ProcessGroup | None, dtype: torch.dtype):
        self.matrices, self.group, self.dtype, self.owner = matrices, group, dtype, {}
        self.ranks = range(math.prod(n for n, _ in next(iter(matrices.values())).cuts))
        loads = [(0, rank) for rank in self.ranks]  # a heap
        for key, matrix in sorted(matrices.items(), key=lambda item: -item[1].flops):
            flops, self.owner[key] = loads[0]
            heapq.heapreplace(loads, (flops + matrix.flops, self.owner[key]))
        self.flops = max(loads)[0]  # of the rank that has most to do

    def sends(self, key: Hashable, rank: int) -> bool:
        """Whether this rank is one of those that send their parts of an update to the matrix's owner."""
        return place(self.matrices[key], rank)[2] == place(self.matrices[key], self.owner[key])[2]

    def sent(self) -> list[int]:
        """How many numbers each rank sends to others in a step."""
        sent = [0] * len(self.ranks)
        for key, owner in self.owner.items():
            for rank in (rank for rank in self.ranks if rank != owner):
                size = place(self.matrices[key], rank)[1]
                sent[owner] += size
                sent[rank] += size * self.sends(key, rank)
        return sent

    def rounds(self, keys: Iterable, largest: int) -> list[list]:
        """The rounds of a step: in each, every owner has a portion of its matrices of at most `largest` numbers."""
        owned, sizes = defaultdict(list), {key: math.prod(matrix.shape) for key, matrix in self.matrices.items()}
        for key in keys:
            owned[self.owner[key]].append(key)
        each = (portions(owned[rank], sizes, largest) for rank in sorted(owned))
        return [[key for portion in together for key in portion] for together in zip_longest(*each, fillvalue=())]

    def gather(self, some: list, updates: dict, full: dict) -> Callable[[], None]:
        """Start to send the parts of some matrices' updates, ordered by owner, to their owners. `full` has room for the
        full updates of those that this rank owns. The returned function waits for what this rank receives."""
        me = dist.get_rank(self.group)
        parts = [(self.owner[key], updates[key]) for key in some if self.sends(key, me)]
        wanted = [(rank, key) for rank in self.ranks for key in full if self.sends(key, rank)]
        return self.exchange(updates[some[0]], parts, self.owned(full, wanted))

    def scatter(self, some: list, updates: dict, full: dict) -> Callable[[], None]:
        """Start to send the full updates back, to every rank the part that it holds; see gather."""
        parts = [(self.owner[key], updates[key]) for key in some]
        return self.exchange(updates[some[0]], self.owned(full, product(self.ranks, full)), parts)

    def owned(self, full: dict, wanted: Iterable[tuple[int, Hashable]]) -> list[tuple[int, Tensor]]:
        """For each (rank, key): the rank, and the part of the full update that it holds."""
        return [(rank, full[key][place(self.matrices[key], rank)[0]]) for rank, key in wanted]

    def exchange(self, like: Tensor, out: list[tuple[int, Tensor]], into: list[tuple[int, Tensor]]) -> Callable:
        """Start to send tensors to ranks, and to receive others from ranks. Each list is ordered by rank."""
        splits = [[0] * len(self.ranks) for _ in range(2)]
        for split, tensors in zip(splits, (into, out), strict=True):
            for rank, x in tensors:
                split[rank] += x.numel()
        sent = torch.cat([like.new_empty(0, dtype=self.dtype), *(x.flatten().to(self.dtype) for _, x in out)])
        received = sent.new_empty(sum(splits[0]))
        work = dist.all_to_all_single(received, sent, *splits, group=self.group, async_op=True)

        def arrive():
            work.wait()
            for (_, x), flat in zip(into, received.split([x.numel() for _, x in into]), strict=True):
                x.copy_(flat.view(x.shape))

        return arrive
