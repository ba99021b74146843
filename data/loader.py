"""Batches in an order that is a pure function of (seed, global sample index).

A split of N tokens is cut into n = (N - 1) // T windows of T = block_size inputs and one more target. Sample i = 0, 1,
2, ... of a training reads window i % n of the permutation of epoch i // n, and is corrupted as i says. Step k takes the
samples [kG, (k+1)G), and each data-parallel rank a contiguous slice of them. So the order does not depend on the number
of ranks, and the loader's whole state is one sample index.

In a mixture each source is cut into windows separately and has its own epochs and permutations: its n-th sample is the
n-th sample of a run on this source alone. Among the first i samples, for any i, a source's count differs by less than
one from its weight's share of i.
Where a resume changes the mixture, this begins again at that sample, and each source goes on behind what was read.
Evaluation reads the windows of all sources, one source after another, and ignores the weights.

A window of pairs has whole pairs instead, and a length of its own (pairs.pack). All else is the same.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, repeat
from queue import SimpleQueue

import numpy as np
import torch

from data.dataset import TokenStream
from data.hashing import hash64
from data.objective import Objective
from data.pairs import PADDING


def permute(index: np.ndarray, n: int, key: np.ndarray | int) -> np.ndarray:
    """Applies a pseudo-random permutation of [0, n), a different one for each `key`, without an array of size n.

    index: int64 in [0, n), any shape; key: uint64, one for all or one for each index. Four Feistel rounds permute the
    smallest range [0, 4^b) that contains [0, n). A result of n or more is permuted again until it is below n (cycle
    walking, Black and Rogaway 2002).
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    key = np.broadcast_to(np.asarray(key, dtype=np.uint64), index.shape)
    rounds = [hash64(key + np.uint64(i)) for i in range(4)]

    def feistel(x: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
        left, right = x >> half, x & mask
        for k in keys:
            left, right = right, left ^ (hash64(right ^ k) & mask)
        return left << half | right

    x = feistel(index.astype(np.uint64), rounds)
    while (outside := x >= n).any():
        x[outside] = feistel(x[outside], [k[outside] for k in rounds])
    return x.astype(np.int64)


def windows_per_source(stream: TokenStream, block_size: int) -> list[int]:
    """The number of windows of `block_size` inputs in each source. ValueError if a source has none."""
    if stream.packs is not None:
        return [len(windows) for windows in stream.packs]
    for name, tokens, _ in stream.sources:
        if tokens <= block_size:
            place = name if name == stream.name else f"{name} of {stream.name}"
            fact = f"{place} has {tokens} tokens, too few for block_size={block_size}"
            raise ValueError(f"{fact}; pass a smaller --block_size, or prepare more data")
    return [(tokens - 1) // block_size for _, tokens, _ in stream.sources]


def window_bounds(stream: TokenStream, block_size: int, windows: np.ndarray) -> np.ndarray:
    """The first token of each window and the end of its last target: int64 (B,) windows, numbered through all sources
    -> positions in the stream, int64 (B, 2)."""
    if stream.ends is not None:
        return stream.ends[windows]
    counts = windows_per_source(stream, block_size)
    tokens = [tokens for _, tokens, _ in stream.sources]
    firsts = np.cumsum([0, *counts[:-1]])
    starts = np.cumsum([0, *tokens[:-1]])
    source = np.searchsorted(firsts, windows, side="right") - 1
    start = starts[source] + (windows - firsts[source]) * block_size
    return np.stack((start, start + block_size + 1), axis=1)


def blending_indices(weights: list[int]) -> np.ndarray:
    """The source of each of the first P = sum(weights) samples, int64 (P,). Later samples repeat this period.

    The n-th sample of source j (n from 0) has the deadline ceil(P (n + 1) / w_j), and is allowed at sample i only if
    w_j (i + 1) / P > n. The allowed source with the earliest deadline is next. So every source's count differs by less
    than one from its share (Tijdeman 1980, The chairman assignment problem).
    """
    period = sum(weights)
    counts = [0] * len(weights)
    result = []
    for i in range(period):
        allowed = [j for j, w in enumerate(weights) if w * (i + 1) > period * counts[j]]
        source = min(allowed, key=lambda j: -(-period * (counts[j] + 1) // weights[j]))
        counts[source] += 1
        result.append(source)
    return np.array(result)


def order(samples: np.ndarray, n: int, seed: int) -> np.ndarray:
    """The shuffled order: int64 global sample indices, any shape -> the windows in [0, n) that these samples read."""
    stream_key = hash64(np.array([seed % 2**64], dtype=np.uint64))
    return permute(samples % n, n, hash64(stream_key + (samples // n).astype(np.uint64)))


def corruption_keys(samples: np.ndarray, seed: int) -> np.ndarray:
    """The random keys of an objective: int64 sample indices, any shape -> uint64, one for each sample."""
    stream_key = hash64(np.array([seed % 2**64], dtype=np.uint64))
    # The summand 2^63 keeps these keys apart from those of `order`, which adds an epoch, always below 2^63.
    return hash64(hash64(stream_key + np.uint64(2**63)) + samples.astype(np.uint64))


def _batch(
    stream: TokenStream, objective: Objective, windows: np.ndarray, keys: np.ndarray, device: torch.device
) -> dict[str, torch.Tensor]:
    """Reads the windows and applies the objective with the keys. The batch is in host memory, pinned for a GPU, in new
    buffers, because autograd may still use the last one. (PyTorch's pinned allocator reuses a block only after all
    copies from it have ended.) ValueError for an id outside the vocabulary."""
    buffer = torch.zeros(len(windows), objective.window, dtype=torch.int64)
    bounds = window_bounds(stream, objective.block_size, windows)
    read_windows(stream, bounds, buffer.numpy())
    if stream.packs is not None:
        keys = np.full(buffer.shape, PADDING)  # of pairs, the objective reads their marks
        read_windows(stream.mask, bounds, keys)
    largest = int(buffer.numpy().view(np.uint64).max())  # negative ids become large ones
    if largest >= stream.vocab_size:
        fact = f"{stream.name} has token id {largest}, and its vocabulary is {stream.vocab_size}"
        raise ValueError(f"{fact}; find a changed file with --verify_data=True, or set vocab_size in meta.json")
    batch = objective(buffer, keys)
    if device.type == "cuda":
        batch |= document_starts(batch)
        # Contiguous, because the host would wait for the copy of a strided tensor
        return {name: tensor.contiguous().pin_memory() for name, tensor in batch.items()}
    return batch


def document_starts(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """doc_starts (B, n), and source_doc_starts, of the batch's docs: the first token of documents 0 ... n - 1 of a row,
    or the row's length for those that it does not have. CUDA's attention reads them. n, which the host must know, is a
    power of two, so that few shapes occur, each of which costs a compilation."""
    docs = {name: x.contiguous() for name, x in batch.items() if name in ("docs", "source_docs")}
    n = 1 << max((int(x.max()).bit_length() for x in docs.values()), default=0)
    first = {name: torch.arange(n).expand(len(x), n).contiguous() for name, x in docs.items()}
    return {name.replace("docs", "doc_starts"): torch.searchsorted(x, first[name]) for name, x in docs.items()}


def read_windows(stream: TokenStream, bounds: np.ndarray, out: np.ndarray):
    """Fills the beginning of row i of `out`, int64 (B, N), with the tokens from bounds[i, 0] up to bounds[i, 1]."""
    for (start, end), row in zip(bounds.tolist(), out, strict=True):
        row[: end - start] = stream.read(start, end)


def _send(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


class Loader(Iterator):
    """Yields training batches without end, from sample `start` on: dicts of Model.forward's arguments, by name.

    A step is `micro_steps` micro-batches on each of `data_size` data-parallel ranks, of which this is `data_rank`. If
    micro_steps are several numbers, they are those of the steps from `start` on. The weights of the mixture hold since
    sample `since`, and `read` counts the samples of each source before `start`; None counts them by these weights. A
    thread prepares the next two batches, and next() raises its exceptions. Call close() at the end.
    """

    AHEAD = 2  # batches prepared before they are asked for
    PLANNED = 1024  # samples whose order is computed at once, or one batch if that is larger

    def __init__(
        self, stream: TokenStream, objective: Objective, batch_size: int, micro_steps: int | Iterable[int] = 1,
        data_rank: int = 0, data_size: int = 1, seed: int = 0, device: str | torch.device = "cpu", start: int = 0,
        since: int = 0, read: Sequence[int] = (),
    ):  # fmt: skip
        self.stream = stream
        self.objective = objective
        self.seed = seed
        self.batch_size = batch_size
        self.micro_steps = repeat(micro_steps) if isinstance(micro_steps, int) else micro_steps
        self.data_rank = data_rank
        self.data_size = data_size
        self.device = torch.device(device)
        self.counts = windows_per_source(stream, objective.block_size)
        self.n_windows = sum(self.counts)
        self.blend = blending_indices([weight for *_, weight in stream.sources])
        self.since = since
        self.before = np.zeros(len(self.counts), np.int64)  # samples of each source that were read before `since`
        if read:
            self.before = np.array(read) - self.samples_by_source(start)
        self.closed = False
        self._ready = SimpleQueue()  # batches, or the exception that ended the thread
        self._wanted = threading.Semaphore(self.AHEAD)
        self._thread = threading.Thread(target=self._work, args=(start,), name="loader", daemon=True)
        self._thread.start()

    def windows(self, samples: np.ndarray) -> np.ndarray:
        """int64 global sample indices, any shape -> the windows of these samples, numbered through all sources."""
        at = samples - self.since
        rounds, place = np.divmod(at, len(self.blend))  # complete periods before a sample, and its place in one
        first = 0
        result = np.empty_like(samples)
        for source, n in enumerate(self.counts):
            count = np.cumsum(self.blend == source)  # samples of this source in the first 1, 2, ... of a period
            mine = self.blend[place] == source
            own = rounds[mine] * count[-1] + count[place[mine]] - 1  # index within the source
            result[mine] = first + order(self.before[source] + own, n, self.seed)
            first += n
        return result

    def samples_by_source(self, samples: int) -> np.ndarray:
        """The number of samples of each source among the first `samples`, which are not before `since`."""
        rounds, rest = divmod(samples - self.since, len(self.blend))
        drawn = rounds * np.bincount(self.blend, minlength=len(self.counts))
        drawn += np.bincount(self.blend[:rest], minlength=len(self.counts))
        return self.before + drawn

    def epochs(self, samples: int) -> dict[str, float]:
        """The epochs of each source, by name, after the first `samples` samples."""
        read = self.samples_by_source(samples).tolist()
        return {name: d / n for (name, *_), d, n in zip(self.stream.sources, read, self.counts, strict=True)}

    def _starts(self, start: int) -> Iterator[int]:
        """Yields the first sample of each of this rank's batches; `start` is the next step's first, of all ranks."""
        for micro_steps in self.micro_steps:
            share = self.batch_size * micro_steps  # the samples of this step that this rank reads
            first = start + self.data_rank * share
            yield from range(first, first + share, self.batch_size)
            start += self.data_size * share

    def _work(self, start: int):
        starts = self._starts(start)
        try:
            # Many batches are planned at once, because a call of `permute` costs more than its samples.
            while planned := list(islice(starts, -(-self.PLANNED // self.batch_size))):
                samples = np.array(planned)[:, None] + np.arange(self.batch_size)
                for windows, keys in zip(self.windows(samples), corruption_keys(samples, self.seed), strict=True):
                    self._wanted.acquire()
                    if self.closed:
                        return
                    self._ready.put(_batch(self.stream, self.objective, windows, keys, self.device))
        except BaseException as e:  # of any kind, since next() would otherwise wait forever
            self._ready.put(e)

    def __next__(self) -> dict[str, torch.Tensor]:
        if self.closed:
            raise StopIteration
        batch = self._ready.get()
        if isinstance(batch, BaseException):
            self.close()
            raise batch
        self._wanted.release()
        return _send(batch, self.device)

    def close(self):
        """Ends the thread. A second call does nothing."""
        self.closed = True
        self._wanted.release()
        self._thread.join()


def eval_batches(
    stream: TokenStream, objective: Objective, batch_size: int, n_batches: int = 0, data_rank: int = 0,
    data_size: int = 1, seed: int = 0, device: str | torch.device = "cpu",
) -> Iterator[dict[str, torch.Tensor]]:  # fmt: skip
    """Yields this rank's part of a fixed evaluation set, in batches like the Loader's.

    If n_batches is 0, the set holds every window once, else n_batches * batch_size different windows that `seed` draws,
    or all if there are fewer. A window is always corrupted in the same way. All ranks get equally many batches of one
    shape and stride, so the last ones may hold rows of padding, whose targets are -1: add up losses and numbers of
    targets over all batches, then divide.
    """
    n = sum(windows_per_source(stream, objective.block_size))
    if n_batches:
        # The windows of epoch -1, which training never reaches, so that the two orders differ.
        windows = order(np.arange(min(n, n_batches * batch_size)) - n, n, seed)
    else:
        windows = np.arange(n)
    device = torch.device(device)
    round_size = batch_size * data_size  # one batch on every rank
    for start in range(0, len(windows), round_size):
        rows = windows[start + data_rank * batch_size :][:batch_size]
        filled = np.pad(rows, (0, batch_size - len(rows)))
        keys = corruption_keys(filled, -1)  # a run's seed is never -1
        batch = _send(_batch(stream, objective, filled, keys, device), device)
        batch["targets"] = batch["targets"].clone()  # idx may share its memory, and must not get the -1
        batch["targets"][len(rows) :] = -1
        yield batch
