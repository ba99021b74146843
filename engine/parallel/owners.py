"""Owners of matrices: which rank orthogonalises the update of which matrix for Muon, and how its parts get there.

owners = Owners({p: Matrix(shape, fused, cuts), ...}, group, dtype)
for some in owners.rounds(updates, largest):
    full, arrive = owners.gather(some, updates)     # parts -> full updates of the matrices that this rank owns
    arrive = owners.scatter(some, updates, full)    # and back
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, product, zip_longest
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


def cuts(sizes: Sequence[int], sharded: bool, tp_dim: int | None, ep: int = 1) -> Cuts:
    """Matrix.cuts for the sizes of a mesh's dimensions replicate, shard and tp. `sharded`: FSDP cuts the parameter; tp
    cuts its dimension tp_dim. With ep > 1, so many adjacent ranks of shard have different experts."""
    replicate, shard, tp = sizes
    found = [(replicate, None), (shard // ep, 0 if sharded else None)]
    if ep > 1:
        found.append((ep, 0))
    return (*found, (tp, tp_dim))


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


def portions(keys: list, sizes: dict[Hashable, int], largest: int) -> Iterator[list]:
    """The keys in portions of at most `largest` numbers, or of one key, to limit the memory."""
    some: list = []
    size = 0
    for key in keys:
        if some and size + sizes[key] > largest:
            yield some
            some = []
            size = 0
        some.append(key)
        size += sizes[key]
    yield some


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
        loads = [(0, rank) for rank in self.ranks]  # a heap
        for key, matrix in sorted(matrices.items(), key=lambda item: -item[1].flops):
            flops, rank = loads[0]
            self.owner[key] = rank
            heapq.heapreplace(loads, (flops + matrix.flops, rank))
        self.flops = max(loads)[0]  # of the rank that has most to do

    def sends(self, key: Hashable, rank: int) -> bool:
        """Whether this rank is one of those that send their parts of an update to the matrix's owner."""
        return place(self.matrices[key], rank)[2] == place(self.matrices[key], self.owner[key])[2]

    def sent(self) -> list[int]:
        """How many numbers each rank sends to others in a step."""
        sent = [0] * len(self.ranks)
        for (key, owner), rank in product(self.owner.items(), self.ranks):
            size = place(self.matrices[key], rank)[1]
            if rank != owner:
                sent[owner] += size
            if rank != owner and self.sends(key, rank):
                sent[rank] += size
        return sent

    def rounds(self, keys: Iterable, largest: int) -> list[list]:
        """The rounds of a step: in each, every owner has a portion of its matrices of at most `largest` numbers."""
        owned = defaultdict(list)
        for key in keys:
            owned[self.owner[key]].append(key)
        sizes = {key: math.prod(matrix.shape) for key, matrix in self.matrices.items()}
        each = (portions(owned[rank], sizes, largest) for rank in sorted(owned))
        return [[*chain(*together)] for together in zip_longest(*each, fillvalue=())]

    def gather(self, some: list, updates: dict) -> tuple[dict, Callable[[], None]]:
        """Start to send the parts of some matrices' updates, ordered by owner, to their owners. Returns room for the
        full updates of those that this rank owns, and a function that waits until they are there."""
        me = dist.get_rank(self.group)
        like = updates[some[0]]
        shapes = {key: self.matrices[key].shape for key in some if self.owner[key] == me}
        full = {key: like.new_empty(shape, dtype=self.dtype) for key, shape in shapes.items()}
        parts = [(self.owner[key], updates[key]) for key in some if self.sends(key, me)]
        wanted = [(rank, key) for rank in self.ranks for key in full if self.sends(key, rank)]
        return full, self.exchange(like, parts, self.owned(full, wanted))

    def scatter(self, some: list, updates: dict, full: dict) -> Callable[[], None]:
        """Start to send the full updates back, to every rank the part that it holds; see gather."""
        parts = [(self.owner[key], updates[key]) for key in some]
        return self.exchange(updates[some[0]], self.owned(full, product(self.ranks, full)), parts)

    def owned(self, full: dict, wanted: Iterable[tuple[int, Hashable]]) -> list[tuple[int, Tensor]]:
        """For each (rank, key): the rank, and the part of the full update that it holds."""
        return [(rank, full[key][place(self.matrices[key], rank)[0]]) for rank, key in wanted]

    def numbers(self, tensors: list[tuple[int, Tensor]]) -> list[int]:
        """How many numbers each rank has in the tensors."""
        numbers = [0] * len(self.ranks)
        for rank, x in tensors:
            numbers[rank] += x.numel()
        return numbers

    def exchange(self, like: Tensor, out: list[tuple[int, Tensor]], into: list[tuple[int, Tensor]]) -> Callable:
        """Start to send tensors to ranks, and to receive others from ranks. Each list is ordered by rank."""
        sent = torch.cat([like.new_empty(0, dtype=self.dtype), *(x.flatten().to(self.dtype) for _, x in out)])
        coming = self.numbers(into)
        received = sent.new_empty(sum(coming))
        work = dist.all_to_all_single(received, sent, coming, self.numbers(out), group=self.group, async_op=True)

        def arrive():
            work.wait()
            for (_, x), flat in zip(into, received.split([x.numel() for _, x in into]), strict=True):
                x.copy_(flat.view(x.shape))

        return arrive
