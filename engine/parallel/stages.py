"""The stages of a pipeline: which layers they have, and whether a run can have so many. It imports no part of torch."""

from flags import refuse


def layers(n_layer: int, stage: int, n_stages: int) -> range:
    """The layers of a stage. The first has at least as many as any other."""
    first = -(-n_layer * stage // n_stages)
    end = -(-n_layer * (stage + 1) // n_stages)
    return range(first, end)


def check(cfg):
    """ValueError unless there is one stack of blocks, with a block for each stage."""
    if cfg.objective == "seq2seq":
        refuse(cfg, "pp objective", "a pipeline cuts one stack of blocks, and here are two; use tp")
    if cfg.n_layer < cfg.pp:
        refuse(cfg, "pp n_layer", "each stage needs a block; set pp lower")
