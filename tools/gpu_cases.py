"""The parts of `tools.gpu` and their cases, which compare a device with the CPU or measure its speed.

    for name, compute in PARTS["training"].cases(device).items():
        figures = compute(Place(device))           # with "failed" if the device does not do what it should

tests/tools/test_gpu.py walks the same cases. On the device `cpu`, all shapes are tiny, and only some of the comparisons
are left. Runs train on random tokens with the parts of train.py; `checkpoints` and `compare` start train.py itself.
"""

import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import profile

from configurator import Config, parse
from data.errors import require
from engine.device import peak_flops, peak_memory_bytes
from engine.metrics import read_metrics
from engine.parallel import ranks as parallel
from engine.plan import accounting, plan
from model import BLOCK, Model
from tools.bench_table import ROOT, measure_decoding, measure_loader
from tools.child import kill_with_parent, measure
from tools.gpu_numbers import NUMBERS, Cases, Place, checks, error, without_tf32
from tools.training import Training, random_data, reset_peak_memory

SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "batch_size": 4, "gradient_accumulation_steps": 2}
VOCABULARY = {"cuda": 50257, "cpu": 257}
TIMED_LINES = 8  # lines "iter N:", one per 10 steps, after which a run of train.py is ended


@contextmanager
def training(cfg: Config, vocab_size: int, length: int) -> Iterator[Training]:
    """A training run with these flags on random tokens."""
    with tempfile.TemporaryDirectory() as cfg.dataset:
        random_data(cfg.dataset, 2048 * cfg.block_size, vocab_size, length)
        with closing(Training(cfg)) as run:
            yield run


# ---------------------------------------------------------------------------------------------------------------------
# Training and checkpoints, compared with the CPU


BLOCKS = {  # name -> flags, in which {m} reads an encoder's memory; tests/golden.py has the losses of all families
    "standard": "--bias=True",
    "parallel": "--block=parallel --pos=rope --mlp=swiglu --norm=rmsnorm",
    "simplified": "--block=simplified --pos=alibi --simplified_value_proj=all",
    "simplified_parallel": "--block=simplified_parallel --attention=gqa --n_kv_head=2",
    "superblock": "--block=superblock --layer=c{m}+p --qk_norm=True --window=7",
    "superblock, series": "--block=superblock --layer=c,p --norm_placement=sandwich --mlp=geglu",
    "superblock, joint pool": "--block=superblock --layer=c.joint_slots{m} --pos=alibi",
    "superblock, groups": "--block=superblock --layer=c{m}+p --n_group=2 --mlp=relu2 --pos=sinusoidal",
}
OBJECTIVES = {
    "causal": "",
    "masked": "--objective=masked --doc_mask=True",
    "seq2seq": "--objective=seq2seq --corrupt_ratio=0.3 --span_length=1.5",
}
OPTIMIZERS = {"adamw": "", "muon": "--optimizer=muon --muon_lr=0.004 --schedule=wsd"}
FAMILIES = {
    f"{block}; {objective}; {optimizer}": f"{BLOCKS[block]} {OBJECTIVES[objective]} {OPTIMIZERS[optimizer]}".format(
        m="+m" * (objective == "seq2seq")
    ).split()
    for block, objective, optimizer in itertools.product(BLOCKS, OBJECTIVES, OPTIMIZERS)
}


def train(case: dict, T: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor | int]:
    """Losses and gradient norms of 20 steps, and graphs if it is compiled. float64 asks for the CPU's eager float32.
    `family` in a case is one of FAMILIES, and all else are flags."""
    exact = dtype == torch.float64
    dtype = torch.float32 if exact else torch.bfloat16 if (dtype, device.type) == (torch.float16, "cpu") else dtype
    chosen = SMALL | {"block_size": T, "learning_rate": 1e-3, "warmup_iters": 3, "max_iters": 20} | case
    chosen |= {"device": device.type, "dtype": str(dtype)[6:], "compile": case.get("compile", False) and not exact}
    family = FAMILIES[chosen.pop("family", "standard; causal; adamw")]
    cfg = parse(Config, [*family, *(f"--{name}={value}" for name, value in chosen.items())])
    with training(cfg, 257, 8) as run:
        without_tf32()
        parts = run.parts_of_step  # with the usual first scale, 2^16, some first steps would be left out
        parts.scaler = torch.amp.GradScaler(device.type, 2.0**10, enabled=parts.scaler.is_enabled())
        losses, norms = run.steps(20)
    counts = run.graphs if cfg.compile else {}
    return {"losses": torch.stack(losses), "gradient norms": torch.stack(norms)} | counts


ROUNDED = {"float32": 1e-3}  # steps amplify differences: on CPUs, a change of all weights by 1e-6 becomes up to 2e-4
RUNS = {
    "runs": Cases(lambda: ({"family": name} for name in FAMILIES), train, ROUNDED, 16, every=13),
    # A norm at a place where the stream is small amplifies rounding: in bfloat16, one norm in 40 was off by 107 %.
    "float16": Cases(lambda: ({"block": name} for name in ("standard", "superblock")), train, {"float16": 0.3}, 16),
}
COMPILED_CASES = [{"block": name, "compile": True, "loss_chunk": 32} for name in BLOCK]
COMPILED = {"compiled": Cases(lambda: iter(COMPILED_CASES), train, ROUNDED, every=5)}


def train_py(folder: str, runs: dict[str, str]):
    """Run train.py with these flags, all runs at the same time and without TF32, in folders of these names."""
    options = {"cwd": ROOT, "env": os.environ | {"NVIDIA_TF32_OVERRIDE": "0"}, "preexec_fn": kill_with_parent}
    options |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    programs = [
        [sys.executable, "train.py", *args.split(), f"--out_dir={folder}/{name}"] for name, args in runs.items()
    ]
    for process in [subprocess.Popen(program, **options) for program in programs]:
        said = process.communicate()[1]
        require(process.returncode == 0, f"{' '.join(process.args[1:])}: {said[-300:]}")


def checkpoints(place: Place) -> dict:
    """Runs of 8 steps, compared with runs that stop after 4 and go on: on the device with --deterministic=True, digit
    for digit; from the CPU to the device, and back, within the errors of float32."""
    with tempfile.TemporaryDirectory() as folder:
        random_data(folder, 4096, 257, 8)
        common = "".join(f"--{name}={value} " for name, value in SMALL.items()) + f"--dataset={folder} --block_size=16 "
        common += "--eval_iters=1 --eval_interval=4 --warmup_iters=1 --lr_decay_iters=8 --log_interval=1 --max_iters="
        same = f"--device={place.device.type} --optimizer=muon --deterministic=True"
        cpu, there = (f"--dtype=float32 --compile=False --device={kind}" for kind in ("cpu", place.device.type))
        runs = {"whole": f"8 {same}", "half": f"4 {same}", "cpu": f"8 {cpu}", "up": f"4 {cpu}", "down": f"4 {there}"}
        train_py(folder, {name: common + run for name, run in runs.items()})
        runs = {"half": same, "up": there, "down": cpu}
        train_py(folder, {name: f"{common}8 --init_from=resume {run}" for name, run in runs.items()})

        def read(name: str) -> dict[str, Tensor]:
            rows = [row for row, _ in read_metrics(Path(folder) / name / "metrics.jsonl") if "loss" in row]
            return {key: torch.tensor([row[key] for row in rows], dtype=torch.float64) for key in ("loss", "grad_norm")}

        figures, wrong = {}, []
        for name, got, expected, limit in (
            ("resume", "half", "whole", 0.0), ("from CPU to GPU", "up", "cpu", 1e-4),
            ("from GPU to CPU", "down", "cpu", 1e-4),
        ):  # fmt: skip
            figures[name], where = error(read(got), read(expected))
            if figures[name] > limit:
                wrong.append(f"{name}: {where} is off by {figures[name]:.1e}; {limit:.0e} is allowed")
    return figures | ({"failed": "; ".join(wrong)} if wrong else {})


# ---------------------------------------------------------------------------------------------------------------------
# Speed

GPT2 = "--n_layer=12 --n_head=12 --n_embd=768 --block_size=1024 --batch_size=12 --gradient_accumulation_steps=5 "
GPT2 += "--dtype=bfloat16 --compile=True"  # flags that nanoGPT has too
TINY = "--n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --batch_size=2 --dtype=float32 --compile=False"
WARM, ROUNDS, LENGTH = 5, 3, 10  # steps before the timing; rounds of it, and steps of each round
CLASSES = {  # of kernels, and on a CPU of operations: class -> pattern of their names, the first that matches
    "compiled kernels": "^triton", "attention": "flash|fmha|attention|sdpa", "communication": "nccl|gloo|c10d",
    "products": r"gemm|nvjet|xmma|cutlass|cublas|mm\b", "optimizer": "multi_tensor|adam|foreach",
    "copies": "memcpy|memset|copy", "other kernels": "",
}  # fmt: skip


def flags(args: str, device: str) -> list[str]:
    """Those of GPT-2 with 124 M parameters and `args`; on the CPU those of a tiny model."""
    return f"{GPT2} {args} {TINY if device == 'cpu' else ''} --device={device}".split()


def speed(args: str, place: Place) -> dict:
    """Speed, memory and losses of training with these flags, and the share of each class of kernels in their time."""
    cfg = parse(Config, flags(args, place.device.type))
    tokens = cfg.batch_size * cfg.block_size * cfg.gradient_accumulation_steps
    with training(cfg, VOCABULARY[place.device.type], 1024) as run:
        ranks, marks, made = run.ranks, [time.perf_counter()], []
        reset_peak_memory(ranks.device)
        for n in (WARM, *[LENGTH] * ROUNDS):
            made.append(run.steps(n))
            run.synchronize()
            marks.append(time.perf_counter())
        losses, norms = (itertools.chain(*each) for each in zip(*made, strict=True))
        with torch.device("meta"):
            flops = tokens * accounting.flops(Model(cfg), cfg.block_size) / cfg.block_size
        peak = ranks.sum(torch.tensor(peak_flops(ranks.device, ranks.dtype) or 0.0, device=ranks.device)).item()
        seconds = median((b - a) / LENGTH for a, b in itertools.pairwise(marks[1:]))
        figures = {
            "tokens/s": tokens / seconds, "ms per step": 1000 * seconds,
            "MFU": flops / seconds / peak if peak else None, "GiB": peak_memory_bytes(ranks.device) / 2**30,
            "GPUs": ranks.size, **run.graphs,
            "seconds of the first steps": marks[1] - marks[0], "dtype": cfg.dtype,
            "losses": [run.sharded.mean(loss) for loss in losses], "norms": [norm.item() for norm in norms],
        }  # fmt: skip
        try:
            with profile() as profiler:
                run.step()
                run.synchronize()
            figures |= kernel_shares(profiler, place.device.type == "cuda")
        except Exception as error:
            figures["failed"] = f"the profiler: {error}"  # the speed is known all the same
    parallel.leave()
    if ranks.size > 1:
        traffic = plan.estimate(replace(cfg, world_size=ranks.size)).traffic
        figures["planned GB sent by a rank"] = sum(each.bytes for each in traffic.values()) / 1e9
    return figures


def kernel_shares(profiler: profile, cuda: bool) -> dict[str, float]:
    """The share of each class of kernels on the GPU, or of operations on the CPU, in their time."""
    times = Counter()
    for each in profiler.key_averages():
        if (each.device_type == DeviceType.CUDA) == cuda and not each.is_user_annotation:
            kind = next(name for name, words in CLASSES.items() if re.search(words, each.key.lower()))
            times[kind] += each.self_device_time_total if cuda else each.self_cpu_time_total
    return {kind: time / times.total() for kind, time in times.items()}


def decode(batch: int, place: Place) -> dict:
    """The speed of greedy decoding."""
    cfg = parse(Config, flags(f"--vocab_size={VOCABULARY[place.device.type]}", place.device.type))
    return {f"decoding B={batch}, tokens/s": measure_decoding("124M", cfg, batch)["tokens_per_s"]}


def load(place: Place) -> dict:
    """Tokens per second that reach the device from a data set."""
    with tempfile.TemporaryDirectory() as folder:
        random_data(folder, 2**22, 50257)
        ours, theirs = measure_loader(folder, place.device)
    return {"loader, tokens/s": ours, "in nanoGPT's way": theirs}


def compare(place: Place) -> dict:
    """The speed of train.py here and in nanoGPT's folder, with the same flags on random tokens."""
    with tempfile.TemporaryDirectory() as data:
        random_data(data, 2**20, 50257)
        args = f"--dataset={data} --eval_iters=1 --eval_interval=100000 --max_iters=100000"
        limits = PARTS["against"].seconds / 2, TIMED_LINES
        ours, theirs = (
            measure(folder, flags(args, place.device.type), *limits) for folder in (ROOT, Path(place.against))
        )
    return {"ms per step": ours, "nanoGPT's ms per step": theirs, "times nanoGPT's speed": theirs / ours}


def layout(args: str, place: Place) -> dict:
    """The speed of several GPUs, and the differences of losses and gradient norms from those of one GPU, relative to
    these. The first losses are compared more strictly, because every step amplifies rounding."""
    found, one, wrong = speed(args, place), place.found.get("layout one GPU", {}), []
    if len(one.get("losses", [])) != len(found["losses"]):
        return found | {"failed": "losses: not compared, because the part `layout one GPU` has none"}
    limit = 1e-4 if found["dtype"] == "float32" else 1e-2
    for key, n, allowed in (("losses", 3, limit / 10), ("losses", None, limit), ("norms", None, 10 * limit)):
        a, b = (torch.tensor(each[key][:n], dtype=torch.float64) for each in (found, one))
        e = ((a - b).norm() / b.norm()).nan_to_num(1e99).item()
        label = f"the first {key}" if n else key
        found[f"error of {label}"] = e
        if e > allowed:
            wrong.append(f"{label}: off by {e:.1e} from one GPU's; {allowed:.0e} is allowed")
    return found | ({"failed": "; ".join(wrong)} if wrong else {})


# ---------------------------------------------------------------------------------------------------------------------
# The parts


class Part(NamedTuple):
    """Cases that one process computes."""

    title: str
    seconds: int  # at most, for the process
    cases: Callable[[torch.device], dict[str, Callable[[Place], dict]]]  # name -> a function that returns figures
    gpus: int = 1  # at least


def only(**cases: Callable[[Place], dict]) -> Callable:
    """The same cases on every device."""
    return lambda device: cases


ROWS = {f"124M, {name}": f"--block={name}" for name in BLOCK if name != "standard"}  # name -> flags beside GPT-2's
ROWS |= {"124M, joint pool": "--block=superblock --layer=c.own_slots", "124M, Muon": "--optimizer=muon"}
for size, batch in ((4096, "--batch_size=3"), (16384, "--batch_size=1 --gradient_accumulation_steps=4")):
    for kind, more in (("", ""), (", window", " --window=1024"), (", documents", " --doc_mask=True")):
        ROWS[f"124M, T={size}{kind}"] = f"--block_size={size} {batch}{more}"
ROWS["350M"] = "--n_layer=24 --n_head=16 --n_embd=1024 --batch_size=8"
ROWS["1.5B"] = "--n_layer=48 --n_head=25 --n_embd=1600 --batch_size=4"
LAYOUTS = {"one GPU": "", "ddp": "", "fsdp": "--parallel=fsdp", "tp": "--tp=2", "cp": "--cp=2", "pp": "--pp=2"}
LAYOUTS |= {"hsdp": "--parallel=fsdp --dp_replicate=2"}  # from here on four GPUs
LAYOUTS |= {f"fsdp+{name}": f"--parallel=fsdp --{name}=2" for name in ("tp", "cp", "pp")}
PARTS = {  # in this order; the first call of 8 minutes ends behind checkpoints
    "numbers": Part("attention, models, losses and optimizers against float64", 120, partial(checks, NUMBERS)),
    "124M": Part("GPT-2, T=1024, 60 sequences a step", 100, only(speed=partial(speed, ""))),
    "training": Part("20 steps of 48 runs, those of tests/golden.py, against the CPU", 90, partial(checks, RUNS)),
    "compiled": Part("20 compiled steps of every block against the CPU, uncompiled", 90, partial(checks, COMPILED)),
    "checkpoints": Part("resume digit for digit; from GPU to CPU and back", 80, only(checkpoints=checkpoints)),
    "against": Part("124 M parameters by nanoGPT's train.py and by ours", 240, only(speed=compare)),
    **{name: Part(f"`{args}`", 100, only(speed=partial(speed, args))) for name, args in ROWS.items()},
    "decoding and loading": Part(
        "1024 tokens by 124 M parameters; batches of 64 x 1024 tokens", 90,
        only(one=partial(decode, 1), eight=partial(decode, 8), many=partial(decode, 64), loader=load),
    ),
}  # fmt: skip
for number, (name, args) in enumerate(LAYOUTS.items()):
    of_all = partial(layout if number else speed, f"{args} --gradient_accumulation_steps=8")
    gpus = 1 if number == 0 else 2 if number < 6 else 4
    PARTS[f"layout {name}"] = Part(f"`{args}`" if args else "no flags", 120, only(speed=of_all), gpus)
