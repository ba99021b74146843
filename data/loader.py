"""Batches in an order that is a pure function of (seed, epoch, global sample index).

A split of N tokens is cut into n = (N - 1) // T windows of T inputs and one more target. Training samples are counted
0, 1, 2, ... without end; sample i reads the (i % n)-th window of epoch i // n, which is a permutation of its own. The
samples of step k are [kG, (k+1)G), of which rank r takes one contiguous slice. So the order does not depend on the
ranks, and the loader's whole state is one sample number. The same holds for what an objective draws at random, which
depends on the sample's number. B sequences per micro-batch, T block_size, G per step.

In a mixture every source is cut by itself, and has epochs and permutations of its own: its n-th sample is the one that
it has in a run alone. Which source sample i comes from repeats with a short period, so it needs no replay either, and
among any first i samples a source has less than one more or less than its share. Evaluation takes the windows of all
sources, one source after the other, whatever the weights.
"""

import threading
from collections.abc import Iterator
from queue import SimpleQueue

import numpy as np
import torch

from data.hashing import mix
from data.objective import Objective
from data.shards import TokenStream


def permute(index: np.ndarray, n: int, key: np.ndarray | int) -> np.ndarray:
    """A pseudo-random bijection of [0, n), a different one per `key`, without an array of size n.

    index: int64 in [0, n), any shape; key: uint64, for all or for each. Four Feistel rounds on the smallest even number
    of bits that holds n; results >= n go through again until they fall below (cycle walking, Black and Rogaway 2002).
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    key = np.broadcast_to(np.asarray(key, dtype=np.uint64), index.shape)
    rounds = [mix(key + np.uint64(i)) for i in range(4)]

    def feistel(x: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
        left, right = x >> half, x & mask
        for k in keys:
            left, right = right, left ^ (mix(right ^ k) & mask)
        return left << half | right

    x = feistel(index.astype(np.uint64), rounds)
    while (outside := x >= n).any():
        x[outside] = feistel(x[outside], [k[outside] for k in rounds])
    return x.astype(np.int64)


def count_windows(stream: TokenStream, block_size: int) -> int:
    """Windows of `block_size` inputs in `stream`. ValueError if a source has none."""
    return sum(source_windows(stream, block_size))


def source_windows(stream: TokenStream, block_size: int) -> list[int]:
    """`count_windows` of each source."""
    for name, tokens, _ in stream.sources:
        if tokens <= block_size:
            where = name if name == stream.name else f"{name} in {stream.name}"
            raise ValueError(
                f"{where} has {tokens} tokens, but block_size={block_size} needs at least {block_size + 1}; "
                f"pass --block_size={max(tokens - 1, 1)} or less, or prepare more data"
            )
    return [(tokens - 1) // block_size for _, tokens, _ in stream.sources]


def first_tokens(stream: TokenStream, block_size: int, windows: np.ndarray) -> np.ndarray:
    """int64 windows, counted through all sources -> where each begins in the stream."""
    counts, tokens = source_windows(stream, block_size), [tokens for _, tokens, _ in stream.sources]
    firsts, starts = np.cumsum([0, *counts[:-1]]), np.cumsum([0, *tokens[:-1]])
    source = np.searchsorted(firsts, windows, side="right") - 1
    return starts[source] + (windows - firsts[source]) * block_size


def turns(weights: list[int]) -> np.ndarray:
    """The sources that the first P = sum(weights) samples come from, int64 (P,); after P samples it starts over.

    The n-th sample of source j, from 0, is due at ceil(P (n + 1) / w_j) and not allowed until its share is above n; of
    those allowed the first due goes first, which keeps every count within one of its share (Tijdeman 1980, The chairman
    assignment problem). To take whichever is furthest behind would not: many rare sources then wait for too long.
    """
    period, counts, result = sum(weights), [0] * len(weights), []
    for i in range(period):
        allowed = [j for j, w in enumerate(weights) if w * (i + 1) > period * counts[j]]
        source = min(allowed, key=lambda j: -(-period * (counts[j] + 1) // weights[j]))
        counts[source] += 1
        result.append(source)
    return np.array(result)


def order(samples: np.ndarray, n: int, seed: int) -> np.ndarray:
    """int64 global sample indices, any shape -> the windows in [0, n) that they read."""
    stream_key = mix(np.array([seed % 2**64], dtype=np.uint64))
    return permute(samples % n, n, mix(stream_key + (samples // n).astype(np.uint64)))


def draws(numbers: np.ndarray, seed: int) -> np.ndarray:
    """int64 numbers of samples, any shape -> the uint64 keys of what is drawn at random for them."""
    stream_key = mix(np.array([seed % 2**64], dtype=np.uint64))
    return mix(mix(stream_key + np.uint64(2**63)) + numbers.astype(np.uint64))  # no epoch is 2^63, so not order's keys


def _batch(
    stream: TokenStream, objective: Objective, windows: np.ndarray, keys: np.ndarray, device: torch.device
) -> dict[str, torch.Tensor]:
    """The objective's batch of the given windows with these keys, in host memory that is pinned for a GPU.

    Always fresh buffers: what was handed out stays untouched for autograd, and PyTorch's pinned allocator does not
    reuse a block before the copies from it have ended. ValueError for an id outside the vocabulary, which on a GPU
    would end the run without a word about the data.
    """
    pinned = device.type == "cuda"
    buffer = torch.empty(len(windows), objective.block_size + 1, dtype=torch.int64, pin_memory=pinned)
    stream.read(first_tokens(stream, objective.block_size, windows), buffer.numpy())
    if (largest := int(buffer.numpy().view(np.uint64).max())) >= stream.vocab_size:  # a negative id is a large one
        raise ValueError(
            f"{stream.name} has token id {largest} where its vocabulary is {stream.vocab_size}, so a file was changed "
            "after it was prepared; pass --verify_data=True to learn which"
        )
    batch = objective(buffer, keys)
    return {name: tensor.pin_memory() for name, tensor in batch.items()} if pinned else batch


def _send(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The batch on `device`; `text` (B, n+1) becomes idx and targets, views of it that are not contiguous."""
    batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    if "text" in batch:
        text = batch.pop("text")
        batch |= {"idx": text[:, :-1], "targets": text[:, 1:]}
    return batch


class Loader:
    """Training batches from sample `start` on, without end: next(loader) is what Model.forward takes, by name.

    All are int64 on `device`. A step is `micro_steps` micro-batches of this rank, which is one of `world_size`
    data-parallel ranks. A thread reads and corrupts two batches ahead; an exception in it is raised by next(). Call
    close() at the end. ValueError if a source is shorter than one window.
    """

    AHEAD = 2  # batches
    PLANNED = 1024  # samples, or a batch if that is more

    def __init__(
        self,
        stream: TokenStream,
        objective: Objective,
        batch_size: int,
        micro_steps: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        device: str | torch.device = "cpu",
        start: int = 0,
    ):
        self.stream, self.objective, self.seed = stream, objective, seed
        self.batch_size, self.micro_steps, self.rank, self.world_size = batch_size, micro_steps, rank, world_size
        self.device = torch.device(device)
        self.counts = source_windows(stream, objective.block_size)
        self.n_windows = sum(self.counts)
        self.turns = turns([weight for *_, weight in stream.sources])
        self.closed = False
        self._ready = SimpleQueue()  # batches, or the exception that ended the thread
        self._wanted = threading.Semaphore(self.AHEAD)
        self._thread = threading.Thread(target=self._work, args=(start,), name="loader", daemon=True)
        self._thread.start()

    def windows(self, samples: np.ndarray) -> np.ndarray:
        """int64 global sample indices, any shape -> the windows that they read, counted through all sources."""
        period, first, result = len(self.turns), 0, np.empty_like(samples)
        for source, n in enumerate(self.counts):
            before = np.cumsum(self.turns == source)  # its samples among the first 1, 2, ..., period
            mine = self.turns[samples % period] == source
            own = samples[mine] // period * before[-1] + before[samples[mine] % period] - 1  # counted within the source
            result[mine] = first + order(own, n, self.seed)
            first += n
        return result

    def epochs(self, samples: int) -> dict[str, float]:
        """How often the first `samples` samples have gone through each source, by name."""
        rounds, rest = divmod(samples, len(self.turns))
        drawn = np.bincount(self.turns, minlength=len(self.counts)) * rounds
        drawn += np.bincount(self.turns[:rest], minlength=len(self.counts))
        return {name: int(d) / n for (name, *_), d, n in zip(self.stream.sources, drawn, self.counts, strict=True)}

    def _work(self, start: int) -> None:
        share = self.batch_size * self.micro_steps  # samples of this rank per step
        numbers = np.arange(-(-self.PLANNED // self.batch_size))  # `permute` costs by the call more than by the sample
        try:
            while True:
                step, micro_step = numbers // self.micro_steps, numbers % self.micro_steps
                starts = start + (step * self.world_size + self.rank) * share + micro_step * self.batch_size
                samples = starts[:, None] + np.arange(self.batch_size)
                for windows, keys in zip(self.windows(samples), draws(samples, self.seed), strict=True):
                    self._wanted.acquire()
                    if self.closed:
                        return
                    self._ready.put(_batch(self.stream, self.objective, windows, keys, self.device))
                numbers += len(numbers)
        except BaseException as e:  # whatever it is, next() must not wait for ever
            self._ready.put(e)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self.closed:
            raise StopIteration
        batch = self._ready.get()
        if isinstance(batch, BaseException):
            self.close()
            raise batch
        self._wanted.release()
        return _send(batch, self.device)

    def close(self) -> None:
        """End the thread; may be called twice."""
        self.closed = True
        self._wanted.release()
        self._thread.join()


def eval_batches(
    stream: TokenStream,
    objective: Objective,
    batch_size: int,
    n_batches: int = 0,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's share of a fixed evaluation set, as batches like the Loader's.

    The set is every window once (n_batches 0), or n_batches * batch_size windows drawn without replacement by `seed`,
    the same for every world_size; a window is always corrupted in the same way. Every rank gets the same number of
    batches of the same shape and strides; rows that only fill up have the targets -1. A batch may hold nothing else:
    add up losses and counts, and divide at the end.
    """
    n = count_windows(stream, objective.block_size)
    windows = np.arange(min(n, n_batches * batch_size) if n_batches else n)
    if n_batches:
        # -1 as epoch: training never gets there, so this order is none of its own.
        windows = order(windows - n, n, seed)
    device, round_size = torch.device(device), batch_size * world_size  # one batch on every rank
    for start in range(0, len(windows), round_size):
        rows = windows[start : start + round_size][rank * batch_size : (rank + 1) * batch_size]
        filled = np.concatenate([rows, np.zeros(batch_size - len(rows), dtype=np.int64)])
        batch = _send(_batch(stream, objective, filled, draws(filled, -1), device), device)  # no run has the seed -1
        batch["targets"] = batch["targets"].clone()  # idx may share its memory, and no -1 may get into that
        batch["targets"][len(rows) :] = -1
        yield batch
