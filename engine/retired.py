"""Retired flags. Checkpoints and config files that name one still load, if its value is what the program does now."""

from typing import Any

from flags import LayerFlags, setting

# What was retired: a flag -> the value that may be dropped, because it is what the program does now.
# "flag=value" is a retired choice of a flag that stays -> what to write instead.
RETIRED_OF_THE_MODEL: dict[str, Any] = {
    "pool": "separate",  # these three made a string of --layer, and with these values its default
    "wiring": "parallel",
    "slot_softmax": "own",
    "head_bias": False,
    "embed_norm": False,
    "n_group": 1,
    "norm_per_reader": False,
    "qk_norm_width": "head",
    "alibi_scale": 1.0,
    "rope_fraction": 1.0,
    "mup_base_width": 0,
    "attn_diff": False,
    "attn_sink": False,
    "attn_gate": "none",
    "value_residual": False,
    "balance_weight": 0.01,
    "router_z_loss": 0.0,
    "moe_pattern": "",
    "label_smoothing": 0.0,
    "router_balance=loss": "router_balance=bias, or none",
}
RETIRED: dict[str, Any] = RETIRED_OF_THE_MODEL | {
    "spike_action": "skip",
    "log_ranks": False,
    "z_loss": 0.0,
    "pp_chunks": 1,
    "fsdp_offload": False,
    "on_save_error": "stop",
    "async_checkpoint": False,
    "fp8": False,
    "target_flops": 0.0,
    "target_ratio": 0.0,
}
CHANGED_NO_NUMBER = {  # dropped from checkpoints
    "async_checkpoint", "fsdp_offload", "log_ranks", "on_save_error", "target_flops", "target_ratio",
}  # fmt: skip


def is_retired(cls: type, name: str, value: Any, place: str) -> bool:
    """Whether this setting is of a retired flag and may be dropped. ValueError if it is not what the program does now,
    if it is a retired choice, or if `cls` is another command's, which has no files from before."""
    choice = f"{name}={value}"
    if choice in RETIRED:
        why = f"this choice was retired; use {RETIRED[choice]}, or an older version of this program"
        raise ValueError(f"{setting(name, value, place)}: {why}")
    if name in cls.__dataclass_fields__ or name not in RETIRED:
        return False
    if value != RETIRED[name] or not issubclass(cls, LayerFlags):
        why = "this flag was retired; leave it out, or use an older version of this program"
        raise ValueError(f"{setting(name, value, place)}: {why}")
    return True
