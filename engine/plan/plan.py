"""Plans a run on GPUs that this machine need not have: report(Plan(cfg)) tells its memory, traffic and time.

GB are 1e9 bytes, GiB are 2**30 bytes. The numbers below are assumptions, none of them measured here.
"""

from typing import NamedTuple

from engine.config import Config
from engine.device import gpu_peak
from engine.parallel.ranks import check_layout, check_scaler
from engine.plan.accounting import Work
from engine.plan.estimate import Rank


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
RECOMPUTE = {"none": 1.0, "selective": 1.05, "full": 4 / 3}  # time of a block, relative to one without recomputation


class Plan(Rank):
    """A rank, and the seconds that it takes for its traffic in a step, by kind, and for a step, by cause."""

    def __init__(self, cfg: Config):
        check_layout(cfg, cfg.world_size)
        super().__init__(cfg, cfg.world_size)
        check_scaler(cfg, cfg.world_size, self.dtype)
        self.measure()
        self.gpu = GPU[cfg.gpu]
        self.peak = gpu_peak(cfg.gpu, self.dtype)
        self.work = Work(self.cfg, self.lengths, "cuda", self.dtype, self.peak * cfg.world_size)
        self.tokens = cfg.batch_size * cfg.gradient_accumulation_steps * cfg.block_size  # in a step
        self.sending = {kind: n / self.bandwidth(kind) for kind, n in self.traffic.items()}
        self.seconds = {cause: time for cause, time in self.step_time().items() if time > 0}
        self.step = sum(self.seconds.values())
        self.mfu = self.work.flops_per_token * self.tokens / (self.work.peak_flops * self.step)

    def bandwidth(self, kind: str) -> float:
        """Bytes per second that a rank can send to its group. Between nodes, all ring ranks of a node share their
        cards; in an all-to-all, each has its own."""
        ranks, distance = self.groups[kind]
        if ranks * distance <= PER_NODE:
            return LINK * self.gpu.intra
        if kind in ("ep", "muon"):
            return LINK * self.gpu.inter
        return LINK * self.gpu.inter * min(ranks, max(1, PER_NODE // distance))

    def step_time(self) -> dict[str, float]:
        cfg = self.cfg
        speed = self.gpu.achieved * self.peak
        head = 6 * cfg.n_embd * cfg.vocab_rows * self.lengths[0]  # FLOPs of a text
        blocks = self.work.flops_per_token * cfg.block_size - head
        blocks *= RECOMPUTE[cfg.activation_checkpoint] * self.n_layer / cfg.n_layer
        data = sum(self.sending.get(kind, 0.0) for kind in ("fsdp", "ddp", "experts", "hsdp"))
        rest = sum(self.sending.values()) - data
        compute = (blocks + head) * cfg.batch_size * self.micro_steps / (cfg.cp * cfg.tp) / speed
        hidden = OVERLAP * compute
        if not self.fsdp:  # DDP sends in the last backward only
            hidden *= 2 / 3 / self.micro_steps
        return {
            "computation": compute,
            "traffic of tp, cp, ep, pp and Muon": rest,
            "bubble of the pipeline": (compute + rest) * (cfg.pp - 1) / self.micro_steps,
            "traffic of data ranks, not hidden": data - hidden,
            "Muon's matmuls": self.muon_flops / speed,
        }


def report(plan: Plan) -> str:
    def row(name: str, value: float, note: str = "") -> str:
        return f"  {name:<36} {value:>10.3f}  {note}".rstrip()

    cfg = plan.cfg
    gpu = plan.gpu
    verdict = "it fits"
    if plan.total > USABLE * gpu.memory:
        verdict = "it DOES NOT FIT;\n  try a smaller batch_size, a larger tp, pp or world_size"
        for name, value in {"activation_checkpoint": "full", "parallel": "fsdp"}.items():
            if getattr(cfg, name) != value:
                verdict += f", {name}={value}"
    days = plan.step * cfg.max_iters / 86400
    duration = f"{days:,.1f} days" if days >= 1 else f"{24 * days:.2g} hours"
    ramp = ", as if all steps had the last batch of batch_ramp" if cfg.ramp else ""
    lines = [
        f"{plan.work.n_params:,} parameters, {plan.work.flops_per_token / 1e9:,.4g} GFLOP per token forward and "
        f"backward; attention: {plan.work.attention_kernels}",
        f"{plan.tokens:,} tokens a step on {cfg.world_size:,} x {cfg.gpu}, in {plan.micro_steps:,} micro-steps",
        "\nmemory of a rank in GiB",
        *(row(kind, n / 2**30) for kind, n in plan.memory.items() if n),
        row("at the worst moment", plan.total / 2**30, f"of {gpu.memory / 2**30:.0f}: {verdict}"),
        *(["\ntraffic of a rank in a step in GB"] if any(plan.traffic.values()) else []),
        *(row(kind, n / 1e9, f"{plan.sending[kind]:.3f} s") for kind, n in plan.traffic.items() if n),
        "\ntime of a step in seconds",
        *(row(cause, seconds) for cause, seconds in plan.seconds.items()),
        row("in all", plan.step, f"MFU {plan.mfu:.1%} of {plan.peak / 1e12:,.0f} TFLOP/s"),
        f"max_iters={cfg.max_iters:,}: {plan.tokens * cfg.max_iters / 1e9:,.1f} billion tokens in {duration}{ramp}",
        f"\nAssumed, not measured: {gpu.achieved:.0%} of the peak; {LINK:.0%} of {gpu.intra / 1e9:.0f} GB/s among the "
        f"{PER_NODE} GPUs of a node, and of {gpu.inter / 1e9:.0f} GB/s beyond;",
        f"{OVERLAP:.0%} of the computation hides traffic of data ranks; {USABLE:.0%} of the memory is usable.",
    ]
    return "\n".join(lines)
