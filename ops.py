"""How the model's formulas are computed: functions of tensors, without parameters and flags of their own.

    y = attention(q, k, v, D, Mask(window=256))         # softmax(q k^T / sqrt(D)) v, never as a (T, S) matrix
    total = cross_entropy(x, weight, targets)           # of logits x W^T that never exist as (N, V)

Each docstring has the formula. model.py imports these functions and says what is computed with them; names of sizes are
explained there. Autograd functions save passes over memory, which limit the speed on CPUs.
"""

import hashlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

Slots = tuple[Tensor, Tensor] | None  # keys and values (Hkv, M, E) without position, which every query sees

# ---------------------------------------------------------------------------------------------------------------------
# Dtypes


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which matrix products with x are computed."""
    device = x.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    if autocast:
        return torch.get_autocast_dtype(device)
    return x.dtype


def wide_stream(flag: bool | str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the residual stream is in float32 under this fp32_residual, where matrix products are in `dtype`."""
    return flag is True or flag == "auto" and (device.type != "cuda" or dtype != torch.bfloat16)


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or in its own dtype if that is wider."""
    return x if x.dtype == torch.float32 else x.to(torch.promote_types(x.dtype, torch.float32))


# ---------------------------------------------------------------------------------------------------------------------
# Norms and elementwise functions


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, in the dtype of x."""
    weight, bias = (None if p is None else p.to(x.dtype) for p in (weight, bias))
    with keeping_dtype(x):
        return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the dtype of x. PyTorch's is a fused kernel on
    GPUs, and a dozen passes on CPUs."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        if torch.is_grad_enabled():
            return RMSNormOfCPU.apply(x, weight, eps)
        if x.dtype == weight.dtype:  # few calls: their number limits the speed of decoding
            n = x.size(-1)
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            length.hypot_(torch.scalar_tensor(math.sqrt(n * eps), dtype=x.dtype))
            return (x * weight).div_(length).mul_(math.sqrt(n))
    with keeping_dtype(x):
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def keeping_dtype(x: Tensor) -> AbstractContextManager:
    """A context in which norms of x have its dtype: CUDA's autocast would compute and return them in float32."""
    wide = x.dtype in (torch.float32, torch.float64)
    return nullcontext() if wide else torch.autocast(x.device.type, enabled=False)


class RMSNormOfCPU(torch.autograd.Function):
    """RMSNorm in few passes. The backward calls LayerNorm's kernel with a mean of 0, and adds the term that only
    LayerNorm subtracts."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = at_least_float32(x)
        rms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rms)
        return (wide * rms).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, rms = ctx.saved_tensors
        options = torch.zeros_like(rms), rms, weight.to(rms.dtype), None, (True, True, False)
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(grad, x, x.shape[-1:], *options)
        mean = (grad.flatten(0, -2) @ weight.to(grad.dtype)).view(rms.shape) / x.size(-1)
        return dx.add_((mean * rms).to(x.dtype)), dw.to(weight.dtype), None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + (second half of x, first half of x) sin: x (B, H, T, D); cos and sin (T, D)."""
    if torch.is_grad_enabled():
        return Rotation.apply(x, cos, sin)
    return (x * cos).addcmul_(x.roll(x.size(-1) // 2, -1), sin)  # another pass, but fewer calls, for decoding


class Rotation(torch.autograd.Function):
    """rotate in two passes."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        half = x.size(-1) // 2
        y = x * cos
        y[..., :half].addcmul_(x[..., half:], sin[:, :half])
        y[..., half:].addcmul_(x[..., :half], sin[:, half:])
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return Rotation.apply(grad, cos, -sin), None, None


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (arXiv:2109.08668)."""
    if torch.is_grad_enabled():
        return SquaredReLU.apply(x)
    return F.relu(x).square_()


class SquaredReLU(torch.autograd.Function):
    """squared_relu, whose gradient takes one pass."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        positive = F.relu(x)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (positive,) = ctx.saved_tensors
        return torch.addcmul(grad.new_zeros(()), grad, positive, value=2.0)


def dropped(x: Tensor, p: float) -> Tensor:
    """Each element of x is 0 with probability p, otherwise divided by 1 - p.

    In eager mode on a CPU, 16 random bits decide on each element (p is rounded to 1 / 65536), because Bernoulli draws
    take longer than a small model's matrix products.
    """
    if p == 0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    limit = min(round(p * 2**16), 2**16 - 1)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    kept = (bits[: x.numel()] >= limit - 2**15).view(x.shape)
    return x * kept.to(x.dtype).mul_(2**16 / (2**16 - limit))


def capped(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap), or x if cap is 0."""
    return cap * torch.tanh(x / cap) if cap > 0 else x


# ---------------------------------------------------------------------------------------------------------------------
# Experts


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in float32, also where autocast computes products in 16 bits: rounding would change choices."""
    x, weight, bias = (None if t is None else at_least_float32(t) for t in (x, weight, bias))
    if matmul_dtype(x) == x.dtype:
        return F.linear(x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x, weight, bias)


def has_values(x: Tensor) -> bool:
    """False for tensors that have a shape and a dtype alone: those on the meta device, and the fake ones of a plan."""
    return not x.is_meta and type(x).__name__ != "FakeTensor"


def by_expert(expert: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """expert (N,), numbers below n -> the order (N,) of the rows by expert, and the end of each expert's rows (n,)."""
    order = expert.argsort(stable=True)
    return order, torch.searchsorted(expert[order], torch.arange(n, device=expert.device), right=True)


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, loop: Callable | None = None
) -> Tensor:
    """x_r W_e^T + b_e, where e is the expert of row r: the first one's rows are those before ends_0, the second one's
    those before ends_1, and so on. x (N, i), weight (E, o, i), bias (E, o), ends (E,) -> (N, o). `loop` replaces
    linear_by_linear, which computes what PyTorch's kernel does not take."""
    dtype = matmul_dtype(x)
    x = x.to(dtype)
    weight = weight.to(dtype)
    if dtype == torch.bfloat16 and all(n % 8 == 0 for n in weight.shape[1:]):  # what PyTorch's kernel takes
        y = F.grouped_mm(x, weight.mT, offs=ends.to(torch.int32))
    elif not has_values(x):  # and so no groups
        y = F.linear(x, weight[0])
    else:
        y = (loop or linear_by_linear)(x, weight, ends)
    if bias is None:
        return y
    expert = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
    return y + bias[expert].to(dtype)


def linear_by_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """grouped_linear without bias, a product for each expert. The host waits for `ends`."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([F.linear(rows, w) for rows, w in zip(x.split(sizes), weight.unbind(), strict=True)])


class WithGradient(torch.autograd.Function):
    """x; the gradient of `parameter` is `grad`, whatever the gradient of x."""

    @staticmethod
    def forward(ctx, x: Tensor, parameter: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx: Tensor):
        return dx, *ctx.saved_tensors, None


with_gradient = WithGradient.apply

# ---------------------------------------------------------------------------------------------------------------------
# Attention


class Mask(NamedTuple):
    """The keys that each of T queries sees: a range [lo, hi) of S keys. In self-attention, queries are the last T."""

    causal: bool = True
    window: int = 0  # positions before (and, if not causal, after) the query's, its own included; 0 = all
    # Document numbers of queries (B, T) and keys (B, S), never decreasing; then, if known, the `boundaries` of both, or
    # those of self-attention once.
    docs: tuple[Tensor, ...] | None = None

    def reach(self, T: int, S: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """lo and hi, each (T,), or (B, T) with docs."""
        i = torch.arange(S - T, S, device=device)
        lo = torch.zeros_like(i)
        hi = torch.full_like(i, S)
        if self.causal:
            hi = i + 1
        if self.window:
            lo = (i - self.window + 1).clamp(min=0)
            hi = hi.minimum(i + self.window)
        if self.docs is not None:
            of_queries, of_keys = (docs.contiguous() for docs in self.docs[:2])
            lo = lo.maximum(torch.searchsorted(of_keys, of_queries))
            hi = hi.minimum(torch.searchsorted(of_keys, of_queries, right=True))
        return lo, hi


def boundaries(starts: Tensor, T: int) -> Tensor:
    """starts (B, n), the first token of documents 0 ... n - 1 in rows of T tokens, or T if there is none -> the same
    in all rows one after another, and the end B T: int32 (B n + 1,). Documents that a row does not have are empty."""
    first = T * torch.arange(len(starts), device=starts.device).view(-1, 1)
    return F.pad((starts + first).flatten(), (0, 1), value=len(starts) * T).to(torch.int32)


def attention_kernel(
    mask: Mask, T: int, S: int, slots: bool, mapped: bool, dropout: float, device: str, flash: bool
) -> str:
    """Name of the kernel for the attention of T queries to S keys. No kernel makes a (T, S) matrix.

    kernel    when                                                              memory of scores and masks
    full      all queries see all keys, or causal with T = S                    none: one fused call
    window    causal, each query sees the last W keys                           a (W, 2W) mask; two fused calls
    flash     `flash`, see takes_flash: a window, or causal with T < S          none: one fused call
    varlen    `flash`: at most 65535 documents, of known boundaries             none: one fused call
    joined    slots, and `flash`; on a CPU slots, or T < S, without a window    none: two fused calls
    strips    documents, or none of the others                                  a (128, S) mask; a fused call per strip
    naive     `mapped`: a softcap, or another map than softmax; or dropout on   (256, S) scores per strip
              a CPU: no fused kernel has them
    """
    past = mask.causal and S > T  # whether there are keys before the first query
    if mapped or (dropout and device == "cpu"):
        return "naive"
    if mask.docs is None and not (slots or past or mask.window):
        return "full"
    known = mask.docs is None or len(mask.docs) > 2 and len(mask.docs[2]) <= 2**16  # the second size of CUDA's grids
    if flash and known and not (slots and dropout):
        if slots:
            return "joined"
        return "flash" if mask.docs is None else "varlen"
    if mask.docs is None and mask.window and mask.causal and not (slots or past):
        return "window"
    if mask.docs is None and device == "cpu" and not mask.window:
        return "joined"
    return "strips"


def attention(
    q: Tensor, k: Tensor, v: Tensor, D: int, mask: Mask, softcap=0.0, dropout=0.0, slots: Slots = None,
    strips: Callable | None = None, phi: Callable | None = None,
) -> Tensor:  # fmt: skip
    """softmax(cap(q k^T / sqrt(D))) v over the keys that the mask admits, and over slots: (B, H, T, E), where E >= D.

    q (B, H, T, E), k and v (B, Hkv, S, E). The columns from D on hold a position bias, which is not capped. strips is
    strip_attention, perhaps wrapped so that torch.compile leaves it out. phi(scores (..., T, S), n (..., T, 1)), where
    n is the number of keys that a query sees, replaces the softmax. It is 0 for large negative scores.
    """
    strips = strips or strip_attention
    T = q.size(2)
    if T == 1 and mask.causal:
        k, v, mask = seen_by_the_last(k, v, mask)
    S = k.size(2)
    if mask.window >= S:
        mask = mask._replace(window=0)
    device = q.device.type
    scale = D**-0.5
    flash = takes_flash(device, matmul_dtype(q), q.size(3))
    mapped = softcap > 0 or phi is not None
    kernel = attention_kernel(mask, T, S, slots is not None, mapped, dropout, device, flash)
    sdpa = partial(fused_attention, scale=scale, dropout_p=dropout)
    if kernel == "full":
        return sdpa(q, k, v, is_causal=mask.causal)
    if kernel == "window":
        return window_attention(sdpa, q, k, v, mask.window)
    of_slots = [x.expand(len(q), -1, -1, -1) for x in slots or ()]  # each (B, Hkv, M, E)
    if flash and kernel in ("flash", "varlen", "joined"):
        given = [x.to(matmul_dtype(q)) for x in (q, k, v, *of_slots)]
        options = scale, mask.causal, mask.window
        ends = mask.docs[2:] if mask.docs else ()
        if slots is None:
            return flash_attention(*given, *options, *ends, dropout=dropout)[0]
        return JoinedAttention.apply(*given, *options, (flash_attention, flash_backward), *ends).to(v.dtype)
    if kernel == "joined":
        past = S - T if mask.causal else 0
        always = [x[:, :, :past] for x in (k, v)]  # what all queries see, (B, Hkv, M + past, E)
        if slots is not None:
            always = [torch.cat(pair, dim=2) for pair in zip(of_slots, always, strict=True)]
        k, v = (x[:, :, past:].repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        given = (x.to(matmul_dtype(q)) for x in (q, k, v, *always))
        return JoinedAttention.apply(*given, scale, mask.causal).to(v.dtype)
    if kernel == "strips":
        return strips(sdpa, q, k, v, tuple(mask), slots, 128)
    return strips(partial(naive_attention, D, softcap, dropout, phi), q, k, v, tuple(mask), slots, 256)


def seen_by_the_last(k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Mask]:
    """The keys and values that the last query sees under a causal mask, and a mask for it without a limit."""
    if mask.window:
        k, v = (x[:, :, -mask.window :] for x in (k, v))
    if mask.docs is None:
        return k, v, Mask(causal=False)
    of_queries, of_keys = mask.docs[:2]
    return k, v, Mask(causal=False, docs=(of_queries, of_keys[:, -k.size(2) :]))


def takes_flash(device: str, dtype: torch.dtype, width: int) -> bool:
    """Whether CUDA's flash operators accept queries of this dtype and width, and the user has not switched them off by
    torch.backends.cuda.enable_flash_sdp(False). float16 is mostly used on GPUs older than those that they support."""
    fits = device == "cuda" and dtype == torch.bfloat16 and width in range(8, 257, 8) and torch.version.hip is None
    return fits and torch._C._get_flash_sdp_enabled()  # torch.compile does not know the public function


def fused_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options) -> Tensor:
    """PyTorch's attention in a fused kernel. CUDA's kernels for masks and float32 have no grouped heads, for which
    PyTorch would silently make a (T, S) matrix; so keys and values are repeated there. For at most 256 keys on a CPU,
    bfloat16 inputs become float32, whose backward is up to six times as fast.

    PyTorch prefers cuDNN's kernel on some GPUs. cuDNN builds a plan for each combination of sizes, in 20 ms to 1 s, and
    with a mask its gradient of q can be NaN (github.com/pytorch/pytorch/issues/196678). So it is allowed only for
    self-attention without a mask that has a backward, whose sizes are the same in each step."""
    group = q.size(1) // k.size(1)
    if q.device.type == "cpu" and matmul_dtype(q) == torch.bfloat16 and k.size(2) <= 256:
        with torch.autocast("cpu", enabled=False):
            return fused_attention(q.float(), k.float(), v.float(), attn_mask, **options).to(v.dtype)
    if group > 1 and q.device.type == "cuda" and (attn_mask is not None or matmul_dtype(q) == torch.float32):
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    cudnn = torch._C._get_cudnn_sdp_enabled()  # torch.compile does not know the public function
    fits = cudnn and attn_mask is None and torch.is_grad_enabled()
    if q.size(2) != k.size(2):  # in a graph for any sizes, `fits` would otherwise be an expression of them
        fits = False
    torch.backends.cuda.enable_cudnn_sdp(fits)  # sdpa_kernel takes 20 times as long
    try:
        return F.scaled_dot_product_attention(q, k, v, attn_mask, enable_gqa=q.size(1) != k.size(1), **options)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


def window_attention(sdpa: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, W: int) -> Tensor:
    """Causal attention to the last W positions, its own included, in O(T W): blocks of W queries see 2W keys each. The
    first block has no predecessor and is plain causal attention; the other blocks share one (W, 2W) mask."""
    B, _, T, E = q.shape
    n = -(-T // W)
    q, k, v = (F.pad(x, (0, 0, 0, n * W - T)) for x in (q, k, v))  # padding comes last, where the causal mask hides it

    def blocks(x: Tensor, first: int, width: int) -> Tensor:  # n-1 overlapping views -> ((n-1) B, heads, width, E)
        return x[:, :, first:].unfold(2, width, W).permute(2, 0, 1, 4, 3).flatten(0, 1)

    i = torch.arange(W, device=q.device)[:, None]
    j = torch.arange(2 * W, device=q.device)
    band = (j > i) & (j <= i + W)  # (W, 2W): key 0 is W positions before query 0
    rest = sdpa(blocks(q, W, W), blocks(k, 0, 2 * W), blocks(v, 0, 2 * W), attn_mask=band)
    rest = rest.view(n - 1, B, -1, W, E).permute(1, 2, 0, 3, 4).flatten(2, 3)  # (B, H, (n-1) W, E)
    return torch.cat((sdpa(q[:, :, :W], k[:, :, :W], v[:, :, :W], is_causal=True), rest), dim=2)[:, :, :T]


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window=0) -> tuple[Tensor, Tensor]:
    """The CPU's fused kernel: the result (B, H, T, E), and the logs of the normalisers (B, H, T). No window."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal, scale=scale)


def cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, z: Tensor, scale: float, causal: bool, *_):
    """Gradients of q, k and v, given the result y and the logs z of the normalisers."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(grad, q, k, v, y, z, dropout_p=0.0, is_causal=causal, scale=scale)


def flash_layout(x: Tensor, ends: Tensor | None) -> Tensor:
    """x (B, H, T, E) as the flash operators take it: (B, T, H, E), or with documents (B T, H, E)."""
    x = x.transpose(1, 2)
    return x if ends is None else x.flatten(0, 1)


def flash_window(causal: bool, window: int) -> dict[str, int]:
    return dict(window_size_left=window - 1, window_size_right=0 if causal else window - 1)  # -1 has no limit


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window=0, ends_q=None, ends_k=None, dropout=0.0
) -> tuple[Tensor, Tensor]:
    """CUDA's FlashAttention: the result (B, H, T, E), and the logs of the normalisers (B, H, T). The queries of a text,
    or of each document, are the last of its keys. ends_q and ends_k are `boundaries` of documents, or None; the second
    may be left out if it is the same."""
    B, H, T, E = q.shape
    if ends_k is None:
        ends_k = ends_q
    given = *(flash_layout(x, ends_q) for x in (q, k, v)), ends_q, ends_k, T, k.size(2), dropout, causal, False
    y, z, *_ = torch.ops.aten._flash_attention_forward(*given, scale=scale, **flash_window(causal, window))
    if ends_q is not None:
        z = z.view(H, B, T).transpose(0, 1)
    return y.view(B, T, H, E).transpose(1, 2), z


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, z: Tensor, scale: float, causal: bool, window=0,
    ends_q=None, ends_k=None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k and v, given the result y and the logs z of the normalisers, without dropout."""
    if ends_k is None:
        ends_k = ends_q
    z = z.contiguous() if ends_q is None else z.transpose(0, 1).flatten(1)
    unused = z.new_empty(2, dtype=torch.uint64)
    given = [flash_layout(x, ends_q) for x in (grad, q, k, v, y)]
    given += [z, ends_q, ends_k, q.size(2), k.size(2), 0.0, causal, unused, unused]
    grads = torch.ops.aten._flash_attention_backward(*given, scale=scale, **flash_window(causal, window))
    return [dx.view(len(x), x.size(2), x.size(1), -1).transpose(1, 2) for dx, x in zip(grads, (q, k, v), strict=True)]


class JoinedAttention(torch.autograd.Function):
    """One softmax over slots and context: two calls of a fused kernel, joined by their normalisers. Given the joint
    result and normaliser, the kernel's backward computes the right gradients of each part. q (B, H, T, E), k and v (B,
    H, S, E), or of Hkv heads for flash_attention, slot_k and slot_v (B, Hkv, M, E). `ends` as in flash_attention."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, slot_k: Tensor, slot_v: Tensor, scale: float, causal: bool, window=0,
        kernels=(cpu_attention, cpu_backward), *ends: Tensor,
    ):  # fmt: skip
        kernel, _ = kernels
        q_slots = q.reshape(len(q), slot_k.size(1), -1, q.size(3))  # (B, Hkv, G T, E)
        y_slots, z_slots = kernel(q_slots, slot_k, slot_v, scale, False)
        y, z = kernel(q, k, v, scale, causal, window, *ends)  # (B, H, T, E) and log of the normaliser (B, H, T)
        z_slots = z_slots.reshape(z.shape)
        total = torch.logaddexp(z, z_slots)
        y = (z - total).exp()[..., None] * y + (z_slots - total).exp()[..., None] * y_slots.reshape(y.shape)
        if y.dtype != q.dtype:  # a conversion without effect, compiled by torch 2.11, has a backward that returns zeros
            y = y.to(q.dtype)
        ctx.save_for_backward(q, k, v, slot_k, slot_v, y, total, *ends)
        ctx.kernels = kernels
        ctx.options = scale, causal, window
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, slot_k, slot_v, y, total, *ends = ctx.saved_tensors
        _, backward = ctx.kernels
        dq, dk, dv = backward(grad, q, k, v, y, total, *ctx.options, *ends)
        grad, q_slots, y, total = (x.reshape(len(x), slot_k.size(1), -1, *x.shape[3:]) for x in (grad, q, y, total))
        dq_slots, *d_slots = backward(grad, q_slots, slot_k, slot_v, y, total, ctx.options[0], False)
        return dq + dq_slots.reshape(dq.shape), dk, dv, *d_slots, *[None] * (len(ctx.needs_input_grad) - 5)


def strip_attention(attend: Callable, q: Tensor, k: Tensor, v: Tensor, mask: tuple, slots: Slots, rows: int) -> Tensor:
    """Attention in strips of `rows` queries: any mask and score in O(rows S) memory. Several strips are recomputed in
    the backward; a single one is not. mask has the fields of a Mask: torch.compile passes no named tuple between its
    graphs."""
    mask = Mask(*mask)
    T, S, W = q.size(2), k.size(2), mask.window
    lo, hi = mask.reach(T, S, q.device)
    if slots is not None:
        slots = tuple(x.expand(len(q), -1, -1, -1) for x in slots)  # each (B, Hkv, M, E)

    def strip(q: Tensor, k: Tensor, v: Tensor, i: int, first: int) -> Tensor:  # queries i ... and keys first ...
        end = i + q.size(2)
        j = torch.arange(first, first + k.size(2), device=q.device)
        seen = ((j >= lo[..., i:end, None]) & (j < hi[..., i:end, None])).view(-1, 1, end - i, len(j))
        if slots is not None:
            k = torch.cat((slots[0], k), dim=2)
            v = torch.cat((slots[1], v), dim=2)
            seen = F.pad(seen, (slots[0].size(2), 0), value=True)
        return attend(q, k, v, attn_mask=seen)

    out = []
    for i in range(0, T, rows):
        end = min(i + rows, T)
        first = 0
        last = S
        if W:
            first = max(0, S - T + i - W + 1)
            last = min(S, S - T + end + W - 1)
        if mask.causal:
            last = S - T + end
        given = q[:, :, i:end], k[:, :, first:last], v[:, :, first:last], i, first
        if torch.is_grad_enabled() and T > rows:
            out.append(checkpoint(strip, *given, use_reentrant=False))
        else:
            out.append(strip(*given))
    return torch.cat(out, dim=2)


def naive_attention(
    D: int, cap: float, dropout: float, phi: Callable | None, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor
) -> Tensor:
    """Attention with a softcap or another phi than the softmax, or with dropout on a CPU. Shapes as in attention;
    attn_mask is boolean and broadcasts to (B, H, T, S). Each weight of each head is dropped by itself, after the
    softmax has normalised them all."""
    q = (q * D**-0.5).unflatten(1, (k.size(1), -1))  # (B, Hkv, G, t, E)
    k = k[:, :, None]  # (B, Hkv, 1, s, E)
    v = v[:, :, None]
    scores = q @ k.mT
    if cap:
        scores = capped(q[..., :D] @ k[..., :D].mT, cap) + q[..., D:] @ k[..., D:].mT
    wide = at_least_float32(scores.flatten(1, 2))
    if phi is None:
        weights = wide.where(attn_mask, -math.inf).softmax(-1)
    else:  # gelu(-inf) is nan
        wide = wide + torch.where(attn_mask, 0.0, -1e9)
        weights = phi(wide, attn_mask.sum(-1, keepdim=True, dtype=wide.dtype))
    weights = dropped(weights.to(v.dtype), dropout)  # (B, H, t, s)
    return (weights.unflatten(1, scores.shape[1:3]) @ v).flatten(1, 2)  # (B, H, t, E)


def uniform_attention(q: Tensor, k: Tensor, v: Tensor, D: int, mask: Mask, strips: Callable | None = None) -> Tensor:
    """attention with q = k = 0, in O(T): the mean of the visible values. With a position bias, in the columns
    from D on, the weights are the softmax of the bias. Shapes as in attention; k has H heads."""
    if q.size(-1) > D:
        q = torch.cat((torch.zeros_like(q[..., :D]), q[..., D:]), dim=-1)
        return attention(q, k, v, D, mask, strips=strips)
    T, S = q.size(2), k.size(2)
    mask = mask._replace(window=mask.window if mask.window < S else 0)
    if T == 1 and mask.causal and mask.docs is None:
        return v[:, :, -mask.window :].mean(dim=2, keepdim=True)
    total = at_least_float32(v).cumsum(dim=2)
    lo, hi = mask.reach(T, S, v.device)
    if mask.docs is None and not mask.window and mask.causal:
        return (total[:, :, S - T :] / hi[:, None]).to(v.dtype)
    total = F.pad(total, (0, 0, 1, 0))  # (B, H, S + 1, E): the sum of all values before a position
    ends = (x.view(-1, 1, T, 1).expand(len(v), v.size(1), T, v.size(3)) for x in (hi, lo))
    upper, lower = (total.gather(2, end) for end in ends)
    return ((upper - lower) / (hi - lo).view(-1, 1, T, 1)).to(v.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Loss


def cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, softcap=0.0, chunk=0, of_chunk=None, z_loss=0.0
) -> Tensor:
    """Sum of -log softmax(cap(x W^T))[target] over targets >= 0, in nats: x (N, C), W (V, C), targets (N,).

    Logits of at most `chunk` tokens exist at once, see rows_at_once. of_chunk is chunk_loss, or the same function
    compiled. The gradient alone has z_loss times the sum of (log of the softmax's normaliser)^2 (arXiv:2204.02311,
    section 5).
    """
    chunk = equal_rows(len(x), rows_at_once(chunk, len(weight), x.device))
    if x.size(0) <= chunk and not x.is_cuda:  # on a GPU, the compiled loss of one chunk is faster
        logits = capped(at_least_float32(F.linear(x, weight)), softcap)
        total = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
        if z_loss:
            z = z_loss * (logits.logsumexp(-1).square() * (targets >= 0)).sum()
            total = total + (z - z.detach())
        return total
    of_chunk = of_chunk or chunk_loss
    if z_loss:
        of_chunk = partial(of_chunk, z_loss=z_loss)
    options = softcap, chunk, of_chunk, torch.is_grad_enabled()
    return ChunkedCrossEntropy.apply(x, weight, targets, options)


def rows_at_once(chunk: int, vocab_size: int, device: torch.device) -> int:
    """Number of tokens whose logits exist at once in the loss: `chunk`, or if it is 0, as many as fit in 1 GiB of
    float32 on a GPU (5248 for GPT-2's vocabulary), and in 128 MiB elsewhere. In 16 bits, the logits and their gradient
    together take as many bytes; a compiled chunk keeps nothing else."""
    numbers = 2**28 if device.type == "cuda" else 2**25
    fit = max(1, numbers // vocab_size)
    if fit > 128:
        fit = fit // 128 * 128  # matmuls are faster with multiples of 128
    return chunk or fit


def equal_rows(n: int, most: int) -> int:
    """The size of the chunks of n rows, at most `most`: the largest of which all chunks are equal, for one compiled
    graph. If that takes twice the fewest chunks, it is `most`, and the last chunk is shorter."""
    fewest = -(-n // most)
    return next((n // chunks for chunks in range(fewest, 2 * fewest) if n % chunks == 0), most)


def product_(out: Tensor, a: Tensor, b: Tensor, add: bool):
    """out = a b, or with `add` out += a b: a (n, k), b (k, m), and out (n, m) of their dtype, or of float32. CUDA sums
    products of 16 bits in float32, and needs no copy in 16 bits."""
    if out.dtype == a.dtype:
        out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    elif out.is_cuda and add:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    elif out.is_cuda:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
    else:
        out.add_(a @ b) if add else out.copy_(a @ b)


def chunk_loss(
    logits: Tensor, targets: Tensor, softcap: float, gradient: bool, z_loss: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """(sum of cross entropies over targets >= 0, its gradient for the logits or None); logits (N, V), targets (N,)."""
    valid = (targets >= 0)[:, None]
    index = targets.clamp(min=0)[:, None]
    z = capped(at_least_float32(logits), softcap)
    log_p = z.log_softmax(-1)
    total = -(log_p.gather(1, index) * valid).sum()
    if not gradient:
        return total, None
    slope = 1.0
    if softcap > 0:
        slope = 1 - (z / softcap).square()
    if z_loss:
        log_normaliser = z.amax(-1, keepdim=True) - log_p.amax(-1, keepdim=True)
        p = log_p.exp_().mul_(1 + 2 * z_loss * log_normaliser)
    else:
        p = log_p.exp_()
    if torch.compiler.is_compiling():  # this form fuses; a scatter would write p to memory first
        p = p - (torch.arange(z.size(1), device=z.device) == index).to(p.dtype)
    else:
        p.scatter_add_(1, index, torch.full_like(index, -1, dtype=p.dtype))
    return total, p.mul_(valid * slope).to(logits.dtype)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the cross entropies of logits x W^T, which never exist as (N, V): the forward computes loss and gradients
    chunk by chunk. options: the softcap, rows of a chunk, chunk_loss, perhaps compiled, and whether there is a
    backward. The gradients are stored unscaled; the backward multiplies them in place by the
    incoming gradient, which contains the loss scale of float16. So a second backward of the same graph raises
    RuntimeError."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, options: tuple) -> Tensor:
        softcap, chunk, of_chunk, gradient = options
        dtype = matmul_dtype(x)
        wide = torch.promote_types(weight.dtype, torch.float32)  # for the sums over chunks, where FSDP gathers 16 bits
        dx = dW = None
        if gradient:
            dx = torch.empty_like(x)
            dW = torch.empty_like(weight, dtype=wide)
        with torch.autocast(x.device.type, enabled=False):
            W = weight.to(dtype)
            total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
            for start in range(0, x.size(0), chunk):
                rows = slice(start, start + chunk)
                h = x[rows].to(dtype)
                logits = h @ W.mT
                part, p = of_chunk(logits, targets[rows], softcap, gradient)
                total += part
                if gradient:
                    product_(dx[rows], p, W, add=False)
                    product_(dW, p.mT, h, add=start > 0)
                del logits, p  # before the logits of the next chunk are made
        ctx.save_for_backward(dx, dW)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return *(None if x is None else x.mul_(grad) for x in ctx.saved_tensors), None, None


# ---------------------------------------------------------------------------------------------------------------------
# Random numbers


def normal(key: str, shape: tuple, start: tuple, size: tuple, device: torch.device) -> Tensor:
    """float32 numbers from N(0, 1): the part with shape `size`, from index `start` on, of an array of `shape`.

    A number depends only on the key and its place in the array. A hash of both gives two uniform 32-bit numbers, which
    Box and Muller's formula turns into a normal one. float64 makes the results almost always equal on all devices.
    """
    first = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little", signed=True)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    place = torch.full((), first, dtype=torch.int64, device=device)
    for dim in range(1, len(shape)):
        place = place[..., None] + strides[dim] * torch.arange(start[dim], start[dim] + size[dim], device=device)
    out = torch.empty(size, device=device)
    rows = max(1, 2**16 // max(1, place.numel()))  # rows at once, so that the hashes stay in the cache
    for part, row in zip(out.split(rows), torch.arange(size[0], device=device).split(rows), strict=True):
        index = (start[0] + row).mul_(strides[0]).view(-1, *[1] * place.dim()) + place
        bits = index.mul_(-0x61C8864680B583EB)  # splitmix64, whose products wrap around
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
            bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
        radius = ((bits >> 32).bitwise_and_(2**32 - 1).to(torch.float64) + 0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
        part.copy_(bits.bitwise_and_(2**32 - 1).to(torch.float64).mul_(math.tau * 2.0**-32).cos_().mul_(radius))
    return out
