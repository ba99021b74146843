"""Starts a run from random or trained weights, and collects the tensors of its checkpoints.

A checkpoint holds the parameters (`model.NAME`), the optimizer's state (`optim.NAME`), the state of every rank's random
number generators (`rng.RANK.cpu`, `rng.RANK.cuda`) and a dictionary, of which STATE names what a resume needs. A
resumed run continues as if it had never stopped.
"""

import math
import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import NoneType

import torch
from torch import Tensor

from data import lock
from data.errors import require
from data.tokenizer import Tokenizer
from engine import optim
from engine.checkpoint import files as checkpoint
from engine.checkpoint import weights
from engine.checkpoint.weights import Weights
from engine.parallel import ranks as parallel
from engine.parallel.ranks import Ranks
from engine.parallel.sharded import ShardedModel
from model import Model, ModelConfig

OWN = ("out_dir", "init_from")  # flags of one run, which are no defaults for the runs that continue it
SETTLED_BY_DATA = ("pairs",)  # flags that a new run has settled by its own data
SETTLED_BY_AUTO = {"dtype", "compile", "fp32_residual", "pairs"}  # whose `auto` becomes a choice that is stored
FREE_ON_RESUME = {"dropout", "loss_chunk", "fp32_residual"}  # flags of the model that may differ from the checkpoint's
STATE = {  # keys of a checkpoint's state that a resume needs, and their types
    "flags": dict, "samples": int, "skipped": int, "best_val_loss": (float, NoneType), "scaler": dict,
    "tokenizer_hash": (str, NoneType), "ranks": int,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The start


def locked(out_dir: str) -> AbstractContextManager:
    """The lock of a run's folder, to be held before anything in it is read; rank 0 holds it for all ranks. It is needed
    because the workers of torchrun continue when torchrun is killed. If torchrun restarts lost workers, the holder may
    be the worker that this process replaces, so it has ten seconds to end."""
    if os.environ.get("RANK", "0") != "0":
        return nullcontext()
    return lock.locked(out_dir, "out_dir", seconds=10 if parallel.may_restart() else 0.2)


def check_out_dir(cfg):
    """ValueError if out_dir holds the checkpoints of another run, or is a checkpoint itself."""
    where = f"out_dir={cfg.out_dir}"
    if cfg.eval_only:
        return
    if cfg.init_from != "resume" and (Path(cfg.out_dir) / "latest").exists():
        raise ValueError(f"{where} already holds a run; go on with --init_from=resume, or choose another --out_dir")
    if (Path(cfg.out_dir) / "state.json").exists():
        remedy = "to go on from it, write its name into the file latest beside it and give the folder of both"
        raise ValueError(f"{where} is one checkpoint, not the folder of a run; {remedy}")


def stored_flags(cleanup: ExitStack, flags: dict) -> tuple[dict, str]:
    """(flags that belong to the weights that init_from names, to use as defaults; the path of these weights). For a
    resume, `cleanup` gets the lock of out_dir."""
    where = flags["init_from"]
    kind, _, place = where.partition(":")
    if kind == "resume":
        writes = not (flags["eval_only"] or flags["plan"])
        if writes and os.path.isdir(os.path.expanduser(flags["out_dir"])):
            cleanup.enter_context(locked(flags["out_dir"]))
        stored, path = checkpoint.read(flags["out_dir"], STATE, lambda path, state: (state["flags"], path))
    elif kind in ("checkpoint", "ema", *weights.FOREIGN):
        there = kind in weights.FOREIGN or place and Path(place).expanduser().is_dir()
        require(there, f"init_from={where}: no such folder; give the folder of a run, or of one checkpoint")
        stored, path = weights.read(where.removeprefix("checkpoint:"), lambda found: (found.flags, found.path))
    else:
        return {}, ""
    left_out = OWN if kind == "resume" else OWN + SETTLED_BY_DATA
    return {name: value for name, value in stored.items() if name not in left_out}, str(path)


def resume_after_restart(cfg):
    """Make cfg a resume if torchrun may have started this command again (its flag --max-restarts), and out_dir holds a
    checkpoint with the same flags. One with other flags belongs to an older run."""
    if not parallel.may_restart() or not (Path(cfg.out_dir) / "latest").exists():
        return
    stored = checkpoint.read(cfg.out_dir, STATE, lambda _, state: state["flags"])
    auto = {name for name in SETTLED_BY_AUTO if getattr(cfg, name) == "auto"}
    settled_later = auto | {"init_from", "vocab_size"}
    if all(stored.get(name) == value for name, value in asdict(cfg).items() if name not in settled_later):
        cfg.init_from = "resume"
        for name in auto:
            setattr(cfg, name, stored[name])


def check_same_start(cfg, ranks: Ranks):
    """ValueError if the ranks do not see the same checkpoint in out_dir."""
    resumes = cfg.init_from == "resume" and not cfg.eval_only  # under eval_only, another run may be saving there
    found = checkpoint.find(cfg.out_dir).name if resumes else cfg.init_from
    fact = f"out_dir={cfg.out_dir} does not look the same to all ranks, and one of them finds {found}"
    remedy = "wait until its file system shows the same files to all nodes, and start again"
    require(ranks.same(found), f"{fact}; {remedy}")


def check_same_model(cfg, flags: dict, path: str | Path):
    """ValueError if cfg describes another model than these flags, which belong to the weights in `path`."""
    for flag in fields(ModelConfig):  # a flag that the file does not know had its default value
        old, new = flags.get(flag.name, flag.default), getattr(cfg, flag.name)
        remedy = "leave it out, or start from scratch in another --out_dir"
        if flag.name == "vocab_size":
            remedy = "leave it out: the embedding is padded automatically as --tp needs"
        same = old == new or flag.name in FREE_ON_RESUME
        require(same, f"{flag.name}={new} differs from {old} in {path}; {remedy}")


def layout(cfg) -> dict[str, tuple]:
    """The name of each parameter -> (its shape, the matrices that its rows belong to). If both are equal for two
    configurations, each has the weights of the other."""
    with torch.device("meta"):
        model = Model(cfg)
    found = {}
    for name, p in model.named_parameters():
        shape = checkpoint.unpadded(f"model.{name}", p.shape, cfg.vocab_size)
        found[name] = shape, getattr(model.get_submodule(name.rpartition(".")[0]), "fused", None)
    return found


def check_same_weights(cfg, found: Weights):
    """ValueError if the model of cfg needs other weights than those found. It names the flag that makes the difference.
    All other flags are free: they change what is computed with the weights, or how they are trained."""
    before = found.config()
    weights_before = layout(before)
    if layout(cfg) == weights_before:
        return
    changed = [f.name for f in fields(ModelConfig) if getattr(cfg, f.name) != getattr(before, f.name)]

    def matters(name: str) -> bool:
        try:
            return layout(replace(before, **{name: getattr(cfg, name)})) != weights_before
        except ValueError:  # this flag alone does not fit to the others
            return True

    name = next(filter(matters, changed), changed[0])
    fact = f"the weights in {found.path}, of a model with {name}={getattr(before, name)}, do not fit"
    raise ValueError(f"{fact} {name}={getattr(cfg, name)}; leave it out, or start with --init_from=scratch")


def initialize(cfg, sharded: ShardedModel, tokenizer: Tokenizer | None):
    """Give the model of a new run, on data with this tokenizer, random weights or those that init_from names."""
    kind = cfg.init_from.partition(":")[0]
    if kind == "scratch":
        return sharded.init_weights(cfg.seed)

    def fill(found: Weights):
        if kind == "nanogpt":  # whose file has every flag of its model
            check_same_model(cfg, found.flags, found.path)
        else:
            check_same_weights(cfg, found)
        found.check_tokenizer(tokenizer, cfg.dataset)
        found.fill(sharded)

    weights.read(cfg.init_from.removeprefix("checkpoint:"), fill)


def replace_flags(out_dir: Path, step: int):
    """Replace config.py by config.new. If they differ, the old flags, which led to `step`, stay as config_<step>.py."""
    old, new, kept = (out_dir / name for name in ("config.py", "config.new", f"config_{step:08d}.py"))
    while kept.exists():  # a run was resumed at this step before
        kept = kept.with_stem(f"{kept.stem}_again")
    texts = [path.read_text(errors="replace").splitlines() for path in (old, new) if path.is_file()]
    flags = [[line for line in text if not line.startswith("init_from =")] for text in texts]
    if step and flags[0] != flags[-1]:
        old.rename(kept)
    new.rename(old)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


def run_tensors(sharded: ShardedModel, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """The parameters and the optimizer's state by name. They share storage with the run, to be saved or loaded."""
    tensors = weights.parameters(sharded)
    for name, t in optimizer.state_tensors(sharded.model).items():
        tensors[f"optim.{name}"] = sharded.as_global(name.rpartition(".")[0], t)
    return tensors


def random_states(ranks: Ranks) -> dict[str, Tensor]:
    """The state of this rank's random number generators by name."""
    states = {f"rng.{ranks.rank}.cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        states[f"rng.{ranks.rank}.cuda"] = torch.cuda.get_rng_state(ranks.device)
    return states


def restore(cfg, ranks: Ranks, sharded: ShardedModel, optimizer: optim.Optimizer) -> dict:
    """Load the latest checkpoint into the run; returns its state. ValueError if it is of another model."""

    def load(path: Path, state: dict) -> dict:
        check_same_model(cfg, state["flags"], path)
        index = checkpoint.read_index(path, state)
        random = {name: t for name, t in random_states(ranks).items() if name in index}
        tensors = run_tensors(sharded, optimizer) | random
        weights.load_tensors(path, tensors, sharded, index)
        for name, t in random.items():
            torch.set_rng_state(t) if name.endswith("cpu") else torch.cuda.set_rng_state(t, ranks.device)
        if not random:  # the checkpoint was saved by fewer ranks
            torch.manual_seed(cfg.seed + 1 + ranks.rank + 1_000_003 * state["step"])
        return state

    return checkpoint.read(cfg.out_dir, STATE, load)


def restore_scaler(scaler: torch.amp.GradScaler, saved: dict, out_dir: str):
    """Load the gradient scaler's state. A run in another dtype saved none; the scaler then keeps its initial state."""
    if not (scaler.is_enabled() and saved):
        return
    for name, value in scaler.state_dict().items():
        stored = saved.get(name)
        good = type(stored) is type(value) and math.isfinite(stored) and stored >= 0
        require(good, f"state.json in {out_dir}: {name} of scaler is {stored!r:.60}; restore the file from a copy")
    scaler.load_state_dict(saved)
