"""Reads checkpoints of nanoGPT without running code that they may hold.

model_args, tensors, info = read_nanogpt("out/ckpt.pt")
flags, tensors = from_nanogpt(model_args, tensors)       our flags and our parameter names
"""

import os
import pickle
import re
import reprlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from zipfile import is_zipfile

import torch
from torch import Tensor

# Keys of model_args: None = required; other values are those that older checkpoints without the key were trained with.
NANOGPT_ARGS = dict(n_layer=None, n_head=None, n_embd=None, block_size=None, vocab_size=None, bias=True, dropout=0.0)


def read_nanogpt(file: str | Path) -> tuple[dict, dict[str, Tensor], dict]:
    """(model_args, tensors, info) of nanoGPT's ckpt.pt; info has iter_num, best_val_loss and config.

    Raises FileNotFoundError, or ValueError if the file is no checkpoint of nanoGPT or holds anything besides tensors
    and plain values.
    """
    remedy = "give the ckpt.pt that nanoGPT's train.py wrote"
    file = Path(os.path.expanduser(file))
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}; {remedy}")
    try:
        # With mmap, the optimizer's two thirds of the file are never read. Files older than torch 1.6 have no mmap.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for example about quantized tensors, which _flaw refuses
            checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file} is not loaded, as it holds more than tensors and plain values; {remedy}") from error
    except Exception as error:  # a damaged archive can make torch.load raise nearly anything
        raise ValueError(f"{file} is damaged or of another kind ({type(error).__name__}); {remedy}") from error

    def entry(name: str, *kinds: type):
        value = checkpoint[name] if isinstance(checkpoint, dict) and name in checkpoint else None
        if isinstance(value, Tensor) and float in kinds and not _flaw(value) and value.numel() == 1:
            value = value.item()  # nanoGPT stores best_val_loss as a tensor
        if not isinstance(value, kinds):
            kind = kinds[0].__name__
            text = f"its {name} is {_describe(value)}, not of type {kind}"
            raise ValueError(f"{file} is no nanoGPT checkpoint: {text}; {remedy}")
        return value

    model, config = entry("model", dict), entry("config", dict)
    info = {"iter_num": entry("iter_num", int), "best_val_loss": float(entry("best_val_loss", float)), "config": config}
    for name in model:
        if not isinstance(name, str):
            raise ValueError(f"{file} is no nanoGPT checkpoint: {_describe(name)} is no name of a tensor; {remedy}")
    tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in model.items()}  # torch.compile's prefix
    if len(tensors) < len(model):
        raise ValueError(f"{file} holds tensors with and without the prefix _orig_mod. of the same name; {remedy}")
    return entry("model_args", dict), tensors, info


def from_nanogpt(model_args: dict, state: dict[str, Tensor]) -> tuple[dict, dict[str, Tensor]]:
    """Our flags and our parameters in float32, without head.weight, which is tied to wte.weight.

    ValueError names a tensor that is absent, has another shape, or is not a dense floating-point tensor of finite
    numbers. nanoGPT orders the rows of q, k and v as (3, H, D); our order is (H, 3, D).
    """
    flags = {name: model_args.get(name, default) for name, default in NANOGPT_ARGS.items()}
    for name, value in flags.items():
        if name == "bias" and type(value) is not bool:
            raise ValueError(f"nanoGPT checkpoint: model_args has bias={_describe(value)}; True or False is needed")
        if name == "dropout" and not (type(value) in (int, float) and 0 <= value < 1):
            raise ValueError(
                f"nanoGPT checkpoint: model_args has dropout={_describe(value)}; a number in [0, 1) is needed"
            )
        if name not in ("bias", "dropout") and not (type(value) is int and 0 < value < 2**31):
            fact = f"model_args has {name}={_describe(value)}"
            raise ValueError(f"nanoGPT checkpoint: {fact}; a positive whole number below 2**31 is needed")
    if flags["n_embd"] % flags["n_head"]:
        fact = f"n_head={flags['n_head']} does not divide n_embd={flags['n_embd']}"
        raise ValueError(f"nanoGPT checkpoint: {fact}; give the file that nanoGPT's train.py wrote")
    # The causal mask was a buffer before torch 2.0.
    state = {name: t for name, t in state.items() if not re.fullmatch(r"transformer\.h\.\d+\.attn\.bias", name)}
    ours = {}

    def take(theirs: str, shape: tuple[int, ...]) -> Tensor:
        tensor = state.pop(theirs, None)
        flaw = "absent" if tensor is None else _flaw(tensor)
        if flaw or tensor.shape != shape:
            fact = f"{theirs} is {flaw or tuple(tensor.shape)}, but its model_args mean {shape}"
            raise ValueError(f"nanoGPT checkpoint: {fact}; give the file that nanoGPT's train.py wrote")
        tensor = tensor.detach().float()
        if not all(x.isfinite() for x in tensor.aminmax()):  # needs no memory; one NaN makes both NaN
            fact = f"{theirs} holds numbers that are not finite"
            raise ValueError(f"nanoGPT checkpoint: {fact}; give a checkpoint from before the training diverged")
        return tensor

    for name, theirs, shape in _nanogpt_layers(**flags):
        ours[name] = take(theirs, shape)
        if ".qkv." in name:
            rows = ours[name].view(3, flags["n_head"], -1, *shape[1:])  # (3, H, D, C), or (3, H, D) for the bias
            ours[name] = rows.transpose(0, 1).reshape(shape)
    if not torch.equal(take("lm_head.weight", ours["wte.weight"].shape), ours["wte.weight"]):
        raise ValueError("nanoGPT checkpoint: lm_head.weight differs from transformer.wte.weight; nanoGPT ties them")
    if state:
        raise ValueError(f"nanoGPT checkpoint: {_describe(min(state))} is no tensor of nanoGPT's model; remove it")
    return flags, ours


def _flaw(tensor: object) -> str:
    """Why `tensor` cannot be used as weights; "" if it can."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_nested:
        return _describe(tensor)
    if tensor.layout != torch.strided or tensor.is_quantized:
        return "a quantized tensor" if tensor.is_quantized else f"a sparse tensor ({tensor.layout})"
    if tensor.is_meta:
        return "a meta tensor, which holds no numbers"
    if tensor.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return f"of {tensor.dtype}, which is no type of weights"
    if tensor.untyped_storage().nbytes() < tensor.nbytes:
        return f"{tuple(tensor.shape)} of fewer numbers, expanded"
    return ""


def _describe(value: object) -> str:
    """A short text for an untrusted value, safe to print."""
    if isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return " ".join(ascii(reprlib.repr(value))[1:-1].split())[:80]


def _nanogpt_layers(
    n_layer: int, n_embd: int, block_size: int, vocab_size: int, bias: bool, **_: object
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(our name, nanoGPT's name, shape) of every parameter."""
    C = n_embd

    def module(name: str, theirs: str, *shape: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        yield f"{name}.weight", f"transformer.{theirs}.weight", shape
        if bias:
            yield f"{name}.bias", f"transformer.{theirs}.bias", shape[:1]

    yield "wte.weight", "transformer.wte.weight", (vocab_size, C)
    yield "pos.wpe.weight", "transformer.wpe.weight", (block_size, C)
    for i in range(n_layer):
        yield from module(f"blocks.{i}.sums.0.before", f"h.{i}.ln_1", C)
        yield from module(f"blocks.{i}.sums.0.attn.qkv", f"h.{i}.attn.c_attn", 3 * C, C)
        yield from module(f"blocks.{i}.sums.0.attn.out", f"h.{i}.attn.c_proj", C, C)
        yield from module(f"blocks.{i}.sums.1.before", f"h.{i}.ln_2", C)
        yield from module(f"blocks.{i}.sums.1.mlp.up", f"h.{i}.mlp.c_fc", 4 * C, C)
        yield from module(f"blocks.{i}.sums.1.mlp.down", f"h.{i}.mlp.c_proj", C, 4 * C)
    yield from module("norm", "ln_f", C)
