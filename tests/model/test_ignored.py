"""No flag of the model is silently ignored: beside every block, it changes the model or it is refused."""

from dataclasses import fields
from functools import cache
from typing import get_type_hints

import pytest
import torch

import model as M
from model import Model, ModelConfig
from tests.models import TINY, USUAL, changes, choices, grid, numbers

S = 11  # tokens of a source
KINDS = get_type_hints(ModelConfig)
NO_RESULT = {"loss_chunk"}  # that changes memory alone
# Values beside those of the grid
PROBES = {"n_kv_head": [1, 2], "n_encoder_layer": [1, 3], "window_pattern": ["LS"], "pos_pattern": ["N"]}


def others(name: str, row: dict) -> list:
    """Other values of a flag than in this row."""
    kind, now = KINDS[name], (USUAL | TINY | row)[name]
    values = choices(kind) or [*numbers({"block": "", "attention": ""} | row).get(name, []), *PROBES.get(name, [])]
    if kind in (int, float) and set(values) <= {now}:
        values = [2 * now or 3] if kind is int else [now / 2 or 0.5]
    return [value for value in values if value != now]


@cache
def model_of(row: tuple) -> Model:
    return Model(ModelConfig(**TINY | dict(row)), seed=1).double()


@cache
@torch.no_grad()
def computes(row: tuple, kind: str) -> list[torch.Tensor]:
    """The initial weights of a model; or, with other weights, its loss with dropout, or its logits, or in bfloat16."""
    model = model_of(row)
    if kind == "weights":
        return [p.clone() for p in model.parameters()]
    cfg = model.cfg
    T = cfg.block_size
    torch.manual_seed(2)
    for p, initial in zip(model.parameters(), computes(row, "weights"), strict=True):
        p.copy_(initial + 0.05 * torch.randn_like(initial))
    idx = torch.randint(cfg.vocab_size, (2, T))
    inputs = {"idx": idx}
    if model.encoder:
        inputs["source"] = torch.randint(cfg.vocab_size, (2, S))
    if cfg.doc_mask:
        inputs["docs"] = torch.arange(T).expand(2, T) // 5
    if cfg.doc_mask and model.encoder:
        inputs["source_docs"] = torch.arange(S).expand(2, S) // 5
    torch.manual_seed(3)
    if kind == "loss":
        return [model.train()(targets=idx, **inputs)]
    if kind == "logits":
        return [model.eval()(**inputs)]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.eval().float()(**inputs)
    model.double()
    return [logits]


def has_effect(row: dict, changed: dict) -> bool:
    for kind in ("weights", "logits", "loss", "bfloat16"):
        one = computes(tuple(row.items()), kind)
        other = computes(tuple(changed.items()), kind)
        if len(one) != len(other) or not all(map(torch.equal, one, other)):
            return True
    return False


def effect(row: dict, name: str) -> str:
    """What other values of a flag do in a row: something, nothing, or some are refused and the others do nothing."""
    values = others(name, row)
    n_refused = 0
    assert values, f"numbers of tests/models.py has no value of {name} to try"
    for value in values:
        changed = row | {name: value}
        try:
            model_of(tuple(changed.items()))
        except ValueError:
            n_refused += 1
            continue
        if has_effect(row, changed):
            return "something"
    return "refused" if n_refused else "nothing"


def ignored(rows: list[dict], names: set[str]) -> dict[str, str]:
    """{flag: what else is set} of the flags of which a row accepts every value, and none has an effect."""
    found = {}
    for name in sorted(names):
        for row in rows:
            seen = effect(row, name)
            if seen == "nothing":
                found[name] = changes(row)
            if seen != "refused":
                break
    return found


@pytest.mark.parametrize("block", [*M.BLOCK, "strings"])
def test_no_flag_is_ignored(block):
    """If this fails, refuse the flag where it has no effect, by a rule in its comment."""
    rows = [row for row in grid() if row["block"] == block or block == "strings" and row["block"] not in M.BLOCK]
    rows.sort(key=lambda row: ";" in row["block"])  # the plain ones first, in which all layers have the same readers
    assert not ignored(rows, {field.name for field in fields(ModelConfig)} - NO_RESULT)
