"""Finds the weights of a trained model: a checkpoint of ours, nanoGPT's file, or a folder of Hugging Face.

    read("out/pycode", action)              # the latest checkpoint of this run
    read("out/pycode/best", action)         # the one with the lowest validation loss; or out/pycode/step_00000450
    read("checkpoint:out/pycode", action)   # the same
    read("ema:out/pycode", action)          # the average of its weights, see the flag ema_decay
    read("nanogpt:ckpt.pt", action)         # the file that nanoGPT's train.py wrote
    read("hf:DIR", action)                  # config.json and safetensors

read calls action(found) with a StoredModel, and returns its result; `load_model` is for a program of one process.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from configurator import resolve
from data import DATA
from data.dataset import open_data
from data.errors import require
from data.tokenizer import GPT2Tokenizer, HFTokenizer, Tokenizer, from_spec
from engine.checkpoint import files as checkpoint
from engine.config import Config
from engine.interchange.huggingface import read_hf
from engine.interchange.nanogpt import from_nanogpt, read_nanogpt
from engine.parallel.layout import Slice
from engine.parallel.ranks import Ranks
from engine.parallel.sharded import ShardedModel
from engine.plan import memory
from engine.retired import RETIRED
from flags import flags_of_data
from model import Model, ModelConfig

GPT2_SIZES = (50257, 50304)  # vocabulary sizes of nanoGPT's models that read GPT-2's tokens; 50304 is padded
T = TypeVar("T")


@dataclass
class StoredModel:
    """Trained weights that were found."""

    path: str | Path  # of the checkpoint, file or folder
    flags: dict[str, Any]  # our flags: those of the model, and for a checkpoint all flags of its run
    tokenizer: Callable[[], Tokenizer]  # opens the tokenizer; ValueError if there is none
    fill: Callable[[ShardedModel], None]  # fills the parameters with the weights

    def config(self, **changes: Any) -> Config:
        """The flags to compute with this model on any machine: those that do not shape it have their defaults."""
        kept = {"dataset", *flags_of_data(Config), *(field.name for field in fields(ModelConfig)), *RETIRED}
        flags = {name: value for name, value in self.flags.items() if name in kept}
        return resolve(Config, {}, flags | changes, str(self.path))

    def load(self, flags: Config, ranks: Ranks) -> ShardedModel:
        """The model with these weights, in evaluation mode. Every rank calls it. ValueError if they can never fit."""
        memory.check_weights(self.path, flags, ranks.size, ranks.device)
        sharded = ShardedModel(flags, ranks)
        self.fill(sharded)
        sharded.model.eval()
        return sharded

    def check_tokenizer(self, tokenizer: Tokenizer | None, dataset: str):
        """ValueError if these weights are known to have other tokens than the data."""
        try:
            own = self.tokenizer()
        except ValueError:  # there is none, or it cannot be opened
            return
        same = tokenizer is None or own.same_tokens(tokenizer)
        remedy = "prepare the data with the tokenizer of the model"
        require(same, f"dataset={dataset} has another tokenizer than the model in {self.path}; {remedy}")


def read(where: str, action: Callable[[StoredModel], T]) -> T:
    """action(found), where `found` are the weights that `where` names. Every rank calls it. `action` may be called
    twice, see checkpoint.read. ValueError or OSError if the weights are absent or damaged."""
    kind, colon, place = where.partition(":")
    if colon and kind in FOREIGN:
        return action(FOREIGN[kind](place))
    average = where.startswith("ema:")
    run = where.removeprefix("ema:").removeprefix("checkpoint:")
    return checkpoint.read(run, lambda path, state: action(of_checkpoint(path, state, average)))


def load_model(where: str, device: torch.device, dtype: torch.dtype) -> tuple[str | Path, Model, Tokenizer]:
    """The path of these weights, their model in evaluation mode, and its tokenizer, in a program of one process."""

    def load(found: StoredModel) -> tuple:
        tokenizer = found.tokenizer()
        ranks = Ranks(0, 1, device, dtype, compile=False)
        return found.path, found.load(found.config(), ranks).model, tokenizer

    return read(where, load)


def of_checkpoint(path: Path, state: dict, average: bool) -> StoredModel:
    def tokenizer() -> Tokenizer:
        remedy = "give its meta.json a tokenizer and resume for one step"
        require(state["tokenizer"] is not None, f"{path} was trained on data without a tokenizer; {remedy}")
        return from_spec(state["tokenizer"], path, "train again")

    def fill(sharded: ShardedModel):
        parts = parameters(sharded)
        average_of = {name: f"optim.{name[6:]}.average" for name in parts if average}
        index = checkpoint.read_index(path, state, parts | {other: parts[name] for name, other in average_of.items()})
        kept = {name: index[other] for name, other in average_of.items() if other in index}
        require(kept or not average, f"{path} keeps no average of its weights; train with --ema_decay=0.999, say")
        checkpoint.load(path, parts, index | kept, sharded.model.cfg.vocab_size)

    return StoredModel(path, state["flags"], tokenizer, fill)


def of_nanogpt(file: str) -> StoredModel:
    model_args, tensors, config = read_nanogpt(file)
    weights = from_nanogpt(model_args, tensors)

    def tokenizer() -> Tokenizer:
        """GPT-2's, or that of our data set which has the same name and size as nanoGPT's."""
        size = weights.cfg.vocab_size
        if size in GPT2_SIZES:
            return GPT2Tokenizer()
        name = str(config.get("dataset"))
        if re.fullmatch(r"\w+", name) and (DATA / name).is_dir():
            known = open_data(name, DATA).tokenizer
            if known and known.vocab_size == size:
                return known
        fact = f"{file} holds no tokenizer, and data/{name:.40} has none of {size} ids"
        raise ValueError(f"{fact}; prepare the data that it was trained on")

    return StoredModel(file, weights.flags, tokenizer, lambda sharded: sharded.fill(weights))


def of_hf(folder: str) -> StoredModel:
    weights = read_hf(folder)
    tokenizer = partial(HFTokenizer.from_folder, weights.place)
    return StoredModel(weights.place, weights.flags, tokenizer, lambda sharded: sharded.fill(weights))


FOREIGN = {"nanogpt": of_nanogpt, "hf": of_hf}


def parameters(sharded: ShardedModel) -> dict[str, Slice]:
    """This rank's parts of the parameters, by their names in a checkpoint. They share storage with the model."""
    return {f"model.{name}": sharded.slice_of(name, p) for name, p in sharded.model.named_parameters()}
