"""Batches in an order that is a pure function of (seed, epoch, global sample index).

A split of N tokens is cut into n = (N - 1) // T windows of T inputs and one more target. Training samples are counted
0, 1, 2, ... without end; sample i reads the (i % n)-th window of epoch i // n, which is a permutation of its own. The
samples of step k are [kG, (k+1)G), of which rank r takes one contiguous slice. So the order does not depend on the
ranks, and the loader's whole state is one sample number. B sequences per micro-batch, T block_size, G per step.
"""

import threading
from collections.abc import Iterator
from queue import SimpleQueue

import numpy as np
import torch

from data.shards import TokenStream


def permute(index: np.ndarray, n: int, key: np.ndarray | int) -> np.ndarray:
    """A pseudo-random bijection of [0, n), a different one per `key`, without an array of size n.

    index: int64 in [0, n), any shape; key: uint64, for all or for each. Four Feistel rounds on the smallest even number
    of bits that holds n; results >= n go through again until they fall below (cycle walking, Black and Rogaway 2002).
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    key = np.broadcast_to(np.asarray(key, dtype=np.uint64), index.shape)
    rounds = [_mix(key + np.uint64(i)) for i in range(4)]

    def feistel(x: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
        left, right = x >> half, x & mask
        for k in keys:
            left, right = right, left ^ (_mix(right ^ k) & mask)
        return left << half | right

    x = feistel(index.astype(np.uint64), rounds)
    while (outside := x >= n).any():
        x[outside] = feistel(x[outside], [k[outside] for k in rounds])
    return x.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, a bijection of uint64 that changes about half of the bits for each bit changed."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def count_windows(stream: TokenStream, block_size: int) -> int:
    """Windows of `block_size` inputs in `stream`. ValueError if there is none."""
    if len(stream) <= block_size:
        raise ValueError(
            f"{stream.name} has {len(stream)} tokens, but block_size={block_size} needs at least {block_size + 1}; "
            f"pass --block_size={max(len(stream) - 1, 1)} or less, or prepare more data"
        )
    return (len(stream) - 1) // block_size


def order(samples: np.ndarray, n: int, seed: int) -> np.ndarray:
    """int64 global sample indices, any shape -> the windows in [0, n) that they read."""
    stream_key = _mix(np.array([seed % 2**64], dtype=np.uint64))
    return permute(samples % n, n, _mix(stream_key + (samples // n).astype(np.uint64)))


def _batch(stream: TokenStream, windows: np.ndarray, block_size: int, device: torch.device) -> torch.Tensor:
    """(B, T+1) int64 of the given windows, in host memory.

    Always a fresh buffer: what was handed out stays untouched for autograd, and PyTorch's pinned allocator does not
    reuse a block before the copies from it have ended. ValueError for an id outside the vocabulary, which on a GPU
    would end the run without a word about the data.
    """
    buffer = torch.empty(len(windows), block_size + 1, dtype=torch.int64, pin_memory=device.type == "cuda")
    for row, window in zip(buffer.numpy(), windows.tolist(), strict=True):
        stream.read(window * block_size, row)
    if (largest := int(buffer.numpy().max())) >= stream.vocab_size:
        raise ValueError(
            f"{stream.name} has token id {largest} where its vocabulary is {stream.vocab_size}, so a file was changed "
            "after it was prepared; pass --verify_data=True to learn which"
        )
    return buffer


class Loader:
    """Training batches from sample `start` on, without end: next(loader) is (x, y), each (B, T) int64 on `device`.

    x and y are views of one (B, T+1) buffer, so neither is contiguous. A step is `micro_steps` micro-batches of this
    rank, which is one of `world_size` data-parallel ranks. A thread works two batches ahead; an exception in it is
    raised by next(). Call close() at the end. ValueError if the stream is shorter than one window.
    """

    AHEAD = 2  # batches
    PLANNED = 1024  # samples

    def __init__(
        self,
        stream: TokenStream,
        block_size: int,
        batch_size: int,
        micro_steps: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        device: str | torch.device = "cpu",
        start: int = 0,
    ):
        self.stream, self.block_size, self.seed = stream, block_size, seed
        self.batch_size, self.micro_steps, self.rank, self.world_size = batch_size, micro_steps, rank, world_size
        self.device = torch.device(device)
        self.n_windows = count_windows(stream, block_size)
        self.closed = False
        self._ready = SimpleQueue()  # buffers, or the exception that ended the thread
        self._wanted = threading.Semaphore(self.AHEAD)
        self._thread = threading.Thread(target=self._work, args=(start,), name="loader", daemon=True)
        self._thread.start()

    def windows(self, samples: np.ndarray) -> np.ndarray:
        """int64 global sample indices, any shape -> the windows that they read."""
        return order(samples, self.n_windows, self.seed)

    def _work(self, start: int) -> None:
        share = self.batch_size * self.micro_steps  # samples of this rank per step
        ahead = -(-self.PLANNED // share)  # steps planned at once: `permute` costs by the call more than by the sample
        try:
            while True:
                starts = start + (np.arange(ahead) * self.world_size + self.rank) * share
                samples = (starts[:, None] + np.arange(share)).reshape(-1, self.batch_size)
                for windows in self.windows(samples):
                    self._wanted.acquire()
                    if self.closed:
                        return
                    self._ready.put(_batch(self.stream, windows, self.block_size, self.device))
                start += ahead * self.world_size * share
        except BaseException as e:  # whatever it is, next() must not wait for ever
            self._ready.put(e)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.closed:
            raise StopIteration
        buffer = self._ready.get()
        if isinstance(buffer, BaseException):
            self.close()
            raise buffer
        self._wanted.release()
        buffer = buffer.to(self.device, non_blocking=True)
        return buffer[:, :-1], buffer[:, 1:]

    def close(self) -> None:
        """End the thread; may be called twice."""
        self.closed = True
        self._wanted.release()
        self._thread.join()


def eval_batches(
    stream: TokenStream,
    block_size: int,
    batch_size: int,
    n_batches: int = 0,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's share of a fixed evaluation set, as (x, y), each (B, T) int64 on `device`.

    The set is every window once (n_batches 0), or n_batches * batch_size windows drawn without replacement by `seed`,
    the same for every world_size. Every rank gets the same number of batches of the same shape and strides; rows that
    only fill up have the targets -1. A batch may hold nothing else: add up losses and counts, and divide at the end.
    """
    n = count_windows(stream, block_size)
    windows = np.arange(n)
    if n_batches:
        # -1 as epoch: training never gets there, so this order is none of its own.
        windows = order(windows[: n_batches * batch_size] - n, n, seed)
    device, round_size = torch.device(device), batch_size * world_size  # one batch on every rank
    for start in range(0, len(windows), round_size):
        rows = windows[start : start + round_size][rank * batch_size : (rank + 1) * batch_size]
        filled = np.concatenate([rows, np.zeros(batch_size - len(rows), dtype=np.int64)])
        buffer = _batch(stream, filled, block_size, device).to(device, non_blocking=True)
        targets = buffer
        if len(rows) < batch_size:
            targets = buffer.clone()  # x shares the buffer, and no -1 may get into x
            targets[len(rows) :] = -1
        yield buffer[:, :-1], targets[:, 1:]
