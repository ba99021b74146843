"""Refuses, before anything is allocated, a run, a sampling or an evaluation that can never fit into the memory.

    check_training(cfg, device, size)           # ValueError names the flag to lower
    check_sampling(cfg, flags, device)
    check_evaluation(cfg, flags, ranks)

What is needed at least is compared with the total memory, not with the free memory, which other programs may increase.
So a run that could fit is never refused; --plan=True prints the whole estimate. GiB are 2**30 bytes.
"""

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from engine.device import process_memory, resolve_dtype
from engine.parallel.ranks import environment
from engine.plan.estimate import STATES, compiled, estimate_rank
from model import Model
from ops import rows_at_once

Need = dict[str, int]  # kind -> bytes
PARAMETERS, OFFLOADED, CHECKPOINT = "parameters", "parameters on the host", "the checkpoint's weights"
SIZES = ["batch_size", "block_size", "n_layer", "n_embd", "vocab_size", "mlp_ratio", "n_slot", "n_encoder_layer"]
MORE_RANKS = "lower {flag}, or divide them among more ranks with --parallel=fsdp; see --plan=True"
REMEDY = {PARAMETERS: MORE_RANKS, OFFLOADED: MORE_RANKS, CHECKPOINT: "use a machine with more memory"}
CERTAIN = 0.75  # share of the estimated activations that a run takes at least,
COMPILED = 0.4  # and a compiled run, which keeps less than the uncompiled blocks that are measured
SMALL = 2**30  # bytes that every machine has, so that small runs start at once
LONG = 2**12  # tokens of a text; to measure the attention of longer ones could take minutes
UNCOUNTABLE = 2**63  # bytes, of tensors that PyTorch cannot make


def n_params(cfg) -> int:
    """The model's number of parameters, without their memory."""
    with suppress(RuntimeError), torch.device("meta"):
        return Model(cfg).n_params()
    return UNCOUNTABLE // 4


def training_need(cfg, device: torch.device, size: int) -> Need:
    """The least peak memory of a rank of `size`: in the update, or in the loss before there are gradients."""
    if cfg.block_size > LONG:
        return need_of_long_texts(cfg, device, size)
    cfg = copy.copy(cfg)
    cfg.world_size = size
    try:
        parts, on_device, on_host = estimate_rank(cfg, device.type).memory()
    except RuntimeError:  # a size has more than 63 bits
        return {PARAMETERS: UNCOUNTABLE}
    states = sum(parts[kind] for kind in STATES)
    share = COMPILED if compiled(cfg, device) else CERTAIN
    activations = share * (on_device + on_host - states) - parts["gradients"]
    return {OFFLOADED if on_host else PARAMETERS: states, "activations": max(0, int(activations))}


def need_of_long_texts(cfg, device: torch.device, size: int) -> Need:
    """As training_need, but of the activations only the stream behind each block."""
    need = evaluation_need(cfg, cfg.batch_size, device, size)
    tokens = cfg.batch_size * cfg.block_size // cfg.cp // cfg.pp
    stream = resolve_dtype(cfg.dtype, device).itemsize * tokens * cfg.n_embd // cfg.tp
    states = 3 * need.pop(PARAMETERS)  # parameters, gradients and the mean gradient
    kind = OFFLOADED if cfg.fsdp_offload else PARAMETERS
    return {kind: states, "activations": need["activations"] + cfg.n_layer * stream}


def evaluation_need(flags, batch_size: int, device: torch.device, size: int) -> Need:
    """The least memory of a rank that evaluates a model with these flags: weights, the stream, and a chunk's logits."""
    sharded = flags.parallel == "fsdp" and size > 1
    cut = size // flags.dp_replicate if sharded else flags.tp * flags.pp * flags.ep
    tokens = batch_size * flags.block_size // flags.cp // flags.pp
    rows = min(tokens, rows_at_once(flags.loss_chunk, flags.vocab_size, device))
    numbers = tokens * flags.n_embd + rows * flags.vocab_size
    activations = resolve_dtype(flags.dtype, device).itemsize * numbers // flags.tp
    return {PARAMETERS: 4 * n_params(flags) // cut, "activations": activations}


def check_training(cfg, device: torch.device, size: int):
    """ValueError if a rank of this run on `size` ranks needs more memory than it can have."""
    if cfg.eval_only:
        return check_memory(cfg, device, lambda c: evaluation_need(c, c.batch_size, device, size), SIZES)
    tokens = cfg.batch_size * cfg.block_size
    if 16 * n_params(cfg) * (1 + tokens) > SMALL:  # four numbers of each token for each parameter are more than enough
        check_memory(cfg, device, lambda c: training_need(c, device, size), SIZES)


def check_evaluation(cfg, flags, ranks):
    """ValueError if evaluating a model with these flags, as evaluate.py's cfg says, needs more memory than there is."""

    def need(c) -> Need:
        parts = evaluation_need(flags, c.batch_size, ranks.device, ranks.size)
        return {CHECKPOINT: parts.pop(PARAMETERS)} | parts

    check_memory(cfg, ranks.device, need, ["batch_size"])


def check_weights(cfg, flags, device: torch.device):
    """ValueError if the weights of such a model, which cfg.out_dir names, need more memory than there is."""
    check_memory(cfg, device, lambda _: {CHECKPOINT: 4 * n_params(flags)}, ["out_dir"])


def check_sampling(cfg, flags, device: torch.device):
    """ValueError if sampling with cfg from a model with these flags needs more memory than the process can have."""
    weights = 4 * n_params(flags)
    readers = [(reader, n) for sums, n in flags.layers for readers in sums for reader in readers]
    heads = sum(n * flags.part(reader).kv_heads for reader, n in readers if reader.source == "context")
    if flags.objective == "masked":
        heads = 0
    per_token = 2 * resolve_dtype(cfg.dtype, device).itemsize * heads * flags.head_size

    def need(c) -> Need:
        most = flags.block_size * (2 if c.overflow == "roll" else 1)
        length = min(most, 1 + c.max_new_tokens)  # the prompt has at least one token
        keys = c.num_samples * length * per_token
        return {CHECKPOINT: weights, "keys and values": keys, "logits": 4 * c.num_samples * flags.vocab_size}

    check_memory(cfg, device, need, ["num_samples", "max_new_tokens"])


def check_memory(cfg, device: torch.device, need: Callable[[Any], Need], sizes: list[str]):
    """ValueError if need(cfg) exceeds the memory. It names the flag of `sizes` whose usual value would save most."""
    host, cuda = process_memory(environment().local_size), device.type == "cuda"
    memories = [("a process of this machine", host, lambda kind: kind == OFFLOADED or not cuda)]
    if cuda:
        memories.append(
            ("the GPU", torch.cuda.get_device_properties(device).total_memory, lambda kind: kind != OFFLOADED)
        )
    needed = need(cfg)
    for where, limit, holds in memories:
        parts = {kind: n for kind, n in needed.items() if holds(kind)}
        total = sum(parts.values())
        if total <= limit:
            continue
        most, flag = max(parts, key=parts.get), largest(cfg, need, sizes)
        if most == CHECKPOINT:
            flag = "out_dir"
        remedy = REMEDY.get(most, "lower {flag}").format(flag=flag)
        if flag == "vocab_size" and flag not in cfg.sources:
            remedy = "prepare the data with a smaller vocabulary"
        source = f" ({cfg.sources[flag]})" if flag in cfg.sources else ""
        raise ValueError(
            f"{flag}={getattr(cfg, flag)}{source} needs at least {total / 2**30:,.1f} GiB, most of it for {most}, and "
            f"{where} can have {limit / 2**30:,.1f} GiB of memory; {remedy}"
        )


def largest(cfg, need: Callable[[Any], Need], sizes: list[str]) -> str:
    """The flag whose usual value would save most, among those with a larger one; otherwise the first."""
    left = {}
    for name in sizes:
        usual = 50304 if name == "vocab_size" else type(cfg).__dataclass_fields__[name].default
        if getattr(cfg, name) <= usual:
            continue
        less = copy.copy(cfg)  # since replace() would check all flags again
        setattr(less, name, usual)
        left[name] = math.inf
        with suppress(ValueError, ZeroDivisionError):  # this value does not go with another flag
            left[name] = sum(need(less).values())
    return min(left, key=left.get, default=sizes[0])
