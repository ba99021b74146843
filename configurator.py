"""Flags: a flat dataclass, filled from config files and the command line.

    python train.py config/a.py config/b.py --batch_size=32     # later files win over earlier ones, flags over files
    python train.py --help                                      # every flag: its default, its type and what it does

A flag is one line of a dataclass, `name: type = default  # doc`. A line `# --- title` begins a section of flags. Types
are int, float, str, bool, Literal["a", "b"], and unions such as `bool | Literal["auto"]`.

A config file is parsed, never executed. It holds comments, a docstring and lines `name = value`. A value is a number, a
string, True or False, an earlier name of the same file, numbers joined by + - * / // % ** and parentheses, or strings
joined by +. A name that begins with an underscore is a variable of the file; every other name must be a flag. On the
command line, a str flag takes its text unchanged (without quotes around it); all other flags take the same values as in
a file.

Conversions lose nothing: 1e3 and 5_000 are ints, 64.5 is not. No flag can be nan or inf.
"""

import ast
import difflib
import operator
import os
import re
import sys
import textwrap
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from data.errors import printable, require
from data.files import write_file
from flags import Flags, check_limits, documented, refuse, refuse_unused, rests_on, unused
from model import ModelConfig, try_flags

T = TypeVar("T")
GPT2 = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
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
    "limit": 0,
    "spike_action": "skip",
    "log_ranks": False,
    "on_save_error": "stop",
}
PATHS = {"out_dir", "init_from", "dataset", "file", "answers", "score", "out", "against"}  # flags of files and folders
COMMAND_LINE = "command line"  # the place where a flag was set; other places are "file:line" and checkpoints
CONSTANTS = {"true": True, "false": False}
OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
LARGEST_FILE = 2**20  # bytes
LARGEST = 4096  # bits of a computed integer, or characters of a joined string; so 9**9**9 is refused, not computed
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
    out_dir: str = "out"  # checkpoints, metrics, the resolved flags (config.py) and earlier ones (config_STEP.py)
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
    fsdp_offload: bool = False  # [parallel=fsdp] weights, gradients and optimizer state in host memory
    dp_replicate: int = 1  # [>0] [parallel=fsdp] HSDP: number of groups of ranks, each with a complete set of shards
    tp: int = 1  # [>0] tensor parallel degree: cuts heads, hidden units and vocabulary; must divide n_kv_head
    cp: int = 1  # [>0] context parallel degree: each rank has two of 2 * cp pieces of every sequence
    ep: int = 1  # [>0] [n_expert>0] expert parallel degree: so many data-parallel ranks divide the experts
    pp: int = 1  # [>0] pipeline parallel degree: number of stages that the blocks are cut into (1F1B schedule)
    pp_chunks: int = 1  # [>0] [pp>1] stages of each of the pp ranks, interleaved: the bubble is so many times shorter
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # of torch.distributed; auto = nccl on GPUs
    collective_timeout: int = 600  # [>0] seconds after which a rank gives up waiting for another
    # --- plan
    plan: bool = False  # print memory, communication and duration of this run for world_size GPUs, and stop
    world_size: int = 1  # [>0] [plan=True] number of ranks in the plan
    gpu: Literal["h100", "h200", "a100", "b200"] = "h100"  # [plan=True] kind of GPU in the plan

    # A flag of nanoGPT and its value -> our flags. nanoGPT's constant rate has no warmup.
    NANOGPT: ClassVar[dict[tuple[str, Any], dict[str, Any]]] = {
        ("decay_lr", True): {},
        ("decay_lr", False): {"schedule": "constant", "warmup_iters": 0},
        **{("init_from", name): {"init_from": f"hf:openai-community/{name}"} for name in GPT2},
    }

    def __post_init__(self):
        super().__post_init__()
        self.out_dir = os.path.expanduser(self.out_dir)
        if 0 < self.spike_factor <= 1:
            refuse(self, "spike_factor", "must be above 1, such as 10, or 0 = off")
        self.check_texts()
        self.check_schedule()

    def check_texts(self):
        """ValueError unless the flags that are texts have a known form."""
        for name, pattern, form in (
            ("dataset", r".*\S.*", "a folder under data/, such as pycode, a path, or a mixture, such as a:0.7,b:0.3"),
            ("out_dir", r"(?!~).*\S.*", "a folder, such as out; ~ means your home"),
            (
                "init_from",
                "scratch|resume|(checkpoint|ema|hf|nanogpt):.+",
                "scratch, resume, checkpoint:RUN (a run's weights), ema:RUN (their average), hf:DIR or nanogpt:FILE",
            ),
            ("device", r"auto|cpu|cuda(:\d{1,3})?|mps", "auto, cpu, cuda, cuda:N or mps"),
        ):
            value = getattr(self, name)
            if not re.fullmatch(pattern, value, re.DOTALL):
                refuse(self, name, f"must be {form}")
        part = r"[1-9]\d{0,5}:[1-9]\d{0,8}"
        ends = [end for _, end in self.ramp]
        if not re.fullmatch(f"({part}(,{part})*)?", self.batch_ramp) or ends != sorted(set(ends)):
            form = "micro-batches and the step before which they hold, in ascending steps, such as 8:1000,16:2000"
            refuse(self, "batch_ramp", f"must be {form}")

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


@dataclass
class Given:
    """The flags that config files and the command line set."""

    values: dict[str, Any] = field(default_factory=dict)  # in the types of the flags
    sources: dict[str, str] = field(default_factory=dict)  # where each was set: {"n_layer": "config/x.py:3"}


def parse(cls: type[T], argv: list[str] | None = None, doc: str = "") -> T:
    """The flags of a command: an instance of the flag dataclass `cls`, filled from the config files and `--name=value`
    in argv, by default sys.argv[1:].

    `doc` is the text above the flags of --help, usually the docstring of the script. The result's `sources` are those
    of Given. Raises ValueError or OSError with the flag, its value, its place and the remedy, in one line.
    """
    return resolve(cls, read_flags(cls, argv, doc))


def parse_positional(cls: type[T], names: str, argv: list[str] | None = None, doc: str = "") -> tuple[list[str], T]:
    """As parse, for a command that reads no config files: (its positional arguments, its flags).

    `names` describes the positional arguments, such as "export RUN DIR". A word of small letters stands for itself, and
    three dots after the last name mean one or more.
    """
    argv = sys.argv[1:] if argv is None else argv
    given = [arg for arg in argv if not arg.startswith("-")]
    cfg = parse(cls, [arg for arg in argv if arg.startswith("-")], doc)
    wanted = names.split()
    if names.endswith("..."):
        wanted += wanted[-1:] * (len(given) - len(wanted))
    fits = len(given) == len(wanted)
    for name, arg in zip(wanted, given, strict=False):
        fits = fits and (name.isupper() or name == arg)
        refuse_address(printable(arg), arg)
    require(fits, f"expected {names}, not {printable(' '.join(given)) or 'nothing'}; --help says what they are")
    return given, cfg


def read_flags(cls: type, argv: list[str] | None = None, doc: str = "") -> Given:
    """The first half of parse: reads what files and arguments set, each flag for itself."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(usage(cls, doc), flush=True)
        raise SystemExit(0)
    paths, settings = read_arguments(argv, hints(cls))
    last: dict[str, tuple[Any, str]] = {}  # name: (value, place), in the order of the last settings
    for name, value, where in [setting for path in paths for setting in read_file(path)] + settings:
        last.pop(name, None)
        last[name] = value, where
    given, theirs = Given(), getattr(cls, "NANOGPT", {})
    for spelling, (value, where) in last.items():
        ours = theirs.get((spelling, value), {spelling: value})
        for name, v in ours.items():
            if not is_retired(cls, name, v, where):
                given.values[name], given.sources[name] = convert(cls, name, v, where), where
    return given


def resolve(cls: type[T], given: Given, stored: dict[str, Any] | None = None, origin: str = "") -> T:
    """The second half of parse: the flags `given`, together with defaults, as an instance of `cls`.

    `stored` are defaults instead of those of `cls`, such as the flags of a checkpoint, and `origin` is their place. If
    the other flags do not use one of them, it has the default of `cls` again.
    """
    current = {name: v for name, v in (stored or {}).items() if not is_retired(cls, name, v, origin)}
    values = {name: convert(cls, name, value, origin) for name, value in current.items()} | given.values
    cfg = cls.__new__(cls)  # first without its own check
    vars(cfg).update(values, sources=given.sources)
    if isinstance(cfg, Flags):
        check_limits(cfg)  # facts count layers
    idle = unused(cfg)
    for name in idle:
        if name in given.sources and not overruled(cfg, name):
            refuse_unused(cfg, name)
    cfg.__init__(**{name: value for name, value in values.items() if name not in idle})
    if isinstance(cfg, ModelConfig):
        try_flags(cfg)
    return cfg


def overruled(cfg: Any, name: str) -> bool:
    """Whether a flag of a file has no effect because of the command line, which is no error."""
    deciding = [cfg.sources.get(other) for other in rests_on(cfg, name)]
    return cfg.sources[name] != COMMAND_LINE and COMMAND_LINE in deciding


def is_retired(cls: type, name: str, value: Any, where: str) -> bool:
    """Whether this setting is of a retired flag and may be dropped. ValueError if it is not what the program does now,
    or if it is a retired choice."""
    here = f"{spell(name, value, where)} ({where})"
    instead = RETIRED.get(f"{name}={value}")
    if instead is not None:
        raise ValueError(f"{here}: this choice was retired; use {instead}, or an older version of this program")
    if name in hints(cls) or name not in RETIRED:
        return False
    if value == RETIRED[name]:
        return True
    remedy = "leave it out, or use an older version of this program"
    if name in RETIRED_OF_THE_MODEL:
        remedy = "leave it out; train again what was trained with it, or use an older version of this program"
    raise ValueError(f"{here}: this flag was retired; {remedy}")


def refuse_address(here: str, value: str):
    """ValueError if a path is an address, such as s3://bucket/run, which would become a folder here."""
    fact = f"{here}: an address, and this program reads and writes files alone"
    require(not re.match(r"(\w+:)?\w+://", value), f"{fact}; give a path, for example of a mounted folder")


def convert(cls: type, name: str, value: Any, where: str) -> Any:
    """The value of a flag in its type. ValueError if there is no such flag, or it cannot have this value."""
    here, kinds = f"{spell(name, value, where)} ({where})", hints(cls)
    if name not in kinds:
        near = [other for other in kinds if "".join(word[0] for word in other.split("_")) == name]  # lr, learning_rate
        near += difflib.get_close_matches(name, kinds, 1)
        remedy = f"the nearest is {near[0]}" if near else "--help lists them"
        raise ValueError(f"{here}: no such flag; {remedy}")
    if name in PATHS:
        refuse_address(here, str(value))
    try:
        return coerce(value, kinds[name])
    except ValueError:
        words = choices(kinds[name])
        near = difflib.get_close_matches(str(value), words if get_args(kinds[name]) else [], 1)
        like = spell(name, from_text(near[0], kinds[name]) if near else getattr(cls, name), where)
        raise ValueError(f"{here}: expected {' or '.join(words)}, such as {like}") from None


def spell(name: str, value: Any, where: str) -> str:
    """A setting as the user writes it on the command line or in a file, cut to 100 characters."""
    text = f"--{name}={printable(value)}" if where == COMMAND_LINE else f"{name} = {value!r}"
    return text if len(text) <= 100 else f"{text[:100]}..."


def read_arguments(argv: list[str], kinds: dict[str, Any]) -> tuple[list[str], list[tuple[str, Any, str]]]:
    """(the config files, the flags as [(name, value, COMMAND_LINE), ...]) of the arguments."""
    paths, settings = [], []
    for arg, following in pairwise([*argv, ""]):
        name, equals, text = arg.lstrip("-").partition("=")
        if arg.startswith("--") and (equals or name not in kinds):
            settings.append((name, from_text(text, kinds.get(name)), COMMAND_LINE))
        elif arg.startswith("-") or equals:
            kind = kinds.get(name, str)
            with suppress(ValueError):  # the value of `--batch_size 32`, but no value of `--compile config/x.py`
                text = text or str(coerce(from_text(following, kind), kind))
            raise ValueError(
                f"{arg} ({COMMAND_LINE}): flags are written --name=value, here --{name}={text or choices(kind)[0]}"
            )
        else:
            paths.append(arg)
    return paths, settings


def read_file(path: str) -> list[tuple[str, Any, str]]:
    """The settings of a config file as [(name, value, "path:line"), ...]. ValueError if it holds anything else."""
    if not os.path.isfile(path):
        example = "--name=value" if path.endswith(".py") else f"--name=value, such as --out_dir={path}"
        raise FileNotFoundError(f"{path}: no such config file; flags are written {example}")
    require(os.path.getsize(path) <= LARGEST_FILE, f"{path} has more than {LARGEST_FILE:,} bytes; {ALLOWED}")
    settings, names, line = [], dict(CONSTANTS), 1
    try:
        for node in ast.parse(Path(path).read_bytes()).body:
            line = node.lineno
            match node:
                case ast.Assign(targets=[ast.Name(id=name)]):
                    names[name] = evaluate(node.value, names)
                    if not name.startswith("_"):
                        settings.append((name, names[name], f"{path}:{line}"))
                case ast.Expr(value=ast.Constant(value=str())):
                    pass  # a docstring
                case _:
                    refuse_code(node)
    except SyntaxError as error:
        raise ValueError(f"{path}:{error.lineno or line}: {error.msg}; {ALLOWED}") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{path}:{line}: too deeply nested; write the value itself") from None
    except ArithmeticError as error:
        raise ValueError(f"{path}:{line}: {error.args[-1]}; write a value that can be computed") from None
    except ValueError as error:
        raise ValueError(f"{path}:{line}: {error.args[-1]}") from None
    return settings


def evaluate(node: ast.expr, names: dict[str, Any]) -> Any:
    """The value of a literal or of arithmetic over literals and `names`. ValueError or ArithmeticError for others."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float, str)):
        return node.value
    if isinstance(node, ast.Name):
        require(node.id in names, f"{node.id} is not set earlier in this file; {ALLOWED}")
        return names[node.id]
    if not isinstance(node, (ast.UnaryOp, ast.BinOp)) or type(node.op) not in OPERATORS:
        refuse_code(node)
    operands = [evaluate(child, names) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    if isinstance(node.op, ast.Add) and all(isinstance(x, str) for x in operands):
        sizes = [len(x) for x in operands]
    elif all(isinstance(x, (int, float)) for x in operands):
        sizes = [x.bit_length() if isinstance(x, int) else 0 for x in operands]
    else:
        refuse_code(node)
    size = sizes[0] * operands[1] if isinstance(node.op, ast.Pow) else sum(sizes)
    require(size <= LARGEST, f"the result is too large; write a number of at most {LARGEST} bits, or a shorter text")
    return OPERATORS[type(node.op)](*operands)


def refuse_code(node: ast.AST) -> NoReturn:
    raise ValueError(f"{ast.unparse(node).splitlines()[0][:60]}: {ALLOWED}")


# ---------------------------------------------------------------------------------------------------------------------
# Values


@cache
def hints(cls: type) -> dict[str, Any]:
    """The type of each flag."""
    kinds = get_type_hints(cls)
    return {each.name: kinds[each.name] for each in fields(cls)}


def from_text(text: str, kind: Any) -> Any:
    """The value that a text on the command line means for a flag of this type; the text itself if it has no value."""
    try:
        if kind is not str:
            return evaluate(ast.parse(text.strip(), mode="eval").body, CONSTANTS)
        return ast.literal_eval(text) if text[:1] in ("'", '"') else text
    except (ValueError, ArithmeticError, SyntaxError, RecursionError, MemoryError):
        return text


def alternatives(kind: Any) -> list[Any]:
    """bool | Literal["auto"] -> [bool, "auto"]."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [alternative for part in get_args(kind) for alternative in alternatives(part)] or [kind]


def choices(kind: Any) -> list[str]:
    """bool | Literal["auto"] -> ["True", "False", "auto"], int -> ["int"]."""
    words = [["True", "False"] if a is bool else [getattr(a, "__name__", a)] for a in alternatives(kind)]
    return sum(words, [])


def coerce(value: Any, kind: Any) -> Any:
    """`value` in the type `kind`, if the conversion loses nothing; otherwise ValueError."""
    for wanted in alternatives(kind):
        if value == wanted or (type(value) is wanted and wanted is not float):
            return value
        if wanted is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:  # no nan, no inf
            if float(value) == value:
                return float(value)
        if wanted is int and type(value) is float and abs(value) <= 2**53 and value.is_integer():
            return int(value)
    raise ValueError


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def usage(cls: type, doc: str) -> str:
    """The text of --help: `doc`, then every flag by section, with its default, its type or choices, and its doc."""
    lines = [doc.strip()]
    section = None
    for name, flag in documented(cls).items():
        if flag.section != section:
            section = flag.section
            lines += ["", section]
        left = f"  {spell(name, getattr(cls, name), COMMAND_LINE)}"
        kinds = " | ".join(choices(hints(cls)[name]))
        right = textwrap.wrap(f"{kinds}: {flag.doc}", 60, break_on_hyphens=False)
        lines += [f"{left:<37} {right[0]}", *(f"{'':<37} {more}" for more in right[1:])]
    return "\n".join(lines).strip()


def dump(cfg: Any, path: str | Path):
    """Write a config file that sets the same flags; flags without an effect become comments. The write is atomic."""
    lines = []
    section = None
    idle = unused(cfg)
    for name, flag in documented(type(cfg)).items():
        if flag.section != section:
            section = flag.section
            lines += ["", f"# --- {section}"]
        line = f"{name} = {getattr(cfg, name)!r}  # {flag.doc}"
        lines.append(f"# {line}" if name in idle else line)
    write_file(Path(path), ("\n".join(lines).strip() + "\n").encode())
