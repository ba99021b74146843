"""Learning rate schedules and optimizers: AdamW, and Muon for the hidden matrices with AdamW for the rest.

    optimizer = build(model, cfg)
    optimizer.set_lr(learning_rate(step, cfg))
    optimizer.step()
    optimizer.state_tensors(model)  # {"blocks.0.mlp.up.weight.momentum": tensor, ...}, for checkpoints

Call `build` after sharding and tensor parallelism, which replace parameters.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace

import torch
import torch.nn as nn
from torch import Tensor

from engine.sharded_model import copy_local_shard_
from model import Fused, Linear

# ---------------------------------------------------------------------------------------------------------------------
# Schedules


def learning_rate(step: int, cfg) -> float:
    """The learning rate of step `step` (the first is 0): a linear warm-up, then cfg.schedule."""
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    return SCHEDULE[cfg.schedule](step, cfg.lr_decay_iters or cfg.max_iters, cfg)


def rescheduled(step: int, cfg, flags: dict) -> str:
    """A warning if the learning rate of `step` differs between cfg and the checkpoint's flags, otherwise ""."""
    end = flags.get("lr_decay_iters") or flags.get("max_iters", cfg.max_iters)
    new, old = learning_rate(step, cfg), learning_rate(step, SimpleNamespace(**vars(cfg) | {"lr_decay_iters": end}))
    if cfg.lr_decay_iters or new == old:
        return ""
    return (
        f"warning: max_iters={cfg.max_iters} moves the end of the schedule, which was {end}: the learning rate of step "
        f"{step} is now {new:.2e} instead of {old:.2e}; --lr_decay_iters={end} keeps the old schedule"
    )


def constant(step: int, end: int, cfg) -> float:
    return cfg.learning_rate


def cosine(step: int, end: int, cfg) -> float:
    """Half a cosine from the end of the warm-up to min_lr at step `end` (arXiv:1608.03983; nanoGPT's get_lr)."""
    if step >= end:
        return cfg.min_lr
    progress = (step - cfg.warmup_iters) / (end - cfg.warmup_iters)
    return cfg.min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (cfg.learning_rate - cfg.min_lr)


def wsd(step: int, end: int, cfg) -> float:
    """Warm-up, stable, decay (arXiv:2404.06395): linear over the last cooldown_iters to min_lr at step `end`."""
    if step >= end:
        return cfg.min_lr
    left = min(1.0, (end - step) / (cfg.cooldown_iters or max(1, end // 5)))
    return cfg.min_lr + left * (cfg.learning_rate - cfg.min_lr)


SCHEDULE = {"cosine": cosine, "wsd": wsd, "constant": constant}

# ---------------------------------------------------------------------------------------------------------------------
# Muon


class Muon:
    """Trains hidden matrices with orthogonalised momentum (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).

        b = mu b + (1 - mu) g
        U S V^T = (1 - mu) g + mu b
        W = (1 - lr decay) W - lr sqrt(max(1, rows / columns)) U V^T

    With this scale a step moves the outputs of all layers equally far, so lr = 0.02 fits all widths. Muon has its own
    rate; with the scale of arXiv:2502.16982, 0.2 sqrt(max(rows, columns)), it would have AdamW's.

    A weight may store several logical matrices. Each is orthogonalised alone: as one matrix they would share their
    singular directions, and the loss is higher. weights maps a weight to None (one matrix) or to the (dim, groups,
    sizes) of model.Linear's `fused`. as_global(p, x) returns this rank's part x of the parameter p, or of its update,
    as a DTensor with the shape of the full parameter. dtype is that of the run's matrix products, see `orthogonalize`.
    """

    LARGEST = 2**28  # numbers that are gathered at once: 1 GiB

    def __init__(
        self,
        weights: dict[nn.Parameter, Fused | None],
        lr: float,
        momentum: float,
        weight_decay: float,
        as_global: Callable[[nn.Parameter, Tensor], Tensor] = lambda p, x: x,
        dtype: torch.dtype = torch.float32,
    ):
        self.dtype = dtype
        self.fused = {p: fused or (0, 1, (as_global(p, p).size(0),)) for p, fused in weights.items()}
        self.as_global, self.sizes = as_global, {p: as_global(p, p).numel() for p in weights}
        self.param_groups = [group | {"lr": lr, "momentum": momentum} for group in decay_groups(weights, weight_decay)]
        self.state = {p: {"momentum": torch.zeros_like(p)} for p in weights}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads, momentum = [p.grad for p in params], [self.state[p]["momentum"] for p in params]
            torch._foreach_lerp_(momentum, grads, 1 - group["momentum"])
            updates = torch._foreach_mul(grads, 1 - group["momentum"])  # not a lerp, which DTensors of torch 2.11 lack
            torch._foreach_add_(updates, momentum, alpha=group["momentum"])
            for some in self.portions(params):
                shards = [self.as_global(params[i], updates[i]) for i in some]
                full = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in shards]
                self.orthogonalize_all([params[i] for i in some], full)
                for i, x, matrix in zip(some, shards, full, strict=True):
                    if x is not matrix:
                        copy_local_shard_(updates[i], matrix, like=x)
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-group["lr"])

    def portions(self, params: list[nn.Parameter]) -> Iterator[list[int]]:
        """Indices of parameters in portions of at most LARGEST numbers, or of one parameter, to limit the memory."""
        some, size = [], 0
        for i, p in enumerate(params):
            if some and size + self.sizes[p] > self.LARGEST:
                yield some
                some, size = [], 0
            some.append(i)
            size += self.sizes[p]
        yield some

    def orthogonalize_all(self, params: list[nn.Parameter], updates: list[Tensor]):
        """Replace each logical matrix U S V^T of the updates by sqrt(max(1, rows/columns)) U V^T, a batch per shape."""
        same_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for p, update in zip(params, updates, strict=True):
            dim, groups, sizes = self.fused[p]
            for piece in update.unflatten(dim, (groups, sum(sizes))).split(sizes, dim + 1):  # views, groups still apart
                matrix = piece.flatten(dim, dim + 1)  # (rows, columns)
                same_shape[matrix.shape].append((piece, matrix))
        for (rows, columns), group in same_shape.items():
            batch = orthogonalize(torch.stack([m for _, m in group]), self.dtype) * max(1, rows / columns) ** 0.5
            for (piece, _), matrix in zip(group, batch, strict=True):
                piece.copy_(matrix.reshape(piece.shape))


def orthogonalize(x: Tensor, dtype: torch.dtype, steps: int = 5) -> Tensor:
    """U V^T of x = U S V^T, with singular values of about 0.7 to 1.2 instead of 1; x (N, rows, columns).

    A Newton-Schulz iteration with Jordan's quintic polynomial, which is as steep at 0 as these bounds allow. It runs in
    bfloat16 on CUDA, and on a CPU if this is the dtype of the run's products; otherwise in float32.
    """
    in_bfloat16 = x.is_cuda or x.is_cpu and dtype == torch.bfloat16
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = x.to(torch.bfloat16 if in_bfloat16 else torch.float32)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x  # the Gram matrix is the smaller one
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)  # 3.4445 s - 4.7750 s^3 + 2.0315 s^5 on singular values s
    return x.mT if tall else x


# ---------------------------------------------------------------------------------------------------------------------
# The optimizer of a run


class AdamW:
    """AdamW (arXiv:1711.05101) in PyTorch's fused kernel, with all its state from the start. torch.optim.AdamW does the
    same, after it has imported torch._dynamo in a second or two."""

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float]):
        self.param_groups = [group | {"lr": lr, "betas": betas} for group in groups]
        self.state = {
            p: {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
            for group in groups
            for p in group["params"]
        }

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params, (beta1, beta2) = [p for p in group["params"] if p.grad is not None], group["betas"]
            states = [[self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq", "step")]
            if params:
                torch._foreach_add_(states[2], 1)
                torch._fused_adamw_(
                    params, [p.grad for p in params], *states[:2], [], states[2], lr=group["lr"], beta1=beta1,
                    beta2=beta2, weight_decay=group["weight_decay"], eps=1e-8, amsgrad=False, maximize=False,
                )  # fmt: skip


class Optimizer:
    """Combines AdamW and Muon, so that a gradient scaler that finds an overflow skips both or neither.

    parts maps each optimizer to its peak learning rate, relative to cfg.learning_rate. All state exists from the start,
    so a checkpoint can be loaded into it in place.
    """

    def __init__(self, parts: dict[AdamW | Muon, float]):
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]

    def set_lr(self, lr: float):
        for part, ratio in self.parts.items():
            for group in part.param_groups:
                group["lr"] = lr * ratio

    def step(self):
        for part in self.parts:
            part.step()

    def state_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The state by parameter name and kind, such as "wte.weight.exp_avg": the tensors themselves, not copies."""
        state = {p: tensors for part in self.parts for p, tensors in part.state.items()}
        return {f"{name}.{kind}": t for name, p in model.named_parameters() for kind, t in state.get(p, {}).items()}


def build(
    model: nn.Module,
    cfg,
    as_global: Callable[[str, Tensor], Tensor] = lambda name, x: x,
    dtype: torch.dtype = torch.float32,
) -> Optimizer:
    """The optimizer that cfg.optimizer names: adamw trains everything; muon trains hidden matrices, AdamW the rest.

    as_global(name, x) returns this rank's part x of the parameter `name`, or of its update, as a DTensor with the shape
    of the full parameter. dtype is that of the run's matrix products.
    """
    names = {p: name for name, p in model.named_parameters()}
    hidden = OPTIMIZER[cfg.optimizer](model)
    if hidden and cfg.learning_rate == 0:
        raise ValueError(
            "learning_rate=0.0 with optimizer=muon: muon_lr is scheduled in proportion to it; set learning_rate above 0"
        )
    rest = [p for p in model.parameters() if p.requires_grad and p not in hidden]  # a tied weight occurs once
    groups, betas = decay_groups(rest, cfg.weight_decay), (cfg.beta1, cfg.beta2)
    adamw = AdamW(groups, cfg.learning_rate, betas)
    if not hidden:
        return Optimizer({adamw: 1.0})
    muon = Muon(hidden, cfg.muon_lr, cfg.muon_momentum, cfg.weight_decay, lambda p, x: as_global(names[p], x), dtype)
    return Optimizer({adamw: 1.0, muon: cfg.muon_lr / cfg.learning_rate})


def hidden_matrices(model: nn.Module) -> dict[nn.Parameter, Fused | None]:
    """The weights that Muon trains (linear layers within blocks) -> their logical matrices, see Linear.fused."""
    return {m.weight: m.fused for m in model.modules() if isinstance(m, Linear) and m.weight.requires_grad}


OPTIMIZER = {"adamw": lambda model: {}, "muon": hidden_matrices}  # flag -> the weights that Muon trains


def decay_groups(params: Iterable[nn.Parameter], weight_decay: float) -> list[dict]:
    """Parameter groups with and without weight decay: matrices decay; vectors, gains and no_decay parameters do not."""
    groups = {True: [], False: []}
    for p in params:
        groups[p.dim() >= 2 and not getattr(p, "no_decay", False)].append(p)
    return [{"params": ps, "weight_decay": weight_decay * decays} for decays, ps in groups.items() if ps]
