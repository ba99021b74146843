"""How many steps a budget of compute has for a model, and the sizes on which it would be spent best.

A fit of other people's runs is the loss of N parameters after D tokens: E + A / N^alpha + B / D^beta. N is what a token
reads, with embeddings as in these papers. FLOPs are counted by accounting.py, not as 6 N D. Other texts would have
other fits: the sizes show a region.
"""

from collections.abc import Callable
from copy import copy
from functools import cache, partial
from math import ceil, lcm
from typing import NamedTuple

from engine.plan.accounting import Work, flops, n_read, skeleton

FITS = {  # source -> A, alpha, B, beta
    "arXiv:2203.15556, approach 3": (406.4, 0.3392, 410.7, 0.2849),  # with the digits that arXiv:2404.10102 quotes
    "arXiv:2404.10102, its refit": (482.01, 0.3478, 2085.43, 0.3658),
    "arXiv:2305.16264, for C4": (521.0, 0.353, 1488.0, 0.353),
}


class Size(NamedTuple):
    n_layer: int
    n_embd: int
    parameters: int  # that a token reads
    flops: float  # of a token, forward and backward


def size(cfg, lengths: tuple[int, int], n_layer: int) -> Size:
    """The model with so many layers, and with heads and width in proportion."""
    grouped = cfg.attention == "gqa"
    heads = cfg.n_kv_head if grouped else cfg.n_head
    whole = lcm(*(reader.share.denominator for reader, _ in cfg.readers))  # readers take parts of them
    scaled = whole * max(1, round(heads * n_layer / (cfg.n_layer * whole)))
    shape = copy(cfg)
    shape.n_layer = n_layer
    shape.n_head = cfg.n_head * scaled // heads
    shape.n_kv_head = scaled if grouped else 0
    shape.n_embd = cfg.n_embd * scaled // heads
    model = skeleton(shape)
    return Size(n_layer, shape.n_embd, n_read(model), flops(model, *lengths) / cfg.block_size)


def best(fit: tuple[float, ...], budget: float, least: int, sized: Callable[[int], Size]) -> Size:
    """The size of the least loss after so many FLOPs, of depths from the least one; above 16, not all are tried."""
    a, alpha, b, beta = fit

    def loss(n_layer: int) -> float:
        model = sized(n_layer)
        return a / model.parameters**alpha + b / (budget / model.flops) ** beta

    n = least
    while loss(2 * n) < loss(n):
        n *= 2
    return sized(min(range(max(least, n // 2), 2 * n + 1, max(1, n // 16)), key=loss))


def report(cfg, lengths: tuple[int, int], work: Work, tokens_of_step: int) -> list[str]:
    """Lines for the plan of a run that has target_flops or target_ratio."""
    of_token = work.flops_per_sample / cfg.block_size
    tokens = cfg.target_flops / of_token or cfg.target_ratio * work.n_read
    lines = [
        f"\n{tokens * of_token:.4g} FLOPs: {tokens / 1e9:,.4g} billion tokens, {tokens / work.n_read:,.4g} for each "
        f"parameter that a token reads; set --max_iters={ceil(tokens / tokens_of_step)}",
        "  best size for them, by          n_layer  n_embd       parameters  billion tokens",
    ]
    sized = cache(partial(size, cfg, lengths))
    for source, fit in FITS.items():
        found = best(fit, tokens * of_token, max(2, len(cfg.strings)), sized)
        row = f"  {source:<30}{found.n_layer:>9}{found.n_embd:>8}{found.parameters:>17,}"
        lines.append(f"{row}{tokens * of_token / found.flops / 1e9:>16,.4g}")
    return lines
