"""Refuses, before anything is allocated, a run, a sampling or an evaluation that can never fit into the memory.

What is needed at least is compared with the total memory, not with the free memory, which other programs may increase.
So a run that could fit is never refused; --plan=True prints an estimate of the whole need.
"""

import torch

from engine.device import process_memory
from engine.optim import OPTIMIZER, Muon, state_bytes
from engine.parallel.connection import environment
from engine.plan.accounting import readings, skeleton
from flags import refuse
from model import heads_of
from ops import rows_at_once

Need = dict[str, int]  # kind -> bytes
SIZES = ["n_embd", "n_layer", "n_encoder_layer", "mlp_ratio", "n_slot", "n_group"]
FLAGS = {  # kind -> the flags that determine it: the first, and others that were set
    "parameters": ["vocab_size", *SIZES],
    "activations": ["batch_size", "block_size", "vocab_size", *SIZES],
    "weights": ["out_dir"],
    "samples": ["num_samples"],
}


def training_need(cfg, lengths: tuple[int, int], device: torch.device, size: int) -> Need:
    """The least peak memory of a rank of `size`, on sequences of these lengths: in the update, or in the loss of the
    first micro-step, before there are gradients."""
    need = evaluation_need(cfg, cfg.batch_size, device, size)
    parameters = need.pop("weights")
    if cfg.eval_only:
        return {"parameters": parameters, **need}
    optimizer = OPTIMIZER[cfg.optimizer]
    kind = Muon if optimizer.muon else optimizer.rest  # Muon keeps less
    states = 2 * parameters + state_bytes(kind, parameters // 4)
    if cfg.fsdp_offload:
        states = 0  # on the device
    activations = need["activations"] + kept(cfg, lengths) // (cfg.tp * cfg.cp * cfg.pp)
    return {"parameters": states, "activations": max(0, activations - parameters)}


def kept(cfg, lengths: tuple[int, int]) -> int:
    """Bytes that ranks keep of a micro-batch for the backward at least: what enters each block and, unless it is
    recomputed, what projections make: queries, keys, values and hidden units."""
    numbers = cfg.n_layer * cfg.n_embd * lengths[0]
    if cfg.activation_checkpoint == "none":
        for m, tokens in readings(skeleton(cfg), *lengths):
            if m.role in ("into", "memory"):
                numbers += int(m.weight.numel() * m.read_share) // m.weight.size(-1) * tokens
    return width(cfg.dtype) * cfg.batch_size * numbers


def evaluation_need(flags, batch_size: int, device: torch.device, size: int) -> Need:
    """The least memory of a rank that evaluates a model with these flags: weights, the stream, and a chunk's logits."""
    cut = flags.tp * flags.pp * flags.ep
    if flags.parallel == "fsdp":
        cut = size // flags.dp_replicate
    tokens = batch_size * flags.block_size // flags.cp // flags.pp
    rows = min(tokens, rows_at_once(flags.loss_chunk, flags.vocab_size, device))
    numbers = tokens * flags.n_embd + rows * flags.vocab_size
    return {"weights": weights(flags) // cut, "activations": width(flags.dtype) * numbers // flags.tp}


def sampling_need(cfg, flags) -> Need:
    """The least memory of sampling with cfg from a model with these flags: keys and values, and logits."""
    of_sample = 4 * flags.vocab_size
    if flags.objective != "masked":
        heads = sum(n * heads_of(flags, reader)[1] for reader, n in flags.readers if reader.source == "context")
        keys = min(flags.block_size, 1 + cfg.max_new_tokens) * heads * flags.head_size
        of_sample += 2 * width(cfg.dtype) * keys
    return {"weights": weights(flags), "samples": cfg.num_samples * of_sample}


def weights(flags) -> int:
    """Bytes of the weights of a model with these flags."""
    return 4 * skeleton(flags).n_params()


def width(dtype: str) -> int:
    """The least bytes of a number that is computed under this value of the flag dtype."""
    return 4 if dtype == "float32" else 2


def check_training(cfg, lengths: tuple[int, int], device: torch.device, size: int):
    """ValueError if a rank of this run on `size` ranks needs more memory than it can have."""
    try:
        need = training_need(cfg, lengths, device, size)
    except RuntimeError:  # a size has more than 63 bits
        need = {"parameters": 2**63}
    check(cfg, need, device)


def check(cfg, need: Need, device: torch.device):
    """ValueError if a process needs more memory than it can have. It names the flags that determine what needs most."""
    where = "a process of this machine"
    limit = process_memory(environment().local_size)
    if device.type == "cuda":
        where = "the GPU"
        limit = torch.cuda.get_device_properties(device).total_memory
    total = sum(need.values())
    if total > limit:
        most = max(need, key=need.get)
        first, *others = FLAGS[most]
        names = [first, *(name for name in others if name in cfg.sources)]
        remedy = "use a machine with more memory, or make it smaller"
        if most == "parameters":
            remedy += ", or divide them among more ranks with --parallel=fsdp; see --plan=True"
        fact = f"needs at least {total / 2**30:,.1f} GiB, most of it for {most}"
        refuse(cfg, " ".join(names), f"{fact}, and {where} can have {limit / 2**30:,.1f} GiB of memory; {remedy}")
