"""The folder of a run: the lock that keeps other runs out of it, and whether a run may begin there.

    with FolderLock() as lock:
        lock.take("out/x")              before anything in it is read
        check_out_dir(cfg)

The kernel releases it when the process ends, however that ends. When torchrun is killed the hard way, its workers live
on: without a lock, two runs would then write the same checkpoints. On a file system without locks there is none.
"""

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from engine.parallel import may_restart
from model import require


class FolderLock:
    """Holds what `take` has locked until the context ends. Then the file .lock goes, and folders made for it alone."""

    def __init__(self):
        self.path, self.file, self.made = Path(), None, []

    def __enter__(self) -> "FolderLock":
        return self

    def take(self, folder: str, make: bool = True):
        """Lock `folder`, or do nothing if it is not there and not to be made. Rank 0 does so for all ranks.

        ValueError names the process that holds it already. If that may be the worker in whose place torchrun has
        started this one, it is given ten seconds to end.
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
        with suppress(OSError):  # a full disk: what needs more room says so
            os.pwrite(self.file, name, 0)
            os.ftruncate(self.file, len(name))

    def _try(self) -> bool:
        """Opens the lock file; returns whether it is ours now."""
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
        """Whether the open file is still the one of this name: its last holder may have removed it."""
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
                if self._is_at_path():  # not the one of a run that has come after somebody deleted the folder
                    self.path.unlink()
            self._close()
        for folder in self.made:
            with suppress(OSError, ValueError):  # one that is not empty stays; a name with a null byte never was
                folder.rmdir()


def check_out_dir(cfg):
    """A run must not end up among the checkpoints of another one, nor inside of a checkpoint."""
    taken = cfg.init_from != "resume" and not cfg.eval_only and (Path(cfg.out_dir) / "latest").exists()
    remedy = "go on with --init_from=resume, or choose another --out_dir"
    require(not taken, f"out_dir={cfg.out_dir} already holds a run; {remedy}")
    inside = not cfg.eval_only and (Path(cfg.out_dir) / "state.json").exists()
    require(
        not inside,
        f"out_dir={cfg.out_dir} is one checkpoint, not the folder of a run; to go on from it, write its name into the "
        "file latest beside it and give the folder of both",
    )


def replace_flags(out_dir: Path, step: int):
    """Puts config.new in the place of config.py. Flags that led to `step` and are others now stay: config_<step>.py."""
    old, new, kept = (out_dir / name for name in ("config.py", "config.new", f"config_{step:08d}.py"))
    while kept.exists():  # of an earlier resume at this step
        kept = kept.with_stem(f"{kept.stem}_again")
    texts = [path.read_text(errors="replace").splitlines() for path in (old, new) if path.is_file()]
    flags = [[line for line in text if not line.startswith("init_from =")] for text in texts]
    if step and flags[0] != flags[-1]:
        old.rename(kept)
    new.rename(old)
