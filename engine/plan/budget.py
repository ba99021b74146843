"""How many steps a budget of compute has for a model, and the sizes on which it would be spent best.

A fit is the loss of N parameters after D tokens: E + A / N^alpha + B / D^beta. N is what a token reads, embeddings too,
as in these papers; accounting.py counts FLOPs, not 6 N D. Other texts would have other fits: the sizes show a region.
"""

from collections.abc import Callable, Iterator
from copy import copy
from functools import cache, partial
from math import ceil, lcm

from engine.plan.accounting import Work, flops, n_read, skeleton
from model import ModelConfig

FITS = {  # source -> A, alpha, B, beta
    "arXiv:2203.15556, approach 3": (406.4, 0.3392, 410.7, 0.2849),  # with the digits that arXiv:2404.10102 quotes
    "arXiv:2404.10102, its refit": (482.01, 0.3478, 2085.43, 0.3658),
    "arXiv:2305.16264, for C4": (521.0, 0.353, 1488.0, 0.353),
}


def size(cfg, lengths: tuple[int, int], n_layer: int) -> tuple[ModelConfig, int, float]:
    """The flags with so many layers, and with heads and width in proportion; the parameters and FLOPs of a token."""
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
    return shape, n_read(model), flops(model, *lengths) / cfg.block_size


def best(fit: tuple[float, ...], budget: float, n: int, sized: Callable) -> int:
    """The depth of the least loss after so many FLOPs, climbing from depth n; above 32, not every depth is tried."""
    a, alpha, b, beta = fit

    def loss(n_layer: int) -> float:
        _, parameters, of_token = sized(n_layer)
        return a / parameters**alpha + b / (budget / of_token) ** beta

    while loss(n + max(1, n // 16)) < loss(n):
        n += max(1, n // 16)
    return n


def report(cfg, lengths: tuple[int, int], work: Work, step: int) -> Iterator[str]:
    """Lines for the plan of a run that has target_flops or target_ratio; `step` are the tokens of a step."""
    budget = cfg.target_flops or cfg.target_ratio * work.n_read * work.flops_per_token
    tokens = budget / work.flops_per_token
    head = f"\n{budget:.4g} FLOPs: {tokens / 1e9:,.4g} billion tokens, {tokens / work.n_read:,.4g} for each parameter"
    yield f"{head} that a token reads; set --max_iters={ceil(tokens / step)}"
    yield "  best size for them, by          n_layer  n_embd       parameters  billion tokens"
    sized = cache(partial(size, cfg, lengths))
    for source, fit in FITS.items():
        shape, parameters, of_token = sized(best(fit, budget, max(2, len(cfg.strings)), sized))
        yield f"  {source:<30}{shape.n_layer:>9}{shape.n_embd:>8}{parameters:>17,}{budget / of_token / 1e9:>16,.4g}"
