"""Counts the bytes that one rank of a run holds and sends, on fake tensors, which have a shape but no memory.

    with fake_rank(cfg) as rank:
        rank.memory(rank.part_costs(cfg.batch_size))         # bytes, by kind

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
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

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

from data.objective import OBJECTIVE
from engine.optim import OPTIMIZER, Muon, hidden_matrices, iteration_dtype, state_bytes
from engine.parallel import context as context_parallel
from engine.parallel import ranks as parallel
from engine.parallel import sharded as sharded_model
from engine.parallel import tensor as tensor_parallel
from engine.parallel.owners import Matrix, Owners, place
from engine.plan.accounting import flops
from model import Inputs, Linear, Model, NormOfHeads, Pool, Shared, Stack
from ops import ChunkedCrossEntropy, chunk_loss, rows_at_once, wide_stream

RECOMPUTE = {"none": 1.0, "selective": 1.05, "full": 4 / 3}  # time of a block, relative to one without recomputation

# ---------------------------------------------------------------------------------------------------------------------
# The mesh, and the parameters of each stage

Shapes = dict[str, tuple[int, ...]]  # of parameters, by name


def layout_of(cfg) -> dict[str, int]:
    """The sizes of the dimensions of a mesh of cfg.world_size ranks, outermost first; ValueError if the flags do not
    fit this number. With DDP, dp_shard is the number of copies of the model."""
    parallel.check_layout(cfg, cfg.world_size)
    data, replicas = parallel.data_ranks(cfg, cfg.world_size), parallel.replicas(cfg)
    return {"pp": cfg.pp, "dp_replicate": replicas, "dp_shard": data // replicas, "cp": cfg.cp, "tp": cfg.tp}


class Stage:
    """The parameters of one pipeline stage; without a pipeline, of the model."""

    def __init__(self, model: Model, index: int, blocks: range):
        self.index, self.blocks, self.first, self.last = index, blocks, index == 0, blocks.stop == model.cfg.n_layer
        ends = {"wte": self.first or model.cfg.tie_weights and self.last, "pos": self.first, "first_norm": self.first}
        # FSDP gathers one unit at once: a block, the embedding, the head, or the root; it does not shard gains
        self.units: dict[str, Shapes] = defaultdict(dict)
        whole = () if model.cfg.fsdp_offload else {*sharded_model.gains(model)}
        of_unit = {} if model.cfg.tie_weights else {"wte": "wte", "norm": "head", "head": "head"}
        for name, p in model.named_parameters():
            part, _, rest = name.removeprefix("encoder.").partition(".")
            layer = rest.partition(".")[0]
            mine = int(layer) in blocks if part == "blocks" else ends.get(part, self.last)
            if mine or name.startswith("encoder."):
                unit = of_unit.get(name.partition(".")[0], "root")
                if part == "blocks":
                    unit = "gains" if p in whole else name.removesuffix(rest) + layer
                self.units[unit][name] = tuple(p.shape)
        self.shapes: Shapes = {name: shape for unit in self.units.values() for name, shape in unit.items()}

    def held(self, name: str, ranks: int) -> int:
        """Number of elements of a parameter that the first rank holds, of so many that share the model."""
        return shard_numel(self.shapes[name], 1 if name in self.units["gains"] else ranks)


def shard_numel(shape: tuple[int, ...], ranks: int) -> int:
    """Number of elements in the first rank's shard, the largest one. FSDP2 cuts along the first dimension."""
    return -(-shape[0] // ranks) * math.prod(shape[1:])


def ring_share(n: int) -> float:
    return (n - 1) / n


# ---------------------------------------------------------------------------------------------------------------------
# Measured costs of a part of the model


@dataclass
class Cost:
    """Bytes that a forward and a backward of one part of the model take on one rank."""

    kept: int  # memory from the forward to the backward, the result included
    peak: int  # largest memory during both, kept included
    sent: dict[str, float] = field(default_factory=dict)  # traffic of both, by kind
    collectives: int = 0  # number of collectives in both


PartCosts = tuple[list[Cost], list[Cost], Cost]  # each block; the parts before the blocks; last norm and loss


class Trace(TorchDispatchMode):
    """Counts in the code inside: `live` and `peak` bytes of new tensors, `sent` bytes by kind, and `collectives`.

    Tensors in `given` do not count, nor casts of `weights`, which autocast makes once per forward. groups maps the name
    of a process group to the name of its traffic.
    """

    KINDS = {"_allgather_base_": "all-gather", "reduce_scatter_tensor": "reduce-scatter", "allreduce_": "all-reduce"}

    def __init__(self, given: list[Tensor], weights: list[Tensor], groups: dict[str, str]):
        super().__init__()
        self.live, self.peak, self.collectives, self.sent, self.groups = 0, 0, 0, defaultdict(float), groups
        self.weights, self.seen = (weakref.WeakSet(t.untyped_storage() for t in ts) for ts in (weights, given))

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
            self.collectives += group.size() > 1
            self.sent[f"{self.groups[group.group_name]} {kind}"] += passes * ring_share(group.size()) * full
        cast = func is torch.ops.aten._to_copy.default and args[0].untyped_storage() in self.weights
        for storage in {t.untyped_storage() for t in tree_leaves(out) if isinstance(t, Tensor)}:
            if cast:
                self.weights.add(storage)
            elif storage not in self.weights and storage not in self.seen:
                self.seen.add(storage)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.freed, storage.nbytes())
        return out

    def freed(self, n: int):
        self.live -= n


# ---------------------------------------------------------------------------------------------------------------------
# A rank

STATES = ("parameters", "gradients", "optimizer state")  # in float32; they stay from step to step


class UninitializedModel(Model):
    """The model without initial weights: fake tensors hold no values."""

    def init_weights(self, seed: int):
        pass


@contextmanager
def fake_rank(cfg) -> Iterator["FakeRank"]:
    """Rank 0 of a run with these flags. Its groups for tp and cp have other ranks that do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cfg.tp * cfg.cp)
    try:
        with warnings.catch_warnings(), FakeTensorMode():
            warnings.simplefilter("ignore")  # announcements of changes in PyTorch
            ranks = range(cfg.tp * cfg.cp)
            yield FakeRank(cfg, dist.new_group([*ranks[: cfg.tp]]), dist.new_group([*ranks[:: cfg.tp]]))
    finally:
        dist.destroy_process_group()


class FakeRank:
    """One rank's model on fake tensors, and the memory, the traffic and the FLOPs of this rank. `fake_rank` makes it.

    It is rank 0, which under cp keeps the most keys.
    """

    def __init__(self, cfg, tp: dist.ProcessGroup, cp: dist.ProcessGroup):
        self.cfg = cfg = copy.copy(cfg)
        self.dtype = torch.bfloat16 if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
        cfg.fp32_residual = wide_stream(cfg.fp32_residual, torch.device("cuda"), self.dtype)
        self.layout = layout_of(cfg)
        self.micro_steps = cfg.gradient_accumulation_steps // parallel.data_ranks(cfg, cfg.world_size)
        self.model = UninitializedModel(cfg, seed=0)  # a fake seed cannot be drawn
        cfg.loss_chunk = rows_at_once(cfg.loss_chunk, cfg.vocab_rows // cfg.tp, torch.device("cuda"))
        self.fsdp = cfg.parallel == "fsdp" and cfg.world_size > 1
        self.offload = self.fsdp and cfg.fsdp_offload
        self.stream_dtype = torch.float32 if cfg.fp32_residual else self.dtype
        objective = cfg.vocab_size, 0, cfg.block_size, cfg.doc_mask, cfg.corrupt_ratio, cfg.span_length
        self.lengths = OBJECTIVE[cfg.objective](*objective).lengths
        self.n_params, self.flops = self.model.n_params(), flops(self.model, *self.lengths)
        self.head_flops = 6 * self.model.head.weight.numel() * self.lengths[0]
        self.optimizer = OPTIMIZER[cfg.optimizer]
        self.linear = {f"{name}.weight" for name, m in self.model.named_modules() if isinstance(m, Linear)}
        self.tp_dim: dict[str, int | None] = {}  # the dimension that tp cuts
        self.hidden: dict[str, Matrix] = {}  # the weights that Muon trains, before tp cuts them
        hidden = hidden_matrices(self.model) if self.optimizer.muon else {}
        sizes = self.group("dp_replicate")[0], self.group("dp_shard", "cp")[0], cfg.tp
        for name, p in self.model.named_parameters():
            self.tp_dim[name] = dim = tensor_parallel.sharded_dim(self.model, name) if cfg.tp > 1 else None
            if p in hidden:
                cuts = zip(sizes, (None, 0 if self.fsdp else None, dim), strict=True)
                self.hidden[name] = Matrix(tuple(p.shape), hidden[p], tuple(cuts))
        self.groups = {tp.group_name: "tp", cp.group_name: "cp"}
        if cfg.tp > 1:
            tensor_parallel.apply_tensor_parallel(self.model, tp)
        if cfg.cp > 1:
            context_parallel.apply_context_parallel(self.model, cp)
        ends = [-(-cfg.n_layer * i // cfg.pp) for i in range(cfg.pp + 1)]  # as engine/parallel/pipeline.py cuts
        self.stages = [Stage(self.model, i, range(ends[i], ends[i + 1])) for i in range(cfg.pp)]
        self.shards = self.group("dp_shard", "cp")[0] if self.fsdp else 1
        for block in [*self.model.blocks, *(self.model.encoder.blocks if self.model.encoder else ())]:
            self.imitate_gpu(block)
            if cfg.activation_checkpoint != "none":
                sharded_model.recompute(block, cfg.activation_checkpoint)
        for end in (self.model.norm, self.model.head):
            self.imitate_gpu(end, cast=not cfg.tie_weights)

    def group(self, *dims: str) -> tuple[int, int]:
        """(number of ranks, distance between consecutive ranks) of a group along adjacent dimensions of the layout."""
        sizes, order = self.layout, list(self.layout)
        inner = order[order.index(dims[-1]) + 1 :]
        return math.prod(sizes[dim] for dim in dims), math.prod(sizes[dim] for dim in inner)

    def imitate_gpu(self, part: nn.Module, cast: bool = True):
        """Make the part take the memory of a GPU under FSDP, with parameters in the matmuls' dtype if cast."""
        whole = {*sharded_model.gains(part)}
        for m in part.modules():
            for name, p in list(m.named_parameters(recurse=False)) if self.fsdp and cast else ():
                if p not in whole:
                    setattr(m, name, nn.Parameter(torch.empty_like(p, dtype=self.dtype)))
            if isinstance(m, nn.RMSNorm) and not isinstance(m, NormOfHeads):
                m.forward = partial(gpu_norm, m)
            if isinstance(m, Pool):
                m.dropout = 0.0  # a GPU's fused kernel keeps no mask

    def measure(self, f: Callable, part: nn.Module, x: Tensor | None, given: list[Tensor], casts: bool = True) -> Cost:
        """The cost of f, which is the part's forward, and its backward. casts: whether casts of weights count."""
        params = list(part.parameters())
        for p in params:
            p.grad = torch.empty_like(p)  # gradients exist from the second micro-step on
        inputs = [] if x is None else [x]
        trace = Trace([*params, *inputs, *given, *(p.grad for p in params)], [] if casts else params, self.groups)
        with trace:
            with nullcontext() if self.dtype == torch.float32 else torch.autocast("cpu", self.dtype):
                y = f(*inputs)
            kept = trace.live
            y.backward(torch.ones_like(y))
        return Cost(kept, trace.peak, trace.sent, trace.collectives)

    def stream(self, batch: int, length: int) -> Tensor:
        """This rank's part of the residual stream, (batch, length / cp / tp, C)."""
        shape = batch, length // self.cfg.cp // self.cfg.tp, self.cfg.n_embd
        return torch.empty(shape, dtype=self.stream_dtype, requires_grad=True)

    def part_costs(self, batch: int) -> PartCosts:
        """Costs of each block, of the parts before the blocks (with an encoder), and of the last norm and the loss."""
        cfg, model, (T, S) = self.cfg, self.model, self.lengths

        def block_costs(stack: Stack, length: int, memory: Tensor | None) -> Iterator[Cost]:
            own, of_memory = (torch.zeros(batch, n, dtype=torch.int64) for n in (length, S))
            docs = ((own, own), (own, of_memory)) if cfg.doc_mask else (None, None)
            table = stack.position_table(torch.arange(length // self.cfg.cp), torch.float32)
            inputs = Inputs(table, docs[0], memory, docs[1], Shared())
            given, known = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)], {}
            for block in stack.blocks:
                readers = tuple((m.reader, m.window) for m in block.modules() if isinstance(m, Pool))
                kind = readers, *(p.shape for p in block.parameters())  # each kind is measured once
                if kind not in known:
                    x = self.stream(batch, length)
                    known[kind] = self.measure(lambda x, f=block: f(x, inputs), block, x, given, casts=False)
                    for name, handed in inputs.shared.items():  # without the graph, which the backward has freed
                        inputs.shared[name] = handed.detach().requires_grad_(handed.requires_grad)
                yield known[kind]

        def embedding_cost(length: int) -> Cost:
            idx = torch.zeros(batch, length // self.cfg.cp, dtype=torch.int64)
            return self.measure(lambda: model.embed(idx, 0)[0], nn.ModuleList([model.wte, model.pos]), None, [idx])

        before, memory = [embedding_cost(T)], None
        if (encoder := model.encoder) is not None:
            memory = torch.empty(batch, S, cfg.n_embd, dtype=self.stream_dtype, requires_grad=True)
            before += [embedding_cost(S), *block_costs(encoder, S, None)]
            before.append(self.measure(encoder.norm, encoder.norm, self.stream(batch, S), []))
        return list(block_costs(model, T, memory)), before, self.loss_cost(batch)

    def loss_cost(self, batch: int) -> Cost:
        """The cost of the last norm and the loss, whose chunks are compiled unless tp cuts the vocabulary."""
        cfg, model, T = self.cfg, self.model, self.lengths[0] // self.cfg.cp
        least = -(-4 * cfg.loss_chunk // T)  # sequences; above this number the cost is linear in the batch
        if batch > 2 * least:
            a, b = (self.loss_cost(n) for n in (least, 2 * least))
            x = batch / least - 1
            sent = {kind: n + x * (b.sent[kind] - n) for kind, n in a.sent.items()}
            chunks = [-(-n * T // cfg.loss_chunk) for n in (least, batch)]
            collectives = a.collectives + 2 * (chunks[1] - chunks[0]) * (cfg.tp > 1)  # two all-reduces in each chunk
            return Cost(round(a.kept + x * (b.kept - a.kept)), round(a.peak + x * (b.peak - a.peak)), sent, collectives)
        compiled = cfg.compile is not False  # and then keeps nothing but its results
        of_chunk = (lambda z, *_: (torch.zeros(()), torch.empty_like(z))) if compiled else chunk_loss

        def loss(x: Tensor) -> Tensor:
            if cfg.tp > 1:
                return model.loss(x, targets)
            options = cfg.logit_softcap, cfg.loss_chunk, of_chunk, True
            return ChunkedCrossEntropy.apply(x.flatten(0, 1), *model.head_parameters(), targets.flatten(), options)

        targets, ends = torch.zeros(batch, T, dtype=torch.int64), nn.ModuleList([model.norm, model.head])
        x = self.stream(batch, self.lengths[0])
        return self.measure(lambda x: loss(model.norm(x)), ends, x, [targets])

    # ---- memory

    def static_memory(self, stage: Stage) -> dict[str, int]:
        """Bytes of a stage that do not depend on the batch, by kind.

        FSDP gathers a block while the block before it computes. The root is gathered in float32; with the ends of the
        model it stays gathered. In a pipeline, weights stay gathered from a backward to the next forward. A block's
        gradients are reduced in float32 while other gradients are computed; if weights stay gathered, only the last
        micro-step reduces them.
        """
        cfg, size = self.cfg, self.dtype.itemsize
        mine = {name: stage.held(name, self.shards) for name in stage.shapes}
        kinds = {name: Muon if name in self.hidden else self.optimizer.rest for name in mine}
        optimizer = sum(state_bytes(kinds[name], n) for name, n in mine.items())
        out = dict(zip(STATES, (4 * sum(mine.values()), 4 * sum(mine.values()), optimizer), strict=True))
        if not self.fsdp:
            casts = sum(math.prod(stage.shapes[name]) for name in self.linear & stage.shapes.keys())
            return out | {"weights cast by autocast": casts * size if size < 4 else 0}
        full = {name: sum(map(math.prod, unit.values())) for name, unit in stage.units.items()}
        root, _, *ends = (full.pop(name, 0) for name in ("root", "gains", "wte", "head"))
        block, total = max(full.values()), sum(full.values())
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
        mine, size = sum(place(m, 0)[1] for m in owners.matrices.values()), owners.dtype.itemsize
        if len(owners.ranks) == 1:  # updates; copies of fused matrices; a batch: 2 float32 and a copy, or 4 buffers
            return 4 * (mine + fused) + max(4 * size, 4 + 4 + 2) * batch
        # updates of the shards, which are sent and received; full ones, received and sent to each copy, of two rounds
        most = 2 * max(Muon.LARGEST_ROUND, *(math.prod(m.shape) for m in weights))
        full, fused, batch = (min(n, most) for n in (sum(map(math.prod, matrices)), fused, batch))
        copies = math.prod(n for n, dim in weights[0].cuts if dim is None)
        return (4 + size) * mine + 2 * size * full + size * max(fused + 4 * batch, full * copies)

    def memory(self, costs: PartCosts) -> dict[str, int]:
        """Bytes of a rank of the stage that needs most, by kind."""
        cfg, of_stages = self.cfg, []
        block_costs, before, loss = costs
        for stage in self.stages:
            mine = [block_costs[layer] for layer in stage.blocks]
            in_flight = cfg.pp - stage.index  # micro-batches between forward and backward
            parts = self.static_memory(stage) | {
                "activations": in_flight * sum(cost.kept for cost in mine + before * stage.first),
                "logits and loss": loss.peak if stage.last else 0,
                "backward of a block": max(cost.peak - cost.kept for cost in mine),
            }
            if cfg.pp > 1:  # PyTorch allocates a buffer for each stream that a stage receives in a step
                parts["streams received"] = self.micro_steps * before[0].kept * (2 - stage.first - stage.last)
            if self.optimizer.muon:
                parts["update by Muon"] = self.muon_update(stage)
            of_stages.append(parts)
        return max(of_stages, key=self.gpu_bytes)

    def host_bytes(self, memory: dict[str, int]) -> int:
        return sum(memory[kind] for kind in STATES) if self.offload else 0

    def gpu_bytes(self, memory: dict[str, int]) -> int:
        """Peak memory on the GPU: in the loss, in a block's backward, or in the update."""
        states, update = sum(memory[kind] for kind in STATES), memory.get("update by Muon", 0)
        one_at_a_time = memory["logits and loss"], memory["backward of a block"]
        training = sum(memory.values()) - update - min(one_at_a_time)
        return max(training, states + update) - self.host_bytes(memory)

    # ---- traffic and time

    def traffic(self, stage: Stage, costs: PartCosts) -> dict[str, tuple[float, tuple[int, int]]]:
        """kind -> (bytes that a rank of the stage sends in a step, the group as `group` describes it)."""
        cfg, size, steps = self.cfg, self.dtype.itemsize, self.micro_steps
        block_costs, before, loss = costs
        others, data, out = self.shards - 1, self.group("dp_shard", "cp"), {}
        held = {unit: sum(stage.held(name, self.shards) for name in names) for unit, names in stage.units.items()}
        total, gains = sum(held.values()), held.get("gains", 0)
        root, ends = held.get("root", 0), held.get("wte", 0) + held.get("head", 0)
        if self.fsdp:
            forwards, backwards = (steps, steps) if cfg.fsdp_reshard else (steps, 0)
            if cfg.pp > 1:  # after the first backward, each forward uses the weights that a backward has gathered
                ahead = cfg.pp - stage.index
                forwards, backwards = (ahead, steps - ahead + 1) if cfg.fsdp_reshard else (1, 0)
            blocks, kept = others * size * (total - gains - root - ends), others * (4 * root + size * ends)
            last = others * size * held[f"blocks.{cfg.n_layer - 1}"] if cfg.pp == 1 else 0  # kept like root and ends
            out["fsdp all-gather, forward"] = blocks * forwards + kept * (1 if cfg.pp > 1 else steps), data
            out["fsdp all-gather, backward"] = (blocks - last) * backwards, data
            once = cfg.pp > 1 or not cfg.fsdp_reshard
            out["fsdp reduce-scatter"] = others * (total - gains) * 4 * (1 if once else steps), data
            out["fsdp all-reduce of gains"] = 2 * ring_share(self.shards) * gains * 4, data
            copies = self.group("dp_replicate")
            out["hsdp all-reduce"] = 2 * ring_share(copies[0]) * total * 4, copies
        else:
            out["ddp all-reduce"] = 2 * ring_share(data[0]) * total * 4, data
        sent = defaultdict(float)
        for cost in [block_costs[layer] for layer in stage.blocks] + before * stage.first + [loss] * stage.last:
            for kind, n in cost.sent.items():
                sent[kind] += n * steps
        if cfg.tp > 1:
            uncut = sum(stage.held(name, self.shards) for name in stage.shapes if self.tp_dim[name] is None)
            sent["tp all-reduce"] += 2 * ring_share(cfg.tp) * 4 * uncut  # gradients of uncut parameters
        out |= {kind: (n, self.group(kind[:2])) for kind, n in sent.items()}
        if cfg.pp > 1:
            streams = steps * (2 - stage.first - stage.last)  # forward to the next stage, backward to the previous one
            n = streams * self.stream(cfg.batch_size, self.lengths[0]).nbytes
            if cfg.tie_weights and (stage.first or stage.last):
                n += 4 * shard_numel(stage.shapes["wte.weight"], self.shards)
            out["pp point to point"] = n, self.group("pp")
        if self.optimizer.muon:
            owners, ranks = self.owners(stage), self.group("dp_replicate", "dp_shard", "cp", "tp")
            out["muon all-to-all"] = owners.dtype.itemsize * max(owners.sent()), ranks
        return {kind: each for kind, each in out.items() if each[0]}

    def collectives(self, costs: PartCosts) -> int:
        """Number of collectives that tensor and context parallelism need in a step of a rank."""
        block_costs, before, loss = costs
        total = sum(cost.collectives for cost in [*block_costs, *before, loss]) * self.micro_steps
        if self.cfg.tp > 1:
            total += (None in self.tp_dim.values()) + 1  # gradients of uncut parameters, and the norm
            if self.optimizer.muon:  # updates travel to the owners and back
                owners = map(self.owners, self.stages)
                total += sum(2 * len(each.rounds(each.owner, Muon.LARGEST_ROUND)) for each in owners)
        return total

    def matmul_flops(self, stage: Stage) -> float:
        """Matmul FLOPs of a rank in a step: forward, backward and recomputation."""
        cfg = self.cfg
        blocks = (self.flops - self.head_flops) * len(stage.blocks) / cfg.n_layer
        sequence = blocks * RECOMPUTE[cfg.activation_checkpoint] + self.head_flops * stage.last
        return sequence * cfg.batch_size * self.micro_steps / (cfg.cp * cfg.tp)


def gpu_norm(m: nn.RMSNorm, x: Tensor) -> Tensor:
    """The norm of x, keeping as many bytes as on a GPU: its kernel keeps as much as LayerNorm's, and a CPU's more."""
    return F.layer_norm(x, m.normalized_shape, m.weight.to(x.dtype))
