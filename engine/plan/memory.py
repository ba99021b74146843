"""Refuses, before anything is allocated, a run, a sampling or an evaluation that can never fit into the memory.

What is needed at least is compared with the total memory, not with the free memory, which other programs may increase.
So a run that could fit is never refused; --plan=True prints an estimate of the whole need.
"""

import torch

from engine.device import process_memory
from engine.optim import OPTIMIZER, Muon, state_bytes
from engine.parallel.connection import environment
from engine.plan.accounting import readings
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


def n_params(cfg) -> int:
    """The model's number of parameters, without their memory."""
    with torch.device("meta"):
        return Model(cfg).n_params()


def width(dtype: str) -> int:
    """The least bytes of a number that is computed under this value of the flag dtype."""
    if dtype == "float32":
        return 4
    return 2


def training_need(cfg, lengths: tuple[int, int], device: torch.device, size: int) -> Need:
    """The least peak memory of a rank of `size`, on sequences of these lengths: in the update, or in the loss of the
    first micro-step, before there are gradients."""
    need = evaluation_need(cfg, cfg.batch_size, device, size)
    if cfg.eval_only:
        return need
    gradients = weights = need[PARAMETERS]
    optimizer = OPTIMIZER[cfg.optimizer]
    kind = optimizer.rest
    if optimizer.muon:
        kind = Muon  # it keeps less
    states = weights + gradients + state_bytes(kind, weights // 4)
    activations = need["activations"] + kept(cfg, lengths) // (cfg.tp * cfg.cp * cfg.pp) - gradients
    if cfg.fsdp_offload:
        states = 0  # on the device
    return {PARAMETERS: states, "activations": max(0, activations)}


def kept(cfg, lengths: tuple[int, int]) -> int:
    """Bytes that ranks keep of a micro-batch for the backward at least: what enters each block and, unless it is
    recomputed, what projections make: queries, keys, values and hidden units."""
    numbers = cfg.n_layer * cfg.n_embd * lengths[0]
    if cfg.activation_checkpoint == "none":
        with torch.device("meta"):
            model = Model(cfg)
        for m, tokens in readings(model, *lengths):
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
    return {PARAMETERS: 4 * n_params(flags) // cut, "activations": width(flags.dtype) * numbers // flags.tp}


def check_training(cfg, lengths: tuple[int, int], device: torch.device, size: int):
    """ValueError if a rank of this run on `size` ranks needs more memory than it can have."""
    try:
        need = training_need(cfg, lengths, device, size)
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
        "keys and values": width(cfg.dtype) * keys,
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
