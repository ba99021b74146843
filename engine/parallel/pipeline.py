"""Pipeline parallelism: each rank has a stage of the blocks, and micro-batches pass through the stages (1F1B).

    keep_stage(model, rank, n_ranks)                             # before compilation, sharding and moves to a device
    pipeline = Pipeline(model, cfg, ranks)
    loss = pipeline.backward(batches)                            # once per step: p.grad of the mean loss
    loss = pipeline.loss(batch)                                  # evaluation

Every rank of a pipeline reads the same batches, and is idle for (n_ranks - 1) / (n_micro + n_ranks - 1) of a step. The
first stage also has the embedding, and the last stage the head.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from engine.config import Config
from engine.parallel.layout import local
from engine.parallel.ranks import Ranks, layers_of_stage
from model import Model, Shared, stream_dtype

DIVIDED = ("blocks", "wte", "pos", "first_norm", "norm", "head")  # attributes of a Model, each of which a stage owns


def check_model(model: Model, n_ranks: int):
    """ValueError if stages would not compute this model: it has parameters that no stage owns, or its layers exchange
    more than the stream."""
    for name, _ in model.named_parameters():
        if name.partition(".")[0] not in DIVIDED:
            fact = f"pp={n_ranks} divides the blocks, and every stage would train a copy of {name}"
            raise ValueError(f"{fact}; move it into a block or into {', '.join(DIVIDED[1:])}, or set pp=1")
    x = model.wte.weight.new_empty(1, 1, model.cfg.n_embd)
    idx = torch.zeros(1, 1, dtype=torch.int64, device=x.device)
    inputs = model.inputs(idx, idx[0], x)._replace(shared=Shared())
    with torch.no_grad():
        for block in model.blocks:
            x = block(x, inputs)
    if inputs.shared:
        names = ", ".join(inputs.shared)
        raise ValueError(f"pp={n_ranks} hands on only the stream, and a layer hands {names} to later layers; set pp=1")


def keep_stage(model: Model, rank: int, n_ranks: int) -> set[str]:
    """Remove from the model, in place, the parts that other ranks' stages own; the others keep their names. A tied
    weight stays on both ends. Returns the names of the parameters that another rank has too and counts."""
    check_model(model, n_ranks)
    n_layer = model.cfg.n_layer
    for layer in {*range(n_layer)}.difference(layers_of_stage(n_layer, rank, n_ranks)):
        delattr(model.blocks, str(layer))  # del model.blocks[layer] would renumber the other blocks
    if rank > 0:
        model.pos = nn.Identity()
        model.first_norm = nn.Identity()
    if rank < n_ranks - 1:
        model.norm = nn.Identity()
        model.head = nn.Identity()
        model.loss = lambda x, targets: x
    if model.cfg.tie_weights and rank == n_ranks - 1:
        return {"wte.weight"}
    if rank > 0:
        model.wte = nn.Identity()
    model.tie = lambda: None
    return set()


class StageModel(nn.Module):
    """A stage's part of the model, computed under autocast. x is idx in the first stage and the stream (B, T, C) in
    others, and `batch` holds the arguments of Model.forward. The result is the last stage's loss, or the stream."""

    def __init__(self, model: Model, autocast: Callable, first: bool):
        super().__init__()
        self.model = model
        self.autocast = autocast
        if not first:
            model.embed = self.embed

    def forward(self, x: Tensor, **batch: Tensor) -> Tensor:
        self.received = x
        with self.autocast():
            return self.model(**batch)

    def embed(self, idx: Tensor, start: int, docs: tuple[Tensor, ...] | None) -> tuple[Tensor, Tensor]:
        x = self.received
        return x, self.model.positions(torch.arange(start, start + idx.size(1), device=x.device))


class Stage(PipelineStage):
    """A stage that lets FSDP reduce gradients in its last backward. The schedule sees no FSDP in a StageModel."""

    def backward_one_chunk(self, *args, last_backward: bool = False, **kwargs):
        if last_backward:
            reduce_in_backward(True, self.submod.model)
        super().backward_one_chunk(*args, last_backward=last_backward, **kwargs)


def reduce_in_backward(on: bool, model: nn.Module):
    """Whether FSDP, if it wraps the model, reduces gradients and frees weights in the next backward, or keeps both."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(on)
        model.set_requires_gradient_sync(on)
        model.set_reshard_after_backward(on)


class Pipeline:
    """This rank's stage of a pipeline, with the schedule of its micro-batches. The model is what keep_stage leaves; it
    may be sharded by fully_shard."""

    def __init__(self, model: Model, cfg: Config, ranks: Ranks):
        self.model = model
        self.group = ranks.mesh["pp"].get_group()
        self.device = ranks.device
        self.rank = dist.get_rank(self.group)
        self.n_ranks = cfg.pp
        self.first = self.rank == 0
        self.last = self.rank == cfg.pp - 1
        self.length = cfg.block_size // (cfg.cp * cfg.tp)  # of the stream
        with ranks.autocast():
            self.dtype = stream_dtype(cfg, torch.empty(0, device=self.device))
        # Without these examples, the first step would run an extra forward and backward to find shapes and dtypes.
        with torch.device("meta"):
            idx = torch.empty(cfg.batch_size, cfg.block_size // cfg.cp, dtype=torch.int64)
            stream = self.stream(cfg.batch_size, "meta").requires_grad_()
            loss = torch.empty((), requires_grad=True)
        x = idx if self.first else stream
        y = loss if self.last else stream
        self.part = StageModel(model, ranks.autocast, self.first)
        stage = Stage(self.part, self.rank, cfg.pp, self.device, x, y, group=self.group)
        n_micro = cfg.gradient_accumulation_steps // ranks.data_size
        # scale_grads=True would divide the sum of all gradients at the end, instead of each loss.
        self.schedule = Schedule1F1B(stage, n_micro, lambda loss, targets: loss / n_micro, scale_grads=False)
        # NCCL connects a group in its first collective.
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)

    def stream(self, n: int, device) -> Tensor:
        """An empty stream of n sequences, as a stage receives it."""
        return torch.empty(n, self.length, self.model.cfg.n_embd, dtype=self.dtype, device=device)

    def backward(self, batches: list[dict[str, Tensor]]) -> Tensor:
        """The mean loss, detached, of n_micro batches (arguments of Model.forward by name); 0 before the last stage.
        Its gradient is left in p.grad, which must be None before: those of the ends of a tied weight are added once."""
        batch = {name: [each[name] for each in batches] for name in batches[0]}
        if "doc_starts" in batch:  # whose widths differ
            n = max(x.size(1) for x in batch["doc_starts"])
            T = batch["docs"][0].size(1)
            batch["doc_starts"] = [F.pad(x, (0, n - x.size(1)), value=T) for x in batch["doc_starts"]]
        batch = {name: torch.cat(parts) for name, parts in batch.items()}  # the schedule splits it
        args = (batch["idx"],) if self.first else ()
        losses: list[Tensor] = []
        reduce_in_backward(False, self.model)
        self.schedule.step(*args, target=batch["targets"], losses=losses, return_outputs=False, **batch)
        self._sum_tied()
        return sum((loss.detach() for loss in losses), torch.zeros((), device=self.device))

    @torch.no_grad()
    def _sum_tied(self):
        """Add the gradients of embedding and head for a tied weight. Both ends get the same bits."""
        if not self.model.cfg.tie_weights or not (self.first or self.last):
            return
        mine = local(self.model.wte.weight.grad)  # both ends are sharded alike
        other = torch.empty_like(mine)
        peer = {"group": self.group, "group_peer": self.n_ranks - 1 - self.rank}
        ops = [dist.P2POp(dist.isend, mine, **peer), dist.P2POp(dist.irecv, other, **peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        mine += other

    @torch.no_grad()
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean loss of a batch of any size B; 0 before the last stage."""
        x = batch["idx"]
        if not self.first:
            x = self.stream(len(x), self.device)
            dist.recv(x, group=self.group, group_src=self.rank - 1)
        x = self.part(x, **batch)
        if self.last:
            return x
        dist.send(x, group=self.group, group_dst=self.rank + 1)
        return torch.zeros((), device=self.device)
