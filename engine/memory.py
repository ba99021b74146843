"""Refuses, before anything is allocated, a run or a sampling that can never fit into the machine's memory.

    check_training(cfg, ranks, objective.lengths)     # ValueError names the flag to lower
    check_sampling(cfg, flags, device)

The estimates are lower bounds: what every run of these flags holds at once at its worst moment. They are compared with
all the memory that there is, not with what is free now, which another program may give back. So nothing that could run
is refused; what a run takes in full is the plan's to say (--plan=True). They take milliseconds: parameters are counted
on a model of at most two layers on the meta device, and the rest are closed forms. GiB are 2**30 bytes.
"""

import copy
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from data.loader import Loader
from engine import parallel
from model import MLP_KIND, Model, rows_at_once

Need = dict[str, tuple[int, bool]]  # kind -> (bytes, whether they lie in host memory though there is a GPU)
STATES, CHECKPOINT = "parameters", "the checkpoint's weights"
SIZES = ["batch_size", "block_size", "n_layer", "n_embd", "vocab_size", "mlp_ratio", "n_slot", "n_encoder_layer"]
SIZES += ["loss_chunk", "gradient_accumulation_steps"]
USUAL = {"vocab_size": 50304}  # where a flag's default says nothing about its size
REMEDY = {
    STATES: "lower {flag}, or share them among more ranks with --parallel=fsdp; --plan=True tells how many",
    CHECKPOINT: "sample where there is more memory",
}


def machine() -> int:
    """Bytes that this machine gives its processes: its memory, or the least limit of a cgroup on that, and swap."""
    limits, groups, info = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")], "/proc/self/cgroup", ""
    if os.path.exists(groups):  # on Linux
        info = Path("/proc/meminfo").read_text()
        for _, kind, path in (line.split(":", 2) for line in Path(groups).read_text().splitlines()):
            folder = Path("/sys/fs/cgroup", kind, path.lstrip("/"))
            file = {"": "memory.max", "memory": "memory.limit_in_bytes"}.get(kind, "")  # versions 2 and 1
            for each in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # it is not there, or says max
                    limits.append(int((each / file).read_text()))
    return min(limits) + sum(1024 * int(line.split()[1]) for line in info.splitlines() if "SwapTotal" in line)


def host_share() -> int:
    """Bytes that a process can have when all ranks on this machine take the same, or its ulimit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    share = machine() // parallel.environment().local_size
    return share if soft == resource.RLIM_INFINITY else min(share, soft)


def parameters(cfg) -> tuple[int, int]:
    """Numbers in a model: of all its parameters, and of the blocks' matrices, which Muon updates."""
    if cfg.n_embd >= 2**24:  # W_Q alone is a PiB, and bytes may not fit in 63 bits
        return cfg.n_layer * cfg.n_embd**2, cfg.n_layer * cfg.n_embd**2
    small, depth = copy.copy(cfg), {"blocks": cfg.n_layer, "encoder.blocks": cfg.n_encoder_layer or cfg.n_layer}
    small.n_layer, small.n_encoder_layer = (min(2, n) for n in depth.values())
    with torch.device("meta"):
        named = list(Model(small).named_parameters())
    total = matrices = 0
    for name, p in named:
        stack, blocks, rest = name.partition("blocks.")
        last = rest.startswith("1.")  # stands for all layers but the first, which are alike
        n = p.numel() * (depth[stack + "blocks"] - 1 if blocks and last else 1)
        total += n
        matrices += n if blocks and p.dim() == 2 else 0
    return total, matrices


def training(cfg, ranks, lengths: tuple[int, int]) -> Need:
    """What a rank holds at its worst moment, as the mean over a pipeline's stages.

    A block keeps at least its input, q, k and the hidden units before their non-linearity; where nothing is recomputed
    or fused, also what its last projections read. An evaluation keeps one stream.
    """
    (T, S), B, C, V = lengths, cfg.batch_size, cfg.n_embd, cfg.vocab_rows // cfg.tp
    total, matrices = parameters(cfg)
    fsdp = cfg.parallel == "fsdp" and ranks.size > 1
    cut = ranks.size // cfg.dp_replicate if fsdp else cfg.tp * cfg.pp
    micro_steps = cfg.gradient_accumulation_steps // ranks.data_size
    batches = Loader.AHEAD + (micro_steps if cfg.pp > 1 else 1)
    hidden = 0 if cfg.slots else MLP_KIND[cfg.mlp].inputs * cfg.hidden_dim
    width = C + (C + cfg.kv_heads * cfg.head_dim + hidden) * (cfg.activation_checkpoint != "full")
    if cfg.activation_checkpoint == "none" and not ranks.compile:
        width += C + cfg.hidden_dim * (cfg.slots == 0 and cfg.mlp != "relu")  # whose result is all that it keeps
    tokens = cfg.n_layer * T + (cfg.n_encoder_layer or cfg.n_layer) * S
    states = 16 * total - 4 * matrices * (cfg.optimizer == "muon")  # float32: AdamW keeps two means, Muon one
    late = 4 * total * (micro_steps == 1)  # gradients that are not there yet when the logits are
    if cfg.eval_only:
        batches, width, tokens, states, late = 1, C, T, 4 * total, 0
    logits = 4 * V * min(B * T // cfg.cp, rows_at_once(cfg, V)) // cfg.pp
    kept = ranks.dtype.itemsize * B * tokens * width // (cfg.cp * cfg.tp * cfg.pp) + logits
    return {
        STATES: (states // cut, fsdp and cfg.fsdp_offload),
        "activations": (max(0, kept - late // cut), False),
        "token ids": (8 * batches * B * (cfg.block_size + 1), True),
    }


def check_training(cfg, ranks: parallel.Ranks, lengths: tuple[int, int]):
    """ValueError if a rank of this run needs more memory than there can be. lengths: tokens of a text and a source."""

    def need(c) -> Need:
        return training(c, ranks, tuple(n * c.block_size // cfg.block_size for n in lengths))

    refuse(cfg, ranks.device, need, SIZES)


def check_sampling(cfg, flags, device: torch.device):
    """ValueError if samples as cfg says, of a model of these flags, need more memory than there can be."""
    size, total = parallel.resolve_dtype(cfg.dtype, device).itemsize, parameters(flags)[0]
    cached = 2 * size * flags.n_layer * flags.kv_heads * flags.head_dim * (flags.objective != "masked")  # by a token

    def need(c) -> Need:
        length = min(flags.block_size, 1 + c.max_new_tokens)  # of a prompt of one token
        keep, logits = c.num_samples * length * cached, 4 * c.num_samples * flags.vocab_size
        return {CHECKPOINT: (4 * total, False), "keys and values": (keep, False), "logits": (logits, False)}

    refuse(cfg, device, need, ["num_samples", "max_new_tokens"])


def refuse(cfg, device: torch.device, need: Callable[[Any], Need], sizes: list[str]):
    """ValueError if need(cfg) is more than there is, for the flag among sizes whose usual value would save most."""
    there_is = {True: ("a process of this machine", host_share())}  # in host memory, and not
    if device.type == "cuda":
        there_is[False] = "the GPU", torch.cuda.get_device_properties(device).total_memory
    for host, (where, limit) in there_is.items():

        def needed(c, host=host) -> dict[str, int]:
            return {kind: n for kind, (n, on_host) in need(c).items() if len(there_is) == 1 or on_host == host}

        parts = needed(cfg)
        if (total := sum(parts.values())) <= limit:
            continue
        most, left = max(parts, key=parts.get), {}
        for name in sizes:
            less, value = copy.copy(cfg), getattr(cfg, name)  # not checked again: only its size counts
            usual = USUAL.get(name, type(cfg).__dataclass_fields__[name].default)
            setattr(less, name, usual if value > usual else type(value)(value / 2) or value)
            left[name] = sum(needed(less).values())
        flag = "out_dir" if most == CHECKPOINT else min(left, key=left.get)
        remedy = REMEDY.get(most, "lower {flag}").format(flag=flag)
        if flag == "vocab_size" and flag not in cfg.sources:
            remedy = "prepare the data with a smaller vocabulary"
        source = f" ({cfg.sources[flag]})" if flag in cfg.sources else ""
        raise ValueError(
            f"{flag}={getattr(cfg, flag)}{source} needs at least {total / 2**30:,.1f} GiB, most of it for {most}, and "
            f"{where} can have {limit / 2**30:,.1f} GiB of memory; {remedy}"
        )
