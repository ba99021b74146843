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
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from configurator import Config, Given, resolve
from data.base_tokenizer import Tokenizer
from data.errors import require
from data.files import amount, fsync, open_regular, writing
from data.tokenizer import from_spec
from engine.checkpoint import contents
from engine.checkpoint import files as checkpoint
from engine.checkpoint.contents import own_part
from engine.interchange.config import describe
from engine.interchange.families import FAMILIES, Family, choose
from engine.interchange.tokenizer import export_tokenizer
from model import Model, ModelConfig

AGAIN = "download the folder again, or write it with transformers' save_pretrained"
DTYPES = ("F32", "BF16", "F16")  # names of safetensors
BUFFERS = re.compile(r".*(rotary\w*[.]inv_freq|(attn|attention)[.](masked_)?bias)")  # of old files; no weights
SHARD_BYTES = 5 * 10**9  # largest size of a file of weights, as in transformers
ROOT = Path(__file__).parents[2]
CODE = (ROOT / "model.py", ROOT / "ops.py", Path(__file__).with_name("modeling_superblock.py"))

# ---------------------------------------------------------------------------------------------------------------------
# Names and shapes of both


class Own(Family):
    """Exports with --remote_code=True: model.py itself is the architecture, with our flags and our names."""

    def flags(self, config: dict) -> dict:
        require(type(config.get("flags")) is dict, f"there are no flags of a superblock; {AGAIN}")
        return model_flags(config["flags"], "config.json")

    def config(self, cfg: ModelConfig) -> dict:
        fact = f"objective={cfg.objective} cannot be exported"
        require(cfg.objective == "causal", f"{fact}; AutoModelForCausalLM is causal")
        classes = {"AutoConfig": "SuperblockConfig", "AutoModelForCausalLM": self.architecture}
        places = {auto: f"modeling_superblock.{name}" for auto, name in classes.items()}
        return {"architectures": [self.architecture], "auto_map": places, "flags": asdict(cfg)}

    def source(self, name: str, n_expert: int = 0) -> tuple[list[str], list]:
        return [f"model.{name}"], []


OWN = Own("SuperblockForCausalLM", "model.", {}, [], {}, {})


def model_flags(stored: dict, origin: str) -> dict:
    """The flags of ModelConfig in the stored flags of a run. ValueError names a wrong one and the origin."""
    cfg = resolve(Config, Given(), stored, origin)
    return {name: getattr(cfg, name) for name in ModelConfig.__dataclass_fields__}


def shapes_of(cfg: ModelConfig) -> dict[str, torch.Size]:
    """Our parameter -> its shape."""
    with torch.device("meta"):
        return {name: p.shape for name, p in Model(cfg).named_parameters()}


def to_theirs(family: Family, cfg: ModelConfig, config: dict, name: str, x: Tensor) -> dict[str, Tensor]:
    """Their tensors by name, for our parameter x."""
    names, conversions = family.source(name, cfg.n_expert)
    for conversion in reversed(conversions):
        x = conversion.write(x, cfg, config)
    heads = [cfg.n_head * cfg.head_size, *[cfg.kv_heads * cfg.head_size] * 2]
    rows = heads if "qkv" in name and len(names) > 1 else [len(x) // len(names)] * len(names)
    return dict(zip(names, x.split(rows), strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Reading


class Stored(NamedTuple):
    """A tensor in a file. `flaw` is why it holds no weights, and the remedy; "" if it can hold some."""

    shape: tuple[int, ...]
    flaw: str
    read: Callable[[], Tensor]


class Pretrained(Mapping[str, Tensor]):
    """Weights by our names, in float32; a tensor is read when it is asked for. `flags` are our flags for the family's
    keys in `config`, and `stored` are their tensors by name. Errors name the `place`, the `source` of the shapes, and
    the `remedy`."""

    def __init__(
        self, place: str | Path, family: Family, config: dict, flags: dict, stored: dict[str, Stored],
        source: str = "config.json", remedy: str = AGAIN,
    ):  # fmt: skip
        self.place, self.source, self.remedy = place, source, remedy
        self.family, self.config, self.flags, self.stored = family, config, flags, stored
        self.cfg = ModelConfig(**flags)
        prefix = family.layers.partition(".")[0] + "."
        self.prefix = "" if any(name.startswith(prefix) for name in stored) else prefix  # base models lack it
        self.tied_head = family.source("head.weight")[0][0] if self.cfg.tie_weights else None
        self._check()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, name: str) -> Tensor:
        if name == "head.weight" and self.cfg.tie_weights:
            name = "wte.weight"
        names, conversions = self.family.source(name, self.cfg.n_expert)
        x = torch.cat([self._tensor(each) for each in names]) if len(names) > 1 else self._tensor(names[0])
        if name == "wte.weight" and self.tied_head in self.stored:
            same = torch.equal(self._tensor(self.tied_head), x)
            self._require(same, f"{self.tied_head} differs from {names[0]}, but they are tied")
        for conversion in conversions:
            x = conversion.read(x, self.cfg, self.config)
        return x.contiguous()

    def _require(self, condition: object, fact: str):
        require(condition, f"{self.place}: {fact}; {self.remedy}")

    def _tensor(self, name: str) -> Tensor:
        x = self.stored[name.removeprefix(self.prefix)].read().float()
        self._require(finite(x), f"{name} holds numbers that are not finite")
        return x

    def _check(self):
        """ValueError if the files lack a tensor, or have one of another shape or dtype, or one too many."""
        embedding = self.family.source("wte.weight")[0][0]
        size = torch.Size((self.cfg.vocab_size, self.cfg.n_embd))
        self._check_tensor(embedding, size)  # so a model of these sizes can be made
        L, n = self.cfg.n_layer, len(self.stored)
        self._require(L <= n, f"{self.source} means n_layer={L}, but there are {n} tensors")
        self.shapes = shapes_of(self.cfg)
        expected = {}
        for name, shape in self.shapes.items():
            x = torch.empty(shape, device="meta")
            expected |= to_theirs(self.family, self.cfg, self.config, name, x)
        for name, x in expected.items():
            self._check_tensor(name, x.shape)
        known = {name.removeprefix(self.prefix) for name in expected}
        if self.tied_head in self.stored:
            self._check_tensor(self.tied_head, size)
            known.add(self.tied_head)
        for name in sorted(self.stored.keys() - known):
            buffer = BUFFERS.fullmatch(name)
            self._require(buffer, f"{describe(name)} is no weight of a model with this {self.source}")

    def _check_tensor(self, name: str, shape: torch.Size):
        found = self.stored.get(name.removeprefix(self.prefix))
        self._require(found, f"{name} is absent, but {self.source} means {tuple(shape)}")
        require(not found.flaw, f"{self.place}: {name} {found.flaw}")
        same = found.shape == tuple(shape)
        self._require(same, f"{name} is {found.shape}, but {self.source} means {tuple(shape)}")


def finite(x: Tensor) -> bool:
    """Whether all numbers are finite. Needs no memory; one NaN makes both ends NaN."""
    return all(end.isfinite() for end in x.aminmax())


def read_hf(where: str | Path) -> Pretrained:
    """The model in the folder, or of this name on the hub. Raises ValueError or OSError in one line if there is none,
    if our flags cannot express it, or if its files are damaged. Pickles are refused."""
    folder = locate(str(where))
    file = folder / "config.json"
    require(file.is_file(), f"{folder} has no config.json; give the folder of a Hugging Face model")
    config = read_json(file)
    kind = config.get("model_type")
    family = (FAMILIES | {"superblock": OWN}).get(kind) if type(kind) is str else None
    fact = f"{file}: model_type={describe(kind)} is not known"
    require(family, f"{fact}; give a model of one of these types: {', '.join(FAMILIES)}")
    try:
        flags = family.flags(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return Pretrained(folder, family, family.defaults | config, flags, open_files(folder))


def locate(where: str) -> Path:
    """The folder, or the downloaded copy of the model of this name on the hub."""
    require(where, "hf: names no model; give hf:DIR, or hf:NAME for a model on the hub")
    folder = Path(os.path.expanduser(where))
    if folder.is_dir():
        return folder
    name = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", where)
    require(name, f"there is no folder {folder}; give one, or a name on the hub")
    try:
        from huggingface_hub import snapshot_download

        options = dict(allow_patterns=["*.json", "*.safetensors"], ignore_patterns=["*/*", "consolidated*"])
        return Path(snapshot_download(where, **options))
    except Exception as error:  # the package is absent; or one of the network, the hub, or its libraries
        fact = f"there is no folder {folder}, and no such model can be had from the hub ({type(error).__name__})"
        remedy = f"download it where there is a network, with hf download {where} --local-dir=DIR, and give hf:DIR"
        raise ValueError(f"{fact}; {remedy}") from None


def read_json(file: Path) -> dict:
    try:
        with open(file, "rb", opener=open_regular) as f:
            found = json.load(f)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON ({type(error).__name__}); {AGAIN}") from None
    require(type(found) is dict, f"{file} holds no JSON object; {AGAIN}")
    return found


def open_files(folder: Path) -> dict[str, Stored]:
    """The tensors in the safetensors files of the folder, by name. The headers of the files are read and checked."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return open_file(single)
    if not index.is_file():
        found = "only pytorch_model.bin, a pickle" if list(folder.glob("*.bin")) else "no model.safetensors"
        remedy = "load it with transformers and call save_pretrained(DIR, safe_serialization=True)"
        raise ValueError(f"{folder} has {found}; {remedy}")
    table = read_json(index).get("weight_map")
    require(type(table) is dict and table, f"{index} has no weight_map; {AGAIN}")
    for file in table.values():
        plain = type(file) is str and re.fullmatch(r"[\w-][\w.-]*[.]safetensors", file)
        require(plain, f"{index} names {describe(file)}, which is no safetensors file of its folder; {AGAIN}")
    out = {}
    for file in sorted(set(table.values())):
        require((folder / file).is_file(), f"{index} names {file}, which is absent; {AGAIN}")
        out |= open_file(folder / file)
    return out


def open_file(file: Path) -> dict[str, Stored]:
    from safetensors import SafetensorError, safe_open

    try:
        with open(file, "rb", opener=open_regular):
            opened = safe_open(file, framework="pt")
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({str(error).splitlines()[0][:100]}); {AGAIN}") from None
    out = {}
    for name in opened.keys():
        entry, flaw = opened.get_slice(name), ""
        if entry.get_dtype() not in DTYPES:
            remedy = "load the model with dtype=torch.bfloat16 and save_pretrained it"
            flaw = f"has the dtype {entry.get_dtype()}, not {', '.join(DTYPES)}; {remedy}"
        out[name] = Stored(tuple(entry.get_shape()), flaw, partial(opened.get_tensor, name))
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def write_hf(
    folder: Path, cfg: ModelConfig, weight: Callable, dtype: torch.dtype, tokenizer: Tokenizer | None,
    remote_code: bool = False,
):  # fmt: skip
    """Write config.json, generation_config.json and the weights of a model with these flags into the folder.

    weight(name) is our parameter, or None for a bias that only the family has, which is then 0. ValueError if no family
    has the flags and keeps the tokenizer's ids. With remote_code, our model.py is the architecture. The memory holds
    one file of weights at a time.
    """
    family, kind, cfg = (OWN, "superblock", cfg) if remote_code else choose(cfg, tokenizer)
    eot = tokenizer.eot if tokenizer else None
    first = tokenizer.prefix[0] if tokenizer and tokenizer.prefix else eot
    tokens = {"bos_token_id": first, "eos_token_id": eot, "pad_token_id": None}
    config = {"model_type": kind, "torch_dtype": str(dtype)[6:]} | family.config(cfg) | tokens
    shapes = shapes_of(cfg)

    def theirs(name: str) -> dict[str, Tensor]:
        x = weight(name)
        return to_theirs(family, cfg, config, name, torch.zeros(shapes[name]) if x is None else x)

    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", tokens)
    for path in CODE if remote_code else ():
        code = path.read_text(encoding="utf-8").replace("\nimport ops\n", "\nfrom . import ops\n")  # a package there
        code = code.replace("\nfrom ops import", "\nfrom .ops import")
        (folder / path.name).write_text(code, encoding="utf-8")
    write_weights(folder, shapes, theirs, dtype)


def write_weights(folder: Path, shapes: dict[str, torch.Size], theirs: Callable, dtype: torch.dtype):
    """Write theirs(name) -> {their name: tensor} of all our names into files of safetensors."""
    sizes = {name: shape.numel() * dtype.itemsize for name, shape in shapes.items()}
    files, room, total = [], 0, sum(sizes.values())
    for name, size in sizes.items():
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
        for each, x in (item for name in names for item in theirs(name).items()):
            tensors[each] = own_part(x.to(dtype))
            fact = f"{each} has numbers that are not finite in {str(dtype)[6:]}"
            require(finite(tensors[each].tensor), f"{fact}; export with --dtype=float32")
        table |= dict.fromkeys(tensors, file)
        contents.write(folder / file, tensors, {"format": "pt"})
    if len(files) > 1:
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": table})


def write_json(file: Path, value: dict):
    file.write_text(json.dumps(value, indent=2) + "\n")


def export(run: str, where: str, dtype: str = "float32", which: str = "latest", remote_code: bool = False) -> Path:
    """Write a training run's weights and tokenizer as a Hugging Face model; returns the checkpoint's path."""
    foreign = re.match("(hf|nanogpt):", run)
    require(not foreign, f"{run} is no run of train.py; train from it with --init_from={run} and export that run")
    average, run = run.startswith("ema:"), run.removeprefix("ema:")
    require(where, "the folder to write has no name; give one, such as exported")
    folder = Path(os.path.expanduser(where)).absolute()
    if folder.exists():
        raise FileExistsError(f"{where} is there already; delete it, or name another folder")
    require(folder.parent.is_dir(), f"there is no folder {folder.parent}; make it first")

    unfinished = folder.with_name(f".tmp-{folder.name}")  # gets its name when all is written

    def build(path: Path, state: dict) -> Path:
        cfg = ModelConfig(**model_flags(state["flags"], str(path)))
        tokenizer = state["tokenizer"] and from_spec(state["tokenizer"], path, "train again")
        shapes, index = shapes_of(cfg), checkpoint.read_index(path, state, average)

        def weight(name: str) -> Tensor | None:
            if name not in shapes:
                return None
            x = torch.empty(shapes[name])
            checkpoint.load(path, {f"model.{name}": x}, index, cfg.vocab_size)  # without the padding that tp needed
            return x

        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        write_hf(unfinished, cfg, weight, getattr(torch, dtype), tokenizer, remote_code)
        if tokenizer:
            export_tokenizer(tokenizer, unfinished)
        for written in (*unfinished.iterdir(), unfinished):
            fsync(written)
        return path

    try:
        with writing(folder):
            path = checkpoint.read(run, build, which)
            unfinished.rename(folder)
        return path
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
