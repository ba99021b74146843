"""Networks of random flags against tests/naive.py: logits, loss, gradients of all parameters, and decoding."""

import random
import re

import pytest
import torch

from model import Model, ModelConfig
from tests.models import TINY, USUAL, T, beside, changes, check_decoding, draw, jitter, tokens
from tests.naive import Naive, knows

SAS = {  # of config/sas_18l_768.py
    "block": "simplified",
    "norm": "rmsnorm_eps_outside",
    "last_norm": "layernorm",
    "norm_bias": True,
    "qkv_bias": True,
    "mlp": "relu",
}
PAIRS = [  # flags that were wrong together, or may be
    {"qk_norm": True, "block": "c.own_slots,p", "pos": "rope"},
    {"qk_norm": True, "block": "c.joint_slots,p", "pos": "rope", "attention": "gqa", "n_kv_head": 2},
    {"n_expert": 4, "n_expert_shared": 1, "block": "c,e.relu2"},
    {"n_expert": 4, "n_expert_shared": 2, "block": "c,e.swiglu/2", "n_embd": 64},
    {"n_slot": 0, "block": "c,s/2"},
    {"n_slot": 0, "block": "c,s/2", "mlp": "swiglu", "attention": "gqa", "n_kv_head": 2},
    {"n_slot": 0, "block": "c,s.relu2/2+s.geglu", "mlp_ratio": 1.5},
    {"value_embedding": True, "block": "p;c,p;c", "n_layer": 5},
    {"value_embedding": True, "block": "p;c;p", "n_layer": 6, "attention": "mqa"},
    {"block": "simplified", "doc_mask": True, "pos": "alibi", "attention": "gqa", "n_kv_head": 2},
    {"block": "simplified_parallel", "n_expert": 4, "objective": "seq2seq", "norm_placement": "none"},
    {"pos": "rope", "rope_scaling": "yarn:8:100000", "pos_pattern": "LG", "head_dim": 12},
    {"pos": "rope", "rope_scaling": "yarn:8:200:30:0.5", "head_dim": 24},
    {"block": "3c/4+p/2,c/4+p/2", "n_embd": 64, "mlp": "swiglu"},
    {"n_expert": 4, "n_expert_active": 4, "n_dense_layer": 1, "objective": "seq2seq", "n_encoder_layer": 2},
    SAS,
    SAS | {"block": "simplified_parallel", "sas_value_proj": "all"},
    {"conv": 3, "doc_mask": True, "block": "c+p", "norm_placement": "post", "norm": "rmsnorm_eps_outside"},
]
SIZES = [
    {},
    {"n_layer": 1, "n_embd": 64},  # in which a gated map has pieces of 64 units
    {"n_layer": 3, "n_embd": 48, "n_head": 6},  # no power of two
]
OTHERS = {  # values beside those that `draw` knows
    "n_expert_active": [1, 2, 3, 4],
    "n_expert_shared": [0, 1, 2],
    "window_pattern": ["", "SL", "LS"],
    "mlp_ratio": [4.0, 1.5],
    "conv": [0, 2, T + 3],
    "loss_chunk": [0, 1, 7, 26],
    "rope_scaling": ["", "linear:3", "llama3:4:0.5:2:20", "yarn:4", "yarn:2:9:4:0.5", "yarn:8:100000"],
}
READERS = {
    "c": ["", "", ".none", ".stream", ".relu", ".gelu", ".sigmoid", ".own_slots", ".joint_slots", "/2"],
    "p": ["", ".swiglu", ".relu2", ".softmax", ".matrix", ".heads.matrix", "/2"],
    "s": ["", ".none", ".stream", ".sigmoid", ".geglu", "/2"],
    "m": ["", ".none", ".stream", ".relu", ".sigmoid", "/2"],
    "e": ["", ".swiglu", ".relu2", ".sigmoid", "/2"],
}


def any_string(rng: random.Random) -> str:
    """A string of --block with any readers, of which one at least is a c."""
    sums = []
    for _ in range(rng.randint(1, 3)):
        letters = rng.choices("cpsme", k=rng.randint(1, 2))
        sums.append("+".join(letter + rng.choice(READERS[letter]) for letter in letters))
    sums.insert(rng.randint(0, len(sums)), "c" + rng.choice(READERS["c"]))
    return ",".join(sums)


def any_network(rng: random.Random) -> tuple[dict, Model, Naive]:
    """Random flags that a model does not refuse, the model and its reference."""
    while True:
        given = {name: rng.choice(values) for name, values in OTHERS.items()}
        if rng.random() < 0.5:
            given["block"] = any_string(rng)
            if re.search(r"\be\b", given["block"]):
                given["n_expert"] = 4
            if re.search(r"\bm\b", given["block"]):
                given["objective"] = "seq2seq"
        flags = draw(rng, **given, **rng.choice(SIZES))
        if not knows({name: value for name, value in flags.items() if value != USUAL[name]}):
            continue
        try:
            return flags, *model_and_reference(flags)
        except ValueError:
            continue


def model_and_reference(flags: dict) -> tuple[Model, Naive]:
    """A model in float64, with weights off the initial ones, and its reference."""
    model = Model(ModelConfig(**TINY | flags), seed=1).double().eval()
    torch.manual_seed(1)
    jitter(model, 0.1)
    return model, Naive(vars(model.cfg), dict(model.named_parameters()))


def differences(model: Model, reference: Naive) -> list[str]:
    """What a model computes otherwise than the reference: logits, loss, and gradients."""
    cfg = model.cfg
    given = beside(model, docs=cfg.doc_mask)
    if cfg.block_size > T and cfg.doc_mask:
        given["docs"] = given["docs"].repeat_interleave(cfg.block_size // T + 1, dim=1)[:, : cfg.block_size]
    idx = tokens(2, cfg.block_size)
    targets = tokens(2, cfg.block_size)
    targets[0, 3:6] = -1
    parameters = dict(model.named_parameters())
    expected_logits = reference.logits(idx, **given)
    pairs = {
        "logits": (model(idx, **given), expected_logits),
        "loss": (model(idx, targets, **given), reference.loss(expected_logits, targets)),
    }
    of_model, of_reference = (torch.autograd.grad(loss, list(parameters.values())) for loss in pairs["loss"])
    pairs |= dict(zip(parameters, zip(of_model, of_reference, strict=True), strict=True))
    wrong = []
    for name, (found, expected) in pairs.items():
        error = (found - expected).abs().max().item()
        if not error < 1e-9 * max(1, expected.abs().max().item()):
            wrong.append(f"{name} by {error:.1e}")
    return wrong


def plainest(flags: dict) -> dict:
    """The flags without those that do not matter to the difference."""
    for name in sorted(flags):
        fewer = {other: value for other, value in flags.items() if other != name}
        try:
            if differences(*model_and_reference(fewer)):
                flags = fewer
        except (ValueError, AssertionError):
            pass
    return flags


def check(flags: dict, model: Model, reference: Naive):
    wrong = differences(model, reference)
    assert not wrong, f"with {changes(plainest(flags))}: {', '.join(wrong[:4])}"


@pytest.mark.parametrize("flags", PAIRS, ids=changes)
def test_two_flags_together(flags):
    check(flags, *model_and_reference(flags))


@pytest.mark.parametrize("flags", [
    {"block": "c.joint_slots", "n_slot": 5, "pos": "alibi", "window": 200, "attn_softcap": 1.5},
    {"block": "c.joint_slots", "n_slot": 5, "pos": "alibi", "attention": "gqa", "n_kv_head": 2, "block_size": 600},
    {"block": "c.sigmoid+c.gelu", "doc_mask": True, "attention": "mqa"},
    {"block": "c.relu2,s", "objective": "masked", "window": 3, "doc_mask": True},
    {"block": "simplified", "window": 270, "doc_mask": True},
    {"block": "c.own_slots,m", "objective": "seq2seq", "doc_mask": True, "doc_positions": True, "pos": "sinusoidal"},
], ids=changes)  # fmt: skip
def test_a_text_of_several_strips(flags):
    """Longer than the strips of 128 and 256 queries, and than 256 positions, where ALiBi's columns carry over."""
    flags = {"block_size": 300, "n_layer": 1} | flags
    check(flags, *model_and_reference(flags))


@pytest.mark.parametrize("seed", range(40))
def test_any_flags(seed):
    """Five networks."""
    rng = random.Random(seed)
    for _ in range(5):
        check(*any_network(rng))


@pytest.mark.parametrize("seed", range(8))
def test_decoding_of_any_flags(seed):
    """With a cache, and beyond block_size, against the reference without one."""
    rng = random.Random(100 + seed)
    checked = 0
    while checked < 3:
        _, model, reference = any_network(rng)
        if model.cfg.objective == "masked":
            continue
        source = beside(model, docs=False)
        with torch.no_grad():
            check_decoding(model, tokens(2, rng.choice([9, T, 3 * T])), 6, reference.logits, **source)
        checked += 1
