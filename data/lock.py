"""A lock keeps other processes out of a folder, such as a second run out of out_dir.

    with locked("out/x", "out_dir"):
        ...                                 # read and write the folder

The kernel releases the lock of the file .lock when the process ends for any reason. The file stays, unless an error
ends the process that has made it, such as a start that is refused. It is open for writing, as network file systems do
not lock a folder. On a file system without locks there is no lock, and a line says so.
"""

import fcntl
import glob
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data.errors import say, shortened
from data.files import user_path

HELD: dict[Path, int] = {}  # folder that this process has locked -> its open file .lock


@contextmanager
def locked(folder: str | Path, flag: str, seconds: float = 0.2) -> Iterator[None]:
    """Hold the lock of a folder, which is made if it does not exist. ValueError names the process that holds the lock
    after so many `seconds`, and the folder's `flag`. A holder may be just about to write its name, or to end."""
    folder = user_path(folder)
    made = [path for path in (folder / ".lock", folder, *folder.parents) if not path.exists()]
    HELD[folder] = _lock(folder, flag, seconds)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # a folder that is not empty stays
            for path in made if _holds(folder) else []:
                path.rmdir() if path.is_dir() else path.unlink()
        raise
    finally:
        os.close(HELD.pop(folder))


def _holds(folder: Path) -> bool:
    """Whether the folder's file .lock is the one that this process has locked."""
    file = folder / ".lock"
    return os.path.exists(file) and os.path.samestat(os.fstat(HELD[folder]), os.stat(file))


def lock_again(folder: str | Path, flag: str):
    """Make and lock a folder anew, and say so, if the one that this process has locked was moved or deleted."""
    folder = user_path(folder)
    if not _holds(folder):
        lost = HELD[folder]
        HELD[folder] = _lock(folder, flag, 0.2)
        os.close(lost)
        say(shortened(f"warning: {flag}={folder} was moved or deleted; it is made anew, with checkpoints alone"))


@contextmanager
def temporary_folder(beginning: Path) -> Iterator[str]:
    """A new folder whose path has this beginning. It is gone at the end, and those of killed processes at once."""
    for left in beginning.parent.glob(f"{glob.escape(beginning.name)}????????"):
        with suppress(OSError, ValueError), locked(left, "folder", 0):  # ValueError: its process lives
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=beginning.name, dir=beginning.parent) as folder, locked(folder, "folder"):
        yield folder


def _lock(folder: Path, flag: str, seconds: float) -> int:
    """Makes the folder, opens its file .lock, and locks it as soon as no other process has locked it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                break
            raise BlockingIOError  # the run that held it was refused, and has removed the file
        except BlockingIOError:
            if time.monotonic() >= end:
                holder = os.pread(file, 100, 0).decode(errors="replace").strip()
                os.close(file)
                fact = f"{flag}={folder} belongs to process {holder}, which still runs"
                raise ValueError(f"{fact}; wait for it, end it with kill, or choose another --{flag}") from None
            time.sleep(0.05)
        except OSError as error:
            fact = f"{folder} cannot be locked ({error.strerror})"
            say(shortened(f"warning: {fact}; let no other process write there"))
            break
    name = f"{os.getpid()} on {socket.gethostname()}\n".encode()
    with suppress(OSError):  # the disk is full; whatever needs more room reports it
        os.pwrite(file, name, 0)
        os.ftruncate(file, len(name))
    return file
