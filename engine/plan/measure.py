"""Measures what the blocks of a model take and send, on fake tensors, which have a shape but no memory."""

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import _resolve_process_group as resolve_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.parallel.fsdp import kept_whole
from model import MLP, Block, Heads, Inputs, Model

LONG = 2**12  # tokens; to measure the attention of longer texts could take minutes


class Cost(NamedTuple):
    """Bytes that a forward and a backward of a block take on one rank."""

    kept: int  # memory from the forward to the backward, the result included
    backward: int  # what the backward takes besides
    sent: Counter  # by the description of the group of ranks


class Trace(TorchDispatchMode):
    """Counts, `ratio` times each, the bytes of a block's new tensors that are `live`, their `peak`, and bytes `sent`.

    A tensor is new if no argument of the operation that returns it has its storage. Casts of weights, which autocast
    makes once per forward, do not count. A ring of n ranks sends (n-1)/n of a tensor, twice as much in an all-reduce.
    """

    def __init__(self, block: Block, ratio: int):
        super().__init__()
        self.ratio = ratio
        self.live = 0
        self.peak = 0
        self.sent = Counter()
        self.weights = storages([*block.parameters()])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func._schema.name.partition("::")
        if name == "wait_tensor":  # a fake one would be another tensor
            return args[0]
        out = func(*args, **(kwargs or {}))
        if "c10d" in namespace:
            self.send(name, args)
        given = storages((args, kwargs))
        if not (func is torch.ops.aten._to_copy.default and given <= self.weights):
            for storage in storages(out) - given:
                self.allocate(storage.nbytes())
                weakref.finalize(storage, self.allocate, -storage.nbytes())
        return out

    def allocate(self, n: int):
        self.live += self.ratio * n
        self.peak = max(self.peak, self.live)

    def send(self, name: str, args: tuple):
        n = self.ratio * max(t.nbytes for t in tree_leaves(args) if isinstance(t, Tensor))
        if name == "allreduce_":
            n *= 2
        boxed = [a for a in args if isinstance(a, torch.ScriptObject)]
        group = dist.ProcessGroup.unbox(boxed[0]) if boxed else resolve_group(args[-1])
        self.sent[group.group_desc] += n * (group.size() - 1) / group.size()


def storages(tree) -> set[torch.UntypedStorage]:
    """Those of all tensors in nested lists, tuples and dictionaries."""
    return {t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, Tensor)}


def block_costs(model: Model, cfg, lengths: tuple[int, int], dtype: torch.dtype, gathered: torch.dtype) -> list[Cost]:
    """The costs of the blocks of the encoder, if there is one, then of the model, which is cut as in training, for a
    micro-batch of texts and sources of these lengths; the blocks' weights are in the dtype `gathered`. Documents are
    left out, as attention to them takes as much. Long texts are taken to cost as much as several shorter ones."""
    T, S = lengths
    ratio = 1
    while T > LONG and T % (4 * cfg.cp * cfg.tp) == S % (2 * cfg.tp) == 0:
        T //= 2
        S //= 2
        ratio *= 2
    known = {}
    costs = []

    def measured(block: Block, forward: Callable, x: Tensor, inputs: Inputs) -> Tensor:
        readers = tuple((m.reader, getattr(m, "window", 0)) for m in block.modules() if isinstance(m, Heads | MLP))
        kind = x.shape, readers, *(p.shape for p in block.parameters())
        if kind not in known:
            make_weights(block, gathered)
            with torch.enable_grad(), Trace(block, ratio) as trace:
                y = forward(x.detach().requires_grad_(), inputs)
                kept = trace.live
                y.backward(torch.ones_like(y))
            known[kind] = Cost(kept, trace.peak - kept, trace.sent)
            for name, handed in inputs.shared.items():  # without the graph, which the backward has freed
                inputs.shared[name] = handed.detach().requires_grad_(handed.requires_grad)
        costs.append(known[kind])
        return x

    model.loss = lambda x, targets: x
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        block.forward = partial(measured, block, block.forward)
    with FakeTensorMode(), torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        make_weights(model, torch.float32)
        model.tie()
        ids = torch.zeros(cfg.batch_size, max(T, S), dtype=torch.int64)
        model(ids[:, : T // cfg.cp], ids, source=ids[:, :S] if S else None)
    return costs


def make_weights(part: nn.Module, dtype: torch.dtype):
    """Make fake tensors of the weights and gradients of a part of the model, without its blocks."""
    wide = {*kept_whole(part)}
    for name, p in [*part.named_parameters()]:
        layer, _, kind = name.rpartition(".")
        if "blocks." not in layer:
            made = nn.Parameter(torch.empty(p.shape, dtype=torch.float32 if p in wide else dtype))
            made.grad = torch.empty_like(made)
            setattr(part.get_submodule(layer), kind, made)
