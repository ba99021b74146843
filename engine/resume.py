"""A run's folder and its lock, the flags and weights with which it starts, and what its checkpoints hold and restore.

A checkpoint holds the parameters (`model.NAME`), the optimizer's state (`optim.NAME`), the state of every rank's random
number generators (`rng.RANK.cpu`, `rng.RANK.cuda`) and a dictionary, see file_format.STATE.
"""

import filecmp
import os
import uuid
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from copy import copy
from dataclasses import asdict, fields
from pathlib import Path

import torch
from torch import Tensor

from configurator import resolve
from data import files, lock
from data.dataset import TokenStream
from data.loader import Loader
from data.tokenizer import Tokenizer
from engine import weights
from engine.checkpoint import files as checkpoint
from engine.checkpoint.file_format import damage_in, step_name
from engine.config import Config
from engine.optim import Optimizer
from engine.parallel.connection import may_restart
from engine.parallel.layout import Slice
from engine.parallel.ranks import all_gather, on_every_rank, on_first_rank
from engine.parallel.sharded import ShardedModel
from engine.plan.accounting import skeleton
from engine.settle import AUTO
from flags import documented, flags_of_data, refuse, setting, unused
from model import ModelConfig

OWN = ("out_dir", "init_from")  # flags of one run, which are no defaults for the runs that continue it
NEW = {
    "step": 0, "samples": 0, "skipped": 0, "norms": [], "flags": {}, "data": {}, "best_val_loss": None, "best_step": 0,
}  # fmt: skip
OF_EVALUATION = ("eval_iters", "batch_size")  # flags of the best loss, beside those of the data
FREE_ON_RESUME = {"dropout", "loss_chunk", "fp32_residual"}  # flags of the model that may differ from the checkpoint's


def locked(out_dir: str) -> AbstractContextManager:
    """The lock of a run's folder, to be held before anything in it is read; rank 0 holds it for all ranks. The holder
    may be a worker that torchrun replaces, so it has ten seconds to end."""
    if os.environ.get("RANK", "0") != "0":
        return nullcontext()
    return lock.locked(out_dir, "out_dir", seconds=10 if may_restart() else 0.2)


def check_shared(out_dir: str):
    """ValueError on every rank if out_dir is another folder on one of them. The first save would fail there."""
    name = on_first_rank(lambda: f".shared_{uuid.uuid4().hex}")  # no rank has looked for it before
    file = Path(out_dir, name)
    on_first_rank(file.touch)
    seen = all_gather(file.exists())
    on_first_rank(file.unlink)
    if False in seen:
        fact = f"out_dir={out_dir} is another folder on rank {seen.index(False)}"
        raise ValueError(f"{fact}; give one on a file system that all ranks share")


def check_out_dir(cfg: Config) -> dict:
    """ValueError if out_dir is of another kind, or holds the checkpoints of a run. If they have the flags of this one,
    and torchrun may have started this command again (its flag --max-restarts), returns them, as this run goes on from
    there. Evaluations write nothing, so they may have weights of another place, but not random ones."""
    folder = Path(cfg.out_dir)
    where = f"out_dir={cfg.out_dir}"
    if cfg.eval_only:
        if cfg.init_from == "scratch" and (checkpoint.steps_in(folder) or (folder / "state.json").exists()):
            fact = f"would evaluate random weights, and {where} holds trained ones"
            refuse(cfg, "eval_only", f"{fact}; set --init_from=resume")
        return {}
    if folder.is_file() or (folder / "state.json").exists():
        remedy = "to go on from it, write its name into the file latest beside it and give the folder of both"
        raise ValueError(f"{where} is one checkpoint, not the folder of a run; {remedy}")
    if cfg.init_from == "resume":
        return {}
    if not (folder / "latest").exists():
        files.check_own((folder / "metrics.jsonl").exists(), folder, "out_dir")
        return {}
    if may_restart():
        stored = checkpoint.read(folder, lambda _, state: state["flags"])
        open_yet = {"init_from", "vocab_size", *(name for name in AUTO if getattr(cfg, name) == "auto")}
        if all(stored.get(name) == value for name, value in asdict(cfg).items() if name not in open_yet):
            return stored
    raise ValueError(f"{where} already holds a run; go on with --init_from=resume, or choose another --out_dir")


def stored_flags(cleanup: ExitStack, flags: dict) -> tuple[dict, str]:
    """(flags that belong to the weights that init_from names, to use as defaults; the path of these weights). For a
    resume, `cleanup` gets the lock of out_dir."""
    where = flags["init_from"]
    kind = where.partition(":")[0]
    if kind == "resume":
        left_out = OWN
        writes = not (flags["eval_only"] or flags["plan"])
        if writes and os.path.isdir(os.path.expanduser(flags["out_dir"])):
            cleanup.enter_context(locked(flags["out_dir"]))
        stored, path = checkpoint.read(flags["out_dir"], lambda path, state: (state["flags"], path))
    elif kind in ("checkpoint", "ema", *weights.FOREIGN):
        left_out = (*OWN, "pairs")  # which the data of a new run settle
        stored, path = weights.read(where, lambda found: (found.flags, found.path))
    else:
        return {}, ""
    return {name: value for name, value in stored.items() if name not in left_out}, str(path)


def schedule_of_another(cfg: Config) -> str:
    """A line that names the flags of the schedule which a new run has from the one in init_from, "" without any."""
    names = {name for name, flag in documented(type(cfg)).items() if flag.section == "schedule"} - cfg.given
    changed = [name for name in names if getattr(cfg, name) != getattr(type(cfg), name)]
    found = [setting(name, getattr(cfg, name), "") for name in sorted(changed)]
    if cfg.init_from == "resume" or not found:
        return ""
    return f"the schedule takes {', '.join(found)} from {cfg.init_from}; set what is to differ"


def check_same_model(cfg: Config, flags: dict, path: Path):
    """ValueError if cfg describes another model or optimizer than these flags of the checkpoint in `path`."""
    free = {*FREE_ON_RESUME, *unused(cfg)}
    before = resolve(type(cfg), {}, flags, str(path))
    for name in [flag.name for flag in fields(ModelConfig)] + ["optimizer"]:
        old = getattr(before, name)
        new = getattr(cfg, name)
        if old != new and before.network.get(name, old) != cfg.network.get(name, new) and name not in free:
            fact = f"differs from {old} in {path}"
            refuse(cfg, name, f"{fact}; leave it out, or start from scratch in another --out_dir")
    if cfg.ema_decay and not before.ema_decay:
        fact = f"differs from 0.0 in {path}, which has no average to go on from"
        refuse(cfg, "ema_decay", f"{fact}; leave it out, or start with --init_from=checkpoint:{path.parent} elsewhere")


def layout(cfg: Config) -> dict[str, tuple]:
    """The name of each parameter -> (its shape, the matrices of its rows). Equal layouts have each other's weights."""
    model = skeleton(cfg)
    found = {}
    for name, p in model.named_parameters():
        shape = checkpoint.unpadded(f"model.{name}", p.shape, cfg.vocab_size)
        found[name] = shape, getattr(model.get_submodule(name.rpartition(".")[0]), "fused", None)
    return found


def check_same_weights(cfg: Config, found: weights.StoredModel):
    """ValueError if the model of cfg needs other weights than those found. It names the flags that alone would need
    others. The rest are free: they change what is computed with the weights, or how these are trained."""
    before = found.config()
    expected = layout(before)
    if layout(cfg) == expected:
        return
    names = [f.name for f in fields(ModelConfig) if getattr(cfg, f.name) != getattr(before, f.name)]
    changed = []
    for name in names:
        alone = copy(before)
        setattr(alone, name, getattr(cfg, name))
        with suppress(ValueError):  # it fits only beside others that have changed too
            if layout(alone) == expected:
                continue
        changed.append(name)
    changed = changed or names
    old = ", ".join(f"{name}={getattr(before, name)}" for name in changed)
    remedy = "leave these flags out, or start with --init_from=scratch"
    refuse(cfg, " ".join(changed), f"the weights in {found.path}, of a model with {old}, do not fit; {remedy}")


def initialize(cfg: Config, sharded: ShardedModel, tokenizer: Tokenizer | None):
    """Give the model of a new run, on data with this tokenizer, random weights or those that init_from names."""
    if cfg.init_from == "scratch":
        return sharded.init_weights(cfg.seed)

    def fill(found: weights.StoredModel):
        check_same_weights(cfg, found)
        found.check_tokenizer(tokenizer, cfg.dataset)
        found.fill(sharded)

    weights.read(cfg.init_from, fill)


def replace_flags(out_dir: Path, step: int):
    """Replace config.py by config.new. If they differ, the old flags, which led to `step`, stay as config_<step>.py."""
    old = out_dir / "config.py"
    new = out_dir / "config.new"
    kept = out_dir / f"config_{step:08d}.py"
    if step and old.is_file() and not kept.exists() and not filecmp.cmp(old, new, shallow=False):
        old.rename(kept)
    new.rename(old)


def data_of(loader: Loader, val: TokenStream, samples: int) -> dict:
    """What state.json has of the data after so many samples."""
    return {
        "since": loader.since, "read": loader.samples_by_source(samples).tolist(), "val": val.hashes,
        "weights": [weight for *_, weight in loader.stream.sources], "hashes": loader.stream.hashes,
    }  # fmt: skip


def place_in_data(cfg: Config, state: dict, train: TokenStream, val: TokenStream) -> tuple[dict, list[str]]:
    """(since and read of the Loader of a run that goes on from this state, lines about what has changed). A source is
    known by its shards, and goes on behind what was read of it. A best loss of another evaluation is dropped, or one
    whose checkpoint is gone, as when a run has gone back from a later one."""
    stored = state["data"]
    place = {name: stored[name] for name in ("since", "read") if name in stored}
    notes = []
    weights = [weight for *_, weight in train.sources]
    if stored and (stored["hashes"], stored["weights"]) != (train.hashes, weights):
        read = dict(zip(stored["hashes"], stored["read"], strict=True))
        place = {"since": state["samples"], "read": [read.get(each, 0) for each in train.hashes]}
        for (name, _, weight), count in zip(train.sources, place["read"], strict=True):
            notes.append(f"the data have changed: weight {weight} of {name}, of which {count:,} samples are read")
    for name in ("seed", "pairs"):
        value = getattr(cfg, name)
        if state["flags"].get(name, value) != value:
            notes.append(f"{name}={value} draws the data in another order, so what is read may come again")
    changed = []
    for name in (*OF_EVALUATION, *flags_of_data(type(cfg))):
        if state["flags"].get(name, getattr(type(cfg), name)) != getattr(cfg, name):
            changed.append(name)
    if stored.get("val") != val.hashes:
        changed.append("the validation data")
    reasons = []
    if changed:
        reasons.append(f"{' and '.join(changed)} may have changed")
    best = state["best_step"]
    if best and not on_first_rank(Path(cfg.out_dir, step_name(best)).is_dir):
        reasons.append(f"{step_name(best)} is gone")
    if reasons and state["best_val_loss"] is not None:
        state["best_val_loss"] = None
        state["best_step"] = 0
        notes.append(f"the best loss begins anew, as {', and '.join(reasons)}")
    return place, notes


def tensors_of(sharded: ShardedModel, optimizer: Optimizer) -> dict[str, Tensor | Slice]:
    """The parameters, the optimizer's state and the state of this rank's random number generators, by name. The first
    two share storage with the run, to be saved or loaded."""
    ranks = sharded.ranks
    tensors = weights.parameters(sharded)
    for name, t in optimizer.state_tensors(sharded.model).items():
        tensors[f"optim.{name}"] = sharded.slice_of(name.rpartition(".")[0], t)
    tensors[f"rng.{ranks.rank}.cpu"] = torch.get_rng_state()
    if ranks.device.type == "cuda":
        tensors[f"rng.{ranks.rank}.cuda"] = torch.cuda.get_rng_state(ranks.device)
    return tensors


def restore(cfg: Config, sharded: ShardedModel, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> dict:
    """Load the latest checkpoint into these parts of a run; returns its state. ValueError if it is of another model."""
    ranks = sharded.ranks

    def load(path: Path, state: dict) -> dict:
        check_same_model(cfg, state["flags"], path)
        tensors = tensors_of(sharded, optimizer)
        index = checkpoint.read_index(path, state, tensors)
        tensors = {name: t for name, t in tensors.items() if name in index or not name.startswith("rng.")}
        checkpoint.load(path, tensors, index, cfg.vocab_size)
        torch.manual_seed(cfg.seed + 1 + ranks.rank + 1_000_003 * state["step"])  # if it was saved by fewer ranks
        on_every_rank(lambda: set_random_states(tensors, path))
        if scaler.is_enabled() and state["scaler"]:  # a run in another dtype saved none
            scaler.load_state_dict(state["scaler"])
        return state

    def set_random_states(tensors: dict[str, Tensor], path: Path):
        with damage_in(path, "the state of random numbers"):
            if f"rng.{ranks.rank}.cpu" in tensors:
                torch.set_rng_state(tensors[f"rng.{ranks.rank}.cpu"])
            if f"rng.{ranks.rank}.cuda" in tensors:
                torch.cuda.set_rng_state(tensors[f"rng.{ranks.rank}.cuda"], ranks.device)

    return checkpoint.read(cfg.out_dir, load)
