"""Measures training by phase, decoding and the loader on this machine. tools.bench prints the tables.

    report = measure(list(CONFIGS), print)          # prints each row when it is measured; the report has all digits
    write_trace("make-train", Path("trace.json"))   # torch.profiler's trace of three steps
    with training(cfg, vocab_size) as run:          # a run on random tokens, without files
        ms_per_step, losses, grad_norms = run.steps(10)

Everything runs in this process, on random tokens, with the parts that train.py uses. The phases of a training step are
data (waiting for the loader's thread), forward (with the loss), backward, and optimizer (the gradient's norm, clipping,
the update, and the release of the gradients). docs/running.md says what they are in chunks, compiled blocks, and GPUs.
"""

import ctypes
import gc
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.profiler import profile, record_function

from configurator import Config, parse
from data import DATA
from data.dataset import open_data
from data.errors import require
from data.loader import Loader
from data.objective import Causal, open_with_objective
from engine import compilation, optim
from engine.decode import generate
from engine.device import machine, peak_flops, peak_memory_bytes, resolve_device, resolve_dtype
from engine.parallel import ranks as parallel
from engine.parallel.sharded import ShardedModel
from engine.plan import accounting
from engine.step import Step
from model import Model
from tools.child import ROOT

CONFIGS = {  # name -> arguments of train.py; on random tokens, so each names the vocabulary's size of its own data
    "4L/128/T64/B12": "config/train_shakespeare_cpu.py --vocab_size=65",
    "6L/384/T256/B8": "config/train_shakespeare_char.py --batch_size=8 --dropout=0.0 --vocab_size=65",
    "6L/384/T256/B8/dropout0.2": "config/train_shakespeare_char.py --batch_size=8 --vocab_size=65",
    "make-train": "config/train_pycode.py --vocab_size=257",
}
DECODED = ("make-train", "6L/384/T256/B8")  # the configurations whose models decode
WARM, LEAST, MOST, SECONDS = 3, 5, 50, 5.0  # steps before the timing; timed steps, as many as these seconds allow
TRACED = 3  # steps in a trace
SHARD, BATCHES = 2**25, 200  # tokens of the random data; batches that the loader's speed is measured with


def random_data(folder: str | Path, tokens: int, vocab_size: int, length: int = 1024):
    """Write a data set: random tokens, small ids most often, in documents of `length` tokens on average."""
    rng, folder = np.random.default_rng(0), Path(folder)
    ids = (vocab_size * rng.random(tokens, dtype=np.float32) ** 8).astype(np.uint16)
    ids[rng.random(tokens, dtype=np.float32) < 1 / length] = vocab_size - 1
    for split, part in (("train", ids), ("val", ids[: 2**16])):
        part.tofile(folder / f"{split}.bin")
    (folder / "meta.json").write_text(json.dumps({"vocab_size": vocab_size, "eot": vocab_size - 1}))


# ---------------------------------------------------------------------------------------------------------------------
# Training


class Training:
    """The parts of a run, and how many steps it has made."""

    def __init__(self, cfg: Config):
        data, objective, cfg.vocab_size = open_with_objective(cfg)
        parallel.check_flags(cfg)
        self.ranks = ranks = parallel.join(cfg)
        if ranks.compile:
            torch._dynamo.reset()  # the graphs of other configurations would count towards the limit of recompilations
            torch._dynamo.utils.counters.clear()
        self.cfg, self.done, self.graphs = cfg, 0, {}  # graphs that torch.compile has made
        self.synchronize = getattr(torch, ranks.device.type).synchronize
        torch.manual_seed(cfg.seed)
        self.sharded = ShardedModel(cfg, ranks)
        self.sharded.init_weights(cfg.seed)
        self.stepper = Step(cfg, self.sharded)
        part = map(self.stepper.micro_steps, itertools.count()), ranks.data_rank, ranks.data_size
        self.loader = Loader(data.split("train"), objective, cfg.batch_size, *part, cfg.seed, ranks.device)
        self.close = self.loader.close

    def steps(self, n: int) -> tuple[float, list[Tensor], list[Tensor]]:
        """Make n steps. Returns the milliseconds of one, all losses (this rank's means) and all gradient norms."""
        start, losses, norms = time.perf_counter(), [], []
        for _ in range(n):
            loss, norm = self.stepper(self.loader, self.done)
            losses.append(loss)
            norms.append(norm)
            self.done += 1
            graphs = compilation.graphs() if self.ranks.compile else 0
            self.graphs = {"graphs of the first step": graphs} | self.graphs | {"graphs in all": graphs}
        self.synchronize()
        return 1000 * (time.perf_counter() - start) / n, losses, norms

    def phases(self, begin: Callable[[str], None]):
        """Make a step of one batch. Calls begin(name) where a phase begins: data, forward, backward, optimizer, end."""
        model, stepper = self.sharded.model, self.stepper
        forward = model.register_forward_pre_hook(lambda *_: begin("forward"))
        with forward, model.register_forward_hook(lambda *_: begin("backward")):
            begin("data")
            stepper.backward(self.loader, self.done)
        begin("optimizer")
        stepper.clip()
        stepper.update()
        begin("end")

    def timed_step(self) -> dict[str, float]:
        """Make a step. Returns the milliseconds of each phase."""
        marks = []

        def begin(name: str):
            self.synchronize()
            marks.append((name, time.perf_counter()))

        self.phases(begin)
        return {name: 1000 * (end - start) for (name, start), (_, end) in itertools.pairwise(marks)}

    def rates(self, ms: float, peak: float | None) -> tuple[float, float | None]:
        """(tokens per second, MFU) of all ranks if a step takes `ms` milliseconds. peak: of matrix products on this
        rank, in FLOP/s; without it, MFU is None."""
        cfg, peak = self.cfg, self.ranks.sum(torch.tensor(peak or 0.0, device=self.ranks.device)).item()
        samples_per_s = 1000 * cfg.batch_size * cfg.gradient_accumulation_steps / ms
        with torch.device("meta"):
            flops_per_s = samples_per_s * accounting.flops(Model(cfg), cfg.block_size)
        return samples_per_s * cfg.block_size, flops_per_s / peak if peak else None


def reset_peak_memory(device: torch.device):
    """Make engine.device.peak_memory_bytes count from now on. Outside of Linux, a CPU's peak stays the process's."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # gives freed memory back to the system; only glibc has it
        Path("/proc/self/clear_refs").write_text("5")  # 5 = set the peak to the memory in use now


@contextmanager
def training(cfg: Config, vocab_size: int, length: int = 1024) -> Iterator[Training]:
    """A training run with these flags on random tokens, in documents of `length` tokens on average. The peak of memory
    counts from its start on."""
    with tempfile.TemporaryDirectory() as cfg.dataset:
        random_data(cfg.dataset, 2048 * cfg.block_size, vocab_size, length)
        with closing(Training(cfg)) as run:
            reset_peak_memory(run.ranks.device)
            yield run


def flags(name: str, dtype: str = "auto") -> Config:
    """The flags of a configuration. ValueError if there is none of this name."""
    require(name in CONFIGS, f"--config={name} is no configuration of the table; give one of {', '.join(CONFIGS)}")
    args = [arg if arg.startswith("--") else str(ROOT / arg) for arg in CONFIGS[name].split()]
    return parse(Config, [*args, "--gradient_accumulation_steps=1", f"--dtype={dtype}"])


def check(names: list[str]):
    """ValueError if a name is wrong, or if torchrun has started several processes."""
    size = parallel.environment().size
    require(size == 1, f"WORLD_SIZE={size}: bench.py measures a single process; start it without torchrun")
    for name in names:
        flags(name)


def dtypes() -> list[str]:
    """The dtypes of the training rows: of --dtype=auto on this machine, and float32."""
    return list(dict.fromkeys([str(parallel.agreed_dtype("auto", resolve_device("auto")))[6:], "float32"]))


def measure_training(name: str, dtype: str, peak: float | None) -> dict:
    """A row of the table: medians over the timed steps. peak: of matrix products in this dtype, in FLOP/s."""
    with training(flags(name, dtype), 65) as run:
        device = run.ranks.device
        run.steps(WARM)
        times, end = [], time.perf_counter() + SECONDS
        while len(times) < LEAST or len(times) < MOST and time.perf_counter() < end:
            times.append(run.timed_step())
        ms = median(sum(step.values()) for step in times)
        if device.type != "cpu":
            ms, _, _ = run.steps(len(times))
        memory, (tokens_per_s, mfu) = peak_memory_bytes(device), run.rates(ms, peak)
    phases = {f"{phase}_ms": median(step[phase] for step in times) for phase in times[0]}
    return {
        "configuration": name, "dtype": dtype, "compiled": run.ranks.compile, "steps": len(times),
        "ms_per_step": ms, **phases, "optimizer_share": phases["optimizer_ms"] / sum(phases.values()),
        "tokens_per_s": tokens_per_s, "mfu": mfu, "peak_memory_bytes": memory,
        "newton_schulz_flops": newton_schulz_flops(run.stepper.optimizer),
    }  # fmt: skip


def newton_schulz_flops(optimizer: optim.Optimizer) -> int:
    """FLOPs of the matrix products of Muon's Newton-Schulz iteration in a step; 0 without Muon."""
    parts = (part for part in optimizer.parts if isinstance(part, optim.Muon))
    return sum(optim.Matrix(p.shape, fused).flops for muon in parts for p, fused in muon.fused.items())


def write_trace(name: str, path: Path) -> str:
    """Write a trace of some steps after the first ones as a JSON file for Chrome or Perfetto. Returns a description."""
    check([name])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("a").close()  # an OSError comes now, and not after the steps
    dtype, *_ = dtypes()
    with training(flags(name, dtype), 65) as run, ExitStack() as phase:

        def begin(name: str):
            phase.close()
            phase.enter_context(record_function(name))

        run.steps(WARM)
        with profile() as profiler:
            for _ in range(TRACED):
                run.phases(begin)
                phase.close()
            run.synchronize()
    profiler.export_chrome_trace(str(path))
    return f"{path}: {TRACED} steps of {name} in {dtype}; open it with chrome://tracing or https://ui.perfetto.dev"


# ---------------------------------------------------------------------------------------------------------------------
# Decoding and loading


def measure_decoding(name: str, cfg: Config, batch: int, generate: Callable = generate) -> dict:
    """The speed of greedy decoding with random weights, of block_size tokens for each of `batch` samples."""
    device = resolve_device(cfg.device)
    dtype = resolve_dtype("auto", device)  # as in sample.py
    model = Model(cfg, cfg.seed).to(device).eval()
    start = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        for n in (min(8, cfg.block_size), cfg.block_size):  # first a few tokens to warm up
            marks = [time.perf_counter()]
            for tokens in generate(model, start, n, lambda logits: logits.argmax(dim=-1)):
                tokens.tolist()  # waits for the device, as in sample.py
                marks.append(time.perf_counter())
    seconds, quarter = [b - a for a, b in itertools.pairwise(marks)], -(-n // 4)
    return {
        "configuration": name, "dtype": str(dtype)[6:], "batch_size": batch, "tokens_per_s": batch * n / sum(seconds),
        "last_quarter_to_first": median(seconds[-quarter:]) / median(seconds[:quarter]),
    }  # fmt: skip


def measure_loader(name: str | Path, device: str = "cpu") -> tuple[float, float]:
    """Tokens per second of our loader and of nanoGPT's way, to the device, each after BATCHES / 10 of warm-up."""
    B, T = 64, 1024
    data = open_data(name, DATA)
    stream = data.split("train")
    shard = max(stream.shards, key=len)
    require(len(shard) > T + 1, f"--loader={name} has shards of at most {len(shard)} tokens; give a larger data set")

    def theirs() -> None:
        tokens = np.memmap(shard.path, shard.dtype, mode="r", offset=shard.offset, shape=(len(shard),))
        starts = torch.randint(len(tokens) - T, (B,))
        for first in (0, 1):
            x = torch.stack([torch.from_numpy(tokens[i + first : i + first + T].astype(np.int64)) for i in starts])
            (x.pin_memory() if device == "cuda" else x).to(device, non_blocking=True)

    speeds, synchronize = [], getattr(torch, device).synchronize
    with closing(Loader(stream, Causal(data.vocab_size, data.eot, T), B, device=device)) as loader:
        for fetch in (loader.__next__, theirs):
            for number in range(-BATCHES // 10, BATCHES):
                if number == 0:
                    start = time.perf_counter()
                fetch()
            synchronize()
            speeds.append(BATCHES * B * T / (time.perf_counter() - start))
    return tuple(speeds)


def loader_text(ours: float, theirs: float) -> str:
    return f"{ours / 1e6:.0f} Mtok/s, {theirs / 1e6:.0f} in nanoGPT's way: {ours / theirs:.1f} times"


# ---------------------------------------------------------------------------------------------------------------------
# The table

TRAINING = {  # title of a column -> the text of its cells
    "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
    "MFU": lambda row: f"{row['mfu']:.1%}" if row["mfu"] else "-",
    "ms/step": lambda row: f"{row['ms_per_step']:.1f}",
    "data": lambda row: f"{row['data_ms']:.2f}",
    "forward": lambda row: f"{row['forward_ms']:.1f}",
    "backward": lambda row: f"{row['backward_ms']:.1f}",
    "optimizer": lambda row: f"{row['optimizer_ms']:.1f}",
    "share": lambda row: f"{row['optimizer_share']:.1%}",
    "N-S GFLOP": lambda row: f"{row['newton_schulz_flops'] / 1e9:.2f}" if row["newton_schulz_flops"] else "-",
    "peak MiB": lambda row: f"{row['peak_memory_bytes'] / 2**20:,.0f}",
}
DECODING = {
    "samples": lambda row: f"{row['batch_size']}",
    "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
    "last/first": lambda row: f"{row['last_quarter_to_first']:.2f}",
}
LEGEND = """
data to optimizer: milliseconds; share: of the optimizer in the step; N-S GFLOP: the products of Muon's Newton-Schulz
iteration in a step; peak MiB: memory of the GPU, or resident in this process, with Python and torch
decoding: tokens/s of all samples together; last/first: the time of a token in the last quarter of the context, relative
to the first quarter
"""


def line(columns: dict, row: dict | None = None, title: str = "") -> str:
    """The line of a row; without a row, the line of titles above the rows."""
    name, dtype = (row["configuration"], row["dtype"]) if row else (title, "dtype")
    cells = {column: text(row) if row else column for column, text in columns.items()}
    return f"{name:<26}{dtype:<9}" + "".join(f"{cell:>{max(7, len(column) + 1)}}" for column, cell in cells.items())


def measure(names: list[str], say: Callable[[str], None]) -> dict:
    """Measure training, decoding and the loader for these configurations. Hands each line of the table to `say`, and
    returns all figures."""
    check(names)
    device = resolve_device("auto")
    date, here = datetime.now().astimezone().isoformat(timespec="minutes"), machine(device)
    peaks = {dtype: peak_flops(device, getattr(torch, dtype)) for dtype in dtypes()}
    report = {"date": date, "machine": here, "peak_flops": peaks, "training": [], "decoding": []}
    about = [here["device"], f"torch {here['torch']}", date]
    if device.type == "cpu":
        instructions = ", ".join(here["cpu_bfloat16"]) or "no instructions that are known"
        limits = [f"{name}={os.environ[name]}" for name in here["limited_by"]]
        about[1:1] = [f"bfloat16 by {instructions}", *limits, f"{here['threads']} thread{'s' * (here['threads'] > 1)}"]
    say("; ".join(about))
    known = [f"{peak / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, peak in peaks.items() if peak]
    say(f"peak of matrix products, for MFU: {', '.join(known) or 'unknown'}")
    say("\n" + line(TRAINING, title="training"))
    for name, dtype in itertools.product(names, peaks):
        report["training"].append(measure_training(name, dtype, peaks[dtype]))
        say(line(TRAINING, report["training"][-1]))
    if any(row["compiled"] for row in report["training"]):
        say("These models were compiled.")
    decoded = [name for name in DECODED if name in names]
    if decoded:
        say("\n" + line(DECODING, title="decoding"))
    for name, batch in itertools.product(decoded, (1, 8)):
        report["decoding"].append(measure_decoding(name, flags(name), batch))
        say(line(DECODING, report["decoding"][-1]))
    with tempfile.TemporaryDirectory() as folder:
        random_data(folder, SHARD, 65)
        ours, theirs = measure_loader(folder)
    report["loader"] = {"tokens_per_s": ours, "nanogpt_tokens_per_s": theirs}
    say(f"\nloader: {loader_text(ours, theirs)}")
    say(LEGEND.rstrip())
    return report
