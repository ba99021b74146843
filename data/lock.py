"""A lock keeps other processes out of a folder, such as a second run out of out_dir.

    with locked("out/x", "out_dir"):
        ...                                 # read and write the folder

The kernel releases the lock of the file .lock when the process ends for any reason. It is open for writing, as network
file systems do not lock a folder. On a file system without locks there is no lock, and a line says so.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data.errors import printable, say

without_locks: set[Path] = set()  # lock files of which a line has said so


@contextmanager
def locked(folder: str | Path, flag: str, seconds: float = 0.2) -> Iterator[None]:
    """Hold the lock of a folder, which is made if it does not exist. At the end the file .lock is removed, and also the
    folders that were made, if they are empty. ValueError names the process that still holds the lock after so many
    `seconds`, and the folder's `flag`. A holder may be just about to write its name, or to end."""
    folder = Path(os.path.expanduser(folder))
    path = folder / ".lock"
    made = [each for each in (folder, *folder.parents) if not each.exists()]  # innermost first
    file = None
    try:
        file = _lock(path, flag, seconds)
        name = f"{os.getpid()} on {socket.gethostname()}\n".encode()
        with suppress(OSError):  # the disk is full; whatever needs more room reports it
            os.pwrite(file, name, 0)
            os.ftruncate(file, len(name))
        yield
    finally:
        if file is not None:
            with suppress(OSError):
                if _is_at(file, path):  # otherwise it is the file of a process that has made the folder again
                    path.unlink()
            os.close(file)
        for each in made:
            with suppress(OSError, ValueError):  # a folder that is not empty stays; ValueError: a name with a null byte
                each.rmdir()


def _lock(path: Path, flag: str, seconds: float) -> int:
    """The lock file, open and locked."""
    end = time.monotonic() + seconds
    while True:
        late = time.monotonic() >= end
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except (FileNotFoundError, FileExistsError):  # the holder has just removed the folder
            if late:
                raise
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if late:
                holder = os.pread(file, 100, 0).decode(errors="replace").strip()
                os.close(file)
                fact = f"{flag}={path.parent} belongs to process {holder}, which still runs"
                raise ValueError(f"{fact}; wait for it, end it with kill, or choose another --{flag}") from None
        except OSError as error:
            if path not in without_locks:
                fact = f"{printable(path.parent)} cannot be locked ({error.strerror})"
                say(f"warning: {fact}; let no other process write there")
            without_locks.add(path)
            return file
        else:
            if _is_at(file, path):  # otherwise the holder has removed the file before this process locked it
                return file
        os.close(file)
        time.sleep(0.05)


def _is_at(file: int, path: Path) -> bool:
    """Whether the open file still has this name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(path))
    return False
