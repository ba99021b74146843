"""The whole model: every design axis of the transformer is one flat flag, one table and one no-op default.

    from model import Model, ModelConfig
    model = Model(ModelConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=65, pos="rope"))
    loss = model(idx, targets)        # idx, targets (B, T) int64; targets of -1 are left out
    logits = model(idx)               # (B, T, V)

With objective="seq2seq" there is also source=(B, S), what the encoder reads. docs=(B, T) and source_docs=(B, S) hold
document numbers that do not fall along a row: tokens see only their own document. Padding is a document of its own.

To try an idea, add an entry to one of the tables (NORM, PLACEMENT, POSITION, MLP_KIND, BLOCK) and its name to the
flag's Literal: the grid test walks the tables, so the new entry is tested without writing a test.

Names used everywhere
    B batch   T time (queries)   S keys, or tokens of a source   C n_embd   V vocabulary   L layers
    H query heads   Hkv key/value heads   G = H / Hkv query heads of one group   D = C / H head size
    F hidden width of the MLP
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# ---------------------------------------------------------------------------------------------------------------------
# Flags


@dataclass
class ModelConfig:
    """What the network is. ValueError names the flags of an impossible combination, their values and the remedy."""

    # --- model: size
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # query heads per layer
    n_embd: int = 768  # width of the residual stream
    block_size: int = 1024  # context length in tokens
    vocab_size: int = 0  # 0 = the data's; above 1024 rounded up to a multiple of 64
    dropout: float = 0.0  # on embeddings, attention weights and both sub-layers' outputs
    bias: bool = False  # bias in linear layers and layer norms, as in GPT-2
    tie_weights: bool = True  # the head shares the token embedding
    # --- model: block
    block: Literal["standard", "parallel", "simplified", "simplified_parallel", "superblock"] = "standard"  # the wiring
    norm: Literal["layernorm", "rmsnorm", "none"] = "layernorm"  # LayerNorm, RMSNorm (arXiv:1910.07467), or nothing
    norm_placement: Literal["pre", "post", "sandwich", "none"] = "pre"  # x+f(n(x)); n(x+f(x)); x+n(f(n(x))); x+f(x)
    mlp: Literal["gelu", "relu", "relu2", "swiglu", "geglu"] = "gelu"  # relu2 arXiv:2109.08668, *glu arXiv:2002.05202
    mlp_ratio: float = 4.0  # hidden width over n_embd; gated kinds take 2/3 of it, so that parameters match
    simplified_value_proj: Literal["first", "all", "none"] = "first"  # layers whose value projection is trained
    simplified_beta_ff: float = 0.1  # initial gain of the MLP branch, use O(1 / sqrt(depth)) (arXiv:2311.01906)
    pool: Literal["separate", "joint"] = "separate"  # MLP beside attention; or learned slots under the same softmax
    wiring: Literal["parallel", "series"] = "parallel"  # the superblock's two pools at once, or one after the other
    n_group: int = 1  # the superblock's MLP in this many independent groups of channels
    n_slot: int = 0  # learned slots per key/value head (arXiv:1907.01470); 0 = as many parameters as the MLP
    # --- model: attention
    attention: Literal["mha", "gqa", "mqa"] = "mha"  # GQA arXiv:2305.13245, MQA arXiv:1911.02150
    n_kv_head: int = 0  # key/value heads, must divide n_head; 0 = derived from attention
    qk_norm: bool = False  # RMS norm of q and k per head (arXiv:2302.05442)
    window: int = 0  # sliding window in tokens, 0 = full attention
    window_pattern: str = ""  # per layer, repeated: S = sliding window, L = full, such as SSSL; empty = all S
    attn_softcap: float = 0.0  # c tanh(scores / c), 0 = off (Gemma 2, arXiv:2408.00118)
    # --- model: position
    pos: Literal["learned", "sinusoidal", "rope", "alibi", "none"] = "learned"  # position encoding
    rope_theta: float = 10000.0  # base of RoPE's wavelengths (arXiv:2104.09864)
    # --- model: objective
    objective: Literal["causal", "masked", "seq2seq"] = "causal"  # decoder; encoder (BERT); both (T5's corrupted spans)
    n_encoder_layer: int = 0  # blocks of the encoder, 0 = n_layer
    doc_mask: bool = False  # tokens attend only within their own document, which end-of-text begins
    doc_positions: bool = False  # positions count from the beginning of each document; needs doc_mask
    # --- model: loss
    logit_softcap: float = 0.0  # c tanh(logits / c), 0 = off
    loss_chunk: int = 0  # tokens whose logits exist at once in the loss; 0 = as many as fit in 128 MiB

    def __post_init__(self):
        for names, least, limit in (
            ("n_head n_embd block_size", 1, 2**31),
            ("n_group", 1, 2**16),  # a layer lists its groups
            ("vocab_size n_kv_head n_slot window loss_chunk attn_softcap logit_softcap", 0, 2**31),
            ("simplified_beta_ff", -(2**31), 2**31),
            ("n_layer", 1, 2**12),  # each is a dozen Python objects, which take a hundredth of a second
            ("n_encoder_layer", 0, 2**12),
        ):
            for name in names.split():
                value = getattr(self, name)
                require(least <= value < limit, f"{name}={value} must be at least {least} and below {limit}")
        H, C = self.n_head, self.n_embd
        require(
            C % H == 0, f"n_embd={C} is not divisible by n_head={H}; set n_embd to a multiple such as {-(-C // H) * H}"
        )
        require(0 <= self.dropout < 1, f"dropout={self.dropout} must be in [0, 1)")
        require(
            0 < self.mlp_ratio * C < 2**31,
            f"mlp_ratio={self.mlp_ratio} must be positive, and times n_embd={C} below {2**31}",
        )
        require(self.rope_theta > 0, f"rope_theta={self.rope_theta} must be positive")
        for name in ("attn_softcap", "logit_softcap"):
            value = getattr(self, name)
            require(value == 0 or value >= 1e-6, f"{name}={value} must be 0 (off) or at least 1e-06")
        require(C % self.n_group == 0, f"n_group={self.n_group} does not divide n_embd={C}; set n_group to a divisor")
        low = [n for n in range(1, math.isqrt(H) + 1) if H % n == 0]
        divisors = sorted({*low, *(H // n for n in low)})
        require(
            self.attention != "gqa" or self.n_kv_head in divisors,
            f"attention=gqa with n_kv_head={self.n_kv_head}: set n_kv_head to a divisor of n_head={H}: {divisors}",
        )
        fixed = {"mha": H, "mqa": 1}.get(self.attention, self.n_kv_head)
        require(
            self.n_kv_head in (0, fixed),
            f"n_kv_head={self.n_kv_head} contradicts attention={self.attention} (n_kv_head={fixed}); set attention=gqa",
        )
        require(
            self.pos != "rope" or C // H % 2 == 0, f"pos=rope needs an even head size, and n_embd / n_head is {C // H}"
        )
        require(
            not self.doc_positions or self.pos in ("learned", "sinusoidal"),
            f"doc_positions=True with pos={self.pos}: it moves embeddings of positions, and here there are only "
            "distances, which a document does not change; leave doc_positions out, or set pos=learned",
        )
        require(self.pos != "sinusoidal" or C % 2 == 0, f"pos=sinusoidal needs an even n_embd, and it is {C}")
        require(
            set(self.window_pattern) <= set("SL"),
            f"window_pattern={self.window_pattern!r} may hold only S (sliding) and L (full), such as SSSL",
        )
        require(
            self.window > 0 or not self.window_pattern,
            f"window_pattern={self.window_pattern!r} needs a window, and window=0; set window to a number of tokens",
        )

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return {"mha": self.n_head, "gqa": self.n_kv_head, "mqa": 1}[self.attention]

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and head. Rows from vocab_size on are padding, which no token and no loss uses."""
        return self.vocab_size

    @property
    def hidden_dim(self) -> int:
        """F: mlp_ratio * C, of gated kinds 2/3 of that, rounded to a multiple of 64 where C is one."""
        width = self.mlp_ratio * self.n_embd * (2 / 3 if MLP_KIND[self.mlp].inputs == 2 else 1)
        width = max(self.hidden_unit, round(width / self.hidden_unit) * self.hidden_unit)
        # in a superblock each key/value head, or each group, takes its slice
        slices = math.lcm(self.kv_heads, self.n_group) if self.block == "superblock" else 1
        return -(-width // slices) * slices

    @property
    def hidden_unit(self) -> int:
        """Hidden units come in groups of so many, in which a gated kind's gates stand before its values."""
        return 64 if self.n_embd % 64 == 0 else 1

    @property
    def slots(self) -> int:
        """Learned slots per key/value head: n_slot, or what gives a joint pool as many parameters as the MLP."""
        if self.block != "superblock" or self.pool != "joint":
            return 0
        mlp = (MLP_KIND[self.mlp].inputs + 1) * self.n_embd * self.hidden_dim
        return self.n_slot or round(mlp / (2 * self.kv_heads * self.head_dim))

    def layer_window(self, layer: int) -> int:
        """Sliding window of a layer in tokens, 0 = full attention."""
        kinds = self.window_pattern or "S"
        return self.window if kinds[layer % len(kinds)] == "S" else 0


# A flag that the chosen variant does not use is refused when set explicitly: flag -> (is it used?, when it is).
USED_WHEN: dict[str, tuple[Callable[[ModelConfig], bool], str]] = {
    "rope_theta": (lambda c: c.pos == "rope", "pos=rope"),
    "window_pattern": (lambda c: c.window > 0, "window > 0"),
    "simplified_value_proj": (lambda c: c.block.startswith("simplified"), "block=simplified"),
    "simplified_beta_ff": (lambda c: c.block.startswith("simplified"), "block=simplified"),
    "pool": (lambda c: c.block == "superblock", "block=superblock"),
    "wiring": (lambda c: c.block == "superblock" and c.pool == "separate", "block=superblock and pool=separate"),
    "n_group": (lambda c: c.block == "superblock" and c.pool == "separate", "block=superblock and pool=separate"),
    "n_slot": (lambda c: c.block == "superblock" and c.pool == "joint", "block=superblock and pool=joint"),
    "n_encoder_layer": (lambda c: c.objective == "seq2seq", "objective=seq2seq"),
    "doc_positions": (lambda c: c.doc_mask, "doc_mask=True"),
    "mlp": (lambda c: c.block != "superblock" or c.pool == "separate", "pool=separate"),
    "norm": (lambda c: c.norm_placement != "none" or c.norm == "none", "norm_placement other than none"),
    "norm_placement": (lambda c: c.norm != "none" or c.norm_placement == "none", "norm other than none"),
}


def require(condition: bool, message: str):
    if not condition:
        raise ValueError(message)


# ---------------------------------------------------------------------------------------------------------------------
# Norms

NORM: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "layernorm": lambda c: nn.LayerNorm(c.n_embd, bias=c.bias),
    "rmsnorm": lambda c: nn.RMSNorm(c.n_embd, eps=1e-5),
    "none": lambda c: nn.Identity(),
}

PLACEMENT = {  # before f, after f, after the sum, before the head
    "pre": (True, False, False, True),
    "post": (False, False, True, False),
    "sandwich": (True, True, False, True),
    "none": (False, False, False, False),
}


def norm_at(cfg: ModelConfig, slot: int) -> nn.Module:
    return NORM[cfg.norm](cfg) if PLACEMENT[cfg.norm_placement][slot] else nn.Identity()


class Norms(nn.Module):
    """The norms around one residual branch: x -> total(x + after(f(before(x)))), the unused ones identities."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.before, self.after, self.total = (norm_at(cfg, slot) for slot in range(3))


# ---------------------------------------------------------------------------------------------------------------------
# Positions: what is added to the embedding, and what is done to q, k and v. t (T,) holds the absolute positions; with
# doc_positions the embedding gets (B, T) instead.


class NoEmbedding(nn.Module):
    """x (B, T, C) as it is."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x


class LearnedEmbedding(NoEmbedding):
    """x + W[t] (GPT-2)."""

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.wpe = nn.Embedding(cfg.block_size, cfg.n_embd)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x + self.wpe(t)


class SinusoidalEmbedding(NoEmbedding):
    """sqrt(C) x + [sin(t w), cos(t w)], w_i = 10000^(-2i/C) (arXiv:1706.03762, sections 3.4 and 3.5)."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        C = x.size(-1)
        angle = outer_angles(t, C, 10000.0)  # (..., T, C/2)
        return x * math.sqrt(C) + torch.cat((angle.sin(), angle.cos()), dim=-1).to(x.dtype)


def outer_angles(t: Tensor, width: int, theta: float) -> Tensor:
    """t_i * theta^(-2j/width): (..., T) -> (..., T, width/2), in float64 so that far positions keep their phase."""
    frequency = theta ** (-torch.arange(0, width, 2, device=t.device, dtype=ANGLE[t.device.type]) / width)
    return t.to(frequency.dtype)[..., None] * frequency


ANGLE = {"mps": torch.float32, "cpu": torch.float64, "cuda": torch.float64, "meta": torch.float64}


class Unrotated(nn.Module):
    """q (B, H, T, D), k and v (B, Hkv, T, D) as they are. table(t) is computed once per forward for all layers."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg

    def table(self, t: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return ()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v

    def slots(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (Hkv, M, D) that have no position, made fit to stand beside those that have."""
        return k, v

    def slopes(self, table: tuple[Tensor, ...]) -> Tensor | None:
        """(H,), where mix is to subtract slope_h |i - j| from the scores."""
        return None


class Rope(Unrotated):
    """Pairs (x_j, x_{j+D/2}) turned by t * theta^(-2j/D) (arXiv:2104.09864, in GPT-NeoX's and Llama's order)."""

    def table(self, t: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        angle = outer_angles(t, self.cfg.head_dim, self.cfg.rope_theta).repeat(1, 2)  # (T, D)
        sign = torch.ones_like(angle)
        sign[:, : angle.size(1) // 2] = -1
        return angle.cos().to(dtype), (angle.sin() * sign).to(dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = table
        return turn(q, cos, sin), turn(k, cos, sin), v


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., T, D) -> x cos + swap_halves(x) sin, computed in the table's precision."""
    return (x * cos + x.roll(x.size(-1) // 2, dims=-1) * sin).to(x.dtype)


class Alibi(Unrotated):
    """Adds -m_h (i - j) to the scores (arXiv:2108.12409) without a bias matrix.

    Softmax ignores a shift per row, so m_h j is enough, and that is a dot product of columns added to q and k:

        q   256 m_h, m_h, 256 m_h (i // 256), m_h (i % 256)   times sqrt(D)
        k   j // 256, j % 256, 0, 0;   of a slot without position 0, 0, 1, 1, which takes its shift back

    Each is exact in bfloat16. v is padded with zeros to the same width (a multiple of 8), which the fused kernels want;
    attention drops those columns of its result.
    """

    def table(self, t: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        slope = alibi_slopes(self.cfg.n_head, t.device).to(dtype)[:, None] * math.sqrt(self.cfg.head_dim)  # (H, 1)
        far, near = (t // 256).to(dtype), (t % 256).to(dtype)  # (T,)
        columns = (256 * slope).expand(-1, len(t)), slope.expand(-1, len(t)), 256 * slope * far, slope * near
        return self.pad(torch.stack(columns, dim=-1)), self.pad(torch.stack((far, near), dim=-1))  # (H, T, .), (T, .)

    def pad(self, columns: Tensor) -> Tensor:
        """(..., n) -> (..., E - D), where E is the least multiple of 8 that holds D + 4."""
        D = self.cfg.head_dim
        return F.pad(columns, (0, -(-(D + 4) // 8) * 8 - D - columns.size(-1)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        q_columns, k_columns = (c.to(q.dtype) for c in table)
        q = torch.cat((q, q_columns.expand(*q.shape[:3], -1)), dim=-1)  # (B, H, T, E)
        k = torch.cat((k, k_columns.expand(*k.shape[:3], -1)), dim=-1)  # (B, Hkv, T, E)
        return q, k, F.pad(v, (0, q.size(-1) - v.size(-1)))

    def slots(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        columns = self.pad(torch.cat((k.new_zeros(2), k.new_ones(2)))).expand(*k.shape[:2], -1)  # (Hkv, M, E - D)
        return torch.cat((k, columns), dim=-1), F.pad(v, (0, columns.size(-1)))


class TwoSidedAlibi(Unrotated):
    """Subtracts m_h |i - j| where tokens see both ways; columns could do that for one direction only."""

    def table(self, t: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (alibi_slopes(self.cfg.n_head, t.device).to(dtype),)

    def slopes(self, table: tuple[Tensor, ...]) -> Tensor | None:
        return table[0]


def alibi_slopes(n_head: int, device: torch.device | str = "cpu") -> Tensor:
    """(H,) slopes 2^(-8i/H), i = 1..H; if H is no power of two, those of the power p below, then every other of 2p."""
    p = 2 ** int(math.log2(n_head))
    i = torch.arange(n_head, device=device)
    return torch.exp2(-8 * torch.where(i < p, (i + 1) / p, (2 * (i - p) + 1) / (2 * p)))


POSITION = {  # flag -> (added to the embedding, done to q, k and v)
    "learned": (LearnedEmbedding, Unrotated),
    "sinusoidal": (SinusoidalEmbedding, Unrotated),
    "rope": (NoEmbedding, Rope),
    "alibi": (NoEmbedding, lambda cfg: (TwoSidedAlibi if cfg.objective == "masked" else Alibi)(cfg)),
    "none": (NoEmbedding, Unrotated),
}


# ---------------------------------------------------------------------------------------------------------------------
# mix(q; K, V): every score goes through a fused kernel or through strips of queries, never through a (T, S) matrix


class Mask(NamedTuple):
    """What T queries see of S keys: a range [lo, hi) each. Queries and keys of self-attention end together."""

    causal: bool = True
    window: int = 0  # positions before (and, if not causal, behind) the query's, its own included; 0 = all
    docs: tuple[Tensor, Tensor] | None = None  # numbers (B, T) and (B, S) that do not fall: only equal ones are seen
    slopes: Tensor | None = None  # (H,): slope |i - j| is subtracted from the scores

    def reach(self, T: int, S: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """lo and hi, each (T,), or (B, T) with docs."""
        i = torch.arange(S - T, S, device=device)
        lo, hi = torch.zeros_like(i), torch.full_like(i, S)
        if self.causal:
            hi = i + 1
        if self.window:
            lo, hi = (i - self.window + 1).clamp(min=0), hi.minimum(i + self.window)
        if self.docs is not None:
            of_queries, of_keys = (docs.contiguous() for docs in self.docs)
            lo = lo.maximum(torch.searchsorted(of_keys, of_queries))
            hi = hi.minimum(torch.searchsorted(of_keys, of_queries, right=True))
        return lo, hi


def mix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_dim: int,
    mask: Mask,
    softcap: float = 0.0,
    dropout: float = 0.0,
    slots: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention softmax(cap(q k^T / sqrt(D))) v of what the mask admits: (B, H, T, E).

    q (B, H, T, E), k and v (B, Hkv, S, E), E >= D = head_dim: columns beyond D carry a position bias, which a softcap
    leaves alone. slots: keys and values (Hkv, M, E) without position that every query sees. In causal attention the
    queries are the last T of the S positions, as in decoding.
    """
    T, S = q.size(2), k.size(2)
    if T == 1 and mask.causal:
        k, v = (x[:, :, -mask.window :] for x in (k, v))
        docs = mask.docs and (mask.docs[0], mask.docs[1][:, -mask.window :])
        mask, S = Mask(False, 0, docs, mask.slopes), k.size(2)
    mask = mask._replace(window=mask.window if mask.window < S else 0)
    fused = softcap == 0 and (dropout == 0 or q.device.type != "cpu")  # the CPU's fused kernel knows no dropout
    sdpa = partial(fused_attention, scale=head_dim**-0.5, dropout_p=dropout)
    past = S - T if mask.causal else 0  # keys before the first query, which every query sees unless there is a window
    if fused and mask.docs is None and mask.slopes is None:
        if slots is None and not past and not mask.window:
            return sdpa(q, k, v, is_causal=mask.causal)
        if slots is None and not past and mask.causal:
            return window_attention(sdpa, q, k, v, mask.window)
        flash = q.device.type == "cuda" and matmul_dtype(q) == torch.bfloat16 and q.size(3) in range(8, 257, 8)
        if slots is None and not mask.window and flash:
            q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))  # this operator aligns T < S at their ends
            kernel = torch.ops.aten._scaled_dot_product_flash_attention
            return kernel(q, k, v, dropout, is_causal=True, scale=head_dim**-0.5)[0]
        if not mask.window and q.device.type == "cpu":
            always = [x[:, :, :past] for x in (k, v)]  # (B, Hkv, M + past, E)
            if slots is not None:
                both = zip(slots, always, strict=True)
                always = [torch.cat((x.expand(len(q), -1, -1, -1), y), dim=2) if past else x[None] for x, y in both]
            k, v = (x[:, :, past:].repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
            return SlotAttention.apply(
                q, k, v, *(x.expand(len(q), -1, -1, -1) for x in always), head_dim**-0.5, mask.causal
            )
    return strip_attention(
        sdpa if fused else partial(naive_attention, head_dim, softcap, dropout), q, k, v, mask, slots
    )


def fused_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options) -> Tensor:
    """PyTorch's attention, kept on its fused kernels: those of CUDA that know masks or float32 know no groups of heads,
    and with these it would make a (T, S) matrix without a word."""
    group = q.size(1) // k.size(1)
    if group > 1 and q.device.type == "cuda" and (attn_mask is not None or matmul_dtype(q) == torch.float32):
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask, enable_gqa=q.size(1) != k.size(1), **options)


def window_attention(sdpa: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, W: int) -> Tensor:
    """Each query sees the W last positions, its own included: blocks of W queries against two blocks of W keys.

    The first block has no predecessor and is plain causal attention; the others share one (W, 2W) mask. O(T W).
    """
    B, _, T, E = q.shape
    n = -(-T // W)
    q, k, v = (F.pad(x, (0, 0, 0, n * W - T)) for x in (q, k, v))  # padding comes last, where the causal mask hides it

    def blocks(x: Tensor, first: int, width: int) -> Tensor:  # n-1 overlapping views -> ((n-1) B, heads, width, E)
        return x[:, :, first:].unfold(2, width, W).permute(2, 0, 1, 4, 3).flatten(0, 1)

    i, j = torch.arange(W, device=q.device)[:, None], torch.arange(2 * W, device=q.device)
    band = (j > i) & (j <= i + W)  # (W, 2W): key j stands W before the block's first query
    rest = sdpa(blocks(q, W, W), blocks(k, 0, 2 * W), blocks(v, 0, 2 * W), attn_mask=band)
    rest = rest.view(n - 1, B, -1, W, E).permute(1, 2, 0, 3, 4).flatten(2, 3)  # (B, H, (n-1) W, E)
    return torch.cat((sdpa(q[:, :, :W], k[:, :, :W], v[:, :, :W], is_causal=True), rest), dim=2)[:, :, :T]


class SlotAttention(torch.autograd.Function):
    """One softmax over slots, which every query sees, and context: two calls of the CPU's fused kernel, joined by their
    normalisers. Its backward takes the joint result and normaliser, and then each part's gradients are already right.

    q (B, H, T, E), k and v (B, H, S, E), slot_k and slot_v (B, Hkv, M, E).
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, slot_k: Tensor, slot_v: Tensor, scale: float, causal: bool):
        kernel = partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, scale=scale)
        q_slots = q.reshape(len(q), slot_k.size(1), -1, q.size(3))  # the heads of a group one after the other
        y_slots, z_slots = kernel(q_slots, slot_k, slot_v)
        y, z = kernel(q, k, v, is_causal=causal)  # (B, H, T, E) and log of the normaliser (B, H, T)
        z_slots = z_slots.reshape(z.shape)
        total = torch.logaddexp(z, z_slots)
        y = (z - total).exp()[..., None] * y + (z_slots - total).exp()[..., None] * y_slots.reshape(y.shape)
        if y.dtype != q.dtype:  # of a conversion that does nothing torch 2.11 compiles a backward that returns zeros
            y = y.to(q.dtype)
        ctx.save_for_backward(q, k, v, slot_k, slot_v, y, total)
        ctx.scale, ctx.causal = scale, causal
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, slot_k, slot_v, y, total = ctx.saved_tensors
        kernel = partial(
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, dropout_p=0.0, scale=ctx.scale
        )
        dq, dk, dv = kernel(grad, q, k, v, y, total, is_causal=ctx.causal)
        grad, q_slots, y, total = (x.reshape(len(x), slot_k.size(1), -1, *x.shape[3:]) for x in (grad, q, y, total))
        dq_slots, *d_slots = kernel(grad, q_slots, slot_k, slot_v, y, total, is_causal=False)
        return dq + dq_slots.reshape(dq.shape), dk, dv, *d_slots, None, None


def strip_attention(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    slots: tuple[Tensor, Tensor] | None,
    rows: int = 128,
) -> Tensor:
    """Attention in strips of queries, recomputed in the backward: any mask and score function in O(rows S) memory."""
    T, S, W = q.size(2), k.size(2), mask.window
    lo, hi = mask.reach(T, S, q.device)
    if slots is not None:
        slots = tuple(x.expand(len(q), -1, -1, -1) for x in slots)  # each (B, Hkv, M, E)

    def strip(q: Tensor, k: Tensor, v: Tensor, i: int, first: int) -> Tensor:  # queries i ... and keys first ...
        end, M = i + q.size(2), 0
        j = torch.arange(first, first + k.size(2), device=q.device)
        seen = ((j >= lo[..., i:end, None]) & (j < hi[..., i:end, None])).view(-1, 1, end - i, len(j))
        if mask.slopes is not None:
            distance = (torch.arange(S - T + i, S - T + end, device=q.device)[:, None] - j).abs()
            seen = (-mask.slopes[:, None, None] * distance).masked_fill(~seen, -math.inf).to(q.dtype)  # (B, H, t, s)
        if slots is not None:
            k, v, M = torch.cat((slots[0], k), dim=2), torch.cat((slots[1], v), dim=2), slots[0].size(2)
        return attend(q, k, v, attn_mask=F.pad(seen, (M, 0), value=mask.slopes is None))  # true, or 0.0

    out = []
    for i in range(0, T, rows):
        end = min(i + rows, T)
        first = max(0, S - T + i - W + 1) if W else 0
        last = S - T + end if mask.causal else min(S, S - T + end + W - 1) if W else S
        strips = q[:, :, i:end], k[:, :, first:last], v[:, :, first:last], i, first
        out.append(checkpoint(strip, *strips, use_reentrant=False) if torch.is_grad_enabled() else strip(*strips))
    return torch.cat(out, dim=2)


def naive_attention(
    head_dim: int, softcap: float, dropout: float, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor
) -> Tensor:
    """What the fused kernels lack: a softcap, and dropout on CPUs. Shapes as in mix; attn_mask (B, H, T, S) or 1s."""
    D, scale = head_dim, head_dim**-0.5
    q, k, v = q.unflatten(1, (k.size(1), -1)), k[:, :, None], v[:, :, None]  # (B, Hkv, G, t, E), (B, Hkv, 1, s, E)
    scores = capped(q[..., :D] @ k[..., :D].mT * scale, softcap) + q[..., D:] @ k[..., D:].mT * scale
    bias = torch.where(attn_mask, 0.0, -math.inf) if attn_mask.dtype == torch.bool else attn_mask
    weights = (at_least_float32(scores.flatten(1, 2)) + bias).softmax(-1).to(v.dtype)  # (B, H, t, s)
    return (F.dropout(weights, dropout).view_as(scores) @ v).flatten(1, 2)  # (B, H, t, E)


def uniform_mix(q: Tensor, k: Tensor, v: Tensor, head_dim: int, mask: Mask) -> Tensor:
    """What mix gives when q and k carry no content: the mean over the visible values, in O(T) unless positions weigh.

    With a position bias (columns beyond head_dim, slopes) it is the softmax of that alone. Shapes as in mix; k of H
    heads.
    """
    if q.size(-1) > head_dim or mask.slopes is not None:
        return mix(torch.cat((torch.zeros_like(q[..., :head_dim]), q[..., head_dim:]), dim=-1), k, v, head_dim, mask)
    T, S = q.size(2), k.size(2)
    if T == 1 and mask.causal:
        return v[:, :, -mask.window :].mean(dim=2, keepdim=True)
    total = at_least_float32(v).cumsum(dim=2)
    lo, hi = mask.reach(T, S, v.device)
    if mask.docs is None and not mask.window and mask.causal:
        return (total[:, :, S - T :] / hi[:, None]).to(v.dtype)
    total = F.pad(total, (0, 0, 1, 0))  # (B, H, S + 1, E): the sum of all values before a position
    ends = (x.view(-1, 1, T, 1).expand(len(v), v.size(1), T, v.size(3)) for x in (hi, lo))
    upper, lower = (total.gather(2, end) for end in ends)
    return ((upper - lower) / (hi - lo).view(-1, 1, T, 1)).to(v.dtype)


def capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap > 0 else x


def matmul_dtype(x: Tensor) -> torch.dtype:
    """What products with x are computed in."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ---------------------------------------------------------------------------------------------------------------------
# Layers


class FusedLinear(nn.Linear):
    """A linear layer whose weight stores several logical matrices side by side.

    `fused` = (dim, groups, sizes): along dim (0 rows, 1 columns) the weight is `groups` repetitions of pieces of
    `sizes`; piece n of all groups is logical matrix n. Optimizers that treat a matrix as a whole split by it; tensor
    parallelism can cut between groups.
    """

    def __init__(self, n_in: int, n_out: int, bias: bool, fused: tuple[int, int, tuple[int, ...]]):
        super().__init__(n_in, n_out, bias)
        self.fused = fused
        dim, groups, sizes = fused
        assert self.weight.size(dim) == groups * sum(sizes)


class NoCache:
    """Keys and values (B, Hkv, T, E) as they come; the slot that KVCache takes while decoding."""

    def __call__(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v


class KVCache:
    """Keys and values of the positions so far, in buffers allocated once: (B, Hkv, length, E)."""

    def __init__(self, length: int):
        self.length, self.end, self.k, self.v = length, 0, None, None

    def __call__(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.k is None:
            self.k, self.v = (x.new_empty(*x.shape[:2], self.length, x.size(3)) for x in (k, v))
        start, self.end = self.end, self.end + k.size(2)
        self.k[:, :, start : self.end], self.v[:, :, start : self.end] = k, v
        return self.k[:, :, : self.end], self.v[:, :, : self.end]


class At(NamedTuple):
    """What a block is told besides the stream: where its tokens stand and what they may see."""

    table: tuple[Tensor, ...] = ()  # of the positions, for q and k
    docs: tuple[Tensor, Tensor] | None = None  # document numbers of the queries and of the keys
    memory: Tensor | None = None  # (B, S, C), what the encoder made of the source
    memory_docs: tuple[Tensor, Tensor] | None = None  # document numbers of the queries and of the memory


class Heads(nn.Module):
    """softmax(q_h k_g(h)^T / sqrt(D)) v_g(h) over the context, after positions and the cache of decoding."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.head_dim, self.n_head, self.causal = cfg.head_dim, cfg.n_head, cfg.objective != "masked"
        self.window, self.softcap, self.dropout = cfg.layer_window(layer), cfg.attn_softcap, cfg.dropout
        self.q_norm, self.k_norm = (nn.RMSNorm(cfg.head_dim, 1e-5) if cfg.qk_norm else nn.Identity() for _ in range(2))
        self.rotate = POSITION[cfg.pos][1](cfg)
        self.cache = NoCache()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: At) -> Tensor:
        """q (B, H, T, D), k and v (B, heads, T, D) -> (B, T, C)."""
        q, k, v = self.rotate(self.q_norm(q), self.k_norm(k), v, at.table)
        k, v = self.cache(k, v)  # (B, heads, S, E)
        y = self.mix(q, k, v, Mask(self.causal, self.window, at.docs, self.rotate.slopes(at.table)))
        return y[..., : self.head_dim].transpose(1, 2).flatten(2)  # (B, H, T, E) -> (B, T, C)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, slots: tuple[Tensor, Tensor] | None = None) -> Tensor:
        return mix(q, k, v, self.head_dim, mask, self.softcap, self.dropout if self.training else 0.0, slots)

    def flops(self, T: int, S: int) -> int:
        """Forward matmul FLOPs of scores and weighted sum, counting all S keys as PaLM's appendix B does."""
        seen = self.window if self.causal else 2 * self.window - 1
        return 4 * T * self.n_head * self.head_dim * min(S, seen if self.window else S)


class SlotHeads(Heads):
    """Heads with M learned keys and values each under the same softmax: persistent memory (arXiv:1907.01470)."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__(cfg, layer)
        self.slot_k, self.slot_v = (nn.Parameter(torch.empty(cfg.kv_heads, cfg.slots, cfg.head_dim)) for _ in range(2))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        slots = self.rotate.slots(self.k_norm(self.slot_k), self.slot_v)  # each (Hkv, M, E)
        return super().mix(q, k, v, mask, tuple(x.to(k.dtype) for x in slots))

    def flops(self, T: int, S: int) -> int:
        return super().flops(T, S) + 4 * T * self.n_head * self.slot_k.size(1) * self.head_dim


class ShapedHeads(Heads):
    """(alpha_h I + beta_h softmax(q_h k_h^T / sqrt(D)) - gamma_h C) v_h (arXiv:2311.01906, equation 9; 2306.17759).

    C is the same attention without content, so that with W_Q = 0, as it starts, and gains of 1 this is the identity.
    Neither I nor C is ever a matrix.
    """

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__(cfg, layer)
        self.alpha, self.beta, self.gamma = (nn.Parameter(torch.empty(cfg.n_head)) for _ in range(3))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        k = k.repeat_interleave(v.size(1) // k.size(1), dim=1)  # values are chunks of the stream: one per query head
        alpha, beta, gamma = (gain[:, None, None].to(v.dtype) for gain in (self.alpha, self.beta, self.gamma))
        uniform = uniform_mix(q, k, v, self.head_dim, mask)
        return alpha * v[:, :, -q.size(2) :] + beta * super().mix(q, k, v, mask) - gamma * uniform


class CrossHeads(Heads):
    """Heads over a memory, which has no common order with the queries: no positions, no window, nothing hidden."""

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg, 0)
        self.causal, self.window, self.rotate = False, 0, Unrotated(cfg)


class Attention(nn.Module):
    """W_O heads(W_Q x, W_K x, W_V x): G = H / Hkv query heads share a key and a value."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        H, Hkv, D = cfg.n_head, cfg.kv_heads, cfg.head_dim
        self.split, self.head_dim, self.dropout = (H // Hkv, 1, 1), D, cfg.dropout
        self.qkv = FusedLinear(cfg.n_embd, (H + 2 * Hkv) * D, cfg.bias, (0, Hkv, (H // Hkv * D, D, D)))
        self.heads = Heads(cfg, layer)
        self.out = nn.Linear(cfg.n_embd, cfg.n_embd, cfg.bias)

    def forward(self, x: Tensor, at: At) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, sum(self.split), self.head_dim))  # (B, T, Hkv, G + 2, D)
        y = self.heads(*split_heads(qkv, self.split), at)
        return F.dropout(self.out(y), self.dropout, self.training)


def split_heads(x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """(B, T, groups, sum(sizes), D) -> for each size n, (B, groups * n, T, D)."""
    return tuple(part.flatten(2, 3).transpose(1, 2) for part in x.split(sizes, dim=3))


class ShapedAttention(nn.Module):
    """ShapedHeads on W_Q x and W_K x; values and output projection are the identity, or close to it where trained."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        H, Hkv, D = cfg.n_head, cfg.kv_heads, cfg.head_dim
        self.split, self.head_dim, self.dropout = (H // Hkv, 1), D, cfg.dropout
        self.qk = FusedLinear(cfg.n_embd, (H + Hkv) * D, cfg.bias, (0, Hkv, (H // Hkv * D, D)))
        trained = {"first": (layer == 0, False), "all": (True, True), "none": (False, False)}[cfg.simplified_value_proj]
        self.value, self.out = (NearIdentity(cfg.n_embd) if on else nn.Identity() for on in trained)
        self.heads = ShapedHeads(cfg, layer)

    def forward(self, x: Tensor, at: At) -> Tensor:
        qk = self.qk(x).unflatten(-1, (-1, sum(self.split), self.head_dim))  # (B, T, Hkv, G + 1, D)
        v = self.value(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, T, C) -> (B, H, T, D)
        y = self.heads(*split_heads(qk, self.split), v, at)
        return F.dropout(self.out(y), self.dropout, self.training)


class NearIdentity(nn.Linear):
    """skip x + resid W x with W = 0 at first: the reparametrised projections of arXiv:2311.01906, section 4."""

    def __init__(self, width: int):
        super().__init__(width, width, bias=False)
        self.skip, self.resid = (nn.Parameter(torch.empty(1)) for _ in range(2))
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.skip * self.same(x) + self.resid * super().forward(x)


@dataclass(frozen=True)
class Kind:
    """An MLP non-linearity: f maps its inputs, each (..., F), to (..., F)."""

    f: Callable[..., Tensor]
    inputs: int = 1


def squared_relu(x: Tensor) -> Tensor:
    r = F.relu(x)
    return r * r  # the backward of square() is slow


MLP_KIND = {
    "gelu": Kind(F.gelu),
    "relu": Kind(F.relu),
    "relu2": Kind(squared_relu),
    "swiglu": Kind(lambda gate, x: F.silu(gate) * x, inputs=2),
    "geglu": Kind(lambda gate, x: F.gelu(gate) * x, inputs=2),
}


class MLP(nn.Module):
    """W_down f(W_up x); gated kinds compute W_down (f(W_gate x) * W_up x) with gate and up in one weight, whose rows
    come in groups so that tensor parallelism can cut between them."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        kind, hidden, unit = MLP_KIND[cfg.mlp], cfg.hidden_dim, cfg.hidden_unit
        self.f, self.rows, self.dropout = kind.f, (unit,) * kind.inputs, cfg.dropout
        self.up = FusedLinear(cfg.n_embd, hidden * kind.inputs, cfg.bias, (0, hidden // unit, self.rows))
        self.down = nn.Linear(hidden, cfg.n_embd, cfg.bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.up(x).unflatten(-1, (-1, sum(self.rows))).split(self.rows, dim=-1)  # each (B, T, F / unit, unit)
        return F.dropout(self.down(self.f(*parts).flatten(2)), self.dropout, self.training)


class ContextPool(nn.Module):
    """Heads that take their q, k and v from one row group per key/value head."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        D, G = cfg.head_dim, cfg.n_head // cfg.kv_heads
        self.head_dim, self.rows, self.columns = D, (G * D, D, D), (G * D,)
        self.heads = (SlotHeads if cfg.slots else Heads)(cfg, layer)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: At) -> Tensor:
        """q (B, T, Hkv, G D), k and v (B, T, Hkv, D) -> (B, T, Hkv, G D)."""
        heads = (x.unflatten(-1, (-1, self.head_dim)).flatten(2, 3).transpose(1, 2) for x in (q, k, v))
        return self.heads(*heads, at).view(q.shape)


class MemoryPool(nn.Module):
    """Cross-attention: heads that take q from the stream, k and v from what the encoder made of the source."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        D, Hkv, G = cfg.head_dim, cfg.kv_heads, cfg.n_head // cfg.kv_heads
        self.head_dim, self.rows, self.columns = D, (G * D,), (G * D,)
        self.kv = FusedLinear(cfg.n_embd, 2 * Hkv * D, cfg.bias, (0, Hkv, (D, D)))
        self.heads = CrossHeads(cfg)
        self.recall = afresh

    def forward(self, q: Tensor, at: At) -> Tensor:
        """q (B, T, Hkv, G D) -> (B, T, Hkv, G D)."""
        heads = q.unflatten(-1, (-1, self.head_dim)).flatten(2, 3).transpose(1, 2)  # (B, H, T, D)
        kv = self.recall(self.kv, at.memory).unflatten(-1, (q.size(2), 2, -1))  # (B, S, Hkv, 2, D)
        return self.heads(heads, *split_heads(kv, (1, 1)), at._replace(docs=at.memory_docs)).view(q.shape)


def afresh(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """f(x); the slot that Once takes while decoding."""
    return f(x)


class Once:
    """f(x) of the first call, for all calls."""

    def __init__(self):
        self.result = None

    def __call__(self, f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.result is None:
            self.result = f(x)
        return self.result


class ParameterPool(nn.Module):
    """The MLP between its two matrices, cut into one slice of F / Hkv hidden units per key/value head."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        kind, width = MLP_KIND[cfg.mlp], cfg.hidden_dim // cfg.kv_heads
        self.f, self.rows, self.columns = kind.f, (width,) * kind.inputs, (width,)

    def forward(self, *x_and_at) -> Tensor:
        return self.f(*x_and_at[:-1])  # each (B, T, Hkv, F / Hkv)


class Pools(nn.Module):
    """W_out [ y_1 ; y_2 ], where the pools' heads read y from W_in x: one matrix in, one out.

    Rows and columns come in Hkv groups, each with the query heads, the key, the value and the slice of the MLP that
    belong together, so that tensor parallelism cuts between groups.
    """

    def __init__(self, cfg: ModelConfig, *pools: nn.Module):
        super().__init__()
        self.pools, self.dropout = nn.ModuleList(pools), cfg.dropout
        rows, columns = (sum((getattr(pool, side) for pool in pools), ()) for side in ("rows", "columns"))
        groups = cfg.kv_heads
        self.into = FusedLinear(cfg.n_embd, groups * sum(rows), cfg.bias, (0, groups, rows))
        self.out = FusedLinear(groups * sum(columns), cfg.n_embd, cfg.bias, (1, groups, columns))

    def forward(self, x: Tensor, at: At) -> Tensor:
        rows = self.into.fused[2]
        parts = iter(self.into(x).unflatten(-1, (-1, sum(rows))).split(rows, dim=-1))
        y = [pool(*(next(parts) for _ in pool.rows), at) for pool in self.pools]  # each (B, T, Hkv, columns)
        return F.dropout(self.out(torch.cat(y, dim=-1).flatten(2)), self.dropout, self.training)


class CrossBranch(nn.Module):
    """s = s + X(n(s)), X the cross-attention of a decoder to its encoder's memory."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.norm, self.attn = Norms(cfg), Pools(cfg, MemoryPool(cfg))

    def forward(self, s: Tensor, at: At) -> Tensor:
        n = self.norm
        return n.total(s + n.after(self.attn(n.before(s), at)))


class NoCross(nn.Module):
    """s as it is: there is no encoder."""

    def forward(self, s: Tensor, at: At) -> Tensor:
        return s


def cross_branch(cfg: ModelConfig) -> nn.Module:
    return CrossBranch(cfg) if cfg.objective == "seq2seq" else NoCross()


class StandardBlock(nn.Module):
    """s = s + A(n1(s));  s = s + M(n2(s)), shown for pre-norm; Norms puts the others in their places."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.norm_attn, self.attn = Norms(cfg), Attention(cfg, layer)
        self.cross = cross_branch(cfg)
        self.norm_mlp, self.mlp = Norms(cfg), MLP(cfg)

    def forward(self, s: Tensor, at: At) -> Tensor:
        n1, n2 = self.norm_attn, self.norm_mlp
        s = n1.total(s + n1.after(self.attn(n1.before(s), at)))
        s = self.cross(s, at)
        return n2.total(s + n2.after(self.mlp(n2.before(s))))


class ParallelBlock(nn.Module):
    """s = s + A(n(s)) + M(n(s)), one shared norm (GPT-J; PaLM, arXiv:2204.02311)."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.cross = cross_branch(cfg)
        self.norm, self.attn, self.mlp = Norms(cfg), Attention(cfg, layer), MLP(cfg)

    def forward(self, s: Tensor, at: At) -> Tensor:
        n, s = self.norm, self.cross(s, at)
        x = n.before(s)
        return n.total(s + n.after(self.attn(x, at) + self.mlp(x)))


class SimplifiedBlock(nn.Module):
    """s = g_A SA(n1(s));  s = g_S s + b_FF M(n2(s)): no skip around attention (SAS, arXiv:2311.01906)."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.norm_attn, self.attn = first_norms(cfg, layer), ShapedAttention(cfg, layer)
        self.cross = cross_branch(cfg)
        self.norm_mlp, self.mlp = Norms(cfg), MLP(cfg)
        self.g_attn, self.g_skip, self.b_ff = (nn.Parameter(torch.empty(1)) for _ in range(3))

    def forward(self, s: Tensor, at: At) -> Tensor:
        n1, n2 = self.norm_attn, self.norm_mlp
        s = n1.total(self.g_attn * n1.after(self.attn(n1.before(s), at)))
        s = self.cross(s, at)
        return n2.total(self.g_skip * s + self.b_ff * n2.after(self.mlp(n2.before(s))))


class SimplifiedParallelBlock(nn.Module):
    """s = g_A SA(n(s)) + b_FF M(n(s)): no skip at all (SAS-P, arXiv:2311.01906)."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.cross = cross_branch(cfg)
        self.norm, self.attn, self.mlp = first_norms(cfg, layer), ShapedAttention(cfg, layer), MLP(cfg)
        self.g_attn, self.b_ff = (nn.Parameter(torch.empty(1)) for _ in range(2))

    def forward(self, s: Tensor, at: At) -> Tensor:
        n, s = self.norm, self.cross(s, at)
        x = n.before(s)
        return n.total(n.after(self.g_attn * self.attn(x, at) + self.b_ff * self.mlp(x)))


def first_norms(cfg: ModelConfig, layer: int) -> Norms:
    """A simplified network without norms keeps one, at the first layer's input."""
    norms = Norms(cfg)
    if layer == 0 and (cfg.norm == "none" or cfg.norm_placement == "none"):
        norms.before = nn.LayerNorm(cfg.n_embd, bias=cfg.bias)
    return norms


class GroupedLinear(nn.Linear):
    """n independent linear maps: (..., n, i) -> (..., n, o), with the weights (n o, i) below one another.

    Each map holds `matrices` logical matrices, such as the gate and the values of a gated MLP, one below the other.
    """

    def __init__(self, groups: int, n_in: int, n_out: int, bias: bool, matrices: int = 1):
        super().__init__(n_in // groups, n_out, bias)
        self.fused = (0, 1, (n_out // groups // matrices,) * groups * matrices)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("...gi,goi->...go", x, self.weight.unflatten(0, (x.size(-2), -1)))
        return y if self.bias is None else y + self.bias.view(y.shape[-2:])


class GroupedMLP(nn.Module):
    """An MLP in n_group independent groups: each reads and writes its own C / n channels."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        kind, self.groups, self.dropout = MLP_KIND[cfg.mlp], cfg.n_group, cfg.dropout
        self.f, self.inputs = kind.f, kind.inputs
        self.up = GroupedLinear(cfg.n_group, cfg.n_embd, cfg.hidden_dim * kind.inputs, cfg.bias, kind.inputs)
        self.down = GroupedLinear(cfg.n_group, cfg.hidden_dim, cfg.n_embd, cfg.bias)

    def forward(self, x: Tensor, at: At) -> Tensor:
        h = self.up(x.unflatten(-1, (self.groups, -1))).chunk(self.inputs, dim=-1)  # each (B, T, n, F / n)
        return F.dropout(self.down(self.f(*h)).flatten(2), self.dropout, self.training)


class Superblock(nn.Module):
    """s = s + W_out [ heads over the context ; f(W_in n(s)) ]: one norm, one matrix in, one matrix out.

        s --+-- n -- W_in --+-- q, k, v -- heads --+-- W_out -- + --> s      wiring=parallel
            |               +-- hidden --- f ------+           |
            +--------------------------------------------------+

    wiring=series gives each pool its own norm and sum, one after the other: the standard block. pool=joint puts learned
    slots under the heads' softmax instead of the MLP. The memory of an encoder is one more pool.
    """

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        pools = [ContextPool(cfg, layer)] + ([MemoryPool(cfg)] if cfg.objective == "seq2seq" else [])
        if cfg.pool == "separate" and cfg.n_group == 1:
            pools.append(ParameterPool(cfg))
        readers = [Pools(cfg, *pools)] if cfg.wiring == "parallel" else [Pools(cfg, pool) for pool in pools]
        if cfg.pool == "separate" and cfg.n_group > 1:
            readers.append(GroupedMLP(cfg))
        sums = [readers] if cfg.wiring == "parallel" else [[reader] for reader in readers]
        self.norms = nn.ModuleList(Norms(cfg) for _ in sums)
        self.readers = nn.ModuleList(nn.ModuleList(each) for each in sums)

    def forward(self, s: Tensor, at: At) -> Tensor:
        for n, readers in zip(self.norms, self.readers, strict=True):
            x = n.before(s)
            s = n.total(s + n.after(sum(reader(x, at) for reader in readers)))
        return s


BLOCK = {
    "standard": StandardBlock,
    "parallel": ParallelBlock,
    "simplified": SimplifiedBlock,
    "simplified_parallel": SimplifiedParallelBlock,
    "superblock": Superblock,
}


# ---------------------------------------------------------------------------------------------------------------------
# Loss


def rows_at_once(cfg: ModelConfig, vocab_size: int) -> int:
    """Tokens whose logits exist at once in the loss: loss_chunk, or as many as fit in 128 MiB of float32."""
    fit = max(1, 2**25 // vocab_size)
    return cfg.loss_chunk or (fit if fit < 128 else fit // 128 * 128)  # matmuls like multiples of 128


def chunk_loss(logits: Tensor, targets: Tensor, softcap: float, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Sum of cross entropies over targets >= 0, (N,), and what it changes by with the logits, (N, V)."""
    valid, index = (targets >= 0)[:, None], targets.clamp(min=0)[:, None]
    z = capped(at_least_float32(logits), softcap)
    log_p = z.log_softmax(-1)
    total = -(log_p.gather(1, index) * valid).sum()
    if not gradient:
        return total, None
    p, slope = log_p.exp_(), 1 - (z / softcap).square() if softcap > 0 else 1.0
    if torch.compiler.is_compiling():  # fuses with the rest; a scatter would need p as a tensor
        p = p - (torch.arange(z.size(1), device=z.device) == index).to(p.dtype)
    else:
        p.scatter_add_(1, index, torch.full_like(index, -1, dtype=p.dtype))
    return total, p.mul_(valid * slope).to(logits.dtype)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of cross entropies of x W^T, without its (N, V) logits: the forward computes the gradient, chunk by chunk.

    of_chunk is chunk_loss, perhaps compiled. The gradients are kept unscaled until the backward, so that a gradient
    scaler protects them in float16.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, targets: Tensor, softcap: float, chunk: int, of_chunk: Callable
    ) -> Tensor:
        dtype = matmul_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            W = weight.to(dtype)
            dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
            dW = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
            total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
            for start in range(0, x.size(0), chunk):
                rows = slice(start, start + chunk)
                h = x[rows].to(dtype)
                part, p = of_chunk(h @ W.mT, targets[rows], softcap, dx is not None or dW is not None)
                total += part
                if dx is not None:
                    dx[rows] = p @ W
                if dW is not None:
                    dW += p.mT @ h
        ctx.save_for_backward(dx, dW)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        dx, dW = (None if g is None else g * grad for g in ctx.saved_tensors)
        return dx, dW, None, None, None, None


# ---------------------------------------------------------------------------------------------------------------------
# Initial weights


def hashed(x: Tensor) -> Tensor:
    """splitmix64's finaliser, in place: a bijection of int64 that changes half of the bits for each bit changed."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)  # products wrap around
    return x.bitwise_xor_((x >> 31).bitwise_and_(2**33 - 1))


def normal(
    key: str, shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...], device: torch.device
) -> Tensor:
    """float32 numbers from N(0, 1): the part that begins at `start` and has `size` of an array of `shape`.

    A number depends on the key and on its place in the array alone. Its hash gives two uniform numbers of 32 bits, from
    which Box and Muller's formula makes a normal one; in float64, whose last digits differ between devices, so that the
    float32 hardly ever does.
    """
    first = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little", signed=True)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    place = torch.full((), first, dtype=torch.int64, device=device)
    for dim in range(1, len(shape)):
        place = place[..., None] + strides[dim] * torch.arange(start[dim], start[dim] + size[dim], device=device)
    out = torch.empty(size, device=device)
    rows = max(1, 2**16 // max(1, place.numel()))  # at once, so that the hashes stay in the cache
    for part, row in zip(out.split(rows), torch.arange(size[0], device=device).split(rows), strict=True):
        index = (start[0] + row).mul_(strides[0]).view(-1, *[1] * place.dim()) + place
        bits = hashed(index.mul_(-0x61C8864680B583EB))
        radius = ((bits >> 32).bitwise_and_(2**32 - 1).to(torch.float64) + 0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
        part.copy_(bits.bitwise_and_(2**32 - 1).to(torch.float64).mul_(math.tau * 2.0**-32).cos_().mul_(radius))
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Model


class Encoder(nn.Module):
    """The blocks over a source, which see it whole; then the final norm."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        cfg = replace(cfg, objective="masked", n_layer=cfg.n_encoder_layer or cfg.n_layer)
        self.rotate = POSITION[cfg.pos][1](cfg)
        self.blocks = nn.ModuleList(BLOCK[cfg.block](cfg, layer) for layer in range(cfg.n_layer))
        self.norm = norm_at(cfg, 3)

    def forward(self, x: Tensor, t: Tensor, docs: Tensor | None) -> Tensor:
        """x (B, S, C) at positions t (S,), document numbers (B, S) -> (B, S, C)."""
        at = At(self.rotate.table(t, x.dtype), None if docs is None else (docs, docs))
        for block in self.blocks:
            x = block(x, at)
        return self.norm(x)


VOCAB_WEIGHTS = ("wte.weight", "head.weight")  # parameters with a row for each token id, padding included


class Model(nn.Module):
    """Token ids in, loss or logits out; see the module's docstring.

    seed is that of the initial weights; None draws one from torch's global generator.
    """

    def __init__(self, cfg: ModelConfig, seed: int | None = None):
        super().__init__()
        require(cfg.vocab_size > 0, "vocab_size=0 means the data's, and here there is no data; set vocab_size")
        self.cfg = cfg
        embedding, rotation = POSITION[cfg.pos]
        self.wte = nn.Embedding(cfg.vocab_rows, cfg.n_embd)
        self.pos = embedding(cfg)
        self.rotate = rotation(cfg)
        self.blocks = nn.ModuleList(BLOCK[cfg.block](cfg, layer) for layer in range(cfg.n_layer))
        self.norm = norm_at(cfg, 3)
        self.head = nn.Linear(cfg.n_embd, cfg.vocab_rows, bias=False)
        self.encoder = Encoder(cfg) if cfg.objective == "seq2seq" else None
        self.chunk_loss = chunk_loss
        self.tie()
        if not self.wte.weight.is_meta:
            self.init_weights(int(torch.randint(2**62, (), device="cpu")) if seed is None else seed)

    def tie(self):
        """Make head and embedding one parameter again; to be called after whatever replaces parameters."""
        if self.cfg.tie_weights:
            self.head.weight = self.wte.weight

    @torch.no_grad()
    def init_weights(self, seed: int):
        for name, p in self.named_parameters():
            p.copy_(self.initial_weight(name, seed, p.shape, (0,) * p.dim(), p.shape, p.device))

    def initial_weight(
        self, name: str, seed: int, shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...], device
    ) -> Tensor:
        """Initial values of the part of parameter `name` that begins at `start` and has `size`, where `shape` is that
        of the whole parameter: a function of the seed, the name and the place in the whole, however it is cut.

        They follow nanoGPT, and He and Hofmann for simplified blocks:

        parameter                          initial value
        embeddings, head, linear           N(0, 0.02)
        what is added to the stream        N(0, 0.02 / sqrt(n)) for n summands: they do not make its variance grow
        slots                              N(0, 0.02 sqrt(C)), like the keys and values of a normalised stream
        simplified: W_Q, NearIdentity W    0
        simplified: b_FF, resid of all     simplified_beta_ff, 0.2
        biases; norms and other gains      0; 1
        """
        cfg = self.cfg
        layer, _, kind = name.rpartition(".")
        module, simplified = self.get_submodule(layer), cfg.block.startswith("simplified")
        if len(shape) == 1:
            constants = {"bias": 0.0, "b_ff": cfg.simplified_beta_ff}
            constants["resid"] = 0.2 if cfg.simplified_value_proj == "all" else 1.0
            return torch.full(size, constants.get(kind, 1.0), device=device)
        if isinstance(module, NearIdentity):
            return torch.zeros(size, device=device)
        std = 0.02
        if kind in ("slot_k", "slot_v"):
            std *= math.sqrt(cfg.n_embd)
        elif name.endswith(("out.weight", "down.weight")) and not simplified:
            summands = (3 if self.encoder else 2) * cfg.n_layer
            std /= math.sqrt(2 * (cfg.n_encoder_layer or cfg.n_layer) if name.startswith("encoder") else summands)
        value = std * normal(f"{seed} {name}", shape, start, size, device)
        if layer.endswith(".qk"):
            _, _, sizes = module.fused
            row = torch.arange(start[0], start[0] + size[0], device=device) % sum(sizes)
            value[row < sizes[0]] = 0
        return value

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        docs: Tensor | None = None,
        source: Tensor | None = None,
        source_docs: Tensor | None = None,
    ) -> Tensor:
        """idx (B, T) -> logits (B, T, V) float32; with targets (B, T), the mean loss in nats over targets >= 0.

        docs (B, T) and source_docs (B, S) are document numbers that do not fall along a row; each number in docs must
        also be in source_docs. source (B, S) is what the encoder of a seq2seq model reads, and only of such a one.
        """
        together = source is None or (docs is None) == (source_docs is None)
        require(together, "docs and source_docs go together; give zeros to the one that is a single document")
        x = self.hidden(idx, 0, docs, self.encode(source, source_docs), source_docs)
        return self.logits(x) if targets is None else self.loss(x, targets)

    def encode(self, source: Tensor | None, docs: Tensor | None = None) -> Tensor | None:
        """source (B, S) -> the encoder's memory of it, (B, S, C); nothing, where there is no encoder."""
        given, wanted = source is not None, self.encoder is not None
        require(given == wanted, f"objective={self.cfg.objective} {'needs a' if wanted else 'reads no'} source")
        return self.encoder(*self.embed(source, 0, docs), docs) if given else None

    def embed(self, idx: Tensor, start: int, docs: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """idx (B, T) that begins at position start, document numbers (B, T) -> the stream (B, T, C), positions (T,)."""
        T, limit = idx.size(1), self.cfg.block_size
        require(start + T <= limit, f"a sequence of {start + T} tokens does not fit in block_size={limit}; crop it")
        t = torch.arange(start, start + T, device=idx.device)
        place = t
        if docs is not None and self.cfg.doc_positions:
            docs = docs.contiguous()
            place = t - torch.searchsorted(docs, docs)  # (B, T), from the first token of its document
        return F.dropout(self.pos(self.wte(idx), place), self.cfg.dropout, self.training), t

    def hidden(
        self,
        idx: Tensor,
        start: int = 0,
        docs: Tensor | None = None,
        memory: Tensor | None = None,
        memory_docs: Tensor | None = None,
    ) -> Tensor:
        """idx (B, T), its first token at position start -> the stream that the head reads, (B, T, C)."""
        x, t = self.embed(idx, start, docs)
        both = None if docs is None else (docs, docs)
        at = At(self.rotate.table(t, x.dtype), both, memory, None if docs is None else (docs, memory_docs))
        for block in self.blocks:
            x = block(x, at)
        return self.norm(x)

    def head_weight(self) -> Tensor:
        """(V, C): the head without its padding rows."""
        W, V = self.head.weight, self.cfg.vocab_size
        return W if len(W) == V else W[:V]

    def logits(self, x: Tensor) -> Tensor:
        """The stream x (..., C) behind the last norm -> (..., V) in float32."""
        return capped(at_least_float32(F.linear(x, self.head_weight())), self.cfg.logit_softcap)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        x, targets = x.flatten(0, 1), targets.flatten()  # (N, C), (N,)
        chunk = rows_at_once(self.cfg, self.cfg.vocab_size)
        if x.size(0) <= chunk:
            total = F.cross_entropy(self.logits(x), targets, ignore_index=-1, reduction="sum")
        else:
            total = ChunkedCrossEntropy.apply(
                x, self.head_weight(), targets, self.cfg.logit_softcap, chunk, self.chunk_loss
            )
        return total / (targets >= 0).sum().clamp(min=1)

    # ---- decoding

    @contextmanager
    def caching(self, length: int):
        """While inside, heads keep the keys and values of `length` tokens, and of the memory; yields a function that
        forgets them."""
        heads = [m for m in self.modules() if isinstance(m, Heads) and m.causal]
        pools = [m for m in self.modules() if isinstance(m, MemoryPool)]

        def fill(make_cache: Callable, make_recall: Callable):
            for each in heads:
                each.cache = make_cache()
            for pool in pools:
                pool.recall = make_recall()

        forget = partial(fill, lambda: KVCache(length), Once)
        forget()
        try:
            yield forget
        finally:
            fill(NoCache, lambda: afresh)

    @torch.no_grad()
    def generate(
        self, idx: Tensor, max_new_tokens: int, choose: Callable[[Tensor], Tensor], source: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Continues idx (B, T): yields max_new_tokens times the next tokens (B,), chosen by choose from logits (B, V).

        A token costs one cached step while the text fits in block_size. Beyond it the context is the last block_size
        tokens, as in nanoGPT: every position has moved, so each token costs one forward of the whole context.
        """
        require(self.cfg.objective != "masked", "objective=masked does not continue a text; it fills blanks in one")
        memory = self.encode(source)
        with self.caching(min(self.cfg.block_size, idx.size(1) + max_new_tokens)) as forget:
            seen = 0
            for _ in range(max_new_tokens):
                if idx.size(1) > self.cfg.block_size:
                    idx, seen = idx[:, -self.cfg.block_size :], 0
                    forget()
                x = self.hidden(idx[:, seen:], start=seen, memory=memory)
                seen = idx.size(1)
                token = choose(self.logits(x[:, -1:])[:, 0])
                yield token
                idx = torch.cat((idx, token[:, None]), dim=1)

    # ---- accounting

    def n_params(self) -> int:
        """Trainable numbers, a tied head counted once."""
        return sum(p.numel() for p in self.parameters())

    def flops(self, T: int, source: int = 0) -> int:
        """Matmul FLOPs of forward and backward of a sequence of T tokens and its source: 6 per token and weight that is
        multiplied (the head always, lookups never) plus the attention's, thrice its forward (PaLM, appendix B)."""
        total = 0
        for name, m in self.named_modules():
            queries = source if name.startswith("encoder.") else T
            keys = source if isinstance(m, CrossHeads) else queries
            if isinstance(m, nn.Linear):
                total += 6 * m.weight.numel() * (source if name.endswith(".kv") else queries)
            elif isinstance(m, Heads):
                total += 3 * m.flops(queries, keys)
        return total
