"""Ranks: how many processes there are, which of them work together, and what they compute with.

The ranks form a grid. Its dimensions are, outermost first: pp (stages of a pipeline), dp_replicate (copies of the
model), shard (shards of one copy; with cp also the pieces of each sequence) and tp (slices of a layer). Ranks that
differ in copy or shard are data-parallel: they read different samples. All other ranks read the same samples. With ep,
adjacent shards divide the experts.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from engine.config import Config
from engine.device import keep_freed_memory, resolve_device, resolve_dtype
from engine.parallel import context, expert, tensor
from engine.parallel.connection import connect, environment
from flags import refuse
from ops import fast_bfloat16


@dataclass(frozen=True)
class Ranks:
    """The place of this process among the ranks, and the device, dtype and compilation that it computes with."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype  # of matrix multiplications; parameters stay float32
    compile: bool
    data_rank: int = 0  # number of this rank's samples: 0 .. data_size - 1
    data_size: int = 1  # how many data-parallel ranks there are
    mesh: DeviceMesh | None = None  # dimensions pp, replicate, shard (times cp) and tp; None if size is 1
    cp: ProcessGroup | None = None  # the ranks that share this rank's sequences; None if cp is 1
    stage: ProcessGroup | None = None  # the ranks of this rank's pipeline stage; None if size is 1
    experts: DeviceMesh | None = None  # that of experts' weights: pp, tp, ep, replicate, shard / ep; None if ep is 1

    def autocast(self):
        """A context in which matrix multiplications run in `dtype`."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x


def check_flags(cfg: Config):
    """ValueError if flags do not fit this machine or the number of ranks that torchrun has started."""
    place = environment()
    device = resolve_device(cfg.device, place.local_rank)
    check_layout(cfg, place.size)
    if cfg.backend == "nccl" and device.type != "cuda":
        refuse(cfg, "backend", f"needs GPUs, and the device is {device.type}; use --backend=gloo")
    check_scaler(cfg, place.size, resolve_dtype(cfg.dtype, device))


def check_scaler(cfg: Config, size: int, dtype: torch.dtype):
    """ValueError if this dtype needs a gradient scaler, with which the layout does not work."""
    scaled = dtype == torch.float16 and not cfg.eval_only
    cut = cfg.parallel == "fsdp" or cfg.tp * cfg.pp * cfg.ep > 1
    if scaled and cut and size > 1:
        fact = "dtype=float16 needs a gradient scaler, which does not work with parallel=fsdp, tp, pp or ep"
        raise ValueError(f"{fact}; use bfloat16, or float32 on GPUs that do not have it")


def check_layout(cfg: Config, size: int):
    """ValueError if flags of parallelism do not fit together, or do not fit `size` ranks."""
    unit = cfg.tp * cfg.cp * cfg.pp
    if size % unit:
        remedy = f"start as many, plan for --world_size={-(-size // unit) * unit}, or set them to 1"
        refuse(cfg, "tp cp pp", f"they need {unit} ranks or a multiple, and there are {size}; {remedy}")
    data = data_ranks(cfg, size)
    if data % cfg.dp_replicate:
        refuse(cfg, "dp_replicate", f"does not divide the {data} data-parallel ranks; set a divisor")
    check_micro_batches(cfg, data)
    if cfg.tp > 1:
        tensor.check(cfg)
    if cfg.cp > 1:
        context.check(cfg)
    if cfg.ep > 1:
        expert.check(cfg, data // cfg.dp_replicate)
    if cfg.pp > 1 and cfg.objective == "seq2seq":
        refuse(cfg, "pp objective", "a pipeline cuts one stack of blocks, and here are two; use tp")
    if cfg.n_layer < cfg.pp:
        refuse(cfg, "pp n_layer", "each stage needs a block; set pp lower")


def check_micro_batches(cfg: Config, data: int):
    """ValueError unless the micro-batches of each step can be divided among so many data-parallel ranks, and each rank
    has one for each stage. The remedy keeps the number of sequences, if a smaller batch_size can."""
    ranks = f"the {data} data-parallel ranks"
    n = cfg.gradient_accumulation_steps
    least = data * cfg.pp
    if n % data or n < least:
        more = -(-n // least) * least
        remedy = f"set it to {more}, for {more * cfg.batch_size} sequences a step instead of {n * cfg.batch_size}"
        times = least // math.gcd(n, least)
        if cfg.batch_size % times == 0:
            remedy = f"set it to {n * times}, and batch_size to {cfg.batch_size // times} for as many sequences a step"
        refuse(cfg, "gradient_accumulation_steps", f"{ranks} need equally many, and {cfg.pp} or more each; {remedy}")
    over = "or if it is over, --batch_ramp="
    if cfg.ramp and cfg.pp > 1:
        refuse(cfg, "batch_ramp pp", f"a pipeline's schedule is fixed; set pp=1, {over}")
    if any(n % data for n, _ in cfg.ramp):
        refuse(cfg, "batch_ramp", f"not divisible by {ranks}; set multiples of {data}, {over}")


def layers_of_stage(n_layer: int, stage: int, n_stages: int) -> range:
    """The layers of a stage of a pipeline. The first has at least as many as any other."""
    first = -(-n_layer * stage // n_stages)
    end = -(-n_layer * (stage + 1) // n_stages)
    return range(first, end)


def data_ranks(cfg: Config, size: int) -> int:
    """How many of `size` ranks read different samples."""
    return size // (cfg.tp * cfg.cp * cfg.pp)


def join(cfg: Config) -> Ranks:
    """Choose device, dtype and compilation, and join the other ranks if torchrun has started this process. The value
    `auto` takes the best choice that the machine offers. The flags of a training must have passed `check_flags`."""
    place = environment()
    device = resolve_device(cfg.device, place.local_rank)
    compiled = device.type == "cuda" if cfg.compile == "auto" else cfg.compile  # see also compilation.is_compiled
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not cfg.deterministic
    if place.size > 1:
        connect(cfg, place, device)
        check_same_flags(cfg)
    ranks = Ranks(place.rank, place.size, device, agreed_dtype(cfg.dtype, device), compiled)
    if place.size == 1:
        return ranks
    data = data_ranks(cfg, place.size)
    grid = torch.arange(place.size).view(cfg.pp, cfg.dp_replicate, -1, cfg.tp)
    mesh = make_mesh(cfg, device, grid, "pp replicate shard tp")
    cp = experts = None
    stage = dist.group.WORLD
    if cfg.cp > 1:
        cp = make_mesh(cfg, device, grid.view(-1, cfg.cp, cfg.tp), "data cp tp")["cp"].get_group()
    if cfg.pp > 1:
        stage = make_mesh(cfg, device, grid.view(cfg.pp, -1), "pp stage")["stage"].get_group()
    if cfg.ep > 1:  # adjacent ranks divide the experts, so the ranks with the same experts are ep apart
        cut = grid.unflatten(2, (-1, cfg.ep)).permute(0, 4, 3, 1, 2)
        experts = make_mesh(cfg, device, cut, "pp tp ep replicate shard")
    data_rank = place.rank // (cfg.cp * cfg.tp) % data
    return replace(ranks, data_rank=data_rank, data_size=data, mesh=mesh, cp=cp, stage=stage, experts=experts)


def check_same_flags(cfg: Config):
    """ValueError on every rank if ranks have different flags, of which init_from may come from the files that they see.
    They may name different GPUs."""
    flags = asdict(cfg) | {"device": cfg.device.partition(":")[0]}
    first = on_first_rank(lambda: flags)

    def compare():
        for name, value in first.items():
            if flags.get(name) != value:
                said = f"{name}={value!r:.200} on rank 0 and {flags.get(name)!r:.200} on rank {dist.get_rank()}"
                raise ValueError(f"{said}; start all ranks with the same flags, on nodes that see the same files")

    on_every_rank(compare)


def make_mesh(cfg: Config, device: torch.device, grid: Tensor, names: str) -> DeviceMesh:
    """The mesh of a grid of ranks, with the names of its dimensions. Collectives along each have the timeout of cfg."""
    mesh = DeviceMesh(device.type, grid, mesh_dim_names=tuple(names.split()))
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=cfg.collective_timeout), group)
    return mesh


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def all_gather(value: Any) -> list:
    """The values of all ranks, for every rank. They have to be short, as there may be a thousand."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def on_every_rank(action: Callable):
    """action() on every rank. If it raises OSError or ValueError on one rank, all ranks raise the same error, so that
    no rank waits for ever for another."""
    result = own = None
    try:
        result = action()
    except (OSError, ValueError) as error:
        own = error
    for error in all_gather(own):
        if error is not None:
            raise error
    return result


def on_first_rank(action: Callable):
    """The result of action() on the first rank, for every rank. All ranks raise its OSError or ValueError."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    return scatter(lambda: [action()] * size)


def gather(value: Any) -> list:
    """The values of all ranks on the first rank, an empty list on the others."""
    values = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size() if is_first_rank() else []
        dist.gather_object(value, values or None)
    return values


def scatter(action: Callable[[], list]) -> Any:
    """This rank's item of the first rank's list action(). All ranks raise its OSError or ValueError."""
    values = on_every_rank(lambda: action() if is_first_rank() else [None])
    mine = values[:1]
    if dist.is_initialized():
        dist.scatter_object_list(mine, values)
    return mine[0]


def agreed_dtype(flag: str, device: torch.device) -> torch.dtype:
    """The dtype of a training run, the same on all ranks, which all call this function: that of `resolve_dtype`, but
    auto on a CPU is bfloat16 if the first rank's CPU has instructions for it."""
    if flag == "auto" and device.type == "cpu" and on_first_rank(fast_bfloat16):
        return torch.bfloat16
    return resolve_dtype(flag, device)


def leave():
    """End the process group. Every rank calls it."""
    if dist.is_initialized():
        dist.barrier()  # PyTorch can abort a process whose group ends while another rank still uses it
        dist.destroy_process_group()
