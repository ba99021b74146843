"""Muon over several ranks: which rank orthogonalises the update of which matrix, and how its parts get there.

owners = Owners({p: Layout(shape, cuts), ...}, group, dtype)
owners.on_full({p: update, ...}, change)    # change(full updates of the matrices that this rank owns), in place
"""

from collections.abc import Callable, Hashable
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from engine.parallel.layout import Layout, place


class Owners:
    """Gives each matrix an owner among the ranks of the group, which share it, and sends its updates there and back in
    `dtype`. Each matrix, the largest first, goes to the rank that has the least work so far. If several ranks hold one
    part, the one in the owner's copy of the matrix sends it."""

    def __init__(self, matrices: dict[Hashable, Layout], group: ProcessGroup, dtype: torch.dtype):
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
