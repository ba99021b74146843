"""The folder of a run: its lock, whether a run may begin there, and the files with its flags.

    with locked("out/x"):               # before anything in the folder is read
        check_out_dir(cfg)

The lock is needed because the workers of torchrun continue when torchrun is killed with SIGKILL: a second run would
write the same checkpoints.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from data import lock
from data.errors import require
from engine.parallel.ranks import may_restart


def locked(folder: str, flag: str = "out_dir") -> AbstractContextManager:
    """The lock of a folder, see data/lock.py; rank 0 holds it for all ranks. If torchrun restarts lost workers, the
    holder may be the worker that this process replaces, so it has ten seconds to end."""
    if os.environ.get("RANK", "0") != "0":
        return nullcontext()
    seconds = 10 if may_restart() else 0.2
    return lock.locked(Path(os.path.expanduser(folder)), flag, seconds)


def check_out_dir(cfg):
    """ValueError if out_dir holds the checkpoints of another run, or is a checkpoint itself."""
    holds_run, is_checkpoint = ((Path(cfg.out_dir) / name).exists() for name in ("latest", "state.json"))
    remedy = "go on with --init_from=resume, or choose another --out_dir"
    new = cfg.eval_only or cfg.init_from == "resume" or not holds_run
    require(new, f"out_dir={cfg.out_dir} already holds a run; {remedy}")
    fact = f"out_dir={cfg.out_dir} is one checkpoint, not the folder of a run"
    remedy = "to go on from it, write its name into the file latest beside it and give the folder of both"
    require(cfg.eval_only or not is_checkpoint, f"{fact}; {remedy}")


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
