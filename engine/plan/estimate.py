"""Estimates what one rank of a run takes and sends. --plan and the refusal of runs that cannot fit read it.

    rank = estimate_rank(cfg)       # of cfg.world_size ranks; needs no other rank, and no GPU
    kinds, on_device, on_host = rank.memory()
    sent = [rank.traffic(stage) for stage in rank.stages]

A block and the loss run forward and backward on fake tensors, cut and wrapped as in training, so their memory and
their traffic follow every flag. The memory and the traffic of FSDP, DDP, Muon and pipelines are closed forms. Scalars,
tables of positions and token ids are not counted.
"""

import copy
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection
from functools import partial
from itertools import accumulate
from operator import itemgetter

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import ops
from data.objective import objective_class
from engine import fp8
from engine.optim import OPTIMIZER, Balance, Muon, hidden_matrices, iteration_dtype, state_bytes
from engine.parallel import context as context_parallel
from engine.parallel import expert as expert_parallel
from engine.parallel import pipeline
from engine.parallel import ranks as parallel
from engine.parallel import tensor as tensor_parallel
from engine.parallel.owners import Matrix, Owners, cuts, place
from engine.parallel.recomputation import recompute
from engine.parallel.sharded import fsdp_units, kept_whole, load_biases
from engine.plan.accounting import attention_kernels, flops, linear_flops
from engine.plan.trace import Cost, cost_of
from model import ExpertLinear, Inputs, Model, Pool, Shared, Stack
from ops import boundaries, equal_rows, rows_at_once, wide_stream

RECOMPUTE = {"none": 1.0, "selective": 1.05, "full": 4 / 3}  # time of a block, relative to one without recomputation
STATES = ("parameters", "gradients", "optimizer state")  # in float32; they stay from step to step


def estimate_rank(cfg, device: str = "cuda") -> "Rank":
    """Rank 0 of a run with these flags. The other ranks of its groups for tp, cp and ep do not exist."""
    takes_flash = ops.takes_flash
    ops.takes_flash = lambda _, *given: takes_flash(device, *given)
    n = cfg.tp * max(cfg.cp, cfg.ep)
    if n > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # announcements of changes in PyTorch
            return Rank(cfg, torch.device(device))
    finally:
        ops.takes_flash = takes_flash
        if n > 1:
            dist.destroy_process_group()


class Stage:
    """The parameters of a pipeline's rank, in one or several stages; without one, of the model.

    Numbers of parameters, by FSDP's units, or "gains" for those that it does not shard:
    numbers    before FSDP shards them
    shard      of the first shard, which is the largest, without experts that ranks divide
    experts    the same of those experts, which have fewer shards
    """

    def __init__(self, rank: "Rank", index: int):
        cfg = rank.cfg
        self.index, self.first, self.last = index, index == 0, index == cfg.pp - 1
        self.chunks = pipeline.layers(cfg.n_layer, index, cfg.pp, cfg.pp_chunks)
        self.layers = [layer for chunk in self.chunks for layer in chunk]
        # streams that it sends for a micro-batch, and as many that it receives: both ways, but not at the ends
        self.streams = 2 * cfg.pp_chunks - self.first - self.last
        others = tuple(f"{path}." for path in pipeline.elsewhere(cfg, index, cfg.pp, cfg.pp_chunks))
        self.params = {name: p for name, p in rank.model.named_parameters() if not name.startswith(others)}
        self.held = {name: place(rank.matrices[name], 0)[1] for name in self.params}  # in the first shard
        self.numbers, self.shard, self.experts = Counter(), Counter(), Counter()
        for name, p in self.params.items():
            unit = rank.unit[p]
            shard = self.experts if name in rank.divided else self.shard
            shard[unit] += self.held[name]
            self.numbers[unit] += p.numel()


class Rank:
    """One rank's model on fake tensors, and the memory, the traffic and the FLOPs of this rank.

    It is rank 0, which under cp keeps the most keys.
    """

    def __init__(self, cfg, device: torch.device):
        self.cfg, self.device = copy.copy(cfg), device
        cfg = self.cfg
        self.dtype = torch.bfloat16 if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
        cfg.fp32_residual = wide_stream(cfg.fp32_residual, device, self.dtype)
        self.layout = layout_of(cfg)
        self.micro_steps = cfg.gradient_accumulation_steps // parallel.data_ranks(cfg, cfg.world_size)
        self.fsdp = cfg.parallel == "fsdp" and cfg.world_size > 1
        self.offload = self.fsdp and cfg.fsdp_offload
        objective = cfg.vocab_size, 0, cfg.block_size, cfg.doc_mask, cfg.corrupt_ratio, cfg.span_length
        self.lengths = objective_class(cfg)(*objective).lengths
        with torch.device("meta"):
            self.model = Model(cfg)
        cfg.loss_chunk = rows_at_once(cfg.loss_chunk, cfg.vocab_rows // cfg.tp, device)
        self.optimizer = OPTIMIZER[cfg.optimizer]
        self.count_whole_model()
        self.cut()
        self.stages = [Stage(self, i) for i in range(cfg.pp)]
        with FakeTensorMode():
            self.wrap()
            self.measure()

    def count_whole_model(self):
        """What is read from the model before ranks divide it: its FLOPs, and how they divide each parameter."""
        cfg, model = self.cfg, self.model
        self.n_params, self.flops = model.n_params(), flops(model, *self.lengths)
        pieces = 2 * cfg.cp if cfg.cp > 1 else 1  # of each text
        self.attention = attention_kernels(model, *self.lengths, self.device.type, self.dtype, pieces)
        of_layers = linear_flops(model, *self.lengths)
        in_float8 = fp8.layers(model) if cfg.fp8 else {}
        self.fp8_flops = sum(of_layers[m] for m in in_float8.values())
        self.not_cast = {f"{name}.weight" for name in in_float8}  # to 16 bits
        self.head_flops = 6 * model.head.weight.numel() * self.lengths[0]
        hidden = hidden_matrices(model) if self.optimizer.muon else {}
        loads = load_biases(model)
        whole = set() if cfg.fsdp_offload else {*kept_whole(model)}
        sizes = [self.group(kind)[0] for kind in ("hsdp", "fsdp", "tp")]
        self.trained_by: dict[str, type] = {}
        self.tp_dim: dict[str, int | None] = {}  # the dimension that tp cuts
        self.matrices: dict[str, Matrix] = {}
        self.hidden: dict[str, Matrix] = {}  # those that Muon trains
        for name, p in model.named_parameters():
            self.trained_by[name] = Muon if p in hidden else Balance if p in loads else self.optimizer.rest
            self.tp_dim[name] = dim = tensor_parallel.sharded_dim(model, name) if cfg.tp > 1 else None
            module = model.get_submodule(name.rpartition(".")[0])
            ep = cfg.ep if isinstance(module, ExpertLinear) else 1
            self.matrices[name] = Matrix(
                tuple(p.shape), hidden.get(p), cuts(sizes, self.fsdp and p not in whole, dim, ep)
            )
            if p in hidden:
                self.hidden[name] = self.matrices[name]

    def cut(self):
        """Cut the model as tensor, context and expert parallelism do in training, and name the unit of each weight."""
        cfg, model = self.cfg, self.model
        self.divided: Collection[str] = ()  # names of parameters that ep cuts
        if cfg.tp > 1:
            self.tp_group = self.new_group("tp")
            tensor_parallel.apply_tensor_parallel(model, self.tp_group)
        if cfg.cp > 1:
            context_parallel.apply_context_parallel(model, self.new_group("cp"))
        if cfg.ep > 1:
            self.divided = expert_parallel.apply_expert_parallel(model, self.new_group("ep"))
        whole = [] if cfg.fsdp_offload else kept_whole(model)
        self.unit = dict.fromkeys(whole, "gains")
        for unit, modules in fsdp_units(model).items():
            for p in (p for module in modules for p in module.parameters()):
                self.unit.setdefault(p, unit)

    def wrap(self):
        """Make fake tensors of the weights, and the model keep what it keeps in training on this device."""
        cfg, model = self.cfg, self.model
        if cfg.fp8:
            fp8.check(cfg, self.lengths)
            fp8.apply(model)
        for name, p in [*model.named_parameters()]:
            unit, dtype = self.unit[p], p.dtype
            if self.fsdp and ("blocks." in unit or unit == "head"):
                dtype = self.dtype  # in which FSDP gathers it
            path, _, kind = name.rpartition(".")
            setattr(model.get_submodule(path), kind, nn.Parameter(torch.empty(p.shape, dtype=dtype)))
        model.tie()
        blocks = [*model.blocks, *(model.encoder.blocks if model.encoder else ())]
        if self.device.type == "cuda":
            imitate_gpu(nn.ModuleList([*blocks, model.norm]))
        for block in blocks:
            if cfg.activation_checkpoint != "none":
                recompute(block, cfg.activation_checkpoint)
        if compiled(cfg, self.device):
            model.chunk_loss = self.compiled_chunk_loss

    def group(self, kind: str) -> tuple[int, int]:
        """(number of ranks, distance between consecutive ranks) of the group with this kind of traffic."""
        pp, copies, shards, cp, tp = self.layout.values()
        data, ep = shards * cp, self.cfg.ep
        groups = {
            "tp": (tp, 1),
            "cp": (cp, tp),
            "ep": (ep, tp),
            "experts": (data // ep, ep * tp),
            "fsdp": (data, tp),
            "ddp": (data, tp),
            "hsdp": (copies, data * tp),
            "pp": (pp, copies * data * tp),
            "muon": (copies * data * tp, 1),
        }
        return groups[kind.partition(" ")[0]]

    def new_group(self, kind: str) -> dist.ProcessGroup:
        """The group of rank 0 with this kind of traffic."""
        ranks, distance = self.group(kind)
        return dist.new_group([*range(0, ranks * distance, distance)], group_desc=kind)

    # ---- parts of the model

    def stream(self, length: int, batch: int = 0) -> Tensor:
        """This rank's part of the residual stream, (batch, length / cp / tp, C), by default for a micro-batch."""
        cfg = self.cfg
        shape = batch or cfg.batch_size, length // cfg.cp // cfg.tp, cfg.n_embd
        return torch.empty(shape, dtype=torch.float32 if cfg.fp32_residual else self.dtype, requires_grad=True)

    def measure(self):
        """The costs of the parts `before` the blocks (with an encoder), of each of `blocks`, and of norm and `loss`."""
        model, (T, S) = self.model, self.lengths
        self.before, memory = [], None
        if model.encoder is not None:
            norm = model.encoder.norm
            self.before = self.stack_costs(model.encoder, S, None)
            self.before.append(cost_of(partial(norm, self.stream(S)), [norm], self.dtype))
            memory = self.stream(S * self.cfg.cp * self.cfg.tp)  # gathered
        embedding, *self.blocks = self.stack_costs(model, T, memory)
        self.before.append(embedding)
        self.loss = self.loss_cost()
        self.stream_bytes = self.stream(T).nbytes

    def stack_costs(self, stack: Stack, length: int, memory: Tensor | None) -> list[Cost]:
        """Costs of the embedding, then of each block. Each kind of block is measured once."""
        cfg, model, batch, S = self.cfg, self.model, self.cfg.batch_size, self.lengths[1]
        own, of_memory = (torch.zeros(batch, n, dtype=torch.int64) for n in (length, S))
        embed = partial(model.embed, own[:, : length // cfg.cp], 0)
        costs = [cost_of(lambda: embed()[0], [model.wte, model.pos], self.dtype)]
        ends = [boundaries(torch.zeros(batch, 8, dtype=torch.int64), n) for n in (length, S)]
        docs = ((own, own, ends[0]), (own, of_memory, *ends)) if cfg.doc_mask else (None, None)
        table = stack.position_table(torch.arange(length // cfg.cp), torch.float32)
        inputs, known = Inputs(table, docs[0], memory, docs[1], Shared()), {}
        for block in stack.blocks:
            readers = tuple((m.reader, m.window) for m in block.modules() if isinstance(m, Pool))
            kind = readers, *(p.shape for p in block.parameters())
            if kind not in known:
                known[kind] = cost_of(partial(block, self.stream(length), inputs), [block], self.dtype)
                for name, handed in inputs.shared.items():  # without the graph, which the backward has freed
                    inputs.shared[name] = handed.detach().requires_grad_(handed.requires_grad)
            costs.append(known[kind])
        return costs

    def loss_cost(self) -> Cost:
        """The cost of the last norm and the loss. That of many chunks follows from those of two smaller numbers of
        chunks: it is linear."""
        n = self.cfg.batch_size * self.lengths[0] // self.cfg.cp  # tokens of this rank
        rows = equal_rows(n, self.cfg.loss_chunk)
        few, more = 4 * self.cfg.tp * rows, 8 * self.cfg.tp * rows
        if n <= more:
            return self.loss_of_tokens(n, rows)
        a, b = self.loss_of_tokens(few, rows), self.loss_of_tokens(more, rows)

        def line(at_few: float, at_more: float) -> float:
            return at_few + (at_more - at_few) * (n - few) / (more - few)

        sent = {kind: line(a.sent[kind], b.sent[kind]) for kind in a.sent}
        return Cost(round(line(a.kept, b.kept)), round(line(a.peak, b.peak)), sent)

    def loss_of_tokens(self, n: int, rows: int) -> Cost:
        """The cost of the last norm and the loss of n tokens in chunks of so many rows."""
        model, targets, x = self.model, torch.zeros(1, n, dtype=torch.int64), self.stream(n * self.cfg.cp, 1)
        most, self.cfg.loss_chunk = self.cfg.loss_chunk, rows
        forward = partial(tensor_parallel.parallel_loss, model)
        cost = cost_of(lambda: forward(model.norm(x), targets), [model.norm, model.head], self.dtype)
        self.cfg.loss_chunk = most
        return cost

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
        if cfg.ema_decay > 0:
            optimizer += parameters
        states = dict(zip(STATES, (parameters, parameters, optimizer), strict=True))
        if not self.fsdp:
            blocks = {name: p for name, p in stage.params.items() if "blocks." in name and name not in self.not_cast}
            cast = sum(p.numel() for p in blocks.values() if p.dim() == 2) if size < 4 else 0
            return states | {"weights cast by autocast": cast * size}
        root, *ends = (stage.numbers[unit] for unit in ("root", "wte", "head"))
        blocks = [n for unit, n in stage.numbers.items() if "blocks." in unit]
        stay_gathered = cfg.pp > 1 or not cfg.fsdp_reshard  # between passes
        weights, unsharded = 2 * max(blocks), (size + 4) * max(*blocks, *ends)
        if stay_gathered:
            weights = sum(blocks)
        if stay_gathered and self.micro_steps > 1:
            unsharded = 4 * sum(blocks + ends)
        gathered = 4 * root + size * (weights + sum(ends))
        return states | {"gathered weights": gathered, "unsharded gradients": 4 * root + unsharded}

    def owners(self, stage: Stage) -> Owners:
        """The owners of the stage's hidden matrices under Muon."""
        hidden = {name: self.hidden[name] for name in stage.params if name in self.hidden}
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

    def memory(self) -> tuple[dict[str, int], int, int]:
        """Of a rank of the stage that needs most: bytes by kind, bytes on the device at the worst moment, which is in
        the loss, in a block's backward, or in the update, and bytes on the host."""
        return max((self.stage_memory(stage) for stage in self.stages), key=itemgetter(1))

    def stage_memory(self, stage: Stage) -> tuple[dict[str, int], int, int]:
        """`memory` of a rank of one stage."""
        blocks = self.blocks
        kept = [sum(blocks[layer].kept for layer in chunk) for chunk in stage.chunks]
        if stage.first:
            kept[0] += sum(cost.kept for cost in self.before)
        passes = pipeline.passes(stage.index, self.cfg.pp, self.cfg.pp_chunks, self.micro_steps)
        in_flight = accumulate(kept[chunk] if forward else -kept[chunk] for chunk, forward in passes)
        parts = self.static_memory(stage) | {
            "activations": max(in_flight),
            "logits and loss": self.loss.peak * stage.last,
            "backward of a block": max(blocks[layer].peak - blocks[layer].kept for layer in stage.layers),
        }
        if self.cfg.pp > 1:  # PyTorch allocates a buffer for each stream that a stage receives in a step
            parts["streams received"] = self.micro_steps * self.stream_bytes * stage.streams
        states = sum(parts[kind] for kind in STATES)
        most = sum(parts.values()) - min(parts["logits and loss"], parts["backward of a block"])
        if self.optimizer.muon:
            parts["update by Muon"] = self.muon_update(stage)
            most = max(most, states + parts["update by Muon"])
        on_host = states if self.offload else 0
        return parts, most - on_host, on_host

    # ---- traffic and FLOPs

    def traffic(self, stage: Stage) -> dict[str, float]:
        """kind -> bytes that a rank of the stage sends in a step to ranks of `group(kind)`."""
        cfg, sent = self.cfg, Counter()
        shard, experts = stage.shard.total(), stage.experts.total()
        if self.fsdp:
            sent.update(self.fsdp_traffic(stage, "fsdp", stage.shard))
            sent.update(self.fsdp_traffic(stage, "experts", stage.experts))
            sent["hsdp all-reduce"] = self.all_reduce("hsdp", shard + experts)
        else:
            sent["ddp all-reduce"] = self.all_reduce("ddp", shard)
            sent["experts all-reduce"] = self.all_reduce("experts", experts)
        parts = [self.blocks[layer] for layer in stage.layers]
        if stage.first:
            parts += self.before
        if stage.last:
            parts.append(self.loss)
        for cost in parts:
            sent.update({kind: n * self.micro_steps for kind, n in cost.sent.items()})
        if cfg.tp > 1:  # gradients of uncut parameters
            sent["tp all-reduce"] += self.all_reduce(
                "tp", sum(stage.held[n] for n in stage.held if self.tp_dim[n] is None)
            )
        if cfg.pp > 1:
            streams = self.micro_steps * stage.streams * self.stream_bytes
            tied = 4 * stage.held["wte.weight"] if cfg.tie_weights and (stage.first or stage.last) else 0
            sent["pp point to point"] = streams + tied
        if self.optimizer.muon:
            owners = self.owners(stage)
            sent["muon all-to-all"] = owners.dtype.itemsize * max(owners.sent())
        return {kind: n for kind, n in sent.items() if n}

    def all_reduce(self, kind: str, numbers: int) -> float:
        """Bytes that a rank sends in an all-reduce of so many float32 numbers over the group of this kind."""
        n = self.group(kind)[0]
        return 2 * (n - 1) / n * 4 * numbers

    def fsdp_traffic(self, stage: Stage, kind: str, shard: Counter) -> dict[str, float]:
        """That of FSDP in the group of this kind, whose ranks have such shards. The root and the ends stay gathered
        from forward to backward."""
        cfg, others = self.cfg, self.group(kind)[0] - 1
        steps = 1 if cfg.pp > 1 else self.micro_steps  # in which the root and the ends are gathered
        in_half = self.gathered(stage, shard) + steps * (shard["wte"] + shard["head"])
        reduced = (shard.total() - shard["gains"]) * (steps if cfg.fsdp_reshard else 1)
        return {
            f"{kind} all-gather": others * (self.dtype.itemsize * in_half + 4 * steps * shard["root"]),
            f"{kind} reduce-scatter": others * 4 * reduced,
            f"{kind} all-reduce of gains": self.all_reduce(kind, shard["gains"]),
        }

    def gathered(self, stage: Stage, shard: Counter) -> int:
        """Numbers of blocks that FSDP gathers on a rank in a step: before each forward and backward, but the last block
        stays gathered. In a pipeline, a forward uses what a backward of the same chunk has gathered, and frees it."""
        cfg, blocks = self.cfg, sum(n for unit, n in shard.items() if "blocks." in unit)
        if cfg.pp > 1 and not cfg.fsdp_reshard:
            return blocks
        if cfg.pp == 1:
            backwards = blocks - shard[f"blocks.{cfg.n_layer - 1}"]
            return self.micro_steps * (blocks + backwards * cfg.fsdp_reshard)
        total, there = 0, set()
        for chunk, forward in pipeline.passes(stage.index, cfg.pp, cfg.pp_chunks, self.micro_steps):
            if chunk not in there:
                total += sum(shard[f"blocks.{layer}"] for layer in stage.chunks[chunk])
            if forward:
                there.discard(chunk)
            else:
                there.add(chunk)
        return total

    def matmul_flops(self, stage: Stage) -> float:
        """Matmul FLOPs of a rank in a step: forward, backward and recomputation. Those in float8 count half."""
        cfg = self.cfg
        blocks = (self.flops - self.head_flops - self.fp8_flops / 2) * len(stage.layers) / cfg.n_layer
        sequence = blocks * RECOMPUTE[cfg.activation_checkpoint] + self.head_flops * stage.last
        return sequence * cfg.batch_size * self.micro_steps / (cfg.cp * cfg.tp)


def layout_of(cfg) -> dict[str, int]:
    """The sizes of the dimensions of a mesh of cfg.world_size ranks, outermost first; ValueError if the flags do not
    fit this number. With DDP, dp_shard is the number of copies of the model."""
    parallel.check_layout(cfg, cfg.world_size)
    data, replicas = parallel.data_ranks(cfg, cfg.world_size), parallel.replicas(cfg)
    return {"pp": cfg.pp, "dp_replicate": replicas, "dp_shard": data // replicas, "cp": cfg.cp, "tp": cfg.tp}


def compiled(cfg, device: torch.device) -> bool:
    """Whether the run will be compiled."""
    return cfg.compile is True or cfg.compile == "auto" and device.type == "cuda"


def imitate_gpu(parts: nn.ModuleList):
    """Make the parts take the memory of a GPU: its kernels keep no mask of attention's dropout, and as much for RMSNorm
    as for LayerNorm."""
    for m in parts.modules():
        if isinstance(m, nn.RMSNorm):
            m.forward = partial(gpu_norm, m)
        if isinstance(m, Pool):
            m.dropout = 0.0


def gpu_norm(m: nn.RMSNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, m.normalized_shape, m.weight.to(x.dtype))
