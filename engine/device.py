"""The device and the dtype that a process computes with, and what hardware it is.

These functions know only their own process; `engine.parallel.ranks.join` makes all ranks take the same dtype.
"""

import ctypes
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from data.errors import require, user_errors


def resolve_device(flag: str, local_rank: int = 0) -> torch.device:
    """The device that the flag names: auto takes cuda, mps or cpu, the first that exists, and cuda without a number is
    the GPU of this rank. ValueError if this is no device, or if the machine does not have it."""
    known = re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?|mps", flag)
    require(known, f"device={flag!r} must be auto, cpu, cuda, cuda:N or mps")
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if flag == "auto":
        flag = next(kind for kind, there in have.items() if there)
    kind, _, index = flag.partition(":")
    require(have[kind], f"device={flag} is not on this machine; use --device=cpu or --device=auto")
    if kind != "cuda":
        return torch.device(kind)
    index = int(index or local_rank)
    gpus = torch.cuda.device_count()
    fact = f"device=cuda:{index} is not among the {gpus} GPUs that this process sees"
    require(index < gpus, f"{fact}; set --device=cuda:0 if each process sees one of its own")
    return torch.device("cuda", index)


def resolve_dtype(flag: str, device: torch.device) -> torch.dtype:
    """The dtype that the flag names: auto is bfloat16 on GPUs that support it, float16 on others, float32 elsewhere. A
    training run on a CPU resolves auto with `agreed_dtype`. torch.cuda.is_bf16_supported would ask the current GPU."""
    cuda = device.type == "cuda"
    bf16 = cuda and (torch.version.hip is not None or torch.cuda.get_device_properties(device).major >= 8)
    if flag == "auto" and cuda:
        flag = "bfloat16" if bf16 else "float16"
    elif flag == "auto":
        flag = "float32"
    if flag == "float16" and not cuda:
        raise ValueError(f"dtype=float16 needs a GPU for its scaler, and the device is {device.type}; use float32")
    if flag == "bfloat16" and cuda and not bf16:
        raise ValueError(f"dtype=bfloat16 is not supported by {torch.cuda.get_device_name(device)}; use float16")
    return getattr(torch, flag)


def precision(device: torch.device, dtype: torch.dtype) -> str:
    """The dtype as users should read it: float32 products on CUDA are TF32, with 10 bits of mantissa, if it is on."""
    tf32 = device.type == "cuda" and dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    name = str(dtype)[6:]
    return f"{name} (products in TF32)" if tf32 else name


def make_deterministic(on: bool):
    """Let torch use only deterministic kernels, or all of them again. To be called before CUDA starts."""
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree")  # sums in the switch have no fixed order
        torch.utils.deterministic.fill_uninitialized_memory = False  # which finds mistakes, and costs time
    if on != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(on)


@contextmanager
def torch_errors(smaller: str) -> Iterator[None]:
    """Turn an error about too little memory into a line, whose remedy is `smaller`. Other errors stay as they are."""
    words = r"out of memory|can't allocate memory.+? bytes|Unable to allocate .+?B\b|Storage size .+ overflowed"
    words += "|CUBLAS_STATUS_ALLOC_FAILED"
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # MemoryError is numpy's
        text = f"{error} {error.__cause__}"  # a pipeline's schedule wraps errors
        if found := re.search(words, text):
            with user_errors():
                raise ValueError(f"{found[0]}; {smaller}") from error
        raise


def keep_freed_memory():
    """Let glibc keep the memory that tensors free. Otherwise the system clears its pages again in every step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries do not have it
    if mallopt is not None:
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        mallopt(-4, 0)  # M_MMAP_MAX


def device_name(device: torch.device) -> str:
    """The name of the hardware, for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    name = re.search(r"^model name\s*: (.+)", text, re.MULTILINE)
    return f"{device.type.upper()} ({name[1] if name else platform.machine()})"


# Dense peaks in FLOP/s: (bfloat16 with float32 accumulation, or float16 on chips without bfloat16; TF32), from NVIDIA's
# data sheets (halved where they count sparsity), its GA102, AD102 and GB202 white papers, and AMD's data sheet for
# MI300X. A card is the first row all of whose words occur in its name.
GPU_PEAKS = {
    "GB200": (2500e12, 1250e12),
    "B200": (2250e12, 1125e12),
    "GH200": (989.4e12, 494.7e12),
    "H200 NVL": (835.5e12, 417.7e12),
    "H200": (989.4e12, 494.7e12),
    "H100 NVL": (835.5e12, 417.7e12),
    "H100 PCIe": (756e12, 378e12),
    "H100": (989.4e12, 494.7e12),
    "A100": (312e12, 156e12),
    "A40": (149.7e12, 74.8e12),
    "A30": (165e12, 82e12),
    "A10G": (70e12, 35e12),
    "A10": (125e12, 62.5e12),
    "L40S": (362e12, 183e12),
    "L40": (181e12, 90.5e12),
    "L4": (121e12, 60.5e12),
    "RTX 5090": (209.5e12, 104.8e12),
    "RTX 4090": (165.2e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
    "RTX A6000": (154.8e12, 77.4e12),
    "V100 PCIe": (112e12, None),
    "V100": (125e12, None),
    "T4": (65e12, None),
    "MI300X": (1307.4e12, 653.7e12),
}
OTHER_CARD = {"mig", "laptop", "d", "ti", "super"}  # a name with such a word is another card, or a part of one


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The peak of a GPU in FLOP/s, the denominator of MFU; None if it is unknown, and for other devices."""
    if device.type != "cuda":  # an AMD A10 is a CPU too
        return None
    return gpu_peak(torch.cuda.get_device_name(device), dtype)


def gpu_peak(name: str, dtype: torch.dtype) -> float | None:
    """The dense matmul peak of a GPU in FLOP/s, None if unknown. float32 has the peak of TF32, even if TF32 is off."""
    words = set(re.split(r"[\s-]+", name.lower()))
    for card, (half, tf32) in GPU_PEAKS.items():
        if words.issuperset(card.lower().split()) and not words & OTHER_CARD:
            return tf32 if dtype == torch.float32 else half
    return None


def peak_memory_bytes(device: torch.device) -> int:
    """The peak of memory so far, in bytes: allocated on the GPU, or resident in this process, which in Linux begins
    with the peak of the one that started it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
