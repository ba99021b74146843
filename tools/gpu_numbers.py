"""Compares a device's attention, models, losses and optimizers with float64 on the CPU, forward and backward.

    for name, compute in checks(NUMBERS, device).items():
        figures = compute(Place(device))           # {"float32": error, ...}; with "failed" if one is too large

The error of a tensor (an output, a gradient or an update) is the norm of the difference from the reference, divided by
the tensor's norm or by 1 % of the largest norm in the case, whichever is larger. The error of a case is the largest of
its tensors. float32 runs without TF32. On the device `cpu`, shapes are tiny and only every 23rd case of attention and
models is left. The cases come from the model's tables and Literals, so a new entry is a new case.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from functools import partial
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from configurator import Config
from engine import optim
from engine.decode import generate
from model import BLOCK, USED_WHEN, Model, ModelConfig, alibi_slopes
from ops import Mask, attention


class Place(NamedTuple):
    """Where a case is computed, and what is known there."""

    device: torch.device
    against: str = ""  # nanoGPT's folder
    found: dict[str, dict] = {}  # part -> its figures so far


def documents(B: int, T: int) -> Tensor:
    """(B, T) document numbers: four documents of at least one token, with other ends in each row."""
    return torch.cat((torch.arange(4).expand(B, -1), torch.randint(4, (B, T - 4))), dim=1).sort(dim=1).values


def attention_cases() -> Iterator[dict]:
    """Every mask, with all queries, the last third of them, or one query as in decoding."""
    axes = {
        "causal": (True, False), "window": (False, True), "docs": (False, True), "bias": ("none", "columns", "slopes"),
        "slots": (0, 6), "softcap": (0.0, 2.0), "kv_heads": (4, 2), "queries": ("all", "third", "one"),
    }  # fmt: skip
    return (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))


LAYERS = (  # every choice of a reader; the grid of the tests has them too
    "c,p", "c.own_slots", "c.joint_slots,p", "p/2,c,p/2", "c/2+p/2,c/2+p/2", "c,s", "c+s/2;p", "c.gelu,p.sigmoid",
    "c.sigmoid+s.swiglu", "c.stream,p.softmax", "c.none,p.matrix", "s.gelu.none,c.gelu/2",
)  # fmt: skip


def model_cases() -> Iterator[dict]:
    """Every block with each value of each Literal and bool flag that it uses, and with some numbers."""
    hints, seen = get_type_hints(ModelConfig), []
    values = {f.name: get_args(hints[f.name]) for f in fields(ModelConfig) if get_origin(hints[f.name]) is Literal}
    values |= {f.name: (True, False) for f in fields(ModelConfig) if bool in (hints[f.name], *get_args(hints[f.name]))}
    values |= {"layer": LAYERS, "block": (), "n_group": (2,), "window": (5,), "attn_softcap": (2.0,)}
    beside = {("attention", "gqa"): {"n_kv_head": 2}, ("doc_positions", True): {"doc_mask": True}}
    settings = [{flag: value} | beside.get((flag, value), {}) for flag in values for value in values[flag]]
    for block, setting in itertools.product(BLOCK, [{}, *settings]):
        if block.startswith("simplified") and setting.get("attn_diff"):
            continue  # they are refused together
        flags = {"block": block} | setting
        cfg = ModelConfig(**flags)
        if all(USED_WHEN[flag][0](cfg) for flag in setting if flag in USED_WHEN) and flags not in seen:
            seen.append(flags)
            yield flags


def loss_cases() -> Iterator[dict]:
    """The loss at once and in chunks, with and without a softcap."""
    for softcap, chunk in itertools.product((0.0, 3.0), (0, 14)):
        yield {"logit_softcap": softcap, "loss_chunk": chunk, "vocab_size": 3001}


def attend(case: dict, S: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The result of attention for S keys, and all its gradients."""
    torch.manual_seed(0)
    B, H, D, M, Hkv = 2, 4, 16, case["slots"], case["kv_heads"]
    T, E = {"all": S, "third": S // 3, "one": 1}[case["queries"]], D + 8 * (case["bias"] == "columns")
    shapes = [(B, H, T, E), (B, Hkv, S, E), (B, Hkv, S, E), *[(Hkv, M, E)] * (2 if M else 0)]
    leaves = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]
    weight, of_keys = torch.randn(B, H, T, E).to(device, dtype), documents(B, S).to(device)
    docs = (of_keys[:, -T:], of_keys) if case["docs"] else None
    slopes = alibi_slopes(H, device).to(dtype) if case["bias"] == "slopes" else None
    mask = Mask(case["causal"], S // 3 if case["window"] else 0, docs, slopes)
    y = attention(*leaves[:3], D, mask, case["softcap"], slots=leaves[3:] or None)
    grads = torch.autograd.grad(y, leaves, weight.to(y), materialize_grads=True)
    return dict(zip(("y", "dq", "dk", "dv", "dslot_k", "dslot_v"), (y, *grads), strict=False))


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
    given = {name: x.to(device) for name, x in given.items()}
    model.to(device, torch.float64 if exact else torch.float32)
    results, logits, text = {}, [], iter(idx.T[4:12])
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        results["loss"], results["logits"] = model(idx, targets, **given), model(idx, **given)
        if model.cfg.objective != "masked":  # the text is fixed: with rounding, argmax could choose other tokens
            list(generate(model, idx[:, :4], 8, lambda x: logits.append(x) or next(text), given.get("source")))
            results["cached decoding"] = torch.stack(logits)
    results["loss"].backward()
    return results | {f"gradient of {name}": p.grad for name, p in model.named_parameters()}


def optimizer_cases(names: Collection[str]) -> Iterator[dict]:
    """Each optimizer on a plain MLP and on a gated one, whose weight stores several logical matrices."""
    return ({"optimizer": name, "mlp": mlp, "bias": True} for name in names for mlp in ("gelu", "swiglu"))


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


class Cases(NamedTuple):
    """Cases that are computed and compared in the same way."""

    cases: Callable[[], Iterator[dict]]
    compute: Callable[[dict, int, torch.device, torch.dtype], dict]  # float64 asks for the reference on the CPU
    limits: dict[str, float]  # dtype -> largest error
    size: int = 48  # tokens of a sequence; 24 on the CPU
    every: int = 1  # on the CPU, only each so many-th case runs


# bfloat16 has 8 bits, and CPUs stay within 2.2 * 2^-8. If a derivative has a step, as ReLU's has, rounding moves some
# inputs across the step: an error e becomes about sqrt(e) in the gradient, 17 * 2^-8 on CPUs. Muon's iteration
# amplifies small singular values; on CPUs the error of its updates is 3 * 2^-8 in bfloat16.
FLOAT32, OF_BFLOAT16 = {"float32": 1e-4}, {"bfloat16": 8 * 2**-8}
OTHERS = sorted({*optim.OPTIMIZER} - {"adamw"})
NUMBERS = {
    "attention": Cases(attention_cases, attend, FLOAT32 | OF_BFLOAT16, 160, 23),
    "models": Cases(model_cases, run_model, FLOAT32 | {"bfloat16": 32 * 2**-8}, every=23),
    "losses": Cases(loss_cases, run_model, FLOAT32 | OF_BFLOAT16),
    "adamw": Cases(partial(optimizer_cases, ["adamw"]), run_optimizer, FLOAT32),
    "others": Cases(partial(optimizer_cases, OTHERS), run_optimizer, FLOAT32 | OF_BFLOAT16),
}


def error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """(error of a case, name of its worst tensor); the error is 1e99 if a tensor is not finite."""
    norms = {name: x.detach().norm().item() for name, x in expected.items()}
    errors = []
    for name, x in expected.items():
        e = (got[name].detach().cpu().double() - x.detach()).norm().item()
        errors.append((e / max(norms[name], 0.01 * max(norms.values())) if math.isfinite(e) else 1e99, name))
    return max(errors)


def without_tf32():
    """Let matrix products in float32 use all bits of float32."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def check(kind: Cases, case: dict, place: Place) -> dict:
    """The errors of a case by dtype, and what else was counted."""
    without_tf32()
    device, line = place.device, {}
    size = 24 if device.type == "cpu" else kind.size
    expected = kind.compute(case, size, torch.device("cpu"), torch.float64)
    for dtype, limit in kind.limits.items():
        got = kind.compute(case, size, device, getattr(torch, dtype))
        line |= {name: x for name, x in got.items() if not isinstance(x, Tensor)}
        line[dtype], where = error(got, expected)
        if line[dtype] > limit:
            line["failed"] = f"{where} in {dtype} is off by {line[dtype]:.1e}; {limit:.1e} is allowed"
    return line


def checks(kinds: dict[str, Cases], device: torch.device) -> dict[str, Callable[[Place], dict]]:
    """The cases of these kinds, by the kind's name and the case's values."""
    return {
        f"{name}: {', '.join(f'{key}={value}' for key, value in case.items())}": partial(check, kind, case)
        for name, kind in kinds.items()
        for case in itertools.islice(kind.cases(), 0, None, kind.every if device.type == "cpu" else 1)
    }
