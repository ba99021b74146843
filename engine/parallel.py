"""Ranks and devices: how many processes there are, which of them work together, and what they compute with.

One process (`python train.py`) and many (`torchrun --nproc_per_node=8 train.py`) run the same code: with one, every
function here is the identity.

The ranks stand in a grid, outermost first: pp stages, dp_replicate copies, shards, cp ranks with two pieces of each
sequence, tp slices of a layer. Those that differ in copy or shard are data-parallel: they read different samples. The
others read the same.
"""

import ctypes
import hashlib
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from engine import context_parallel, tensor_parallel

STOPPING = "stopping after this step; press Ctrl-C again to quit now"
STOPPED = "stopped at once: nothing was computed that is not saved"
T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among the others, and what it computes with."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype  # of matrix multiplications; parameters stay float32
    compile: bool
    data_rank: int = 0  # among the data-parallel ranks
    data_size: int = 1
    mesh: DeviceMesh | None = None  # pp, replicate, shard (which holds the pieces of cp too), tp; None if size is 1
    cp: dist.ProcessGroup | None = None  # the ranks that have the other pieces of this rank's sequences

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

    def same(self, value: str) -> bool:
        """Whether all ranks call this with the same value."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return len(set(values)) == 1


def data_ranks(cfg, size: int) -> int:
    """How many of `size` ranks read different samples. ValueError if flags do not fit together, or not the ranks."""
    inner = cfg.tp * cfg.cp * cfg.pp
    if size % inner:
        raise ValueError(
            f"tp={cfg.tp}, cp={cfg.cp} and pp={cfg.pp} need {inner} ranks or a multiple, and there are {size}; start "
            "as many with torchrun --nproc_per_node, or set them to 1"
        )
    data = size // inner
    if data % replicas(cfg):
        raise ValueError(
            f"dp_replicate={cfg.dp_replicate} does not divide the {data} data-parallel ranks; set a divisor"
        )
    micro_batches = cfg.gradient_accumulation_steps
    if micro_batches % data:
        raise ValueError(
            f"gradient_accumulation_steps={micro_batches} counts the micro-batches of all ranks together and is not "
            f"divisible by the {data} {'ranks' if data == size else 'data-parallel ranks'}; set it to "
            f"{-(-micro_batches // data) * data}"
        )
    if cfg.optimizer == "muon" and cfg.fsdp_offload:
        raise ValueError(
            "optimizer=muon does not go with fsdp_offload=True: it would multiply whole matrices on the host; use "
            "optimizer=adamw"
        )
    if cfg.tp > 1:
        tensor_parallel.check(cfg, cfg.tp)
    if cfg.cp > 1:
        context_parallel.check(cfg, cfg.cp)
    if cfg.pp > 1:
        from engine import pipeline

        pipeline.check(cfg, cfg.pp, micro_batches // data)
        for flag in ("tp", "cp"):
            if getattr(cfg, flag) > 1:
                raise ValueError(f"{flag}={getattr(cfg, flag)} does not go with pp={cfg.pp} yet; set one of them to 1")
    return data


def replicas(cfg) -> int:
    """Groups of ranks that have one set of shards each."""
    return cfg.dp_replicate if cfg.parallel == "fsdp" else 1


def place() -> tuple[int, int, int, int]:
    """(rank, rank on this machine, ranks, ranks on this machine), as torchrun says in the environment, or one process.

    ValueError if these variables are no such numbers.
    """
    found = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": ""}
    found |= {name: os.environ[name] for name in found if name in os.environ}
    found["LOCAL_WORLD_SIZE"] = found["LOCAL_WORLD_SIZE"] or (
        "1" if found["LOCAL_RANK"] == "0" else found["WORLD_SIZE"]
    )
    for name, rank in (("WORLD_SIZE", "RANK"), ("LOCAL_WORLD_SIZE", "LOCAL_RANK")):
        for each, least in ((name, 1), (rank, 0)):
            if not re.fullmatch("[0-9]{1,9}", found[each]) or int(found[each]) < least:
                raise ValueError(
                    f"{each}={found[each]!r} in the environment is no whole number from {least}; unset it, or start "
                    "with torchrun, which sets it"
                )
        if int(found[rank]) >= int(found[name]):
            raise ValueError(
                f"{rank}={found[rank]} in the environment must be below {name}={found[name]}; unset both, or start "
                "with torchrun, which sets them"
            )
    return tuple(int(found[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))


def join(cfg) -> Ranks:
    """Resolve device, dtype and compile, and join the other ranks if torchrun started this process.

    An `auto` falls back to what the machine has; ValueError if an explicit choice cannot be met.
    """
    rank, local_rank, size, _ = place()
    device = resolve_device(cfg.device, local_rank)
    data = data_ranks(cfg, size)
    if cfg.backend == "nccl" and device.type != "cuda":
        raise ValueError(f"backend=nccl needs GPUs, and the device is {device.type}; use --backend=gloo")
    dtype, compiled = resolve_dtype(cfg.dtype, device), resolve_compile(cfg.compile, device)
    apart = cfg.parallel == "fsdp" or cfg.tp * cfg.pp > 1
    if dtype == torch.float16 and apart and size > 1:
        raise ValueError(
            "dtype=float16 needs a gradient scaler, which does not go with parallel=fsdp, tp or pp; use bfloat16"
        )
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if size == 1:
        return Ranks(rank, size, device, dtype, compiled)
    on_gpu = "nccl" if cfg.backend == "auto" else cfg.backend
    backend = f"cpu:gloo,cuda:{on_gpu}" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=cfg.collective_timeout)
    try:
        store = fresh_store(rank, size) if may_restart() else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (ValueError, RuntimeError) as error:  # no address, or nobody there
        where = ":".join(os.environ.get(name, f"({name} is not set)") for name in ("MASTER_ADDR", "MASTER_PORT"))
        reason = str(error).strip().partition("\n")[0][:200]
        raise ValueError(
            f"rank {rank} cannot join the {size} ranks at {where}: {reason}; start all of them with torchrun"
        ) from error
    grid = torch.arange(size).view(cfg.pp, replicas(cfg), data // replicas(cfg) * cfg.cp, cfg.tp)
    mesh = DeviceMesh(device.type, grid, mesh_dim_names=("pp", "replicate", "shard", "tp"))
    limit(mesh, cfg.collective_timeout)
    data_rank = rank // (cfg.cp * cfg.tp) % data
    pieces = None
    if cfg.cp > 1:
        finer = DeviceMesh(device.type, grid.view(-1, cfg.cp, cfg.tp), mesh_dim_names=("data", "cp", "tp"))
        limit(finer, cfg.collective_timeout)
        pieces = finer["cp"].get_group()
    return Ranks(rank, size, device, dtype, compiled, data_rank, data, mesh, pieces)


def limit(mesh: DeviceMesh, seconds: int):
    """Let collectives along the mesh's dimensions end after so long; a DeviceMesh would give them half an hour."""
    for group in mesh.get_all_groups():
        if dist.get_backend(group) != "fake":  # a plan's
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def keep_freed_memory():
    """Let glibc keep what tensors free; returned to the system, its pages would be cleared anew in every step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    for parameter, value in ((-1, 2**31 - 1), (-4, 0)) if mallopt else ():  # M_TRIM_THRESHOLD, M_MMAP_MAX
        mallopt(parameter, value)


def may_restart() -> bool:
    """Whether torchrun was asked to start its workers again when one is lost, see its --max-restarts."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def fresh_store(rank: int, size: int) -> dist.Store:
    """The ranks' common key-value store, without what dead ranks have left there.

    torchrun --max-restarts keeps one store for all its starts: a rank would look up the address of a process that is
    gone, and wait for ever. (Its TORCHELASTIC_RESTART_COUNT is no remedy, as nodes count on their own.) So each rank
    picks a name, and all names together are the prefix of this start's keys. A rank knows that it has read no old name
    when all others have read the same ones: among these is its own, which is new.
    """
    store, _, _ = next(rendezvous("env://", rank, size))
    store.set(f"name_{rank}", uuid.uuid4().hex)
    while True:
        names = b" ".join(store.multi_get([f"name_{r}" for r in range(size)]))
        store.set(f"read_{rank}", names)
        if all(read == names for read in store.multi_get([f"read_{r}" for r in range(size)])):
            return dist.PrefixStore(hashlib.sha256(names).hexdigest(), store)
        time.sleep(0.05)


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def together(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """action(); if it raises OSError or ValueError on one rank, all ranks raise it: none waits for ever for another."""
    result, error = None, None
    try:
        result = action()
    except (OSError, ValueError) as caught:
        error = caught
    if dist.is_initialized():
        errors: list[Exception | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(errors, error, group)
        error = next((e for e in errors if e is not None), None)
    if error is not None:
        raise error
    return result


def of_first_rank(action: Callable[[], T]) -> T:
    """What action() gives on the first rank, on every rank; they raise its OSError or ValueError together."""
    results = [together(lambda: action() if is_first_rank() else None)]
    if dist.is_initialized():
        results *= dist.get_world_size()
        dist.all_gather_object(results, results[0])
    return results[0]


def leave():
    """The regular end, which all ranks come to."""
    if dist.is_initialized():
        dist.barrier()  # a group that ends while another rank still talks to it can abort the process
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


class StopSignal:
    """SIGTERM or SIGINT asks for a stop that all ranks agree on; a second one ends the process at once.

    So does the first one as long as `at_risk` is False: then nothing is computed yet that is not saved. A context.
    """

    def __init__(self, ranks: Ranks):
        self.name, self.size, self.work, self.at_risk = "", ranks.size, None, False
        self.speaks = ranks.first
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._catch)
        reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        signal.set_wakeup_fd(self.writer)
        threading.Thread(target=self._answer, args=(reader,), daemon=True).start()

    def _catch(self, number: int, frame):
        self.name = self.name or signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)  # not the other's: if it has come too, Python would print a traceback

    def _answer(self, reader: int):
        """A thread: the main one gets to _catch only after its current operation, a long backward pass for example."""
        asked = False
        while number := os.read(reader, 1):
            if self.speaks and not asked:
                erase = "\r\x1b[K" if sys.stderr.isatty() else ""  # the progress bar
                with suppress(OSError):
                    os.write(sys.stderr.fileno(), f"{erase}{STOPPING if self.at_risk else STOPPED}\n".encode())
            if asked or not self.at_risk:
                os._exit(128 + number[0])
            asked = True
        os.close(reader)

    def agreed(self) -> bool:
        """Called equally often by every rank: True for all of them in the same call, the next one after a signal.

        The reduction posted in one call is read in the next, so it overlaps with the computation.
        """
        if self.size == 1:
            return bool(self.name)
        stop = False
        if self.work is not None:
            self.work.wait()
            stop = bool(self.posted)
        self.posted = torch.tensor([float(bool(self.name))])  # on the host: agreeing never waits for the GPU
        self.work = dist.all_reduce(self.posted, op=dist.ReduceOp.MAX, async_op=True)
        return stop

    def settle(self):
        """Wait for what is still under way, before the process group ends."""
        if self.work is not None:
            self.work.wait()

    def __enter__(self) -> "StopSignal":
        return self

    def __exit__(self, *error):
        signal.set_wakeup_fd(-1)
        os.close(self.writer)
