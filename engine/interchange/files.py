"""Finds and opens the files of Hugging Face's models: a folder or a download, JSON, and tensors in safetensors files.

    folder = locate("DIR")                          # or the name of a model on the hub
    config = read_json(folder / "config.json")
    files = open_files(folder)                      # name of a tensor -> the open file that holds it

Raises ValueError or OSError in one line for what is absent or damaged. Pickles are refused.
"""

import json
import os
import re
from pathlib import Path

from data.errors import require
from data.files import open_regular
from engine.interchange.keys import describe

AGAIN = "download the folder again, or write it with transformers' save_pretrained"


def locate(where: str) -> Path:
    """The folder, or the downloaded copy of the model of this name on the hub."""
    require(where, "hf: names no model; give hf:DIR, or hf:NAME for a model on the hub")
    folder = Path(os.path.expanduser(where))
    if folder.is_dir():
        return folder
    offline = f"download it where there is a network, with hf download {where} --local-dir=DIR, and give hf:DIR"
    name = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", where)
    require(name, f"there is no folder {folder}; give one, or a name on the hub")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(f"there is no folder {folder}, and huggingface_hub is not installed; {offline}") from None
    try:
        options = dict(allow_patterns=["*.json", "*.safetensors"], ignore_patterns=["*/*", "consolidated*"])
        return Path(snapshot_download(where, **options))
    except Exception as error:  # of the network, of the hub, or of its libraries
        fact = f"there is no folder {folder}, and no such model can be had from the hub ({type(error).__name__})"
        raise ValueError(f"{fact}; {offline}") from None


def read_json(file: Path) -> dict:
    try:
        with open(file, "rb", opener=open_regular) as f:
            found = json.load(f)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON ({type(error).__name__}); {AGAIN}") from None
    require(type(found) is dict, f"{file} holds no JSON object; {AGAIN}")
    return found


def open_files(folder: Path) -> dict:
    """Name of a tensor -> the open safetensors file that holds it. The file's header is read and checked."""
    from safetensors import SafetensorError, safe_open

    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        names = {single.name: None}
    elif index.is_file():
        table = read_json(index).get("weight_map")
        require(type(table) is dict and table, f"{index} has no weight_map; {AGAIN}")
        for file in table.values():
            plain = type(file) is str and re.fullmatch(r"[\w-][\w.-]*[.]safetensors", file)
            require(plain, f"{index} names {describe(file)}, which is no safetensors file of its folder; {AGAIN}")
        names = {file: {name for name, where in table.items() if where == file} for file in sorted(set(table.values()))}
    else:
        found = "only pytorch_model.bin, a pickle" if list(folder.glob("*.bin")) else "no model.safetensors"
        remedy = "load it with transformers and call save_pretrained(DIR, safe_serialization=True)"
        raise ValueError(f"{folder} has {found}; {remedy}")
    out = {}
    for file, listed in names.items():
        require((folder / file).is_file(), f"{index} names {file}, which is absent; {AGAIN}")
        try:
            with open(folder / file, "rb", opener=open_regular):
                opened = safe_open(folder / file, framework="pt")
        except (SafetensorError, ValueError) as error:
            text = str(error).splitlines()[0][:100]
            raise ValueError(f"{folder / file} is damaged ({text}); {AGAIN}") from None
        held = set(opened.keys())
        lacking = min(listed - held, default=None) if listed is not None else None
        require(lacking is None, f"{folder / file} lacks {describe(lacking)}, which {index.name} places there; {AGAIN}")
        out |= dict.fromkeys(held, opened)
    return out
