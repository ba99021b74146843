"""Counts a whole model's matmul FLOPs and names the kernels of its attention, from its modules, without a forward."""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import torch

from engine.config import Config
from model import Convolution, ExpertLinear, Linear, Model, MultiHeadAttention
from ops import Mask, attention_kernel


def skeleton(cfg: Config) -> Model:
    """The model without memory: its modules, and the shapes of its parameters."""
    with torch.device("meta"):
        return Model(cfg)


class Work:
    """What a run computes on sequences of these lengths, (T, S). peak_flops is that of all ranks together, or None."""

    def __init__(
        self, cfg: Config, lengths: tuple[int, int], device: str, dtype: torch.dtype, peak_flops: float | None
    ):
        model = skeleton(cfg)
        self.peak_flops = peak_flops
        self.n_params = model.n_params()
        self.n_read = n_read(model)
        self.flops_per_token = flops(model, *lengths) / cfg.block_size  # of forward and backward
        self.attention_kernels = attention_kernels(model, *lengths, device, dtype, cfg.cp)


def flops(model: Model, T: int, source: int = 0) -> int:
    """Matmul FLOPs of forward and backward for a sequence of T tokens and its source: 6 per token and weight that it
    reads (also of the head and convolutions), plus 3 times attention's forward (arXiv:2204.02311, appendix B)."""
    total = sum(6 * m.weight.numel() * T for m in model.modules() if isinstance(m, Convolution))
    for name, m in model.named_modules():
        if isinstance(m, Linear):
            tokens = source if name.startswith("encoder.") or m.role == "memory_column" else T
            total += 6 * int(m.weight.numel() * read_share(m, model.cfg)) * tokens
    for m, queries, keys, slots in pools(model, T, source):
        if m.window:
            keys = min(keys, m.window if m.causal else 2 * m.window - 1)
        products = 2 * keys  # with keys and with values
        if slots:
            products += m.slot_k.size(1) + slots
        total += 6 * queries * m.n_head * m.head_size * products
    return total


def read_share(m: Linear, cfg: Config) -> Fraction:
    """The share of the weight that a token reads."""
    if isinstance(m, ExpertLinear):
        return Fraction(cfg.n_expert_active, cfg.n_expert)
    return Fraction(1)


def n_read(model: Model) -> int:
    """Number of parameters that a token reads: all but those of the experts that its routers do not choose."""
    layers = [m for m in model.modules() if isinstance(m, Linear)]
    unread = sum(p.numel() * (1 - read_share(m, model.cfg)) for m in layers for p in m.parameters())
    return model.n_params() - int(unread)


def pools(model: Model, T: int, source: int) -> Iterator[tuple[MultiHeadAttention, int, int, int]]:
    """The readers with heads, each with its numbers of queries, of tokens that have keys for it, and of slots."""
    for name, m in model.named_modules():
        if isinstance(m, MultiHeadAttention):
            queries = source if name.startswith("encoder.") else T
            keys = {"context": queries, "memory": source, "parameters": 0}[m.reader.source]
            yield m, queries, keys, m.slot_v.size(1) if m.reader.slotted else 0


def attention_kernels(model: Model, T: int, source: int, device: str, dtype: torch.dtype, cp: int = 1) -> str:
    """The kernels of ops.attention_kernel in training on T tokens and a source, with their numbers of layers. Slots
    with a softmax of their own count as a layer. With cp > 1, a text's queries are computed in twice as many pieces."""
    layers = Counter()
    for m, queries, keys, slots in pools(model, T, source):
        if cp > 1:
            queries //= 2 * cp
        key = torch.empty(m.n_kv_head, 1, m.head_size, device=model.wte.weight.device)
        width = m.position.slots(key, key)[0].size(-1)
        mapped = m.softcap > 0 or m.phi is not None
        options = (mapped, m.dropout, device, dtype, width)
        docs = ((), (), ()) if model.cfg.doc_mask and keys else None  # any, of known boundaries
        mask = Mask(m.causal, m.window if m.window < keys else 0, docs)
        layers[attention_kernel(mask, queries, keys or slots, m.reader.slots == "joint_slots", *options)] += 1
        if m.reader.slots == "own_slots":
            layers[attention_kernel(Mask(False), queries, slots, False, *options)] += 1
    texts = []
    for kernel, n in layers.items():
        noun = "layer" if n == 1 else "layers"
        texts.append(f"{kernel} ({n} {noun})")
    return ", ".join(texts)
