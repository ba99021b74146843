"""The whole model: every design axis of the transformer is one flat flag, one table and one no-op default.

    from model import Model, ModelConfig
    model = Model(ModelConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=65, pos="rope"))
    loss = model(idx, targets)        # idx, targets (B, T) int64; targets of -1 are left out
    logits = model(idx)               # (B, T, V)

To try an idea, add an entry to one of the tables (NORM, PLACEMENT, POSITION, MLP_KIND, BLOCK) and its name to the
flag's Literal: the grid test walks the tables, so the new entry is tested without writing a test.

Names used everywhere
    B batch   T time (queries)   S keys   C n_embd   V vocabulary   L layers   F hidden width of the MLP
    H query heads   Hkv key/value heads   G = H / Hkv query heads of one group   D = C / H head size
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

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
    # --- model: loss
    logit_softcap: float = 0.0  # c tanh(logits / c), 0 = off
    loss_chunk: int = 0  # tokens whose logits exist at once in the loss; 0 = as many as fit in 128 MiB

    def __post_init__(self):
        positive = "n_layer n_head n_embd block_size n_group"
        not_negative = "vocab_size n_kv_head n_slot window loss_chunk attn_softcap logit_softcap"
        for names, least in ((positive, 1), (not_negative, 0)):
            for name in names.split():
                value = getattr(self, name)
                require(least <= value < 2**31, f"{name}={value} must be at least {least} and below {2**31}")
        H, C = self.n_head, self.n_embd
        require(
            C % H == 0, f"n_embd={C} is not divisible by n_head={H}; set n_embd to a multiple such as {-(-C // H) * H}"
        )
        require(0 <= self.dropout < 1, f"dropout={self.dropout} must be in [0, 1)")
        require(self.mlp_ratio > 0, f"mlp_ratio={self.mlp_ratio} must be positive")
        require(self.rope_theta > 0, f"rope_theta={self.rope_theta} must be positive")
        require(C % self.n_group == 0, f"n_group={self.n_group} does not divide n_embd={C}; set n_group to a divisor")
        divisors = [n for n in range(1, H + 1) if H % n == 0]
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
    def hidden_dim(self) -> int:
        """F: mlp_ratio * C, of gated kinds 2/3 of that, rounded to a multiple of 64 where C is one."""
        width = self.mlp_ratio * self.n_embd * (2 / 3 if MLP_KIND[self.mlp].inputs == 2 else 1)
        unit = 64 if self.n_embd % 64 == 0 else 1
        width = max(unit, round(width / unit) * unit)
        # in a superblock each key/value head, or each group, takes its slice
        slices = math.lcm(self.kv_heads, self.n_group) if self.block == "superblock" else 1
        return -(-width // slices) * slices

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
# Positions: what is added to the embedding, and what is done to q, k and v. t (T,) holds the absolute positions.


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
        angle = outer_angles(t, C, 10000.0)  # (T, C/2)
        return x * math.sqrt(C) + torch.cat((angle.sin(), angle.cos()), dim=-1).to(x.dtype)


def outer_angles(t: Tensor, width: int, theta: float) -> Tensor:
    """t_i * theta^(-2j/width): (T,) -> (T, width/2), in float64 so that far positions keep their phase."""
    frequency = theta ** (-torch.arange(0, width, 2, device=t.device, dtype=ANGLE[t.device.type]) / width)
    return t.to(frequency.dtype)[:, None] * frequency


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


def alibi_slopes(n_head: int, device: torch.device | str = "cpu") -> Tensor:
    """(H,) slopes 2^(-8i/H), i = 1..H; if H is no power of two, those of the power p below, then every other of 2p."""
    p = 2 ** int(math.log2(n_head))
    i = torch.arange(n_head, device=device)
    return torch.exp2(-8 * torch.where(i < p, (i + 1) / p, (2 * (i - p) + 1) / (2 * p)))


POSITION = {  # flag -> (added to the embedding, done to q, k and v)
    "learned": (LearnedEmbedding, Unrotated),
    "sinusoidal": (SinusoidalEmbedding, Unrotated),
    "rope": (NoEmbedding, Rope),
    "alibi": (NoEmbedding, Alibi),
    "none": (NoEmbedding, Unrotated),
}


# ---------------------------------------------------------------------------------------------------------------------
# mix(q; K, V): every score goes through a fused kernel or through strips of queries, never through a (T, S) matrix


def mix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_dim: int,
    window: int = 0,
    softcap: float = 0.0,
    dropout: float = 0.0,
    slots: int = 0,
) -> Tensor:
    """Causal attention softmax(cap(q k^T / sqrt(D))) v of T queries that are the last T of S positions.

    q (B, H, T, E), k and v (B, Hkv, slots + S, E), E >= D = head_dim: columns beyond D carry a position bias, which a
    softcap leaves alone. The first `slots` keys have no position and are always visible. T is S (training, prompt) or 1
    (decoding). Returns (B, H, T, E).
    """
    T, S = q.size(2), k.size(2) - slots
    if T == 1 and 0 < window < S:
        k, v, window = visible(k, S - window, S, slots), visible(v, S - window, S, slots), 0
    fused = softcap == 0 and (dropout == 0 or q.device.type != "cpu")  # the CPU's fused kernel knows no dropout
    sdpa = partial(
        F.scaled_dot_product_attention, scale=head_dim**-0.5, dropout_p=dropout, enable_gqa=q.size(1) != k.size(1)
    )
    if fused and 0 < window < T and slots == 0:
        return window_attention(sdpa, q, k, v, window)
    if fused and (slots == 0 or T == 1):
        return sdpa(q, k, v, is_causal=T > 1)
    return strip_attention(
        sdpa if fused else partial(naive_attention, head_dim, softcap, dropout), q, k, v, window, slots
    )


def visible(x: Tensor, start: int, end: int, slots: int) -> Tensor:
    """The slots and positions start .. end of keys or values x (B, Hkv, slots + S, E)."""
    part = x[:, :, slots + start : slots + end]
    return torch.cat((x[:, :, :slots], part), dim=2) if slots else part


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


def strip_attention(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, window: int, slots: int, rows: int = 128
) -> Tensor:
    """Attention in strips of queries, recomputed in the backward: any mask and score function in O(rows S) memory."""
    T, S = q.size(2), k.size(2) - slots

    def strip(q: Tensor, k: Tensor, v: Tensor, ahead: int) -> Tensor:  # its first query is position `ahead` of the keys
        i, j = (
            torch.arange(ahead, ahead + q.size(2), device=q.device)[:, None],
            torch.arange(k.size(2), device=q.device),
        )
        distance = i - (j - slots)  # (t, s), negative = the future
        return attend(q, k, v, attn_mask=(j < slots) | (distance >= 0) & (distance < (window or S)))

    out = []
    for i in range(0, T, rows):
        end = min(i + rows, T)
        first = max(0, S - T + i - window + 1) if window else 0
        strips = q[:, :, i:end], *(visible(x, first, S - T + end, slots) for x in (k, v)), S - T + i - first
        out.append(checkpoint(strip, *strips, use_reentrant=False) if torch.is_grad_enabled() else strip(*strips))
    return torch.cat(out, dim=2)


def naive_attention(
    head_dim: int, softcap: float, dropout: float, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor
) -> Tensor:
    """What the fused kernels lack: a softcap, and dropout on CPUs. Shapes as in mix; attn_mask (T, S)."""
    D = head_dim
    q, k, v = q.unflatten(1, (k.size(1), -1)), k[:, :, None], v[:, :, None]  # (B, Hkv, G, t, E), (B, Hkv, 1, s, E)
    scores = capped(q[..., :D] @ k[..., :D].mT * D**-0.5, softcap)
    scores = at_least_float32(scores + q[..., D:] @ k[..., D:].mT * D**-0.5)  # (B, Hkv, G, t, s)
    weights = scores.masked_fill(~attn_mask, -math.inf).softmax(-1).to(v.dtype)
    return (F.dropout(weights, dropout) @ v).flatten(1, 2)  # (B, H, t, E)


def uniform_mix(q: Tensor, k: Tensor, v: Tensor, head_dim: int, window: int = 0) -> Tensor:
    """What mix gives when q and k carry no content: the mean over the visible values, in O(T) unless positions weigh.

    With a position bias (columns beyond head_dim) it is the softmax of that alone. Shapes as in mix; k of H heads.
    """
    if q.size(-1) > head_dim:
        return mix(torch.cat((torch.zeros_like(q[..., :head_dim]), q[..., head_dim:]), dim=-1), k, v, head_dim, window)
    T, S = q.size(2), k.size(2)
    if T == 1:
        return v[:, :, -window:].mean(dim=2, keepdim=True)
    total = at_least_float32(v).cumsum(dim=2)
    count = torch.arange(1, S + 1, device=v.device, dtype=total.dtype)
    if 0 < window < S:
        total = torch.cat((total[:, :, :window], total[:, :, window:] - total[:, :, :-window]), dim=2)
        count = count.clamp(max=window)
    return (total / count[:, None]).to(v.dtype)


def capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap > 0 else x


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


class Heads(nn.Module):
    """softmax(q_h k_g(h)^T / sqrt(D)) v_g(h) over the context, after positions and the cache of decoding.

    With slots (a joint pool) each key/value head also has M learned keys and values under the same softmax.
    """

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.head_dim, self.n_head = cfg.head_dim, cfg.n_head
        self.window, self.softcap, self.dropout = cfg.layer_window(layer), cfg.attn_softcap, cfg.dropout
        self.q_norm, self.k_norm = (nn.RMSNorm(cfg.head_dim, 1e-5) if cfg.qk_norm else nn.Identity() for _ in range(2))
        self.rotate = POSITION[cfg.pos][1](cfg)
        self.cache = NoCache()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: tuple[Tensor, ...]) -> Tensor:
        """q (B, H, T, D), k and v (B, heads, T, D) -> (B, T, C)."""
        q, k, v = self.rotate(self.q_norm(q), self.k_norm(k), v, table)
        k, v = self.cache(k, v)  # (B, heads, S, E)
        return self.mix(q, k, v)[..., : self.head_dim].transpose(1, 2).flatten(2)  # (B, H, T, E) -> (B, T, C)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, slots: int = 0) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return mix(q, k, v, self.head_dim, self.window, self.softcap, dropout, slots)

    def flops_per_token(self, T: int) -> int:
        """Forward matmul FLOPs of scores and weighted sum, counting all T keys as PaLM's appendix B does."""
        return 4 * self.n_head * self.head_dim * min(T, self.window or T)


class SlotHeads(Heads):
    """Heads with M learned keys and values each that stand before the context: persistent memory (arXiv:1907.01470)."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__(cfg, layer)
        self.slot_k, self.slot_v = (nn.Parameter(torch.empty(cfg.kv_heads, cfg.slots, cfg.head_dim)) for _ in range(2))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slots = self.rotate.slots(self.k_norm(self.slot_k), self.slot_v)  # each (Hkv, M, E)
        k, v = (
            torch.cat((x.to(y.dtype).expand(len(y), -1, -1, -1), y), dim=2) for x, y in zip(slots, (k, v), strict=True)
        )
        return super().mix(q, k, v, self.slot_k.size(1))

    def flops_per_token(self, T: int) -> int:
        return super().flops_per_token(T) + 4 * self.n_head * self.slot_k.size(1) * self.head_dim


class ShapedHeads(Heads):
    """(alpha_h I + beta_h softmax(q_h k_h^T / sqrt(D)) - gamma_h C) v_h (arXiv:2311.01906, equation 9; 2306.17759).

    C is the same attention without content, so that with W_Q = 0, as it starts, and gains of 1 this is the identity.
    Neither I nor C is ever a matrix.
    """

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__(cfg, layer)
        self.alpha, self.beta, self.gamma = (nn.Parameter(torch.empty(cfg.n_head)) for _ in range(3))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k.repeat_interleave(v.size(1) // k.size(1), dim=1)  # values are chunks of the stream: one per query head
        alpha, beta, gamma = (gain[:, None, None].to(v.dtype) for gain in (self.alpha, self.beta, self.gamma))
        uniform = uniform_mix(q, k, v, self.head_dim, self.window)
        return alpha * v[:, :, -q.size(2) :] + beta * super().mix(q, k, v) - gamma * uniform


class Attention(nn.Module):
    """W_O heads(W_Q x, W_K x, W_V x): G = H / Hkv query heads share a key and a value."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        H, Hkv, D = cfg.n_head, cfg.kv_heads, cfg.head_dim
        self.split, self.head_dim, self.dropout = (H // Hkv, 1, 1), D, cfg.dropout
        self.qkv = FusedLinear(cfg.n_embd, (H + 2 * Hkv) * D, cfg.bias, (0, Hkv, (H // Hkv * D, D, D)))
        self.heads = Heads(cfg, layer)
        self.out = nn.Linear(cfg.n_embd, cfg.n_embd, cfg.bias)

    def forward(self, x: Tensor, table: tuple[Tensor, ...]) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, sum(self.split), self.head_dim))  # (B, T, Hkv, G + 2, D)
        y = self.heads(*split_heads(qkv, self.split), table)
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

    def forward(self, x: Tensor, table: tuple[Tensor, ...]) -> Tensor:
        qk = self.qk(x).unflatten(-1, (-1, sum(self.split), self.head_dim))  # (B, T, Hkv, G + 1, D)
        v = self.value(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, T, C) -> (B, H, T, D)
        y = self.heads(*split_heads(qk, self.split), v, table)
        return F.dropout(self.out(y), self.dropout, self.training)


class NearIdentity(nn.Linear):
    """skip x + resid W x with W = 0 at first: the reparametrised projections of arXiv:2311.01906, section 4."""

    def __init__(self, width: int):
        super().__init__(width, width, bias=False)
        self.skip, self.resid = (nn.Parameter(torch.empty(1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.skip * x + self.resid * super().forward(x)


@dataclass(frozen=True)
class Kind:
    """An MLP non-linearity: f maps its inputs, each (..., F), to (..., F)."""

    f: Callable[..., Tensor]
    inputs: int = 1


MLP_KIND = {
    "gelu": Kind(F.gelu),
    "relu": Kind(F.relu),
    "relu2": Kind(lambda x: F.relu(x).square()),
    "swiglu": Kind(lambda gate, x: F.silu(gate) * x, inputs=2),
    "geglu": Kind(lambda gate, x: F.gelu(gate) * x, inputs=2),
}


class MLP(nn.Module):
    """W_down f(W_up x); gated kinds compute W_down (f(W_gate x) * W_up x) with gate and up in one weight."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        kind, hidden = MLP_KIND[cfg.mlp], cfg.hidden_dim
        self.f, self.inputs, self.dropout = kind.f, kind.inputs, cfg.dropout
        self.up = FusedLinear(cfg.n_embd, hidden * kind.inputs, cfg.bias, (0, 1, (hidden,) * kind.inputs))
        self.down = nn.Linear(hidden, cfg.n_embd, cfg.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(self.f(*self.up(x).chunk(self.inputs, dim=-1))), self.dropout, self.training)


class StandardBlock(nn.Module):
    """s = s + A(n1(s));  s = s + M(n2(s)), shown for pre-norm; Norms puts the others in their places."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.norm_attn, self.attn = Norms(cfg), Attention(cfg, layer)
        self.norm_mlp, self.mlp = Norms(cfg), MLP(cfg)

    def forward(self, s: Tensor, table: tuple[Tensor, ...]) -> Tensor:
        n1, n2 = self.norm_attn, self.norm_mlp
        s = n1.total(s + n1.after(self.attn(n1.before(s), table)))
        return n2.total(s + n2.after(self.mlp(n2.before(s))))


class ParallelBlock(nn.Module):
    """s = s + A(n(s)) + M(n(s)), one shared norm (GPT-J; PaLM, arXiv:2204.02311)."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.norm, self.attn, self.mlp = Norms(cfg), Attention(cfg, layer), MLP(cfg)

    def forward(self, s: Tensor, table: tuple[Tensor, ...]) -> Tensor:
        n = self.norm
        x = n.before(s)
        return n.total(s + n.after(self.attn(x, table) + self.mlp(x)))


class SimplifiedBlock(nn.Module):
    """s = g_A SA(n1(s));  s = g_S s + b_FF M(n2(s)): no skip around attention (SAS, arXiv:2311.01906)."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.norm_attn, self.attn = first_norms(cfg, layer), ShapedAttention(cfg, layer)
        self.norm_mlp, self.mlp = Norms(cfg), MLP(cfg)
        self.g_attn, self.g_skip, self.b_ff = (nn.Parameter(torch.empty(1)) for _ in range(3))

    def forward(self, s: Tensor, table: tuple[Tensor, ...]) -> Tensor:
        n1, n2 = self.norm_attn, self.norm_mlp
        s = n1.total(self.g_attn * n1.after(self.attn(n1.before(s), table)))
        return n2.total(self.g_skip * s + self.b_ff * n2.after(self.mlp(n2.before(s))))


class SimplifiedParallelBlock(nn.Module):
    """s = g_A SA(n(s)) + b_FF M(n(s)): no skip at all (SAS-P, arXiv:2311.01906)."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.norm, self.attn, self.mlp = first_norms(cfg, layer), ShapedAttention(cfg, layer), MLP(cfg)
        self.g_attn, self.b_ff = (nn.Parameter(torch.empty(1)) for _ in range(2))

    def forward(self, s: Tensor, table: tuple[Tensor, ...]) -> Tensor:
        n = self.norm
        x = n.before(s)
        return n.total(n.after(self.g_attn * self.attn(x, table) + self.b_ff * self.mlp(x)))


def first_norms(cfg: ModelConfig, layer: int) -> Norms:
    """A simplified network without norms keeps one, at the first layer's input."""
    norms = Norms(cfg)
    if layer == 0 and (cfg.norm == "none" or cfg.norm_placement == "none"):
        norms.before = nn.LayerNorm(cfg.n_embd, bias=cfg.bias)
    return norms


class ContextPool(nn.Module):
    """Heads that take their q, k and v from one row group per key/value head."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        D, G = cfg.head_dim, cfg.n_head // cfg.kv_heads
        self.head_dim, self.rows, self.columns = D, (G * D, D, D), (G * D,)
        self.heads = (SlotHeads if cfg.slots else Heads)(cfg, layer)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: tuple[Tensor, ...]) -> Tensor:
        """q (B, T, Hkv, G D), k and v (B, T, Hkv, D) -> (B, T, Hkv, G D)."""
        heads = (x.unflatten(-1, (-1, self.head_dim)).flatten(2, 3).transpose(1, 2) for x in (q, k, v))
        return self.heads(*heads, table).view(q.shape)


class ParameterPool(nn.Module):
    """The MLP between its two matrices, cut into one slice of F / Hkv hidden units per key/value head."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        kind, width = MLP_KIND[cfg.mlp], cfg.hidden_dim // cfg.kv_heads
        self.f, self.rows, self.columns = kind.f, (width,) * kind.inputs, (width,)

    def forward(self, *x_and_table) -> Tensor:
        return self.f(*x_and_table[:-1])  # each (B, T, Hkv, F / Hkv)


class Pools(nn.Module):
    """W_out [ y_1 ; y_2 ], where the pools' heads read y from W_in x: one matrix in, one out.

    Rows and columns come in Hkv groups, each with the query heads, the key, the value and the slice of the MLP that
    belong together, so that tensor parallelism cuts between groups.
    """

    def __init__(self, cfg: ModelConfig, *pools: nn.Module):
        super().__init__()
        self.pools, self.groups, self.dropout = nn.ModuleList(pools), cfg.kv_heads, cfg.dropout
        rows, columns = (sum((getattr(pool, side) for pool in pools), ()) for side in ("rows", "columns"))
        self.into = FusedLinear(cfg.n_embd, self.groups * sum(rows), cfg.bias, (0, self.groups, rows))
        self.out = FusedLinear(self.groups * sum(columns), cfg.n_embd, cfg.bias, (1, self.groups, columns))

    def forward(self, x: Tensor, table: tuple[Tensor, ...]) -> Tensor:
        parts = iter(self.into(x).unflatten(-1, (self.groups, -1)).split(self.into.fused[2], dim=-1))
        y = [pool(*(next(parts) for _ in pool.rows), table) for pool in self.pools]  # each (B, T, Hkv, columns)
        return F.dropout(self.out(torch.cat(y, dim=-1).flatten(2)), self.dropout, self.training)


class GroupedLinear(nn.Linear):
    """n independent linear maps: (..., n, i) -> (..., n, o), with the weights (n o, i) below one another."""

    def __init__(self, groups: int, n_in: int, n_out: int, bias: bool):
        super().__init__(n_in // groups, n_out, bias)
        self.fused = (0, 1, (n_out // groups,) * groups)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("...gi,goi->...go", x, self.weight.unflatten(0, (x.size(-2), -1)))
        return y if self.bias is None else y + self.bias.view(y.shape[-2:])


class GroupedMLP(nn.Module):
    """An MLP in n_group independent groups: each reads and writes its own C / n channels."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        kind, self.groups, self.dropout = MLP_KIND[cfg.mlp], cfg.n_group, cfg.dropout
        self.f, self.inputs = kind.f, kind.inputs
        self.up = GroupedLinear(cfg.n_group, cfg.n_embd, cfg.hidden_dim * kind.inputs, cfg.bias)
        self.down = GroupedLinear(cfg.n_group, cfg.hidden_dim, cfg.n_embd, cfg.bias)

    def forward(self, x: Tensor, table: tuple[Tensor, ...]) -> Tensor:
        h = self.up(x.unflatten(-1, (self.groups, -1))).chunk(self.inputs, dim=-1)  # each (B, T, n, F / n)
        return F.dropout(self.down(self.f(*h)).flatten(2), self.dropout, self.training)


class Superblock(nn.Module):
    """s = s + W_out [ heads over the context ; f(W_in n(s)) ]: one norm, one matrix in, one matrix out.

        s --+-- n -- W_in --+-- q, k, v -- heads --+-- W_out -- + --> s      wiring=parallel
            |               +-- hidden --- f ------+           |
            +--------------------------------------------------+

    wiring=series gives each pool its own norm and sum, one after the other: the standard block. pool=joint puts learned
    slots under the heads' softmax instead of the MLP.
    """

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        pools = [ContextPool(cfg, layer)] + ([ParameterPool(cfg)] if cfg.pool == "separate" else [])
        if cfg.pool == "separate" and cfg.n_group > 1:
            readers = [Pools(cfg, pools[0]), GroupedMLP(cfg)]
        else:
            readers = [Pools(cfg, *pools)] if cfg.wiring == "parallel" else [Pools(cfg, pool) for pool in pools]
        sums = [readers] if cfg.wiring == "parallel" else [[reader] for reader in readers]
        self.norms = nn.ModuleList(Norms(cfg) for _ in sums)
        self.readers = nn.ModuleList(nn.ModuleList(each) for each in sums)

    def forward(self, s: Tensor, table: tuple[Tensor, ...]) -> Tensor:
        for n, readers in zip(self.norms, self.readers, strict=True):
            x = n.before(s)
            s = n.total(s + n.after(sum(reader(x, table) for reader in readers)))
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


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of cross entropies of x W^T, without its (N, V) logits: the forward computes the gradient, chunk by chunk.

    The gradients are kept unscaled until the backward, so that a gradient scaler protects them in float16.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, softcap: float, chunk: int) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            W = weight.to(dtype)
            dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
            dW = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
            total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
            for rows in torch.arange(x.size(0)).split(chunk):
                rows = slice(int(rows[0]), int(rows[-1]) + 1)
                h, target = x[rows].to(dtype), targets[rows]
                valid = (target >= 0)[:, None]
                logits = capped(at_least_float32(h @ W.mT), softcap)  # (chunk, V)
                index = target.clamp(min=0)[:, None]
                normaliser = logits.logsumexp(-1, keepdim=True)
                total += ((normaliser - logits.gather(1, index)) * valid).sum()
                if dx is None and dW is None:
                    continue
                slope = 1 - (logits / softcap).square() if softcap > 0 else valid
                p = logits.sub_(normaliser).exp_()
                p.scatter_add_(1, index, torch.full_like(index, -1, dtype=p.dtype))
                p = p.mul_(slope * valid).to(dtype)  # d loss / d logits
                if dx is not None:
                    dx[rows] = p @ W
                if dW is not None:
                    dW += p.mT @ h
        ctx.save_for_backward(dx, dW)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        dx, dW = (None if g is None else g * grad for g in ctx.saved_tensors)
        return dx, dW, None, None, None


# ---------------------------------------------------------------------------------------------------------------------
# Model


class Model(nn.Module):
    """Token ids in, loss or logits out; see the module's docstring."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        require(cfg.vocab_size > 0, "vocab_size=0 means the data's, and here there is no data; set vocab_size")
        self.cfg = cfg
        embedding, rotation = POSITION[cfg.pos]
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.pos = embedding(cfg)
        self.rotate = rotation(cfg)
        self.blocks = nn.ModuleList(BLOCK[cfg.block](cfg, layer) for layer in range(cfg.n_layer))
        self.norm = norm_at(cfg, 3)
        self.head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.tie()
        self.init_weights()

    def tie(self):
        """Make head and embedding one parameter again; to be called after whatever replaces parameters."""
        if self.cfg.tie_weights:
            self.head.weight = self.wte.weight

    @torch.no_grad()
    def init_weights(self):
        """nanoGPT's scheme, and He and Hofmann's for what is simplified.

        parameter                          initial value
        embeddings, head, linear           N(0, 0.02)
        what is added to the stream        N(0, 0.02 / sqrt(2 L)): 2 L summands do not make its variance grow
        slots                              N(0, 0.02 sqrt(C)), like the keys and values of a normalised stream
        simplified: W_Q, NearIdentity W    0
        simplified: b_FF, resid of all     simplified_beta_ff, 0.2
        biases; norms and other gains      0; 1
        """
        cfg = self.cfg
        simplified = cfg.block.startswith("simplified")
        constants = {"bias": 0.0, "b_ff": cfg.simplified_beta_ff}
        constants["resid"] = 0.2 if cfg.simplified_value_proj == "all" else 1.0
        for name, p in self.named_parameters():
            if p.dim() == 1:
                nn.init.constant_(p, constants.get(name.rpartition(".")[2], 1.0))
            elif name.endswith(("slot_k", "slot_v")):
                nn.init.normal_(p, std=0.02 * math.sqrt(cfg.n_embd))
            else:
                summand = name.endswith(("out.weight", "down.weight")) and not simplified
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * cfg.n_layer) if summand else 0.02)
        for module in self.modules():  # last, so that nothing overwrites these zeros
            if isinstance(module, NearIdentity):
                nn.init.zeros_(module.weight)
            if isinstance(module, ShapedAttention):
                _, groups, sizes = module.qk.fused
                module.qk.weight.view(groups, sum(sizes), -1)[:, : sizes[0]] = 0

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """idx (B, T) -> logits (B, T, V) float32; with targets (B, T), the mean loss in nats over targets >= 0."""
        x = self.hidden(idx)
        return self.logits(x) if targets is None else self.loss(x, targets)

    def hidden(self, idx: Tensor, start: int = 0) -> Tensor:
        """idx (B, T), its first token at position start -> the stream that the head reads, (B, T, C)."""
        T = idx.size(1)
        limit = self.cfg.block_size
        require(start + T <= limit, f"a sequence of {start + T} tokens does not fit in block_size={limit}; crop it")
        t = torch.arange(start, start + T, device=idx.device)
        x = self.wte(idx)
        x = F.dropout(self.pos(x, t), self.cfg.dropout, self.training)
        table = self.rotate.table(t, x.dtype)
        for block in self.blocks:
            x = block(x, table)
        return self.norm(x)

    def logits(self, x: Tensor) -> Tensor:
        return capped(at_least_float32(self.head(x)), self.cfg.logit_softcap)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        x, targets = x.flatten(0, 1), targets.flatten()  # (N, C), (N,)
        chunk = self.cfg.loss_chunk or max(1, 2**25 // self.cfg.vocab_size)
        if x.size(0) <= chunk:
            total = F.cross_entropy(self.logits(x), targets, ignore_index=-1, reduction="sum")
        else:
            total = ChunkedCrossEntropy.apply(x, self.head.weight, targets, self.cfg.logit_softcap, chunk)
        return total / (targets >= 0).sum().clamp(min=1)

    # ---- decoding

    @contextmanager
    def caching(self):
        """While inside, all heads keep their keys and values; yields a function that forgets them."""
        layers = [m for m in self.modules() if isinstance(m, Heads)]

        def forget():
            for layer in layers:
                layer.cache = KVCache(self.cfg.block_size)

        forget()
        try:
            yield forget
        finally:
            for layer in layers:
                layer.cache = NoCache()

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, choose: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """Continues idx (B, T): yields max_new_tokens times the next tokens (B,), chosen by choose from logits (B, V).

        A token costs one cached step while the text fits in block_size. Beyond it the context is the last block_size
        tokens, as in nanoGPT: every position has moved, so each token costs one forward of the whole context.
        """
        with self.caching() as forget:
            seen = 0
            for _ in range(max_new_tokens):
                if idx.size(1) > self.cfg.block_size:
                    idx, seen = idx[:, -self.cfg.block_size :], 0
                    forget()
                x = self.hidden(idx[:, seen:], start=seen)
                seen = idx.size(1)
                token = choose(self.logits(x[:, -1:])[:, 0])
                yield token
                idx = torch.cat((idx, token[:, None]), dim=1)

    # ---- accounting

    def n_params(self) -> int:
        """Trainable numbers, a tied head counted once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T: int | None = None) -> int:
        """Matmul FLOPs of forward and backward per token of a sequence of T (default block_size): 6 per weight that is
        multiplied (the head always, lookups never) plus the attention's, thrice its forward (PaLM, appendix B)."""
        T = T or self.cfg.block_size
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * weights + 3 * sum(m.flops_per_token(T) for m in self.modules() if isinstance(m, Heads))


# ---------------------------------------------------------------------------------------------------------------------
# Attention read as an MLP


@torch.no_grad()
def contextual_mlp(model: Model, idx: Tensor, layer: int, head: int, position: int) -> tuple[Tensor, Tensor, Tensor]:
    """A head at one query as an MLP of a unit per visible token: incoming (S, C), outgoing (S, C), hidden (S,).

    idx (T,) is the text and x_t (C,) the normalised stream that the layer's attention reads at t = position. Then

        b_i = W_Q^T W_K x_i / sqrt(D)    hidden_i = exp(b_i . x_t)    a_i = W_O W_V x_i / Z    Z = sum of exp(b_i . x_t)

    and hidden @ outgoing is what the head adds to the attention's output: before the output's bias, dropout, and any
    norm or gain that the block puts behind it. The units are the slots of a joint pool, then the tokens in order.

        pos=rope            b_i is turned back by the query's position
        pos=alibi           hidden_i = exp(b_i . x_t - slope (t - i)); slots have no such term
        bias                hidden_i = exp(b_i . x_t + what the bias of W_Q adds)
        qk_norm             b_i holds the gains and this query's divisor
        attn_softcap=c      hidden_i = exp(c tanh(b_i . x_t / c))
        simplified blocks   hidden_i = beta exp(b_i . x_t) + Z (alpha [i = t] - gamma C_ti)

    For a model in eval mode; a score above 88 overflows in float32. ValueError if layer, head or position is none of
    the model's.
    """
    cfg, D, H = model.cfg, model.cfg.head_dim, model.cfg.n_head
    for name, value, limit in (("layer", layer, cfg.n_layer), ("head", head, H), ("position", position, len(idx))):
        require(0 <= value < limit, f"{name}={value} must be in 0 .. {limit - 1}")
    block = model.blocks[layer]
    attn = block.readers[0][0] if isinstance(block, Superblock) else block.attn
    heads, into = (next(m for m in attn.modules() if isinstance(m, kind)) for kind in (Heads, FusedLinear))
    read = []
    with heads.register_forward_pre_hook(lambda _, args: read.extend(args)):
        model.hidden(idx[None, : position + 1])
    q, k, v, table = read  # before norms and positions: q (1, H, position + 1, D), k and v (1, heads, position + 1, D)

    scale = q.new_ones(D) / math.sqrt(D)
    if cfg.qk_norm:
        scale *= heads.q_norm.weight * (q[0, head, -1].square().mean() + heads.q_norm.eps).rsqrt()
    q, k, v = heads.rotate(heads.q_norm(q), heads.k_norm(k), v, table)
    q, k, v = (x[0, head * x.size(1) // H, -heads.window :] for x in (q, k, v))  # what it sees, each (S, E)
    if isinstance(heads, SlotHeads):
        slots = heads.rotate.slots(heads.k_norm(heads.slot_k), heads.slot_v)
        k, v = (torch.cat((x[head * x.size(0) // H], y)) for x, y in zip(slots, (k, v), strict=True))
    content, bias = (k[:, part] @ q[-1, part] / math.sqrt(D) for part in (slice(D), slice(D, None)))
    bias -= bias[-1].clone()  # the query's own distance is 0
    hidden = torch.exp(capped(content, heads.softcap) + bias)
    Z = hidden.sum()
    if isinstance(heads, ShapedHeads):
        hidden = heads.beta[head] * hidden - heads.gamma[head] * Z * bias.softmax(0)
        hidden[-1] += heads.alpha[head] * Z

    group, member = divmod(head, H // cfg.kv_heads)  # groups are the outer index of rows and columns
    part = slice(member * D, (member + 1) * D)
    keys = k[:, :D].expand(1, H, -1, -1)
    back = heads.rotate(keys, keys, keys, heads.rotate.table(idx.new_tensor([-position]), k.dtype))[0][0, head, :, :D]
    incoming = (back * scale) @ into.weight.unflatten(0, (cfg.kv_heads, -1))[group, part]
    y = v.new_zeros(len(v), cfg.kv_heads, getattr(attn.out, "in_features", cfg.n_embd) // cfg.kv_heads)
    y[:, group, part] = v[:, :D]
    y = y.flatten(1)
    return incoming, (attn.out(y) - attn.out(torch.zeros_like(y))) / Z, hidden
