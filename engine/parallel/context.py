"""Context parallelism, applied from outside: every rank of the group computes two pieces of each sequence.

    apply_context_parallel(model, group)    in place: afterwards the model takes this rank's pieces of a text
    local_pieces(x, group)                  this rank's pieces of x (B, T): (B, T/n); document numbers stay whole

A text is cut into 2n pieces. Rank r of n joins the r-th piece from the front and the r-th from the back.
So the queries of every rank see equally many keys, and attention takes equally long everywhere.

Attention gathers the keys and values of all pieces (arXiv:2407.21783, section 3.3.2), after the position encoding, so
each key has its position in the full text. For each piece, the keys end where the piece ends, and its queries are the
last positions of these keys. Losses and gradients are averaged over the ranks, as over data-parallel ranks.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed import ProcessGroup

from data.errors import require
from engine.config import Config
from engine.parallel.tensor import gathered
from flags import refuse
from model import Attention, Neighbours
from ops import Mask, boundaries


def check(cfg: Config):
    """ValueError if sequences cannot be cut for cp ranks."""
    if cfg.objective != "causal":
        refuse(cfg, "cp objective", "only causal texts can be cut; set cp=1")
    unit = math.lcm(2 * cfg.cp, cfg.cp * cfg.tp)
    if cfg.block_size % unit:
        whole = -(-cfg.block_size // unit) * unit
        refuse(cfg, "cp tp block_size", f"not a multiple of {unit}, pieces of all ranks; set --block_size={whole}")


def piece_indices(group: ProcessGroup) -> tuple[int, int, int]:
    """(number of pieces, index of this rank's front piece, index of its back piece)."""
    n = 2 * dist.get_world_size(group)
    rank = dist.get_rank(group)
    return n, rank, n - 1 - rank


def local_pieces(x: Tensor, group: ProcessGroup) -> Tensor:
    """x (B, T) -> this rank's two pieces, joined: (B, T/n)."""
    n, front, back = piece_indices(group)
    parts = x.chunk(n, dim=1)
    return torch.cat((parts[front], parts[back]), dim=1)


def apply_context_parallel(model: nn.Module, group: ProcessGroup):
    """Change the model, in place, so that it computes this rank's pieces of each text."""
    model.positions = partial(positions, group)
    n, _, _ = piece_indices(group)
    size = model.cfg.block_size // n
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            module.attend = partial(attend_pieces, module.attend, group)
        elif isinstance(module, Neighbours):
            fact = f"cp={n // 2} makes pieces of {size} tokens, and {name} reads {module.reach} tokens before each"
            require(module.reach <= size, f"{fact}; set a lower cp or a higher block_size")
            module.pieces = partial(pieces_behind_rows, group, module.reach)


def positions(group: ProcessGroup, t: Tensor) -> Tensor:
    """Indices 0 .. T/n - 1 of this rank's tokens -> their positions in the text."""
    _, front, back = piece_indices(group)
    size = len(t) // 2
    return t + torch.where(t < size, front, back - 1) * size


def gathered_pieces(group: ProcessGroup, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of this rank's pieces, (B, Hkv, T/n, E), -> those from the beginning of the text to the end of
    the back piece, (B, Hkv, S, E)."""
    heads = k.size(1), v.size(1)  # simplified blocks may have more values than keys
    n, _, back = piece_indices(group)
    parts = gathered(torch.cat((k, v), dim=1), 2, group).chunk(n, dim=2)  # 0, n-1, 1, n-2, ...
    in_order = [*parts[::2], *parts[::-2]]
    return torch.cat(in_order[: back + 1], dim=2).split(heads, dim=1)


def pieces_behind_rows(group: ProcessGroup, n: int, x: Tensor) -> Tensor:
    """This rank's pieces x (..., T/n_ranks, C), each behind the n rows before it: (2, ..., n + size of a piece, C). All
    ranks exchange the last n rows of their pieces."""
    pieces = torch.stack(x.chunk(2, dim=-2))
    _, *indices = piece_indices(group)
    parts = gathered(pieces[..., -n:, :], 0, group).unbind()  # of pieces 0, n-1, 1, n-2, ...
    ends = [torch.zeros_like(parts[0]), *parts[::2], *parts[::-2]]  # in order, behind those before the text
    before = torch.stack([ends[i] for i in indices])
    return torch.cat((before, pieces), dim=-2)


def mask_of_piece(mask: Mask, begin: int, end: int) -> Mask:
    """The mask of queries begin ... end - 1 of a text and of the keys before `end`, from that of the whole text."""
    if mask.docs is None:
        return mask
    docs, _, *ends = mask.docs
    parts = [docs[:, begin:end], docs[:, :end]]
    if ends:
        row = docs.size(1) * torch.arange(len(docs), device=docs.device)[:, None]
        starts = ends[0][:-1].view(len(docs), -1) - row  # in its row
        parts.append(boundaries(starts.clamp(begin, end) - begin, end - begin))
        parts.append(boundaries(starts.clamp(0, end), end))
    return mask._replace(docs=tuple(parts))


def attend_pieces(attend: Callable, group: ProcessGroup, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Attention of the queries of each piece, (B, H, T/n, E), to the keys up to the end of the piece."""
    _, front, back = piece_indices(group)
    k, v = gathered_pieces(group, k, v)
    size = q.size(2) // 2
    results = []
    for piece, queries in zip((front, back), q.split(size, dim=2), strict=True):
        end = (piece + 1) * size
        part = mask_of_piece(mask, end - size, end)
        results.append(attend(queries, k[:, :, :end], v[:, :, :end], part))
    return torch.cat(results, dim=2)
