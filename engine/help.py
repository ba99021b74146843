"""Flags as text: what --help prints, the nearest of a wrong name, and the config file that a run leaves."""

import difflib
import textwrap
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from data.files import write_file
from flags import documented, unused

SYNONYMS = {  # words of other programs -> our flags
    "lr": "learning_rate", "wd": "weight_decay", "ema": "ema_decay", "epochs": "max_iters", "steps": "max_iters",
    "layers": "n_layer", "heads": "n_head", "hidden_size": "n_embd", "embed_dim": "n_embd", "d_model": "n_embd",
    "context_length": "block_size", "sequence_length": "block_size", "seq_len": "block_size",
}  # fmt: skip


def alternatives(kind: Any) -> list[Any]:
    """bool | Literal["auto"] -> [bool, "auto"]."""
    found = []
    for part in get_args(kind) or [kind]:
        found += get_args(part) or [part]
    return found


def choices(kind: Any) -> list[str]:
    """bool | Literal["auto"] -> ["True", "False", "auto"], int -> ["int"]."""
    words = []
    for alternative in alternatives(kind):
        words += ["True", "False"] if alternative is bool else [getattr(alternative, "__name__", alternative)]
    return words


def like(cls: type, name: str) -> str:
    """What the user of a name that is no flag may have meant."""
    known = [*cls.__dataclass_fields__]
    near = [SYNONYMS.get(name.removeprefix("n_").removeprefix("num_").removeprefix("max_"))]
    if near[0] not in known:
        near = difflib.get_close_matches(name, known, 1)
    return f"the nearest is {near[0]}" if near else "--help lists them"


def usage(cls: type, doc: str) -> str:
    """The text of --help: `doc`, the usual flags, then every flag by section."""
    flags = documented(cls)
    lines = [doc.strip()]
    if usual := getattr(cls, "USUAL", []):
        lines += ["", "what most runs set"]
        for name in usual:
            lines += help_lines(cls, name)
    for section, names in groupby(flags, lambda name: flags[name].section):
        lines += ["", section]
        for name in names:
            lines += help_lines(cls, name)
    return "\n".join(lines).strip()


def named(cls: type, flag: str) -> list[str]:
    """The names of texts of a flag, such as "superblock (c+p)"."""
    names = getattr(cls, "NAMES", {}).get(flag, {})
    return [f"{name} ({text})" if isinstance(text, str) else name for name, text in names.items()]


def help_lines(cls: type, name: str) -> list[str]:
    """A flag with its default, its type or choices, and its doc."""
    left = f"  --{name}={getattr(cls, name)}"
    kinds = " | ".join([*named(cls, name), *choices(cls.__dataclass_fields__[name].type)])
    first, *others = textwrap.wrap(f"{kinds}: {documented(cls)[name].doc}", 60, break_on_hyphens=False)
    return [f"{left:<37} {first}", *(f"{'':<37} {more}" for more in others)]


def dump(cfg: Any, path: str | Path, once: Iterable[str] = ()):
    """Write a config file that sets the same flags. Those without an effect, and those that were meant this one time,
    become comments. The write is atomic."""
    lines = []
    idle = {*unused(cfg), *once}
    for section, flags in groupby(documented(type(cfg)).items(), lambda item: item[1].section):
        lines += ["", f"# --- {section}"]
        for name, flag in flags:
            line = f"{name} = {getattr(cfg, name)!r}  # {flag.doc}"
            lines.append(f"# {line}" if name in idle else line)
    write_file(Path(path), ("\n".join(lines).strip() + "\n").encode())
