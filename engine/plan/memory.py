"""Refuses, before anything is allocated, a run, a sampling or an evaluation that can never fit into the memory.

What it needs at least, for a training as --plan=True estimates it, is compared with the total memory, as other programs
may free theirs. So what could fit is never refused.
"""

from contextlib import suppress

import torch

from engine.device import process_memory
from engine.parallel.connection import environment
from engine.plan.accounting import n_read, skeleton
from engine.plan.estimate import Rank
from flags import refuse
from model import heads_of

SIZES = ["n_embd", "n_layer", "n_encoder_layer", "mlp_ratio", "n_slot", "n_group"]
FLAGS = {  # kind -> the flags that determine it: the first, and others that were set
    "parameters": ["vocab_size", *SIZES],
    "activations": ["batch_size", "block_size", "vocab_size", *SIZES],
    "weights": ["out_dir"],
    "samples": ["num_samples"],
}


def check_training(cfg, device: torch.device, size: int):
    """ValueError if a rank of this run on `size` ranks needs more memory than it can have. Blocks are measured, which
    takes seconds, only if the results of all their products would not fit beside the states."""
    try:
        rank = Rank(cfg, size, device)
    except RuntimeError:  # a size has more than 63 bits
        check(cfg, {"parameters": 2**63}, device)
    limit, _ = memory_of(device)
    products = 4 * cfg.batch_size * sum(rank.lengths) * n_read(rank.model) // (cfg.n_embd * cfg.cp * cfg.tp)
    if not cfg.eval_only and rank.states <= limit < rank.states + products:
        with suppress(RuntimeError):  # blocks that fake tensors cannot compute may fit
            rank.measure()
    check(cfg, need_of(rank, "parameters", not cfg.eval_only), device)


def need_of(rank: Rank, kind: str, training: bool) -> dict[str, float]:
    """The least memory of a rank, whose states are of this kind: in an evaluation, or in a training in the update, or
    in the loss of the first micro-step, before there are gradients."""
    cfg = rank.cfg
    states = rank.parameters
    activations = rank.streams[0] // cfg.pp + rank.size * rank.logits
    if "activations" in rank.memory:
        kept = rank.memory["activations"] + rank.memory["logits and loss"]
        activations = kept / (3 if cfg.compile else 1.5)  # what is rounded up, and what compilation may save
    if training:
        states = rank.states
        activations = max(0, activations - rank.parameters)
    if cfg.pp > 1:
        states /= 2  # at least, as the rank may have one end of the model and fewer layers
    return {kind: states, "activations": activations}


def sampling_need(cfg, flags) -> dict[str, float]:
    """The least memory of sampling with cfg from a model with these flags: keys and values, and logits."""
    of_sample = 4 * flags.vocab_size
    if flags.objective != "masked":
        heads = sum(n * heads_of(flags, reader)[1] for reader, n in flags.readers if reader.source == "context")
        keys = min(flags.block_size, 1 + cfg.max_new_tokens) * heads * flags.head_size
        width = 4 if cfg.dtype == "float32" else 2
        of_sample += 2 * width * keys
    return weights_need(flags) | {"samples": cfg.num_samples * of_sample}


def weights_need(flags) -> dict[str, float]:
    return {"weights": 4 * skeleton(flags).n_params()}


def memory_of(device: torch.device) -> tuple[int, str]:
    """The bytes of memory that this process can have, and where."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, "the GPU"
    return process_memory(environment().local_size), "a process of this machine"


def check(cfg, need: dict[str, float], device: torch.device):
    """ValueError if a process needs more memory than it can have. It names the flags that determine what needs most."""
    limit, where = memory_of(device)
    total = sum(need.values())
    if total > limit:
        most = max(need, key=need.get)
        names = [name for name in FLAGS[most] if name in cfg.sources or name == FLAGS[most][0]]
        remedy = "use a machine with more memory, or make it smaller"
        if most == "parameters":
            remedy += ", or divide them among more ranks with --parallel=fsdp; see --plan=True"
        fact = f"needs at least {total / 2**30:,.1f} GiB, most of it for {most}"
        refuse(cfg, " ".join(names), f"{fact}, and {where} can have {limit / 2**30:,.1f} GiB of memory; {remedy}")
