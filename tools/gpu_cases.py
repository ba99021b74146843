"""The parts of `tools.gpu` and their cases, which compare a device with the CPU or measure its speed.

    for name, compute in PARTS["training"].cases(device).items():
        figures = compute(Place(device))           # with "failed" if the device does not do what it should

On the device `cpu`, all shapes are tiny, and only some of the comparisons are left. Runs train on random tokens with
the parts of train.py; `checkpoints` and `compare` start train.py itself.
"""

import itertools
import math
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import profile

from configurator import Config, alternatives, hints, parse
from data.errors import require
from data.loader import document_starts
from engine import fp8, optim
from engine.decode import generate
from engine.device import peak_flops, peak_memory_bytes
from engine.metrics import read_metrics
from engine.parallel import ranks as parallel
from engine.plan import plan
from model import BLOCK, USED_WHEN, Model, ModelConfig, alibi_slopes
from ops import Mask, attention, boundaries
from tools.child import ROOT, Child, measure
from tools.speed import measure_decoding, measure_loader, random_data, training
from tools.trials import captured, flex_attention


class Place(NamedTuple):
    """Where a case is computed, and what is known there."""

    device: torch.device
    against: str = ""  # nanoGPT's folder
    compile: bool = True  # whether train.py compiles its runs
    found: dict[str, dict] = {}  # part -> its figures so far
    note: Callable[[dict], None] = lambda figures: None  # writes the figures of a case that goes on


# ---------------------------------------------------------------------------------------------------------------------
# Comparisons with the CPU


class Cases(NamedTuple):
    """Cases that are computed and compared in the same way."""

    cases: Callable[[], Iterable[dict]]
    compute: Callable[[dict, int, torch.device, torch.dtype], dict]  # float64 asks for the reference on the CPU
    limits: dict[str, float]  # dtype -> largest error
    size: int = 48  # tokens of a sequence; 24 on the CPU
    every: int = 1  # on the CPU, only each so many-th case runs


def grid(**axes: Iterable) -> list[dict]:
    """Every combination of the values of the axes."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """(error of a case, name of its worst tensor).

    The error of a tensor (an output, a gradient or an update) is the norm of the difference from the expected one,
    divided by its norm or by 1 % of the largest norm in the case, whichever is larger; or 1e99 if it is not finite. The
    error of a case is the largest of its tensors.
    """
    norms = {name: x.detach().norm().item() for name, x in expected.items()}
    errors = []
    for name, x in expected.items():
        e = (got[name].detach().cpu().double() - x.detach()).norm().item()
        errors.append((e / max(norms[name], 0.01 * max(norms.values())) if math.isfinite(e) else 1e99, name))
    return max(errors)


def judge(figures: dict, name: str, e: float, limit: float, what: str):
    """Add an error to the figures of a case. If it is above the limit, the case has failed."""
    figures[name] = e
    if e > limit:
        earlier = f"{figures['failed']}; " if "failed" in figures else ""
        figures["failed"] = f"{earlier}{what} off by {e:.1e}; {limit:.1e} is allowed"


def check(kind: Cases, case: dict, place: Place) -> dict:
    """The errors of a case by dtype, and what else was counted."""
    torch.set_float32_matmul_precision("highest")  # no TF32
    figures, size = {}, 24 if place.device.type == "cpu" else kind.size
    expected = kind.compute(case, size, torch.device("cpu"), torch.float64)
    for dtype, limit in kind.limits.items():
        got = kind.compute(case, size, place.device, getattr(torch, dtype))
        figures |= {name: x for name, x in got.items() if not isinstance(x, Tensor)}
        e, where = error(got, expected)
        judge(figures, dtype, e, limit, f"{where} in {dtype} is")
    return figures


class Part(NamedTuple):
    """Cases that one process computes."""

    title: str
    seconds: int  # at most, for the process
    kinds: dict[str, Cases | Callable[[Place], dict]]  # name -> comparisons, or a function that returns figures
    gpus: int = 1  # at least

    def cases(self, device: torch.device) -> dict[str, Callable[[Place], dict]]:
        """Name -> a function that returns figures: of a comparison by the names of its kind and of its values."""
        found = {}
        for name, kind in self.kinds.items():
            if isinstance(kind, Cases):
                for case in list(kind.cases())[:: kind.every if device.type == "cpu" else 1]:
                    values = ", ".join(f"{key}={value}" for key, value in case.items())
                    found[f"{name}: {values}"] = partial(check, kind, case)
            else:
                found[name] = kind
        return found


# ---------------------------------------------------------------------------------------------------------------------
# Attention, models, losses and optimizers against float64, forward and backward. The cases come from the model's tables
# and Literals, so a new entry is a new case.


def documents(B: int, T: int) -> Tensor:
    """(B, T) document numbers: four documents of at least one token, with other ends in each row."""
    return torch.cat((torch.arange(4).expand(B, -1), torch.randint(4, (B, T - 4))), dim=1).sort(dim=1).values


def attend(
    case: dict, S: int, device: torch.device, dtype: torch.dtype, compute: Callable | None = None
) -> dict[str, Tensor]:
    """The result of attention for S keys, and all its gradients. There are as many queries, a third, or one as in
    decoding."""
    torch.manual_seed(0)
    B, H, D, M, Hkv = 2, 4, 16, case["slots"], case["kv_heads"]
    T, E = {"all": S, "third": S // 3, "one": 1}[case["queries"]], D + 8 * (case["bias"] == "columns")
    shapes = [(B, H, T, E), (B, Hkv, S, E), (B, Hkv, S, E), *[(Hkv, M, E)] * (2 if M else 0)]
    leaves = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]
    weight, of_keys = torch.randn(B, H, T, E).to(device, dtype), documents(B, S).to(device)
    docs, starts = (of_keys[:, -T:], of_keys), document_starts({"docs": of_keys[:, -T:], "source_docs": of_keys})
    docs = (*docs, *map(boundaries, starts.values(), (T, S))) if case["docs"] else None
    slopes = alibi_slopes(H, device).to(dtype) if case["bias"] == "slopes" else None
    mask = Mask(case["causal"], S // 3 if case["window"] else 0, docs, slopes)
    y = (compute or attention)(*leaves[:3], D, mask, case["softcap"], slots=leaves[3:] or None)
    grads = torch.autograd.grad(y, leaves, weight.to(y), materialize_grads=True)
    return dict(zip(("y", "dq", "dk", "dv", "dslot_k", "dslot_v"), (y, *grads), strict=False))


LAYERS = (  # every choice of a reader; the grid of the tests has them too
    "c,p", "c.own_slots", "c.joint_slots,p", "p/2,c,p/2", "c/2+p/2,c/2+p/2", "c,s", "c+s/2;p", "c.gelu,p.sigmoid",
    "c.sigmoid+s.swiglu", "c.stream,p.softmax", "c.none,p.matrix", "s.gelu.none,c.gelu/2", "c,e.relu2/2+p/2",
)  # fmt: skip


def model_cases() -> Iterator[dict]:
    """Every block with each value of each Literal and bool flag that it uses, and with some numbers."""
    kinds = {name: alternatives(kind) for name, kind in hints(ModelConfig).items()}
    values = {name: kind for name, kind in kinds.items() if isinstance(kind[0], str)}
    values |= {name: (True, False) for name, kind in kinds.items() if bool in kind}
    values |= {"layer": LAYERS, "block": (), "n_group": (2,), "window": (5,), "attn_softcap": (2.0,)}
    values |= {"n_expert": (4,)}
    beside = {("attention", "gqa"): {"n_kv_head": 2}, ("doc_positions", True): {"doc_mask": True}}
    beside |= {(flag, value): {"n_expert": 4} for flag in ("router", "router_balance") for value in values[flag]}
    beside |= {("layer", layer): {"n_expert": 4} for layer in LAYERS if "e.relu2" in layer}
    settings = [{flag: value} | beside.get((flag, value), {}) for flag in values for value in values[flag]]
    for block, setting in itertools.product(BLOCK, [{}, *settings]):
        if block.startswith("simplified") and setting.get("attn_diff"):
            continue  # they are refused together
        flags = {"block": block} | setting
        cfg = ModelConfig(**flags)
        if all(USED_WHEN[flag][0](cfg) for flag in setting if flag in USED_WHEN):
            yield flags


def run_model(case: dict, T: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The loss and logits of two layers, the gradient of every parameter, and the logits of cached decoding."""
    torch.manual_seed(1)
    B, S, exact = 2, T // 2, dtype == torch.float64
    flags = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": T, "vocab_size": 61} | case
    model = Model(ModelConfig(**flags)).eval()
    V = model.cfg.vocab_size
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn_like(p)  # at the initial point, some gradients are zero
    idx, targets = torch.randint(V, (B, T)).to(device), torch.randint(-1, V, (B, T)).to(device)
    given = {"source": torch.randint(V, (B, S))} if model.encoder else {}
    if model.cfg.doc_mask:
        given |= {"docs": documents(B, T)} | ({"source_docs": documents(B, S)} if model.encoder else {})
        given |= document_starts(given)
    given = {name: x.to(device) for name, x in given.items()}
    model.to(device, torch.float64 if exact else torch.float32)
    results = {}
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        results["loss"], results["logits"] = model(idx, targets, **given), model(idx, **given)
        if model.cfg.objective != "masked":  # the text is fixed: with rounding, argmax could choose other tokens
            for name, way in {"cached decoding": generate, "captured decoding": captured}.items():
                logits, text = [], iter(idx.T[4:12])
                choose = partial(lambda found, text, x: found.append(x.clone()) or next(text), logits, text)
                list(way(model, idx[:, :4], 8, choose, given.get("source")))
                results[name] = torch.stack(logits)
    results["loss"].backward()
    return results | {f"gradient of {name}": p.grad for name, p in model.named_parameters()}


def run_optimizer(case: dict, T: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The sum of three updates of every parameter, for gradients that are given."""
    torch.manual_seed(2)
    cfg = Config(n_layer=1, n_head=4, n_embd=64, block_size=T, vocab_size=61, **case)
    model = Model(cfg, 0).to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optim.build(model, cfg, dtype=dtype)
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.randn(p.shape).to(p)
        optimizer.set_lr(0.01 * (step + 1))
        optimizer.step()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


def multiply(case: dict, T: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The result of a linear layer in float8, and its gradients; float64 asks for those of float64."""
    torch.manual_seed(3)
    N, (n_in, n_out) = 32 * T, case["sizes"]
    x, weight, grad = (torch.randn(shape).to(device, dtype) for shape in ((N, n_in), (n_out, n_in), (N, n_out)))
    leaves = [t.requires_grad_() for t in (x, weight)]
    y = x @ weight.T if dtype == torch.float64 else fp8.Product.apply(*leaves)
    return dict(zip(("y", "dx", "dw"), (y, *torch.autograd.grad(y, leaves, grad)), strict=True))


def attend_by_flex(case: dict, S: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """`attend` by FlexAttention; float64 asks for ops.attention."""
    torch._dynamo.reset()  # on CPUs, its graphs take no other sizes than the first
    return attend(case, S, device, dtype, None if dtype == torch.float64 else flex_attention)


MASKS = {
    "causal": (True, False), "window": (False, True), "docs": (False, True), "bias": ("none", "columns", "slopes"),
    "slots": (0, 6), "softcap": (0.0, 2.0), "kv_heads": (4, 2), "queries": ("all", "third", "one"),
}  # fmt: skip
LOSSES = {"logit_softcap": (0.0, 3.0), "loss_chunk": (0, 14), "vocab_size": (3001,)}
MLPS = ("gelu", "swiglu")  # a plain MLP, and a gated one, whose weight stores several logical matrices
OTHERS = sorted({*optim.OPTIMIZER} - {"adamw"})
# bfloat16 has 8 bits, and CPUs stay within 2.2 * 2^-8. If a derivative has a step, as ReLU's has, rounding moves some
# inputs across the step: an error e becomes about sqrt(e) in the gradient, 17 * 2^-8 on CPUs. Muon's iteration
# amplifies small singular values; on CPUs the error of its updates is 3 * 2^-8 in bfloat16.
FLOAT32, OF_BFLOAT16 = {"float32": 1e-4}, {"bfloat16": 8 * 2**-8}
NUMBERS = {
    "attention": Cases(partial(grid, **MASKS), attend, FLOAT32 | OF_BFLOAT16, 160, every=23),
    "models": Cases(model_cases, run_model, FLOAT32 | {"bfloat16": 32 * 2**-8}, every=23),
    "losses": Cases(partial(grid, **LOSSES), run_model, FLOAT32 | OF_BFLOAT16),
    "adamw": Cases(partial(grid, optimizer=["adamw"], mlp=MLPS, bias=[True]), run_optimizer, FLOAT32),
    "others": Cases(partial(grid, optimizer=OTHERS, mlp=MLPS, bias=[True]), run_optimizer, FLOAT32 | OF_BFLOAT16),
}
# Two factors with three bits of mantissa each; on CPUs the error is 3.7 %.
FLOAT8 = {"float8": Cases(partial(grid, sizes=[(64, 192), (768, 3072), (3072, 768)]), multiply, {"bfloat16": 0.06})}

ONE = {"window": (False,), "docs": (False,), "slots": (0,), "queries": ("all",), "bias": ("none", "slopes")}
FLEX = {"flex": Cases(partial(grid, **MASKS | ONE), attend_by_flex, OF_BFLOAT16, 160, every=5)}

# ---------------------------------------------------------------------------------------------------------------------
# Training and checkpoints

SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "batch_size": 4, "gradient_accumulation_steps": 2}
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
        torch.set_float32_matmul_precision("highest")  # no TF32, which `training` has allowed
        stepper = run.stepper  # with the usual first scale, 2^16, some first steps would be left out
        stepper.scaler = torch.amp.GradScaler(device.type, 2.0**10, enabled=stepper.scaler.is_enabled())
        _, losses, norms = run.steps(20)
    counts = run.graphs if cfg.compile else {}
    return {"losses": torch.stack(losses), "gradient norms": torch.stack(norms)} | counts


ROUNDED = {"float32": 1e-3}  # steps amplify differences: on CPUs, a change of all weights by 1e-6 becomes up to 2e-4
RUNS = {
    "runs": Cases(partial(grid, family=FAMILIES), train, ROUNDED, 16, every=13),
    # A norm at a place where the stream is small amplifies rounding: in bfloat16, one norm in 40 was off by 107 %.
    "float16": Cases(partial(grid, block=("standard", "superblock")), train, {"float16": 0.3}, 16),
}
COMPILED = {"compiled": Cases(partial(grid, block=BLOCK, compile=[True], loss_chunk=[32]), train, ROUNDED, every=5)}


def train_py(folder: str, runs: dict[str, str]):
    """Run train.py with these flags, all runs at the same time and without TF32, in folders of these names."""
    start = ["env", "NVIDIA_TF32_OVERRIDE=0", sys.executable, "train.py"]
    programs = [[*start, *args.split(), f"--out_dir={folder}/{name}"] for name, args in runs.items()]
    with ExitStack() as stack:
        for child in [stack.enter_context(Child(program, ROOT)) for program in programs]:
            child.lines.read()
            failure = child.failure()
            require(not failure, f"{' '.join(child.process.args[3:])}: {failure}")


def checkpoints(place: Place) -> dict:
    """Runs of 8 steps, compared with runs that stop after 4 and go on: on the device with --deterministic=True, digit
    for digit; from the CPU to the device, and back, within the errors of float32."""
    same = f"--device={place.device.type} --optimizer=muon --deterministic=True"
    cpu, there = (f"--dtype=float32 --compile=False --device={kind}" for kind in ("cpu", place.device.type))
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        random_data(folder, 4096, 257, 8)
        common = "".join(f"--{name}={value} " for name, value in SMALL.items()) + f"--dataset={folder} --block_size=16 "
        common += "--eval_iters=1 --eval_interval=4 --warmup_iters=1 --lr_decay_iters=8 --log_interval=1 --max_iters="
        runs = {"whole": f"8 {same}", "half": f"4 {same}", "cpu": f"8 {cpu}", "up": f"4 {cpu}", "down": f"4 {there}"}
        train_py(folder, {name: common + run for name, run in runs.items()})
        runs = {"half": same, "up": there, "down": cpu}
        train_py(folder, {name: f"{common}8 --init_from=resume {run}" for name, run in runs.items()})

        def read(name: str) -> dict[str, Tensor]:
            rows = [row for row, _ in read_metrics(Path(folder) / name / "metrics.jsonl") if "loss" in row]
            return {key: torch.tensor([row[key] for row in rows], dtype=torch.float64) for key in ("loss", "grad_norm")}

        for name, got, expected, limit in (
            ("resume", "half", "whole", 0.0), ("from CPU to GPU", "up", "cpu", 1e-4),
            ("from GPU to CPU", "down", "cpu", 1e-4),
        ):  # fmt: skip
            e, where = error(read(got), read(expected))
            judge(figures, name, e, limit, f"{name}: {where} is")
    return figures


# ---------------------------------------------------------------------------------------------------------------------
# Speed

GPT2 = "--n_layer=12 --n_head=12 --n_embd=768 --block_size=1024 --batch_size=12 --gradient_accumulation_steps=5 "
GPT2 += "--dtype=bfloat16 --compile=True"  # flags that nanoGPT has too
TINY = "--n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --batch_size=2 --dtype=float32 --compile=False"
VOCABULARY = {"cuda": 50257, "cpu": 257}
WARM, ROUNDS, LENGTH = 5, 3, 10  # steps before the timing; rounds of it, and steps of each round
TIMED_LINES = 8  # lines "iter N:", one per 10 steps, after which a run of train.py is ended
CLASSES = {  # of kernels, and on a CPU of operations: class -> pattern of their names, the first that matches
    "compiled kernels": "^triton", "attention by cuDNN": "cudnn.*(sdpa|fmha|flash)",
    "attention by FlashAttention": "flash", "other attention": "fmha|attention|sdpa", "communication": "nccl|gloo|c10d",
    "products": r"gemm|nvjet|xmma|cutlass|cublas|mm\b", "optimizer": "multi_tensor|adam|foreach",
    "copies": "memcpy|memset|copy", "other kernels": "",
}  # fmt: skip


def flags(args: str, device: str) -> list[str]:
    """Those of GPT-2 with 124 M parameters and `args`; on the CPU those of a tiny model."""
    return f"{GPT2} {args} {TINY if device == 'cpu' else ''} --device={device}".split()


def speed(args: str, place: Place, cudnn: bool = True, flash: bool = True, mode: str | None = None) -> dict:
    """Speed, memory and losses of training with these flags, and the share of each class of kernels in their time.
    cudnn and flash: whether cuDNN's attention and FlashAttention may be chosen. mode: that of torch.compile."""
    kind = place.device.type
    if mode and kind == "cuda":
        torch.compile = partial(torch.compile, mode=mode)  # in this process, which computes this part alone
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.backends.cuda.enable_flash_sdp(flash)
    cfg = parse(Config, flags(args, kind))
    with training(cfg, VOCABULARY[kind]) as run:
        ranks, rounds = run.ranks, [run.steps(WARM)]
        first = {"seconds of the first steps": WARM * rounds[0][0] / 1000}
        place.note(first)
        while len(rounds) <= ROUNDS:
            rounds.append(run.steps(LENGTH))
            ms = median(ms for ms, *_ in rounds[1:])
            tokens_per_s, mfu = run.rates(ms, peak_flops(ranks.device, ranks.dtype))
            memory = peak_memory_bytes(ranks.device) / 2**30
            figures = {"tokens/s": tokens_per_s, "ms per step": ms, "MFU": mfu, "GiB": memory, "GPUs": ranks.size}
            figures |= {**run.graphs, **first, "dtype": cfg.dtype}
            place.note(figures)
        _, losses, norms = zip(*rounds, strict=True)
        figures["losses"] = [run.sharded.mean(loss) for loss in itertools.chain(*losses)]
        figures["norms"] = [norm.item() for norm in itertools.chain(*norms)]
        place.note(figures)
        try:
            with profile() as profiler:
                run.steps(1)
            figures |= kernel_shares(profiler, kind == "cuda")
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


def layout(args: str, place: Place) -> dict:
    """The speed of several GPUs, and the differences of losses and gradient norms from those of one GPU, relative to
    these. The first losses are compared more strictly, because every step amplifies rounding."""
    found, one = speed(args, place), place.found.get("layout one GPU", {})
    if len(one.get("losses", [])) != len(found["losses"]):
        return found | {"failed": "losses: not compared, because the part `layout one GPU` has none"}
    limit = 1e-4 if found["dtype"] == "float32" else 1e-2
    for name, key, n, allowed in (
        ("the first losses", "losses", 3, limit / 10), ("losses", "losses", None, limit),
        ("norms", "norms", None, 10 * limit),
    ):  # fmt: skip
        got, expected = ({key: torch.tensor(each[key][:n], dtype=torch.float64)} for each in (found, one))
        judge(found, f"error of {name}", error(got, expected)[0], allowed, f"{name}:")
    return found


def decode(batch: int, place: Place) -> dict:
    """The speed of greedy decoding, and of the same by a captured step."""
    cfg = parse(Config, flags(f"--vocab_size={VOCABULARY[place.device.type]}", place.device.type))
    ways = {f"decoding B={batch}, tokens/s": generate, f"captured, B={batch}, tokens/s": captured}
    return {name: measure_decoding("124M", cfg, batch, way)["tokens_per_s"] for name, way in ways.items()}


def time_attention(softcap: float, place: Place) -> dict:
    """Forward and backward of attention with a softcap, or with slopes in both directions, in both ways."""
    cuda = place.device.type == "cuda"
    shape, figures = (3, 12, 4096, 64) if cuda else (1, 2, 64, 16), {}
    q, k, v = (torch.randn(shape, device=place.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = Mask(softcap > 0, slopes=None if softcap else alibi_slopes(shape[1], place.device))
    for name, compute in {"ms": attention, "ms by FlexAttention": flex_attention}.items():
        torch._dynamo.reset()
        for n in (WARM, LENGTH):
            start = time.perf_counter()
            for _ in range(n):
                compute(q, k, v, shape[-1], mask, softcap).sum().backward()
            getattr(torch, place.device.type).synchronize()
        figures[name] = 1000 * (time.perf_counter() - start) / LENGTH
    return figures


def load(place: Place) -> dict:
    """Tokens per second that reach the device from a data set."""
    with tempfile.TemporaryDirectory() as folder:
        random_data(folder, 2**22, 50257)
        ours, theirs = measure_loader(folder, place.device.type)
    return {"loader, tokens/s": ours, "in nanoGPT's way": theirs}


def compare(place: Place) -> dict:
    """The speed of train.py here and in nanoGPT's folder, with the same flags on random tokens."""
    with tempfile.TemporaryDirectory() as data:
        random_data(data, 2**20, 50257)
        args = f"--dataset={data} --eval_iters=1 --eval_interval=100000 --max_iters=100000"
        args = flags(args + " --compile=False" * (not place.compile), place.device.type)
        limits = PARTS["against"].seconds / 2, TIMED_LINES
        ours = measure(ROOT, args, *limits)
        place.note({"ms per step": ours})
        theirs = measure(Path(place.against), args, *limits)
    return {"ms per step": ours, "nanoGPT's ms per step": theirs, "times nanoGPT's speed": theirs / ours}


# ---------------------------------------------------------------------------------------------------------------------
# The parts


ROWS = {f"124M, {name}": f"--block={name}" for name in BLOCK if name != "standard"}  # name -> flags beside GPT-2's
ROWS |= {"124M, joint pool": "--block=superblock --layer=c.own_slots", "124M, Muon": "--optimizer=muon"}
ROWS |= {"124M, loss in one chunk": "--loss_chunk=12288", "124M, float8": "--fp8=True"}
for size, batch in ((4096, "--batch_size=3"), (16384, "--batch_size=1 --gradient_accumulation_steps=4")):
    for kind, more in (("", ""), (", window", " --window=1024"), (", documents", " --doc_mask=True")):
        ROWS[f"124M, T={size}{kind}"] = f"--block_size={size} {batch}{more}"
SMALLER = "--n_layer=6 --n_head=6 --n_embd=384 --block_size=256 --batch_size=64 --gradient_accumulation_steps=1"
ROWS |= {"small": SMALLER, "small, CUDA graphs": SMALLER}
MODES = {"small, CUDA graphs": "reduce-overhead"}  # of torch.compile
ROWS["350M"] = "--n_layer=24 --n_head=16 --n_embd=1024 --batch_size=8"
ROWS["1.5B"] = "--n_layer=48 --n_head=25 --n_embd=1600 --batch_size=4"
ROWS["1.5B, float8"] = ROWS["1.5B"] + " --fp8=True"
LAYOUTS = {"one GPU": "", "ddp": "", "fsdp": "--parallel=fsdp", "tp": "--tp=2", "cp": "--cp=2", "pp": "--pp=2"}
LAYOUTS |= {"hsdp": "--parallel=fsdp --dp_replicate=2"}  # from here on four GPUs
LAYOUTS |= {f"fsdp+{name}": f"--parallel=fsdp --{name}=2" for name in ("tp", "cp", "pp")}
PARTS = {  # in this order; the first call of 8 minutes ends behind compiled, or behind checkpoints if there is time
    "numbers": Part("attention, models, losses and optimizers against float64", 120, NUMBERS),
    "124M": Part("GPT-2, T=1024, 60 sequences a step", 100, {"speed": partial(speed, "")}),
    "training": Part("20 steps of 48 runs, those of tests/golden.py, against the CPU", 90, RUNS),
    "compiled": Part("20 compiled steps of every block against the CPU, uncompiled", 90, COMPILED),
    "checkpoints": Part("resume digit for digit; from GPU to CPU and back", 150, {"checkpoints": checkpoints}),
    "against": Part("124 M parameters by nanoGPT's train.py and by ours", 240, {"speed": compare}),
    "float8": Part("products in float8, forward and backward, against float64", 60, FLOAT8),
    "124M, no cuDNN": Part("attention without cuDNN's kernel", 100, {"speed": partial(speed, "", cudnn=False)}),
    **{n: Part(f"`{args}`", 100, {"speed": partial(speed, args, mode=MODES.get(n))}) for n, args in ROWS.items()},
    **{
        f"{name}, no flash": Part("without FlashAttention", 100, {"speed": partial(speed, ROWS[name], flash=False)})
        for name in ("124M, T=4096, window", "124M, T=4096, documents")
    },
    "FlexAttention": Part(
        "softcaps, and slopes in both directions, by FlexAttention: against float64, and the speed at T=4096", 120,
        FLEX | {"softcap": partial(time_attention, 2.0), "slopes": partial(time_attention, 0.0)},
    ),
    "decoding and loading": Part(
        "1024 tokens by 124 M parameters; batches of 64 x 1024 tokens", 90,
        {"one": partial(decode, 1), "eight": partial(decode, 8), "many": partial(decode, 64), "loader": load},
    ),
}  # fmt: skip
for number, (name, args) in enumerate(LAYOUTS.items()):
    of_all = partial(layout if number else speed, f"{args} --gradient_accumulation_steps=8")
    gpus = 1 if number == 0 else 2 if number < 6 else 4
    PARTS[f"layout {name}"] = Part(f"`{args}`" if args else "no flags", 120, {"speed": of_all}, gpus)
