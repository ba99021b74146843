"""Flags: a flat dataclass, filled from config files and the command line.

    python train.py config/a.py config/b.py --batch_size=32     # later files win over earlier ones, flags over files
    python train.py --help                                      # every flag: its default, its type and what it does

A flag is one line of a dataclass, `name: type = default  # doc`. A line `# --- title` begins a section of flags. Types
are int, float, str, bool, Literal["a", "b"], and unions such as `bool | Literal["auto"]`.

A config file is parsed, never executed. It holds comments, a docstring and lines `name = value`. A value is a number, a
string, True or False, an earlier name of the same file, numbers joined by + - * / // % ** and parentheses, or strings
joined by +. A name that begins with an underscore is a variable of the file; every other name must be a flag. On the
command line, a str flag takes its text unchanged unless that is in quotes; all other values are those of a file.

Conversions lose nothing: 1e3 and 5_000 are ints, 64.5 is not. No flag can be nan or inf.
"""

import ast
import difflib
import math
import operator
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

from data.errors import printable, require
from data.files import write_file
from flags import Flags, check_limits, documented, refuse, refuse_unused, rests_on, setting, unused
from model import ModelConfig, try_flags

T = TypeVar("T")
# What was retired: a flag -> the value that may be dropped, because it is what the program does now; ... means none.
# "flag=value" is a retired choice of a flag that stays -> what to write instead.
RETIRED_OF_THE_MODEL: dict[str, Any] = {
    "pool": ...,
    "wiring": ...,
    "slot_softmax": ...,
    "head_bias": False,
    "embed_norm": False,
    "norm_per_reader": False,
    "qk_norm_width": "head",
    "alibi_scale": 1.0,
    "rope_fraction": 1.0,
    "mup_base_width": 0,
    "attn_diff": False,
    "attn_sink": False,
    "balance_weight": 0.01,
    "router_z_loss": 0.0,
    "moe_pattern": "",
    "label_smoothing": 0.0,
    "router_balance=loss": "router_balance=bias, or none",
}
RETIRED: dict[str, Any] = RETIRED_OF_THE_MODEL | {
    "num_beams": 1,
    "length_penalty": 1.0,
    "tasks": "",
    "score": "",
    "overflow": "recompute",
    "limit": 0,
    "spike_action": "skip",
    "log_ranks": False,
    "z_loss": 0.0,
    "pp_chunks": 1,
    "fsdp_offload": False,
    "on_save_error": "stop",
}
PATHS = {"out_dir", "init_from", "dataset", "file", "answers", "out", "against"}  # flags of files and folders
COMMAND_LINE = "command line"  # the place where a flag was set; other places are "file:line" and checkpoints
CONSTANTS = {"true": True, "false": False}
OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
LARGEST_FILE = 2**20  # bytes
LARGEST = 1000  # characters of a computed number or text
LARGEST_EXPONENT = 64  # so 9**9**9 is refused, not computed
NO_VALUE = (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError)  # what evaluate and ast.parse raise
ALLOWED = "a config file holds only name = value; a value is a literal or arithmetic over literals and earlier names"


@dataclass
class Config(ModelConfig):
    """The flags of a training run. ValueError if they do not fit together; it says their values and the remedy."""

    # --- data
    dataset: str = "pycode"  # folder under data/, or a path; or a mixture by weight, as a:0.7,b:0.3
    batch_size: int = 12  # [>0] sequences per micro-batch
    gradient_accumulation_steps: int = 40  # [>0] [<1048576] micro-batches of one step, over all ranks
    batch_ramp: str = ""  # micro-batches of the first steps: 8:1000,16:2000 = 8 before step 1000, then 16 before 2000
    pairs: bool | Literal["auto"] = "auto"  # learn the targets of pairs alone (docs/data.md); auto = if data have any
    corrupt_ratio: float = 0.15  # [objective!=causal] share of the tokens that are to be restored
    span_length: float = 3.0  # [objective=seq2seq] mean length of the spans that seq2seq restores
    verify_data: bool = False  # check every shard's SHA-256 before the first step
    # --- run
    out_dir: str = "out"  # folder of checkpoints, metrics and the resolved flags (config.py; earlier: config_STEP.py)
    init_from: str = "scratch"  # scratch, resume (out_dir's latest), checkpoint:RUN, ema:RUN, hf:DIR or nanogpt:FILE
    seed: int = 1337  # for initial weights, the order of the data and dropout
    max_iters: int = 600000  # [>0] optimizer steps
    eval_interval: int = 2000  # steps between evaluations, 0 = only at the end
    eval_iters: int = 200  # batches per evaluation, 0 = the whole validation set (and 100 of the training set)
    eval_only: bool = False  # evaluate once and stop
    log_interval: int = 0  # steps between logged steps, 0 = 1 on a CPU, elsewhere 10: logging waits for the device
    always_save_checkpoint: bool = True  # at every evaluation, not only at the end and if val loss improves
    save_interval: int = 0  # also save after this many steps, 0 = only at evaluations
    keep_last: int = 2  # [>0] how many of the newest checkpoints stay, besides the best one
    async_checkpoint: bool = False  # write checkpoints while training goes on
    wandb_log: bool = False  # log to Weights & Biases too, which pip install wandb adds
    wandb_project: str = "superblock"  # project at Weights & Biases
    wandb_run_name: str = ""  # name of the run at Weights & Biases; empty = that of out_dir
    profile_steps: int = 0  # [eval_only=False] trace so many steps after the first five, into out_dir/trace.json
    # --- optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # adamw for everything; muon for hidden matrices, AdamW for the rest
    learning_rate: float = 6e-4  # highest learning rate; of Muon's matrices it is muon_lr
    weight_decay: float = 0.1  # on matrices only
    beta1: float = 0.9  # [<1] decay of the mean gradient; of Muon's matrices it is muon_momentum
    beta2: float = 0.95  # [<1] decay of the mean squared gradient
    grad_clip: float = 1.0  # largest norm of the gradient, 0 = off
    muon_lr: float = 0.02  # [optimizer=muon] Muon's highest learning rate
    muon_momentum: float = 0.95  # [<1] [optimizer=muon] Muon's decay of the mean gradient
    ema_decay: float = 0.0  # [<1] keep an average A = d A + (1 - d) W of the weights, later named ema:RUN; 0 = none
    balance_rate: float = 0.001  # step of the biases of experts that are read too rarely or too often
    # [n_expert>0 and router_balance=bias]
    skip_nonfinite: bool = False  # leave out a step whose gradient is not finite, instead of stopping
    spike_factor: float = 0.0  # leave out a step whose gradient norm is above so many times the recent median, 0 = off
    # --- schedule
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # after the warmup; wsd = constant, then linear to min_lr
    warmup_iters: int = 2000  # steps over which the learning rate rises from 0
    lr_decay_iters: int = 0  # [schedule!=constant] step at which the learning rate reaches min_lr, 0 = max_iters
    min_lr: float = 6e-5  # [schedule!=constant] learning rate at the end
    cooldown_iters: int = 0  # [schedule=wsd] steps over which wsd falls to min_lr, 0 = a fifth of lr_decay_iters
    # --- machine
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products; auto = bfloat16 where fast
    fp8: bool = False  # products of the blocks' linear layers in float8, on GPUs that have it; with dtype=bfloat16
    compile: bool | Literal["auto"] = "auto"  # torch.compile each block and the loss; auto = on GPUs
    activation_checkpoint: Literal["none", "selective", "full"] = "none"  # selective: recompute parts, full: all blocks
    deterministic: bool = False  # on GPUs: only deterministic kernels, and no TF32
    # --- ranks, of torchrun
    parallel: Literal["ddp", "fsdp"] = "ddp"  # ddp: data-parallel ranks hold copies, fsdp: shards (FSDP2, ZeRO-3)
    fsdp_reshard: bool = True  # [parallel=fsdp] free a block's weights after its forward; False = ZeRO-2
    dp_replicate: int = 1  # [>0] [parallel=fsdp] HSDP: number of groups of ranks, each with a complete set of shards
    tp: int = 1  # [>0] tensor parallel degree: cuts heads, hidden units and vocabulary; must divide n_kv_head
    cp: int = 1  # [>0] context parallel degree: each rank has two of 2 * cp pieces of every sequence
    ep: int = 1  # [>0] [n_expert>0] expert parallel degree: so many data-parallel ranks divide the experts
    pp: int = 1  # [>0] pipeline parallel degree: number of stages that the blocks are cut into (1F1B schedule)
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # of torch.distributed; auto = nccl on GPUs
    collective_timeout: int = 600  # [>0] seconds after which a rank gives up waiting for another
    # --- plan
    plan: bool = False  # print memory, communication and duration of this run for world_size GPUs, and stop
    world_size: int = 1  # [>0] [plan=True] number of ranks in the plan
    gpu: Literal["h100", "h200", "a100", "b200"] = "h100"  # [plan=True] kind of GPU in the plan
    target_flops: float = 0.0  # [<1e28] [plan=True] also tell the steps and the best sizes for so many FLOPs in all
    target_ratio: float = 0.0  # [<1e5] [plan=True and target_flops=0] the same for so many tokens per parameter

    # A flag of nanoGPT and its value -> our flags. nanoGPT's constant rate has no warmup.
    NANOGPT: ClassVar[dict[tuple[str, Any], dict[str, Any]]] = {
        ("decay_lr", True): {},
        ("decay_lr", False): {"schedule": "constant", "warmup_iters": 0},
        ("init_from", "gpt2"): {"init_from": "hf:openai-community/gpt2"},
        ("init_from", "gpt2-medium"): {"init_from": "hf:openai-community/gpt2-medium"},
        ("init_from", "gpt2-large"): {"init_from": "hf:openai-community/gpt2-large"},
        ("init_from", "gpt2-xl"): {"init_from": "hf:openai-community/gpt2-xl"},
    }

    # What most runs set; --help shows these first.
    USUAL: ClassVar[list[str]] = [
        "dataset", "out_dir", "init_from", "n_layer", "n_head", "n_embd", "block_size", "dropout", "pos", "batch_size",
        "gradient_accumulation_steps", "max_iters", "eval_interval", "eval_iters", "optimizer", "learning_rate",
        "min_lr", "warmup_iters", "device", "dtype", "compile",
    ]  # fmt: skip

    # The form of each flag that is a text, which its comment says in words.
    FORMS: ClassVar[dict[str, str]] = {
        "dataset": r".*\S.*",
        "out_dir": r"(?!~).*\S.*",
        "init_from": "scratch|resume|(checkpoint|ema|hf|nanogpt):.+",
        "device": r"auto|cpu|cuda(:\d{1,3})?|mps",
        "batch_ramp": r"([1-9]\d{0,5}:[1-9]\d{0,8}(,(?!$)|$))*",
    }

    def __post_init__(self):
        super().__post_init__()
        self.out_dir = os.path.expanduser(self.out_dir)
        if 0 < self.spike_factor <= 1:
            refuse(self, "spike_factor", "must be above 1, such as 10, or 0 = off")
        for name, form in self.FORMS.items():
            if not re.fullmatch(form, getattr(self, name), re.DOTALL):
                refuse(self, name, f"must be: {documented(type(self))[name].doc}")
        ends = [end for _, end in self.ramp]
        if ends != sorted(set(ends)):
            refuse(self, "batch_ramp", "the steps must ascend, as in 8:1000,16:2000")
        self.check_schedule()

    def check_schedule(self):
        """ValueError unless the learning rate can fall from learning_rate to min_lr within the run."""
        last = "lr_decay_iters" if self.lr_decay_iters else "max_iters"
        end = getattr(self, last)
        cooldown = self.cooldown_iters or end // 5
        if self.schedule == "wsd" and self.warmup_iters + cooldown > end:
            why = f"with a cooldown of {cooldown} steps there are too few; set warmup_iters or cooldown_iters lower"
            refuse(self, f"schedule warmup_iters {last}", why)
        if self.schedule == "cosine" and self.warmup_iters > end and self.max_iters > end:
            refuse(self, f"warmup_iters {last}", "the rate would rise after it has fallen; set warmup_iters lower")
        if self.schedule != "constant" and self.min_lr > self.learning_rate:
            refuse(self, "min_lr learning_rate", "the rate falls to min_lr, so it is the lower one; a tenth is usual")

    @property
    def ramp(self) -> list[tuple[int, int]]:
        """The flag batch_ramp as (micro-batches, the step that has other ones)."""
        return [(int(n), int(end)) for n, end in re.findall(r"(\d+):(\d+)", self.batch_ramp)]

    def micro_batches(self, step: int) -> int:
        """The number of micro-batches of this step, over all ranks."""
        return next((n for n, end in self.ramp if step < end), self.gradient_accumulation_steps)

    def samples(self, step: int) -> int:
        """The number of sequences that all ranks read in this step."""
        return self.batch_size * self.micro_batches(step)

    @property
    def vocab_rows(self) -> int:
        """Rows of the vocabulary's weights, padded so that tp can cut them into equal slices."""
        return -(-self.vocab_size // self.tp) * self.tp


# ---------------------------------------------------------------------------------------------------------------------
# Reading


class Setting(NamedTuple):
    """A flag that a config file, an argument or a checkpoint sets."""

    name: str
    value: Any
    place: str  # "file:line", COMMAND_LINE or a checkpoint


def parse(cls: type[T], argv: list[str] | None = None, doc: str = "") -> T:
    """An instance of the flag dataclass `cls`, filled from the config files and `--name=value` in argv, by default
    sys.argv[1:]; its `sources` say where each flag was set. `doc` is the text above the flags of --help. Raises
    ValueError or OSError with the flag, its value, its place and the remedy, in one line."""
    return resolve(cls, read_flags(cls, argv, doc))


def parse_positional(cls: type[T], argv: list[str] | None = None, doc: str = "") -> tuple[list[str], T]:
    """As parse, for a command that reads no config files: (its other arguments, its flags)."""
    argv = sys.argv[1:] if argv is None else argv
    words = [arg for arg in argv if not arg.startswith("-")]
    for word in words:
        refuse_address(word, printable(word))
    return words, parse(cls, [arg for arg in argv if arg.startswith("-")], doc)


def read_flags(cls: type, argv: list[str] | None = None, doc: str = "") -> dict[str, Setting]:
    """The first half of parse: reads what files and arguments set, each flag for itself."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(usage(cls, doc), flush=True)
        raise SystemExit(0)
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


def typed(cls: type, settings: Iterable[Setting]) -> dict[str, Setting]:
    """The settings by name, in the types of the flags of `cls`. nanoGPT's become ours, and retired ones go."""
    found = {}
    theirs = getattr(cls, "NANOGPT", {})
    for spelling, value, place in settings:
        for name, ours in theirs.get((spelling, value), {spelling: value}).items():
            if not is_retired(cls, name, ours, place):
                found[name] = Setting(name, convert(cls, name, ours, place), place)
    return found


def resolve(cls: type[T], given: dict[str, Setting], stored: dict[str, Any] | None = None, origin: str = "") -> T:
    """The second half of parse: the flags `given`, then those `stored` at the place `origin`, such as a checkpoint's,
    then the defaults of `cls`. A flag that the others do not use has its default: a stored one always, one of a file
    if the command line is the reason. Any other is refused."""
    defaults = typed(cls, [Setting(name, value, origin) for name, value in (stored or {}).items()])
    values = {name: each.value for name, each in (defaults | given).items()}
    sources = {name: each.place for name, each in given.items()}
    cfg = cls.__new__(cls)  # first without its own check
    vars(cfg).update(values, sources=sources)
    if isinstance(cfg, Flags):
        check_limits(cfg)  # facts count layers
    for name in unused(cfg):
        values.pop(name, None)
        overruled = COMMAND_LINE in [sources.get(other) for other in rests_on(cfg, name)]
        if name in sources and (sources[name] == COMMAND_LINE or not overruled):
            refuse_unused(cfg, name)
    cfg.__init__(**values)
    if isinstance(cfg, ModelConfig):
        try_flags(cfg)
    return cfg


def is_retired(cls: type, name: str, value: Any, place: str) -> bool:
    """Whether this setting is of a retired flag and may be dropped. ValueError if it is not what the program does now,
    or if it is a retired choice."""
    choice = f"{name}={value}"
    if choice in RETIRED:
        why = f"this choice was retired; use {RETIRED[choice]}, or an older version of this program"
        raise ValueError(f"{setting(name, value, place)}: {why}")
    if name in cls.__dataclass_fields__ or name not in RETIRED:
        return False
    if value != RETIRED[name]:
        why = "this flag was retired; leave it out, or use an older version of this program"
        raise ValueError(f"{setting(name, value, place)}: {why}")
    return True


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


def like(cls: type, name: str) -> str:
    """What the user of a name that is no flag may have meant."""
    known = [*cls.__dataclass_fields__]
    initials = {"".join(re.findall(r"(?<![a-z])[a-z]", flag)): flag for flag in known}  # lr: learning_rate
    near = [initials[name]] if name in initials else difflib.get_close_matches(name, known, 1)
    return f"the nearest is {near[0]}" if near else "--help lists them"


def refuse_address(path: str, here: str):
    """ValueError if a path is an address, such as s3://bucket/run, which would become a folder here."""
    if re.match(r"(\w+:)?\w+://", path):
        raise ValueError(f"{here}: an address; give the path of a file or folder, perhaps of a mounted one")


def read_argument(cls: type, arg: str) -> Setting:
    name, equals, text = arg.removeprefix("--").partition("=")
    if not arg.startswith("--") or not equals:
        raise ValueError(f"{printable(arg)} ({COMMAND_LINE}): flags are written --name=value; --help lists them")
    flag = cls.__dataclass_fields__.get(name)
    if flag and flag.type is str and text[:1] not in ("'", '"'):
        return Setting(name, text, COMMAND_LINE)
    try:
        value = evaluate(ast.parse(text.strip(), mode="eval").body, CONSTANTS)
    except NO_VALUE:
        value = text  # such as adamw
    return Setting(name, value, COMMAND_LINE)


def read_file(path: str) -> list[Setting]:
    """The settings of a config file. ValueError if it holds anything else."""
    if not os.path.isfile(path):
        remedy = f"flags are written --name=value, such as --out_dir={path}"
        raise FileNotFoundError(f"{path}: no such config file; {remedy}")
    require(os.path.getsize(path) <= LARGEST_FILE, f"{path} has more than {LARGEST_FILE:,} bytes; {ALLOWED}")
    settings = []
    names = dict(CONSTANTS)
    line = 1
    try:
        for node in ast.parse(Path(path).read_bytes()).body:
            line = node.lineno
            match node:
                case ast.Assign(targets=[ast.Name(id=name)]):
                    names[name] = evaluate(node.value, names)
                    if not name.startswith("_"):
                        settings.append(Setting(name, names[name], f"{path}:{line}"))
                case ast.Expr(value=ast.Constant(value=str())):
                    pass  # a docstring
                case _:
                    raise ValueError(shown(node))
    except NO_VALUE as error:
        line = getattr(error, "lineno", None) or line
        raise ValueError(f"{path}:{line}: {getattr(error, 'msg', error)}; {ALLOWED}") from None
    return settings


def evaluate(node: ast.expr, names: dict[str, Any]) -> Any:
    """The value of a literal or of arithmetic over literals and `names`; one of NO_VALUE for all else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str):
        return node.value
    if isinstance(node, ast.Name):
        require(node.id in names, f"{node.id} is not set earlier in this file")
        return names[node.id]
    function = OPERATORS.get(type(getattr(node, "op", None)))
    if function is None:
        raise ValueError(shown(node))
    operands = [evaluate(child, names) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    texts = [isinstance(operand, str) for operand in operands]
    if any(texts) and not (all(texts) and function is operator.add):
        raise ValueError(shown(node))
    if function is operator.pow and abs(operands[1]) > LARGEST_EXPONENT:
        raise ValueError(f"the exponent of {shown(node)} is too large")
    result = function(*operands)
    if len(str(result)) > LARGEST:
        raise ValueError("the result is too large")
    return result


def shown(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0][:60]


# ---------------------------------------------------------------------------------------------------------------------
# Values


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


def coerce(value: Any, kind: Any) -> Any:
    """`value` in the type `kind`, if the conversion loses nothing; otherwise ValueError or OverflowError."""
    for wanted in alternatives(kind):
        if wanted in (int, float) and type(value) in (int, float):
            if math.isfinite(value) and wanted(value) == value:
                return wanted(value)
        elif type(value) is wanted or value == wanted:
            return value
    raise ValueError


# ---------------------------------------------------------------------------------------------------------------------
# Writing


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


def help_lines(cls: type, name: str) -> list[str]:
    """A flag with its default, its type or choices, and its doc."""
    left = f"  --{name}={printable(getattr(cls, name))}"
    kinds = " | ".join(choices(cls.__dataclass_fields__[name].type))
    first, *others = textwrap.wrap(f"{kinds}: {documented(cls)[name].doc}", 60, break_on_hyphens=False)
    return [f"{left:<37} {first}", *(f"{'':<37} {more}" for more in others)]


def dump(cfg: Any, path: str | Path):
    """Write a config file that sets the same flags; flags without an effect become comments. The write is atomic."""
    lines = []
    idle = unused(cfg)
    for section, flags in groupby(documented(type(cfg)).items(), lambda item: item[1].section):
        lines += ["", f"# --- {section}"]
        for name, flag in flags:
            line = f"{name} = {getattr(cfg, name)!r}  # {flag.doc}"
            lines.append(f"# {line}" if name in idle else line)
    write_file(Path(path), ("\n".join(lines).strip() + "\n").encode())
