"""Counts a whole model's matmul FLOPs and names the kernels of its attention, from its modules, without a forward."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch

from model import Heads, Linear, Model
from ops import Mask, attention_kernel, takes_flash


def flops(model: Model, T: int, source: int = 0) -> int:
    """Matmul FLOPs of forward and backward for a sequence of T tokens and its source: 6 per token and weight that it
    reads (the head counts, the embedding does not), plus 3 times attention's forward (arXiv:2204.02311, appendix B)."""
    total = 6 * model.head.weight.numel() * T
    for m, tokens in readings(model, T, source):
        total += 6 * int(m.weight.numel() * m.read_share) * tokens
    for m, queries, keys, slots in pools(model, T, source):
        window = m.window if m.causal else 2 * m.window - 1
        products = 2 * (min(keys, window) if m.window else keys)  # with keys and with values
        total += 6 * queries * m.n_head * m.head_dim * (products + (slots and m.slot_k.size(1) + slots))
    return total


def readings(model: Model, T: int, source: int) -> Iterator[tuple[Linear, int]]:
    """The linear layers, each with the number of tokens of a text and its source that it reads."""
    for name, m in model.named_modules():
        if isinstance(m, Linear):
            of_source = name.startswith("encoder.") or m.role == "memory"
            yield m, source if of_source else T


def n_read(model: Model) -> int:
    """Number of parameters that a token reads: all but those of the experts that its routers do not choose."""
    unread = sum(m.weight.numel() * (1 - m.read_share) for m in model.modules() if isinstance(m, Linear))
    return model.n_params() - int(unread)


def pools(model: Model, T: int, source: int) -> Iterator[tuple[Heads, int, int, int]]:
    """The readers with heads, each with its numbers of queries, of tokens that have keys for it, and of slots."""
    for name, m in model.named_modules():
        if isinstance(m, Heads):
            queries = source if name.startswith("encoder.") else T
            keys = {"context": queries, "memory": source, "parameters": 0}[m.reader.source]
            yield m, queries, keys, m.slot_v.size(1) if m.reader.slotted else 0


def attention_kernels(model: Model, T: int, source: int, device: str, dtype: torch.dtype, pieces: int = 1) -> str:
    """The kernels of ops.attention_kernel in training on T tokens and a source, with their numbers of layers. Slots
    with a softmax of their own count as a layer. Context parallelism computes the queries of a text in `pieces`."""
    counts = Counter()
    for m, queries, keys, slots in pools(model, T, source):
        where = model.wte.weight.device
        table = m.position.table(torch.arange(1, device=where), torch.float32)
        q = torch.empty(1, m.n_head, 1, m.head_dim, device=where)
        flash = takes_flash(device, dtype, m.position(q, q, q, table)[0].size(-1))
        rest = m.softcap > 0 or m.phi is not None, m.dropout, device, flash
        docs = (q,) * 3 if model.cfg.doc_mask and keys else None
        mask = Mask(m.causal, m.window if m.window < keys else 0, docs)
        beside = m.reader.slots == "joint_slots"
        counts[attention_kernel(mask, queries // pieces, keys or slots, beside, *rest)] += 1
        if m.reader.slots == "own_slots":
            counts[attention_kernel(Mask(False), queries // pieces, slots, False, *rest)] += 1
    return ", ".join(f"{kernel} ({n} layer{'s' * (n > 1)})" for kernel, n in counts.items())


class Work(NamedTuple):
    """What a training run computes, and on which machine."""

    n_params: int
    n_read: int  # parameters that a token reads
    flops_per_sample: int
    attention_kernels: str
    samples_per_step: int
    peak_flops: float | None  # of all ranks together; None if it is unknown


def count_work(cfg, lengths: tuple[int, int], device: str, dtype: torch.dtype, peak: float | None) -> Work:
    """The work of a run with these flags; `lengths` are those of the objective's sequences, (T, S)."""
    with torch.device("meta"):
        model = Model(cfg)
    pieces = 2 * cfg.cp if cfg.cp > 1 else 1  # of each text
    return Work(
        n_params=model.n_params(),
        n_read=n_read(model),
        flops_per_sample=flops(model, *lengths),
        attention_kernels=attention_kernels(model, *lengths, device, dtype, pieces),
        samples_per_step=cfg.batch_size * cfg.gradient_accumulation_steps,
        peak_flops=peak,
    )
