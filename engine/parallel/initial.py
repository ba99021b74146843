"""Refuses, by name, parameters and buffers whose values a model that is built in parts would lose."""

from torch import Tensor, nn

from model import Model


def check_initial(model: nn.Module):
    """ValueError names a parameter whose module does not declare its initial values, one into which __init__ has
    written, or a buffer. A model on the meta device has none of these values."""
    for path, module in model.named_modules():
        declared = getattr(module, "initial", {})
        reset = getattr(module, "reset_parameters", None)  # which writes in PyTorch's layers, and not in ours
        drawn = reset is not None and reset.__module__ != Model.__module__
        for name, p in module.named_parameters(recurse=False):
            if p.dim() == 0:
                raise ValueError(f"{path}.{name} has no dimensions, one of which FSDP cuts; give it the shape (1,)")
            fault = ""
            if name not in declared:
                fault = "begins with no declared values;"
            elif p._version > 0 and not drawn:
                fault = "is written in __init__; instead,"
            if fault:
                value = "Normal(0.02)" if p.dim() > 1 else "0.0"
                remedy = f'give its {type(module).__name__} an initial = {{"{name}": {value}}}, or others'
                raise ValueError(f"{path}.{name} {fault} {remedy}")
        for name, value in declared.items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ValueError(f"initial[{name!r}] of {path} has no values; make this tensor with device='cpu'")
    for name, _ in model.named_buffers():
        raise ValueError(f"{name} is a buffer, whose values a model built in parts loses; compute it in forward")
