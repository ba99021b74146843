"""Measures this machine: training by phase, decoding, and the loader. `python -m tools.bench` prints it as a table.

    report = measure(list(CONFIGS), print)          # prints each row when it is measured; the report has all digits
    write_trace("make-train", Path("trace.json"))   # torch.profiler's trace of three steps

Everything runs in this process, on random tokens, with the parts that train.py uses. The phases of a training step:

    data        waiting for the loader, which prepares batches in its own thread
    forward     the model and its loss
    backward    the gradients
    optimizer   the gradient's norm, clipping, the update, and the release of the gradients

A loss that is computed in chunks (ops.ChunkedCrossEntropy) computes its gradient in the forward already. Where blocks
are compiled, as on GPUs, the compiler decides which results the forward keeps and which the backward computes again,
and it joins the operations of a block into a few kernels. So forward and backward are those of the compiled program,
and a trace does not split a block into attention, norm and MLP.

On a GPU the host waits for the end of each phase, which it does not do in train.py. So there the time of a step, the
tokens/s and the MFU come from as many steps without such waits, and the phases may add up to more than a step.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.profiler import profile, record_function

from configurator import Config, parse
from data import DATA
from data.dataset import open_data
from data.errors import require
from data.loader import Loader
from data.objective import Causal, open_with_objective
from engine import optim
from engine.decode import generate
from engine.device import machine, peak_flops, peak_memory_bytes, resolve_device, resolve_dtype
from engine.parallel import ranks as parallel
from engine.plan import accounting, plan
from model import Model
from tools.child import Child
from tools.training import Training, random_data, reset_peak_memory

ROOT, CPU = Path(__file__).resolve().parent.parent, torch.device("cpu")
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


# ---------------------------------------------------------------------------------------------------------------------
# Training


def flags(name: str, dtype: str = "auto", data: str = "") -> Config:
    """The flags of a configuration, with another data set. ValueError if there is none of this name."""
    require(name in CONFIGS, f"--config={name} is no configuration of the table; give one of {', '.join(CONFIGS)}")
    args = [arg if arg.startswith("--") else str(ROOT / arg) for arg in CONFIGS[name].split()]
    args += [f"--dataset={data}"] * bool(data)
    return parse(Config, [*args, "--gradient_accumulation_steps=1", f"--dtype={dtype}"])


def check(names: list[str]):
    """ValueError if a name is wrong, or if torchrun has started several processes."""
    size = parallel.environment().size
    require(size == 1, f"WORLD_SIZE={size}: bench.py measures a single process; start it without torchrun")
    for name in names:
        flags(name)


def measure_training(name: str, dtype: str, data: str, peak: float | None) -> dict:
    """A row of the table: medians over the timed steps. peak: of matrix products in this dtype, in FLOP/s."""
    with closing(Training(flags(name, dtype, data))) as training:
        cfg, device = training.cfg, training.ranks.device
        reset_peak_memory(device)
        for _ in range(WARM):
            training.step()
        times, end = [], time.perf_counter() + SECONDS
        while len(times) < LEAST or len(times) < MOST and time.perf_counter() < end:
            times.append(training.timed_step())
        ms = median(sum(step.values()) for step in times)
        if device.type != "cpu":
            start = time.perf_counter()
            for _ in times:
                training.step()
            training.synchronize()
            ms = 1000 * (time.perf_counter() - start) / len(times)
        memory = peak_memory_bytes(device)
    phases = {f"{name}_ms": median(step[name] for step in times) for name in times[0]}
    samples_per_s = 1000 * cfg.batch_size / ms
    return {
        "configuration": name, "dtype": dtype, "compiled": training.ranks.compile, "steps": len(times),
        "ms_per_step": ms, **phases, "optimizer_share": phases["optimizer_ms"] / sum(phases.values()),
        "tokens_per_s": samples_per_s * cfg.block_size,
        "mfu": peak and samples_per_s * accounting.flops(training.sharded.model, cfg.block_size) / peak,
        "peak_memory_bytes": memory, "newton_schulz_flops": newton_schulz_flops(training.parts_of_step.optimizer),
    }  # fmt: skip


def newton_schulz_flops(optimizer: optim.Optimizer) -> int:
    """FLOPs of the matrix products of Muon's Newton-Schulz iteration in a step; 0 without Muon.

    Let m be the smaller and n the larger side of a logical matrix. Each of the 5 iterations multiplies three times: the
    Gram matrix takes 2 m m n, its square 2 m m m, and the product of the polynomial with the matrix 2 m m n.
    """
    parts = (part for part in optimizer.parts if isinstance(part, optim.Muon))
    return sum(optim.Matrix(p.shape, fused).flops for muon in parts for p, fused in muon.fused.items())


def write_trace(name: str, path: Path) -> str:
    """Write a trace of some steps after the first ones as a JSON file for Chrome or Perfetto. Returns a description."""
    check([name])
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a"):  # an OSError comes now, and not after the steps
        pass
    with tempfile.TemporaryDirectory() as folder:
        dtype, *_ = dtypes()
        random_data(folder, SHARD, 65)
        with closing(Training(flags(name, dtype, folder))) as training, ExitStack() as phase:

            def begin(name: str):
                phase.close()
                phase.enter_context(record_function(name))

            for _ in range(WARM):
                training.step()
            with profile() as profiler:
                for _ in range(TRACED):
                    training.phases(begin)
                    phase.close()
                training.synchronize()
    profiler.export_chrome_trace(str(path))
    return f"{path}: {TRACED} steps of {name} in {dtype}; open it with chrome://tracing or https://ui.perfetto.dev"


# ---------------------------------------------------------------------------------------------------------------------
# Decoding and loading


def measure_decoding(name: str, cfg: Config, batch: int) -> dict:
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
    seconds, quarter = [b - a for a, b in pairwise(marks)], -(-n // 4)
    return {
        "configuration": name, "dtype": str(dtype)[6:], "batch_size": batch, "tokens_per_s": batch * n / sum(seconds),
        "last_quarter_to_first": median(seconds[-quarter:]) / median(seconds[:quarter]),
    }  # fmt: skip


def measure_loader(name: str | Path, device: torch.device = CPU) -> tuple[float, float]:
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
            (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)

    speeds, synchronize = [], getattr(torch, device.type).synchronize
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
# Slow links


def link_table(runs: list[list[str]], names: list[str], delays: list[float]):
    """Print the speed of each run, arguments of train.py, at each delay. The first delay must be 0."""
    configs = [parse(Config, args) for args in runs]
    for cfg in configs:
        alone = cfg.tp > 1 and cfg.cp == cfg.pp == 1 and cfg.parallel == "ddp"
        flags = f"tp={cfg.tp}, cp={cfg.cp}, pp={cfg.pp} and parallel={cfg.parallel}"
        require(alone, f"--link_delay needs tensor parallelism alone, and a run has {flags}; set only --tp=2 or more")
        cfg.world_size, (_, _, cfg.vocab_size) = cfg.tp, open_with_objective(cfg)
    planned = [plan.estimate(cfg).collectives for cfg in configs]
    print("ranks  collectives  planned  delay ms  ms/step  slowdown  predicted  run", flush=True)
    for args, name, cfg, count in zip(runs, names, configs, planned, strict=True):
        steps = delayed_steps(args, cfg.tp, delays)
        times = [median(ms for _, ms, _ in steps[i :: len(delays)]) for i in range(len(delays))]
        for delay, ms in zip(delays, times, strict=True):
            figures = f"{delay:>10g}{ms:>9.1f}{ms / times[0]:>10.2f}{1 + count * delay / times[0]:>11.2f}"
            print(f"{cfg.tp:>5}{steps[-1][0]:>13}{count:>9}{figures}  {name}", flush=True)


def delayed_steps(args: list[str], ranks: int, delays: list[float]) -> list[list[float]]:
    """[collectives, milliseconds, loss] of each step of a run."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m", "tools.link_delay"]
    fixed = ["--device=cpu", "--compile=False"]
    with Child([sys.executable, *torchrun, ",".join(map(str, delays)), *args, *fixed], ROOT) as run:
        steps = next((json.loads(line) for line in run.lines if line.startswith("[")), [])
        failure = run.failure() or len(steps) < 5 * len(delays) and "too few steps; raise --max_iters"
    require(not failure, f"--link_delay: {' '.join(args)}: {failure}")
    return steps


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


def dtypes() -> list[str]:
    """The dtypes of the training rows: of --dtype=auto on this machine, and float32."""
    return list(dict.fromkeys([str(parallel.agreed_dtype("auto", resolve_device("auto")))[6:], "float32"]))


def measure(names: list[str], say: Callable[[str], None]) -> dict:
    """Measure these configurations and the loader. Hands each line of the table to `say`, and returns all figures."""
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
    with tempfile.TemporaryDirectory() as folder:
        random_data(folder, SHARD, 65)
        say("\n" + line(TRAINING, title="training"))
        for name in names:
            for dtype, peak in peaks.items():
                report["training"].append(measure_training(name, dtype, folder, peak))
                say(line(TRAINING, report["training"][-1]))
        if any(row["compiled"] for row in report["training"]):
            say("These models were compiled.")
        decoded = [name for name in DECODED if name in names]
        if decoded:
            say("\n" + line(DECODING, title="decoding"))
        for name in decoded:
            for batch in (1, 8):
                report["decoding"].append(measure_decoding(name, flags(name), batch))
                say(line(DECODING, report["decoding"][-1]))
        ours, theirs = measure_loader(folder)
        report["loader"] = {"tokens_per_s": ours, "nanogpt_tokens_per_s": theirs}
        say(f"\nloader: {loader_text(ours, theirs)}")
    say(LEGEND.rstrip())
    return report
