"""The device and the dtype that a process computes with, whether auto compiles there, and what hardware it is.

    device = resolve_device("auto")
    dtype = resolve_dtype("auto", device)

These functions know only their own process; `engine.parallel.ranks.join` makes all ranks take the same dtype.
"""

import ctypes
import math
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from data.errors import require, user_errors

LIMITS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")  # variables of torch's libraries


def resolve_device(flag: str, local_rank: int = 0) -> torch.device:
    """The device that the flag names: auto takes cuda, mps or cpu, the first that exists, and cuda without a number is
    the GPU of this rank. ValueError if this is no device, or if the machine does not have it."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?|mps", flag):
        raise ValueError(f"device={flag!r} must be auto, cpu, cuda, cuda:N or mps")
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
    """The dtype that the flag names: auto is bfloat16 on GPUs that support it, float16 on others, float32 elsewhere.

    Nothing is measured here. A training run on a CPU resolves auto with `agreed_dtype`.
    """
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


def precision(device: torch.device, dtype: torch.dtype) -> str:
    """The dtype as users should read it: float32 products on CUDA are TF32, with 10 bits of mantissa, if it is on."""
    tf32 = device.type == "cuda" and dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return str(dtype)[6:] + " (products in TF32)" * tf32


def make_deterministic(on: bool):
    """Let torch use only deterministic kernels, or all of them again. To be called before CUDA starts."""
    if on:
        workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        require(
            workspace in (":4096:8", ":16:8"),
            f"deterministic=True: CUBLAS_WORKSPACE_CONFIG={workspace} in the environment must be :4096:8; unset it",
        )
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
        with user_errors():
            raise ValueError(
                f"deterministic=True: {found[1]} has no deterministic kernel on this device; set "
                "--deterministic=False, or change the flags of the model that need this operation"
            ) from error


def fast_bfloat16() -> bool:
    """Whether this CPU multiplies matrices in bfloat16 at least 1.5 times as fast as in float32. Takes 0.05 s at most.

    Below this factor, the casts between the products cost what the products gain. The speed is measured, because a
    CPU's list of instructions does not tell which of them the libraries use (ONEDNN_MAX_CPU_ISA, for example,
    limits them). Small matrices come first, because a CPU that emulates bfloat16 may need 100 times as long for it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for speed_of_bfloat16
    try:
        return speed_of_bfloat16(128, 0.01) > 1 / 4 and speed_of_bfloat16(384, 0.025) >= 1.5
    finally:
        torch.set_num_threads(threads)


def speed_of_bfloat16(n: int, seconds: float) -> float:
    """How many times as fast as in float32 two (n, n) matrices are multiplied in bfloat16.

    The best times are compared. The dtypes alternate for so many seconds, and at least three times. All of these are
    seconds of this thread on a processor, so other programs hardly disturb them; torch must have one thread.
    """
    dtypes = torch.float32, torch.bfloat16
    matrices = {dtype: (torch.ones(n, n, dtype=dtype), torch.empty(n, n, dtype=dtype)) for dtype in dtypes}
    best, rounds, end = dict.fromkeys(dtypes, math.inf), 0, time.thread_time() + seconds
    while rounds < 3 or time.thread_time() < end:
        for dtype, (a, out) in matrices.items():
            start = time.thread_time()
            torch.mm(a, a, out=out)
            best[dtype] = min(best[dtype], time.thread_time() - start)
        rounds += 1
    return best[torch.float32] / best[torch.bfloat16]


def resolve_compile(flag: bool | str, device: torch.device) -> bool:
    """Whether to compile as far as flag and device tell: auto does so on GPUs. On a CPU, auto is settled later, by
    `compilation.settle`."""
    return device.type == "cuda" if flag == "auto" else flag


def keep_freed_memory():
    """Let glibc keep the memory that tensors free. Otherwise the system clears its pages again in every step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries do not have it
    for parameter, value in ((-1, 2**31 - 1), (-4, 0)) if mallopt else ():  # M_TRIM_THRESHOLD, M_MMAP_MAX
        mallopt(parameter, value)


def machine(device: torch.device) -> dict:
    """A description of the hardware and of torch; "device" is null if there is no GPU.

    cpu_bfloat16    the CPU's instructions for bfloat16, as far as Linux names them
    limited_by      environment variables that keep torch's libraries from using all instructions
    """
    file = Path("/proc/cpuinfo")
    cpu = file.read_text() if file.exists() else ""
    name = re.search(r"^model name\s*: (.+)", cpu, re.MULTILINE)
    facts = {
        "device": None, "torch": torch.__version__, "cuda": torch.version.cuda, "system": platform.platform(),
        "threads": torch.get_num_threads(),
        "cpu_bfloat16": [word for word in ("amx_bf16", "avx512_bf16", "bf16") if re.search(rf"\b{word}\b", cpu)],
        "limited_by": [variable for variable in LIMITS if variable in os.environ],
    }  # fmt: skip
    if device.type == "cpu":
        facts["device"] = f"CPU ({name[1] if name else platform.machine()})"
    elif torch.cuda.is_available():
        card = torch.cuda.get_device_properties(device)
        facts |= {"device": card.name, "memory_bytes": card.total_memory, "capability": f"{card.major}.{card.minor}"}
        facts["gpus"] = torch.cuda.device_count()
    return facts
