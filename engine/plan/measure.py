"""Measures the bytes that the parts of a model take and send, on fake tensors, which have a shape but no memory.

with FakeTensorMode():
    parts = Parts(model, cfg, lengths, device, dtype)
parts.blocks[0].kept        # bytes that the first block keeps from the forward to the backward
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group as resolve_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.parallel.tensor import parallel_loss
from model import Block, Inputs, Model, Pool, Shared, Stack
from ops import boundaries, equal_rows, rows_at_once


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


class Parts:
    """The costs of the parts of a model that is cut as in training, for a micro-batch of a rank.

    before      the embedding, and with an encoder what it takes
    blocks      of each block
    loss        the last norm and the loss
    stream      bytes of this rank's part of the residual stream
    """

    def __init__(self, model: Model, cfg, lengths: tuple[int, int], dtype: torch.dtype, device: torch.device):
        self.model, self.cfg, self.dtype, self.lengths = model, cfg, dtype, lengths
        self.most_rows = rows_at_once(cfg.loss_chunk, cfg.vocab_rows // cfg.tp, device)
        blocks = [*model.blocks, *(model.encoder.blocks if model.encoder else ())]
        if device.type == "cuda":
            imitate_gpu(nn.ModuleList([*blocks, model.norm]))
        T, S = lengths
        self.before, memory = [], None
        if model.encoder is not None:
            norm = model.encoder.norm
            self.before = self.stack_costs(model.encoder, S, None)
            self.before.append(cost_of(lambda: norm(self.new_stream(S)), [norm], dtype))
            memory = self.new_stream(S * cfg.cp * cfg.tp)  # gathered
        embedding, *self.blocks = self.stack_costs(model, T, memory)
        self.before.append(embedding)
        self.loss = self.loss_cost()
        self.stream = self.new_stream(T).nbytes

    def new_stream(self, length: int, batch: int = 0) -> Tensor:
        """This rank's part of a stream, (batch, length / cp / tp, C), by default for a micro-batch."""
        cfg = self.cfg
        shape = batch or cfg.batch_size, length // cfg.cp // cfg.tp, cfg.n_embd
        return torch.empty(shape, dtype=torch.float32 if cfg.fp32_residual else self.dtype, requires_grad=True)

    def stack_costs(self, stack: Stack, length: int, memory: Tensor | None) -> list[Cost]:
        """Costs of the embedding, then of each block. Each kind of block is measured once."""
        cfg, model = self.cfg, self.model
        own, of_memory = (torch.zeros(cfg.batch_size, n, dtype=torch.int64) for n in (length, self.lengths[1]))
        mine = own[:, : length // cfg.cp]
        costs = [cost_of(lambda: model.embed(mine, 0)[0], [model.wte, model.pos], self.dtype)]
        inputs = Inputs(stack.position_table(torch.arange(length // cfg.cp), torch.float32), memory=memory)
        inputs = inputs._replace(shared=Shared())
        if cfg.doc_mask:
            ends = [boundaries(torch.zeros(cfg.batch_size, 8, dtype=torch.int64), n) for n in (length, self.lengths[1])]
            inputs = inputs._replace(docs=(own, own, ends[0]), memory_docs=(own, of_memory, *ends))
        known: dict[tuple, Cost] = {}
        for block in stack.blocks:
            readers = tuple((m.reader, m.window) for m in block.modules() if isinstance(m, Pool))
            kind = readers, *(p.shape for p in block.parameters())
            if kind not in known:
                known[kind] = cost_of(partial(block, self.new_stream(length), inputs), [block], self.dtype)
                for name, handed in inputs.shared.items():  # without the graph, which the backward has freed
                    inputs.shared[name] = handed.detach().requires_grad_(handed.requires_grad)
            costs.append(known[kind])
        return costs

    def loss_cost(self) -> Cost:
        """The cost of the last norm and the loss. That of many chunks is linear in their number: it follows from those
        of two smaller numbers of chunks."""
        tokens = self.cfg.batch_size * self.lengths[0] // self.cfg.cp  # of this rank
        rows = equal_rows(tokens, self.most_rows)
        few, more = 4 * self.cfg.tp * rows, 8 * self.cfg.tp * rows
        if tokens <= more:
            return self.loss_of_tokens(tokens, rows)
        a, b = self.loss_of_tokens(few, rows), self.loss_of_tokens(more, rows)

        def line(at_few: float, at_more: float) -> float:
            return at_few + (at_more - at_few) * (tokens - few) / (more - few)

        sent = {kind: line(a.sent[kind], b.sent[kind]) for kind in a.sent}
        return Cost(round(line(a.kept, b.kept)), round(line(a.peak, b.peak)), sent)

    def loss_of_tokens(self, n: int, rows: int) -> Cost:
        """The cost of the last norm and the loss of n tokens in chunks of so many rows."""
        model, targets, x = self.model, torch.zeros(1, n, dtype=torch.int64), self.new_stream(n * self.cfg.cp, 1)
        self.cfg.loss_chunk = rows
        return cost_of(lambda: parallel_loss(model, model.norm(x), targets), [model.norm, model.head], self.dtype)


def imitate_gpu(parts: nn.ModuleList):
    """Make the parts take the memory of a GPU: its kernels keep no mask of attention's dropout, and as much for RMSNorm
    as for LayerNorm."""
    for m in parts.modules():
        if isinstance(m, nn.RMSNorm):
            m.forward = partial(norm_on_gpu, m)
        if isinstance(m, Pool):
            m.dropout = 0.0


def norm_on_gpu(m: nn.RMSNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, m.normalized_shape, m.weight.to(x.dtype))
