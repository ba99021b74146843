"""Writes trained weights for transformers.

    python -m engine.interchange export RUN DIR [--dtype=bfloat16] [--remote_code=True]

RUN is a training run, its best checkpoint RUN/best, or another one of them; or ema:RUN, nanogpt:FILE or hf:DIR. DIR is
the folder to write, which AutoModelForCausalLM loads. The family is the first in families.py that has the flags of the
model. With --remote_code=True, our own model.py is the architecture.
"""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from configurator import parse_positional
from data import files
from data.errors import command, printable, require, say, user_errors
from data.lock import temporary_folder
from engine import weights
from engine.interchange.huggingface import write_hf
from engine.interchange.tokenizer import export_tokenizer
from engine.parallel.ranks import Ranks
from model import ModelConfig


@dataclass
class ExportConfig:
    # --- weights
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the written weights
    remote_code: bool = False  # write our own model.py as the architecture


def export(run: str, where: str, options: ExportConfig) -> str | Path:
    """Write trained weights and their tokenizer as a Hugging Face model; returns the path of the weights."""
    folder = files.user_path(where).absolute()
    require(not os.path.lexists(folder), f"{where} is there already; delete it, or name another folder")
    require(folder.parent.is_dir(), f"{where}: there is no folder {folder.parent}; make it, or name another one")
    with files.writing(folder), temporary_folder(folder.with_name(f".tmp-{folder.name}-")) as private:
        unfinished = Path(private, folder.name)
        unfinished.mkdir()
        path = weights.read(run, partial(write, unfinished, options))
        require(not folder.exists(), f"{where} was written by another program meanwhile; name another folder")
        unfinished.rename(folder)
    return path


def write(folder: Path, options: ExportConfig, found: weights.StoredModel) -> str | Path:
    """Write these weights and their tokenizer into the folder; returns the path of the weights."""
    flags = found.config()
    cfg = ModelConfig(**{name: getattr(flags, name) for name in ModelConfig.__dataclass_fields__})
    tokenizer = None
    try:
        tokenizer = found.tokenizer()
    except ValueError as error:
        say(f"warning: no tokenizer is written: {error}")
    ranks = Ranks(0, 1, torch.device("cpu"), torch.float32, compile=False)
    parameters = {name: p.detach() for name, p in found.load(flags, ranks).model.named_parameters()}
    write_hf(folder, cfg, parameters.get, getattr(torch, options.dtype), tokenizer, options.remote_code)
    if tokenizer:
        export_tokenizer(tokenizer, folder, cfg.block_size)
    for written in (*folder.iterdir(), folder):
        files.fsync(written)
    return found.path


def main(argv: list[str] | None = None):
    with user_errors():
        words, options = parse_positional(ExportConfig, argv, __doc__)
        fits = len(words) == 3 and words[0] == "export"
        require(fits, f"expected export RUN DIR, not {' '.join(words) or 'nothing'}; --help says what they are")
        _, run, folder = words
        path = export(run, folder, options)
        print(printable(f"{folder}: the weights of {path}"))


if __name__ == "__main__":
    command(main, interruptible=True)  # after which nothing half written stays
