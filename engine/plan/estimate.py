"""Estimates what one rank of a run takes and sends. --plan and the refusal of runs that cannot fit read it.

    rank = estimate_rank(cfg)       # of cfg.world_size ranks; needs no other rank, and no GPU
    kinds, on_device, on_host = rank.memory()
    sent = [rank.traffic(stage) for stage in rank.stages]

A block and the loss run forward and backward on fake tensors, cut and wrapped as in training, so their memory and
their traffic follow every flag. The memory and the traffic of FSDP, DDP, Muon and pipelines are closed forms. Scalars,
tables of positions and token ids are not counted.
"""

import copy
import warnings
from collections import Counter
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import ops
from data.objective import objective_class
from engine import fp8
from engine.optim import OPTIMIZER, Balance, Muon, hidden_matrices, iteration_dtype, state_bytes, update_bytes
from engine.parallel import context as context_parallel
from engine.parallel import expert as expert_parallel
from engine.parallel import ranks as parallel
from engine.parallel import stages
from engine.parallel import tensor as tensor_parallel
from engine.parallel.fsdp import fsdp_units, kept_whole
from engine.parallel.owners import Matrix, Owners, cuts, place
from engine.parallel.recomputation import recompute
from engine.parallel.sharded import load_biases
from engine.plan.accounting import attention_kernels, flops, linear_flops
from engine.plan.measure import Parts
from model import ExpertLinear, Model
from ops import wide_stream

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


class Weight(NamedTuple):
    """A parameter, and what ranks have of it."""

    unit: str  # the unit of FSDP that gathers it, or "gains" if none does
    numbers: int  # of a rank, before FSDP shards them
    held: int  # of them in the first shard, which is the largest
    of_experts: bool  # whether ep divides it, so that fewer ranks shard it
    matrix: Matrix
    tp_dim: int | None  # the dimension that tp cuts
    trained_by: type
    is_cast: bool  # whether autocast casts it to 16 bits


class Stage:
    """The weights of a pipeline's rank, in one or several stages; without a pipeline, of the model.

    numbers    of a rank before FSDP shards them, by units
    shards     those in the first shard: without the experts that ep divides, and of these experts
    """

    def __init__(self, cfg, index: int, weights: dict[str, Weight]):
        self.index, self.first, self.last = index, index == 0, index == cfg.pp - 1
        self.chunks = stages.layers(cfg.n_layer, index, cfg.pp, cfg.pp_chunks)
        self.layers = [layer for chunk in self.chunks for layer in chunk]
        # streams that it sends for a micro-batch, and as many that it receives: both ways, but not at the ends
        self.streams = 2 * cfg.pp_chunks - self.first - self.last
        others = tuple(f"{path}." for path in stages.elsewhere(cfg, index, cfg.pp, cfg.pp_chunks))
        self.weights = {name: w for name, w in weights.items() if not name.startswith(others)}
        self.numbers, self.shards = Counter(), {False: Counter(), True: Counter()}
        for w in self.weights.values():
            self.numbers[w.unit] += w.numbers
            self.shards[w.of_experts][w.unit] += w.held


class Rank:
    """One rank's model on fake tensors, and the memory, the traffic and the FLOPs of this rank.

    It is rank 0, which under cp keeps the most keys.
    """

    def __init__(self, cfg, device: torch.device):
        self.cfg = cfg = copy.copy(cfg)
        self.dtype = torch.bfloat16 if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
        cfg.fp32_residual = wide_stream(cfg.fp32_residual, device, self.dtype)
        self.layout = layout_of(cfg)
        self.micro_steps = cfg.gradient_accumulation_steps // parallel.data_ranks(cfg, cfg.world_size)
        self.fsdp = cfg.parallel == "fsdp" and cfg.world_size > 1
        self.offload = self.fsdp and cfg.fsdp_offload
        self.optimizer = OPTIMIZER[cfg.optimizer]
        objective = cfg.vocab_size, 0, cfg.block_size, cfg.doc_mask, cfg.corrupt_ratio, cfg.span_length
        lengths = objective_class(cfg)(*objective).lengths
        with torch.device("meta"):
            model = Model(cfg)
        pieces = 2 * cfg.cp if cfg.cp > 1 else 1  # of each text
        self.attention = attention_kernels(model, *lengths, device.type, self.dtype, pieces)
        self.n_params, self.flops = model.n_params(), flops(model, *lengths)
        self.head_flops = 6 * model.head.weight.numel() * lengths[0]
        in_float8 = [*fp8.layers(model).values()] if cfg.fp8 else []
        of_layers = linear_flops(model, *lengths)
        self.fp8_flops = sum(of_layers[m] for m in in_float8)
        weights = self.weights_of(model, {m.weight for m in in_float8})
        self.stages = [Stage(cfg, i, weights) for i in range(cfg.pp)]
        self.wrap(model, lengths, device)
        with FakeTensorMode():
            self.allocate(model, weights)
            self.parts = Parts(model, cfg, lengths, self.dtype, device)

    def weights_of(self, model: Model, in_float8: set[nn.Parameter]) -> dict[str, Weight]:
        """The parameters of the whole model, by name."""
        cfg, loads = self.cfg, load_biases(model)
        unit = {} if cfg.fsdp_offload else dict.fromkeys(kept_whole(model), "gains")
        for name, modules in fsdp_units(model).items():
            for p in (p for module in modules for p in module.parameters()):
                unit.setdefault(p, name)
        hidden = hidden_matrices(model) if self.optimizer.muon else {}
        sizes = [self.group(kind)[0] for kind in ("hsdp", "fsdp", "tp")]
        weights = {}
        for name, p in model.named_parameters():
            ep = cfg.ep if isinstance(model.get_submodule(name.rpartition(".")[0]), ExpertLinear) else 1
            tp_dim = tensor_parallel.sharded_dim(model, name) if cfg.tp > 1 else None
            sharded = self.fsdp and unit[p] != "gains"
            matrix = Matrix(tuple(p.shape), hidden.get(p), cuts(sizes, sharded, tp_dim, ep))
            weights[name] = Weight(
                unit=unit[p],
                numbers=p.numel() // ep // (1 if tp_dim is None else cfg.tp),
                held=place(matrix, 0)[1],
                of_experts=ep > 1,
                matrix=matrix,
                tp_dim=tp_dim,
                trained_by=Muon if p in hidden else Balance if p in loads else self.optimizer.rest,
                is_cast="blocks." in name and p.dim() == 2 and p not in in_float8,
            )
        return weights

    def wrap(self, model: Model, lengths: tuple[int, int], device: torch.device):
        """Cut and wrap the model as in training."""
        cfg = self.cfg
        if cfg.tp > 1:
            self.tp_group = self.new_group("tp")
            tensor_parallel.apply_tensor_parallel(model, self.tp_group)
        if cfg.cp > 1:
            context_parallel.apply_context_parallel(model, self.new_group("cp"))
        if cfg.ep > 1:
            expert_parallel.apply_expert_parallel(model, self.new_group("ep"))
        if cfg.fp8:
            fp8.check(cfg, lengths)
            fp8.apply(model)
        if cfg.activation_checkpoint != "none":
            for block in [*model.blocks, *(model.encoder.blocks if model.encoder else ())]:
                recompute(block, cfg.activation_checkpoint)
        if compiled(cfg, device):
            model.chunk_loss = self.compiled_chunk_loss

    def allocate(self, model: Model, weights: dict[str, Weight]):
        """Make fake tensors of the model's parameters; FSDP gathers blocks and head in the dtype of matrix products."""
        for name, p in [*model.named_parameters()]:
            unit, (path, _, kind) = weights[name].unit, name.rpartition(".")
            gathered = self.fsdp and ("blocks." in unit or unit == "head")
            full = torch.empty(p.shape, dtype=self.dtype if gathered else p.dtype)
            setattr(model.get_submodule(path), kind, nn.Parameter(full))
        model.tie()

    def compiled_chunk_loss(self, z: Tensor, *args, **terms) -> tuple[Tensor, Tensor]:
        """What a compiled Model.chunk_loss sends and keeps: its results alone."""
        if self.cfg.tp > 1:
            for numbers in (1, 2):  # of a token
                dist.all_reduce(torch.empty(len(z), numbers), group=self.tp_group)
        return torch.zeros(()), torch.empty_like(z)

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

    # ---- memory

    def static_memory(self, stage: Stage) -> dict[str, int]:
        """Bytes of a stage that do not depend on the batch, by kind.

        FSDP gathers a block while the block before it computes. The root is gathered in float32; with the ends of the
        model it stays gathered. In a pipeline, weights stay gathered from a backward to the next forward. A block's
        gradients are reduced in float32 while other gradients are computed; if weights stay gathered, only the last
        micro-step reduces them.
        """
        cfg, size, weights = self.cfg, self.dtype.itemsize, stage.weights.values()
        parameters = 4 * sum(w.held for w in weights)
        optimizer = sum(state_bytes(w.trained_by, w.held) for w in weights)
        if cfg.ema_decay > 0:
            optimizer += parameters
        states = dict(zip(STATES, (parameters, parameters, optimizer), strict=True))
        if not self.fsdp:
            cast = size * sum(w.numbers for w in weights if w.is_cast) if size < 4 else 0
            return states | {"weights cast by autocast": cast}
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
        hidden = {name: w.matrix for name, w in stage.weights.items() if w.trained_by is Muon}
        return Owners(hidden, None, iteration_dtype(self.dtype))

    def memory(self) -> tuple[dict[str, int], int, int]:
        """Of a rank of the stage that needs most: bytes by kind, bytes on the device at the worst moment, which is in
        the loss, in a block's backward, or in the update, and bytes on the host."""
        return max((self.stage_memory(stage) for stage in self.stages), key=itemgetter(1))

    def stage_memory(self, stage: Stage) -> tuple[dict[str, int], int, int]:
        """`memory` of a rank of one stage."""
        blocks = self.parts.blocks
        kept = [sum(blocks[layer].kept for layer in chunk) for chunk in stage.chunks]
        if stage.first:
            kept[0] += sum(cost.kept for cost in self.parts.before)
        passes = stages.passes(stage.index, self.cfg.pp, self.cfg.pp_chunks, self.micro_steps)
        in_flight = accumulate(kept[chunk] if forward else -kept[chunk] for chunk, forward in passes)
        parts = self.static_memory(stage) | {
            "activations": max(in_flight),
            "logits and loss": self.parts.loss.peak * stage.last,
            "backward of a block": max(blocks[layer].peak - blocks[layer].kept for layer in stage.layers),
        }
        if self.cfg.pp > 1:  # PyTorch allocates a buffer for each stream that a stage receives in a step
            parts["streams received"] = self.micro_steps * self.parts.stream * stage.streams
        states = sum(parts[kind] for kind in STATES)
        most = sum(parts.values()) - min(parts["logits and loss"], parts["backward of a block"])
        if self.optimizer.muon:
            owners = self.owners(stage)
            parts["update by Muon"] = update_bytes(owners, sum(stage.weights[name].held for name in owners.matrices))
            most = max(most, states + parts["update by Muon"])
        on_host = states if self.offload else 0
        return parts, most - on_host, on_host

    # ---- traffic and FLOPs

    def traffic(self, stage: Stage) -> dict[str, float]:
        """kind -> bytes that a rank of the stage sends in a step to ranks of `group(kind)`."""
        cfg, sent = self.cfg, Counter()
        numbers, of_experts = (shard.total() for shard in stage.shards.values())
        if self.fsdp:
            sent.update(self.fsdp_traffic(stage, "fsdp", stage.shards[False]))
            sent.update(self.fsdp_traffic(stage, "experts", stage.shards[True]))
            sent["hsdp all-reduce"] = self.all_reduce("hsdp", numbers + of_experts)
        else:
            sent["ddp all-reduce"] = self.all_reduce("ddp", numbers)
            sent["experts all-reduce"] = self.all_reduce("experts", of_experts)
        parts = [self.parts.blocks[layer] for layer in stage.layers]
        if stage.first:
            parts += self.parts.before
        if stage.last:
            parts.append(self.parts.loss)
        for cost in parts:
            sent.update({kind: n * self.micro_steps for kind, n in cost.sent.items()})
        if cfg.tp > 1:  # gradients of uncut parameters
            uncut = sum(w.held for w in stage.weights.values() if w.tp_dim is None)
            sent["tp all-reduce"] += self.all_reduce("tp", uncut)
        if cfg.pp > 1:
            streams = self.micro_steps * stage.streams * self.parts.stream
            tied = 4 * stage.weights["wte.weight"].held if cfg.tie_weights and (stage.first or stage.last) else 0
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
        for chunk, forward in stages.passes(stage.index, cfg.pp, cfg.pp_chunks, self.micro_steps):
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
