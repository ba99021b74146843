"""FlashAttention 3 or 4 instead of PyTorch's kernels, where the card and a package are there.

torch.nn.attention registers them for the operators that ops.py calls. One is kept only if it computes small inputs as
PyTorch's kernels do: torch 2.11 has FA3 without a backward, and not every package of FA4 fits
(github.com/pytorch/pytorch/issues/190212). Neither results nor speed were seen: no GPU with a package was at hand.
"""

import torch
import torch.nn.attention
from torch import Tensor

import ops
from data.errors import reason, require
from ops import Mask

KERNELS = {9: ("FA3", "FA4"), 10: ("FA4",)}  # major compute capability -> what PyTorch lets it run
CLOSE = 2**-6  # largest difference relative to a norm, of which rounding to bfloat16 makes about 2^-9


def newest(cfg, device: torch.device, dtype: torch.dtype) -> str:
    """Activate the newest kernels that work here, and say which run; "" if the run or the card takes none."""
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if activate and torch.nn.attention.current_flash_attention_impl():  # of an earlier run of this process
        torch.nn.attention.restore_flash_attention_impl()
    usable = not cfg.dropout and cfg.pos != "alibi"  # which they do not have, and whose bias makes keys wider
    if not (activate and usable and ops.takes_flash(device.type, dtype, cfg.head_size)):
        return ""
    major, _ = torch.cuda.get_device_capability(device)
    if major not in KERNELS:
        return ""
    expected = results(cfg, device)
    causes = []
    for name in KERNELS[major]:
        try:
            activate(name)
            pairs = zip(results(cfg, device), expected, strict=True)
            require(all((x - y).norm() <= CLOSE * y.norm() for x, y in pairs), "its results differ")
            torch.backends.cuda.enable_cudnn_sdp(False)  # which PyTorch would prefer for plain attention
            return f", by {name}"
        except Exception as error:  # a foreign package may raise anything
            causes.append(f"{name}: {reason(error)}")
        if torch.nn.attention.current_flash_attention_impl():
            torch.nn.attention.restore_flash_attention_impl()
    return f", by PyTorch's kernels ({'; '.join(causes)})"


def results(cfg, device: torch.device) -> list[Tensor]:
    """Attention of the last tokens of two texts, and its gradients, for each kind of mask that the operators take."""
    T, S = 128, 256
    random = torch.Generator(device).manual_seed(0)
    sizes = [(T, cfg.n_head), (S, cfg.kv_heads), (S, cfg.kv_heads)]
    drawn = [torch.randn(2, H, n, cfg.head_size, generator=random, device=device) for n, H in sizes]
    inputs = [x.bfloat16().requires_grad_() for x in drawn]
    of_queries = ops.boundaries(torch.tensor([[0, 0], [0, T]], device=device), T)
    of_keys = ops.boundaries(torch.tensor([[0, 100], [0, S]], device=device), S)  # the first text has two documents
    found = []
    for mask in (Mask(), Mask(window=64), Mask(False, 64), Mask(docs=(of_queries, of_keys, of_queries, of_keys))):
        y = ops.flash_attention(*inputs, mask, cfg.head_size**-0.5, 0.0)
        found += [y, *torch.autograd.grad(y.float().square().sum(), inputs)]
    return found
