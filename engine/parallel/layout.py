"""How a grid of ranks shares the tensors of a model: which slice of each tensor a rank has."""

import math
from functools import cache
from typing import NamedTuple

from torch import Tensor


def local(x: Tensor) -> Tensor:
    """This rank's part of x, a tensor or a DTensor."""
    return x.to_local() if hasattr(x, "to_local") else x


class Layout(NamedTuple):
    """A weight of the full model, and how a grid of ranks shares it."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, int | None], ...]  # (ranks, the dimension that they cut, or None if they have copies)

    @property
    def work(self) -> int:
        """What an orthogonalisation costs: FLOPs, up to a factor that is much the same for all weights."""
        return math.prod(self.shape) * min(self.shape[-2:])


class Slice(NamedTuple):
    """A rank's part of a tensor: it lies at these offsets in the whole tensor, which has this shape."""

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@cache
def place(layout: Layout, rank: int) -> tuple[tuple[slice, ...], int]:
    """(the part of the weight that a rank holds, the number of the copy to which it belongs). The grid's last dimension
    cuts first, as torch.chunk does."""
    part = [range(n) for n in layout.shape]
    copy = 0
    for n, dim in reversed(layout.cuts):
        rank, i = divmod(rank, n)
        if dim is None:
            copy = copy * n + i
        else:
            each = -(-len(part[dim]) // n)
            part[dim] = part[dim][i * each : (i + 1) * each]
    return tuple(slice(p.start, p.stop) for p in part), copy
