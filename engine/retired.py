"""Flags of earlier versions: which of them still load, and what is written instead of them."""

from typing import Any

from flags import LayerFlags, setting

RETIRED: dict[str, Any] = {}  # a flag -> the value that may be dropped, because it is what the program does now
RENAMED = {"simplified_beta_ff": "sas_beta_ff", "simplified_value_proj": "sas_value_proj"}
REPLACED = {old: f"--{new}={{}}" for old, new in RENAMED.items()}  # a flag, or a value of it -> what to write
REPLACED |= {"layer": "--block={}", "norm=none": "--norm_placement=none"}


def translated(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags of a checkpoint or an export of commit ca72a4b or later, in today's words."""
    flags = {RENAMED.get(name, name): value for name, value in flags.items()}
    string = flags.pop("layer", None)
    if string is not None and flags.get("block") == "superblock":
        flags["block"] = string
    if flags.get("norm") == "none":
        del flags["norm"]
        flags["norm_placement"] = "none"
    return flags


def is_retired(cls: type, name: str, value: Any, place: str) -> bool:
    """Whether this setting is of a retired flag and may be dropped. ValueError if it is not what the program does now,
    if it is written in another way now, or if `cls` is another command's, which has no files from before."""
    instead = REPLACED.get(name, REPLACED.get(f"{name}={value}"))
    if instead and issubclass(cls, LayerFlags):
        raise ValueError(f"{setting(name, value, place)}: this was replaced; write {instead.format(value)}")
    if name in cls.__dataclass_fields__ or name not in RETIRED:
        return False
    if value != RETIRED[name] or not issubclass(cls, LayerFlags):
        why = "this flag was retired; leave it out, or use an older version of this program"
        raise ValueError(f"{setting(name, value, place)}: {why}")
    return True
