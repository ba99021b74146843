"""Plans a run: estimates its memory, traffic and time on GPUs that this machine need not have.

    plan = estimate(cfg)      # for cfg.world_size GPUs of the kind cfg.gpu; opens no data and needs no other rank
    print(report(plan))

costs.py counts bytes and FLOPs; this file turns them into seconds. With a pipeline, memory is planned for the stage
that needs most, and time for the slowest stage. GB are 1e9 bytes, GiB are 2**30 bytes.
"""

import copy
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from data.errors import require
from engine.device import gpu_peak
from engine.parallel import pipeline
from engine.parallel.ranks import check_scaler
from engine.plan.costs import RECOMPUTE, STATES, FakeRank, Stage, fake_rank, layout_of
from model import Model

# ---------------------------------------------------------------------------------------------------------------------
# Assumptions, none of them measured here. The peaks in FLOP/s are in engine/device.py.


@dataclass(frozen=True)
class Gpu:
    memory: float  # bytes that PyTorch can allocate
    intra: float  # bytes per second and direction to the GPUs of the same node (NVLink)
    inter: float  # bytes per second and direction of the GPU's own network card
    achieved: float  # share of the peak FLOP/s that a rank reaches while it waits for nobody


GPU = {
    "a100": Gpu(79 * 2**30, 300e9, 25e9, 0.60),  # the 80 GB version
    "h100": Gpu(79 * 2**30, 450e9, 50e9, 0.50),
    "h200": Gpu(139 * 2**30, 450e9, 50e9, 0.50),
    "b200": Gpu(178 * 2**30, 900e9, 50e9, 0.45),
}
PER_NODE = 8  # GPUs
USABLE = 0.92  # share of the memory that a run can use; CUDA, NCCL and the allocator's gaps take the rest
LINK = 0.8  # share of a link's bandwidth that collectives reach
MOST_DATA_RANKS = 2**13  # a plan looks for a world_size up to here
OVERLAP = 0.8  # share of the computation during which the traffic of FSDP and DDP can run
HOST = 20e9  # bytes per second of a rank between GPU and host, and of the optimizer on the host


@dataclass
class Traffic:
    bytes: float  # sent by a rank in a step
    ranks: int  # size of the group
    bandwidth: float  # bytes per second
    seconds: float


@dataclass
class Plan:
    """The estimates for one run. Figures per rank describe the rank that needs most."""

    cfg: Any  # the run's flags
    dtype: str
    peak: float  # FLOP/s of a GPU
    parameters: int
    attention: str  # the kernels of ops.attention_kernel, with their numbers of layers
    flops_per_token: float  # forward and backward, without recomputation
    tokens_per_step: int
    memory: dict[str, int]  # bytes of a rank, by kind
    total: int  # bytes on the GPU at the worst moment
    host: int  # bytes on the host
    usable: int  # bytes of a GPU that a run can use
    largest_batch: int  # largest batch_size that fits; 0 = none
    smallest_world: int  # if the run does not fit: smallest world_size with which it does; 0 = none
    traffic: dict[str, Traffic]  # by kind
    seconds: dict[str, float]  # of a step, by cause
    step: float  # seconds of a step: the sum of `seconds`
    mfu: float


def estimate(cfg) -> Plan:
    """The plan of a run; ValueError if its flags contradict each other. cfg.vocab_size must be known."""
    gpu = GPU[cfg.gpu]
    layout_of(cfg)  # ValueError if flags do not fit together
    check_scaler(cfg, cfg.world_size, torch.float16 if cfg.dtype == "float16" else torch.bfloat16)
    require(not cfg.fp8 or cfg.gpu != "a100", "fp8=True does not go with gpu=a100, which has no float8; set gpu=h100")
    for fact, n, most in (
        (f"n_layer={cfg.n_layer}", cfg.n_layer + cfg.n_encoder_layer, 1024),
        (f"block_size={cfg.block_size}", cfg.block_size, 2**24),
        (f"tp={cfg.tp} times cp={cfg.cp} or ep={cfg.ep}", cfg.tp * max(cfg.cp, cfg.ep), 2**12),
    ):
        require(n <= most, f"{fact} takes too long to plan; lower it to at most {most}")
    if cfg.pp > 1:
        with torch.device("meta"):
            pipeline.keep_stages(Model(cfg), 0, cfg.pp)  # refuses layers that exchange more than the stream
    usable = int(USABLE * gpu.memory)
    with fake_rank(cfg) as rank:
        peak = gpu_peak(cfg.gpu, rank.dtype)
        memory, total, host = rank.memory(cfg.batch_size)
        times = [step_time(rank, stage, gpu, peak) for stage in rank.stages]
        most = largest(lambda batch: rank.memory(batch)[1], usable)
    least = smallest_world(cfg, usable) if total > usable else 0
    traffic, seconds = max(times, key=lambda each: sum(each[1].values()))
    step, tokens = sum(seconds.values()), cfg.batch_size * cfg.gradient_accumulation_steps * cfg.block_size
    flops = rank.flops / cfg.block_size
    return Plan(
        cfg, str(rank.dtype)[6:], peak, rank.n_params, rank.attention, flops, tokens, memory, total, host,
        usable, most, least, traffic, seconds, step, flops * tokens / (cfg.world_size * peak * step),
    )  # fmt: skip


def bandwidth(gpu: Gpu, ranks: int, distance: int, ring: bool = True) -> float:
    """Bytes per second that a rank can send. Between nodes, all ring ranks of a node share their cards; in an
    all-to-all, each has its own."""
    in_node = min(ranks, max(1, PER_NODE // distance)) if ring else 1
    return LINK * (gpu.intra if ranks * distance <= PER_NODE else in_node * gpu.inter)


def largest(total: Callable[[int], int], usable: int, limit: int = 2**16) -> int:
    """The largest batch below the limit whose total(batch) is at most usable, or 0. total must be nearly linear."""
    low, high, guess, points = 0, limit, 1, [(0, 0)]
    while high - low > 1:
        points = [points[-1], (guess, total(guess))]
        low, high = (guess, high) if points[1][1] <= usable else (low, guess)
        (a, at_a), (b, at_b) = points
        line = b + (usable - at_b) * (b - a) // max(1, at_b - at_a)
        guess = min(max(line, low + 1), high - 1)
    return low


def smallest_world(cfg, usable: int) -> int:
    """The smallest world_size at which a rank needs at most `usable` bytes, with the other flags of cfg; 0 = none."""
    worlds = []
    for n in range(1, MOST_DATA_RANKS + 1):
        changed = copy.copy(cfg)  # since replace() would check all flags again
        changed.world_size = n * cfg.tp * cfg.cp * cfg.pp
        with suppress(ValueError):
            layout_of(changed)
            worlds.append(changed)

    def fits(changed) -> bool:  # more ranks never need more, each
        with fake_rank(changed) as rank:
            return rank.memory(cfg.batch_size)[1] <= usable

    return next((fitting.world_size for fitting in worlds[bisect_left(worlds, True, key=fits) :]), 0)


def step_time(rank: FakeRank, stage: Stage, gpu: Gpu, peak: float) -> tuple[dict[str, Traffic], dict[str, float]]:
    """(traffic of a rank of the stage, seconds of its step by cause)."""
    cfg, speed = rank.cfg, gpu.achieved * peak
    traffic = {}
    for kind, n in rank.traffic(stage).items():
        ranks, distance = rank.group(kind)
        rate = bandwidth(gpu, ranks, distance, ring=not kind.endswith("all-to-all"))
        traffic[kind] = Traffic(n, ranks, rate, n / rate)
    data = sum(each.seconds for kind, each in traffic.items() if kind.startswith(("fsdp", "hsdp", "ddp", "experts")))
    compute, rest = rank.matmul_flops(stage) / speed, sum(each.seconds for each in traffic.values()) - data
    hidden = OVERLAP * compute * (1 if rank.fsdp else 2 / 3 / rank.micro_steps)  # DDP sends in the last backward only
    seconds = {
        "computation": compute,
        "traffic of tp, cp, ep, pp and Muon": rest,
        "bubble of the pipeline": (compute + rest) * (cfg.pp - 1) / (cfg.pp_chunks * rank.micro_steps),
        "traffic of data ranks, not hidden": max(0.0, data - hidden),
        "Muon's matmuls": rank.owners(stage).flops / speed if rank.optimizer.muon else 0.0,
    }
    if rank.offload:  # parameters go up for each gather, gradients down; an update reads and writes states
        parameters, _, state = (rank.static_memory(stage)[kind] for kind in STATES)
        passes = (1 + cfg.fsdp_reshard) * rank.micro_steps + 1 + 3 + 2 * round(state / parameters)
        seconds["offload to the host"] = passes * parameters / HOST
    return traffic, {kind: time for kind, time in seconds.items() if time}


def report(plan: Plan) -> str:
    """The plan as a table to print, at most 45 lines."""
    cfg, gpu, layout = plan.cfg, GPU[plan.cfg.gpu], layout_of(plan.cfg)
    words = {"dp_shard": "copies"} if cfg.parallel == "ddp" else {}
    mesh = " x ".join(f"{words.get(dim, dim)}={n}" for dim, n in layout.items() if n > 1) or "one rank"
    mesh += f", ep={cfg.ep}" * (cfg.ep > 1)
    data = layout["dp_replicate"] * layout["dp_shard"]
    micro_steps = cfg.gradient_accumulation_steps // data
    tokens, days = plan.tokens_per_step * cfg.max_iters, plan.step * cfg.max_iters / 86400
    fits, worlds = plan.total <= plan.usable, []
    most = f"batch_size={plan.largest_batch} is the largest that does" if plan.largest_batch else "no batch_size does"
    if not fits:
        remedies = {
            "a smaller batch_size": cfg.batch_size > 1,
            "activation_checkpoint=full": cfg.activation_checkpoint != "full",
            "parallel=fsdp": cfg.parallel != "fsdp",
            "tp": cfg.tp == 1,
            "pp": cfg.pp == 1,
            "or more ranks with larger gradient_accumulation_steps": True,
        }
        no = f"none; try {', '.join(remedy for remedy, is_unused in remedies.items() if is_unused)}"
        worlds = [f"  {'smallest world_size that fits':<34} {plan.smallest_world or no:>10}"]
    lines = [
        f"{plan.parameters:,} parameters, {plan.flops_per_token / 1e9:,.4g} GFLOP per token forward and backward; "
        f"attention: {plan.attention}",
        f"{cfg.world_size:,} x {cfg.gpu}: {mesh}; parallel={cfg.parallel}, optimizer={cfg.optimizer}, "
        f"activation_checkpoint={cfg.activation_checkpoint}",
        f"{plan.tokens_per_step:,} tokens a step: {data:,} data ranks x {micro_steps} micro-steps x "
        f"batch_size={cfg.batch_size} x {cfg.block_size:,} tokens",
        "",
        "memory of a rank                            GiB",
        *(
            f"  {kind:<34} {n / 2**30:>10.2f}" + "  on the host" * (kind in STATES and plan.host > 0)
            for kind, n in plan.memory.items()
        ),
        f"  {'at the worst moment':<34} {plan.total / 2**30:>10.2f}  of {gpu.memory / 2**30:.0f}: "
        f"it {'fits' if fits else 'DOES NOT FIT'}; {most}",
        *worlds,
        "",
        "traffic of a rank in a step                  GB     ranks      GB/s   seconds",
        *(
            f"  {kind:<34} {t.bytes / 1e9:>10.2f} {t.ranks:>9,} {t.bandwidth / 1e9:>9.0f} {t.seconds:>9.3f}"
            for kind, t in plan.traffic.items()
        ),
        "",
        "time of a step                          seconds",
        *(f"  {kind:<34} {seconds:>10.3f}" for kind, seconds in plan.seconds.items()),
        f"  {'in all':<34} {plan.step:>10.3f}  MFU {plan.mfu:.1%} of {plan.peak / 1e12:,.0f} TFLOP/s in {plan.dtype}",
        f"max_iters={cfg.max_iters:,}: {tokens / 1e9:,.1f} billion tokens in {days:,.1f} days",
        "",
        f"Assumed, not measured: a rank that does not wait reaches {gpu.achieved:.0%} of the peak, uncompiled;",
        f"{PER_NODE} GPUs per node; collectives reach {LINK:.0%} of {gpu.intra / 1e9:.0f} GB/s within a node and of "
        f"{gpu.inter / 1e9:.0f} GB/s per GPU between nodes;",
        f"traffic of data ranks overlaps with {OVERLAP:.0%} of the computation; recomputation makes a block take "
        f"{RECOMPUTE[cfg.activation_checkpoint]:.2f} times",
        f"as long; {USABLE:.0%} of the memory is usable.",
    ]
    return "\n".join(lines)
