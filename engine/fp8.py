"""Products of linear layers in float8, with a scale for each row (arXiv:2209.05433; torchao's row-wise recipe).

    check(cfg, model, lengths)      # ValueError if sizes do not fit; check_device(cfg, device) asks the hardware
    apply(model)                    # before recomputation, torch.compile and FSDP

An H100 multiplies in float8 at twice its rate in bfloat16. The layers are those of the blocks between the stream and
heads or hidden units; the head, experts, grouped and per-head layers and routers keep their dtype. Forward and backward
are three products, of which each rounds its two factors anew, along the dimension that it sums over.
"""

from functools import partial

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.function import once_differentiable

from data.errors import require
from model import Linear, Model
from ops import matmul_dtype

DTYPE, UNIT = torch.float8_e4m3fn, 16  # three bits of mantissa; a GPU's products take sizes that are multiples of UNIT
LARGEST = torch.finfo(DTYPE).max


def layers(model: Model) -> dict[str, Linear]:
    """The layers that `apply` changes, by name."""
    return {n: m for n, m in model.named_modules() if type(m) is Linear and m.role not in ("router", "per_head")}


def check_device(cfg, device: torch.device):
    """ValueError if the device has no products in float8, or the run's dtype is not bfloat16."""
    cuda = device.type == "cuda" and torch.version.hip is None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    require(
        not cfg.fp8 or cuda and torch.cuda.get_device_capability(device) >= (8, 9),
        f"fp8=True needs a GPU of NVIDIA with compute capability 8.9 or later, and the device is {name}; leave fp8 out",
    )


def check(cfg, model: Model, lengths: tuple[int, int]):
    """ValueError if a size of the products is no multiple of 16, or a flag does not go with fp8. `lengths` are those of
    the text and of the encoder's source; the model is whole."""
    if not cfg.fp8:
        return
    require(cfg.dtype in ("auto", "bfloat16"), f"fp8=True needs dtype=bfloat16, not {cfg.dtype}; set it, or drop fp8")
    require(
        cfg.tp == 1 or not cfg.bias,
        f"fp8=True does not go with tp={cfg.tp} and bias=True, whose layers add a share of the bias; set --bias=False",
    )
    for name, m in layers(model).items():
        cut = {"into": (cfg.tp, 1), "memory": (cfg.tp, 1), "out": (1, cfg.tp)}.get(m.role, (1, 1))
        rows, columns = (size // n for size, n in zip(m.weight.shape, cut, strict=True))
        require(
            rows % UNIT == columns % UNIT == 0,
            f"fp8=True needs sizes that are multiples of {UNIT}, and a rank's {name} has {columns} inputs and {rows} "
            "outputs; change n_embd, n_head or mlp_ratio, or leave fp8 out",
        )
    for length in filter(None, lengths):
        tokens = cfg.batch_size * length // cfg.cp
        require(
            tokens % UNIT == 0,
            f"fp8=True needs a multiple of {UNIT} tokens in a micro-batch, and batch_size={cfg.batch_size} with "
            f"{length} tokens each makes {tokens} on a rank; change batch_size",
        )


def apply(model: nn.Module):
    """Make the layers multiply in float8, in place."""
    for layer in layers(model).values():
        layer.forward = partial(linear, layer)


def linear(layer: Linear, x: Tensor) -> Tensor:
    """x W^T + b in the dtype of matrix products: x (..., i) -> (..., o)."""
    dtype = matmul_dtype(x)
    y = Product.apply(x.to(dtype).flatten(0, -2), layer.weight).unflatten(0, x.shape[:-1])
    return y if layer.bias is None else y + layer.bias.to(dtype)


class Product(torch.autograd.Function):
    """x W^T for x (N, i) and W (o, i), in the dtype of x."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        dw = product(grad.t(), x.t(), x.dtype)  # sums over the tokens
        return product(grad, weight.t(), x.dtype), dw.to(weight.dtype)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b^T of rows that are rounded to float8: a (M, K), b (N, K) -> (M, N). Fast accumulation, as in the recipe."""
    (a, a_scale), (b, b_scale) = rounded(a), rounded(b)
    return torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), out_dtype=dtype, use_fast_accum=True)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (M, K) -> x / scale in float8, row by row in memory, and scale (M, 1), which takes a row's largest to 448."""
    scale = (x.abs().amax(1, keepdim=True).float() / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scale).to(DTYPE).contiguous(), scale
