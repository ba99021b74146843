"""Pipeline parallelism: each rank has one stage of the blocks, and micro-batches pass through the stages (1F1B).

    check(cfg, n_stages, n_micro)                                # before the process group exists
    keep_stage(model, stage, n_stages)                           # before compilation, sharding and moves to a device
    pipeline = Pipeline(model, group, n_micro, (B, T), device, ranks.autocast)
    loss = pipeline.backward(batches)                            # once per step: p.grad of the mean loss
    loss = pipeline.loss(batch)                                  # evaluation

Every rank of a pipeline reads the same batches, and is idle for (stages - 1) / (n_micro + stages - 1) of a step. Stages
have equally many blocks, or some have one block more; the first stage also has the embedding, and the last stage the
head. PyTorch allocates a buffer for each input of the n_micro micro-batches.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

from data.errors import require
from model import Inputs, Model, ModelConfig, Shared, stream_dtype


def check(cfg: ModelConfig, n_stages: int, n_micro: int):
    """ValueError unless stages exchange the stream alone, have a block each, and at least as many micro-batches."""
    require(
        cfg.objective != "seq2seq", f"pp={n_stages} cuts one stack of blocks, and objective=seq2seq has two; use tp"
    )
    require(
        not cfg.value_residual,
        f"pp={n_stages} hands on only the stream, and value_residual=True needs the first layer's values; set pp=1",
    )
    plain = cfg.n_expert == 0 or cfg.router_balance != "loss" and cfg.router_z_loss == 0
    fact = "losses of routers reach the last stage's loss from one stage alone"
    require(plain, f"pp={n_stages}: {fact}; set router_balance=bias and router_z_loss=0, or pp=1")
    require(
        cfg.n_layer >= n_stages,
        f"pp={n_stages} stages need a block each, and n_layer={cfg.n_layer}; set pp to {cfg.n_layer} or less",
    )
    require(
        n_micro >= n_stages,
        f"pp={n_stages} needs as many micro-batches per step, and gradient_accumulation_steps leaves {n_micro} to each "
        f"pipeline; set gradient_accumulation_steps to at least {-(-n_stages // n_micro)} times as many",
    )


def keep_stage(model: Model, stage: int, n_stages: int, slices: int = 1) -> set[str]:
    """Remove from the model, in place, the parts that other stages own; the others keep their names. ValueError if
    layers exchange more than the stream. Returns the names of the parameters that another stage has too and counts.

    model(x, targets) is then the stage: x is idx on the first stage and the stream (B, T, C) on others, and the result
    is the loss on the last stage and the stream on others. A tied weight stays on both ends. Tensor parallelism, which
    may be applied afterwards, cuts the stream along T into so many slices.
    """
    x = model.wte.weight.new_empty(1, 1, model.cfg.n_embd)
    inputs = Inputs(model.table(torch.arange(1, device=x.device), x), shared=Shared())
    with torch.no_grad():
        for block in model.blocks:
            x = block(x, inputs)
    names = ", ".join(inputs.shared)
    require(not names, f"pp={n_stages} hands on only the stream, and a layer hands {names} to later layers; set pp=1")
    n_layer, first, last = model.cfg.n_layer, stage == 0, stage == n_stages - 1
    tied = model.cfg.tie_weights
    begin, end = (-(-n_layer * i // n_stages) for i in (stage, stage + 1))
    for layer in set(range(n_layer)) - set(range(begin, end)):
        delattr(model.blocks, str(layer))  # del model.blocks[layer] would renumber the other blocks
    if not first:
        model.pos, model.first_norm = nn.Identity(), nn.Identity()

        def embed(x: Tensor, start: int, docs: Tensor | None = None) -> tuple[Tensor, Tensor]:
            return x, model.place(torch.arange(start, start + x.size(1) * slices, device=x.device))

        model.embed = embed
    if not last:
        model.norm = nn.Identity()
        model.head = nn.Identity()
        model.loss = lambda x, targets: x  # stages exchange the stream
    if not first and not (last and tied):
        model.wte = nn.Identity()
    if not (last and tied):
        model.tie = lambda: None
    return {"wte.weight"} if last and tied else set()


class Pipeline:
    """One stage of a pipeline, with the schedule of its micro-batches.

    model      the stage that keep_stage leaves; it may be sharded by fully_shard
    group      the ranks of this pipeline, at least two, in the order of their stages
    shape      (B, T) of a micro-batch on this rank
    autocast   returns the context manager for forwards
    slices     into which tensor parallelism cuts the stream along T
    """

    def __init__(
        self,
        model: Model,
        group: dist.ProcessGroup,
        n_micro: int,
        shape: tuple[int, int],
        device: torch.device,
        autocast: Callable[[], AbstractContextManager],
        slices: int = 1,
    ):
        self.model, self.group, self.device = model, group, device
        self.stage, n_stages = dist.get_rank(group), dist.get_world_size(group)
        self.last, self.length = n_stages - 1, shape[1] // slices  # of the stream
        forward = model.forward

        def forward_in_autocast(*args, **kwargs) -> Tensor:  # the schedule also runs backwards, which need no autocast
            with autocast():
                return forward(*args, **kwargs)

        model.forward = forward_in_autocast
        # Without these examples, the first step would run an extra forward and backward to find shapes and dtypes.
        with autocast():
            self.dtype = stream_dtype(model.cfg, torch.empty(0, device=device))
        sizes = shape[0], self.length, model.cfg.n_embd
        stream = torch.empty(sizes, dtype=self.dtype, device="meta", requires_grad=True)
        x = torch.empty(shape, dtype=torch.int64, device="meta") if self.stage == 0 else stream
        y = torch.empty((), device="meta", requires_grad=True) if self.stage == self.last else stream
        stage = PipelineStage(model, self.stage, n_stages, device, x, y, group=group)
        # scale_grads=True would divide the sum of all gradients at the end, instead of each loss.
        self.schedule = Schedule1F1B(stage, n_micro, lambda loss, targets: loss / n_micro, scale_grads=False)
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # NCCL connects a group in its first collective

    def backward(self, batches: list[dict[str, Tensor]]) -> Tensor:
        """The mean loss, detached, of n_micro batches (arguments of Model.forward by name); 0 before the last stage.

        Its gradient is left in p.grad, which must be None before, because the gradients of both ends of a tied weight
        are added once.
        """
        assert all(p.grad is None for p in self.model.parameters())
        batch = {name: [each[name] for each in batches] for name in batches[0]}
        if "doc_starts" in batch:  # whose widths differ
            n, T = max(x.size(1) for x in batch["doc_starts"]), batch["docs"][0].size(1)
            batch["doc_starts"] = [F.pad(x, (0, n - x.size(1)), value=T) for x in batch["doc_starts"]]
        batch = {name: torch.cat(parts) for name, parts in batch.items()}  # the schedule splits it
        idx, losses = batch.pop("idx"), []
        args = (idx,) if self.stage == 0 else ()
        self.schedule.step(*args, target=batch["targets"], losses=losses, return_outputs=False, **batch)
        self._sum_tied()
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.device)

    @torch.no_grad()
    def _sum_tied(self):
        """Add the gradients of embedding and head for a tied weight. Both ends get the same bits."""
        if not self.model.cfg.tie_weights or self.stage not in (0, self.last):
            return
        grad = self.model.wte.weight.grad
        mine = grad.to_local() if isinstance(grad, DTensor) else grad  # both ends are sharded alike
        other, peer = torch.empty_like(mine), self.last - self.stage
        ops = [
            dist.P2POp(op, x, group=self.group, group_peer=peer) for op, x in ((dist.isend, mine), (dist.irecv, other))
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        mine += other

    @torch.no_grad()
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean loss of a batch of any size B; 0 before the last stage."""
        batch = dict(batch)
        x = batch.pop("idx")
        if self.stage > 0:
            x = torch.empty(len(x), self.length, self.model.cfg.n_embd, dtype=self.dtype, device=self.device)
            dist.recv(x, group=self.group, group_src=self.stage - 1)
        y = self.model(x, **batch)
        if self.stage == self.last:
            return y
        dist.send(y, group=self.group, group_dst=self.stage + 1)
        return torch.zeros((), device=self.device)
