"""Ranks and devices: the only file that knows how many processes there are.

One process (`python train.py`) and many (`torchrun --nproc_per_node=8 train.py`) run the same code: with one, every
function here is the identity.
"""

import ctypes
import os
import signal
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process among the others, and what it computes with."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype  # of matrix multiplications; parameters stay float32
    compile: bool

    @property
    def first(self) -> bool:
        return self.rank == 0

    def autocast(self):
        """Context in which matrix multiplications run in `dtype`."""
        full = self.dtype == torch.float32
        return nullcontext() if full else torch.autocast(self.device.type, dtype=self.dtype)

    def sum(self, x: Tensor) -> Tensor:
        """x summed over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x


def join(cfg) -> Ranks:
    """Resolve device, dtype and compile, and join the other ranks if torchrun started this process.

    An `auto` falls back to what the machine has; ValueError if an explicit choice cannot be met.
    """
    rank, local_rank, size = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    size = size or 1
    device = resolve_device(cfg.device, local_rank)
    if cfg.gradient_accumulation_steps % size:
        above = -(-cfg.gradient_accumulation_steps // size) * size
        raise ValueError(
            f"gradient_accumulation_steps={cfg.gradient_accumulation_steps} counts the micro-batches of all ranks "
            f"together and is not divisible by the {size} ranks; set it to {above}"
        )
    if cfg.backend == "nccl" and device.type != "cuda":
        raise ValueError(f"backend=nccl needs GPUs, and the device is {device.type}; use --backend=gloo")
    ranks = Ranks(rank, size, device, resolve_dtype(cfg.dtype, device), resolve_compile(cfg.compile, device))
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if size > 1:
        on_gpu = "nccl" if cfg.backend == "auto" else cfg.backend
        backend = f"cpu:gloo,cuda:{on_gpu}" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=size)
    return ranks


def keep_freed_memory():
    """Let glibc keep what tensors free; returned to the system, its pages would be cleared anew in every step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    for parameter, value in ((-1, 2**31 - 1), (-4, 0)) if mallopt else ():  # M_TRIM_THRESHOLD, M_MMAP_MAX
        mallopt(parameter, value)


def leave():
    if dist.is_initialized():
        dist.destroy_process_group()


def resolve_device(flag: str, local_rank: int = 0) -> torch.device:
    """auto is cuda, then mps, then cpu; a bare cuda is the GPU of this rank. ValueError if there is no such device."""
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if flag == "auto":
        flag = next(kind for kind, there in have.items() if there)
    kind, _, index = flag.partition(":")
    if not have.get(kind, False):
        raise ValueError(f"device={flag} is not on this machine; use --device=cpu or --device=auto")
    index = int(index or local_rank)
    if kind != "cuda":
        return torch.device(kind)
    if index >= torch.cuda.device_count():
        raise ValueError(f"device=cuda:{index} is not on this machine, which has {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def resolve_dtype(flag: str, device: torch.device) -> torch.dtype:
    """auto is bfloat16 on a GPU that has it, float16 on one that has not, and float32 elsewhere."""
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if flag == "auto":
        flag = ("bfloat16" if bf16 else "float16") if device.type == "cuda" else "float32"
    if flag == "float16" and device.type != "cuda":
        raise ValueError(
            f"dtype=float16 needs a gradient scaler on a GPU, and the device is {device.type}; use float32"
        )
    if flag == "bfloat16" and device.type == "cuda" and not bf16:
        raise ValueError(f"dtype=bfloat16 is not supported by {torch.cuda.get_device_name(device)}; use float16")
    return getattr(torch, flag)


def resolve_compile(flag: bool | str, device: torch.device) -> bool:
    """auto compiles on GPUs only: on CPUs the gain is a few per cent, and the compilation takes half a minute."""
    return device.type == "cuda" if flag == "auto" else flag


def replicate(model: nn.Module, ranks: Ranks) -> nn.Module:
    """The model to call in training: DDP averages gradients over the ranks while the backward is still running."""
    if ranks.compile:
        for block in [*model.blocks, *(model.encoder.blocks if model.encoder else ())]:
            block.compile()
    if ranks.size == 1:
        return model
    devices = [ranks.device] if ranks.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


class StopSignal:
    """SIGTERM or SIGINT asks for a stop at the next step that all ranks agree on; a second one ends it at once."""

    def __init__(self, ranks: Ranks):
        self.name, self.size = "", ranks.size
        self.asked = torch.zeros(1)  # on the host: agreeing never waits for the GPU
        self.work = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._catch)

    def _catch(self, number: int, frame):
        self.name = signal.Signals(number).name
        self.asked[0] = 1
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)

    def agreed(self) -> bool:
        """Called once per step by every rank: True for all of them in the same step, one step after the first signal.

        The reduction posted in one step is read in the next, so it overlaps with the computation.
        """
        if self.size == 1:
            return bool(self.asked)
        stop = False
        if self.work is not None:
            self.work.wait()
            stop = bool(self.posted)
        self.posted = self.asked.clone()
        self.work = dist.all_reduce(self.posted, op=dist.ReduceOp.MAX, async_op=True)
        return stop

    def settle(self):
        """Wait for what is still under way, before the process group ends."""
        if self.work is not None:
            self.work.wait()
