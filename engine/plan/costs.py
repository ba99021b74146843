"""Counts the bytes that one rank of a run holds and sends, on fake tensors, which have a shape but no memory.

    with fake_rank(cfg) as rank:
        rank.memory(cfg.batch_size)[0]        # bytes, by kind

The activations of a block and the traffic of tensor and context parallelism are measured: a block runs forward and
backward, cut and wrapped as in training, so the figures follow every flag. The memory and the traffic of FSDP, DDP and
pipelines are closed forms.

Traffic counts the bytes that a rank sends in a ring of n ranks: (n-1)/n of the full tensor in an all-gather or a
reduce-scatter, and twice as many in an all-reduce. Scalars, tables of positions and token ids are not counted.
"""

import copy
import math
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate, chain, islice
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import _resolve_process_group as resolve_group
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ops
from data.objective import objective_class
from engine import fp8
from engine.optim import OPTIMIZER, Balance, Muon, hidden_matrices, iteration_dtype, state_bytes
from engine.parallel import context as context_parallel
from engine.parallel import expert as expert_parallel
from engine.parallel import pipeline
from engine.parallel import ranks as parallel
from engine.parallel import sharded as sharded_model
from engine.parallel import tensor as tensor_parallel
from engine.parallel.owners import Matrix, Owners, cuts
from engine.parallel.recomputation import recompute
from engine.plan.accounting import attention_kernels, flops, linear_flops
from model import Block, Inputs, Model, Pool, Shared, Stack
from ops import boundaries, equal_rows, rows_at_once, wide_stream

RECOMPUTE = {"none": 1.0, "selective": 1.05, "full": 4 / 3}  # time of a block, relative to one without recomputation

# ---------------------------------------------------------------------------------------------------------------------
# The mesh, and the parameters of each stage


def layout_of(cfg) -> dict[str, int]:
    """The sizes of the dimensions of a mesh of cfg.world_size ranks, outermost first; ValueError if the flags do not
    fit this number. With DDP, dp_shard is the number of copies of the model."""
    parallel.check_layout(cfg, cfg.world_size)
    data, replicas = parallel.data_ranks(cfg, cfg.world_size), parallel.replicas(cfg)
    return {"pp": cfg.pp, "dp_replicate": replicas, "dp_shard": data // replicas, "cp": cfg.cp, "tp": cfg.tp}


class Stage:
    """The parameters of a pipeline's rank, in one or several stages; without one, of the model. FSDP gathers one unit
    of them at once: a block, the embedding, the head, or the root, which is the rest. It does not shard gains.

    numbers, shard and experts are those of each unit: all, and those of the first of `ranks` shards, which is the
    largest, without and only with the parameters `divided` by ep, which have fewer shards.
    """

    def __init__(self, model: Model, index: int, ranks: int, divided: Collection[str]):
        cfg = model.cfg
        self.chunks = pipeline.layers(cfg.n_layer, index, cfg.pp, cfg.pp_chunks)
        self.index, self.blocks, self.first, self.last = index, {*chain(*self.chunks)}, index == 0, index == cfg.pp - 1
        # streams that it sends for a micro-batch, and as many that it receives: both ways, but not at the ends
        self.streams = 2 * cfg.pp_chunks - self.first - self.last
        mine = {"wte": self.first or cfg.tie_weights and self.last, "pos": self.first, "first_norm": self.first}
        ends = {} if cfg.tie_weights else {"wte": "wte", "norm": "head", "head": "head"}
        gains = () if cfg.fsdp_offload else {*sharded_model.kept_whole(model)}
        self.shapes, self.unit, self.held = {}, {}, {}  # of each parameter; held: numbers in the first shard
        self.numbers, self.shard, self.experts = Counter(), Counter(), Counter()
        for name, p in model.named_parameters():
            stack, is_block, rest = name.partition("blocks.")
            part, layer = name.partition(".")[0], rest.partition(".")[0]
            if int(layer) in self.blocks if is_block and not stack else mine.get(part, self.last):
                unit = f"{stack}blocks.{layer}" if is_block else ends.get(part, "root")
                self.unit[name] = unit = "gains" if p in gains else unit
                shards = 1 if p in gains else max(1, ranks // cfg.ep) if name in divided else ranks
                rows = -(-p.size(0) // shards)  # FSDP2 cuts along the first dimension
                self.shapes[name], self.held[name] = tuple(p.shape), rows * (p.numel() // p.size(0))
                self.numbers[unit] += p.numel()
                (self.experts if name in divided else self.shard)[unit] += self.held[name]


# ---------------------------------------------------------------------------------------------------------------------
# Measured costs of a part of the model


class Cost(NamedTuple):
    """Bytes that a forward and a backward of one part of the model take on one rank."""

    kept: int  # memory from the forward to the backward, the result included
    peak: int  # largest memory during both, kept included
    sent: dict[str, float]  # traffic of both, by kind


class Trace(TorchDispatchMode):
    """Counts in the code inside: `live` and `peak` bytes of new tensors, and `sent` bytes by kind.

    A tensor is new if no argument of the operation that returns it has its storage. Casts of `weights` do not count,
    which autocast makes once per forward. The description of a process group is the name of its traffic.
    """

    KINDS = {
        "_allgather_base_": "all-gather", "reduce_scatter_tensor": "reduce-scatter", "allreduce_": "all-reduce",
        "alltoall_base_": "all-to-all",
    }  # fmt: skip

    def __init__(self, weights: list[Tensor]):
        super().__init__()
        self.live, self.peak, self.sent = 0, 0, defaultdict(float)
        self.weights = weakref.WeakSet(t.untyped_storage() for t in weights)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func._schema.name.partition("::")
        if name == "wait_tensor":  # a fake one would be another tensor
            return args[0]
        out = func(*args, **(kwargs or {}))
        if "c10d" in namespace:
            boxed = [a for a in args if isinstance(a, torch.ScriptObject)]
            group = dist.ProcessGroup.unbox(boxed[0]) if boxed else resolve_group(args[-1])
            kind = self.KINDS[name]
            full = max(t.nbytes for t in tree_leaves(args) if isinstance(t, Tensor))
            passes = 2 if kind == "all-reduce" else 1
            n = group.size()
            self.sent[f"{group.group_desc} {kind}"] += passes * (n - 1) / n * full
        cast = func is torch.ops.aten._to_copy.default and args[0].untyped_storage() in self.weights
        for storage in storages(out) - storages((args, kwargs)):
            if cast:
                self.weights.add(storage)
            else:
                self.allocate(storage.nbytes())
                weakref.finalize(storage, self.allocate, -storage.nbytes())
        return out

    def allocate(self, n: int):
        self.live += n
        self.peak = max(self.peak, self.live)


def storages(tree) -> set[torch.UntypedStorage]:
    """Those of all tensors in nested lists, tuples and dictionaries."""
    return {t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, Tensor)}


STATES = ("parameters", "gradients", "optimizer state")  # in float32; they stay from step to step


class UninitializedModel(Model):
    """The model without initial weights: fake tensors hold no values."""

    def init_weights(self, seed: int):
        pass


@contextmanager
def fake_rank(cfg) -> Iterator["FakeRank"]:
    """Rank 0 of a run with these flags. Its groups for tp, cp and ep have other ranks that do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cfg.tp * max(cfg.cp, cfg.ep))
    takes_flash = ops.takes_flash
    ops.takes_flash = lambda _, *given: takes_flash("cuda", *given)
    try:
        with warnings.catch_warnings(), FakeTensorMode():
            warnings.simplefilter("ignore")  # announcements of changes in PyTorch
            yield FakeRank(cfg)
    finally:
        ops.takes_flash = takes_flash
        dist.destroy_process_group()


class FakeRank:
    """One rank's model on fake tensors, and the memory, the traffic and the FLOPs of this rank. `fake_rank` makes it.

    It is rank 0, which under cp keeps the most keys.
    """

    def __init__(self, cfg):
        self.cfg = cfg = copy.copy(cfg)
        self.dtype = torch.bfloat16 if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
        cfg.fp32_residual = wide_stream(cfg.fp32_residual, torch.device("cuda"), self.dtype)
        self.layout = layout_of(cfg)
        self.micro_steps = cfg.gradient_accumulation_steps // parallel.data_ranks(cfg, cfg.world_size)
        self.schedule = cfg.pp, cfg.pp_chunks, self.micro_steps
        self.fsdp = cfg.parallel == "fsdp" and cfg.world_size > 1
        self.offload = self.fsdp and cfg.fsdp_offload
        self.shards = self.group("fsdp")[0] if self.fsdp else 1
        objective = cfg.vocab_size, 0, cfg.block_size, cfg.doc_mask, cfg.corrupt_ratio, cfg.span_length
        self.lengths = objective_class(cfg)(*objective).lengths
        self.model = model = UninitializedModel(cfg, seed=0)  # a fake seed cannot be drawn
        cfg.loss_chunk = rows_at_once(cfg.loss_chunk, cfg.vocab_rows // cfg.tp, torch.device("cuda"))
        self.n_params, self.flops = model.n_params(), flops(model, *self.lengths)
        pieces = 2 * cfg.cp if cfg.cp > 1 else 1  # of each text
        self.attention = attention_kernels(model, *self.lengths, "cuda", self.dtype, pieces)
        of_layers = linear_flops(model, *self.lengths)
        in_float8 = fp8.layers(model) if cfg.fp8 else {}
        self.fp8_flops = sum(of_layers[m] for m in in_float8.values())
        self.not_cast = {f"{name}.weight" for name in in_float8}  # to 16 bits
        self.head_flops = 6 * model.head.weight.numel() * self.lengths[0]
        self.optimizer = OPTIMIZER[cfg.optimizer]
        hidden = hidden_matrices(model) if self.optimizer.muon else {}
        loads = sharded_model.load_biases(model)
        self.trained_by: dict[str, type] = {}
        self.tp_dim: dict[str, int | None] = {}  # the dimension that tp cuts
        self.hidden: dict[str, Matrix] = {}  # the weights that Muon trains, before tp cuts them
        sizes = [self.group(kind)[0] for kind in ("hsdp", "fsdp", "tp")]
        for name, p in model.named_parameters():
            self.trained_by[name] = Muon if p in hidden else Balance if p in loads else self.optimizer.rest
            self.tp_dim[name] = dim = tensor_parallel.sharded_dim(model, name) if cfg.tp > 1 else None
            if p in hidden:
                ep = cfg.ep if p.dim() == 3 else 1  # weights of experts have three dimensions
                self.hidden[name] = Matrix(tuple(p.shape), hidden[p], cuts(sizes, self.fsdp, dim, ep))
        divided: Collection[str] = ()
        if cfg.tp > 1:
            self.tp_group = self.new_group("tp")
            tensor_parallel.apply_tensor_parallel(model, self.tp_group)
        if cfg.cp > 1:
            context_parallel.apply_context_parallel(model, self.new_group("cp"))
        if cfg.ep > 1:
            divided = expert_parallel.apply_expert_parallel(model, self.new_group("ep"))
        self.stages = [Stage(model, i, self.shards, divided) for i in range(cfg.pp)]
        if cfg.fp8:
            fp8.check(cfg, self.lengths)
            fp8.apply(model)
        blocks = [*model.blocks, *(model.encoder.blocks if model.encoder else ())]
        self.imitate_gpu(nn.ModuleList([*blocks, model.norm]))
        for block in blocks:
            if cfg.activation_checkpoint != "none":
                recompute(block, cfg.activation_checkpoint)
        if cfg.compile is not False:
            model.chunk_loss = self.compiled_chunk_loss
        self.part_costs = cache(self.part_costs)

    def group(self, kind: str) -> tuple[int, int]:
        """(number of ranks, distance between consecutive ranks) of the group with this kind of traffic."""
        pp, copies, shards, cp, tp = self.layout.values()
        data, ep = shards * cp, self.cfg.ep
        groups = {"tp": (tp, 1), "cp": (cp, tp), "ep": (ep, tp), "experts": (data // ep, ep * tp), "fsdp": (data, tp)}
        groups |= {"ddp": (data, tp), "hsdp": (copies, data * tp), "pp": (pp, copies * data * tp)}
        return (groups | {"muon": (copies * data * tp, 1)})[kind.partition(" ")[0]]

    def new_group(self, kind: str) -> dist.ProcessGroup:
        """The group of rank 0 with this kind of traffic."""
        ranks, distance = self.group(kind)
        return dist.new_group([*range(0, ranks * distance, distance)], group_desc=kind)

    def imitate_gpu(self, parts: nn.ModuleList):
        """Make the parts take the memory of a GPU, with what FSDP gathers in the matmuls' dtype in this dtype."""
        for m in parts.modules():
            if isinstance(m, nn.RMSNorm):
                m.forward = partial(gpu_norm, m)
            if isinstance(m, Pool):
                m.dropout = 0.0  # a GPU's fused kernel keeps no mask
        for name, unit in (each for stage in self.stages for each in stage.unit.items() if self.fsdp):
            path, _, kind = name.rpartition(".")
            module = self.model.get_submodule(path)
            if "blocks." in unit or unit == "head":
                setattr(module, kind, nn.Parameter(torch.empty_like(getattr(module, kind), dtype=self.dtype)))

    def measure(self, f: Callable[[], Tensor], *parts: nn.Module) -> Cost:
        """The cost of f, a forward of these parts of the model, and of its backward."""
        params = [p for part in parts for p in part.parameters()]
        for p in params:
            p.grad = torch.empty_like(p)  # gradients exist from the second micro-step on
        trace = Trace(params if isinstance(parts[0], Block) else [])
        with trace:
            with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
                y = f()
            kept = trace.live
            y.backward(torch.ones_like(y))
        return Cost(kept, trace.peak, trace.sent)

    def stream(self, batch: int, length: int) -> Tensor:
        """This rank's part of the residual stream, (batch, length / cp / tp, C)."""
        shape, dtype = (batch, length // self.cfg.cp // self.cfg.tp, self.cfg.n_embd), self.dtype
        return torch.empty(shape, dtype=torch.float32 if self.cfg.fp32_residual else dtype, requires_grad=True)

    def part_costs(self, batch: int) -> tuple[list[Cost], list[Cost], Cost]:
        """Costs of the parts before the blocks (with an encoder), of each block, and of the last norm and the loss."""
        cfg, model, (T, S) = self.cfg, self.model, self.lengths

        def stack_costs(stack: Stack, length: int, memory: Tensor | None) -> Iterator[Cost]:
            """Of the embedding, then of each block."""
            own, of_memory = (torch.zeros(batch, n, dtype=torch.int64) for n in (length, S))
            yield self.measure(lambda: model.embed(own[:, : length // cfg.cp], 0)[0], model.wte, model.pos)
            ends = [boundaries(torch.zeros(batch, 8, dtype=torch.int64), n) for n in (length, S)]
            docs = ((own, own, ends[0]), (own, of_memory, *ends)) if cfg.doc_mask else (None, None)
            table = stack.position_table(torch.arange(length // cfg.cp), torch.float32)
            inputs, known = Inputs(table, docs[0], memory, docs[1], Shared()), {}
            for block in stack.blocks:
                readers = tuple((m.reader, m.window) for m in block.modules() if isinstance(m, Pool))
                kind = readers, *(p.shape for p in block.parameters())  # each kind is measured once
                if kind not in known:
                    known[kind] = self.measure(partial(block, self.stream(batch, length), inputs), block)
                    for name, handed in inputs.shared.items():  # without the graph, which the backward has freed
                        inputs.shared[name] = handed.detach().requires_grad_(handed.requires_grad)
                yield known[kind]

        of_encoder, memory = [], None
        if model.encoder is not None:
            norm, x = model.encoder.norm, self.stream(batch, S)
            of_encoder = [*stack_costs(model.encoder, S, None), self.measure(partial(norm, x), norm)]
            memory = self.stream(batch, S * cfg.cp * cfg.tp)  # gathered
        embedding, *blocks = stack_costs(model, T, memory)
        return [embedding, *of_encoder], blocks, self.loss_cost(batch)

    def loss_cost(self, batch: int) -> Cost:
        """The cost of the last norm and the loss. That of many chunks is linear in their number: it follows from two
        smaller numbers of chunks of the same size."""
        cfg, n = self.cfg, batch * self.lengths[0] // self.cfg.cp  # tokens of this rank
        rows = equal_rows(n, cfg.loss_chunk)
        sizes = (k * rows for k in range(4, n // rows))
        alike = (size for size in sizes if size % cfg.tp == 0 and equal_rows(size, cfg.loss_chunk) == rows)
        small = [*islice(alike, 2)]
        if len(small) < 2:
            return self.loss_of_tokens(n)
        a, b = map(self.loss_of_tokens, small)
        x = (n - small[0]) / (small[1] - small[0])
        kept, peak = (round(m + x * (n - m)) for m, n in ((a.kept, b.kept), (a.peak, b.peak)))
        sent = {kind: n + x * (b.sent[kind] - n) for kind, n in a.sent.items()}
        return Cost(kept, peak, sent)

    def loss_of_tokens(self, n: int) -> Cost:
        """The cost of the last norm and the loss of n tokens."""
        model, targets, x = self.model, torch.zeros(1, n, dtype=torch.int64), self.stream(1, n * self.cfg.cp)
        return self.measure(
            lambda: tensor_parallel.parallel_loss(model, model.norm(x), targets), model.norm, model.head
        )

    def compiled_chunk_loss(self, z: Tensor, *args, **terms) -> tuple[Tensor, Tensor]:
        """What a compiled Model.chunk_loss sends and keeps: its results alone."""
        for numbers in (1, 2 + (self.cfg.label_smoothing > 0)) if self.cfg.tp > 1 else ():  # of a token
            dist.all_reduce(torch.empty(len(z), numbers), group=self.tp_group)
        return torch.zeros(()), torch.empty_like(z)

    # ---- memory

    def static_memory(self, stage: Stage) -> dict[str, int]:
        """Bytes of a stage that do not depend on the batch, by kind.

        FSDP gathers a block while the block before it computes. The root is gathered in float32; with the ends of the
        model it stays gathered. In a pipeline, weights stay gathered from a backward to the next forward. A block's
        gradients are reduced in float32 while other gradients are computed; if weights stay gathered, only the last
        micro-step reduces them.
        """
        cfg, size, parameters = self.cfg, self.dtype.itemsize, 4 * sum(stage.held.values())
        optimizer = sum(state_bytes(self.trained_by[name], n) for name, n in stage.held.items())
        optimizer += parameters * (cfg.ema_decay > 0)
        out = dict(zip(STATES, (parameters, parameters, optimizer), strict=True))
        blocks = {unit: n for unit, n in stage.numbers.items() if "blocks." in unit}
        if not self.fsdp:
            of_blocks = [(name, shape) for name, shape in stage.shapes.items() if "blocks." in name]
            cast = sum(math.prod(x) for name, x in of_blocks if len(x) == 2 and name not in self.not_cast)
            return out | {"weights cast by autocast": cast * size if size < 4 else 0}
        root, *ends = (stage.numbers[unit] for unit in ("root", "wte", "head"))
        block, total = max(blocks.values()), sum(blocks.values())
        gathered = cfg.pp > 1 or not cfg.fsdp_reshard  # between passes
        once = gathered and self.micro_steps > 1
        unsharded = 4 * (total + sum(ends)) if once else (size + 4) * max(block, *ends)
        weights = (total if gathered else 2 * block) + sum(ends)
        return out | {"gathered weights": 4 * root + size * weights, "unsharded gradients": 4 * root + unsharded}

    def owners(self, stage: Stage) -> Owners:
        """The owners of the stage's hidden matrices under Muon."""
        hidden = {name: self.hidden[name] for name in stage.shapes if name in self.hidden}
        return Owners(hidden, None, iteration_dtype(self.dtype))

    def muon_update(self, stage: Stage) -> int:
        """Bytes besides the state of an update by Muon, on the rank that owns most numbers; see engine/optim.py."""
        owners, owned = self.owners(stage), defaultdict(list)
        for name, rank in owners.owner.items():
            owned[rank].append(self.hidden[name])
        weights = max(owned.values(), key=lambda weights: sum(math.prod(m.shape) for m in weights))
        matrices = [shape for m in weights for shape in m.logical]
        fused = sum(math.prod(m.shape) for m in weights if len(m.logical) > 1)
        batch = max(matrices.count(shape) * math.prod(shape) for shape in set(matrices))
        mine, size = sum(stage.held[name] for name in owners.matrices), owners.dtype.itemsize
        if len(owners.ranks) == 1:  # updates; copies of fused matrices; a batch: 2 float32 and a copy, or 4 buffers
            return 4 * (mine + fused) + max(4 * size, 4 + 4 + 2) * batch
        # updates of the shards, which are sent and received; full ones, received and sent to each copy, of two rounds
        most = 2 * max(Muon.LARGEST_ROUND, *(math.prod(m.shape) for m in weights))
        full, fused, batch = (min(n, most) for n in (sum(map(math.prod, matrices)), fused, batch))
        copies = math.prod(n for n, dim in weights[0].cuts if dim is None)
        return (4 + size) * mine + 2 * size * full + size * max(fused + 4 * batch, full * copies)

    def memory(self, batch: int) -> tuple[dict[str, int], int, int]:
        """Of a rank of the stage that needs most: bytes by kind, bytes on the GPU at the worst moment, which is in the
        loss, in a block's backward, or in the update, and bytes on the host."""
        of_stages, (before, blocks, loss) = [], self.part_costs(batch)
        for stage in self.stages:
            mine = [blocks[layer] for layer in stage.blocks]
            kept = [sum(blocks[layer].kept for layer in chunk) for chunk in stage.chunks]
            kept[0] += sum(cost.kept for cost in before) * stage.first
            in_flight = accumulate(
                kept[chunk] * (1 if forward else -1) for chunk, forward in pipeline.passes(stage.index, *self.schedule)
            )
            parts = self.static_memory(stage) | {
                "activations": max(in_flight),
                "logits and loss": loss.peak * stage.last,
                "backward of a block": max(cost.peak - cost.kept for cost in mine),
            }
            if self.cfg.pp > 1:  # PyTorch allocates a buffer for each stream that a stage receives in a step
                parts["streams received"] = self.micro_steps * before[0].kept * stage.streams
            states = sum(parts[kind] for kind in STATES)
            most = sum(parts.values()) - min(parts["logits and loss"], parts["backward of a block"])
            if self.optimizer.muon:
                parts["update by Muon"] = self.muon_update(stage)
                most = max(most, states + parts["update by Muon"])
            of_stages.append((parts, most - states * self.offload, states * self.offload))
        return max(of_stages, key=itemgetter(1))

    # ---- traffic and time

    def traffic(self, stage: Stage) -> dict[str, float]:
        """kind -> bytes that a rank of the stage sends in a step to ranks of `group(kind)`."""
        cfg, steps, size, out = self.cfg, self.micro_steps, self.dtype.itemsize, Counter()

        def all_reduce(kind: str, numbers: int):  # in float32
            n = self.group(kind)[0]
            out[kind] += 2 * (n - 1) / n * 4 * numbers

        for kind, shard in (("fsdp", stage.shard), ("experts", stage.experts)):
            others, total, gains, root = self.group(kind)[0] - 1, shard.total(), shard["gains"], shard["root"]
            if not self.fsdp:
                all_reduce(kind.replace("fsdp", "ddp") + " all-reduce", total)
                continue
            # the root and the ends stay gathered from forward to backward, and so does the last block
            ends = shard["wte"] + shard["head"]
            passes = 1 if cfg.pp > 1 else steps  # in which the root and the ends are gathered
            reductions = passes if cfg.fsdp_reshard else 1
            blocks, last = total - gains - root - ends, shard[f"blocks.{cfg.n_layer - 1}"]
            forwards, backwards = blocks * passes, (blocks - last) * passes * cfg.fsdp_reshard
            if cfg.pp > 1:
                forwards, backwards = self.gathered(stage, shard) if cfg.fsdp_reshard else (blocks, 0)
            out[f"{kind} all-gather, forward"] = others * (size * (forwards + ends * passes) + 4 * root * passes)
            out[f"{kind} all-gather, backward"] = others * size * backwards
            out[f"{kind} reduce-scatter"] = others * 4 * (total - gains) * reductions
            all_reduce(f"{kind} all-reduce of gains", gains)
            all_reduce("hsdp all-reduce", total)
        before, blocks, loss = self.part_costs(cfg.batch_size)
        for cost in [blocks[layer] for layer in stage.blocks] + before * stage.first + [loss] * stage.last:
            out.update({kind: n * steps for kind, n in cost.sent.items()})
        if cfg.tp > 1:  # gradients of uncut parameters
            all_reduce("tp all-reduce", sum(n for name, n in stage.held.items() if self.tp_dim[name] is None))
        if cfg.pp > 1:
            tied = 4 * stage.held["wte.weight"] if cfg.tie_weights and (stage.first or stage.last) else 0
            stream = self.stream(cfg.batch_size, self.lengths[0]).nbytes
            out["pp point to point"] = steps * stage.streams * stream + tied
        if self.optimizer.muon:
            owners = self.owners(stage)
            out["muon all-to-all"] = owners.dtype.itemsize * max(owners.sent())
        return {kind: n for kind, n in out.items() if n}

    def gathered(self, stage: Stage, shard: Counter) -> tuple[int, int]:
        """Numbers of blocks that FSDP gathers on a rank of a pipeline in a step, in forwards and in backwards. A
        forward uses what a backward of the same chunk has gathered before it, and frees it."""
        out, there = Counter(), set()
        for chunk, forward in pipeline.passes(stage.index, *self.schedule):
            if chunk not in there:
                out[forward] += sum(shard[f"blocks.{layer}"] for layer in stage.chunks[chunk])
            (there.discard if forward else there.add)(chunk)
        return out[True], out[False]

    def matmul_flops(self, stage: Stage) -> float:
        """Matmul FLOPs of a rank in a step: forward, backward and recomputation. Those in float8 count half."""
        cfg = self.cfg
        blocks = (self.flops - self.head_flops - self.fp8_flops / 2) * len(stage.blocks) / cfg.n_layer
        sequence = blocks * RECOMPUTE[cfg.activation_checkpoint] + self.head_flops * stage.last
        return sequence * cfg.batch_size * self.micro_steps / (cfg.cp * cfg.tp)


def gpu_norm(m: nn.RMSNorm, x: Tensor) -> Tensor:
    """The norm of x, keeping as many bytes as on a GPU: its kernel keeps as much as LayerNorm's, and a CPU's more."""
    return F.layer_norm(x, m.normalized_shape, m.weight.to(x.dtype))
