"""The directory of one checkpoint: its name, its file state.json, and the error that says that it is damaged."""

import json
import math
import re
from pathlib import Path
from typing import Any

from data.files import open_regular

FORMAT = 4  # 1 had no SHA-256 of each piece; 2 had other names of parameters; 3 had the files of DCP
STEP = re.compile(r"step_(\d{8,})")
MOST_SAMPLES = 2**40  # of one step, far above any real batch


class Damaged(ValueError):
    """A checkpoint is not complete. Another process may also have replaced or deleted it while it was read."""


def damaged(path: Path, reason: object) -> Damaged:
    """The error for a damaged checkpoint. Its remedies lose no data."""
    if not path.is_dir():
        return Damaged(f"checkpoint {path} is gone, or not seen from here; look which one {path.parent} holds now")
    others = [step for step in steps_in(path.parent) if step.name != path.name] if step_of(path) is not None else []
    remedy = "bring it back from a copy, or train from the beginning in another --out_dir"
    if others:
        remedy = f"move this directory elsewhere to go on from {others[-1].name}, or bring it back from a copy"
    return Damaged(f"checkpoint {path} is damaged: {reason}; {remedy}")


def step_of(path: Path) -> int | None:
    """The step in the name of a directory, such as step_00000010, or step_00000010.old while it is replaced; None for a
    directory with another kind of name."""
    match = STEP.fullmatch(path.absolute().name.removesuffix(".old"))
    return int(match[1]) if match else None


def steps_in(out_dir: Path) -> list[Path]:
    """The directories of complete steps, the oldest step first."""
    found = [path for path in out_dir.glob("step_*/") if STEP.fullmatch(path.name) and (path / "state.json").is_file()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def read_state(path: str | Path, kinds: dict[str, Any] | None = None) -> dict:
    """The state that was given to `save`, with "step", "format" and "index_sha256", the SHA-256 of index.json.

    kinds    the keys that the caller needs, and the type or types of each. An int must lie in 0 .. 2**62 - 1, so that
             counting can go on, and a bool is not an int. A float must be finite.

    Raises ValueError for another format. Raises Damaged if state.json is missing or is not JSON, if such a key is
    missing or of another type, if more steps were skipped than made, if the number of samples is impossible for that
    many steps, or if the directory has the name of another step. (A copy may have any other name, such as `good`.)
    """
    path = Path(path)
    try:
        state = json.loads(read_file(path / "state.json", 2**26))
        found = state["format"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, f"state.json: {error!r:.200}") from error
    if type(found) is int and found != FORMAT:
        older = "use it with the version of this program that wrote it, or train anew in another --out_dir"
        older = f"python -m engine.checkpoint convert {path}" if found == 3 else older
        remedy = "update this program" if found > FORMAT else older
        raise ValueError(f"checkpoint {path} has format {found}, and this program reads format {FORMAT}; {remedy}")
    for key, kind in ({"format": int, "step": int} | (kinds or {})).items():
        if not _fits(state.get(key, ...), kind):
            raise damaged(path, f"state.json: {key} is " + (f"{state[key]!r:.60}" if key in state else "absent"))
    step, skipped = state["step"], state.get("skipped", 0)
    if step_of(path) not in (None, step):
        raise damaged(path, f"state.json: step is {step}, and the directory has the name of {step_of(path)}")
    if kinds and "skipped" in kinds and skipped > step:
        raise damaged(path, f"state.json: skipped is {skipped}, of {step} steps")
    if kinds and "samples" in kinds and not step <= state["samples"] <= step * MOST_SAMPLES:
        raise damaged(path, f"state.json: samples is {state['samples']}, of {step} steps")
    if type(state.get("flags")) is dict:
        state["flags"] = completed(state["flags"])
    return state


def completed(flags: dict) -> dict:
    """Stored flags of a model. Those of older versions get `layer`, which replaces pool, wiring and slot_softmax."""
    flags = dict(flags)
    pool, wiring, softmax = (flags.pop(name, None) for name in ("pool", "wiring", "slot_softmax"))
    if flags.get("block") != "superblock" or "layer" in flags:
        return flags
    c = "c" if pool != "joint" else "c.own_slots" if softmax == "own" else "c.joint_slots"
    readers = [c, *["m"] * (flags.get("objective") == "seq2seq"), *["p"] * (pool != "joint")]
    return flags | {"layer": ("," if wiring == "series" else "+").join(readers)}


def read_file(path: Path, most: int) -> bytes:
    """The content of a file. ValueError if it has more than `most` bytes; OSError if it is not a regular file, because
    reading a device or a pipe might never end."""
    with open(path, "rb", opener=open_regular) as f:
        content = f.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content


def _fits(value: Any, kind: Any) -> bool:
    """Whether the value has this type, or one of these types, and is in its range; see `read_state`."""
    if type(value) not in (kind if isinstance(kind, tuple) else (kind,)):
        return False
    return 0 <= value < 2**62 if type(value) is int else type(value) is not float or math.isfinite(value)
