"""Expert parallelism, applied from outside: every rank of the group holds a part of each layer's experts.

    apply_expert_parallel(model, group)     in place: afterwards this rank has the weights of n_expert / n experts

The ranks of the group are data-parallel: each routes its own tokens. A layer sends every token to the ranks of its
experts and gets their results back, in one all-to-all each way (GShard, arXiv:2006.16668), and as much in the backward.
No token is left out, so ranks send each other as many rows as the routers say, and the host waits for these numbers
once per layer. The gradients of experts are sums over the n ranks of the group, as they see the tokens of all.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed import ProcessGroup

from engine.config import Config
from engine.parallel.tensor import collectives, keep_slice
from flags import refuse
from model import ExpertLinear, Experts
from ops import by_expert, has_values


def check(cfg: Config, ranks: int):
    """ValueError if `ranks` data-parallel ranks of a copy cannot divide the experts."""
    if cfg.n_expert % cfg.ep:
        refuse(cfg, "ep n_expert", "ep does not divide n_expert; set ep to a divisor")
    if ranks % cfg.ep:
        refuse(cfg, "ep", f"does not divide the {ranks} data-parallel ranks of a copy; set it to a divisor")
    if cfg.activation_checkpoint == "selective":
        refuse(cfg, "activation_checkpoint ep", "these do not go together; use full")


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Send the first sent[0] rows of x to the first rank of the group, and so on; returns the rows that the ranks send
    to this one, received[0] from the first rank."""
    out = collectives.all_to_all_single(x.contiguous(), received, sent, group.group_name)
    return collectives.wait_tensor(out)


def apply_expert_parallel(model: nn.Module, group: ProcessGroup, compiled: bool = False) -> list[str]:
    """Keep this rank's experts, and insert the exchange of tokens. Returns the names of the parameters that are cut
    along their first dimension, in the order of the model: ranks exchange gradients in this order. Call it before FSDP,
    DDP and torch.compile, on a whole model that has the same weights on all ranks, or on one that tensor parallelism
    has cut."""
    cut = []
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            module.read = partial(exchanged, module.read, group)
            if compiled:
                module.read = torch.compiler.disable(module.read, reason="rows differ in number")
        if isinstance(module, ExpertLinear):
            cut += [f"{path}.{name}" for name, _ in module.named_parameters()]
    for name in cut:
        keep_slice(model, name, 0, dist.get_rank(group), dist.get_world_size(group))
    return cut


def exchanged(read: Callable, group: ProcessGroup, rows: Tensor, ends: Tensor) -> Tensor:
    """Experts.read of experts on all ranks of the group: rows (N, C) by expert, with the ends (E,) -> (N, C)."""
    n = dist.get_world_size(group)
    load = ends.diff(prepend=ends.new_zeros(1))  # rows of this rank for each expert (E,)
    coming = torch.empty_like(load)  # rows of each rank for each expert of this rank (n, E/n), flat
    dist.all_to_all_single(coming, load, group=group)
    splits = [[len(rows) // n] * n] * 2  # of pretended tensors
    if has_values(rows):
        splits = torch.stack((load.view(n, -1).sum(1), coming.view(n, -1).sum(1))).tolist()  # the host waits
    x = exchange_rows(rows, *splits, group)
    mine = torch.arange(len(load) // n, device=load.device)
    expert = mine.repeat(n).repeat_interleave(coming, output_size=len(x))  # of each row
    order, ends = by_expert(expert, len(mine))
    y = read(x.index_select(0, order), ends).index_select(0, order.argsort())
    return exchange_rows(y, *reversed(splits), group)
