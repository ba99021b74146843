"""Reads checkpoints of nanoGPT without running code that they may hold."""

import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from configurator import convert, try_flags
from data.errors import require
from data.files import user_path
from engine.interchange.families import FAMILIES, TRANSPOSE
from engine.interchange.huggingface import Pretrained
from model import ModelConfig

REMEDY = "give the ckpt.pt that nanoGPT's train.py wrote"
FLAGS = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "dropout")
GPT2 = FAMILIES["gpt2"].rows.items()  # nanoGPT has GPT-2's names of layers, but stores matrices as we do
NANOGPT = replace(FAMILIES["gpt2"], rows={ours: tuple(x for x in row if x is not TRANSPOSE) for ours, row in GPT2})


def read_nanogpt(file: str | Path) -> tuple[dict, dict[str, Tensor], dict]:
    """(model_args, tensors, config) of nanoGPT's ckpt.pt. Raises FileNotFoundError, or ValueError if the file holds
    anything else, or more than tensors and plain values."""
    file = user_path(file)
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}; {REMEDY}")
    try:
        # With mmap, the optimizer's two thirds of the file are never read.
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        model_args, model, config = (dict(checkpoint[key]) for key in ("model_args", "model", "config"))
    except Exception as error:  # a damaged archive can make torch.load raise nearly anything
        fact = f"{file} is damaged, holds more than tensors and plain values, or lacks model_args, model or config"
        raise ValueError(f"{fact} ({type(error).__name__}); {REMEDY}") from error
    tensors = {re.sub(r"^((module|_orig_mod)[.])*", "", str(name)): x for name, x in model.items()}  # of DDP, compile
    return model_args, tensors, config


def from_nanogpt(model_args: dict, state: dict[str, Tensor]) -> Pretrained:
    """Our flags and our parameters. ValueError names a tensor that is absent, has another shape, or is not a dense
    floating-point tensor. Whether its numbers are finite is known when it is asked for."""
    place = "nanoGPT checkpoint"
    model_args = {"bias": True, "dropout": 0.0} | model_args  # which older checkpoints lack
    try:
        flags = {name: convert(ModelConfig, name, model_args.get(name), "model_args") for name in FLAGS}
        require("lm_head.weight" in state, "lm_head.weight is absent")
        for name, x in state.items():
            dense = isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta
            require(dense, f"{name} is no dense tensor whose numbers the file holds")
        try_flags(ModelConfig(**flags))
    except ValueError as error:
        raise ValueError(f"{place}: {error}; {REMEDY}") from None
    return Pretrained(place, NANOGPT, {}, flags, state, REMEDY)
