"""Which layers the stages of a pipeline have. It imports no part of torch."""


def layers(n_layer: int, stage: int, n_stages: int) -> range:
    """The layers of a stage. The first has at least as many as any other."""
    first, end = (-(-n_layer * i // n_stages) for i in (stage, stage + 1))
    return range(first, end)
