"""What a model is to predict: one class per objective, which turns windows of text into batches.

    objective = OBJECTIVE["masked"](vocab_size=257, eot=256, block_size=1024)
    batch = objective(window, keys)          # window (B, T+1) int64, keys (B,) uint64 -> {name: tensor}

A batch holds what Model.forward takes, by its names: idx and targets; with doc_mask docs; of seq2seq also source and
source_docs. Where targets are idx one later, both stand in one tensor `text` (B, n+1): whoever uses the batch takes the
two views, on the device.

What is corrupted is a pure function of a window's key, so nothing has to be saved for a resume. A document number is
the count of end-of-text tokens up to a token, its own included: end-of-text opens the document that follows it.

    B windows of a batch   T block_size   V the data's own vocabulary   m tokens to restore   k spans of them
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.hashing import mix

# ---------------------------------------------------------------------------------------------------- random numbers


def randoms(keys: np.ndarray, n: int) -> np.ndarray:
    """(B, n) random uint64, those of a row all different, by keys (B,)."""
    return mix(keys[:, None] + np.arange(n, dtype=np.uint64))


def smallest(x: np.ndarray, n: int) -> np.ndarray:
    """True at the n smallest of each row of x, whose numbers differ."""
    return x <= np.partition(x, n - 1)[:, n - 1 : n] if n else np.zeros(x.shape, dtype=bool)


def compose(x: np.ndarray, k: int) -> np.ndarray:
    """(B, k) positive integers whose sum is n, by randoms x (B, n - 1): every way to write n so is as likely."""
    rows, n = len(x), x.shape[1] + 1
    cuts = np.nonzero(smallest(x, k - 1))[1].reshape(rows, k - 1) + 1
    return np.diff(cuts, prepend=0, append=n)


# --------------------------------------------------------------------------------------------------------- objectives


@dataclass
class Objective:
    """What all objectives share. ValueError names the flag that does not fit, and the remedy."""

    vocab_size: int  # V
    eot: int | None  # end-of-text, -1 where the data has none
    block_size: int  # T
    doc_mask: bool = False  # batches have document numbers
    corrupt_ratio: float = 0.15  # m / T
    span_length: float = 3.0  # m / k
    extra_ids = 0  # ids from V on that it needs

    def __post_init__(self):
        if not 0 < self.corrupt_ratio < 1:
            raise ValueError(f"corrupt_ratio={self.corrupt_ratio} must be above 0 and below 1, such as 0.15")
        if self.span_length < 1:
            raise ValueError(f"span_length={self.span_length} must be at least 1 token")
        if self.doc_mask and self.eot is None:
            raise ValueError(
                "doc_mask=True needs data with an end-of-text id in its meta.json, which says where documents begin; "
                "set doc_mask to False, or prepare the data with a tokenizer that has one, such as byte"
            )
        self.eot = -1 if self.eot is None else self.eot
        self.m = max(1, round(self.corrupt_ratio * self.block_size))

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of idx, and of source."""
        return self.block_size, 0

    def __call__(self, window: Tensor, keys: np.ndarray) -> dict[str, Tensor]:
        """window (B, T+1) in host memory, keys (B,) uint64 -> the batch, int64 tensors in host memory."""
        raise NotImplementedError

    def documents(self, text: np.ndarray) -> np.ndarray:
        return np.cumsum(text == self.eot, axis=1)


class Causal(Objective):
    """Every token from those before it."""

    def __call__(self, window: Tensor, keys: np.ndarray) -> dict[str, Tensor]:
        batch = {"text": window}
        if self.doc_mask:
            batch["docs"] = torch.from_numpy(self.documents(window.numpy()[:, :-1]))
        return batch


class Masked(Objective):
    """m tokens from all others (BERT, arXiv:1810.04805): of these 80 % are V in idx, 10 % any id, 10 % themselves.

    An end-of-text is never chosen; a window with fewer than m other tokens has only these as targets.
    """

    extra_ids = 1

    def __call__(self, window: Tensor, keys: np.ndarray) -> dict[str, Tensor]:
        text, V = window.numpy()[:, :-1], self.vocab_size
        x = randoms(keys, self.block_size)
        never = np.uint64(2**64 - 1)
        x[text == self.eot] = never
        chosen = smallest(x, self.m) & (x < never)
        again = mix(x[chosen])
        share, any_id = again >> np.uint64(32), again % np.uint64(2**32) * np.uint64(V) >> np.uint64(32)
        idx = text.copy()
        idx[chosen] = np.select([share < 0.8 * 2**32, share < 0.9 * 2**32], [V, any_id.astype(np.int64)], text[chosen])
        batch = {"idx": idx, "targets": np.where(chosen, text, -1)}
        if self.doc_mask:
            batch["docs"] = self.documents(text)
        return {name: torch.from_numpy(array) for name, array in batch.items()}


class Seq2Seq(Objective):
    """m tokens in k spans from the text around them (T5, arXiv:1910.10683, figure 2); sentinel i is the id V + i.

        source    a b <0> e f g <1> i          idx      <0> c d <1> h
        window    a b  c d  e f g  h  i        targets      c d <1> h <2>

    Every way to lay k spans of m tokens in all into the window, with text between them, is as likely; m and k, and with
    them the shapes, are the same for all windows. In source and idx a span and its sentinel have the number of the
    document that the span begins in, so that every document of idx is in source.
    """

    def __post_init__(self):
        super().__post_init__()
        T = self.block_size
        if T < 2:
            raise ValueError(f"block_size={T} is too short for a span and text around it; objective=seq2seq needs 2")
        self.m = min(self.m, T - 1)
        self.k = max(1, min(round(self.m / self.span_length), self.m, T - self.m))
        self.extra_ids = self.k + 1

    @property
    def lengths(self) -> tuple[int, int]:
        return self.m + self.k, self.block_size - self.m + self.k

    def __call__(self, window: Tensor, keys: np.ndarray) -> dict[str, Tensor]:
        text, B, T, V, m, k = window.numpy()[:, :-1], len(keys), self.block_size, self.vocab_size, self.m, self.k
        x = randoms(keys, T)
        spans, gaps = compose(x[:, : m - 1], k), compose(x[:, m - 1 :], k + 1)  # lengths (B, k), (B, k + 1)
        gaps[:, [0, -1]] -= 1  # the window may begin or end with a span

        parts = np.empty((B, 2 * k + 1), dtype=np.int64)  # gap, span, gap, ..., span, gap
        parts[:, ::2], parts[:, 1::2] = gaps, spans
        part = np.repeat(np.tile(np.arange(2 * k + 1), B), parts.ravel()).reshape(B, T)  # that each token is in
        in_span = part % 2 == 1
        first = in_span.copy()  # of its span
        first[:, 1:] &= part[:, 1:] != part[:, :-1]
        kept = first | ~in_span
        source = np.where(in_span, V + part // 2, text)[kept].reshape(B, T - m + k)

        sentinels = np.zeros((B, m + k + 1), dtype=bool)
        ends = np.cumsum(spans, axis=1) + np.arange(1, k + 1)  # where the next sentinel stands
        sentinels[:, 0] = True
        np.put_along_axis(sentinels, ends, True, axis=1)
        answer = np.empty(sentinels.shape, dtype=np.int64)
        answer[sentinels], answer[~sentinels] = np.tile(V + np.arange(k + 1), B), text[in_span]

        batch = {"text": answer, "source": source}
        if self.doc_mask:
            number = self.documents(text)
            batch["docs"] = np.repeat(number[first], spans.ravel() + 1).reshape(B, m + k)
            batch["source_docs"] = number[kept].reshape(B, T - m + k)
        return {name: torch.from_numpy(array) for name, array in batch.items()}


OBJECTIVE = {"causal": Causal, "masked": Masked, "seq2seq": Seq2Seq}  # flag -> class
