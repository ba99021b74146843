"""The order of the data in epochs, on ranks and after resumes, compared with the oracle's."""

import os
import re
import struct
import time
from contextlib import closing
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.dataset import TokenStream, open_data
from data.loader import Loader, eval_batches, order
from data.objective import OBJECTIVE, Causal, Objective
from tests import oracle
from tests.data.preparing import error
from tests.helpers import shards_of, until


def stream_of(n_tokens: int, shard: int = 37) -> TokenStream:
    """A stream whose token i is i, so that a batch shows its position in the data."""
    files = np.split(np.arange(n_tokens, dtype="<u4"), range(shard, n_tokens, shard))
    return TokenStream("numbers", shards_of(*files), n_tokens)


def causal(block_size: int) -> Causal:
    return Causal(vocab_size=10**9, eot=None, block_size=block_size)


def corrupting(name: str) -> Objective:
    """An objective with random corruption, and documents that begin at token 100."""
    return OBJECTIVE[name](vocab_size=10**9, eot=100, block_size=8, doc_mask=True, corrupt_ratio=0.4, span_length=1.5)


def take_rows(loader: Loader, n: int) -> list[dict[str, list[int]]]:
    with closing(loader):
        return rows_of(next(loader) for _ in range(n))


def rows_of(batches) -> list[dict[str, list[int]]]:
    found = []
    for batch in batches:
        found += [{key: x[i].tolist() for key, x in batch.items()} for i in range(len(batch["idx"]))]
    return found


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 3))
def test_each_epoch_visits_each_window_once(n, seed, epoch):
    windows = order(np.arange(epoch * n, (epoch + 1) * n), n, seed)
    assert sorted(windows.tolist()) == list(range(n))


@pytest.mark.parametrize("last", [10, -1])
def test_an_id_outside_the_vocabulary_reaches_no_batch(last):
    """Though it is a target only. A file of Megatron may hold negative ones."""
    stream = TokenStream("numbers", shards_of(np.array([1, 2, 3, 4, last], dtype="<i4")), 10)
    with closing(Loader(stream, causal(4), 1)) as loader:
        assert "numbers has token id " in error(next, loader)
        assert list(loader) == []
        assert not loader._thread.is_alive()


def test_too_short_for_one_window():
    for make in Loader, lambda *args: next(eval_batches(*args)):
        for n in 1, 8:
            words = f"numbers has {n} tokens, too few for block_size=8; pass"
            assert words in error(make, stream_of(n), causal(8), 1)
    words = "1 of mixed has 8 tokens, too few for block_size=8; pass"
    assert error(Loader, mixture_of([20, 8], [1, 1]), causal(8), 1).startswith(words)


def mixture_of(sizes: list[int], weights: list[int]) -> TokenStream:
    """A stream of several sources: token i of all together is i, and source j has its number as name."""
    whole = stream_of(sum(sizes))
    sources = [(str(j), size, weight) for j, (size, weight) in enumerate(zip(sizes, weights, strict=True))]
    return TokenStream("mixed", whole.shards, whole.vocab_size, sources)


SOURCES = st.lists(st.tuples(st.integers(9, 150), st.integers(1, 9)), min_size=1, max_size=4)
SMALL = st.integers(1, 3)


def oracles(name: str, sources: list[tuple[int, int]], **flags) -> tuple[TokenStream, oracle.Data]:
    """The numbers of `mixture_of` these (tokens, weight), and what the oracle reads of them."""
    f = SimpleNamespace(block_size=8, objective=name, own_vocab=10**9, eot=100, doc_mask=True, **flags)
    f.corrupt_ratio = 0.4
    f.span_length = 1.5
    sizes, weights = map(list, zip(*sources, strict=True))
    ends = np.cumsum([0, *sizes]).tolist()
    splits = [dict.fromkeys(("train", "val"), [*range(a, b)]) for a, b in pairwise(ends)]
    folders = [oracle.Source(str(j), weight, splits[j]) for j, weight in enumerate(weights)]
    return mixture_of(sizes, weights), oracle.Data(f, folders)


class ShortPlans(Loader):
    PLANNED = 7  # samples, so that a test reaches their ends


@pytest.mark.parametrize("name", OBJECTIVE)
@given(SOURCES, SMALL, st.lists(SMALL, min_size=2, max_size=3), SMALL, st.integers(0, 10**12), st.integers(0, 2**31))
@settings(max_examples=10)
def test_ranks_and_resumes_change_nothing(name, sources, batch_size, micro_steps, data_size, start, seed):
    """From any sample on, each rank reads its slice of each step, in the oracle's order and with its corruption."""
    stream, data = oracles(name, sources, seed=seed)
    for rank in range(data_size):
        options = dict(data_rank=rank, data_size=data_size, seed=seed, start=start)
        loader = ShortPlans(stream, corrupting(name), batch_size, micro_steps, **options)
        assert loader.epochs(99) == data.epochs(99)
        first = start
        expected = []
        for share in (batch_size * n for n in micro_steps):
            expected += map(data.sample, range(first + rank * share, first + (rank + 1) * share))
            first += share * data_size
        assert take_rows(loader, sum(micro_steps)) == expected


@pytest.mark.parametrize("name", OBJECTIVE)
@given(SOURCES, st.integers(1, 5), st.integers(0, 12), st.integers(1, 5), st.integers(0, 2**31))
@settings(max_examples=20)
def test_evaluations_are_the_oracles(name, sources, batch_size, n_batches, data_size, seed):
    """For any number of ranks, which get equally many batches of one shape and stride."""
    stream, data = oracles(name, sources, seed=seed, batch_size=batch_size, eval_iters=n_batches)
    found = []
    counts = set()
    layouts = set()
    for rank in range(data_size):
        batches = list(eval_batches(stream, corrupting(name), batch_size, n_batches, rank, data_size, seed))
        found += rows_of(batches)
        counts.add(len(batches))
        layouts |= {str([(x.shape, x.stride(), x.storage_offset()) for x in batch.values()]) for batch in batches}
    assert len(counts) == len(layouts) == 1
    assert all(min(row["idx"]) >= 0 for row in found)
    found = [row for row in found if max(row["targets"]) >= 0]
    ordered = partial(sorted, key=itemgetter("idx", "targets"))
    assert ordered(found) == ordered(data.evaluation("val"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory from /proc, which Linux has")
def test_21_gigabytes_take_no_memory_and_no_reading_ahead(tmp_path):
    """A file that is sparse except for the first token of each window that the test reads, which are from all over."""
    size = 5 * 2**31
    T = 1024
    B = 64
    n = 40
    windows = order(np.arange(n * B), (size - 1) // T, 3)
    file = tmp_path / "train.bin"
    with open(file, "wb") as f:
        f.truncate(2 * size)
        for sample, window in enumerate(windows.tolist()):
            os.pwrite(f.fileno(), struct.pack("<H", sample + 1), 2 * window * T)
    stream = open_data(tmp_path, vocab_size=65536).split("train")
    assert len(stream) == size
    start = time.process_time()
    memory = []
    with closing(Loader(stream, causal(T), B, seed=3)) as loader:
        for i in range(n):
            batch = next(loader)["idx"]
            assert batch[:, 0].tolist() == list(range(i * B + 1, (i + 1) * B + 1))
            assert not batch[:, 1:].any()
            memory.append((resident("RssAnon"), resident("RssFile")))
    # The first batches allocate the memory that all later ones reuse. The pages of the later ones are 8,960 kB; a map
    # would load fifteen more pages with each.
    own, mapped = (after - before for before, after in zip(memory[4], memory[-1], strict=True))
    assert own < 64_000
    assert mapped < 4000
    assert time.process_time() - start < 5  # reading ahead takes tens of seconds
    file.unlink()  # at once, because some tools would write the holes out


def resident(kind: str) -> int:
    """kB of RssAnon, the process's own pages, or of RssFile, the pages of mapped files."""
    return int(re.search(rf"{kind}:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def test_idx_and_targets_are_views_of_one_buffer_that_stays():
    with closing(Loader(stream_of(1000), causal(16), 4)) as loader:
        held = [next(loader) for _ in range(20)]
    places = [[x.untyped_storage().data_ptr() for x in batch.values()] for batch in held]
    assert all(x == y for x, y in places)
    assert len({x for x, _ in places}) == 20


def test_works_ahead_but_not_far(monkeypatch):
    stream = stream_of(500)
    reads = []
    read = TokenStream.read
    monkeypatch.setattr(TokenStream, "read", lambda *args: reads.append(1) or read(*args))
    with closing(Loader(stream, causal(8), 1)) as loader:
        next(loader)
        until(lambda: len(reads) >= 1 + Loader.AHEAD)
        time.sleep(0.05)
        assert len(reads) == 1 + Loader.AHEAD
    loader.close()
    assert list(loader) == []
    assert not loader._thread.is_alive()
