"""Training objectives: one class for each, which turns windows of text into batches of inputs and targets.

    objective = OBJECTIVE["masked"](vocab_size=257, eot=256, block_size=1024)
    batch = objective(window, keys)          # window (B, T+1) int64, keys (B,) uint64 -> {name: tensor}
    objective = objective_of(cfg, vocab_size=257, eot=256)       # of a run
    batch = PAIRS["causal"](...)(window, marks)                  # of pairs: both (B, n) int64, see pairs.py

A batch holds arguments of Model.forward, by name: idx and targets; docs with doc_mask; source and source_docs for
seq2seq. Where the targets are idx shifted by one token, both are views of one tensor.

The corruption of a window is a pure function of its key, so a resume needs no saved state. The document number of a
token is the count of end-of-text tokens up to and including it: end-of-text begins the document that follows.

    B windows of a batch   T block_size   V the data's own vocabulary   m tokens to restore   k spans of them
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.dataset import FIRST, TARGET, TokenStream
from data.errors import require
from data.hashing import hash64
from data.pairs import PADDING, pack


def random_uint64(keys: np.ndarray, n: int) -> np.ndarray:
    """Random uint64 (B, n) from keys (B,). The numbers of a row are all different."""
    return hash64(keys[:, None] + np.arange(n, dtype=np.uint64))


def smallest_of_row(x: np.ndarray, n: int) -> np.ndarray:
    """A mask of the n smallest numbers in each row of x. The numbers of a row must differ."""
    return x <= np.partition(x, n - 1)[:, n - 1 : n] if n else np.zeros(x.shape, dtype=bool)


def random_segmentation(x: np.ndarray, k: int) -> np.ndarray:
    """Splits n items into k segments: positive lengths (B, k) of sum n, uniformly random, from uint64 x (B, n - 1)."""
    rows, n = len(x), x.shape[1] + 1
    cuts = np.nonzero(smallest_of_row(x, k - 1))[1].reshape(rows, k - 1) + 1
    return np.diff(cuts, prepend=0, append=n)


@dataclass
class Objective:
    """Base of all objectives. ValueError names a flag that does not fit."""

    vocab_size: int  # V
    eot: int | None  # id of end-of-text; None becomes -1, which is no token
    block_size: int  # T
    doc_mask: bool = False  # adds document numbers to the batches
    corrupt_ratio: float = 0.15  # m / T
    span_length: float = 3.0  # m / k
    extra_ids = 0  # ids from V on that the objective needs
    equal_targets = False  # whether all windows have equally many targets, so that a step need not count them

    def __post_init__(self):
        if self.doc_mask and self.eot is None:
            raise ValueError("doc_mask=True needs data with an end-of-text id; set it to False, or use tokenizer byte")
        if self.eot is None:
            self.eot = -1
        self.m = max(1, round(self.corrupt_ratio * self.block_size))
        self.window = self.block_size + 1  # the number of tokens of a window
        self.lengths = self.block_size, 0  # the numbers of tokens of idx and of source per sequence

    def __call__(self, window: Tensor, keys: np.ndarray) -> dict[str, Tensor]:
        """Makes a batch: window (B, T+1) int64 and keys (B,) uint64 -> {name: int64 tensor}, all in host memory."""
        raise NotImplementedError

    def documents(self, text: np.ndarray) -> np.ndarray:
        """The document number of each token, (B, T)."""
        return np.cumsum(text == self.eot, axis=1)


class Causal(Objective):
    """Predicts every token from the tokens before it."""

    equal_targets = True

    def __call__(self, window: Tensor, keys: np.ndarray) -> dict[str, Tensor]:
        batch = {"idx": window[:, :-1], "targets": window[:, 1:]}
        if self.doc_mask:
            batch["docs"] = torch.from_numpy(self.documents(window.numpy()[:, :-1]))
        return batch


class Masked(Objective):
    """Predicts m random tokens of a window from all its tokens (BERT, arXiv:1810.04805). In idx 80 % of the chosen
    tokens become the mask V, 10 % a random id, and 10 % stay. End-of-text is never chosen. A window with fewer than m
    other tokens has all of these as targets."""

    extra_ids = 1

    def __call__(self, window: Tensor, keys: np.ndarray) -> dict[str, Tensor]:
        text = window.numpy()[:, :-1]
        V = self.vocab_size
        x = random_uint64(keys, self.block_size)
        largest = np.uint64(2**64 - 1)
        x[text == self.eot] = largest
        chosen = smallest_of_row(x, self.m) & (x < largest)
        random = hash64(x[chosen])  # the high 32 bits choose the case, the low 32 bits an id below V
        uniform = random >> np.uint64(32)
        any_id = random % np.uint64(2**32) * np.uint64(V) >> np.uint64(32)
        cases = [uniform < 0.8 * 2**32, uniform < 0.9 * 2**32]
        idx = text.copy()
        idx[chosen] = np.select(cases, [V, any_id.astype(np.int64)], text[chosen])
        batch = {"idx": idx, "targets": np.where(chosen, text, -1)}
        if self.doc_mask:
            batch["docs"] = self.documents(text)
        return {name: torch.from_numpy(array) for name, array in batch.items()}


class Seq2Seq(Objective):
    """Predicts m tokens in k spans from the text around them (T5, arXiv:1910.10683, figure 2).

    Sentinel <i> is the id V + i. It replaces span i in source, and stands before span i in idx.

        source    a b <0> e f g <1> i          idx      <0> c d <1> h
        window    a b  c d  e f g  h  i        targets      c d <1> h <2>

    All placements of k spans, of m tokens together and with text between them, are equally likely. m, k and so all
    shapes are the same for every window. A span and its sentinel have the number of the document in which the span
    begins, in source and in idx, so that every document of idx occurs in source.
    """

    equal_targets = True

    def __post_init__(self):
        super().__post_init__()
        T = self.block_size
        require(T > 1, f"block_size={T} is too short for a span and text around it; objective=seq2seq needs 2")
        self.m = min(self.m, T - 1)
        self.k = max(1, min(round(self.m / self.span_length), self.m, T - self.m))
        self.extra_ids = self.k + 1
        self.lengths = self.m + self.k, T - self.m + self.k

    def __call__(self, window: Tensor, keys: np.ndarray) -> dict[str, Tensor]:
        text = window.numpy()[:, :-1]
        B, T = text.shape
        V = self.vocab_size
        m = self.m
        k = self.k
        x = random_uint64(keys, T)
        spans = random_segmentation(x[:, : m - 1], k)  # lengths (B, k)
        gaps = random_segmentation(x[:, m - 1 :], k + 1)  # lengths (B, k + 1)
        gaps[:, [0, -1]] -= 1  # the window may begin or end with a span

        parts = np.empty((B, 2 * k + 1), dtype=np.int64)  # gap, span, gap, ..., span, gap
        parts[:, ::2] = gaps
        parts[:, 1::2] = spans
        part = np.repeat(np.tile(np.arange(2 * k + 1), B), parts.ravel()).reshape(B, T)  # the part of each token
        in_span = part % 2 == 1
        first = in_span.copy()  # the first token of each span
        first[:, 1:] &= part[:, 1:] != part[:, :-1]
        kept = first | ~in_span
        source = np.where(in_span, V + part // 2, text)[kept].reshape(B, T - m + k)

        sentinels = np.zeros((B, m + k + 1), dtype=bool)
        ends = np.cumsum(spans, axis=1) + np.arange(1, k + 1)  # the place of the next sentinel
        sentinels[:, 0] = True
        np.put_along_axis(sentinels, ends, True, axis=1)
        answer = np.empty(sentinels.shape, dtype=np.int64)
        answer[sentinels] = np.tile(V + np.arange(k + 1), B)
        answer[~sentinels] = text[in_span]

        batch = {"idx": answer[:, :-1], "targets": answer[:, 1:], "source": source}
        if self.doc_mask:
            number = self.documents(text)
            batch["docs"] = np.repeat(number[first], spans.ravel() + 1).reshape(B, m + k)
            batch["source_docs"] = number[kept].reshape(B, T - m + k)
        return {name: torch.from_numpy(array) for name, array in batch.items()}


class CausalPairs(Causal):
    """Predicts the targets of pairs from the tokens before them in the same pair. A window has whole pairs."""

    equal_targets = False

    def __call__(self, window: Tensor, marks: np.ndarray) -> dict[str, Tensor]:
        targets = np.where(marks == TARGET, window.numpy(), -1)[:, 1:]
        # A document begins at each mark from FIRST on. PADDING is one, and all padding of a row is one document
        begins = (marks >= FIRST) & np.pad(marks < PADDING, ((0, 0), (1, 0)), constant_values=True)[:, :-1]
        docs = np.cumsum(begins, axis=1)[:, :-1]
        return {"idx": window[:, :-1], "targets": torch.from_numpy(targets), "docs": torch.from_numpy(docs)}

    def pack(self, stream: TokenStream):
        pack(stream, lambda found: found[:, 2:] - found[:, :1], self.block_size + 1, self.block_size)


class Seq2SeqPairs(Objective):
    """Predicts the targets of pairs from their sources, whose tokens before the first target the encoder reads.

        pair   a b C D .       source  a b .       idx  . C D       targets  C D .       with . for end-of-text

    Whole pairs stand one after another, in source and in idx, each of the length T, and see themselves alone. Where a
    pair has several targets, as a chat has, idx and targets go on with what is between them.
    """

    def __post_init__(self):
        super().__post_init__()
        self.window = 2 * self.block_size
        self.lengths = (self.block_size, self.block_size)

    def __call__(self, window: Tensor, marks: np.ndarray) -> dict[str, Tensor]:
        text = window.numpy()
        is_target = marks == TARGET
        first = marks >= FIRST
        count = np.cumsum(is_target, axis=1)
        number = np.cumsum(first, axis=1) - 1
        answer = count > np.maximum.accumulate(np.where(first, count, 0), axis=1)  # from a pair's first target on
        begins = answer & ~np.pad(answer, ((0, 0), (1, 0)))[:, :-1]
        before = np.where(begins, self.eot, np.pad(text, ((0, 0), (1, 0)))[:, :-1])
        last = np.where(answer, number, 0).max(axis=1, keepdims=True)  # padding of idx belongs to the last pair
        read = (marks < PADDING) & ~answer | begins
        parts = {
            "source": (read, np.where(begins, self.eot, text), self.eot),
            "source_docs": (read, number, last + 1),
            "idx": (answer, before, self.eot),
            "targets": (answer, np.where(is_target, text, -1), -1),
            "docs": (answer, number, last),
        }
        batch = {}
        for name, (chosen, values, fill) in parts.items():
            batch[name] = torch.empty(len(text), self.block_size, dtype=torch.int64)
            array = batch[name].numpy()
            array[:] = fill
            array[np.nonzero(chosen)[0], (np.cumsum(chosen, axis=1) - 1)[chosen]] = values[chosen]
        return batch

    def pack(self, stream: TokenStream):
        pack(stream, lambda found: np.diff(found, axis=1) + (1, 0), self.block_size, self.block_size)


OBJECTIVE = {"causal": Causal, "masked": Masked, "seq2seq": Seq2Seq}  # flag -> class
PAIRS = {"causal": CausalPairs, "seq2seq": Seq2SeqPairs}  # the same of pairs


def objective_class(cfg) -> type[Objective]:
    """The class of the objective of a run with these flags. As long as cfg.pairs is auto, the data are no pairs."""
    return (PAIRS if cfg.pairs is True else OBJECTIVE)[cfg.objective]


def objective_of(cfg, vocab_size: int, eot: int | None) -> Objective:
    """The objective of a run, on data with so many ids and this end-of-text."""
    flags = cfg.block_size, cfg.doc_mask, cfg.corrupt_ratio, cfg.span_length
    return objective_class(cfg)(vocab_size, eot, *flags)
