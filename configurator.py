"""Flags: a flat dataclass, filled from config files and the command line.

    python train.py config/a.py config/b.py --batch_size=32     # later files win over earlier ones, flags over files
    python train.py --help                                      # every flag: its default, its type and what it does

A flag is one line of a dataclass, `name: type = default  # doc`. A line `# --- title` begins a section of flags. Types
are int, float, str, bool, Literal["a", "b"], and unions such as `bool | Literal["auto"]`.

engine/config_files.py says what a config file may hold. On the command line, a str flag takes its text as the shell
gives it, quotes included; all other values are those of a file. Conversions lose nothing: 1e3 and 5_000 are ints, 64.5
is not. No flag can be nan or inf.
"""

import ast
import math
import os
import re
import sys
from collections.abc import Hashable, Iterable
from copy import copy
from typing import Any, TypeVar

import torch

from data.errors import say
from engine.config_files import CONSTANTS, NO_VALUE, Setting, evaluate, read_file
from engine.help import alternatives, choices, like, usage
from engine.retired import is_retired
from flags import Flags, check_limits, documented, names_in, refuse, refuse_unused, rests_on, setting, unused
from model import Model, ModelConfig

T = TypeVar("T")
PATHS = {"out_dir", "init_from", "dataset", "file", "answers", "out", "against"}  # flags of files and folders
COMMAND_LINE = "command line"  # the place where a flag was set; other places are "file:line" and checkpoints


# ---- Reading


def parse(cls: type[T], argv: list[str] | None = None, doc: str = "") -> T:
    """An instance of the flag dataclass `cls`, filled from the config files and `--name=value` in argv, by default
    sys.argv[1:]; its `sources` say where each flag was set. `doc` is the text above the flags of --help. Says which
    flags are left out. Raises ValueError or OSError with the flag, its value, its place and the remedy, in one line."""
    cfg = resolve(cls, read_flags(cls, argv, doc))
    say_left_out(cfg)
    return cfg


def say_left_out(cfg: Flags):
    """Name the flags that are left out, once for all processes that torchrun has started."""
    if os.environ.get("RANK", "0") == "0":
        for line in cfg.left_out:
            say(line)


def parse_positional(cls: type[T], argv: list[str] | None = None, doc: str = "") -> tuple[list[str], T]:
    """As parse, for a command that reads no config files: (its other arguments, its flags)."""
    argv = sys.argv[1:] if argv is None else argv
    words = [arg for arg in argv if not arg.startswith("-")]
    for word in words:
        refuse_address(word, word)
    return words, parse(cls, [arg for arg in argv if arg.startswith("-")], doc)


def read_flags(cls: type, argv: list[str] | None = None, doc: str = "") -> dict[str, Setting]:
    """The first half of parse: reads what files and arguments set, each flag for itself."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(usage(cls, doc), flush=True)
        raise SystemExit(0)
    check_rules(cls)
    in_files = []
    on_command_line = []
    for arg in argv:
        if arg.startswith("-") or "=" in arg:
            on_command_line.append(read_argument(cls, arg))
        else:
            in_files += read_file(arg)
    last: dict[str, Setting] = {}  # of each flag, in the order of these settings
    for each in in_files + on_command_line:
        last.pop(each.name, None)
        last[each.name] = each
    return typed(cls, last.values())


def check_rules(cls: type):
    """ValueError if a rule of the dataclass names neither a flag nor a fact."""
    for name, flag in documented(cls).items():
        for rule in flag.rules:
            for unknown in names_in(rule):
                if not hasattr(cls, unknown):
                    raise ValueError(f"{cls.__name__}.{name}: its rule [{rule}] names {unknown!r}, which is no flag")


def typed(cls: type, settings: Iterable[Setting]) -> dict[str, Setting]:
    """The settings by name, in the types of the flags of `cls`. nanoGPT's become ours; retired ones are left out."""
    found = {}
    theirs = getattr(cls, "NANOGPT", {})
    for spelling, value, place in settings:
        ours_by_name = {spelling: value}
        if isinstance(value, Hashable):  # a JSON file may have a list
            ours_by_name = theirs.get((spelling, value), ours_by_name)
        for name, ours in ours_by_name.items():
            if not is_retired(cls, name, ours, place):
                found[name] = Setting(name, convert(cls, name, ours, place), place)
    return found


def resolve(cls: type[T], given: dict[str, Setting], stored: dict[str, Any] | None = None, origin: str = "") -> T:
    """The second half of parse. A flag has its value in `given`, else in `stored` (of `origin`, such as a checkpoint),
    else its default. A flag without effect beside the others is left out if it is stored. One of a file is, with
    a line in `left_out`, if the command line is the reason or its value is useless. Otherwise it is refused."""
    defaults = typed(cls, [Setting(name, value, origin) for name, value in (stored or {}).items()])
    settings = defaults | given
    cfg = cls.__new__(cls)  # first without its own check
    vars(cfg).update({name: each.value for name, each in settings.items()})
    cfg.sources = {name: each.place for name, each in settings.items() if each.place}
    cfg.given = frozenset(given)
    cfg.left_out = []
    if isinstance(cfg, Flags):
        check_limits(cfg)  # before any rule, because facts count layers
    overruled = set()  # by the command line, or because nothing changes with it
    for name, why in useless(cfg).items():
        if name in given:
            overruled.add(name)
            leave_out(cfg, name, why, settings, given, defaults)
    while without_effect := {name: rules for name, rules in unused(cfg).items() if name in settings}:
        reasons = {}
        for name, rules in without_effect.items():
            others = rests_on(cfg, rules)
            by_user = any(other in overruled or cfg.sources.get(other) == COMMAND_LINE for other in others)
            if by_user and settings[name].place != COMMAND_LINE:
                overruled.add(name)
            elif settings[name] is given.get(name):
                refuse_unused(cfg, name, rules)
            states = [f"{other}={getattr(cfg, other)}" for other in others if other != name]
            reasons[name] = f"it does not go with {', '.join(states)}"
        for name, why in reasons.items():  # then again, because others may have no effect beside these defaults
            leave_out(cfg, name, why, settings, given, defaults)
    cfg.__init__(**{name: each.value for name, each in settings.items()})
    if isinstance(cfg, ModelConfig):
        try_flags(cfg)
    return cfg


def useless(cfg: Any) -> dict[str, str]:
    """Flags whose values change nothing -> why. Models that were made with other sizes may have them."""
    if not isinstance(cfg, ModelConfig):
        return {}
    found = {}
    if cfg.window >= cfg.block_size:
        found["window"] = f"no token is farther away than block_size={cfg.block_size}"
    layers = max(cfg.n_layer, cfg.n_encoder_layer)
    for name in ("window_pattern", "pos_pattern"):
        if len(getattr(cfg, name)) > layers:
            found[name] = f"it has more letters than the {layers} layers"
    if {*cfg.pos_pattern} == {"G", "L"} and not cfg.rope_scaling and cfg.rope_theta == cfg.rope_theta_local:
        found["pos_pattern"] = f"G and L are the same, as rope_theta and rope_theta_local are {cfg.rope_theta:g}"
    return found


def leave_out(cfg: Flags, name: str, why: str, settings: dict, given: dict, defaults: dict):
    """Forget a flag that has no effect, or go back from a file's setting to a checkpoint's. ValueError if the flag was
    set on the command line."""
    setting_of = settings.pop(name)
    if setting_of.place == COMMAND_LINE:
        refuse(cfg, name, f"{why}; leave it out")
    delattr(cfg, name)
    if setting_of is given.get(name):
        cfg.left_out.append(f"{setting(*setting_of)} is left out: {why}")
        if name in defaults:
            settings[name] = defaults[name]
            setattr(cfg, name, defaults[name].value)


def convert(cls: type, name: str, value: Any, place: str) -> Any:
    """The value of a flag in its type. ValueError if there is no such flag, or it cannot have this value."""
    flag = cls.__dataclass_fields__.get(name)
    if flag is None:
        raise ValueError(f"{setting(name, value, place)}: no such flag; {like(cls, name)}")
    if name in PATHS:
        refuse_address(str(value), setting(name, value, place))
    try:
        return coerce(value, flag.type)
    except (ValueError, OverflowError):
        kinds = " or ".join(choices(flag.type))
        raise ValueError(f"{setting(name, value, place)}: expected {kinds}, such as {flag.default}") from None


def refuse_address(path: str, here: str):
    """ValueError if a path is an address, such as s3://bucket/run, which would become a folder here."""
    if re.match(r"(\w+:)?\w+://", path):
        raise ValueError(f"{here}: an address; give the path of a file or folder, perhaps of a mounted one")


def read_argument(cls: type, arg: str) -> Setting:
    name, equals, text = arg.removeprefix("--").partition("=")
    if not arg.startswith("--") or not equals:
        raise ValueError(f"{arg} ({COMMAND_LINE}): flags are written --name=value; --help lists them")
    flag = cls.__dataclass_fields__.get(name)
    if flag and flag.type is str:
        return Setting(name, text, COMMAND_LINE)
    try:
        value = evaluate(ast.parse(text.strip(), mode="eval").body, CONSTANTS)
    except NO_VALUE:
        value = text  # such as adamw
    return Setting(name, value, COMMAND_LINE)


# ---- Values


def coerce(value: Any, kind: Any) -> Any:
    """`value` in the type `kind`, if the conversion loses nothing; otherwise ValueError or OverflowError."""
    for wanted in alternatives(kind):
        if wanted in (int, float) and type(value) in (int, float):
            if math.isfinite(value) and wanted(value) == value:
                return wanted(value)
        elif type(value) is wanted or value == wanted:
            return value
    raise ValueError


def try_flags(cfg: ModelConfig):
    """ValueError if no model can have these flags. Makes one on the meta device, which costs no memory and no work."""
    flags = copy(cfg)
    flags.vocab_size = cfg.vocab_size or 1
    with torch.device("meta"):
        Model(flags)
