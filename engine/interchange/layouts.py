"""Hugging Face's layouts of weights <-> ours: the conversions that engine/interchange/families.py puts together.

A Conversion changes a tensor from their layout to ours, and back. A layer of ours that is made of several of theirs
starts with their rows, one below the other. x has rows first; a bias has only rows.

    H query heads   Hkv key/value heads   G = H / Hkv   D head size
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from model import ModelConfig


class Conversion(NamedTuple):
    """Changes the layout of a tensor: read(x, our flags, their config.json) -> ours, write(...) -> theirs."""

    read: Callable[[Tensor, ModelConfig, dict], Tensor]
    write: Callable[[Tensor, ModelConfig, dict], Tensor]


def split_heads(x: Tensor, cfg: ModelConfig) -> Tensor:
    """Rows of our qkv -> (Hkv, G + 2, D, ...): per key/value head its G queries, its key, its value."""
    return x.unflatten(0, (cfg.kv_heads, -1, cfg.head_size))


def group(x: Tensor, cfg: ModelConfig, config: dict) -> Tensor:
    """All rows of q, then of k, then of v -> our order."""
    heads = x.unflatten(0, (-1, cfg.head_size)).split((cfg.n_head, cfg.kv_heads, cfg.kv_heads))
    return torch.cat([each.unflatten(0, (cfg.kv_heads, -1)) for each in heads], dim=1).flatten(0, 2)


def ungroup(x: Tensor, cfg: ModelConfig, config: dict) -> Tensor:
    """Our order -> all rows of q, then of k, then of v."""
    parts = split_heads(x, cfg).split((cfg.n_head // cfg.kv_heads, 1, 1), dim=1)
    return torch.cat([part.flatten(0, 2) for part in parts])


def turned(cfg: ModelConfig) -> Tensor:
    """For each row of a head of ours, the number of their row. RoPE pairs row j with row n + j of their first 2 n rows,
    and with row D/2 + j of ours."""
    D, n = cfg.head_size, cfg.rope_pairs
    middle = n + D // 2
    ends = (0, n), (2 * n, middle), (n, 2 * n), (middle, D)
    return torch.cat([torch.arange(*each) for each in ends])


def turn(x: Tensor, cfg: ModelConfig, config: dict, order=turned) -> Tensor:
    """The rows of each query and key in this order; values stay as they are."""
    heads = split_heads(x, cfg)
    q_and_k = heads[:, :-1].index_select(2, order(cfg).to(x.device))
    return torch.cat((q_and_k, heads[:, -1:]), dim=1).flatten(0, 2)


def score_scale(cfg: ModelConfig, config: dict) -> float:
    """Their factor of the scores, over ours, which is 1 / sqrt(D)."""
    return (cfg.head_size / config["query_pre_attn_scalar"]) ** 0.5


def scale_queries(x: Tensor, cfg: ModelConfig, config: dict) -> Tensor:
    """The rows of the queries times score_scale."""
    heads = split_heads(x, cfg)
    return torch.cat((heads[:, :-2] * score_scale(cfg, config), heads[:, -2:]), dim=1).flatten(0, 2)


def unchanged(x: Tensor, cfg: ModelConfig, config: dict) -> Tensor:
    return x


TRANSPOSE = Conversion(lambda x, *_: x.t(), lambda x, *_: x.t())  # Conv1D of GPT-2; a bias stays as it is
GROUP = Conversion(group, ungroup)
TURN = Conversion(turn, partial(turn, order=lambda cfg: turned(cfg).argsort()))
UNITS = Conversion(  # all gates, then all values <-> pieces of gates and values in turn
    lambda x, cfg, _: x.unflatten(0, (2, -1, cfg.hidden_unit)).transpose(0, 1).flatten(0, 2),
    lambda x, cfg, _: x.unflatten(0, (-1, 2, cfg.hidden_unit)).transpose(0, 1).flatten(0, 2),
)
PLUS_ONE = Conversion(lambda x, *_: x + 1, lambda x, *_: x - 1)  # Gemma's norms multiply by 1 + w
# A file that we write has query_pre_attn_scalar = D, so nothing is scaled back.
SCALE_QUERIES = Conversion(scale_queries, unchanged)
SCALE = Conversion(lambda x, cfg, config: x * score_scale(cfg, config), unchanged)
