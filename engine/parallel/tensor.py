"""Tensor parallelism with sequence parallelism (Megatron-LM, arXiv:1909.08053 and 2205.05198), applied from outside.

    apply_tensor_parallel(model, group)     in place: afterwards every rank of the group holds its slices as parameters
    sharded_dim(model, name)                the dimension along which the parameter is cut, or None if it is not cut

The roles that modules declare decide what is cut; docs/hacking.md has the table. The stream is cut along T.
Within a sum, heads and hidden units are cut instead:

    s (T/n) --+-- before -- all-gather -- into -- heads, hidden units -- out -- reduce-scatter -- after -- + --> s
              +--------------------------------------------------------------------------------------------+

So each sum costs one all-gather and one reduce-scatter in the forward, and the same in the backward. In between, each
rank computes one term of a sum over the ranks. So a parameter that is not cut gets only a part of its gradient on each
rank, and the caller sums these parts over the group once per step. The loss is the same on all ranks, so each of them
computes the gradient of its n-th part.

    n ranks of the group   B batch   T time   C width   V vocabulary
"""

from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # which gives `collectives` their gradients
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from data.objective import objective_of
from engine.config import Config
from flags import refuse
from model import ExpertLinear, Linear, Neighbours, heads_of, hidden_units, stream_dtype
from ops import ChunkedCrossEntropy, at_least_float32, capped, grouped_linear, linear, matmul_dtype, rows_at_once

collectives = torch.ops._c10d_functional

REPLICATED = ("after_row", "router", "before", "after", "total", "last", "replicated")
# role -> dimension of the weight that is cut, or None; 0 also cuts the bias
SHARDED_DIM = {"vocab": 0, "column": 0, "memory_column": 0, "row": 1} | dict.fromkeys(REPLICATED)


def sharded_dim(model: nn.Module, name: str) -> int | None:
    """The dimension along which the parameter `name`, such as blocks.0.sums.0.attn.qkv.weight, is cut over the ranks;
    None if every rank has all of it. ValueError if its module neither declares a role nor names it in per_head."""
    layer, _, kind = name.rpartition(".")
    module = model.get_submodule(layer)
    if kind in getattr(module, "per_head", ()):
        return 0
    role = getattr(module, "role", None)
    if role not in SHARDED_DIM:
        fact = f"tensor parallelism does not know how to cut {name}: its module {type(module).__name__} has role={role}"
        roles = f"{', '.join(SHARDED_DIM)} (docs/hacking.md)"
        remedy = f"declare one of {roles}, name it in per_head, or write a learned scalar as Gain(0.5)"
        raise ValueError(f"{fact}; {remedy}")
    dim = SHARDED_DIM[role]
    if dim is None or dim == 1 and kind == "bias":
        return None
    return dim + isinstance(module, ExpertLinear)  # whose first dimension is the expert


def check(cfg: Config):
    """ValueError if the model cannot be cut for tp ranks."""
    n = cfg.tp
    if cfg.objective == "seq2seq":
        text, source = objective_of(cfg, cfg.vocab_size, eot=0).lengths
        if text % n or source % n:
            fact = f"does not divide the {text} tokens of the text or the {source} of its source"
            refuse(cfg, "tp", f"{fact}; change block_size, corrupt_ratio or span_length")
    if cfg.block_size % n:
        refuse(cfg, "tp block_size", f"tp does not divide it; set --block_size={-(-cfg.block_size // n) * n}")
    if cfg.dropout > 0:
        refuse(cfg, "dropout tp", "these do not go together; leave dropout out, or set tp=1")
    for reader, _ in cfg.readers:
        if not reader.units:
            _, kv_heads = heads_of(cfg, reader)
            if kv_heads % n:
                refuse(cfg, "tp", f"does not divide the number of key/value heads, {kv_heads}; set a divisor")
        elif reader.phi == "softmax":
            refuse(cfg, "block tp", "the softmax of p needs all its units; set tp=1")
        elif hidden_units(cfg, reader) % (cfg.hidden_multiple * n):
            units = f"{hidden_units(cfg, reader)} hidden units in groups of {cfg.hidden_multiple}"
            refuse(cfg, "tp", f"does not divide the MLP's {units}; set another tp, n_embd or mlp_ratio")


def gathered(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The x of all ranks, concatenated along dim. Its backward is `scattered`: between all-gather and reduce-scatter,
    each rank computes one term of a sum over the ranks."""
    n = dist.get_world_size(group)
    out = collectives.all_gather_into_tensor(x.contiguous(), n, group.group_name)
    return torch.cat(collectives.wait_tensor(out).chunk(n), dim)


def scattered(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's piece, along dim, of the sum of x over the ranks. Its backward is `gathered`."""
    n = dist.get_world_size(group)
    x = torch.cat(x.chunk(n, dim))  # of which the collective cuts the first dimension
    out = collectives.reduce_scatter_tensor(x, "sum", n, group.group_name)
    return collectives.wait_tensor(out)


def apply_tensor_parallel(model: nn.Module, group: ProcessGroup):
    """Keep this rank's slices of the model's parameters, and insert the collectives. Call it before FSDP, DDP and
    torch.compile, on a whole model with equal weights on all ranks. ValueError names a parameter without a role."""
    cuts = {name: sharded_dim(model, name) for name, _ in model.named_parameters()}  # may raise before any cut
    n = dist.get_world_size(group)
    rank = dist.get_rank(group)
    cut_parameters(model, cuts, rank, n)

    def gather(module: nn.Module, args: tuple, x: Tensor) -> Tensor:
        return gathered(x.to(matmul_dtype(x)), 1, group)

    def reduce(module: nn.Module, args: tuple) -> Tensor:
        x = args[0]  # in float32 if a gain has scaled it
        return scattered(x.to(stream_dtype(model.cfg, x)), 1, group)

    for module in model.modules():
        role = getattr(module, "role", None)
        if isinstance(module, Neighbours):
            module.register_forward_pre_hook(partial(check_uncut, model, n))
        if isinstance(module, Linear):
            module.register_forward_pre_hook(partial(check_width, model, n))
        if role in ("before", "last"):
            module.register_forward_hook(gather)
        elif role == "after":
            module.register_forward_pre_hook(reduce)
        elif isinstance(module, nn.Identity) and role == "column":
            module.register_forward_pre_hook(lambda module, args: args[0].chunk(n, -1)[rank])
        elif isinstance(module, nn.Identity) and role == "row":
            module.register_forward_hook(lambda module, args, x: pad_to_width(rank, n, x))
        elif isinstance(module, Linear) and role in ("row", "after_row") and module.bias is not None:
            module.forward = partial(row_parallel, module, n)
    cut_ends(model, group)


def cut_ends(model: nn.Module, group: ProcessGroup):
    """Let the embedding, the table of positions and the head work with this rank's slices."""
    n = dist.get_world_size(group)
    rank = dist.get_rank(group)
    if isinstance(model.wte, nn.Embedding):  # as on the first stage of a pipeline
        model.wte.forward = partial(lookup, model, rank, group)
        model.pos.register_forward_pre_hook(lambda module, args: (args[0], args[1].chunk(n, -1)[rank]))
    for stack in filter(None, (model, model.encoder)):
        stack.position_table = partial(local_heads, stack.position_table, rank, n)
    if isinstance(model.head, nn.Linear):  # as on the last one
        model.chunk_loss = parallel_chunk_loss(group, model.cfg.vocab_size)
        model.cross_entropy = partial(parallel_cross_entropy, model, n)
        model.logits = partial(parallel_logits, model, group)
        loss = model.loss
        model.loss = lambda x, targets: scaled_gradient(loss(x, targets), 1 / n)


def name_of(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, each in model.named_modules() if each is module)


def check_width(model: nn.Module, n: int, layer: Linear, args: tuple):
    """ValueError if the layer gets a cut input where it reads a whole one, or the other way round."""
    width = args[0].size(-1)
    if width != layer.weight.size(-1):
        reads = f"{name_of(model, layer)}, of role={layer.role}, reads {layer.weight.size(-1)} channels"
        fact = f"tp={n}: {reads} and gets {width}"
        raise ValueError(f"{fact}; a reader begins with role column and ends with row (docs/hacking.md), or set tp=1")


def check_uncut(model: nn.Module, n: int, module: Neighbours, args: tuple):
    """ValueError if the module reads a piece of the stream."""
    x, inputs, _ = args
    if x.size(-2) < inputs.idx.size(1):
        refuse_cut(model, n, module)


def refuse_cut(model: nn.Module, n: int, module: Neighbours) -> NoReturn:
    """Raise ValueError: the module reads a piece of the stream, so it does not see all the tokens before each one."""
    where = f"where {name_of(model, module)} reads it"
    raise ValueError(f"tp={n} cuts the stream along T {where}; let it read before(s), or set tp=1")


def cut_parameters(model: nn.Module, cuts: dict[str, int | None], rank: int, n: int):
    """Replace the model's parameters by the rank-th of n slices, each along its dimension in cuts, if it has one."""
    for name, module in model.named_modules():
        fused = getattr(module, "fused", None)
        if fused and fused[0] % n:
            raise ValueError(f"tp={n} does not divide the {fused[0]} groups of rows of {name}; set another tp")
        if isinstance(module, Neighbours) and ".sums." not in name:
            refuse_cut(model, n, module)
    for name, dim in cuts.items():
        if dim is not None:
            keep_slice(model, name, dim, rank, n)
    model.tie()


def keep_slice(model: nn.Module, name: str, dim: int, rank: int, n: int):
    """Replace a parameter by the rank-th of n slices along dim."""
    layer, _, kind = name.rpartition(".")
    mine = model.get_parameter(name).detach().chunk(n, dim)[rank]
    setattr(model.get_submodule(layer), kind, nn.Parameter(mine.clone()))


def row_parallel(layer: nn.Linear, n: int, x: Tensor, *ends: Tensor) -> Tensor:
    """This rank's term of the layer's output: each of n ranks adds bias / n, so that the sum has the bias once."""
    bias = layer.bias / n
    if ends:  # of experts
        return grouped_linear(x, layer.weight, bias, *ends, layer.loop)
    return linear(x, layer.weight, bias)


def pad_to_width(rank: int, n: int, x: Tensor) -> Tensor:
    """(..., C/n) -> (..., C): x as the rank-th of n pieces, with zeros elsewhere."""
    width = x.size(-1)
    return F.pad(x, (rank * width, (n - 1 - rank) * width))


def lookup(model: nn.Module, rank: int, group: ProcessGroup, idx: Tensor) -> Tensor:
    """Token embeddings, in the stream's dtype: idx (B, T) -> (B, T/n, C). Each rank looks up the ids of its rows."""
    wte = model.wte
    row = idx - rank * wte.weight.size(0)  # (B, T)
    here = (row >= 0) & (row < wte.weight.size(0))
    x = F.embedding(row.where(here, 0), wte.weight)
    return scattered(x.to(stream_dtype(model.cfg, x)) * here[..., None], 1, group)


def local_heads(table: Callable, rank: int, n: int, t: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The table of positions, with only the rows of this rank's heads."""
    return tuple(x.chunk(n)[rank] if x.dim() == 3 else x for x in table(t, dtype))


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """x, whose gradient is multiplied by the factor."""
    if x.requires_grad:
        x.register_hook(lambda grad: grad * factor)
    return x


def parallel_cross_entropy(model: nn.Module, n: int, x: Tensor, targets: Tensor) -> Tensor:
    """Model.cross_entropy for a head of V/n rows, padding included. Its gradient for x is already this rank's term."""
    cfg = model.cfg
    weight = model.head.weight
    chunk = rows_at_once(targets.numel(), cfg.loss_chunk, len(weight), x.device)
    options = cfg.logit_softcap, chunk, model.chunk_loss, torch.is_grad_enabled()
    return scaled_gradient(ChunkedCrossEntropy.apply(x, weight, targets, options), n)


def parallel_logits(model: nn.Module, group: ProcessGroup, x: Tensor) -> Tensor:
    """Model.logits for a head of V/n rows: all columns, on every rank."""
    logits = gathered(linear(x, model.head.weight), -1, group)[..., : model.cfg.vocab_size]
    return capped(at_least_float32(logits), model.cfg.logit_softcap)


def parallel_chunk_loss(group: ProcessGroup, vocab_size: int) -> Callable:
    """ops.chunk_loss for logits (N, V/n) whose columns are cut over the ranks; those from vocab_size on are padding.
    Ranks exchange three numbers per token. Compiled, it takes two large kernels."""

    def chunk_loss(logits: Tensor, targets: Tensor, softcap: float, gradient: bool) -> tuple[Tensor, Tensor | None]:
        n = logits.size(1)
        first = dist.get_rank(group) * n
        valid = (targets >= 0)[:, None]
        index = (targets - first)[:, None]
        here = (index >= 0) & (index < n)
        index = index.where(here, 0)
        z = capped(at_least_float32(logits), softcap)
        slope = 1.0
        if softcap > 0 and gradient:
            slope = 1 - (z / softcap).square()
        own = max(0, vocab_size - first)  # columns that are no padding
        z[:, own:] = torch.finfo(z.dtype).min
        largest = z.amax(-1, keepdim=True)
        normaliser = (z - largest).exp_().sum(-1, keepdim=True)
        most = largest.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        sums = torch.cat((normaliser * (largest - most).exp(), z.gather(1, index) * here), dim=1)
        dist.all_reduce(sums, group=group)
        normaliser, of_target = sums.split(1, dim=1)
        log_normaliser = most + normaliser.log()
        total = ((log_normaliser - of_target) * valid).sum()
        if not gradient:
            return total, None
        p = z.sub(log_normaliser).exp_()
        if torch.compiler.is_compiling():  # see ops.chunk_loss
            p = p - ((torch.arange(n, device=z.device) == index) & here).to(p.dtype)
        else:
            p.scatter_add_(1, index, -here.to(p.dtype))
        return total, p.mul_(valid * slope).to(logits.dtype)

    return chunk_loss
