"""Products of linear layers in float8, with a scale for each row; the format is that of arXiv:2209.05433.

    check(cfg, lengths, device)     # ValueError says what does not go together
    apply(model)                    # after tensor parallelism, before recomputation, torch.compile and FSDP

Forward and backward of a layer are three products. Each rounds both factors along the dimension that it sums over.
"""

from functools import partial

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.function import once_differentiable

from data.errors import require
from model import Linear
from ops import matmul_dtype

DTYPE = torch.float8_e4m3fn  # three bits of mantissa
UNIT = 16  # a GPU's products take sizes that are multiples of it
LARGEST = torch.finfo(DTYPE).max


def layers(model: nn.Module) -> dict[str, Linear]:
    """The layers that `apply` changes, by name: those of the blocks, but not experts, grouped layers and routers."""
    return {n: m for n, m in model.named_modules() if type(m) is Linear and m.role not in ("router", "per_head")}


def able(device: torch.device) -> bool:
    """Whether the device multiplies float8."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (8, 9)


def check(cfg, lengths: tuple[int, int], device: torch.device | None = None):
    """ValueError if fp8 does not go with other flags, with the lengths of text and source, or with the device."""
    if device and not able(device):
        name = device.type
        if name == "cuda":
            name = torch.cuda.get_device_name(device)
        fact = f"fp8=True needs an NVIDIA GPU of compute capability 8.9 or later, and the device is {name}"
        raise ValueError(f"{fact}; leave fp8 out")
    wrong = f"fp8=True does not go with dtype={cfg.dtype}; set dtype=bfloat16, or leave fp8 out"
    require(cfg.dtype in ("auto", "bfloat16"), wrong)
    wrong = f"fp8=True does not go with tp={cfg.tp} and bias=True, of which ranks add shares; set tp=1 or bias=False"
    require(cfg.tp == 1 or not cfg.bias, wrong)
    for tokens in (cfg.batch_size * length // cfg.cp for length in lengths):
        fact = f"fp8=True needs a multiple of {UNIT} tokens in a micro-batch of a rank, and batch_size={cfg.batch_size}"
        require(tokens % UNIT == 0, f"{fact} makes {tokens}; change batch_size")


def apply(model: nn.Module):
    """Make the layers multiply in float8, in place. ValueError names one whose sizes are no multiples of 16."""
    for name, layer in layers(model).items():
        outputs, inputs = layer.weight.shape
        fact = f"fp8=True needs multiples of {UNIT}, and {name} has {inputs} inputs and {outputs} outputs on a rank"
        require(outputs % UNIT == inputs % UNIT == 0, f"{fact}; change n_embd, n_head or mlp_ratio, or leave fp8 out")
        layer.forward = partial(linear, layer)


def linear(layer: Linear, x: Tensor) -> Tensor:
    """x W^T + b in the dtype of matrix products: x (..., i) -> (..., o)."""
    dtype = matmul_dtype(x)
    y = Product.apply(x.to(dtype).flatten(0, -2), layer.weight).unflatten(0, x.shape[:-1])
    if layer.bias is not None:
        y = y + layer.bias.to(dtype)
    return y


class Product(torch.autograd.Function):
    """x W^T for x (N, i) and W (o, i), in the dtype of x."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, x.dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        dw = product(grad.t(), x.t(), x.dtype)  # sums over the tokens
        return product(grad, weight.t(), x.dtype), dw.to(weight.dtype)


def product(a: Tensor, b: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """a b^T of rows that are rounded to float8: a (M, K), b (N, K) -> (M, N). As in torchao's recipe for rows, sums are
    `fast`, with fewer bits on some GPUs, in the forward alone."""
    a, a_scale = rounded(a)
    b, b_scale = rounded(b)
    return torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), out_dtype=dtype, use_fast_accum=fast)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (M, K) -> x / scale in float8, row by row in memory, and scale (M, 1), which takes a row's largest to 448."""
    scale = (x.abs().amax(1, keepdim=True).float() / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scale).to(DTYPE).contiguous(), scale
