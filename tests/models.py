"""What tests of the model share: tiny models of random flags, inputs, decoding without a cache, naive attention."""

import math
import random
from dataclasses import fields
from functools import cache
from typing import Literal, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F

import ops
from configurator import try_flags
from engine.decode import generate
from flags import unused
from model import BLOCK, Model, ModelConfig
from tests.families import LAYERS

TINY = dict(n_layer=2, n_head=4, n_embd=32, block_size=13, vocab_size=29)
T = TINY["block_size"]  # of a text
S = 11  # of a source
# The second row ends in one that might be padding
DOCS = torch.tensor([[0] * 5 + [4] * 8, [0] * 8 + [1] * 2 + [2] * 3])
SOURCE_DOCS = torch.tensor([[0] * 3 + [4] * 8, [0] * 6 + [1] * 4 + [2]])


def choices(kind) -> list:
    """The values of a Literal, a bool, or a union of them; none of a number or a text."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [False, True] if kind is bool else [value for part in get_args(kind) for value in choices(part)]


USUAL = {field.name: field.default for field in fields(ModelConfig)}


def numbers(flags: dict) -> dict[str, list]:
    """The values of flags that are numbers or texts beside these other flags."""
    return {
        "block": [*BLOCK, *LAYERS],
        "head_dim": [0] if flags["block"].startswith("simplified") else [0, 6, 12],
        "n_kv_head": [2 if flags["attention"] == "gqa" else 0],
        "n_encoder_layer": [1],
        "window": [0, 3],
        "window_pattern": ["", "SL"],
        "attn_softcap": [0.0, 2.0],
        "conv": [0, 3],
        "logit_softcap": [0.0, 3.0],
        "embed_scale": [1.0, 3.0],
        "norm_eps": [1e-5, 1e-3],
        "n_slot": [0, 5],
        "n_expert": [0, 4],
        "n_expert_shared": [0, 1],
        "n_dense_layer": [0, 1],
        "rope_scaling": ["", "yarn:4"],
        "rope_theta_local": [1e4, 7.0],
        "pos_pattern": {"rope": ["", "LGN", "NG"], "alibi": ["", "NG"]}.get(flags["pos"], [""]),
        "loss_chunk": [0, 7],
    }


def draw(rng: random.Random, **given) -> dict:
    """Random values of the flags of the network that have an effect together, beside those that are given."""
    kinds = {name: choices(kind) for name, kind in get_type_hints(ModelConfig).items()}
    flags = {name: rng.choice(values) for name, values in kinds.items() if values}
    flags["block"] = rng.choice([*BLOCK, *LAYERS])
    flags |= {name: rng.choice(values) for name, values in numbers(flags).items()}
    flags |= given
    cfg = object.__new__(ModelConfig)
    while True:
        vars(cfg).update(USUAL | flags)
        idle = set(unused(cfg)) & flags.keys()
        if not idle:
            return flags
        flags = {name: value for name, value in flags.items() if name not in idle}


@cache
def grid() -> list[dict]:
    """Rows of flags in which every two values of two flags meet that any of many random rows has and is not refused."""
    rng = random.Random(0)
    pool = [draw(rng) for _ in range(300)]
    columns = {}  # of each value of a flag
    for row in pool:
        for value in row.items():
            columns.setdefault(value, len(columns))
    has = torch.zeros(len(pool), len(columns))
    for i, row in enumerate(pool):
        has[i, [columns[value] for value in row.items()]] = 1
    missing = has.T @ has > 0  # the pairs of values
    rows = []
    while missing.any():
        best = ((has @ missing.float()) * has).sum(1).argmax()
        try:
            try_flags(ModelConfig(**TINY | pool[best]))
        except ValueError:  # which the command line tells too
            has[best] = 0
            missing &= has.T @ has > 0
        else:
            rows.append(pool[best])
            missing[torch.outer(has[best], has[best]) > 0] = False
    return rows


def changes(row: dict) -> str:
    """The flags of a row that are not as usual, as its name."""
    return ",".join(f"{name}={value}" for name, value in row.items() if value != USUAL[name])


def build(dtype=torch.float64, **flags) -> Model:
    torch.manual_seed(1)
    return Model(ModelConfig(**TINY | flags)).to(dtype).eval()


def jitter(model: torch.nn.Module, spread: float = 0.05):
    """Off the initial point, where parts of a simplified block are the identity and their gradients are zero."""
    with torch.no_grad():
        for p in model.parameters():
            p += spread * torch.randn_like(p)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(TINY["vocab_size"], shape)


def beside(model: Model, docs: bool = True) -> dict[str, torch.Tensor]:
    """What the model takes besides two rows of T tokens."""
    torch.manual_seed(3)
    given = {"source": tokens(2, S)} if model.encoder else {}
    if docs:
        given |= {"docs": DOCS} | ({"source_docs": SOURCE_DOCS} if model.encoder else {})
    return given


def check_decoding(model, prompt, n, reference=None, **source):
    """Cached decoding of n tokens gives what the uncached model, or a reference, gives, beyond block_size as well."""
    uncached = reference or model
    steps = []
    new = list(generate(model, prompt, n, lambda logits: steps.append(logits) or logits.argmax(-1), **source))
    assert len(steps) == n
    text = torch.cat((prompt, torch.stack(new, dim=1)), dim=1)
    limit = model.cfg.block_size
    whole = uncached(text[:, :limit], **source)
    for length, step in enumerate(steps, prompt.size(1)):
        if length <= limit:
            expected = whole[:, length - 1]
        else:
            expected = uncached(text[:, length - limit : length], **source)[:, -1]
        assert torch.allclose(step, expected, atol=1e-9), f"cached decoding differs at length {length}"


def naive_attention(q, k, v, window=0, softcap=0.0, causal=True, docs=None, slots=None):
    """From the equations: q (B, H, T, D), k and v (B, Hkv, S, D), docs (B, T) and (B, S), slots (Hkv, M, D) each."""
    H, T, D = q.shape[1:]
    S = k.size(2)
    distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
    hidden = (distance.abs() >= (window or T + S)) | (causal & (distance < 0))
    if docs is not None:
        hidden = hidden | (docs[0][:, :, None] != docs[1][:, None, :])
    if slots is not None:  # which have no position and are always visible
        slot_k, slot_v = slots
        k = torch.cat((slot_k.expand(len(k), -1, -1, -1), k), dim=2)
        v = torch.cat((slot_v.expand(len(v), -1, -1, -1), v), dim=2)
        hidden = F.pad(hidden, (slot_k.size(1), 0))
    out = []
    for h in range(H):
        g = h * k.size(1) // H
        scores = torch.einsum("btd,bsd->bts", q[:, h], k[:, g]) / math.sqrt(D)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        out.append(torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1) @ v[:, g])
    return torch.stack(out, dim=1)


def leaves(*shapes: tuple[int, ...], dtype=torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def assert_same(got, expected, wanted, rtol=1e-10, atol=1e-10):
    """The same values, and the same gradients of what is wanted."""
    assert torch.allclose(got, expected, rtol, atol)
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad((got * weight).sum(), wanted)
    theirs = torch.autograd.grad((expected * weight).sum(), wanted)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol, atol)


def documents(length: int, seed: int = 0) -> torch.Tensor:
    """Numbers (2, length) of up to four documents, with gaps between the numbers."""
    torch.manual_seed(seed)
    n = min(4, length)
    return 3 * torch.cat((torch.arange(n).expand(2, -1), torch.randint(n, (2, length - n))), dim=1).sort().values


def spy_on_kernels(monkeypatch) -> list[str]:
    """The answers of attention_kernel to attention, from now on."""
    answers = []
    kernel = ops.attention_kernel
    monkeypatch.setattr(ops, "attention_kernel", lambda *args: answers.append(kernel(*args)) or answers[-1])
    return answers
