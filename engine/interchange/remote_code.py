"""Writes model.py as a custom architecture of transformers, for models that no architecture of its own expresses.

    write_remote_code(cfg, folder)       # model.py, ops.py, modeling_superblock.py, config.json

AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True) then loads the weights that the caller writes
beside them as safetensors: Model's own names, each after the prefix `model.`, without the padding rows of embedding and
head, and without a head.weight that is tied.
"""

import json
from dataclasses import fields
from pathlib import Path

from data.errors import require
from model import ModelConfig

ROOT = Path(__file__).parents[2]
CODE = (ROOT / "model.py", ROOT / "ops.py", Path(__file__).with_name("modeling_superblock.py"))


def write_remote_code(cfg: ModelConfig, folder: Path | str, **entries) -> None:
    """Writes the code, and config.json with the flags of `cfg` and further entries, such as dtype="bfloat16"."""
    require(cfg.objective == "causal", f"objective={cfg.objective} cannot be exported; AutoModelForCausalLM is causal")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in CODE:
        code = path.read_text(encoding="utf-8")
        code = code.replace("\nimport ops\n", "\nfrom . import ops\n").replace("\nfrom ops ", "\nfrom .ops ")
        (folder / path.name).write_text(code, encoding="utf-8")
    classes = {"AutoConfig": "SuperblockConfig", "AutoModelForCausalLM": "SuperblockForCausalLM"}
    config = {
        "model_type": "superblock",
        "architectures": ["SuperblockForCausalLM"],
        "auto_map": {auto: f"modeling_superblock.{name}" for auto, name in classes.items()},
        "flags": {each.name: getattr(cfg, each.name) for each in fields(ModelConfig)},
    }
    (folder / "config.json").write_text(json.dumps(config | entries, indent=2) + "\n")
