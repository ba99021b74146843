"""Reads and writes the folders of Hugging Face's models, without running code that they may hold.

weights = read_hf("DIR")                        # config.json and safetensors; or the name of a model on the hub
cfg = ModelConfig(**weights.flags)
weights["blocks.0.sums.0.attn.qkv.weight"]      # ours, in float32; its file is read only now
export("out/mine", "DIR")                       # a training run -> a folder for AutoModelForCausalLM
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import NoneType

import torch
from torch import Tensor

from configurator import Config, Given, resolve
from data.base_tokenizer import Tokenizer
from data.errors import require
from data.files import amount, writing
from data.tokenizer import from_spec
from engine.checkpoint import files as checkpoint
from engine.checkpoint.contents import completed
from engine.interchange.families import FAMILIES, Family, choose
from engine.interchange.files import AGAIN, locate, open_files, read_json
from engine.interchange.keys import describe
from engine.interchange.remote_code import write_remote_code
from engine.interchange.tokenizer import export_tokenizer
from model import Model, ModelConfig

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # names of safetensors
BUFFERS = re.compile(r".*(rotary\w*[.]inv_freq|(attn|attention)[.](masked_)?bias)")  # of old files; no weights
SHARD_BYTES = 5 * 10**9  # largest size of a file of weights, as in transformers


# ---------------------------------------------------------------------------------------------------------------------
# Reading


class Pretrained(Mapping[str, Tensor]):
    """The weights of a folder by our names, in float32. A tensor is read when it is asked for."""

    def __init__(self, folder: Path, family: Family, config: dict, flags: dict):
        self.folder, self.family, self.config, self.flags = folder, family, config, flags
        self.cfg = ModelConfig(**flags)
        self.files = open_files(folder)  # their name -> the open file
        self.shapes = shapes_of(self.cfg)
        prefix = family.layers.partition(".")[0] + "."
        self.prefix = "" if any(name.startswith(prefix) for name in self.files) else prefix  # base models lack it
        self.tied_head = family.source("head.weight")[0][0] if self.cfg.tie_weights else None
        self._check()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, name: str) -> Tensor:
        if name == "head.weight" and self.cfg.tie_weights:
            name = "wte.weight"
        names, conversions = self.family.source(name)
        x = torch.cat([self._tensor(each) for each in names]) if len(names) > 1 else self._tensor(names[0])
        if name == "wte.weight" and self.tied_head in self.files:
            same = torch.equal(self._tensor(self.tied_head), x)
            require(same, f"{self.folder}: {self.tied_head} differs from {names[0]}, but they are tied; {AGAIN}")
        for conversion in conversions:
            x = conversion.read(x, self.cfg, self.config)
        return x.contiguous()

    def _tensor(self, name: str) -> Tensor:
        x = self.files[self._stored(name)].get_tensor(self._stored(name)).float()
        finite = all(end.isfinite() for end in x.aminmax())  # needs no memory; one NaN makes both NaN
        require(finite, f"{self.folder}: {name} holds numbers that are not finite; {AGAIN}")
        return x

    def _stored(self, name: str) -> str:
        return name.removeprefix(self.prefix)

    def _check(self):
        """ValueError if the files lack a tensor, or have one of another shape or dtype, or one too many."""
        known = {self.tied_head}
        for name, shape in self.shapes.items():
            theirs = to_theirs(self.family, self.cfg, self.config, name, torch.empty(shape, device="meta"))
            for their_name, x in theirs.items():
                stored, expected = self._stored(their_name), tuple(x.shape)
                known.add(stored)
                file = self.files.get(stored)
                found = file.get_slice(stored) if file else None
                fact = f"{self.folder}: {stored} is {tuple(found.get_shape()) if found else 'absent'}"
                same = found is not None and tuple(found.get_shape()) == expected
                require(same, f"{fact}, but config.json means {expected}; {AGAIN}")
                dtype = found.get_dtype()
                fact = f"{self.folder}: {stored} has the dtype {dtype}, not {', '.join(DTYPES)}"
                require(dtype in DTYPES, f"{fact}; load the model with dtype=torch.bfloat16 and save_pretrained it")
        surplus = sorted(name for name in self.files.keys() - known if not BUFFERS.fullmatch(name))
        if surplus:
            fact = f"{self.folder}: {describe(surplus[0])} is no weight of a model with this config.json"
            raise ValueError(f"{fact}; {AGAIN}")


class Own(Family):
    """The family of exports with --remote-code: our flags and our names."""

    def source(self, name: str) -> tuple[list[str], list]:
        return [f"model.{name}"], []


OWN = Own("SuperblockForCausalLM", "model.", {}, [], {}, {})


def own_flags(config: dict, folder: Path) -> dict:
    """The flags of the model in the config.json of an export with --remote-code."""
    require(type(config.get("flags")) is dict, f"{folder}/config.json has no flags of a superblock; {AGAIN}")
    cfg = resolve(Config, Given(), completed(config["flags"]), f"{folder}/config.json")
    return {name: getattr(cfg, name) for name in ModelConfig.__dataclass_fields__}


def read_hf(where: str | Path) -> Pretrained:
    """The model in the folder, or of this name on the hub. `flags` holds our flags for it.

    Raises ValueError or OSError in one line if there is no such model, if our flags cannot express it, or if its files
    are damaged.
    """
    folder = locate(str(where))
    require((folder / "config.json").is_file(), f"{folder} has no config.json; give the folder of a Hugging Face model")
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind == "superblock":
        return Pretrained(folder, OWN, config, own_flags(config, folder))
    family = FAMILIES.get(kind) if type(kind) is str else None
    fact = f"{folder}/config.json: model_type={describe(kind)} is not known"
    require(family, f"{fact}; give a model of one of these types: {', '.join(FAMILIES)}")
    try:
        flags = family.flags(config)
    except ValueError as error:
        raise ValueError(f"{folder}/config.json: {error}") from None
    return Pretrained(folder, family, family.defaults | family.named(config), flags)


# ---------------------------------------------------------------------------------------------------------------------
# Names and shapes of both


def shapes_of(cfg: ModelConfig) -> dict[str, torch.Size]:
    """Our parameter -> its shape."""
    with torch.device("meta"):
        return {name: p.shape for name, p in Model(cfg).named_parameters()}


def to_theirs(family: Family, cfg: ModelConfig, config: dict, name: str, x: Tensor) -> dict[str, Tensor]:
    """Their tensors by name, for our parameter x."""
    names, conversions = family.source(name)
    for conversion in reversed(conversions):
        x = conversion.write(x, cfg, config)
    heads = [cfg.n_head * cfg.head_size, *[cfg.kv_heads * cfg.head_size] * 2]
    rows = {1: [len(x)], 2: [len(x) // 2] * 2, 3: heads}[len(names)]
    return dict(zip(names, x.split(rows), strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def write_hf(folder: Path, cfg: ModelConfig, weight: Callable, dtype: torch.dtype, tokenizer: Tokenizer | None):
    """Write config.json, generation_config.json and the weights of a model with these flags into the folder.

    weight(name) is our parameter, or None for a bias that only the family has, which is then 0. ValueError if no family
    has the flags and keeps the tokenizer's ids. The memory holds one file of weights at a time.
    """
    family, kind, cfg = choose(cfg, tokenizer)
    tokens = special_tokens(tokenizer)
    config = {"model_type": kind, "torch_dtype": str(dtype)[6:]} | family.config(cfg) | tokens

    def theirs(name: str, shape: torch.Size) -> dict[str, Tensor]:
        x = weight(name)
        return to_theirs(family, cfg, config, name, torch.zeros(shape) if x is None else x)

    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", tokens)
    write_weights(folder, shapes_of(cfg), theirs, dtype)


def write_weights(folder: Path, shapes: dict[str, torch.Size], theirs: Callable, dtype: torch.dtype):
    """Write the tensors theirs(name, shape) -> {their name: tensor} of all our names into files of safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    files, room, total = [], 0, 0
    for name, shape in shapes.items():
        size = shape.numel() * dtype.itemsize
        total += size
        if size > room:
            files, room = [*files, []], SHARD_BYTES
        files[-1].append(name)
        room -= size
    free = shutil.disk_usage(folder).free
    if total > free:
        raise OSError(f"{folder.parent} has room for {amount(free)}, and the weights need {amount(total)}; make room")
    table = {}
    for i, names in enumerate(files, 1):
        file = f"model-{i:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        tensors = {}
        for each, x in (item for name in names for item in theirs(name, shapes[name]).items()):
            tensors[each] = x.to(dtype, copy=True).contiguous()
            finite = all(end.isfinite() for end in tensors[each].aminmax())
            require(finite, f"{each} has numbers that are not finite in {str(dtype)[6:]}; export with --dtype=float32")
        table |= dict.fromkeys(tensors, file)
        try:
            save_file(tensors, folder / file, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"cannot write {folder / file}: {error}; see to the room on its disk") from error
        (folder / file).chmod((folder / "config.json").stat().st_mode)  # safetensors lets no other user read it
    if len(files) > 1:
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": table})


def special_tokens(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """The ids that begin and end a text, for config.json."""
    eot = tokenizer.eot if tokenizer else None
    first = tokenizer.prefix[0] if tokenizer and tokenizer.prefix else eot
    return {"bos_token_id": first, "eos_token_id": eot, "pad_token_id": None}


def write_json(file: Path, value: dict):
    file.write_text(json.dumps(value, indent=2) + "\n")


@contextmanager
def whole_or_nothing(folder: Path) -> Iterator[Path]:
    """A folder that gets this name when all is written, and that is deleted after an error."""
    partial = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        with writing(folder):
            yield partial
        for file in partial.iterdir():
            checkpoint.fsync(file)
        checkpoint.fsync(partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def export(run: str, where: str, dtype: str = "float32", which: str = "latest", remote_code: bool = False) -> Path:
    """Write a training run's weights and tokenizer as a Hugging Face model; returns the checkpoint's path."""
    foreign = re.match("(hf|nanogpt):", run)
    require(not foreign, f"{run} is no run of train.py; train from it with --init_from={run} and export that run")
    single = which == "best" and (Path(run) / "state.json").is_file()
    require(not single, f"--which=best needs the folder of a run, and {run} is one checkpoint; leave --which out")
    require(where, "the folder to write has no name; give one, such as exported")
    folder = Path(os.path.expanduser(where)).absolute()
    if folder.exists():
        raise FileExistsError(f"{where} is there already; delete it, or name another folder")
    require(folder.parent.is_dir(), f"there is no folder {folder.parent}; make it first")

    def build(path: Path, state: dict) -> Path:
        cfg = resolve(Config, Given(), state["flags"], str(path))
        cfg = ModelConfig(**{name: getattr(cfg, name) for name in ModelConfig.__dataclass_fields__})
        tokenizer = state["tokenizer"] and from_spec(state["tokenizer"], path)
        tokens, shapes, index = special_tokens(tokenizer), shapes_of(cfg), checkpoint.read_index(path, state)

        def weight(name: str) -> Tensor | None:
            if name not in shapes:
                return None
            x = torch.empty(shapes[name])
            checkpoint.load(path, {f"model.{name}": x}, index, cfg.vocab_size)  # without the padding that tp needed
            return x

        with whole_or_nothing(folder) as partial:
            if remote_code:
                write_remote_code(cfg, partial, torch_dtype=dtype, **tokens)
                write_json(partial / "generation_config.json", tokens)
                write_weights(partial, shapes, lambda name, _: {f"model.{name}": weight(name)}, getattr(torch, dtype))
            else:
                write_hf(partial, cfg, weight, getattr(torch, dtype), tokenizer)
            if tokenizer:
                export_tokenizer(tokenizer, partial)
        return path

    return checkpoint.read(run, {"flags": dict, "tokenizer": (dict, NoneType)}, build, which)
