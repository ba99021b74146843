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
    block: Literal["standard", "parallel"] = "standard"  # attention then MLP; or both at once (GPT-J, PaLM)
    norm: Literal["layernorm", "rmsnorm", "none"] = "layernorm"  # LayerNorm, RMSNorm (arXiv:1910.07467), or nothing
    norm_placement: Literal["pre", "post", "sandwich", "none"] = "pre"  # x+f(n(x)); n(x+f(x)); x+n(f(n(x))); x+f(x)
    mlp: Literal["gelu", "relu", "relu2", "swiglu", "geglu"] = "gelu"  # relu2 arXiv:2109.08668, *glu arXiv:2002.05202
    mlp_ratio: float = 4.0  # hidden width over n_embd; gated kinds take 2/3 of it, so that parameters match
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
        for name in ("n_layer", "n_head", "n_embd", "block_size"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        for name in ("vocab_size", "n_kv_head", "window", "attn_softcap", "logit_softcap", "loss_chunk"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative; 0 is the default")
        H, C = self.n_head, self.n_embd
        require(
            C % H == 0, f"n_embd={C} is not divisible by n_head={H}; set n_embd to a multiple such as {-(-C // H) * H}"
        )
        require(0 <= self.dropout < 1, f"dropout={self.dropout} must be in [0, 1)")
        require(self.mlp_ratio > 0, f"mlp_ratio={self.mlp_ratio} must be positive")
        require(self.rope_theta > 0, f"rope_theta={self.rope_theta} must be positive")
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
        return max(unit, round(width / unit) * unit)

    def layer_window(self, layer: int) -> int:
        """Sliding window of a layer in tokens, 0 = full attention."""
        kinds = self.window_pattern or "S"
        return self.window if kinds[layer % len(kinds)] == "S" else 0


# A flag that the chosen variant does not use is refused when set explicitly: flag -> (is it used?, when it is).
USED_WHEN: dict[str, tuple[Callable[[ModelConfig], bool], str]] = {
    "rope_theta": (lambda c: c.pos == "rope", "pos=rope"),
    "window_pattern": (lambda c: c.window > 0, "window > 0"),
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

    Softmax ignores a shift per row, so m_h j is enough, and that is a dot product: q gets the columns
    (256 m_h, m_h) * sqrt(D) and k the columns (j // 256, j % 256), each exact in bfloat16. v is padded with zeros to
    the same width (a multiple of 8), which the fused kernels want; attention drops those columns of its result.
    """

    def table(self, t: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        H, D = self.cfg.n_head, self.cfg.head_dim
        pad = -(D + 2) % 8
        slope = alibi_slopes(H, t.device).to(dtype) * math.sqrt(D)  # (H,)
        q_columns = F.pad(torch.stack((256 * slope, slope), dim=-1)[:, None], (0, pad))  # (H, 1, 2 + pad)
        k_columns = F.pad(torch.stack((t // 256, t % 256), dim=-1).to(dtype), (0, pad))  # (T, 2 + pad)
        return q_columns, k_columns

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        q_columns, k_columns = (c.to(q.dtype) for c in table)
        q = torch.cat((q, q_columns.expand(*q.shape[:3], -1)), dim=-1)  # (B, H, T, D + 2 + pad)
        k = torch.cat((k, k_columns.expand(*k.shape[:3], -1)), dim=-1)  # (B, Hkv, T, D + 2 + pad)
        return q, k, F.pad(v, (0, q.size(-1) - v.size(-1)))


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
    q: Tensor, k: Tensor, v: Tensor, head_dim: int, window: int = 0, softcap: float = 0.0, dropout: float = 0.0
) -> Tensor:
    """Causal attention softmax(cap(q k^T / sqrt(D))) v of T queries that are the last T of S positions.

    q (B, H, T, E), k and v (B, Hkv, S, E), E >= D = head_dim: columns beyond D carry a position bias, which a softcap
    leaves alone. T is S (training, prompt) or 1 (decoding). Returns (B, H, T, E).
    """
    T, S = q.size(2), k.size(2)
    if T == 1 and 0 < window < S:
        k, v, window = k[:, :, -window:], v[:, :, -window:], 0
    if softcap > 0 or (dropout > 0 and q.device.type == "cpu"):  # the CPU's fused kernel knows no dropout
        return strip_attention(q, k, v, head_dim, window, softcap, dropout)
    sdpa = partial(
        F.scaled_dot_product_attention, scale=head_dim**-0.5, dropout_p=dropout, enable_gqa=q.size(1) != k.size(1)
    )
    if 0 < window < T:
        return window_attention(sdpa, q, k, v, window)
    return sdpa(q, k, v, is_causal=T > 1)


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
    q: Tensor, k: Tensor, v: Tensor, head_dim: int, window: int, softcap: float, dropout: float, rows: int = 128
) -> Tensor:
    """Attention in strips of queries, recomputed in the backward: what the fused kernels lack, in O(rows S) memory."""
    T, S = q.size(2), k.size(2)

    def strip(q: Tensor, k: Tensor, v: Tensor, ahead: int) -> Tensor:  # the strip's first query is key number `ahead`
        Hkv, D = k.size(1), head_dim
        q = q.unflatten(1, (Hkv, -1))  # (B, Hkv, G, t, E)
        k, v = k[:, :, None], v[:, :, None]  # (B, Hkv, 1, s, E)
        scores = capped(q[..., :D] @ k[..., :D].mT * D**-0.5, softcap)
        scores = at_least_float32(scores + q[..., D:] @ k[..., D:].mT * D**-0.5)  # (B, Hkv, G, t, s)
        distance = torch.arange(ahead, ahead + q.size(3), device=q.device)[:, None]
        distance = distance - torch.arange(k.size(3), device=q.device)  # (t, s), negative = the future
        hidden = (distance < 0) | (distance >= window) if window else distance < 0
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1).to(v.dtype)
        return (F.dropout(weights, dropout) @ v).flatten(1, 2)  # (B, H, t, E)

    out = []
    for i in range(0, T, rows):
        end = min(i + rows, T)
        lo = max(0, S - T + i - window + 1) if window else 0
        args = q[:, :, i:end], k[:, :, lo : S - T + end], v[:, :, lo : S - T + end], S - T + i - lo
        out.append(checkpoint(strip, *args, use_reentrant=False) if torch.is_grad_enabled() else strip(*args))
    return torch.cat(out, dim=2)


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


class Attention(nn.Module):
    """W_O concat_h softmax(q_h k_g(h)^T / sqrt(D)) v_g(h): G = H / Hkv query heads share a key and a value."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        H, Hkv, D = cfg.n_head, cfg.kv_heads, cfg.head_dim
        self.split = (H // Hkv, 1, 1)  # q, k, v heads of one group
        self.qkv = FusedLinear(cfg.n_embd, (H + 2 * Hkv) * D, cfg.bias, (0, Hkv, (H // Hkv * D, D, D)))
        self.out = nn.Linear(cfg.n_embd, cfg.n_embd, cfg.bias)
        self.q_norm, self.k_norm = (nn.RMSNorm(D, eps=1e-5) if cfg.qk_norm else nn.Identity() for _ in range(2))
        self.rotate = POSITION[cfg.pos][1](cfg)
        self.cache = NoCache()
        self.heads, self.head_dim = H, D
        self.window, self.softcap, self.dropout = cfg.layer_window(layer), cfg.attn_softcap, cfg.dropout

    def forward(self, x: Tensor, table: tuple[Tensor, ...]) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, -1, sum(self.split), self.head_dim)  # (B, T, Hkv, G + 2, D)
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in qkv.split(self.split, dim=3))  # (B, heads, T, D)
        q, k, v = self.rotate(self.q_norm(q), self.k_norm(k), v, table)
        k, v = self.cache(k, v)  # (B, Hkv, S, D)
        y = mix(q, k, v, self.head_dim, self.window, self.softcap, self.dropout if self.training else 0.0)
        y = y[..., : self.head_dim].transpose(1, 2).reshape(B, T, C)  # (B, H, T, D) -> (B, T, C)
        return F.dropout(self.out(y), self.dropout, self.training)

    def flops_per_token(self, T: int) -> int:
        """Forward matmul FLOPs of scores and weighted sum, counting all T keys as PaLM's appendix B does."""
        return 4 * self.heads * self.head_dim * min(T, self.window or T)


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


BLOCK = {"standard": StandardBlock, "parallel": ParallelBlock}


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
        """nanoGPT's scheme.

        parameter                     distribution
        embeddings, head, linear      N(0, 0.02)
        attn.out, mlp.down            N(0, 0.02 / sqrt(2 L)): the stream's variance does not grow with its 2 L summands
        biases                        0
        norms                         gain 1, bias 0
        """
        for name, p in self.named_parameters():
            if p.dim() < 2:
                nn.init.constant_(p, 0.0 if name.endswith("bias") else 1.0)
            else:
                summand = name.endswith(("attn.out.weight", "mlp.down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.cfg.n_layer) if summand else 0.02)

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
        """While inside, every attention keeps its keys and values; yields a function that forgets them."""
        layers = [m for m in self.modules() if isinstance(m, Attention)]

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
        return 6 * weights + 3 * sum(m.flops_per_token(T) for m in self.modules() if isinstance(m, Attention))
