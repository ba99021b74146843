"""Learning rate schedules and optimizers: AdamW, and Muon for the hidden matrices with AdamW for the rest.

Call `build` after sharding and tensor parallelism, which replace parameters. A new optimizer is a subclass of
UpdateRule and an entry of OPTIMIZER; docs/hacking.md adds one.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from engine.config import Config
from engine.parallel.distributed_muon import Owners
from engine.parallel.layout import local
from engine.parallel.sharded import ShardedModel, load_biases
from flags import refuse
from model import Convolution, ExpertLinear, Fused, Linear

# ---- Schedules


def learning_rate(step: int, cfg: Config) -> float:
    """The learning rate of step `step` (the first is 0): a linear warm-up, then cfg.schedule."""
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    return SCHEDULE[cfg.schedule](step, cfg.lr_decay_iters or cfg.max_iters, cfg)


def rescheduled(cfg: Config, flags: dict) -> str:
    """A warning if max_iters moves the end of the schedule that the checkpoint's flags have, otherwise ""."""
    end = flags.get("lr_decay_iters") or flags.get("max_iters", cfg.max_iters)
    if cfg.schedule == "constant" or cfg.lr_decay_iters or cfg.max_iters == end:
        return ""
    fact = f"max_iters={cfg.max_iters} moves the end of the schedule, which was {end}"
    return f"warning: {fact}; --lr_decay_iters={end} keeps the old schedule"


def constant(step: int, end: int, cfg: Config) -> float:
    return cfg.learning_rate


def cosine(step: int, end: int, cfg: Config) -> float:
    """Half a cosine from the end of the warm-up to min_lr at step `end` (arXiv:1608.03983; nanoGPT's get_lr)."""
    if step >= end:
        return cfg.min_lr
    progress = (step - cfg.warmup_iters) / (end - cfg.warmup_iters)
    return cfg.min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (cfg.learning_rate - cfg.min_lr)


def wsd(step: int, end: int, cfg: Config) -> float:
    """Warm-up, stable, decay (arXiv:2404.06395): linear over the last cooldown_iters to min_lr at step `end`."""
    left = min(1.0, max(0, end - step) / (cfg.cooldown_iters or max(1, end // 5)))
    return cfg.min_lr + left * (cfg.learning_rate - cfg.min_lr)


SCHEDULE = {"cosine": cosine, "wsd": wsd, "constant": constant}


# ---- Optimizers


class UpdateRule:
    """The base class of optimizers. Ranks may hold any part of a parameter, so a step treats each number alone, or
    gathers the parts as Muon does.

    A subclass has two methods. new_state(p), a static method, makes the tensors that it keeps of a parameter, by name.
    update(group, weights, grads, **state) makes a step, in place: it takes a list of tensors for the weights, for the
    gradients and for each name of the state. group holds lr, betas and weight_decay.
    """

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, ...]):
        self.param_groups = [group | {"lr": lr, "betas": betas} for group in groups]
        self.state = {p: self.new_state(p) for group in groups for p in group["params"]}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            weights = [local(p) for p in params]
            grads = [local(p.grad) for p in params]
            kinds = self.state[params[0]]
            state = {kind: [local(self.state[p][kind]) for p in params] for kind in kinds}
            self.update(group, weights, grads, **state)


class AdamW(UpdateRule):
    """AdamW (arXiv:1711.05101) in PyTorch's fused kernel. torch.optim.AdamW does the same, after it has imported
    torch._dynamo in a second or two."""

    @staticmethod
    def new_state(p: Tensor) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def update(self, group: dict, weights: list[Tensor], grads: list[Tensor], step, exp_avg, exp_avg_sq):
        beta1, beta2 = group["betas"]
        options = {"weight_decay": group["weight_decay"], "eps": 1e-8, "amsgrad": False, "maximize": False}
        torch._foreach_add_(step, 1)
        torch._fused_adamw_(
            weights, grads, exp_avg, exp_avg_sq, [], step, lr=group["lr"], beta1=beta1, beta2=beta2, **options
        )


class Balance(UpdateRule):
    """Moves the bias of each expert by cfg.balance_rate against the sign of its gradient, see model.LoadBalance, unless
    loads are equal but for rounding."""

    @staticmethod
    def new_state(p: Tensor) -> dict[str, Tensor]:
        return {}

    def update(self, group: dict, weights: list[Tensor], grads: list[Tensor]):
        for bias, excess in zip(weights, grads, strict=True):
            bias.sub_(F.hardshrink(excess, 1e-5).sign(), alpha=group["lr"])


class Average(UpdateRule):
    """Keeps an average of the weights, A = d A + (1 - d) W after each step, as the state of an optimizer."""

    @staticmethod
    def new_state(p: Tensor) -> dict[str, Tensor]:
        return {"average": p.detach().clone()}

    def update(self, group: dict, weights: list[Tensor], grads: list[Tensor], average: list[Tensor]):
        torch._foreach_lerp_(average, weights, 1 - group["decay"])


class Muon(UpdateRule):
    """Trains hidden matrices with orthogonalised momentum (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).

        b = mu b + (1 - mu) g
        U S V^T = (1 - mu) g + mu b
        W = (1 - lr decay) W - lr sqrt(max(1, rows / columns)) U V^T

    A weight may store several logical matrices. Each is orthogonalised alone: as one matrix they would share their
    singular directions, and the loss is higher. weights maps a weight to None (one matrix) or to the (groups,
    sizes) of model.Linear's `fused`. With owners, ranks share the weights: each rank has the momentum of its part, and
    only a weight's owner orthogonalises its update. dtype is that of the run's matrix products, see `iteration_dtype`.
    """

    LARGEST = 2**27  # numbers that are orthogonalised at once

    def __init__(
        self, weights: dict[nn.Parameter, Fused | None], lr: float, momentum: float, weight_decay: float,
        owners: Owners | None, dtype: torch.dtype,
    ):  # fmt: skip
        super().__init__([{"params": [*weights], "weight_decay": weight_decay}], lr, (momentum,))
        self.owners = owners
        self.dtype = dtype
        self.fused = weights

    @staticmethod
    def new_state(p: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(p)}

    def update(self, group: dict, weights: list[Tensor], grads: list[Tensor], momentum: list[Tensor]):
        [mu] = group["betas"]
        torch._foreach_lerp_(momentum, grads, 1 - mu)
        updates = torch._foreach_mul(grads, 1 - mu)
        torch._foreach_add_(updates, momentum, alpha=mu)
        params = [p for p in group["params"] if p.grad is not None]
        by_weight = dict(zip(params, updates, strict=True))
        if self.owners is None:
            self.orthogonalize_all(by_weight)
        else:
            self.owners.on_full(by_weight, self.orthogonalize_all)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def orthogonalize_all(self, updates: dict[nn.Parameter, Tensor]):
        """Replace each logical matrix U S V^T of the updates by sqrt(max(1, rows/columns)) U V^T, a batch per shape."""
        same_shape: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for p, update in updates.items():
            for piece, shape in logical_matrices(update, self.fused[p]):
                same_shape[shape].append(piece)
        for (rows, columns), pieces in same_shape.items():
            at_once = max(1, self.LARGEST // (rows * columns))
            for start in range(0, len(pieces), at_once):
                some = pieces[start : start + at_once]
                batch = orthogonalize(torch.stack([piece.reshape(rows, columns) for piece in some]), self.dtype)
                batch = batch * max(1, rows / columns) ** 0.5
                for piece, matrix in zip(some, batch, strict=True):
                    piece.copy_(matrix.view_as(piece))


def logical_matrices(x: Tensor, fused: Fused | None) -> Iterator[tuple[Tensor, tuple[int, int]]]:
    """The logical matrices of a weight, or of its update, as views whose groups are apart, and their shapes."""
    groups, sizes = fused or (1, (x.size(-2),))
    for matrix in x.reshape(-1, *x.shape[-2:]):  # experts have a matrix each
        for piece in matrix.unflatten(0, (groups, sum(sizes))).split(sizes, 1):
            yield piece, (groups * piece.size(1), piece.size(2))


def orthogonalize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """U V^T of x = U S V^T, with singular values of about 0.7 to 1.2 instead of 1; x (N, rows, columns). A
    Newton-Schulz iteration with Jordan's quintic polynomial, which is as steep at 0 as these bounds allow."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x / (x.norm(dim=(-2, -1), keepdim=True, dtype=wide) + 1e-7)
    x = x.to(iteration_dtype(dtype))
    tall = x.size(-2) > x.size(-1)
    if tall:  # the Gram matrix is the smaller one
        x = x.mT
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)  # 3.4445 s - 4.7750 s^3 + 2.0315 s^5 on singular values s
    if tall:
        x = x.mT
    return x


def iteration_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of Newton-Schulz: that of the run's matrix products, but bfloat16 where they are in float16."""
    return torch.bfloat16 if dtype == torch.float16 else dtype


class Recipe(NamedTuple):
    """The parts of a run's optimizer: what trains the weights, or with muon=True those that are no hidden matrices."""

    rest: type[UpdateRule]
    muon: bool = False


OPTIMIZER = {"adamw": Recipe(AdamW), "muon": Recipe(AdamW, muon=True)}


@cache
def state_bytes(optimizer: type[UpdateRule], numbers: int) -> int:
    """Bytes of the optimizer's state of a parameter of so many float32 numbers: scalars, and tensors of its shape."""
    state = optimizer.new_state(torch.zeros(1, device="cpu")).values()  # meta tensors would import sympy: a second
    return sum(t.itemsize * (numbers if t.dim() else 1) for t in state)


class Optimizer:
    """The optimizer of a run. parts maps each of its optimizers to its peak learning rate as a multiple of
    cfg.learning_rate, or to None if its rate does not change. All state exists from the start, because a checkpoint is
    loaded in place."""

    def __init__(self, parts: dict[UpdateRule, float | None]):
        self.parts = parts
        self.param_groups: list[dict] = []  # in which a gradient scaler divides the gradients; loads are not scaled
        for part, ratio in parts.items():
            if ratio is not None:
                for group in part.param_groups:
                    group["ratio"] = ratio
                self.param_groups += part.param_groups

    def set_lr(self, lr: float):
        for group in self.param_groups:
            group["lr"] = lr * group["ratio"]

    def step(self):
        for part in self.parts:
            part.step()

    def state_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The state by parameter name and kind, such as "wte.weight.exp_avg": the tensors themselves, not copies."""
        found = {}
        for (name, p), part in product(model.named_parameters(), self.parts):
            for kind, t in part.state.get(p, {}).items():
                found[f"{name}.{kind}"] = t
        return found


def build(
    model: nn.Module, cfg: Config, sharded: ShardedModel | None = None, dtype: torch.dtype = torch.float32
) -> Optimizer:
    """The optimizer that cfg.optimizer names, an entry of OPTIMIZER. sharded says how ranks share the model. dtype is
    that of matrix products."""
    kind = OPTIMIZER[cfg.optimizer]
    hidden = hidden_matrices(model) if kind.muon else {}
    loads = load_biases(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}  # tied: once
    rates = own_rates(model, cfg)
    if cfg.learning_rate == 0 and (rates or hidden):
        why = "muon_lr, conv_lr and others are scheduled in proportion to it; set learning_rate above 0"
        refuse(cfg, "learning_rate", why)
    others = defaultdict(list)  # by their rate
    for p in trained.values():
        if p not in hidden and p not in loads:
            others[rates.get(p, cfg.learning_rate)].append(p)
    parts: dict = {}
    for rate, params in others.items():
        groups = decay_groups(params, cfg.weight_decay, model)
        ratio = rate / cfg.learning_rate if rates else 1.0
        parts[kind.rest(groups, rate, (cfg.beta1, cfg.beta2))] = ratio
    if loads:
        parts[Balance([{"params": list(loads)}], cfg.balance_rate, ())] = None
    if hidden:
        owners = None
        if sharded and sharded.ranks.size > cfg.pp:
            matrices = {p: sharded.layouts[name] for name, p in trained.items() if p in hidden}
            owners = Owners(matrices, sharded.ranks.stage, iteration_dtype(dtype))
        muon = Muon(hidden, cfg.muon_lr, cfg.muon_momentum, cfg.weight_decay, owners, dtype)
        parts[muon] = cfg.muon_lr / cfg.learning_rate
    if cfg.ema_decay:  # the last part, as it reads the new weights
        parts[Average([{"params": [*trained.values()], "decay": cfg.ema_decay}], 0.0, ())] = None
    return Optimizer(parts)


def own_rates(model: nn.Module, cfg: Config) -> dict[nn.Parameter, float]:
    """The highest learning rates of parameters that have their own and no Muon. They follow the schedule of
    cfg.learning_rate in proportion."""
    if not cfg.conv_lr:
        return {}
    return {m.weight: cfg.conv_lr for m in model.modules() if isinstance(m, Convolution)}


def hidden_matrices(model: nn.Module) -> dict[nn.Parameter, Fused | None]:
    """The weights that Muon trains -> their logical matrices, see Linear.fused. They are those of linear layers between
    the stream or the memory and hidden units."""
    hidden = ("column", "memory_column", "row", "after_row")
    layers = [m for m in model.modules() if isinstance(m, Linear) and m.role in hidden]
    return {m.weight: m.fused for m in layers if m.weight.requires_grad}


def decay_groups(params: list[nn.Parameter], weight_decay: float, model: nn.Module) -> list[dict]:
    """Parameter groups with and without weight decay: matrices decay; vectors, gains and biases of experts do not."""
    vectors = {m.bias for m in model.modules() if isinstance(m, ExpertLinear)}  # a row for each expert
    decayed = [p for p in params if p.dim() >= 2 and p not in vectors]
    others = [p for p in params if p.dim() < 2 or p in vectors]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
