"""Reads checkpoints of nanoGPT without running code that they may hold.

model_args, tensors, info = read_nanogpt("out/ckpt.pt")
flags, tensors = from_nanogpt(model_args, tensors)       our flags and our parameter names
"""

import os
import pickle
import re
import warnings
from dataclasses import replace
from pathlib import Path
from zipfile import is_zipfile

import torch
from torch import Tensor

from data.errors import require
from engine.interchange.families import FAMILIES
from engine.interchange.huggingface import shapes_of
from engine.interchange.keys import describe
from engine.interchange.layouts import TRANSPOSE
from model import ModelConfig

REMEDY = "give the ckpt.pt that nanoGPT's train.py wrote"
# Keys of model_args: None = required; other values are those that older checkpoints without the key were trained with.
NANOGPT_ARGS = dict(n_layer=None, n_head=None, n_embd=None, block_size=None, vocab_size=None, bias=True, dropout=0.0)
GPT2 = FAMILIES["gpt2"].rows.items()  # nanoGPT has GPT-2's names of layers, but stores matrices as we do
NANOGPT = replace(FAMILIES["gpt2"], rows={ours: tuple(x for x in row if x is not TRANSPOSE) for ours, row in GPT2})


def read_nanogpt(file: str | Path) -> tuple[dict, dict[str, Tensor], dict]:
    """(model_args, tensors, info) of nanoGPT's ckpt.pt; info has iter_num, best_val_loss and config.

    Raises FileNotFoundError, or ValueError if the file is no checkpoint of nanoGPT or holds anything besides tensors
    and plain values.
    """
    file = Path(os.path.expanduser(file))
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}; {REMEDY}")
    try:
        # With mmap, the optimizer's two thirds of the file are never read. Files older than torch 1.6 have no mmap.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for example about quantized tensors, which _flaw refuses
            checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file} is not loaded, as it holds more than tensors and plain values; {REMEDY}") from error
    except Exception as error:  # a damaged archive can make torch.load raise nearly anything
        raise ValueError(f"{file} is damaged or of another kind ({type(error).__name__}); {REMEDY}") from error

    def entry(name: str, *kinds: type):
        value = checkpoint[name] if isinstance(checkpoint, dict) and name in checkpoint else None
        if isinstance(value, Tensor) and float in kinds and not _flaw(value) and value.numel() == 1:
            value = value.item()  # nanoGPT stores best_val_loss as a tensor
        if not isinstance(value, kinds):
            text = f"its {name} is {_describe(value)}, not of type {kinds[0].__name__}"
            raise ValueError(f"{file} is no nanoGPT checkpoint: {text}; {REMEDY}")
        return value

    model, config = entry("model", dict), entry("config", dict)
    info = {"iter_num": entry("iter_num", int), "best_val_loss": float(entry("best_val_loss", float)), "config": config}
    for name in model:
        known = isinstance(name, str)
        require(known, f"{file} is no nanoGPT checkpoint: {_describe(name)} is no name of a tensor; {REMEDY}")
    tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in model.items()}  # torch.compile's prefix
    both = f"{file} holds tensors with and without the prefix _orig_mod. of the same name"
    require(len(tensors) == len(model), f"{both}; {REMEDY}")
    return entry("model_args", dict), tensors, info


def from_nanogpt(model_args: dict, state: dict[str, Tensor]) -> tuple[dict, dict[str, Tensor]]:
    """Our flags and our parameters in float32, without head.weight, which is tied to wte.weight.

    ValueError names a tensor that is absent, has another shape, or is not a dense floating-point tensor of finite
    numbers. nanoGPT orders the rows of q, k and v as (3, H, D); our order is (H, 3, D).
    """
    flags = {name: model_args.get(name, default) for name, default in NANOGPT_ARGS.items()}
    for name, value in flags.items():
        if name == "bias":
            good, wanted = type(value) is bool, "True or False"
        elif name == "dropout":
            good, wanted = type(value) in (int, float) and 0 <= value < 1, "a number in [0, 1)"
        else:
            good, wanted = type(value) is int and 0 < value < 2**31, "a positive whole number below 2**31"
        require(good, f"nanoGPT checkpoint: model_args has {name}={_describe(value)}; {wanted} is needed")
    fact = f"n_head={flags['n_head']} does not divide n_embd={flags['n_embd']}"
    require(flags["n_embd"] % flags["n_head"] == 0, f"nanoGPT checkpoint: {fact}; {REMEDY}")
    # The causal mask was a buffer before torch 2.0.
    state = {name: t for name, t in state.items() if not re.fullmatch(r"transformer\.h\.\d+\.attn\.bias", name)}

    def check(theirs: str, shape: tuple[int, ...]):
        flaw = _flaw(state[theirs]) if theirs in state else "absent"
        fact = f"{theirs} is {flaw or tuple(state[theirs].shape)}, but its model_args mean {tuple(shape)}"
        require(not flaw and state[theirs].shape == shape, f"nanoGPT checkpoint: {fact}; {REMEDY}")

    def take(theirs: str, shape: tuple[int, ...]) -> Tensor:
        check(theirs, shape)
        tensor = state.pop(theirs).detach().float()
        finite = all(x.isfinite() for x in tensor.aminmax())  # needs no memory; one NaN makes both NaN
        fact = f"{theirs} holds numbers that are not finite"
        require(finite, f"nanoGPT checkpoint: {fact}; give a checkpoint from before the training diverged")
        return tensor

    # The file has tensors of each size and of each layer, so a model of these sizes can be made.
    check("transformer.wte.weight", (flags["vocab_size"], flags["n_embd"]))
    check("transformer.wpe.weight", (flags["block_size"], flags["n_embd"]))
    for i in range(flags["n_layer"]):
        check(f"transformer.h.{i}.ln_1.weight", (flags["n_embd"],))
    ours, cfg = {}, ModelConfig(**flags)
    for name, shape in shapes_of(cfg).items():
        (theirs,), conversions = NANOGPT.source(name)
        ours[name] = take(theirs, shape)
        for conversion in conversions:
            ours[name] = conversion.read(ours[name], cfg, {})
    tied = torch.equal(take("lm_head.weight", ours["wte.weight"].shape), ours["wte.weight"])
    require(tied, "nanoGPT checkpoint: lm_head.weight differs from transformer.wte.weight; nanoGPT ties them")
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
    return f"a {type(value).__name__}" if isinstance(value, Tensor) else describe(value)
