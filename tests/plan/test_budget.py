"""The steps that a budget has, and the sizes that it suits, against closed forms, all depths, and published figures."""

import math
from functools import cache
from itertools import product

import pytest
import torch
from test_plan import config

from configurator import parse
from engine.config import Config
from engine.plan import budget, plan
from engine.plan.accounting import Work


def best_parameters(fit: tuple[float, ...], flops: float, of_token: float = 6.0) -> float:
    """Where the derivative of A / N^a + B / D^b is 0, for D = flops / (of_token N)."""
    A, a, B, b = fit
    return (a * A / (b * B)) ** (1 / (a + b)) * (flops / of_token) ** (b / (a + b))


@pytest.mark.parametrize("source, billions", [("2203.15556", 40), ("2404.10102", 70), ("2305.16264", 70)])
def test_chinchilla(source, billions):
    """For 5.76e23 FLOPs, arXiv:2203.15556 says 40 billion by approach 3, else 63 to 67, as arXiv:2404.10102."""
    [fit] = [fit for name, fit in budget.FITS.items() if source in name]
    assert best_parameters(fit, 5.76e23) / 1e9 == pytest.approx(billions, rel=0.04)


def test_the_best_size_of_all_depths():
    """A layer has 12 C^2 + 13 C parameters, C = 32 L, beside tables; attention adds FLOPs, which the optimum counts."""
    cfg = config(n_layer=2, block_size=64, vocab_size=256, bias=True)
    sized = cache(lambda n: budget.size(cfg, (64, 0), n))
    for flops, (A, a, B, b) in product((1e13, 1e16, 3e18), budget.FITS.values()):
        n_layer, losses = budget.best((A, a, B, b), flops, 2, sized), {}
        shape, read, per_token = sized(n_layer)
        for n in range(2, 3 * n_layer):
            C = 32 * n
            parameters = 12 * n * C**2 + 13 * n * C + (256 + 64 + 2) * C
            of_token = 6 * (12 * n * C**2 + 256 * C) + 12 * n * C * 64
            assert n != n_layer or (C, parameters, of_token) == (shape.n_embd, read, per_token)
            losses[n] = A / parameters**a + B / (flops / of_token) ** b
        least = min(losses, key=losses.get)
        assert abs(n_layer - least) <= least // 16
        expected = best_parameters((A, a, B, b), flops, per_token / read)
        assert abs(math.log(read / expected)) < 3 / n_layer + 0.05


@pytest.mark.parametrize("flags, n_layer, expected", [
    ({"attention": "gqa", "n_head": 8, "n_kv_head": 2}, 8, (128, 16, 4)),
    ({"attention": "gqa", "n_head": 8, "n_kv_head": 2}, 5, (64, 8, 2)),
    ({"attention": "mqa", "n_kv_head": 1}, 6, (96, 6, 0)),
    ({"block": "superblock", "layer": "c.relu/2+c/2,p"}, 5, (64, 4, 0)),
    ({"block": "superblock", "layer": "c/4,p;p"}, 2, (64, 4, 0)),
    ({"head_dim": 32, "n_kv_head": 4}, 1, (16, 1, 0)),
], ids=str)  # fmt: skip
def test_sizes_are_in_proportion(flags, n_layer, expected):
    """Parts and groups of heads stay whole."""
    cfg = config(**flags)
    shape, _, _ = budget.size(cfg, (32, 0), n_layer)
    assert (shape.n_layer, shape.n_embd, shape.n_head, shape.n_kv_head) == (n_layer, *expected)
    assert shape.head_size == cfg.head_size


def numbers(line: str) -> list[float]:
    return [float(word) for word in line.replace(",", "").replace("=", " ").split() if word[0].isdigit()]


def report(**flags) -> list[str]:
    cfg = config(**flags)
    return list(budget.report(cfg, (32, 0), Work(cfg, (32, 0), "cpu", torch.float32, None), 1024))


def test_the_report():
    """Of 6 FLOPs per weight and 12 T C per layer, by hand, on 1024 tokens a step. A ratio counts the experts read."""
    parameters = 4 * (12 * 64**2 + 2 * 64) + (512 + 32 + 1) * 64
    tokens = 1e13 / (6 * (4 * 12 * 64**2 + 512 * 64) + 4 * 12 * 32 * 64)
    for flags in ({"target_flops": 1e13}, {"target_ratio": tokens / parameters}):
        expected = [1e13, tokens / 1e9, tokens / parameters, math.ceil(tokens / 1024)]
        assert numbers(report(**flags)[0]) == pytest.approx(expected, rel=1e-3)
    of_experts = numbers(report(n_expert=8, target_ratio=10)[0])
    assert of_experts[1] == pytest.approx(1e-8 * (parameters + 4 * 8 * 64), rel=1e-3)  # and routers


def test_gpt2_is_best_for_twenty_tokens_per_parameter():
    """By each of the fits, on 20 * 0.124373760 billion tokens."""
    cfg = parse(Config, ["config/train_gpt2.py", "--vocab_size=50304", "--plan=True", "--target_ratio=20"])
    said = plan.report(plan.Plan(cfg)).splitlines()[-3:]
    best = ["12", "768", "124,373,760", "2.487"]
    assert [line.split()[-4:] for line in said] == [best] * len(budget.FITS)
