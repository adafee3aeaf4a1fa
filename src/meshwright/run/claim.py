"""One run trains in a folder at a time: the process that speaks for all ranks holds RUN/lock while it lives.

The lock is the system's own (`flock`) and ends with its process, however that ends; the file that a killed run leaves
is no obstacle. Where a file system has no locks, folders are not guarded.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshwright.core.errors import InputError

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""What a file system without locks answers."""


@contextmanager
def claim(folder: Path, lock: Path) -> Iterator[None]:
    """Hold `lock`, a file in `folder`. Folders that are made for it are gone again where nothing else is put into them.

    Raises InputError where another process holds it.
    """
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        _make(folder)
        descriptor = _locked(folder, lock)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            os.close(descriptor)
    finally:
        for path in new_folders:
            with suppress(OSError):
                path.rmdir()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: this folder cannot be made: {error.strerror}") from None


def _locked(folder: Path, lock: Path) -> int:
    """The descriptor of the file, locked."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise InputError(f"{folder}: {holder} is training here; let it end, or choose another folder") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(descriptor)
                raise
        if _is_still(lock, descriptor):
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
            return descriptor
        os.close(descriptor)  # its holder has removed it meanwhile


def _is_still(lock: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(lock), os.fstat(descriptor))
    except FileNotFoundError:
        return False
