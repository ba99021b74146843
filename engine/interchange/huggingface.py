"""Reads and writes the folders of Hugging Face's models, without running code that they may hold."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from configurator import resolve
from data import files
from data.base_tokenizer import Tokenizer
from data.errors import reason, require
from engine.checkpoint import file_format
from engine.interchange.families import FAMILIES, choose
from engine.interchange.hf_config import Family
from engine.plan.accounting import skeleton
from engine.retired import translated
from model import ModelConfig

AGAIN = "download all files of the folder again, or write it with transformers' save_pretrained"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # others are of quantised models
OF_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?[.]safetensors")  # names of files
BUFFERS = re.compile(r".*(rotary\w*[.]inv_freq|(attn|attention)[.](masked_)?bias)")  # of old files; no weights
ROOT = Path(__file__).parents[2]
CODE = (ROOT / "model.py", ROOT / "ops.py", ROOT / "flags.py", Path(__file__).with_name("modeling_superblock.py"))

# ---- Names and shapes of both


class Own(Family):
    """Exports with --remote_code=True: model.py itself is the architecture, with our flags and our names."""

    def flags(self, config: dict) -> dict:
        require(type(config.get("flags")) is dict, f"there are no flags of a superblock; {AGAIN}")
        return asdict(resolve(ModelConfig, {}, translated(config["flags"]), "config.json"))

    def config(self, cfg: ModelConfig) -> dict:
        places = {"AutoConfig": "modeling_superblock.SuperblockConfig"}
        places["AutoModelForCausalLM"] = f"modeling_superblock.{self.architecture}"
        return {"architectures": [self.architecture], "auto_map": places, "flags": asdict(cfg)}

    def source(self, name: str, n_expert: int = 0) -> tuple[list[str], list]:
        return [f"model.{name}"], []


OWN = Own("SuperblockForCausalLM", {}, {}, {}, layers="model.")


def shapes_of(cfg: ModelConfig) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in skeleton(cfg).named_parameters()}


def to_theirs(family: Family, cfg: ModelConfig, config: dict, name: str, x: Tensor) -> dict[str, Tensor]:
    """Their tensors by name, for our parameter x."""
    names, conversions = family.source(name, cfg.n_expert)
    for conversion in reversed(conversions):
        x = conversion.write(x, cfg, config)
    rows = [len(x) // len(names)] * len(names)
    if len(names) == 3 and "attn.qkv" in name:
        keys = cfg.kv_heads * cfg.head_size
        rows = [cfg.n_head * cfg.head_size, keys, keys]
    return dict(zip(names, x.split(rows), strict=True))


# ---- Reading


class Pretrained(Mapping[str, Tensor]):
    """Weights by our names, in float32; a tensor is made when it is asked for. `flags` are our flags for the family's
    keys in `config`, and `stored` are their tensors by name. Errors begin with the `place` and end with the `remedy`;
    one is raised at once if a tensor is absent, has another shape, or is one too many."""

    def __init__(
        self, place: str | Path, family: Family, config: dict, flags: dict, stored: dict[str, Tensor], remedy=AGAIN
    ):
        self.place, self.remedy = place, remedy
        self.family, self.config, self.flags = family, config, flags
        self.cfg = ModelConfig(**flags)
        prefix = family.layers.partition(".")[0] + "."
        if not any(name.startswith(prefix) for name in stored):  # base models lack it
            stored = {prefix + name: each for name, each in stored.items()}
        self.stored = stored
        self.shapes = shapes_of(self.cfg)
        expected = {}
        self.tied_head = ""
        if self.cfg.tie_weights:
            [self.tied_head], _ = family.source("head.weight")
        if self.tied_head in stored:
            expected[self.tied_head] = (self.cfg.vocab_size, self.cfg.n_embd)
        for name, shape in self.shapes.items():
            theirs = to_theirs(family, self.cfg, config, name, torch.empty(shape, device="meta"))
            expected |= {each: tuple(x.shape) for each, x in theirs.items()}
        for name, shape in expected.items():
            self._require(name in stored, f"{name} is absent, and should have the shape {shape}")
            found = tuple(stored[name].shape)
            self._require(found == shape, f"{name} is {found}, and should be {shape}")
            dtype = stored[name].dtype
            self._require(dtype in DTYPES, f"{name} is {str(dtype)[6:]}, as in a quantised model")
        for name in sorted(stored.keys() - expected.keys()):
            self._require(BUFFERS.fullmatch(name), f"{name!r:.80} is no weight of a model with these flags")

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, name: str) -> Tensor:
        if name == "head.weight" and self.tied_head:
            name = "wte.weight"
        names, conversions = self.family.source(name, self.cfg.n_expert)
        x = torch.cat([self._tensor(each) for each in names])
        if name == "wte.weight" and self.tied_head in self.stored:
            same = torch.equal(self._tensor(self.tied_head), x)
            self._require(same, f"{self.tied_head} differs from {names[0]}, but they are tied")
        for conversion in conversions:
            x = conversion.read(x, self.cfg, self.config)
        return x.contiguous()

    def _require(self, condition: object, fact: str):
        require(condition, f"{self.place}: {fact}; {self.remedy}")

    def _tensor(self, name: str) -> Tensor:
        x = self.stored[name].detach().float()
        self._require(file_format.finite(x), f"{name} holds numbers that are not finite")
        return x


def read_hf(where: str | Path) -> Pretrained:
    """The model in the folder, or of this name on the hub. Raises ValueError or OSError in one line if there is none,
    if our flags cannot express it, or if its files are damaged. Pickles are refused."""
    folder = locate(str(where))
    file = folder / "config.json"
    require(file.is_file(), f"{folder} has no config.json; give a Hugging Face model, or a run as checkpoint:{folder}")
    try:
        config = dict(files.read_json(file))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} holds no JSON object ({error}); {AGAIN}") from None
    kind = str(config.get("model_type"))
    family = OWN if kind == "superblock" else FAMILIES.get(kind)
    fact = f"{file}: model_type={kind!r:.80} is not known"
    require(family, f"{fact}; give a model of one of these types: {', '.join(FAMILIES)}")
    try:
        flags = family.flags(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{file}: a key has a value of a wrong type ({error}); correct it") from None
    return Pretrained(folder, family, family.keys | config, flags, open_files(folder))


def locate(where: str) -> Path:
    """The folder, or the downloaded copy of the model of this name on the hub."""
    require(where, "hf: names no model; give hf:DIR, or hf:NAME for a model on the hub")
    folder = files.user_path(where)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        options = dict(allow_patterns=["*.json", "*.safetensors"], ignore_patterns=["*/*", "consolidated*"])
        return Path(snapshot_download(where, **options))
    except Exception as error:  # the package is absent; or one of the network, the hub, or its libraries
        fact = f"there is no folder {folder}, and no such model can be had from the hub ({type(error).__name__})"
        remedy = f"download it where there is a network, with hf download {where} --local-dir=DIR, and give hf:DIR"
        raise ValueError(f"{fact}; {remedy}") from None


def open_files(folder: Path) -> dict[str, Tensor]:
    """The tensors in the safetensors files of the folder, by name. The files are mapped: numbers are read when used."""
    from safetensors import SafetensorError, safe_open

    remedy = "load it with transformers and call save_pretrained(DIR, safe_serialization=True)"
    paths = sorted(path for path in folder.iterdir() if OF_WEIGHTS.fullmatch(path.name))
    require(paths, f"{folder} has no model.safetensors (pickles are not read); {remedy}")
    saves = sorted({re.sub("-[0-9]+-", "-*-", path.name) for path in paths})
    fact = f"{folder} has the weights of several saves: {', '.join(saves):.200}"
    require(len(saves) == 1, f"{fact}; move the older ones elsewhere")
    found = {}
    for path in paths:
        try:
            with open(path, "rb", opener=files.open_regular):
                opened = safe_open(path, framework="pt")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"{path} is damaged ({reason(error)}); {AGAIN}") from None
        for name in tensors:
            require(name not in found, f"{path}: another file has {name!r:.80} too; {AGAIN}")
        found |= tensors
    return found


# ---- Writing


def write_hf(
    folder: Path, cfg: ModelConfig, weight: Callable, dtype: torch.dtype, tokenizer: Tokenizer | None,
    remote_code: bool = False,
):  # fmt: skip
    """Write config.json, generation_config.json and model.safetensors of a model with these flags into the folder.
    weight(name) is our parameter, or None for a bias that only the family has, which is then 0. ValueError if no family
    has the flags and keeps the tokenizer's ids."""
    fact = f"objective={cfg.objective} cannot be exported"
    require(cfg.objective == "causal", f"{fact}, as AutoModelForCausalLM is causal; export a model of objective=causal")
    family, kind = OWN, "superblock"
    if not remote_code:
        family, kind, cfg = choose(cfg, tokenizer)
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if tokenizer:
        tokens["eos_token_id"] = tokenizer.eot
        if len(tokenizer.ends) > 1:
            tokens["eos_token_id"] = sorted(tokenizer.ends)
        tokens["bos_token_id"] = next(iter(tokenizer.prefix), tokenizer.eot)
    config = {"model_type": kind, "torch_dtype": str(dtype)[6:]} | family.config(cfg) | tokens
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", tokens)
    if remote_code:
        for path in CODE:
            code = re.sub(r"(?m)^import (ops|flags)$", r"from . import \1", path.read_text(encoding="utf-8"))
            code = re.sub(r"(?m)^from (ops|flags) import", r"from .\1 import", code)  # they are a package there
            (folder / path.name).write_text(code, encoding="utf-8")
    parts = {}
    for name, shape in shapes_of(cfg).items():
        x = weight(name)
        if x is None:
            x = torch.zeros(shape)
        for each, theirs in to_theirs(family, cfg, config, name, x).items():
            parts[each] = file_format.own_part(theirs.to(dtype))
            fact = f"{each} has numbers that are not finite in {str(dtype)[6:]}"
            require(file_format.finite(parts[each].tensor), f"{fact}; export with --dtype=float32")
    file_format.write(folder / "model.safetensors", parts, {"format": "pt"})


def write_json(file: Path, value: dict):
    file.write_text(json.dumps(value, indent=2) + "\n")
