"""Plans a run: its memory, traffic and time on GPUs that this machine need not have.

    plan = estimate(cfg)      # for cfg.world_size GPUs of the kind cfg.gpu; opens no data and needs no other rank
    print(report(plan))

With a pipeline, memory is planned for the stage that needs most, and time for the slowest stage. GB are 1e9 bytes, GiB
are 2**30 bytes.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from data.errors import require
from engine.device import gpu_peak
from engine.parallel.ranks import check_scaler
from engine.plan.estimate import RECOMPUTE, STATES, Rank, Stage, estimate_rank, layout_of
from model import Model

# ---------------------------------------------------------------------------------------------------------------------
# Assumptions, none of them measured here. The peaks in FLOP/s are in engine/device.py.


class Gpu(NamedTuple):
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
OVERLAP = 0.8  # share of the computation during which the traffic of FSDP and DDP can run
HOST = 20e9  # bytes per second of a rank between GPU and host, and of the optimizer on the host


class Traffic(NamedTuple):
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
    memory: dict[str, int]  # bytes of a rank, by kind
    total: int  # bytes on the GPU at the worst moment
    host: int  # bytes on the host
    usable: int  # bytes of a GPU that a run can use
    traffic: dict[str, Traffic]  # by kind
    seconds: dict[str, float]  # of a step, by cause

    @property
    def tokens_per_step(self) -> int:
        return self.cfg.batch_size * self.cfg.gradient_accumulation_steps * self.cfg.block_size

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    @property
    def mfu(self) -> float:
        return self.flops_per_token * self.tokens_per_step / (self.cfg.world_size * self.peak * self.step)


def check_size(flags: str, size: int, most: int):
    """ValueError for a run whose plan would take minutes."""
    require(size <= most, f"{flags} takes too long to plan; lower it to at most {most}")


def estimate(cfg) -> Plan:
    """The plan of a run; ValueError if its flags contradict each other. cfg.vocab_size must be known."""
    gpu = GPU[cfg.gpu]
    layout_of(cfg)  # ValueError if flags do not fit together
    check_scaler(cfg, cfg.world_size, torch.float16 if cfg.dtype == "float16" else torch.bfloat16)
    require(not cfg.fp8 or cfg.gpu != "a100", "fp8=True does not go with gpu=a100, which has no float8; set gpu=h100")
    check_size(f"n_layer={cfg.n_layer}", cfg.n_layer + cfg.n_encoder_layer, 1024)
    check_size(f"block_size={cfg.block_size}", cfg.block_size, 2**24)
    check_size(f"tp={cfg.tp} times cp={cfg.cp} or ep={cfg.ep}", cfg.tp * max(cfg.cp, cfg.ep), 2**12)
    if cfg.pp > 1:
        from engine.parallel import pipeline

        with torch.device("meta"):
            pipeline.keep_stages(Model(cfg), 0, cfg.pp)  # refuses layers that exchange more than the stream
    rank = estimate_rank(cfg)
    peak = gpu_peak(cfg.gpu, rank.dtype)
    memory, total, host = rank.memory()
    times = [step_time(rank, stage, gpu, peak) for stage in rank.stages]
    traffic, seconds = max(times, key=lambda each: sum(each[1].values()))
    return Plan(
        cfg, str(rank.dtype)[6:], peak, rank.n_params, rank.attention, rank.flops / cfg.block_size,
        memory, total, host, int(USABLE * gpu.memory), traffic, seconds,
    )  # fmt: skip


def bandwidth(gpu: Gpu, ranks: int, distance: int, ring: bool = True) -> float:
    """Bytes per second that a rank can send. Between nodes, all ring ranks of a node share their cards; in an
    all-to-all, each has its own."""
    in_node = min(ranks, max(1, PER_NODE // distance)) if ring else 1
    return LINK * (gpu.intra if ranks * distance <= PER_NODE else in_node * gpu.inter)


def step_time(rank: Rank, stage: Stage, gpu: Gpu, peak: float) -> tuple[dict[str, Traffic], dict[str, float]]:
    """(traffic of a rank of the stage, seconds of its step by cause)."""
    cfg, speed = rank.cfg, gpu.achieved * peak
    traffic = {}
    for kind, n in rank.traffic(stage).items():
        ranks, distance = rank.group(kind)
        rate = bandwidth(gpu, ranks, distance, ring=not kind.endswith("all-to-all"))
        traffic[kind] = Traffic(n, ranks, rate, n / rate)
    data = sum(each.seconds for kind, each in traffic.items() if kind.startswith(("fsdp", "hsdp", "ddp", "experts")))
    rest = sum(each.seconds for each in traffic.values()) - data
    compute = rank.matmul_flops(stage) / speed
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


# ---------------------------------------------------------------------------------------------------------------------
# The text of --plan


def report(plan: Plan) -> str:
    """The plan as a table to print, at most 45 lines."""
    cfg, gpu = plan.cfg, GPU[plan.cfg.gpu]
    tokens, days = plan.tokens_per_step * cfg.max_iters, plan.step * cfg.max_iters / 86400
    mfu = f"MFU {plan.mfu:.1%} of {plan.peak / 1e12:,.0f} TFLOP/s in {plan.dtype}"
    lines = [*heading(plan), "", "memory of a rank                            GiB"]
    for kind, n in plan.memory.items():
        where = "  on the host" if kind in STATES and plan.host else ""
        lines.append(f"  {kind:<34} {n / 2**30:>10.2f}{where}")
    lines.append(f"  {'at the worst moment':<34} {plan.total / 2**30:>10.2f}  of {gpu.memory / 2**30:.0f}: {fit(plan)}")
    lines += ["", "traffic of a rank in a step                  GB     ranks      GB/s   seconds"]
    for kind, t in plan.traffic.items():
        lines.append(f"  {kind:<34} {t.bytes / 1e9:>10.2f} {t.ranks:>9,} {t.bandwidth / 1e9:>9.0f} {t.seconds:>9.3f}")
    lines += ["", "time of a step                          seconds"]
    for cause, seconds in plan.seconds.items():
        lines.append(f"  {cause:<34} {seconds:>10.3f}")
    lines += [
        f"  {'in all':<34} {plan.step:>10.3f}  {mfu}",
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


def heading(plan: Plan) -> list[str]:
    """What is planned: the model, the layout, and the tokens of a step."""
    cfg, layout = plan.cfg, layout_of(plan.cfg)
    data = layout["dp_replicate"] * layout["dp_shard"]
    if cfg.parallel == "ddp":
        layout["copies"] = layout.pop("dp_shard")
    mesh = " x ".join(f"{dim}={n}" for dim, n in layout.items() if n > 1) or "one rank"
    if cfg.ep > 1:
        mesh += f", ep={cfg.ep}"
    return [
        f"{plan.parameters:,} parameters, {plan.flops_per_token / 1e9:,.4g} GFLOP per token forward and backward; "
        f"attention: {plan.attention}",
        f"{cfg.world_size:,} x {cfg.gpu}: {mesh}; parallel={cfg.parallel}, optimizer={cfg.optimizer}, "
        f"activation_checkpoint={cfg.activation_checkpoint}",
        f"{plan.tokens_per_step:,} tokens a step: {data:,} data ranks x {cfg.gradient_accumulation_steps // data} "
        f"micro-steps x batch_size={cfg.batch_size} x {cfg.block_size:,} tokens",
    ]


def fit(plan: Plan) -> str:
    """Whether the run fits, and what helps if it does not."""
    if plan.total <= plan.usable:
        return "it fits"
    cfg, remedies = plan.cfg, []
    if cfg.batch_size > 1:
        remedies.append("a smaller batch_size")
    for name, value in (("activation_checkpoint", "full"), ("parallel", "fsdp")):
        if getattr(cfg, name) != value:
            remedies.append(f"{name}={value}")
    remedies += [name for name in ("tp", "pp") if getattr(cfg, name) == 1]
    remedies.append("a larger world_size with larger gradient_accumulation_steps")
    return f"it DOES NOT FIT;\n  try {', '.join(remedies)}"
