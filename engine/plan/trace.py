"""Counts the bytes that a part of the model takes and sends, on fake tensors, which have a shape but no memory.

with FakeTensorMode():
    cost = cost_of(partial(block, x, inputs), [block], torch.bfloat16)
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group as resolve_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import Block


class Cost(NamedTuple):
    """Bytes that a forward and a backward of one part of the model take on one rank."""

    kept: int  # memory from the forward to the backward, the result included
    peak: int  # largest memory during both, kept included
    sent: dict[str, float]  # traffic of both, by kind


def cost_of(f: Callable[[], Tensor], parts: list[nn.Module], dtype: torch.dtype) -> Cost:
    """The cost of f, a forward of these parts of the model with matrix products in dtype, and of its backward."""
    params = [p for part in parts for p in part.parameters()]
    for p in params:
        p.grad = torch.empty_like(p)  # gradients exist from the second micro-step on
    trace = Trace(params if isinstance(parts[0], Block) else [])
    with trace:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            y = f()
        kept = trace.live
        y.backward(torch.ones_like(y))
    return Cost(kept, trace.peak, trace.sent)


class Trace(TorchDispatchMode):
    """Counts in the code inside: `live` and `peak` bytes of new tensors, and `sent` bytes by kind.

    A tensor is new if no argument of the operation that returns it has its storage. Casts of `weights` do not count,
    which autocast makes once per forward. The description of a process group is the name of its traffic. The bytes sent
    are those of a ring of n ranks: (n-1)/n of the full tensor, and twice as many in an all-reduce.
    """

    KINDS = {
        "_allgather_base_": "all-gather",
        "reduce_scatter_tensor": "reduce-scatter",
        "allreduce_": "all-reduce",
        "alltoall_base_": "all-to-all",
    }

    def __init__(self, weights: list[Tensor]):
        super().__init__()
        self.live = 0
        self.peak = 0
        self.sent = defaultdict(float)
        self.weights = weakref.WeakSet(t.untyped_storage() for t in weights)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func._schema.name.partition("::")
        if name == "wait_tensor":  # a fake one would be another tensor
            return args[0]
        out = func(*args, **(kwargs or {}))
        if "c10d" in namespace:
            self.send(self.KINDS[name], args)
        is_cast = func is torch.ops.aten._to_copy.default and args[0].untyped_storage() in self.weights
        for storage in storages(out) - storages((args, kwargs)):
            if is_cast:
                self.weights.add(storage)
            else:
                self.allocate(storage.nbytes())
                weakref.finalize(storage, self.allocate, -storage.nbytes())
        return out

    def allocate(self, n: int):
        self.live += n
        self.peak = max(self.peak, self.live)

    def send(self, kind: str, args: tuple):
        boxed = [a for a in args if isinstance(a, torch.ScriptObject)]
        group = dist.ProcessGroup.unbox(boxed[0]) if boxed else resolve_group(args[-1])
        full = max(t.nbytes for t in tree_leaves(args) if isinstance(t, Tensor))
        passes = 2 if kind == "all-reduce" else 1
        self.sent[f"{group.group_desc} {kind}"] += passes * (group.size() - 1) / group.size() * full


def storages(tree) -> set[torch.UntypedStorage]:
    """Those of all tensors in nested lists, tuples and dictionaries."""
    return {t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, Tensor)}
