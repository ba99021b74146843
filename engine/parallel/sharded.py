"""Builds this rank's shard of the model, and runs one training step on it, for every layout of the ranks.

The constructor cuts and wraps the model on the meta device, and then allocates it. It applies, in order: a pipeline's
stage, tensor, context and expert parallelism, recomputation, compilation (before it with ep), FSDP2 or DDP.
docs/hacking.md has a table of what they replace in model.py.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh

from data.objective import objective_class
from engine.config import Config
from engine.parallel import compilation
from engine.parallel.context import apply_context_parallel, local_pieces
from engine.parallel.expert import apply_expert_parallel
from engine.parallel.fsdp import kept_whole, shard
from engine.parallel.initial import check_initial
from engine.parallel.layout import Layout, Slice, local, place
from engine.parallel.ranks import Ranks, gather, on_first_rank
from engine.parallel.recomputation import recompute
from engine.parallel.tensor import apply_tensor_parallel, sharded_dim
from model import Block, LoadBalance, Model, Stack


def load_biases(model: nn.Module) -> set[nn.Parameter]:
    """The biases that balance the loads of experts. Their gradients are loads."""
    return {m.bias for m in model.modules() if isinstance(m, LoadBalance)}


def all_reduce_gradients(params: Iterable[nn.Parameter], mesh: DeviceMesh, mean: bool = True):
    """Average the parameters' gradients over the ranks of a mesh, or with mean=False sum them, in one message."""
    grads = [local(p.grad) for p in params if p.grad is not None]
    if mesh.size() == 1 or not grads:
        return
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat, group=mesh.get_group())
    if mean:
        flat *= 1 / mesh.size()
    torch._foreach_copy_(grads, _unflatten_dense_tensors(flat, grads))


class ShardedModel:
    """This rank's shard of the model. Parameters keep their names, and have no values yet."""

    def __init__(self, cfg: Config, ranks: Ranks):
        self.cfg = cfg
        self.ranks = ranks
        self.fsdp = cfg.parallel == "fsdp" and ranks.size > 1
        self.ranks_differ = self.fsdp or cfg.tp * cfg.pp * cfg.ep > 1  # whether ranks have different parameters
        self.equal_targets = objective_class(cfg).equal_targets
        with torch.device("meta"):
            self.model = Model(cfg)  # `cut` leaves in it the modules and parameters that this rank has
        check_initial(self.model)
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        self.has_loss = True  # False in all stages of a pipeline but the last
        self.expert_names: Sequence[str] = ()  # names of parameters, in the order of the model
        self.counted_by_other_stage: Collection[str] = ()  # names of parameters that another stage counts
        self.cut(cfg)
        self.wrap(cfg)
        self.allocate(cfg)
        self.note_copies(cfg, shapes)

    def cut(self, cfg: Config):
        """Leave in the model what this rank has of it: a stage, slices of layers, pieces of sequences, some experts."""
        mesh = self.ranks.mesh
        if cfg.pp > 1:
            from engine.parallel import pipeline

            stage = mesh.get_local_rank("pp")
            self.has_loss = stage == cfg.pp - 1
            self.counted_by_other_stage = pipeline.keep_stage(self.model, stage, cfg.pp)
        if cfg.tp > 1:
            apply_tensor_parallel(self.model, mesh["tp"].get_group())
        if cfg.cp > 1:
            apply_context_parallel(self.model, self.ranks.cp)
        if cfg.ep > 1:
            group = self.ranks.experts["ep"].get_group()
            self.expert_names = apply_expert_parallel(self.model, group, self.ranks.compile)

    def wrap(self, cfg: Config):
        """Change how blocks compute: recomputed in the backward, compiled, gathered by FSDP."""
        model, ranks = self.model, self.ranks
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        inside = cfg.ep > 1  # the exchange of tokens breaks graphs, and recomputation has to enclose the breaks
        if ranks.compile and inside:
            compilation.compile_model(model, blocks, inside=True)
        if cfg.activation_checkpoint != "none":
            for block in blocks:
                recompute(block, cfg.activation_checkpoint)
        if ranks.compile and not inside:
            alone = ranks.size == 1 and ranks.device.type == "cuda" and cfg.activation_checkpoint == "none"
            # One graph costs the host of a GPU less. DDP needs several, which give it gradients during the backward.
            parts = [each for each in model.modules() if isinstance(each, Stack)] if alone else blocks
            compilation.compile_model(model, parts)
        if self.fsdp:
            shard(model, cfg, ranks)

    def allocate(self, cfg: Config):
        """Allocate the parameters, and make what calls the model: a pipeline's schedule, or DDP."""
        model, ranks = self.model, self.ranks
        model.to_empty(device=ranks.device)
        model.tie()
        self.forward_model = model  # what computes a micro-batch's loss, perhaps with DDP around it
        if cfg.pp > 1:
            from engine.parallel.pipeline import Pipeline

            self.pipeline = Pipeline(model, cfg, ranks)
        elif not (self.fsdp or cfg.eval_only) and ranks.mesh and ranks.mesh["shard"].size() > 1:
            model._ddp_params_and_buffers_to_ignore = [*self.expert_names]  # which ranks divide
            self.forward_model = nn.parallel.DistributedDataParallel(
                model, process_group=ranks.mesh["shard"].get_group(), gradient_as_bucket_view=True
            )

    def note_copies(self, cfg: Config, shapes: dict[str, tuple[int, ...]]):
        """Note how ranks share each parameter, which has this shape in the full model, and which gradients are reduced
        by `reduce_gradients`."""
        replicate, shard, tp = self.ranks.mesh.mesh.shape[1:] if self.ranks.mesh else (1, 1, 1)
        named = dict(self.model.named_parameters())
        self.loads = load_biases(self.model)
        self.expert_parameters = [named[name] for name in self.expert_names]
        self.other_parameters = [p for name, p in named.items() if name not in self.expert_names]
        self.unsharded = kept_whole(self.model) if self.fsdp else []
        unsharded = {*self.unsharded}
        self.layouts = {}  # each parameter's Layout
        self.norm_weight = {}  # in the norm over all ranks, so that copies count once
        self.tp_replicated = []
        for name, p in named.items():
            fsdp_dim = 0 if self.fsdp and p not in unsharded else None
            tp_dim = sharded_dim(self.model, name) if cfg.tp > 1 else None
            if tp_dim is None:
                self.tp_replicated.append(p)
            ep = cfg.ep if name in self.expert_names else 1  # adjacent ranks, which have different experts
            cuts = (replicate, None), (shard // ep, fsdp_dim), (ep, 0), (tp, tp_dim)
            self.layouts[name] = Layout(shapes[name], cuts)
            copies = math.prod(n for n, dim in cuts if dim is None)
            self.norm_weight[p] = (name not in self.counted_by_other_stage) / math.sqrt(copies)

    # ---- weights

    def slice_of(self, name: str, x: Tensor) -> Slice:
        """x, the parameter `name` or a part of its optimizer's state, as a part of the full model's; same storage."""
        mine = local(x.detach())
        if x.dim() == 0:
            return Slice(mine, (), ())
        weight = self.layouts[name]
        slices, _ = place(weight, self.ranks.rank)
        return Slice(mine, tuple(each.start for each in slices), weight.shape)

    @torch.no_grad()
    def init_weights(self, seed: int):
        """Draw this rank's part of the initial weights of Model(cfg, seed), which do not depend on the layout: a
        vocabulary's padding is rows behind the others."""
        for name, p in self.model.named_parameters():
            mine, offsets, shape = self.slice_of(name, p)
            device = torch.device("cpu") if mine.device.type == "mps" else mine.device  # MPS has no float64
            mine.copy_(self.model.initial_weight(name, seed, shape, offsets, mine.shape, device))

    @torch.no_grad()
    def fill(self, weights: Mapping[str, Tensor]):
        """Copy into each parameter its part of the full tensor of that name, with 0 for a vocabulary's padding."""
        for name, p in self.model.named_parameters():
            slices, _ = place(self.layouts[name], self.ranks.rank)
            rows = weights[name][slices]
            local(p).zero_()[: len(rows)].copy_(rows)

    # ---- one step

    def batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The part of a batch that this rank computes: with cp two pieces of each sequence, otherwise all of it."""
        if self.ranks.cp is None:
            return batch
        return {name: x if "doc" in name else local_pieces(x, self.ranks.cp) for name, x in batch.items()}

    def backward(self, batches: Iterator, micro_steps: int, scaler: torch.amp.GradScaler) -> Tensor:
        """Set p.grad to the gradient of a step's loss, the mean over the targets of all micro-batches of all ranks.
        Returns this rank's share: the loss is its mean over the ranks of the last stage. Earlier stages return 0."""
        parts = (self.batch(next(batches)) for _ in range(micro_steps))
        if not self.equal_targets:
            parts = [*parts]
            # Each micro-batch's sum of losses is divided by the mean number of targets of all micro-batches.
            total = self.ranks.sum(sum((batch["targets"] >= 0).sum() for batch in parts))
            self.model.n_targets = total.clamp(min=1) / (self.ranks.size * micro_steps)
        if self.cfg.pp > 1:
            loss = self.pipeline.backward([*parts])
        else:
            loss = self.accumulate(parts, micro_steps, scaler)
        self.model.n_targets = None
        self.reduce_gradients()
        return loss

    def accumulate(self, parts: Iterable, micro_steps: int, scaler: torch.amp.GradScaler) -> Tensor:
        """The forward and backward of each micro-batch; returns the mean of their losses."""
        loss = torch.zeros((), device=self.ranks.device)
        for micro_step, batch in enumerate(parts):
            last = micro_step == micro_steps - 1
            if self.fsdp:  # reduce-scatter after every micro-step if resharding, otherwise only after the last
                self.model.set_requires_gradient_sync(last or self.cfg.fsdp_reshard)
                self.model.set_requires_all_reduce(last)  # HSDP's, over the copies
            else:  # DDP averages once per step; a model that is not wrapped ignores this
                self.forward_model.require_backward_grad_sync = last
            with self.ranks.autocast():
                part = self.forward_model(**batch) / micro_steps
            scaler.scale(part).backward()
            loss += part.detach()
        return loss

    def reduce_gradients(self):
        """Average or sum the gradients that neither DDP nor FSDP reduces."""
        mesh = self.ranks.mesh
        if grads := [local(p.grad) for p in self.expert_parameters if p.grad is not None]:
            torch._foreach_mul_(grads, 1 / self.cfg.ep)
        if self.fsdp:
            all_reduce_gradients(self.unsharded, mesh["replicate"])
            all_reduce_gradients(self.unsharded, mesh["shard"])
        elif self.expert_parameters:
            all_reduce_gradients(self.expert_parameters, self.ranks.experts["shard"])
        if self.cfg.pp > 1 and not self.fsdp:  # DDP cannot wrap a pipeline's schedule
            all_reduce_gradients(self.other_parameters, mesh["shard"])
        if self.cfg.tp > 1:
            all_reduce_gradients(self.tp_replicated, mesh["tp"], mean=False)

    @torch.no_grad()
    def clip(self, limit: float) -> Tensor:
        """Scale the gradient to a norm of at most `limit` (0 = no limit); returns the norm before, over all ranks."""
        params = [p for p in self.model.parameters() if p.grad is not None and p not in self.loads]
        grads = [local(p.grad) for p in params]
        norms = torch._foreach_norm(grads)
        if self.ranks_differ:
            weighted = torch._foreach_mul(norms, [self.norm_weight[p] for p in params])
            norm = self.ranks.sum(torch.stack(weighted).square().sum()).sqrt()
        else:
            norm = torch.linalg.vector_norm(torch.stack(norms))
        if limit:
            torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean loss over the targets of a batch from `self.batch`; 0 if has_loss is False."""
        with self.ranks.autocast():
            return self.pipeline.loss(batch) if self.cfg.pp > 1 else self.model(**batch)

    def reshard_after_eval(self):
        """Free the gathered parameters after forwards without a backward: the optimizer updates only the shards."""
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()

    @torch.no_grad()
    def unequal_copies(self) -> str:
        """An error if ranks that hold copies of the same part of a parameter have different ones, otherwise "". Every
        rank calls it, and sends the first one the sums of its parts' bits."""
        sums = {}
        for name, p in self.model.named_parameters():
            x, offsets, _ = self.slice_of(name, p)
            other_end = name in self.counted_by_other_stage  # whose ranks may add gradients in another order
            sums[name, other_end, offsets, x.shape] = x.view(torch.int32).sum(dtype=torch.int64)
        mine = dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True))  # one wait for the device
        copies = defaultdict(lambda: defaultdict(list))  # part -> sum -> ranks
        for rank, found in enumerate(gather(mine)):
            for part, total in found.items():
                copies[part][total].append(rank)
        text = ""
        for (name, *_), ranks in copies.items():
            if len(ranks) > 1:
                few, *_, most = sorted(ranks.values(), key=len)
                fact = f"copies of {name} differ: those of ranks {few} from that of rank {most[0]}"
                remedy = "go on from the last checkpoint with --init_from=resume"
                text = f"{fact}; {remedy}, and if they differ again, replace the machines of these ranks"
                break
        return on_first_rank(lambda: text)

    def mean(self, loss: Tensor) -> float:
        """The step's loss, from what `backward` has returned on each rank."""
        return self.ranks.sum(loss.clone()).item() * self.cfg.pp / self.ranks.size
