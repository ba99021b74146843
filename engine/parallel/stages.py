"""The stages of a pipeline: which layers they have, and whether a run can have so many. It imports no part of torch."""

import math


def layers(n_layer: int, stage: int, n_stages: int) -> range:
    """The layers of a stage. The first has at least as many as any other."""
    first = -(-n_layer * stage // n_stages)
    end = -(-n_layer * (stage + 1) // n_stages)
    return range(first, end)


def check(cfg, n_micro: int):
    """ValueError unless there is one stack of blocks, with a block for each stage, and a micro-batch for each."""
    n = cfg.pp
    if cfg.objective == "seq2seq":
        raise ValueError(f"pp={n} cuts one stack of blocks, and objective=seq2seq has two; use tp")
    if cfg.n_layer < n:
        raise ValueError(f"pp={n} stages need a block each, and n_layer={cfg.n_layer}; set pp lower")
    if n_micro < n:
        accumulation = cfg.gradient_accumulation_steps
        fact = f"gradient_accumulation_steps={accumulation} leaves {n_micro} to each pipeline"
        remedy = f"set it to {accumulation * n // math.gcd(n_micro, n)}"
        raise ValueError(f"pp={n} needs at least {n} micro-batches per step; {fact}; {remedy}")
