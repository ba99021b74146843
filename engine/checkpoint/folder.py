"""The folder of a run: a lock keeps other runs out of it, and a check says whether a run may begin there.

    with FolderLock() as lock:
        lock.take("out/x")              # before anything in the folder is read
        check_out_dir(cfg)

The kernel releases the lock when the process ends for any reason. The lock is needed because the workers of torchrun
continue when torchrun is killed with SIGKILL: a second run would write the same checkpoints. On a file system that does
not support locks, there is no lock.
"""

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from data.errors import require
from engine.parallel.ranks import may_restart


class FolderLock:
    """A context manager that holds the lock that `take` has taken. At its end it removes the file .lock, and also the
    folders that it has made, if they are empty."""

    def __init__(self):
        self.path, self.file, self.made = Path(), None, []

    def __enter__(self) -> "FolderLock":
        return self

    def take(self, folder: str, make: bool = True):
        """Lock a folder. Rank 0 does so for all ranks.

        make    what to do if the folder does not exist: make it, or else lock nothing

        ValueError names the process that holds the lock already. If torchrun restarts lost workers, that process may be
        the worker that this one replaces, so it has ten seconds to end.
        """
        folder, patient = Path(os.path.expanduser(folder)), may_restart()
        if os.environ.get("RANK", "0") != "0" or not (make or folder.is_dir()):
            return
        self.path = folder / ".lock"
        self.made = [each for each in (folder, *folder.parents) if not each.exists()]  # innermost first
        end = time.monotonic() + 10 * patient
        while not self._try():
            if time.monotonic() >= end:
                time.sleep(0.1)  # the holder may be just about to write its name
                holder = os.pread(self.file, 100, 0).decode(errors="replace").strip()
                self._close()
                raise ValueError(
                    f"out_dir={folder} belongs to process {holder}, which still runs; wait for it, end it with kill, "
                    "or choose another --out_dir"
                )
            self._close()
            time.sleep(0.1)
        name = f"{os.getpid()} on {socket.gethostname()}\n".encode()
        with suppress(OSError):  # the disk is full; whatever needs more room reports it
            os.pwrite(self.file, name, 0)
            os.ftruncate(self.file, len(name))

    def _try(self) -> bool:
        """Open the lock file; returns whether this process has the lock now."""
        for tries_left in reversed(range(100)):
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:  # a run that was refused has just removed the folder
                if not tries_left:
                    raise
                continue
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:
                return True  # a file system without locks
            if self._is_at_path() or not tries_left:
                return True
            self._close()

    def _is_at_path(self) -> bool:
        """Whether the open file still has this name. The process that held the lock before may have removed it."""
        try:
            return os.path.samestat(os.fstat(self.file), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _close(self):
        os.close(self.file)
        self.file = None

    def __exit__(self, *error):
        if self.file is not None:
            with suppress(OSError):
                if self._is_at_path():  # otherwise it is the file of a run that began after the folder was deleted
                    self.path.unlink()
            self._close()
        for folder in self.made:
            with suppress(OSError, ValueError):  # a folder that is not empty stays; ValueError: a name with a null byte
                folder.rmdir()


def check_out_dir(cfg):
    """ValueError if out_dir holds the checkpoints of another run, or is a checkpoint itself."""
    holds_run = (Path(cfg.out_dir) / "latest").exists()
    require(
        cfg.eval_only or cfg.init_from == "resume" or not holds_run,
        f"out_dir={cfg.out_dir} already holds a run; go on with --init_from=resume, or choose another --out_dir",
    )
    is_checkpoint = (Path(cfg.out_dir) / "state.json").exists()
    require(
        cfg.eval_only or not is_checkpoint,
        f"out_dir={cfg.out_dir} is one checkpoint, not the folder of a run; to go on from it, write its name into the "
        "file latest beside it and give the folder of both",
    )


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
