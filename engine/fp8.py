"""Products of linear layers in float8, with a scale for each tensor (arXiv:2209.05433).

    check(cfg, device)         # ValueError says what does not go together
    apply(model, tokens)       # after tensor parallelism, before recomputation, torch.compile and FSDP

A scale is that of a factor as this rank multiplies it: a slice under tensor parallelism, a weight that FSDP has
gathered, its own tokens. So layouts differ by rounding, and ranks exchange no scales. Others measured, relative to
bfloat16: 1.17, with a scale per row 0.90 (nanochat, dev/LOG.md); 1.19 and 1.10 (Llama 3 8B on H100s,
github.com/pytorch/ao/pull/1793). It was not measured here.
"""

from functools import partial

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.function import once_differentiable

from data.errors import require
from engine.device import device_name
from model import Linear
from ops import matmul_dtype

DTYPE = torch.float8_e4m3fn  # of inputs and weights: three bits of mantissa
GRADIENT = torch.float8_e5m2  # two, and a wider range, as gradients of a tensor differ most in size
UNIT = 16  # a GPU's products take sizes that are multiples of it
SMALL = (1024, 4096)  # no gain in layers whose smaller and larger size are at most these


def layers(model: nn.Module) -> dict[str, Linear]:
    """The layers that `apply` changes, by name: of the blocks, but not experts, grouped layers, routers, those whose
    forward tensor parallelism has replaced, for a bias, and those of other sizes. Small ones took up to 40 % longer in
    github.com/pytorch/torchtitan/issues/1207. SMALL has the numbers of torchao's filter for tensors, here in either
    order, as the backward's products exchange the sizes."""
    found = {}
    for name, m in model.named_modules():
        if type(m) is Linear and m.role not in ("vocab", "router") and "forward" not in vars(m):
            low, high = sorted(m.weight.shape)
            gains = low > SMALL[0] or high > SMALL[1]
            if gains and low % UNIT == high % UNIT == 0:
                found[name] = m
    return found


def check(cfg, device: torch.device | None = None):
    """ValueError if fp8 does not go with the dtype, or with the device."""
    nvidia = device and device.type == "cuda" and torch.version.hip is None
    if device and not (nvidia and torch.cuda.get_device_capability(device) >= (8, 9)):
        fact = "fp8=True needs an NVIDIA GPU of compute capability 8.9 or later"
        raise ValueError(f"{fact}, and the device is {device_name(device)}; leave fp8 out")
    wrong = f"fp8=True does not go with dtype={cfg.dtype}; set dtype=bfloat16, or leave fp8 out"
    require(cfg.dtype in ("auto", "bfloat16"), wrong)


def apply(model: nn.Module, tokens: int) -> int:
    """Make `layers` multiply in float8, in place, and return their number: 0 if no product takes the `tokens` of a
    micro-batch on this rank."""
    if tokens % UNIT:
        return 0
    changed = layers(model)
    for layer in changed.values():
        layer.forward = partial(linear, layer)
    return len(changed)


def linear(layer: Linear, x: Tensor) -> Tensor:
    """x W^T + b in the dtype of matrix products: x (..., i) -> (..., o). Where the number of tokens is no multiple of
    UNIT, as in a last batch, not in float8."""
    if x.numel() // x.size(-1) % UNIT:
        return Linear.forward(layer, x)
    dtype = matmul_dtype(x)
    y = Product.apply(x.to(dtype).flatten(0, -2), layer.weight).unflatten(0, x.shape[:-1])
    if layer.bias is not None:
        y = y + layer.bias.to(dtype)
    return y


class Product(torch.autograd.Function):
    """x W^T for x (N, i) and W (o, i), in the dtype of x. x is kept in float8. W is rounded again in the backward: with
    FSDP, a copy in float8 would stay while the gathered weights are freed. As in torchao, sums have fewer bits on some
    GPUs (use_fast_accum) in the forward alone."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scale = rounded(x)
        w8, scale = rounded(weight)
        ctx.save_for_backward(x8, x_scale, weight, scale)
        return torch._scaled_mm(x8, w8.t(), x_scale, scale, out_dtype=x.dtype, use_fast_accum=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x8, x_scale, weight, scale = ctx.saved_tensors
        g8, g_scale = rounded(grad, GRADIENT)
        columns, _ = rounded(weight.t(), DTYPE, scale)  # the second factor of a product is stored by columns
        dx = torch._scaled_mm(g8, columns.t(), g_scale, scale, out_dtype=grad.dtype)
        g8 = g8.t().contiguous()  # for a sum over the tokens
        dw = torch._scaled_mm(g8, x8.t().contiguous().t(), g_scale, x_scale, out_dtype=grad.dtype)
        return dx, dw.to(weight.dtype)


def rounded(x: Tensor, dtype: torch.dtype = DTYPE, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x / scale in float8, row by row in memory, and the scale (), by default that which makes the largest the dtype's
    largest."""
    if scale is None:
        scale = x.abs().amax().float() / torch.finfo(dtype).max
        scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    return (x.float() / scale).to(dtype).contiguous(), scale
