"""Whose files these are: a folder on a disk tier belongs to the process that holds its lock.

    PATH/rank-00003.offload/lock          locked as long as the rank lives; says who it is
    PATH/rank-00003.offload/moment1.bin   worthless without the process that wrote it

The system drops a lock when its process dies, whatever it died of. So files whose lock is free are those of a dead run:
whoever starts next on the path removes them, of all ranks. They have neither names nor form of a checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from meshwright.core.errors import InputError

SUFFIX = ".offload"
LOCK = "lock"
_PAUSE_S = 0.05


class RankFolder:
    """One rank's folder on a disk tier, from taking to removing it.

    Raises:
        InputError: `path` is missing, no folder, cannot be written to or locked; or another process of this rank uses
            it.
    """

    def __init__(self, path: Path, rank: int, *, patience_s: float = 5.0) -> None:
        self.path = path / f"rank-{rank:05d}{SUFFIX}"
        self._pid = os.getpid()
        self._lock: int | None = None
        check_folder(path)
        try:
            self._lock = _acquire(self.path, patience_s)
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"process {self._pid} on {socket.gethostname()}".encode(), 0)
            _remove_files(self.path)
            sweep(path)
        except OSError as error:
            self.close()
            raise InputError(
                f"{path}: cannot be offloaded to: {error.strerror}; give a folder on a local disk that this user may "
                f"write to"
            ) from None

    def close(self) -> None:
        """Remove the folder with all its files; a copy of this object in a forked process removes nothing."""
        lock, self._lock = self._lock, None
        if lock is None or self._pid != os.getpid():
            return
        _remove(self.path)
        os.close(lock)


def sweep(path: Path) -> None:
    """Remove what dead runs have left under `path`."""
    for folder in path.glob(f"rank-*{SUFFIX}"):
        with suppress(OSError):
            lock = _try_lock(folder)
            if lock is not None:
                _remove(folder)
                os.close(lock)


def check_folder(path: Path) -> None:
    """Raises InputError where there is no folder to offload to."""
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "no such folder"
        raise InputError(f"{path}: {what}; offloading to disk makes none, lest a typo fill another disk: create it")


def _acquire(folder: Path, patience_s: float) -> int:
    """The lock of a rank's folder. Others that sweep may hold it for a moment."""
    deadline = time.monotonic() + patience_s
    while True:
        with suppress(FileExistsError):
            folder.mkdir()
        with suppress(FileNotFoundError):  # swept in between
            lock = _try_lock(folder, create=True)
            if lock is not None:
                return lock
        if time.monotonic() > deadline:
            raise InputError(
                f"{folder.parent}: in use by {_owner(folder)}; two runs cannot offload to one folder: give this one "
                f"another"
            )
        time.sleep(_PAUSE_S)


def _try_lock(folder: Path, *, create: bool = False) -> int | None:
    """The lock as a file descriptor; None where somebody holds it, or has just removed it."""
    lock = os.open(folder / LOCK, os.O_RDWR | (os.O_CREAT if create else 0), 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(folder / LOCK)):
            return lock
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(lock)
            raise
    os.close(lock)
    return None


def _owner(folder: Path) -> str:
    with suppress(OSError):
        return (folder / LOCK).read_text(encoding="utf-8") or "another process"
    return "another process"


def _remove(folder: Path) -> None:
    """The lock last, and under it: whoever opened it meanwhile finds that it is no more the one of the folder."""
    _remove_files(folder)
    (folder / LOCK).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _remove_files(folder: Path) -> None:
    for file in folder.glob("*.bin"):
        file.unlink(missing_ok=True)
