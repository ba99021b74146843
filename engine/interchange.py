"""Weights from other programs, read without running any code that their files may hold.

model_args, tensors, info = read_nanogpt("out/ckpt.pt")
flags, tensors = from_nanogpt(model_args, tensors)       our flags and our parameter names
"""

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from zipfile import is_zipfile

import torch
from torch import Tensor

# None: the key must be there. The others stand for what older checkpoints, which lack the key, were trained with.
NANOGPT_ARGS = dict(n_layer=None, n_head=None, n_embd=None, block_size=None, vocab_size=None, bias=True, dropout=0.0)


def read_nanogpt(file: str | Path) -> tuple[dict, dict[str, Tensor], dict]:
    """(model_args, tensors, info) of nanoGPT's ckpt.pt; info has iter_num, best_val_loss and config.

    Raises FileNotFoundError, or ValueError if the file is no such checkpoint or holds anything besides tensors and
    plain values.
    """
    remedy = "give the ckpt.pt that nanoGPT's train.py wrote"
    file = Path(file).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}; {remedy}")
    try:
        # Mapped, the optimizer's two thirds of the file are never read. Files older than torch 1.6 cannot be mapped.
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file} holds more than tensors and plain values, and is not loaded; {remedy}") from error
    except Exception as error:  # a damaged archive can make torch.load raise nearly anything
        raise ValueError(f"{file} is damaged or of another kind ({type(error).__name__}); {remedy}") from error
    try:
        # Trained with torch.compile, every name has a prefix.
        tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in checkpoint["model"].items()}
        info = {"iter_num": int(checkpoint["iter_num"]), "best_val_loss": float(checkpoint["best_val_loss"])}
        return dict(checkpoint["model_args"]), tensors, info | {"config": dict(checkpoint["config"])}
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{file} is no nanoGPT checkpoint ({error!r}); {remedy}") from error


def from_nanogpt(model_args: dict, state: dict[str, Tensor]) -> tuple[dict, dict[str, Tensor]]:
    """Our flags and our parameters, without head.weight, which is tied to wte.weight. Raises ValueError.

    nanoGPT fuses q, k and v as three blocks of C rows, (3, H, D); ours are group-major, (H, 3, D).
    """
    flags = {name: model_args.get(name, default) for name, default in NANOGPT_ARGS.items()}
    for name, value in flags.items():
        if name not in ("bias", "dropout") and (type(value) is not int or value < 1):
            raise ValueError(f"nanoGPT checkpoint: model_args has {name}={value!r}; a positive whole number is needed")
    if flags["n_embd"] % flags["n_head"]:
        raise ValueError(f"nanoGPT checkpoint: n_head={flags['n_head']} does not divide n_embd={flags['n_embd']}")
    # The causal mask was a buffer before torch 2.0.
    state = {name: t for name, t in state.items() if not re.fullmatch(r"transformer\.h\.\d+\.attn\.bias", name)}
    ours = {}

    def take(theirs: str, shape: tuple[int, ...]) -> Tensor:
        tensor = state.pop(theirs, None)
        found = tuple(tensor.shape) if isinstance(tensor, Tensor) else "absent"
        if found != shape:
            raise ValueError(f"nanoGPT checkpoint: {theirs} is {found}, its model_args ask for {shape}")
        return tensor

    for name, theirs, shape in _nanogpt_layers(**flags):
        ours[name] = take(theirs, shape)
        if ".qkv." in name:
            rows = ours[name].view(3, flags["n_head"], -1, *shape[1:])  # (3, H, D, C), or (3, H, D) for the bias
            ours[name] = rows.transpose(0, 1).reshape(shape)
    if not torch.equal(take("lm_head.weight", ours["wte.weight"].shape), ours["wte.weight"]):
        raise ValueError("nanoGPT checkpoint: lm_head.weight differs from transformer.wte.weight, nanoGPT ties them")
    if state:
        raise ValueError(f"nanoGPT checkpoint: {min(state)} is no tensor of nanoGPT's model; remove it to go on")
    return flags, ours


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
        yield from module(f"blocks.{i}.norm_attn.before", f"h.{i}.ln_1", C)
        yield from module(f"blocks.{i}.attn.qkv", f"h.{i}.attn.c_attn", 3 * C, C)
        yield from module(f"blocks.{i}.attn.out", f"h.{i}.attn.c_proj", C, C)
        yield from module(f"blocks.{i}.norm_mlp.before", f"h.{i}.ln_2", C)
        yield from module(f"blocks.{i}.mlp.up", f"h.{i}.mlp.c_fc", 4 * C, C)
        yield from module(f"blocks.{i}.mlp.down", f"h.{i}.mlp.c_proj", C, 4 * C)
    yield from module("norm", "ln_f", C)
