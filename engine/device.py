"""The device and the dtype that a process computes with, and what hardware it is.

    device = resolve_device("auto")
    dtype = resolve_dtype("auto", device)

These functions know only their own process; `engine.parallel.ranks.join` makes all ranks take the same dtype.
"""

import ctypes
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from data.errors import require, user_errors

LIMITS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")  # variables of torch's libraries


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
    require(index < gpus, f"device=cuda:{index} is not on this machine, which has {gpus} GPUs")
    return torch.device("cuda", index)


def resolve_dtype(flag: str, device: torch.device) -> torch.dtype:
    """The dtype that the flag names: auto is bfloat16 on GPUs that support it, float16 on others, float32 elsewhere. A
    training run on a CPU resolves auto with `agreed_dtype`."""
    cuda = device.type == "cuda"
    bf16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
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
        workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        fact = f"CUBLAS_WORKSPACE_CONFIG={workspace} in the environment must be :4096:8"
        require(workspace in (":4096:8", ":16:8"), f"deterministic=True: {fact}; unset it")
        os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree")  # sums in the switch have no fixed order
        torch.utils.deterministic.fill_uninitialized_memory = False  # which finds mistakes, and costs time
    if on != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(on)


@contextmanager
def refuse_nondeterminism() -> Iterator[None]:
    """Turn torch's error about an operation without a deterministic kernel into a line that names the operation."""
    try:
        yield
    except RuntimeError as error:
        text = f"{error} {error.__cause__}"  # a pipeline's schedule wraps errors
        found = re.search(r"(\S+) does not have a deterministic implementation", text)
        if not found:
            raise
        fact = f"deterministic=True: {found[1]} has no deterministic kernel on this device"
        remedy = "set --deterministic=False, or change the flags of the model that need this operation"
        with user_errors():
            raise ValueError(f"{fact}; {remedy}") from error


def fast_bfloat16() -> bool:
    """Whether this CPU has instructions for products in bfloat16, of AMX or AVX-512, and no variable of LIMITS forbids
    them. Others emulate bfloat16, which can take a hundred times as long as float32."""
    if any(variable in os.environ for variable in LIMITS):
        return False
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


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
    if device.type != "cuda":
        return None
    return gpu_peak(torch.cuda.get_device_name(device), dtype)


def gpu_peak(name: str, dtype: torch.dtype) -> float | None:
    """The dense matmul peak of a GPU in FLOP/s, None if unknown. float32 has the peak of TF32, even if TF32 is off."""
    words = set(re.split(r"[\s-]+", name.lower()))
    for card, (half, tf32) in GPU_PEAKS.items():
        if words.issuperset(card.lower().split()) and not words & OTHER_CARD:
            return tf32 if dtype == torch.float32 else half
    return None


def machine_memory() -> int:
    """Bytes that all processes of this machine can have: its memory or a cgroup's lower limit, plus swap."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    groups = Path("/proc/self/cgroup")
    info = ""
    if groups.exists():  # on Linux
        info = Path("/proc/meminfo").read_text()
        for line in groups.read_text().splitlines():
            _, kind, path = line.split(":", 2)
            folder = Path("/sys/fs/cgroup", kind, path.lstrip("/"))
            file = {"": "memory.max", "memory": "memory.limit_in_bytes"}.get(kind, "")  # versions 2 and 1
            for each in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # the file does not exist, or says max
                    sizes.append(int((each / file).read_text()))
    swap = sum(1024 * int(line.split()[1]) for line in info.splitlines() if "SwapTotal" in line)
    return min(sizes) + swap


def process_memory(ranks: int) -> int:
    """Bytes that a process can have: a share for each of the ranks on this machine, or its ulimit if that is lower."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    share = machine_memory() // ranks
    return share if soft == resource.RLIM_INFINITY else min(share, soft)


def peak_memory_bytes(device: torch.device) -> int:
    """The peak of memory so far, in bytes: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":  # whose ru_maxrss begins with the peak of the process that started this one
        return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
