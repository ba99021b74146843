"""Reads checkpoints of nanoGPT without running code that they may hold."""

import os
import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from zipfile import is_zipfile

import torch
from torch import Tensor

from data.errors import require
from engine.interchange.config import Keys, describe
from engine.interchange.families import FAMILIES, TRANSPOSE
from engine.interchange.huggingface import Pretrained, Stored
from model import ModelConfig

REMEDY = "give the ckpt.pt that nanoGPT's train.py wrote"
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
GPT2 = FAMILIES["gpt2"].rows.items()  # nanoGPT has GPT-2's names of layers, but stores matrices as we do
NANOGPT = replace(FAMILIES["gpt2"], rows={ours: tuple(x for x in row if x is not TRANSPOSE) for ours, row in GPT2})


def read_nanogpt(file: str | Path) -> tuple[dict, dict[str, Tensor], dict]:
    """(model_args, tensors, info) of nanoGPT's ckpt.pt; info has iter_num, best_val_loss and config. Raises
    FileNotFoundError, or ValueError if the file holds anything else, or more than tensors and plain values."""
    file = Path(os.path.expanduser(file))
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}; {REMEDY}")
    try:
        # With mmap, the optimizer's two thirds of the file are never read. Files older than torch 1.6 have no mmap.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for example about quantized tensors, which _stored refuses
            checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file} is not loaded, as it holds more than tensors and plain values; {REMEDY}") from error
    except Exception as error:  # a damaged archive can make torch.load raise nearly anything
        raise ValueError(f"{file} is damaged or of another kind ({type(error).__name__}); {REMEDY}") from error

    def entry(name: str, kind: type):
        value = checkpoint.get(name) if isinstance(checkpoint, dict) else None
        if kind is float and not _stored(value).flaw and value.numel() == 1:
            value = value.item()  # nanoGPT stores best_val_loss as a tensor
        fact = f"its {name} is {describe(value)}, not of type {kind.__name__}"
        require(isinstance(value, kind), f"{file} is no nanoGPT checkpoint: {fact}; {REMEDY}")
        return value

    model, info = entry("model", dict), {"iter_num": entry("iter_num", int), "config": entry("config", dict)}
    info["best_val_loss"] = entry("best_val_loss", float)
    for name in model:
        known = isinstance(name, str)
        require(known, f"{file} is no nanoGPT checkpoint: {describe(name)} is no name of a tensor; {REMEDY}")
    tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in model.items()}  # torch.compile's prefix
    both = f"{file} holds tensors with and without the prefix _orig_mod. of the same name"
    require(len(tensors) == len(model), f"{both}; {REMEDY}")
    return entry("model_args", dict), tensors, info


def from_nanogpt(model_args: dict, state: dict[str, Tensor]) -> tuple[dict, dict[str, Tensor]]:
    """Our flags and our parameters in float32, without head.weight, which is tied to wte.weight. ValueError names a
    tensor that is absent, has another shape, or is not a dense floating-point tensor of finite numbers."""
    place, keys = "nanoGPT checkpoint", Keys(model_args, dict(bias=True, dropout=0.0))  # which older checkpoints lack
    try:
        flags = {name: keys(name, int) for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
        flags |= {"bias": keys("bias", bool), "dropout": keys("dropout", float)}
        require("lm_head.weight" in state, "lm_head.weight is absent")
        ModelConfig(**flags)  # may raise
    except ValueError as error:
        raise ValueError(f"{place}: {error}; {REMEDY}") from None
    stored = {name: _stored(x) for name, x in state.items()}
    return flags, dict(Pretrained(place, NANOGPT, {}, flags, stored, "model_args", REMEDY))


def _stored(x: object) -> Stored:
    """The value of a checkpoint as weights, or why it cannot be any."""
    dense = type(x) in (Tensor, torch.nn.Parameter) and not x.is_nested and x.layout == torch.strided
    if dense and x.dtype in FLOATS and not x.is_meta and x.untyped_storage().nbytes() >= x.nbytes:
        return Stored(tuple(x.shape), "", x.detach)
    found = describe(x)
    if isinstance(x, Tensor):
        found += f" of {x.dtype} on {x.device.type}, {x.layout}"
    return Stored((), f"is {found}, not a dense tensor of floating-point numbers that the file holds; {REMEDY}", None)
