"""The folder of a run: a lock keeps other runs out of it, and a check says whether a run may begin there.

    with locked("out/x"):               # before anything in the folder is read
        check_out_dir(cfg)

The kernel releases the lock when the process ends for any reason. The lock is needed because the workers of torchrun
continue when torchrun is killed with SIGKILL: a second run would write the same checkpoints. On a file system that does
not support locks, there is no lock.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data.errors import require
from engine.parallel.ranks import may_restart


@contextmanager
def locked(folder: str, make: bool = True) -> Iterator[None]:
    """Hold the lock of a folder; rank 0 does so for all ranks. A folder that does not exist is made or, without `make`,
    not locked. At the end the file .lock is removed, and also the folders that were made, if they are empty.

    ValueError names the process that holds the lock already. If torchrun restarts lost workers, that process may be
    the worker that this one replaces, so it has ten seconds to end.
    """
    folder, file = Path(os.path.expanduser(folder)), None
    if os.environ.get("RANK", "0") != "0" or not (make or folder.is_dir()):
        yield
        return
    path = folder / ".lock"
    made = [each for each in (folder, *folder.parents) if not each.exists()]  # innermost first
    end = time.monotonic() + (10 if may_restart() else 0.2)  # a holder may be just about to write its name, or to end
    try:
        while file is None:
            try:
                file = _try_lock(path)
            except (ValueError, FileNotFoundError):
                if time.monotonic() >= end:
                    raise
                time.sleep(0.05)
        name = f"{os.getpid()} on {socket.gethostname()}\n".encode()
        with suppress(OSError):  # the disk is full; whatever needs more room reports it
            os.pwrite(file, name, 0)
            os.ftruncate(file, len(name))
        yield
    finally:
        if file is not None:
            with suppress(OSError):
                if _is_at(file, path):  # otherwise it is the file of a run that began after the folder was deleted
                    path.unlink()
            os.close(file)
        for each in made:
            with suppress(OSError, ValueError):  # a folder that is not empty stays; ValueError: a name with a null byte
                each.rmdir()


def _try_lock(path: Path) -> int:
    """Open the lock file and lock it. ValueError if another process holds the lock; FileNotFoundError if another
    process has removed the folder meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, 100, 0).decode(errors="replace").strip()
        os.close(file)
        fact = f"out_dir={path.parent} belongs to process {holder}, which still runs"
        raise ValueError(f"{fact}; wait for it, end it with kill, or choose another --out_dir") from None
    except OSError:
        return file  # a file system without locks
    if _is_at(file, path):
        return file
    os.close(file)
    return _try_lock(path)  # the process that held the lock has removed the file before this one locked it


def _is_at(file: int, path: Path) -> bool:
    """Whether the open file still has this name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(path))
    return False


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
