"""Which layers the stages of a pipeline have. It imports no part of torch."""


def layers(n_layer: int, stage: int, n_stages: int) -> range:
    """The layers of a stage. The first has at least as many as any other."""
    first = -(-n_layer * stage // n_stages)
    end = -(-n_layer * (stage + 1) // n_stages)
    return range(first, end)
