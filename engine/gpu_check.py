"""What a device computes, against float64 on the CPU: attention, models and losses, forward and backward.

    python -m engine.gpu_check attention cuda        # or models, losses; or `machine`, which tells what there is

`bench.py --gpu` runs this. A line of JSON says which case begins, {"case": name}, and one how it ended: the same with
its errors, {"float32": e, "bfloat16": e}, or also with what is wrong, {"failed": text}. The error of a tensor, which is
an output or a gradient, is the norm of the difference over the tensor's norm, or over 1 % of the largest norm in the
case if that is more; that of a case is its worst tensor's. float32 runs without TF32. On the device `cpu` shapes are
tiny, and of attention and models only every 23rd case runs.

The cases walk the model's tables and Literals, so that a new entry is a new case.
"""

import itertools
import json
import math
import platform
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from model import BLOCK, USED_WHEN, Mask, Model, ModelConfig, alibi_slopes, mix

# The errors allowed. bfloat16 has 8 bits, and CPUs stay within 2.2 * 2^-8; but where a derivative has a step, as ReLU's
# has, rounding moves some of its inputs across, and an error e becomes one of about sqrt(e) in the gradient: 17 * 2^-8.
FLOAT32, BFLOAT16 = 1e-4, {"attention": 8 * 2**-8, "models": 32 * 2**-8, "losses": 8 * 2**-8}


def documents(B: int, T: int) -> Tensor:
    """(B, T) numbers of four documents of a token at least, which end elsewhere in each row."""
    return torch.cat((torch.arange(4).expand(B, -1), torch.randint(4, (B, T - 4))), dim=1).sort(dim=1).values


# ---------------------------------------------------------------------------------------------------------------------
# Cases: flags, and what is computed with them


def attention_cases() -> Iterator[dict]:
    """Every mask; all queries, the last third of them, or one as in decoding."""
    axes = {
        "causal": (True, False), "window": (False, True), "docs": (False, True), "bias": ("none", "columns", "slopes"),
        "slots": (0, 6), "softcap": (0.0, 2.0), "kv_heads": (4, 2), "queries": ("all", "third", "one"),
    }  # fmt: skip
    return (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))


def model_cases() -> Iterator[dict]:
    """Every block with each value of every Literal and switch that it uses, and with some numbers."""
    hints, seen = get_type_hints(ModelConfig), []
    values = {f.name: get_args(hints[f.name]) for f in fields(ModelConfig) if get_origin(hints[f.name]) is Literal}
    values |= {f.name: (True, False) for f in fields(ModelConfig) if hints[f.name] is bool}
    values |= {"block": (), "n_group": (2,), "window": (5,), "attn_softcap": (2.0,)}
    beside = {("attention", "gqa"): {"n_kv_head": 2}, ("doc_positions", True): {"doc_mask": True}}
    settings = [{flag: value} | beside.get((flag, value), {}) for flag in values for value in values[flag]]
    for block, setting in itertools.product(BLOCK, [{}, *settings]):
        flags = {"block": block} | setting
        cfg = ModelConfig(**flags)
        if all(USED_WHEN[flag][0](cfg) for flag in setting if flag in USED_WHEN) and flags not in seen:
            seen.append(flags)
            yield flags


def loss_cases() -> Iterator[dict]:
    """The loss whole, in chunks and in compiled ones, with and without a softcap."""
    for softcap, (chunk, compiled) in itertools.product((0.0, 3.0), ((0, False), (14, False), (16, True))):
        yield {"logit_softcap": softcap, "loss_chunk": chunk, "compiled": compiled, "vocab_size": 3001}


def attend(case: dict, S: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """What mix makes of S keys, and all its gradients."""
    torch.manual_seed(0)
    B, H, D, M, Hkv = 2, 4, 16, case["slots"], case["kv_heads"]
    T, E = {"all": S, "third": S // 3, "one": 1}[case["queries"]], D + 8 * (case["bias"] == "columns")
    shapes = [(B, H, T, E), (B, Hkv, S, E), (B, Hkv, S, E), *[(Hkv, M, E)] * (2 if M else 0)]
    leaves = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]
    weight, of_keys = torch.randn(B, H, T, E).to(device, dtype), documents(B, S).to(device)
    docs = (of_keys[:, -T:], of_keys) if case["docs"] else None
    slopes = alibi_slopes(H, device).to(dtype) if case["bias"] == "slopes" else None
    mask = Mask(case["causal"], S // 3 if case["window"] else 0, docs, slopes)
    y = mix(*leaves[:3], D, mask, case["softcap"], slots=leaves[3:] or None)
    grads = torch.autograd.grad(y, leaves, weight.to(y), materialize_grads=True)
    return dict(zip(("y", "dq", "dk", "dv", "dslot_k", "dslot_v"), (y, *grads), strict=False))


def run_model(case: dict, T: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The loss and logits of two layers, every parameter's gradient, and what cached decoding gives."""
    torch.manual_seed(1)
    B, S, exact = 2, T // 2, dtype == torch.float64
    flags = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": T, "vocab_size": 61} | case
    compiled = flags.pop("compiled", False)
    model = Model(ModelConfig(**flags)).eval()
    V = model.cfg.vocab_size
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn_like(p)  # off the initial point, where some gradients are zero
    idx, targets = torch.randint(V, (B, T)).to(device), torch.randint(-1, V, (B, T)).to(device)
    given = {"source": torch.randint(V, (B, S))} if model.encoder else {}
    if model.cfg.doc_mask:
        given |= {"docs": documents(B, T)} | ({"source_docs": documents(B, S)} if model.encoder else {})
    given = {name: x.to(device) for name, x in given.items()}
    model.to(device, torch.float64 if exact else torch.float32)
    if compiled and not exact:
        backend = "inductor" if device.type == "cuda" else "aot_eager"
        model.chunk_loss = torch.compile(model.chunk_loss, dynamic=False, backend=backend)
    found, logits, text = {}, [], iter(idx.T[4:12])
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        found["loss"], found["logits"] = model(idx, targets, **given), model(idx, **given)
        if model.cfg.objective != "masked":  # the text is given: rounding could choose another
            list(model.generate(idx[:, :4], 8, lambda x: logits.append(x) or next(text), given.get("source")))
            found["cached decoding"] = torch.stack(logits)
    found["loss"].backward()
    return found | {f"gradient of {name}": p.grad for name, p in model.named_parameters()}


PARTS = {"attention": (attention_cases, attend), "models": (model_cases, run_model), "losses": (loss_cases, run_model)}


# ---------------------------------------------------------------------------------------------------------------------
# Comparing


def error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The error of a case, 1e99 where something is not finite, and the name of its worst tensor."""
    norms = {name: x.detach().norm().item() for name, x in expected.items()}
    errors = []
    for name, x in expected.items():
        e = (got[name].detach().cpu().double() - x.detach()).norm().item()
        errors.append((e / max(norms[name], 0.01 * max(norms.values())) if math.isfinite(e) else 1e99, name))
    return max(errors)


def check(part: str, device: torch.device, size: int, every: int):
    """Prints the lines of a part: of its first case, and of each `every`-th after it. No failure ends the others."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    cases, compute = PARTS[part]
    for case in itertools.islice(cases(), 0, None, every):
        line = {"case": ", ".join(f"{name}={value}" for name, value in case.items())}
        print(json.dumps(line), flush=True)
        try:
            expected = compute(case, size, torch.device("cpu"), torch.float64)
            for dtype, limit in (("float32", FLOAT32), ("bfloat16", BFLOAT16[part])):
                line[dtype], where = error(compute(case, size, device, getattr(torch, dtype)), expected)
                if line[dtype] > limit:
                    line["failed"] = f"{where} in {dtype} is off by {line[dtype]:.1e}, and {limit:.1e} is allowed"
        except Exception as e:  # whatever a kernel raises
            line["failed"] = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
        print(json.dumps(line), flush=True)


def machine(device: torch.device) -> dict:
    """What the figures are measured on; "device" is null where there is no GPU."""
    facts = {"device": None, "torch": torch.__version__, "cuda": torch.version.cuda, "system": platform.platform()}
    if device.type == "cpu":
        facts["device"] = f"CPU ({platform.machine()})"
    elif torch.cuda.is_available():
        card = torch.cuda.get_device_properties(device)
        facts |= {"device": card.name, "memory_bytes": card.total_memory, "capability": f"{card.major}.{card.minor}"}
    return facts


if __name__ == "__main__":
    part, device = sys.argv[1], torch.device(sys.argv[2])
    size = 24 if device.type == "cpu" else 160 if part == "attention" else 48
    every = 23 if device.type == "cpu" and part != "losses" else 1
    print(json.dumps(machine(device))) if part == "machine" else check(part, device, size, every)
