"""How the model's formulas are computed: functions of tensors, without parameters and flags of their own.

    y = attention(q, k, v, D, Mask(window=256))         # softmax(q k^T / sqrt(D)) v, never as a (T, S) matrix
    total = cross_entropy(x, weight, targets)           # of logits x W^T that never exist as (N, V)

Each docstring has the formula; model.py explains the names of sizes.
"""

import hashlib
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

# Dtypes


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which matrix products with x are computed."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def wide_stream(flag: bool | str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the residual stream is in float32 under this fp32_residual, where matrix products are in `dtype`."""
    if flag == "auto":
        return device.type != "cuda" or dtype != torch.bfloat16
    return flag is True


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


LIMITS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")  # variables of torch's libraries


def limited() -> bool:
    """Whether a variable of LIMITS keeps the libraries from this CPU's instructions."""
    return any(variable in os.environ for variable in LIMITS)


def fast_bfloat16() -> bool:
    """Whether this CPU has instructions for products in bfloat16, of AMX or AVX-512, and is not `limited`. Others
    emulate bfloat16, which can take a hundred times as long as float32."""
    if limited():
        return False
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


FAST_BFLOAT16 = fast_bfloat16()  # asked once, because torch.compile cannot ask


def fast_onednn() -> bool:
    """Whether oneDNN multiplies in float32 faster than MKL, PyTorch's library for it. It does on an AMD with AVX-512:
    MKL takes AVX2 there, as on all CPUs that are not Intel's. The CPU must not be `limited`."""
    if limited() or not torch.cpu._is_avx512_supported():
        return False
    amd = False
    with suppress(OSError):  # without Linux there is no such file
        amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text(errors="replace")
    return amd and torch.backends.mkl.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


FAST_ONEDNN = fast_onednn()


# Operations


# A process may have copies of this file, such as of an export. Those that differ have operations of their own.
NAMESPACE = f"superblock_{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]}"


def one_operation(f: Callable, backward: Callable | None = None, setup: Callable | None = None) -> Callable:
    """f as one operation, into which neither torch.compile nor selective recomputation looks. The decorator of PyTorch,
    custom_op, would import a second's worth of modules at the first call."""
    name = f"{NAMESPACE}::{f.__name__}"
    operations = getattr(torch.ops, NAMESPACE)
    if not hasattr(operations, f.__name__):
        torch.library.define(name, torch.library.infer_schema(f, mutates_args=()))
        torch.library.impl(name, "cpu", f)
        torch.library.register_fake(name, f)
        if backward is not None:
            torch.library.register_autograd(name, backward, setup_context=setup)
    return getattr(operations, f.__name__)


def has_tangent(*tensors: Tensor) -> bool:
    """Whether one of them is differentiated in forward mode, of which operations of this file would know nothing."""
    return not torch.compiler.is_compiling() and any(unpack_dual(x).tangent is not None for x in tensors)


# Linear layers


def product_of_onednn(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T: x (..., i), weight (o, i) -> (..., o)."""
    torch._check(x.size(-1) == weight.size(1), lambda: f"x {(*x.shape,)} does not fit a weight {(*weight.shape,)}")
    return torch.ops.mkldnn._linear_pointwise(x, weight.contiguous(), None, "none", [], "")


product_of_onednn = one_operation(product_of_onednn)  # because Inductor takes oneDNN's own for constant weights alone


class LinearOfOneDNN(torch.autograd.Function):
    """x W^T, whose derivatives of any order are products of oneDNN too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return product_of_onednn(x, weight)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = LinearOfOneDNN.apply(grad, weight.mT)
        if ctx.needs_input_grad[1]:
            dw = LinearOfOneDNN.apply(grad.flatten(0, -2).mT, x.flatten(0, -2).mT)
        return dx, dw


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: x (..., i), weight (o, i), bias (o,) -> (..., o)."""
    if not takes_onednn(x, weight):
        return F.linear(x, weight, bias)
    y = LinearOfOneDNN.apply(x, weight)
    return y if bias is None else y + bias


def takes_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is faster for x W^T. It starts later than MKL, which a small product does not make up for."""
    if not FAST_ONEDNN or device_of_kernels(x) != "cpu" or has_tangent(x, weight):
        return False
    if x.numel() * weight.size(0) < 2**23:  # multiplications
        return False
    return x.dtype == weight.dtype == matmul_dtype(x) == torch.float32


# Norms and elementwise functions


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, in the dtype of x."""
    if bias is not None:
        bias = bias.to(x.dtype)
    with keeping_dtype(x):
        return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the dtype of x. CPUs have a function of ours,
    because PyTorch's takes a dozen passes there; on GPUs it is a fused kernel."""
    if x.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return RMSNormOfCPU.apply(x, weight, eps)
    with keeping_dtype(x):
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def keeping_dtype(x: Tensor) -> AbstractContextManager:
    """A context in which norms of x have its dtype: CUDA's autocast would compute those of 16 bits in float32."""
    if x.dtype in (torch.float32, torch.float64):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


class RMSNormOfCPU(torch.autograd.Function):
    """RMSNorm in few passes. The backward calls LayerNorm's fast kernel with a mean of 0. Because this kernel also
    subtracts the mean of the gradient times the weight, the backward adds it again."""

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
        n = x.size(-1)
        no_mean = torch.zeros_like(rms)
        wanted = (True, True, False)  # the gradients of x and weight; there is no bias
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, (n,), no_mean, rms, weight.to(rms.dtype), None, wanted
        )
        mean = (grad.flatten(0, -2) @ weight.to(grad.dtype)).view(rms.shape) / n
        dx.add_((mean * rms).to(x.dtype))
        return dx, dw.to(weight.dtype), None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + (second half of x, first half of x) sin: x (B, H, T, D), the others (T, D), sin's first half negative."""
    return x * cos + x.roll(x.size(-1) // 2, -1) * sin


def shifted(x: Tensor, i: int) -> Tensor:
    """x (..., T, C) -> x_{t-i} for each t, which is 0 for t < i."""
    if i == 0:
        return x
    return F.pad(x, (0, 0, i, -min(i, x.size(-2))))[..., : x.size(-2), :]


def dropped(x: Tensor, p: float) -> Tensor:
    """Each element of x is 0 with probability p, otherwise divided by 1 - p.

    In eager mode on a CPU, 16 random bits decide on each element, because Bernoulli draws take longer than a small
    model's matrix products. p is rounded to 1 / 65536.
    """
    if p == 0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    limit = min(round(p * 2**16), 2**16 - 1)
    n = x.numel()
    words = torch.empty(math.ceil(n / 4), dtype=torch.int64).random_(-(2**63), None)
    bits = words.view(torch.int16)  # of four elements each
    kept = (bits[:n] >= limit - 2**15).view(x.shape)
    return x * kept.to(x.dtype).mul_(2**16 / (2**16 - limit))


def capped(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap), or x if cap is 0."""
    if cap == 0:
        return x
    return cap * torch.tanh(x / cap)


# Experts


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in float32, also under autocast, because rounding would change which experts are chosen."""
    x = at_least_float32(x)
    weight = at_least_float32(weight)
    if bias is not None:
        bias = at_least_float32(bias)
    if matmul_dtype(x) == x.dtype:
        return F.linear(x, weight, bias)  # also on the meta device, which has no autocast
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x, weight, bias)


def has_values(x: Tensor) -> bool:
    """Whether x has values. Tensors on the meta device and the fake tensors of a plan have only a shape and a dtype."""
    return not x.is_meta and type(x).__name__ != "FakeTensor"


def by_expert(expert: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """expert (N,), numbers below n -> the order (N,) of the rows by expert, and the end of each expert's rows (n,)."""
    order = expert.argsort(stable=True)
    numbers = torch.arange(n, device=expert.device)
    return order, torch.searchsorted(expert[order], numbers, right=True)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, loop: Callable | None) -> Tensor:
    """x_r W_e^T + b_e, where e is the expert of row r. The rows of expert 0 end before ends_0, those of expert 1 follow
    and end before ends_1, and so on. x (N, i), weight (E, o, i), bias (E, o), ends (E,) -> (N, o). `loop`, or
    linear_by_linear if it is None, computes what PyTorch's kernel does not take."""
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
    parts = [linear(rows, w) for rows, w in zip(x.split(sizes), weight, strict=True)]
    return torch.cat(parts)


class WithGradient(torch.autograd.Function):
    """Returns x. In the backward, `parameter` gets the gradient `grad`, though x does not depend on it."""

    @staticmethod
    def forward(ctx, x: Tensor, parameter: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx: Tensor):
        return dx, *ctx.saved_tensors, None


# Attention


class Mask(NamedTuple):
    """Which of S keys each of T queries sees: a range [lo, hi). In self-attention, queries are the last T tokens."""

    causal: bool = True
    window: int = 0  # positions before (and, if not causal, after) the query's, its own included; 0 = all
    # Document numbers of queries (B, T) and keys (B, S), never decreasing; then, if known, the `boundaries` of both.
    docs: tuple[Tensor, ...] | None = None  # the boundaries are for the kernel `varlen` alone

    def visible_range(self, T: int, S: int, device: torch.device) -> tuple[Tensor, Tensor]:
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
            of_queries, of_keys = (numbers.contiguous() for numbers in self.docs[:2])
            lo = lo.maximum(torch.searchsorted(of_keys, of_queries))
            hi = hi.minimum(torch.searchsorted(of_keys, of_queries, right=True))
        return lo, hi


def boundaries(starts: Tensor, T: int) -> Tensor:
    """starts (B, n), where documents 0 ... n - 1 begin in each row of T tokens, or T where a row has no such document
    -> where they begin in all rows joined to one, and the end B T: int32 (B n + 1,). Absent documents are empty."""
    B = len(starts)
    row = T * torch.arange(B, device=starts.device).view(-1, 1)
    firsts = (starts + row).flatten()
    return F.pad(firsts, (0, 1), value=B * T).to(torch.int32)


def attention_kernel(
    mask: Mask, T: int, S: int, slots: bool, mapped: bool, dropout: float, device: str, dtype: torch.dtype, width: int
) -> str:
    """Name of the kernel for the attention of T queries to S keys and to slots. No kernel makes a (T, S) matrix.

    kernel    when; the first row that fits                                     memory of scores and masks
    naive     `mapped`: a softcap, or another map than softmax; or dropout on   (256, S) scores per strip
              a CPU: no fused kernel has them
    products  on a CPU, see takes_products                                      (64, S) scores per strip, and (256, S)
                                                                                weights for the backward
    full      all queries see all keys, or causal with T = S without slots      none: one fused call
    strips    not takes_flash; or slots beside a window, documents              a (128, S) mask; a fused call per strip
    flash     a window, or causal with more keys                                none: one fused call
    varlen    at most 65535 documents, of known boundaries                      none: one fused call
    strips    all else                                                          a (128, S) mask; a fused call per strip
    """
    if mapped or (dropout and device == "cpu"):
        return "naive"
    before = mask.causal and (S > T or slots)  # whether there are keys before the first query's
    limited = bool(mask.window) or mask.docs is not None
    if device == "cpu" and takes_products(mask, T, S, before or limited, dtype):
        return "products"
    if not (before or limited):
        return "full"
    if slots and limited or not takes_flash(device, dtype, width, dropout):
        return "strips"
    if mask.docs is None:
        return "flash"
    if len(mask.docs) > 2 and len(mask.docs[2]) <= 2**16:  # the second size of CUDA's grids
        return "varlen"
    return "strips"


def attention(
    q: Tensor, k: Tensor, v: Tensor, D: int, mask: Mask, softcap=0.0, dropout=0.0,
    slots: tuple[Tensor, Tensor] | None = None, strips: Callable | None = None, phi: Callable | None = None,
) -> Tensor:  # fmt: skip
    """softmax(cap(q k^T / sqrt(D))) v over the keys that the mask admits, and over slots: (B, H, T, E), where E >= D.

    q (B, H, T, E), k and v (B, Hkv, S, E). The columns from D on hold a position bias, which is not capped. slots are
    keys and values (Hkv, M, E) that every query sees. strips is strip_attention, perhaps kept out of torch.compile.
    phi(scores (..., T, S), n (..., T, 1)) replaces the softmax, where n counts the keys that a query sees. It must be 0
    for large negative scores, because hidden keys get these.
    """
    T = q.size(2)
    if T == 1 and mask.causal and mask.docs is None:  # the only query is the last one: it sees the last W keys, or all
        k = k[:, :, -mask.window :]
        v = v[:, :, -mask.window :]
        mask = Mask(causal=False)
    S = k.size(2)
    if mask.window >= S:
        mask = mask._replace(window=0)
    if slots is not None:
        slot_k, slot_v = (x.expand(len(q), -1, -1, -1) for x in slots)
        k = torch.cat((slot_k, k), dim=2)  # (B, Hkv, M + S, E)
        v = torch.cat((slot_v, v), dim=2)
    M = k.size(2) - S
    device = device_of_kernels(q)
    mapped = softcap > 0 or phi is not None
    kernel = attention_kernel(mask, T, S, M > 0, mapped, dropout, device, matmul_dtype(q), q.size(3))
    sdpa = partial(fused_attention, scale=D**-0.5, dropout_p=dropout)
    if kernel == "full":
        return sdpa(q, k, v, is_causal=mask.causal)
    if kernel in ("flash", "varlen"):
        return flash_attention(q, k, v, mask, D**-0.5, dropout)
    if kernel == "products" and not has_tangent(q, k, v):
        return product_attention(q * D**-0.5, k, v, mask, M)
    strips = strips or strip_attention
    if kernel != "naive":  # also products with a tangent, which PyTorch's kernel refuses
        return strips(sdpa, q, k, v, tuple(mask), M, 128)
    naive = partial(naive_attention, D, softcap, dropout, phi)
    return strips(naive, q, k, v, tuple(mask), M, 256)


def device_of_kernels(x: Tensor) -> str:
    """The kind of device for which kernels are chosen. A plan replaces this function, as it has no GPU."""
    return x.device.type


def takes_products(mask: Mask, T: int, S: int, masked: bool, dtype: torch.dtype) -> bool:
    """Whether products are a CPU's fastest kernel, see docs/performance.md. Their strips leave out the keys behind
    them, and they alone multiply in bfloat16. PyTorch's kernel takes longer if it needs a mask, `masked`."""
    if T <= 128 or not (mask.causal or mask.window):
        return False
    if dtype == torch.bfloat16:
        return FAST_BFLOAT16 and (masked or S <= 512)
    return masked and dtype != torch.float16


def takes_flash(device: str, dtype: torch.dtype, width: int, dropout: float = 0.0) -> bool:
    """Whether CUDA's flash operators accept queries of this dtype and width, and the user has not switched them off by
    torch.backends.cuda.enable_flash_sdp(False). float16 is left out, because mostly older GPUs use it."""
    if device != "cuda" or torch.version.hip is not None or dtype != torch.bfloat16:
        return False
    widest = 192 if dropout else 256  # with dropout, the backward of wider heads computes nothing on some GPUs
    return width in range(8, widest + 1, 8) and torch._C._get_flash_sdp_enabled()  # dynamo knows no public one


def fused_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options) -> Tensor:
    """PyTorch's attention in a fused kernel. With a mask or without FlashAttention, keys and values are repeated on
    CUDA, because no fused kernel takes grouped heads then, and PyTorch would make a (T, S) matrix. For at most 256 keys
    on a CPU, bfloat16 inputs become float32, because its backward is up to six times as fast. PyTorch prefers cuDNN's
    kernel on some GPUs. Here, it computes only self-attention with a backward, without mask and dropout, for reasons in
    docs/performance.md."""
    group = q.size(1) // k.size(1)
    dtype = matmul_dtype(q)
    if q.device.type == "cpu" and dtype == torch.bfloat16 and k.size(2) <= 256:
        with torch.autocast("cpu", enabled=False):
            return fused_attention(q.float(), k.float(), v.float(), attn_mask, **options).to(v.dtype)
    flash = attn_mask is None and takes_flash("cuda", dtype, q.size(3))
    if group > 1 and q.device.type == "cuda" and not flash:
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
    cudnn = torch._C._get_cudnn_sdp_enabled()  # torch.compile does not know the public function
    fits = cudnn and attn_mask is None and torch.is_grad_enabled()
    if options.get("dropout_p") or q.size(2) != k.size(2):  # an `and` of sizes is symbolic in graphs
        fits = False
    torch.backends.cuda.enable_cudnn_sdp(fits)  # sdpa_kernel takes 20 times as long
    try:
        return F.scaled_dot_product_attention(q, k, v, attn_mask, enable_gqa=q.size(1) != k.size(1), **options)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dropout: float) -> Tensor:
    """CUDA's FlashAttention, (B, H, T, E). The queries of a text, or of each document, are the last of its keys."""
    B, H, T, E = q.shape
    S = k.size(2)
    dtype = matmul_dtype(q)
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))  # (B, T or S, heads, E)
    ends_q = ends_k = None
    if mask.docs is not None:
        _, _, ends_q, ends_k = mask.docs
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    left = mask.window - 1  # -1 has no limit
    right = 0 if mask.causal else left
    y, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, ends_q, ends_k, T, S, dropout, mask.causal, False, scale=scale, window_size_left=left,
        window_size_right=right,
    )  # fmt: skip
    return y.view(B, T, H, E).transpose(1, 2)


def strip_attention(attend: Callable, q: Tensor, k: Tensor, v: Tensor, mask: tuple, slots: int, rows: int) -> Tensor:
    """Attention in strips of `rows` queries: any mask and score in O(rows S) memory. All queries see the first `slots`
    keys, which have the numbers -slots ... -1. Several strips are recomputed in the backward; a single one is not. mask
    is a tuple of a Mask's fields, because torch.compile passes no named tuple between its graphs."""
    mask = Mask(*mask)
    T = q.size(2)
    S = k.size(2) - slots
    lo, hi = mask.visible_range(T, S, q.device)
    strip = partial(attend_strip, attend, slots)
    if torch.is_grad_enabled() and T > rows:
        strip = partial(checkpoint, strip, use_reentrant=False)
    out = []
    for queries, keys in strips_of(mask.causal, mask.window, T, S, slots, rows):
        out.append(strip(q[:, :, queries], k[:, :, keys], v[:, :, keys], lo[..., queries], hi[..., queries], keys))
    return torch.cat(out, dim=2)


def strips_of(causal: bool, window: int, T: int, S: int, slots: int, rows: int) -> list[tuple[slice, slice]]:
    """For each strip of T queries, its slice, and the slice of slots and S keys that one of its queries may see."""
    strips = []
    for i in range(0, T, rows):
        end = min(i + rows, T)
        first = -slots
        last = S
        if window and not slots:
            first = max(0, S - T + i - window + 1)
        if window:
            last = min(S, S - T + end + window - 1)
        if causal:
            last = S - T + end
        strips.append((slice(i, end), slice(slots + first, slots + last)))
    return strips


def attend_strip(
    attend: Callable, slots: int, q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, keys: slice
) -> Tensor:
    """`attend` with a mask by which each query sees the keys lo ... hi - 1, and slots."""
    return attend(q, k, v, attn_mask=seen_keys(lo, hi, keys, slots))


def seen_keys(lo: Tensor, hi: Tensor, keys: slice, slots: int) -> Tensor:
    """Whether queries see these keys, (1 or B, 1, t, keys): slots, and those with numbers lo ... hi - 1, each (t,) or
    (B, t). Slots come first and have negative numbers."""
    j = torch.arange(keys.start - slots, keys.stop - slots, device=lo.device)
    seen = (j >= lo[..., None]) & (j < hi[..., None])
    if slots:
        seen = seen | (j < 0)
    return seen.view(-1, 1, *seen.shape[-2:])


def product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, slots: int) -> Tensor:
    """Attention of scaled queries by products of matrices, on a CPU."""
    q, k, v = (x.to(matmul_dtype(x)) for x in (q, k, v))
    lo, hi = mask.visible_range(q.size(2), k.size(2) - slots, q.device)
    y, *_ = attention_products(q, k, v, lo, hi, mask.causal, mask.window, slots, torch.is_grad_enabled())
    return y


def attention_products(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, causal: bool, window: int, slots: int, keep: bool
) -> list[Tensor]:
    """Attention of scaled queries in strips of 64, by products of matrices. Shapes as in `attention`; lo and hi are the
    mask's visible range. Returns the result, and with `keep` the weights of the first strips, at most 256 S numbers of
    a head. The backward computes those of the other strips again."""
    B, H, T, E = q.shape
    S = k.size(2)
    left = 256 * S  # numbers that may still be kept
    k = k.flatten(0, 1)  # (B Hkv, S, E)
    v = v.flatten(0, 1)
    out = []
    kept = []
    for rows, keys in strips_of(causal, window, T, S - slots, slots, 64):
        weights = strip_weights(q, k, lo, hi, rows, keys, causal, window, slots)
        out.append((weights @ v[:, keys]).view(B, H, -1, E).transpose(1, 2))
        left -= (rows.stop - rows.start) * (keys.stop - keys.start)
        if keep and left >= 0:
            kept.append(weights)
    return [torch.cat(out, dim=1).transpose(1, 2), *kept]


def strip_weights(
    q: Tensor, k: Tensor, lo: Tensor, hi: Tensor, rows: slice, keys: slice, causal: bool, window: int, slots: int
) -> Tensor:
    """The weights (B Hkv, G t, keys) of t rows of q (B, H, T, E), for these keys of k (B Hkv, S, E). Scores have the
    dtype of q; their softmax is computed in float32 at least, and rounded to it."""
    q = q[:, :, rows]
    B, H, t, E = q.shape
    scores = q.reshape(len(k), -1, E) @ k[:, keys].mT
    if causal and not window and lo.dim() == 1:  # all of them see the keys before the first query's own
        keys = slice(keys.stop - t, keys.stop)
    hidden = ~seen_keys(lo[..., rows], hi[..., rows], keys, slots)
    scores.view(B, H, t, -1)[..., -hidden.size(-1) :].masked_fill_(hidden, -math.inf)
    return scores.softmax(-1)


def attention_products_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, kept: list[Tensor], causal: bool, window: int,
    slots: int,
) -> list[Tensor]:  # fmt: skip
    """The gradients of q, k and v. Those of k and v are sums over strips, in float32 at least."""
    B, H, T, E = q.shape
    k = k.flatten(0, 1)
    v = v.flatten(0, 1)
    dk = at_least_float32(torch.zeros_like(k))
    dv = at_least_float32(torch.zeros_like(v))
    dq = []
    for i, (rows, keys) in enumerate(strips_of(causal, window, T, k.size(1) - slots, slots, 64)):
        if i < len(kept):
            weights = kept[i]
        else:
            weights = strip_weights(q, k, lo, hi, rows, keys, causal, window, slots)
        grad = dy[:, :, rows].reshape(len(k), -1, E)
        dv[:, keys] += weights.mT @ grad
        scores = torch._softmax_backward_data(grad @ v[:, keys].mT, weights, -1, weights.dtype)  # their gradient
        dk[:, keys] += scores.mT @ q[:, :, rows].reshape(len(k), -1, E)
        dq.append((scores @ k[:, keys]).view(B, H, -1, E).transpose(1, 2))
    shape = B, -1, k.size(1), E
    return [torch.cat(dq, dim=1).transpose(1, 2), dk.to(k.dtype).view(shape), dv.to(v.dtype).view(shape)]


def keep_products(ctx, inputs: tuple, output: list[Tensor]):
    q, k, v, lo, hi, *ctx.options, _ = inputs
    ctx.save_for_backward(q, k, v, lo, hi, *output[1:])
    ctx.set_materialize_grads(False)  # autograd would fill as much memory as the weights take with zeros


def gradients_of_products(ctx, grads: list[Tensor]) -> tuple:
    q, k, v, lo, hi, *kept = ctx.saved_tensors
    return *attention_products_backward(grads[0], q, k, v, lo, hi, kept, *ctx.options), *[None] * 6


def no_second_derivative(ctx, grads: list[Tensor]):
    raise RuntimeError("attention_products has no second derivative, like the fused kernels of PyTorch")


attention_products_backward = one_operation(attention_products_backward, no_second_derivative)
attention_products = one_operation(attention_products, gradients_of_products, keep_products)


def naive_attention(
    D: int, cap: float, dropout: float, phi: Callable | None, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor
) -> Tensor:
    """Attention with a softcap or another phi than the softmax, or with dropout on a CPU. Shapes as in attention;
    attn_mask is boolean and broadcasts to (B, H, T, S). Weights are dropped after the softmax."""
    q = (q * D**-0.5).unflatten(1, (k.size(1), -1))  # (B, Hkv, G, t, E)
    k = k[:, :, None]  # (B, Hkv, 1, s, E)
    v = v[:, :, None]
    if cap:
        bias = q[..., D:] @ k[..., D:].mT
        scores = capped(q[..., :D] @ k[..., :D].mT, cap) + bias
    else:
        scores = q @ k.mT
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
        zero = torch.zeros_like(q[..., :D])
        q = torch.cat((zero, q[..., D:]), dim=-1)
        return attention(q, k, v, D, mask, strips=strips)
    T = q.size(2)
    S = k.size(2)
    if T == 1 and mask.causal and mask.docs is None:  # as in decoding
        return v[:, :, -mask.window :].mean(dim=2, keepdim=True)
    total = at_least_float32(v).cumsum(dim=2)
    lo, hi = mask.visible_range(T, S, v.device)
    if mask.docs is None and mask.causal and not 0 < mask.window < S:
        return (total[:, :, S - T :] / hi[:, None]).to(v.dtype)
    total = F.pad(total, (0, 0, 1, 0))  # (B, H, S + 1, E): the sum of all values before a position
    lo = lo.view(-1, 1, T, 1)
    hi = hi.view(-1, 1, T, 1)
    seen = total.take_along_dim(hi, 2) - total.take_along_dim(lo, 2)
    return (seen / (hi - lo)).to(v.dtype)


# Loss


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, softcap=0.0, chunk=0, of_chunk=None) -> Tensor:
    """Sum of -log softmax(cap(x W^T))[target] over targets >= 0, in nats: x (N, C), W (V, C), targets (N,).

    Logits of at most `chunk` tokens exist at once, see rows_at_once. of_chunk is chunk_loss, or the same function
    compiled.
    """
    rows = rows_at_once(len(x), chunk, len(weight), x.device)
    if len(x) <= rows and not x.is_cuda:  # on a GPU, the compiled loss of one chunk is faster
        logits = capped(at_least_float32(linear(x, weight)), softcap)
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    options = softcap, rows, of_chunk or chunk_loss, torch.is_grad_enabled()
    return ChunkedCrossEntropy.apply(x, weight, targets, options)


def rows_at_once(n: int, chunk: int, vocab_size: int, device: torch.device) -> int:
    """How many of n tokens have logits at once in the loss. This is at most `chunk`. chunk=0 means logits of 1 GiB in
    float32 on a GPU, and of 128 MiB elsewhere. All chunks have equal sizes, because a compiled graph has one size,
    unless this would take twice as many chunks."""
    numbers = 2**28 if device.type == "cuda" else 2**25
    most = chunk or max(1, numbers // vocab_size)
    fewest = -(-n // most)
    for chunks in range(fewest, 2 * fewest):
        if n % chunks == 0:
            return n // chunks
    return most


def add_product_(out: Tensor, a: Tensor, b: Tensor):
    """out += a b, for a (n, k), b (k, m) and out (n, m). out has their dtype, or float32: then CUDA sums products of 16
    bits in float32, without a copy in 16 bits."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.is_cuda:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        out.add_(a @ b)


def chunk_loss(logits: Tensor, targets: Tensor, softcap: float, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """(sum of cross entropies over targets >= 0, its gradient for the logits or None); logits (N, V), targets (N,)."""
    valid = (targets >= 0)[:, None]
    index = targets.clamp(min=0)[:, None]
    z = capped(at_least_float32(logits), softcap)
    log_p = z.log_softmax(-1)
    total = -(log_p.gather(1, index) * valid).sum()
    if not gradient:
        return total, None
    p = log_p.exp_()
    if torch.compiler.is_compiling():  # this form fuses; a scatter would write p to memory first
        p = p - (torch.arange(z.size(1), device=z.device) == index).to(p.dtype)
    else:
        p.scatter_add_(1, index, torch.full_like(index, -1, dtype=p.dtype))
    slope = 1.0
    if softcap > 0:
        slope = 1 - (z / softcap).square()
    return total, p.mul_(valid * slope).to(logits.dtype)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the cross entropies of logits x W^T, which never exist as (N, V): the forward computes loss and gradients
    chunk by chunk. options: the softcap, rows of a chunk, chunk_loss, and whether there is a backward. The backward
    can run only once, because it multiplies the stored gradients in place by the incoming one, float16's loss scale."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, options: tuple) -> Tensor:
        softcap, chunk, of_chunk, gradient = options
        dtype = matmul_dtype(x)
        wide = torch.promote_types(weight.dtype, torch.float32)  # for the sums over chunks, where FSDP gathers 16 bits
        dx = dW = None
        if gradient:
            dx = torch.empty_like(x)
            dW = torch.zeros_like(weight, dtype=wide)
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
                    dx[rows] = p @ W
                    add_product_(dW, p.mT, h)
                del logits, p  # before the logits of the next chunk are made
        ctx.save_for_backward(dx, dW)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return *(None if x is None else x.mul_(grad) for x in ctx.saved_tensors), None, None


# Random numbers


def normal(key: str, shape: tuple, start: tuple, size: tuple, device: torch.device) -> Tensor:
    """float32 numbers from N(0, 1): the part with shape `size`, from index `start` on, of an array of `shape`.

    A number depends only on the key and its place in the array. A hash of both gives two uniform 32-bit numbers, which
    Box and Muller's formula turns into a normal one. float64 makes the results almost always equal on all devices.
    """
    digest = hashlib.sha256(key.encode()).digest()
    first = int.from_bytes(digest[:8], "little", signed=True)
    place = torch.full((), first, dtype=torch.int64, device=device)  # of the numbers of a row, the first dimension
    for dim in range(1, len(shape)):
        stride = math.prod(shape[dim + 1 :])
        place = place[..., None] + stride * torch.arange(start[dim], start[dim] + size[dim], device=device)
    out = torch.empty(size, device=device)
    rows = max(1, 2**16 // max(1, place.numel()))  # rows at once, so that the hashes stay in the cache
    for i in range(0, size[0], rows):
        part = out[i : i + rows]
        row = torch.arange(len(part), device=device).add_(start[0] + i).view(-1, *[1] * place.dim())
        bits = splitmix64(row * math.prod(shape[1:]) + place)
        upper = (bits >> 32).bitwise_and_(2**32 - 1).to(torch.float64)
        lower = bits.bitwise_and_(2**32 - 1).to(torch.float64)
        radius = upper.add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
        part.copy_(lower.mul_(math.tau * 2.0**-32).cos_().mul_(radius))
    return out


def splitmix64(x: Tensor) -> Tensor:
    """A hash of each number of int64, whose products wrap around (xoshiro.di.unimi.it/splitmix64.c)."""
    bits = x * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        upper = (bits >> shift).bitwise_and_(2 ** (64 - shift) - 1)
        bits = bits.bitwise_xor_(upper).mul_(factor)
    return bits
