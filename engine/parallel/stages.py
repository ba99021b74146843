"""Which layers the stages of a pipeline have, and the order of their passes. It imports no part of torch."""

from collections.abc import Iterator


def layers(n_layer: int, rank: int, n_ranks: int, chunks: int = 1) -> list[range]:
    """The layers of each stage of a rank, the first stage first."""
    n = n_ranks * chunks
    ends = [-(-n_layer * i // n) for i in range(n + 1)]
    return [range(ends[i], ends[i + 1]) for i in range(rank, n, n_ranks)]


def passes(rank: int, n_ranks: int, chunks: int, n_micro: int) -> Iterator[tuple[int, bool]]:
    """The passes of a rank in a step in the schedules' order: (number of the stage among its own, whether forward)."""
    n = chunks * n_micro
    ahead = n_ranks - 1 - rank
    if chunks > 1:
        ahead = min(n, (chunks - 1) * n_ranks + 2 * ahead)
    for i in range(n + ahead):
        if i < n:
            yield i // n_ranks % chunks, True
        if i >= ahead:
            yield chunks - 1 - (i - ahead) // n_ranks % chunks, False
