"""Estimates what one rank of a run takes and sends, for --plan.

What blocks take and send is measured on fake tensors. The rest are formulas, which round up: FSDP is taken to gather
what is in no block in float32, and a rank of a pipeline to have both ends of the model and the last layers, as many as
the first rank has. Scalars, token ids and what ranks exchange in the loss are not counted.
"""

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import ops
from data.objective import objective_class
from engine import fp8
from engine.optim import OPTIMIZER, Balance, Muon, hidden_matrices, state_bytes
from engine.parallel import context, expert, ranks, stages, tensor
from engine.parallel.recomputation import recompute
from engine.parallel.sharded import load_biases
from engine.plan.accounting import skeleton
from engine.plan.measure import block_costs
from model import Block, ExpertLinear, Heads, Model

GPU = torch.device("cuda")


class Rank:
    """The rank that has most to do in a run of cfg.world_size GPUs. It needs no other rank.

    memory      bytes by kind; total has those on the device at the worst moment, host those on the host
    traffic     kind of group -> bytes that the rank sends in a step to ranks of this group
    groups      kind of group -> (number of ranks, distance between consecutive ranks)
    """

    def __init__(self, cfg):
        self.cfg = cfg = copy.copy(cfg)
        self.dtype = torch.bfloat16 if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
        cfg.fp32_residual = ops.wide_stream(cfg.fp32_residual, GPU, self.dtype)
        ranks.check_scaler(cfg, cfg.world_size, self.dtype)
        ranks.check_layout(cfg, cfg.world_size)
        self.fsdp = cfg.parallel == "fsdp" and cfg.world_size > 1
        self.groups = groups(cfg)
        self.micro_steps = cfg.gradient_accumulation_steps // ranks.data_ranks(cfg, cfg.world_size)
        objective = cfg.vocab_size, 0, cfg.block_size, cfg.doc_mask, cfg.corrupt_ratio, cfg.span_length
        self.lengths = objective_class(cfg)(*objective).lengths
        self.size = self.dtype.itemsize
        width = 4 if cfg.fp32_residual else self.size
        self.streams = [width * cfg.batch_size * n * cfg.n_embd // cfg.cp // cfg.tp for n in self.lengths]
        self.n_layer = sum(map(len, stages.layers(cfg.n_layer, 0, cfg.pp, cfg.pp_chunks)))
        model = skeleton(cfg)
        self.traffic = Counter()
        self.count_weights(model)
        with as_in_training(model, cfg, self.lengths):
            costs = block_costs(model, cfg, self.lengths, self.dtype, self.dtype if self.fsdp else torch.float32)
        self.blocks = costs[: -cfg.n_layer] + costs[-self.n_layer :]  # those of the encoder are first
        self.send()
        self.take_memory()

    def count_weights(self, model: Model):
        self.held = Counter()  # numbers in this rank's shard, by optimizer
        self.gathered = Counter()  # numbers in all shards, by block; "" has what is in none
        self.state = 0  # bytes of the optimizer's state
        self.owned = 0.0  # numbers that Muon orthogonalises here,
        self.muon_flops = 0.0  # and the FLOPs for it
        optimizer = OPTIMIZER[self.cfg.optimizer]
        trained_by = dict.fromkeys(load_biases(model), Balance)
        if optimizer.muon:
            trained_by |= dict.fromkeys(hidden_matrices(model), Muon)
        elsewhere = tuple(f"blocks.{layer}." for layer in range(self.cfg.n_layer - self.n_layer))
        for name, p in model.named_parameters():
            if not name.startswith(elsewhere):
                self.count_weight(model, name, p, trained_by.get(p, optimizer.rest))

    def count_weight(self, model: Model, name: str, p: nn.Parameter, optimizer: type):
        """Count a weight, and what ranks send of it and of its gradient."""
        cfg = self.cfg
        group = cfg.parallel
        rows = len(p)
        if cfg.ep > 1 and isinstance(model.get_submodule(name.rpartition(".")[0]), ExpertLinear):
            group = "experts"
            rows //= cfg.ep
        n = rows * (p.numel() // len(p))
        if cfg.tp > 1 and tensor.sharded_dim(model, name) is not None:
            n //= cfg.tp
        else:
            self.traffic["tp"] += self.all_reduce("tp", n)
        held = n
        if self.fsdp:  # which cuts between rows
            held = -(-rows // self.groups[group][0]) * n // rows
        block = name.partition(".sums.")[0] if "blocks." in name else ""
        self.held[optimizer] += held
        self.gathered[block] += n
        self.state += state_bytes(optimizer, held)
        if cfg.ema_decay:
            self.state += 4 * held
        if optimizer is Muon:
            owned = p.numel() / self.groups["muon"][0]
            self.owned += owned
            self.muon_flops += 30 * min(p.shape[-2:]) * owned
        self.traffic[group] += self.sent_of(block, group, held)
        self.traffic["hsdp"] += self.all_reduce("hsdp", held)

    def all_reduce(self, group: str, numbers: int) -> float:
        """Bytes that a rank sends in an all-reduce of gradients."""
        n, _ = self.groups[group]
        return 2 * (n - 1) / n * 4 * numbers

    def sent_of(self, block: str, group: str, held: int) -> float:
        """Bytes that a rank sends to data-parallel ranks of a weight and of its gradient, which is reduced in float32.
        FSDP gathers blocks for the backward too; in a pipeline, this serves the next forward."""
        if not self.fsdp:
            return self.all_reduce(group, held)
        cfg = self.cfg
        gathers = 1 if cfg.pp > 1 else self.micro_steps
        reductions = gathers if cfg.fsdp_reshard else 1
        if block and cfg.fsdp_reshard:
            gathers = self.micro_steps + cfg.pp - 1 if cfg.pp > 1 else 2 * self.micro_steps
        width = self.size if block else 4
        n, _ = self.groups[group]
        return (n - 1) * held * (width * gathers + 4 * reductions)

    def send(self):
        """Count what ranks send of activations and of Muon's updates."""
        cfg = self.cfg
        for cost in self.blocks:
            self.traffic.update({kind: n * self.micro_steps for kind, n in cost.sent.items()})
        # there and back: the embeddings, what the decoder reads of the encoder, and the loss
        self.traffic["tp"] += 4 * self.micro_steps * (cfg.tp - 1) * sum(self.streams)
        if cfg.pp > 1:  # as a rank in the middle
            self.traffic["pp"] = 2 * cfg.pp_chunks * self.micro_steps * self.streams[0]
        n = self.groups["muon"][0]
        self.traffic["muon"] = self.size * (self.held[Muon] + self.owned) * (n - 1) / n

    def take_memory(self):
        cfg = self.cfg
        parameters = 4 * self.held.total()
        states = 2 * parameters + self.state
        self.memory = {"parameters": parameters, "gradients": parameters, "optimizer state": self.state}
        self.memory |= self.copies()
        kept = 2 * self.streams[0] + (2 + cfg.tp) * self.streams[1]  # embeddings with dropout, and the memory
        kept += sum(cost.kept for cost in self.blocks) // cfg.pp_chunks
        steps = (1 if forward else -1 for _, forward in stages.passes(0, cfg.pp, cfg.pp_chunks, self.micro_steps))
        self.memory["activations"] = kept * max(accumulate(steps))  # of all passes in flight
        self.memory["streams received"] = self.traffic["pp"]  # for each of which PyTorch allocates a buffer
        loss = self.loss()
        backward = max(cost.backward for cost in self.blocks)
        self.total = sum(self.memory.values()) + max(loss, backward)
        owned = int(self.owned)
        update = (4 + 2 * self.size) * self.held[Muon] + self.size * owned + 16 * min(owned, Muon.LARGEST)
        self.memory |= {"logits and loss": loss, "backward of a block": backward, "update by Muon": update}
        self.host = states if self.fsdp and cfg.fsdp_offload else 0
        self.total = max(self.total, states + update) - self.host

    def copies(self) -> dict[str, int]:
        """Copies of weights and gradients. FSDP gathers a block while another computes, and reduces its gradients in
        float32. What is in no block stays gathered, in a pipeline all weights; then only the last micro-step reduces
        gradients."""
        blocks = [n for block, n in self.gathered.items() if block]
        if not self.fsdp:
            return {"weights cast by autocast": self.size * sum(blocks) if self.size < 4 else 0}
        rest = 4 * self.gathered[""]
        gathered = 2 * self.size * max(blocks)
        gradients = (self.size + 4) * max(blocks)
        if self.cfg.pp > 1 or not self.cfg.fsdp_reshard:
            gathered = self.size * sum(blocks)
            if self.micro_steps > 1:
                gradients = 4 * sum(blocks)
        return {"gathered weights": rest + gathered, "unsharded gradients": rest + gradients}

    def loss(self) -> int:
        """Bytes of the last norm's result, gathered with its gradient, of the head's gradient, and of a chunk's logits
        with their gradient. An uncompiled loss keeps logits and logarithms in float32 too."""
        cfg = self.cfg
        vocab = cfg.vocab_rows // cfg.tp
        tokens = cfg.batch_size * self.lengths[0] // cfg.cp
        rows = ops.equal_rows(tokens, ops.rows_at_once(cfg.loss_chunk, vocab, GPU))
        of_weight = 4
        of_logit = 2 * self.size
        if self.size < 4:
            of_weight += self.size
        if not cfg.compile:
            of_logit += 8 * ((self.size < 4) + (cfg.logit_softcap > 0))
        return 3 * cfg.tp * self.streams[0] + vocab * (cfg.n_embd * of_weight + rows * of_logit)


def groups(cfg) -> dict[str, tuple[int, int]]:
    data = ranks.data_ranks(cfg, cfg.world_size)
    copies = ranks.replicas(cfg)
    shards = data * cfg.cp // copies
    return {
        "tp": (cfg.tp, 1),
        "cp": (cfg.cp, cfg.tp),
        "ep": (cfg.ep, cfg.tp),
        "experts": (shards // cfg.ep, cfg.ep * cfg.tp),
        cfg.parallel: (shards, cfg.tp),
        "hsdp": (copies, shards * cfg.tp),
        "muon": (cfg.world_size // cfg.pp, 1),
        "pp": (cfg.pp, cfg.world_size // cfg.pp),
    }


@contextmanager
def as_in_training(model: Model, cfg, lengths: tuple[int, int]) -> Iterator[None]:
    """The model cut and changed in place as in training on GPUs, among ranks that do not exist."""
    takes_flash = ops.takes_flash
    ops.takes_flash = lambda _, *given: takes_flash("cuda", *given)  # fake tensors are on the CPU
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(cfg.tp, cfg.cp, cfg.ep))
    try:
        if cfg.tp > 1:
            tensor.apply_tensor_parallel(model, dist.new_group([*range(cfg.tp)], group_desc="tp"))
        if cfg.cp > 1:
            context.apply_context_parallel(model, dist.new_group([*range(cfg.cp)], group_desc="cp"))
        if cfg.ep > 1:
            expert.apply_expert_parallel(model, dist.new_group([*range(cfg.ep)], group_desc="ep"))
        if cfg.fp8:
            fp8.check(cfg, lengths)
            fp8.apply(model)
        for m in model.modules():
            if isinstance(m, Block) and cfg.activation_checkpoint != "none":
                recompute(m, cfg.activation_checkpoint)
            if isinstance(m, Heads):
                m.dropout = 0.0  # of which a GPU's kernels keep no mask
        yield
    finally:
        ops.takes_flash = takes_flash
        dist.destroy_process_group()
