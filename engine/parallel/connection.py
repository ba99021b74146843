"""How the ranks that torchrun has started find each other, and what is said when one of them is not there."""

import hashlib
import os
import re
import shlex
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from data.errors import reason, require, say
from engine.config import Config


class Environment(NamedTuple):
    """The numbers that torchrun sets in the environment."""

    rank: int
    local_rank: int  # among the ranks on this machine
    size: int  # number of ranks
    local_size: int  # number of ranks on this machine


def environment() -> Environment:
    """The place of this process as torchrun says it in the environment; without torchrun, that of a single process.
    ValueError if one is no number, or the rank is not below WORLD_SIZE."""
    for name, least in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1)):
        text = os.environ.get(name, "1")
        good = re.fullmatch("[0-9]{1,9}", text) and int(text) >= least
        require(good, f"{name}={text} must be a number from {least} on; start with torchrun, which sets it")
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    require(rank < size, f"RANK={rank} is not below WORLD_SIZE={size}; start with torchrun, which sets both")
    return Environment(rank, local_rank, size, local_size)


def launched() -> Environment:
    """The environment. ValueError if srun or mpirun has started several processes that do not know of each other."""
    for name in ("SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        n = os.environ.get(name) or "1"
        if n != "1" and "RANK" not in os.environ:
            fact = f"{name}={n} without RANK: {n} processes would each work alone"
            remedy = "set RANK=0 if they shall, or start once (several nodes: docs/scaling.md)"
            raise ValueError(f"{fact}; {remedy}: torchrun --standalone --nproc_per_node={n} {shlex.join(sys.argv)}")
    return environment()


def connect(cfg: Config, place: Environment, device: torch.device):
    """Join the group of all ranks. ValueError if there is no address, or no rank answers there."""
    backend = "gloo"
    if device.type == "cuda":
        backend = f"cpu:gloo,cuda:{'nccl' if cfg.backend == 'auto' else cfg.backend}"
    timeout = timedelta(seconds=cfg.collective_timeout)
    store = None
    stderr = os.dup(2)
    if os.environ.get("TORCH_CPP_LOG_LEVEL") == "ERROR":  # of engine.start: PyTorch prints dozens of lines and an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        if may_restart():
            store = fresh_store(place.rank, place.size, timeout)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout)
    except (OSError, ValueError, RuntimeError) as error:
        address = ":".join(os.environ.get(name, f"({name} is not set)") for name in ("MASTER_ADDR", "MASTER_PORT"))
        where = f"rank {place.rank} cannot join the {place.size} ranks at {address}"
        remedy = "start all of them with torchrun, or set the first one's address and a free port"
        raise ValueError(f"{where}: {reason(error)}; {remedy} in MASTER_ADDR and MASTER_PORT") from error
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def may_restart() -> bool:
    """Whether torchrun starts its workers again when one of them is lost (its flag --max-restarts)."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def fresh_store(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """The key-value store that all ranks share, without the keys of earlier starts. RuntimeError if they are not all
    there in time.

    torchrun --max-restarts uses the same store for all starts, and each node counts its own restarts, so a rank could
    wait for ever for a process that has died. So each rank chooses a random name, and the hash of all names is the
    prefix of this start's keys. If all ranks have read the same list, it has only new names, as each reads its own.
    """
    store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
    if rank == 0:
        store.delete_key("exception_dump")  # NCCL, which ignores prefixes, would end this start too
    store.set(f"name_{rank}", uuid.uuid4().hex)
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        names = hashlib.sha256(b" ".join(store.multi_get([f"name_{r}" for r in range(size)]))).hexdigest()
        store.set(f"read_{rank}", names)
        if all(read == names.encode() for read in store.multi_get([f"read_{r}" for r in range(size)])):
            return dist.PrefixStore(names, store)
        time.sleep(0.05)
    raise RuntimeError(f"a rank did not start within {timeout.total_seconds():.0f} seconds")


LOST = "(?i)connection (reset|closed|refused)|timed ?out|timeout|remote process|broken pipe"  # in a collective's error


@contextmanager
def lost_ranks_end_the_run(out_dir: str) -> Iterator[None]:
    """Turn the error of a collective in which another rank is missing into a line that says how to go on, and exit
    code 1. On a machine with many ranks, one or two of them say it."""
    try:
        yield
    except RuntimeError as error:
        lost = re.search(LOST, str(error))
        if not dist.is_initialized() or not lost:
            raise
        place = environment()
        if place.local_rank == 0 or place.rank == 1:
            fact = f"rank {place.rank} has lost another rank, which has ended or hangs ({lost[0]})"
            remedy = f"go on with the same command, --out_dir={out_dir} and --init_from=resume"
            say(f"error: {fact}; unless torchrun starts all again, {remedy}")
        raise SystemExit(1) from None
