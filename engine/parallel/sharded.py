"""Builds this rank's shard of the model, and runs one training step on it, for every layout of the ranks.

    sharded = ShardedModel(cfg, ranks)              # cut and wrapped on the meta device, then allocated
    sharded.init_weights(cfg.seed)
    optimizer = optim.build(sharded.model, cfg, sharded, ranks.dtype)
    loss = sharded.backward(batches, micro_steps, scaler)
    norm = sharded.clip(cfg.grad_clip)

The constructor applies, in order: a pipeline's stage, tensor, context and expert parallelism, float8, recomputation,
compilation, and last DDP or FSDP2. model.py has no code for them; docs/hacking.md has a table of what they replace.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from data.objective import objective_class
from engine import compilation, fp8
from engine.parallel.context import apply_context_parallel, local_pieces
from engine.parallel.expert import apply_expert_parallel
from engine.parallel.owners import cuts
from engine.parallel.ranks import Ranks, make_mesh
from engine.parallel.recomputation import recompute
from engine.parallel.tensor import apply_tensor_parallel, sharded_dim
from model import Experts, Gain, LoadBalance, Model, ShapedPool, stream_dtype


def local(x: Tensor) -> Tensor:
    """This rank's part of x, a tensor or a DTensor."""
    return x.to_local() if hasattr(x, "to_local") else x


def copy_local_shard_(x: Tensor, full: Tensor, like: Tensor):
    """Copy this rank's part of the full tensor into x, a tensor or a DTensor. `like` says how full is cut."""
    if hasattr(like, "placements"):
        from torch.distributed.tensor import distribute_tensor

        full = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()
    local(x).copy_(full)


def kept_whole(part: nn.Module) -> list[nn.Parameter]:
    """The parameters that FSDP does not shard: gains of a block or of each head, and the biases of experts."""
    return [
        p for m in part.modules() if isinstance(m, Gain | ShapedPool | LoadBalance) for p in m.parameters(recurse=False)
    ]


def load_biases(model: nn.Module) -> set[nn.Parameter]:
    """The biases that balance the loads of experts. Their gradients are loads."""
    return {m.bias for m in model.modules() if isinstance(m, LoadBalance)}


def fsdp_units(model: Model) -> dict[str, list[nn.Module]]:
    """What FSDP gathers at once: each block, the ends of the model if they are not tied, and the rest, which is last.
    A stage of a pipeline may lack ends."""
    stacks = {"": model} | ({"encoder.": model.encoder} if model.encoder else {})
    units = {
        f"{path}blocks.{layer}": [block]
        for path, stack in stacks.items()
        for layer, block in stack.blocks.named_children()
    }
    if not model.cfg.tie_weights and isinstance(model.wte, nn.Embedding):
        units["wte"] = [model.wte]
    if not model.cfg.tie_weights and isinstance(model.head, nn.Linear):
        units["head"] = [model.norm, model.head]
    return units | {"root": [model]}


def shard(model: Model, cfg, ranks: Ranks):
    """Apply FSDP2 (arXiv:2304.11277) to each of `fsdp_units`.

    In 16 bits, blocks and ends are gathered in the matmuls' dtype, and the rest in float32. Gains are not sharded
    (`kept_whole`): in bfloat16 they would move in steps of 2^-8. Experts that ranks divide are sharded over those with
    the same ones.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    dtype, pinned = ranks.dtype, ranks.device.type == "cuda"

    def sharding(mesh: DeviceMesh) -> DeviceMesh:
        return mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]

    options = {
        "mesh": sharding(ranks.mesh),
        "reshard_after_forward": cfg.fsdp_reshard,
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if cfg.fsdp_offload else OffloadPolicy(),
    }
    kept = options | {"reshard_after_forward": False}  # gathered from forward to backward
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    with ranks.autocast():
        stream = stream_dtype(cfg, torch.empty(0, device=ranks.device))
    for unit, modules in fsdp_units(model).items():
        if unit == "root":
            fully_shard(modules, **kept)
        elif unit == "wte":
            fully_shard(modules, mp_policy=replace(policy, output_dtype=stream), **kept)
        elif unit == "head":
            model.head.forward, model.loss = model.loss, lambda x, targets: model.head(x, targets)
            fully_shard(modules, mp_policy=policy, **kept)
        else:
            [block] = modules
            last = cfg.pp == 1 and block is model.blocks[-1]  # its backward follows at once
            chosen = kept if last else options
            whole = [] if cfg.fsdp_offload else kept_whole(block)
            for m in block.modules() if ranks.experts else ():
                if isinstance(m, Experts):
                    fully_shard([m.up, m.down], mp_policy=policy, **chosen | {"mesh": sharding(ranks.experts)})
            fully_shard(modules, mp_policy=policy, ignored_params={*whole}, **chosen)


class ShardedModel:
    """This rank's shard of the model. Parameters keep their names; their values come from `init_weights`, `fill` or a
    checkpoint."""

    def __init__(self, cfg, ranks: Ranks):
        with torch.device("meta"):
            self.model = self.forward_model = model = Model(cfg)
        self.ranks, self.tp, self.ep, self.pp, mesh = ranks, cfg.tp, cfg.ep, cfg.pp, ranks.mesh
        self.fsdp, self.reshard = cfg.parallel == "fsdp" and ranks.size > 1, cfg.fsdp_reshard
        self.home = torch.device("cpu") if self.fsdp and cfg.fsdp_offload else ranks.device  # of the parameters
        self.even = objective_class(cfg).even
        self.routers = [name for name, m in model.named_modules() if isinstance(m, Experts)]
        self.counted_elsewhere: Collection[str] = ()  # names of parameters that another stage counts
        if cfg.pp > 1:
            from engine.parallel import pipeline

            self.counted_elsewhere = pipeline.keep_stages(model, mesh.get_local_rank("pp"), cfg.pp, cfg.pp_chunks)
        if cfg.tp > 1:
            apply_tensor_parallel(model, mesh["tp"].get_group())
            grid = mesh.mesh.permute(0, 3, 1, 2)  # tp is the outer cut, FSDP the inner one
            self.outer = make_mesh(cfg, self.home, grid, "pp tp replicate shard")["tp", "replicate", "shard"]
        if cfg.cp > 1:
            apply_context_parallel(model, ranks.cp)
        self.cut_by_ep: Collection[str] = ()  # names of parameters
        if cfg.ep > 1:
            self.cut_by_ep = apply_expert_parallel(model, ranks.experts["ep"].get_group(), ranks.compile)
        blocks = [*model.blocks, *(model.encoder.blocks if model.encoder else ())]  # of this rank
        if cfg.fp8:
            fp8.apply(model)
        inside = cfg.ep > 1  # the exchange of tokens breaks graphs, and recomputation has to enclose the breaks
        if ranks.compile and inside:
            compilation.compile_model(model, blocks, inside=True)
        if cfg.activation_checkpoint != "none":
            for block in blocks:
                recompute(block, cfg.activation_checkpoint)
        if ranks.compile and not inside:
            compilation.compile_model(model, blocks)
        if self.fsdp:
            shard(model, cfg, ranks)
        model.to_empty(device=self.home)
        model.tie()
        if cfg.pp > 1:
            micro_steps = cfg.gradient_accumulation_steps // ranks.data_size
            shape, group = (cfg.batch_size, cfg.block_size // cfg.cp), mesh["pp"].get_group()
            options = ranks.device, ranks.autocast, cfg.tp, cfg.pp_chunks
            self.pipeline = pipeline.Pipeline(model, group, micro_steps, shape, *options)
        elif not (self.fsdp or cfg.eval_only or mesh is None) and mesh["shard"].size() > 1:
            devices = [ranks.device] if ranks.device.type == "cuda" else None
            model._ddp_params_and_buffers_to_ignore = [*self.cut_by_ep]  # which ranks divide
            self.forward_model = nn.parallel.DistributedDataParallel(
                model, device_ids=devices, process_group=mesh["shard"].get_group(), gradient_as_bucket_view=True
            )
        self.has_loss = cfg.pp == 1 or mesh.get_local_rank("pp") == cfg.pp - 1
        named = list(model.named_parameters())
        self.whole = kept_whole(model) if self.fsdp and not cfg.fsdp_offload else []
        self.tp_dim = {name: sharded_dim(model, name) for name, _ in named} if cfg.tp > 1 else {}
        self.tp_replicated = [p for name, p in named if cfg.tp > 1 and self.tp_dim[name] is None]
        # the weights that ranks divide: no set, whose order would differ from rank to rank
        self.divided = dict.fromkeys(p for name, p in named if name in self.cut_by_ep)
        others = [p for _, p in named if p not in self.divided]
        # parameters whose gradients neither DDP nor FSDP averages (DDP cannot wrap a pipeline's schedule)
        unaveraged = self.whole if self.fsdp else others if cfg.pp > 1 else []
        self.reduced = (
            (unaveraged, mesh, "replicate", True), (unaveraged, mesh, "shard", True),
            (self.tp_replicated, mesh, "tp", False),
            ([] if self.fsdp else [*self.divided], ranks.experts, "shard", True),
        )  # fmt: skip
        copies, shards = dict.fromkeys(self.tp_replicated, cfg.tp), mesh["shard"].size() if self.fsdp else cfg.ep
        copies |= {p: copies.get(p, 1) * shards for p in (self.whole if self.fsdp else others)}
        # weight of each parameter in the global norm, so that replicas count once
        self.norm_weight = {p: (name not in self.counted_elsewhere) / math.sqrt(copies.get(p, 1)) for name, p in named}
        sums = {"shard": self.fsdp, "tp": cfg.tp > 1, "pp": cfg.pp > 1}
        self.routing: Tensor | float = 0.0  # sums of Experts.routing, see `routing_figures`
        self.loads = load_biases(model)
        self.norm_groups = [mesh[dim].get_group() for dim, on in sums.items() if on]
        if cfg.ep > 1 and not self.fsdp:
            self.norm_groups.append(ranks.experts["ep"].get_group())

    # ---- weights

    @torch.no_grad()
    def init_weights(self, seed: int, names: Collection[str] | None = None):
        """Draw this rank's part of the initial weights of Model(cfg, seed), which do not depend on the layout.

        names   draw only these parameters, if this rank has them
        """
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place

        for name, p in self.model.named_parameters():
            if names is None or name in names:
                x, part = self.as_global(name, p), local(p)
                start = (0,) * x.dim()
                if hasattr(x, "placements"):
                    start = place(x.shape, x.device_mesh, x.placements)[1]
                device = torch.device("cpu") if part.device.type == "mps" else part.device  # MPS has no float64
                part.copy_(self.model.initial_weight(name, seed, x.shape, start, part.shape, device))

    @torch.no_grad()
    def fill(self, weights: Mapping[str, Tensor]):
        """Copy into each parameter its part of the full tensor of that name, which may lack a vocabulary's padding."""
        for name, p in self.model.named_parameters():
            full, like = weights[name].to(p.device), self.as_global(name, p)
            copy_local_shard_(p, F.pad(full, (0, 0) * (full.dim() - 1) + (0, len(like) - len(full))), like)

    # ---- one step

    def batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The part of a batch that this rank computes: all of it, or with cp two pieces of each sequence, whose
        document numbers stay whole."""
        cp = self.ranks.cp
        return {name: x if "doc" in name else local_pieces(x, cp) for name, x in batch.items()} if cp else batch

    def backward(self, batches: Iterator, micro_steps: int, scaler: torch.amp.GradScaler) -> Tensor:
        """Set p.grad to the gradient of a step's loss, the mean over the targets of all micro-batches of all ranks.
        Returns this rank's term: its mean over the ranks of the last stage is the loss; in earlier stages it is 0."""
        parts = (self.batch(next(batches)) for _ in range(micro_steps))
        if not self.even:
            parts = [*parts]
            # Each micro-batch's sum of losses is divided by the mean number of targets of all micro-batches.
            total = self.ranks.sum(sum((batch["targets"] >= 0).sum() for batch in parts))
            self.model.n_targets = total.clamp(min=1) / (self.ranks.size * micro_steps)
        loss = torch.zeros((), device=self.ranks.device)
        if self.pp > 1:
            loss, parts = self.pipeline.backward([*parts]), []  # which leaves the loop nothing
        for micro_step, batch in enumerate(parts):
            last = micro_step == micro_steps - 1
            if self.fsdp:  # reduce-scatter after every micro-step if resharding, otherwise only after the last
                self.model.set_requires_gradient_sync(last or self.reshard)
                self.model.set_requires_all_reduce(last)  # HSDP's, over the copies
            else:  # DDP averages once per step; a model that is not wrapped ignores this
                self.forward_model.require_backward_grad_sync = last
            with self.ranks.autocast():
                part = self.forward_model(**batch) / micro_steps
            scaler.scale(part).backward()
            loss += part.detach()
        self.model.n_targets = None
        self.reduce_gradients()
        return loss

    def reduce_gradients(self):
        """Average or sum the gradients of `reduced` along their dimensions of a mesh, each in one message. Those of
        experts become means over all data-parallel ranks."""
        if grads := [local(p.grad) for p in self.divided if p.grad is not None]:
            torch._foreach_mul_(grads, 1 / self.ep)
        for params, mesh, dim, mean in self.reduced:
            grads = [local(p.grad) for p in params if p.grad is not None]
            if not grads or (n := mesh[dim].size()) == 1:
                continue
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat, group=mesh[dim].get_group())
            flat *= 1 / n if mean else 1.0
            for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(total.view_as(grad))

    @torch.no_grad()
    def clip(self, limit: float) -> Tensor:
        """Scale the gradient to a norm of at most `limit` (0 = no limit); returns the norm before, over all ranks."""
        params = [p for p in self.model.parameters() if p.grad is not None and p not in self.loads]
        grads = [local(p.grad) for p in params]
        norms = torch.stack(torch._foreach_norm(grads))
        self.grad_norms = params, norms
        if self.norm_groups:
            weights = [self.norm_weight[p] for p in params]
            weights = torch.tensor(weights, pin_memory=norms.is_cuda)  # pinned: copied without waiting for the GPU
            square = (norms * weights.to(norms.device, non_blocking=True)).square().sum()
            for group in self.norm_groups:
                dist.all_reduce(square, group=group)
            norm = square.sqrt()
        else:
            norm = torch.linalg.vector_norm(norms)
        if limit:
            torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        """The norms of the gradient (before `clip`) and of the weights of each block and of each part beside them, by
        names such as grad_norm/blocks.0. It waits for the device. {} if ranks share the weights."""
        if self.norm_groups:
            return {}
        params, grads = self.grad_norms
        squares = torch.stack((grads, torch.stack(torch._foreach_norm(params)))).square().tolist()
        part = {p: re.match(r"(encoder\.)?(blocks\.)?\w+", name)[0] for name, p in self.model.named_parameters()}
        found = defaultdict(float)
        for kind, values in zip(("grad_norm", "weight_norm"), squares, strict=True):
            for p, square in zip(params, values, strict=True):
                found[f"{kind}/{part[p]}"] += square
        return {tag: math.sqrt(total) for tag, total in found.items()}

    @torch.no_grad()
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean loss over the targets of a batch from `self.batch`; 0 if has_loss is False."""
        with self.ranks.autocast():
            loss = self.pipeline.loss(batch) if self.pp > 1 else self.model(**batch)
        if experts := self.model.experts():
            real = (batch["targets"] >= 0).any(1, keepdim=True)  # not the sequences that fill the last batch
            self.routing = self.routing + torch.stack([(m.routing * real).sum(0) for m in experts])
        return loss

    def routing_figures(self) -> dict[str, float]:
        """How tokens were divided among the experts in the calls of `loss` since the last call, over all ranks: a
        layer's largest load over its mean load, the share of experts without tokens, the mean entropy of p in nats."""
        if not self.routers:
            return {}
        here = dict(self.model.named_modules())  # without the layers of other stages
        routing = torch.zeros(len(self.routers), self.model.cfg.n_expert + 1, device=self.ranks.device)
        routing[[name in here for name in self.routers]] = self.routing
        load, entropy = self.ranks.sum(routing).split((self.model.cfg.n_expert, 1), dim=1)
        self.routing, mean = 0.0, load.mean(1, keepdim=True)
        tokens = load.sum(1, keepdim=True) / self.model.cfg.n_expert_active
        figures = {"expert_load": (load / mean).max(), "idle_experts": (load == 0).float().mean()}
        return {name: x.item() for name, x in (figures | {"router_entropy": (entropy / tokens).mean()}).items()}

    def reshard_after_eval(self):
        """Free the gathered parameters after forwards without a backward: the optimizer updates only the shards."""
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()

    @torch.no_grad()
    def unequal_copies(self) -> str:
        """An error if ranks that hold copies of the same parameters have different ones, otherwise "". Every rank calls
        it; each sends the sums of its parameters' bits."""
        if self.ranks.mesh is None:
            return ""
        mesh, pairs = self.ranks.mesh.mesh, {}  # (pp, replicate, shard, tp)
        experts = mesh.unflatten(2, (-1, self.ep))  # (pp, replicate, shard / ep, ep, tp)
        copied = (
            (mesh, 1 if self.fsdp else 2, [p for p in self.model.parameters() if self.fsdp or p not in self.divided]),
            (mesh, 2, self.whole), (mesh, 3, self.tp_replicated), (experts, 2, [] if self.fsdp else [*self.divided]),
        )  # fmt: skip
        sums = torch.zeros(len(copied), self.ranks.size, dtype=torch.int64)
        for of_ranks, (_, _, params) in zip(sums, copied, strict=True):
            bits = sum(local(p).view(torch.int32).sum(dtype=torch.int64) for p in params)
            of_ranks[self.ranks.rank] = int(bits)
        for of_ranks, (mesh, dim, _) in zip(self.ranks.sum(sums), copied, strict=True):
            usual, place = of_ranks[mesh].mode(dim, keepdim=True)
            others, wrong = mesh.gather(dim, place).expand_as(mesh), of_ranks[mesh] != usual
            pairs |= dict(zip(mesh[wrong].tolist(), others[wrong].tolist(), strict=True))
        unequal = ", ".join(f"those of rank {rank} from those of rank {other}" for rank, other in pairs.items())
        return unequal and (
            f"copies of parameters differ: {unequal}; go on from the last checkpoint with --init_from=resume, "
            "from which all ranks load the same, and if they differ again, replace the machines of these ranks"
        )

    def mean(self, loss: Tensor) -> float:
        """The step's loss, from what `backward` has returned on each rank."""
        return self.ranks.sum(loss.clone()).item() * self.pp / self.ranks.size

    # ---- shapes of the full model

    def cuts(self, name: str) -> tuple[tuple[int, int | None], ...]:
        """How the ranks of a pipeline's stage share a parameter, see owners.cuts."""
        sizes = self.ranks.mesh.mesh.shape[1:] if self.ranks.mesh else (1, 1, 1)
        return cuts(sizes, self.fsdp, self.tp_dim.get(name), self.ep if name in self.cut_by_ep else 1)

    def as_global(self, name: str, x: Tensor) -> Tensor:
        """x (the parameter `name`, or a tensor of its shape such as its momentum) with the shape of the full model's
        parameter: a tensor, or a DTensor that shares the storage of x."""
        expert = name in self.cut_by_ep
        if not expert and self.tp == 1 or x.dim() == 0:
            return x
        from torch.distributed.tensor import DTensor, Replicate, Shard

        dim, shape, part = self.tp_dim.get(name), list(x.shape), local(x)
        if dim is not None:
            shape[dim] *= self.tp
        if expert:
            shape[0] *= self.ep
        sharded = self.fsdp and not any(self.model.get_parameter(name) is p for p in self.whole)
        placements = Replicate() if dim is None else Shard(dim), *[Shard(0)] * expert, Replicate()
        placements += (Shard(0) if sharded else Replicate(),)
        mesh, stride = self.ranks.experts if expert else self.outer, torch.empty(shape, device="meta").stride()
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
