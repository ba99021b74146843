"""Refuses, before anything is allocated, a run, a sampling or an evaluation that can never fit into the memory.

What is needed at least is compared with the total memory, not with the free memory, which other programs may increase.
So a run that could fit is never refused; --plan=True prints the whole estimate.
"""

import torch

from engine.device import process_memory, resolve_dtype
from engine.parallel.connection import environment
from engine.plan.estimate import STATES, Rank, compiled
from model import Model, heads_of
from ops import rows_at_once

Need = dict[str, int]  # kind -> bytes
PARAMETERS, CHECKPOINT = "parameters", "the checkpoint's weights"
SIZES = ["n_embd", "n_layer", "n_encoder_layer", "mlp_ratio", "n_slot", "vocab_size"]
FLAGS = {  # kind -> the flags that determine it
    PARAMETERS: SIZES,
    "activations": ["batch_size", "block_size", *SIZES],
    "keys and values": ["num_samples"],
    "logits": ["num_samples"],
}
CERTAIN = 0.75  # share of the estimated activations that a run takes at least,
COMPILED = 0.4  # and a compiled run, which keeps less than the uncompiled blocks that are measured
SMALL = 2**30  # bytes that every machine has, so that small runs start at once


def n_params(cfg) -> int:
    """The model's number of parameters, without their memory."""
    with torch.device("meta"):
        return Model(cfg).n_params()


def training_need(cfg, device: torch.device, size: int) -> Need:
    """The least peak memory of a rank of `size`: in the update, or in the loss before there are gradients."""
    if cfg.eval_only:
        return evaluation_need(cfg, cfg.batch_size, device, size)
    if 16 * n_params(cfg) * (1 + cfg.batch_size * cfg.block_size) <= SMALL:  # four numbers of each are enough
        return {}
    rank = Rank(cfg, device, size)
    states = sum(rank.memory[kind] for kind in STATES)
    share = COMPILED if compiled(cfg, device) else CERTAIN
    activations = share * (rank.total + rank.host - states) - rank.memory["gradients"]
    return {PARAMETERS: states - rank.host, "activations": max(0, int(activations))}


def evaluation_need(flags, batch_size: int, device: torch.device, size: int) -> Need:
    """The least memory of a rank that evaluates a model with these flags: weights, the stream, and a chunk's logits."""
    cut = flags.tp * flags.pp * flags.ep
    if flags.parallel == "fsdp":
        cut = size // flags.dp_replicate
    tokens = batch_size * flags.block_size // flags.cp // flags.pp
    rows = min(tokens, rows_at_once(flags.loss_chunk, flags.vocab_size, device))
    numbers = tokens * flags.n_embd + rows * flags.vocab_size
    activations = resolve_dtype(flags.dtype, device).itemsize * numbers // flags.tp
    return {PARAMETERS: 4 * n_params(flags) // cut, "activations": activations}


def check_training(cfg, device: torch.device, size: int):
    """ValueError if a rank of this run on `size` ranks needs more memory than it can have."""
    try:
        need = training_need(cfg, device, size)
    except RuntimeError:  # a size has more than 63 bits
        need = {PARAMETERS: 2**63}
    check_memory(need, device, cfg)


def check_evaluation(cfg, flags, ranks):
    """ValueError if evaluating a model with these flags, as evaluate.py's cfg says, needs more memory than there is."""
    need = evaluation_need(flags, cfg.batch_size, ranks.device, ranks.size)
    need[CHECKPOINT] = need.pop(PARAMETERS)
    check_memory(need, ranks.device, cfg)


def check_weights(cfg, flags, device: torch.device):
    """ValueError if the weights of such a model, which cfg.out_dir names, need more memory than there is."""
    check_memory({CHECKPOINT: 4 * n_params(flags)}, device, cfg)


def check_sampling(cfg, flags, device: torch.device):
    """ValueError if sampling with cfg from a model with these flags needs more memory than the process can have."""
    heads = sum(n * heads_of(flags, reader)[1] for reader, n in flags.readers if reader.source == "context")
    if flags.objective == "masked":
        heads = 0
    limit = flags.block_size
    if cfg.overflow == "roll":
        limit *= 2
    keys = 2 * cfg.num_samples * min(limit, 1 + cfg.max_new_tokens) * heads * flags.head_size  # after one token
    need = {
        CHECKPOINT: 4 * n_params(flags),
        "keys and values": resolve_dtype(cfg.dtype, device).itemsize * keys,
        "logits": 4 * cfg.num_samples * flags.vocab_size,
    }
    check_memory(need, device, cfg)


def check_memory(need: Need, device: torch.device, cfg):
    """ValueError if the need exceeds the memory. It names the flag that is most times its usual value, among those that
    determine what needs most."""
    where = "a process of this machine"
    limit = process_memory(environment().local_size)
    if device.type == "cuda":
        where = "the GPU"
        limit = torch.cuda.get_device_properties(device).total_memory
    total = sum(need.values())
    if total <= limit:
        return
    most = max(need, key=need.get)
    flag = "out_dir"
    remedy = "use a machine with more memory"
    if most != CHECKPOINT:
        flag = max([name for name in FLAGS[most] if hasattr(cfg, name)], key=lambda name: times_usual(cfg, name))
        remedy = f"lower {flag}"
    if most == PARAMETERS:
        remedy += ", or divide them among more ranks with --parallel=fsdp; see --plan=True"
    source = f" ({cfg.sources[flag]})" if flag in cfg.sources else ""
    if flag == "vocab_size" and not source:
        remedy = "prepare the data with a smaller vocabulary"
    raise ValueError(
        f"{flag}={getattr(cfg, flag)}{source} needs at least {total / 2**30:,.1f} GiB, most of it for {most}, and "
        f"{where} can have {limit / 2**30:,.1f} GiB of memory; {remedy}"
    )


def times_usual(cfg, name: str) -> float:
    """The value of a flag as a multiple of its default, or of GPT-2's vocabulary."""
    usual = 50304 if name == "vocab_size" else type(cfg).__dataclass_fields__[name].default
    return getattr(cfg, name) / max(1, usual)
