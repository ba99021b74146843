"""Refuses, before anything is allocated, a run, a sampling or an evaluation that can never fit into the memory.

    check_training(cfg, ranks, objective.lengths)     # ValueError names the flag to lower
    check_sampling(cfg, flags, device)
    check_evaluation(cfg, flags, ranks, objective.lengths)

The estimates are lower bounds of a run's peak memory. They are compared with the total memory, not with the free
memory, which other programs may increase. So a run that could fit is never refused; --plan=True estimates the memory in
full. A check takes milliseconds: parameters are counted on a model of at most two layers on the meta device, and the
rest are closed forms. GiB are 2**30 bytes.
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
from data.objective import objective_class
from engine.device import resolve_dtype
from engine.optim import OPTIMIZER, Muon, hidden_matrices, state_bytes
from engine.parallel import ranks as parallel
from model import Model
from ops import equal_rows, rows_at_once

Need = dict[str, tuple[int, bool]]  # kind -> (bytes, whether they are in host memory even on a GPU)
OF_PARAMETERS, CHECKPOINT = "parameters", "the checkpoint's weights"
SIZES = ["batch_size", "block_size", "n_layer", "n_embd", "vocab_size", "mlp_ratio", "n_slot", "n_encoder_layer"]
SIZES += ["loss_chunk", "gradient_accumulation_steps"]
USUAL = {"vocab_size": 50304}  # usual values of flags whose default is not a size
REMEDY = {
    OF_PARAMETERS: "lower {flag}, or divide them among more ranks with --parallel=fsdp; --plan=True tells how many",
    CHECKPOINT: "use a machine with more memory",
}


def machine_memory() -> int:
    """Bytes that all processes of this machine can have: its memory or a cgroup's lower limit, plus swap."""
    sizes, groups, info = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")], "/proc/self/cgroup", ""
    if os.path.exists(groups):  # on Linux
        info = Path("/proc/meminfo").read_text()
        for _, kind, path in (line.split(":", 2) for line in Path(groups).read_text().splitlines()):
            folder = Path("/sys/fs/cgroup", kind, path.lstrip("/"))
            file = {"": "memory.max", "memory": "memory.limit_in_bytes"}.get(kind, "")  # versions 2 and 1
            for each in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # the file does not exist, or says max
                    sizes.append(int((each / file).read_text()))
    return min(sizes) + sum(1024 * int(line.split()[1]) for line in info.splitlines() if "SwapTotal" in line)


def process_memory() -> int:
    """Bytes that a process can have: an equal share for each rank on this machine, or its ulimit if that is lower."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    share = machine_memory() // parallel.environment().local_size
    return share if soft == resource.RLIM_INFINITY else min(share, soft)


def parameters(cfg) -> tuple[int, int]:
    """(number of all parameters, number of those in the blocks' matrices, which Muon updates)."""
    if cfg.n_embd >= 2**24:  # W_Q alone takes a PiB, and the number of bytes may exceed 63 bits
        return cfg.n_layer * cfg.n_embd**2, cfg.n_layer * cfg.n_embd**2
    small, depth = copy.copy(cfg), {"blocks": cfg.n_layer, "encoder.blocks": cfg.n_encoder_layer or cfg.n_layer}
    period = len(cfg.layers)
    small.n_layer, small.n_encoder_layer = (min(1 + period, n) for n in depth.values())
    with torch.device("meta"):
        model = Model(small)
    named, hidden = list(model.named_parameters()), hidden_matrices(model)
    total = matrices = 0
    for name, p in named:
        stack, blocks, rest = name.partition("blocks.")
        layer = int(rest.partition(".")[0]) if blocks else 0  # from the second on, each counts for those of its string
        n = p.numel() * (len(range(layer, depth[stack + "blocks"], period)) if layer else 1)
        total += n
        matrices += n if p in hidden else 0
    return total, matrices


def kept_by_readers(cfg) -> tuple[int, int]:
    """Numbers per token that the readers of all layers of a stack keep: (q, k and hidden units before their
    non-linearity, the inputs of the last projections)."""
    hidden = projected = 0
    for reader, n in ((reader, n) for sums, n in cfg.layers for readers in sums for reader in readers):
        part = cfg.part(reader)
        heads = part.n_head * part.head_size
        if reader.units:  # these maps keep their results alone, which are the inputs of the projection
            units = part.hidden_dim * (1 if reader.dense else cfg.n_expert_active + cfg.n_expert_shared)
            hidden += n * (1 + part.gated) * units
            result = reader.phi == "softmax" or part.mlp in ("relu", "sigmoid")
            projected += n * units * (not result)
        elif reader.source == "context":
            hidden += n * (part.kv_heads * part.head_size + heads * (reader.query == "heads"))
            projected += n * heads * (reader.out == "matrix")
    return hidden, projected


def training_need(cfg, ranks, lengths: tuple[int, int]) -> Need:
    """The least peak memory of a rank, as the mean over a pipeline's stages. lengths: (T, S), see check_training.

    A block keeps at least its input, q, k and the hidden units before their non-linearity. Without recomputation and
    compilation, it also keeps the inputs of its last projections (compile=auto on a CPU counts as without). An
    evaluation keeps one stream.
    """
    (T, S), B, C, V = lengths, cfg.batch_size, cfg.n_embd, cfg.vocab_rows // cfg.tp
    total, matrices = parameters(cfg)
    fsdp = cfg.parallel == "fsdp" and ranks.size > 1
    cut = ranks.size // cfg.dp_replicate if fsdp else cfg.tp * cfg.pp * cfg.ep
    micro_steps = cfg.gradient_accumulation_steps // ranks.data_size
    batches = Loader.AHEAD + (1 if cfg.pp == 1 and objective_class(cfg).even else micro_steps)
    numbers = 0  # that the blocks keep of a sequence
    for stack, length in zip(cfg.stacks, (T, S), strict=False):
        hidden, projected = kept_by_readers(stack)
        width = stack.n_layer * C + hidden * (cfg.activation_checkpoint != "full")
        eager = cfg.activation_checkpoint == "none" and not ranks.compile
        numbers += length * (width + projected * eager)
    rest, muon = OPTIMIZER[cfg.optimizer]
    states = 8 * total + state_bytes(Muon if muon else rest, matrices) + state_bytes(rest, total - matrices)
    states += 4 * total * (cfg.ema_decay > 0)
    late = 4 * total * (micro_steps == 1)  # gradients that do not exist yet at the time of the logits
    if cfg.eval_only:
        batches, numbers, states, late = 1, C * T, 4 * total, 0
    held = ranks.dtype.itemsize * (1 if cfg.eval_only else 2)  # by a compiled loss: the logits, in training a gradient
    logits = held * V * equal_rows(B * T // cfg.cp, rows_at_once(cfg.loss_chunk, V, ranks.device)) // cfg.pp
    kept = ranks.dtype.itemsize * B * numbers // (cfg.cp * cfg.tp * cfg.pp) + logits
    return {
        OF_PARAMETERS: (states // cut, fsdp and cfg.fsdp_offload),
        "activations": (max(0, kept - late // cut), False),
        "token ids": (8 * batches * B * (cfg.block_size + 1), True),
    }


def check_training(cfg, ranks: parallel.Ranks, lengths: tuple[int, int]):
    """ValueError if a rank of this run needs more memory than it can have. lengths: (T of a text, S of a source)."""

    def need(c) -> Need:
        return training_need(c, ranks, tuple(n * c.block_size // cfg.block_size for n in lengths))

    check_memory(cfg, ranks.device, need, SIZES)


def check_sampling(cfg, flags, device: torch.device):
    """ValueError if sampling with cfg from a model with these flags needs more memory than the process can have."""
    size, total = resolve_dtype(cfg.dtype, device).itemsize, parameters(flags)[0]
    heads = [
        n * flags.part(r).kv_heads for sums, n in flags.layers for each in sums for r in each if r.source == "context"
    ]
    cached = 2 * size * sum(heads) * flags.head_size * (flags.objective != "masked")  # per token

    def need(c) -> Need:
        most = flags.block_size * (2 if c.overflow == "roll" else 1)
        length = min(most, 1 + c.max_new_tokens)  # the prompt has at least one token
        rows = c.num_samples
        keep, logits = rows * length * cached, 4 * rows * flags.vocab_size
        return {CHECKPOINT: (4 * total, False), "keys and values": (keep, False), "logits": (logits, False)}

    check_memory(cfg, device, need, ["num_samples", "max_new_tokens"])


def check_weights(cfg, flags, device: torch.device):
    """ValueError if the weights of such a model, which cfg.out_dir names, need more memory than there is."""
    check_memory(cfg, device, lambda _: {CHECKPOINT: (4 * parameters(flags)[0], False)}, [])


def check_evaluation(cfg, flags, ranks, lengths: tuple[int, int]):
    """ValueError if evaluating a model with these flags, as evaluate.py's cfg says, needs more memory than there is."""

    def need(c) -> Need:
        changed = copy.copy(flags)
        changed.batch_size = c.batch_size
        parts = training_need(changed, ranks, lengths)
        return {CHECKPOINT: parts.pop(OF_PARAMETERS)} | parts

    check_memory(cfg, ranks.device, need, ["batch_size"])


def check_memory(cfg, device: torch.device, need: Callable[[Any], Need], sizes: list[str]):
    """ValueError if need(cfg) exceeds the memory. It names the flag of `sizes` whose usual value would save most."""
    limits = {True: ("a process of this machine", process_memory())}  # whether in host memory -> (owner, bytes)
    if device.type == "cuda":
        limits[False] = "the GPU", torch.cuda.get_device_properties(device).total_memory
    for host, (where, limit) in limits.items():

        def needed(c, host=host) -> dict[str, int]:
            return {kind: n for kind, (n, on_host) in need(c).items() if len(limits) == 1 or on_host == host}

        parts = needed(cfg)
        if (total := sum(parts.values())) <= limit:
            continue
        most, left = max(parts, key=parts.get), {}
        for name in sizes:
            less, value = copy.copy(cfg), getattr(cfg, name)  # a copy, since replace() would check all flags again
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
