"""Refuses a run, a sampling or an evaluation that can never fit into the memory, before anything is allocated.

What is known without a measurement is compared with the total memory, as other programs may free theirs. What takes
more only as it computes ends with an error of torch, which engine.device.torch_errors turns into a line, or on a CPU by
the system, which may kill the process.
"""

import os
import resource
from contextlib import suppress
from itertools import product
from pathlib import Path

import torch

from data.errors import require
from engine.config import Config
from engine.parallel.connection import environment
from engine.plan.estimate import Rank
from flags import Flags, refuse
from model import ModelConfig, heads_of

SIZES = ["n_embd", "n_layer", "n_encoder_layer", "mlp_ratio", "n_slot"]  # which determine the weights too


def check_training(cfg: Config, device: torch.device, size: int):
    """ValueError if a rank of this run on `size` ranks can never have the memory for what stays between its steps."""
    rank = Rank(cfg, size, device)
    states = rank.parameters if cfg.eval_only else rank.states
    if cfg.pp > 1:
        states /= 2  # at least, as the rank may have one end of the model and fewer layers
    if lack := shortage(states, device):
        remedy = "use a machine with more memory, make the model smaller, or divide it among more ranks"
        names = ["vocab_size", *(name for name in SIZES if name in cfg.given)]
        refuse(cfg, " ".join(names), f"{lack}; {remedy} with --parallel=fsdp; see --plan=True")
    check_batch(rank)


def check_batch(rank: Rank):
    """ValueError if a rank can never have the memory for one micro-batch's residual stream, the least activations."""
    if lack := shortage(rank.streams[0], rank.device):
        refuse(rank.cfg, "batch_size", f"{lack}; make it smaller")


def check_weights(path: str | Path, flags: Config, size: int, device: torch.device):
    """ValueError if a rank of `size` ranks can never have the memory for its part of the weights in `path`."""
    lack = shortage(Rank(flags, size, device).parameters, device)
    require(not lack, f"out_dir={path}: {lack}; use a machine with more memory, or a smaller model")


def check_sampling(cfg: Flags, flags: ModelConfig, device: torch.device):
    """ValueError if the samples of sample.py's cfg from a model with these flags can never fit."""
    if lack := shortage(cfg.num_samples * bytes_of_sample(cfg, flags), device):
        refuse(cfg, "num_samples", f"{lack}; make it smaller, or use a machine with more memory")


def bytes_of_sample(cfg: Flags, flags: ModelConfig) -> int:
    """The logits of a sample, and its keys and values."""
    of_logits = 4 * flags.vocab_size
    if flags.objective == "masked":
        return of_logits
    heads = sum(n * heads_of(flags, reader)[1] for reader, n in flags.readers if reader.source == "context")
    tokens = min(flags.block_size, 1 + cfg.max_new_tokens)
    width = 4 if cfg.dtype == "float32" else 2
    return of_logits + 2 * width * tokens * heads * flags.head_size


def shortage(need: int, device: torch.device) -> str:
    """What says that this process can never have so many bytes; empty if it can."""
    if device.type == "cuda":
        where = "the GPU"
        limit = torch.cuda.get_device_properties(device).total_memory
    else:
        where = "a process of this machine"
        limit = host_memory()
    if need <= limit:
        return ""
    return f"needs at least {need / 2**30:,.1f} GiB, and {where} can have {limit / 2**30:,.1f} GiB of memory"


def host_memory(root: str | Path = "/") -> int:
    """The most bytes that this process can have: its share of the machine's and of its cgroups', or its own limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError):  # other systems have no cgroups
        for line in Path(root, "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)  # v2 has no controllers here
            folder = Path(root, "sys/fs/cgroup", controllers, group.lstrip("/"))
            for path, name in product((folder, *folder.parents), ("memory.max", "memory.limit_in_bytes")):
                with suppress(OSError, ValueError):  # there is none, or it is "max"
                    limits.append(int((path / name).read_text()))
    own, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min(min(limits) // environment().local_size, own % 2**64)  # own = -1: there is none
