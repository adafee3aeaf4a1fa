"""The disk tier: one preallocated file per rank and kind, read and written at offsets by a thread of its own.

    moment1.bin  | group 0      | group 1      | group 2 |    each begins on a block of its own
                 0              ▲ multiple of BLOCK_BYTES

All space is taken before the first step, so that a disk that is too small is found then, not in the middle of a run.
Files go through the page cache, which the system gives up when memory is short; nothing is synced, since nobody reads
the files of a run after it.

Source: Rajbhandari et al. 2021 §6.3 (the infinity offload engine).
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.core.errors import InputError
from meshwright.core.offload import BLOCK_BYTES
from meshwright.parallel.offload.folder import RankFolder
from meshwright.parallel.offload.tier import Handle, Region, Tier

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskTier(Tier):
    """Tensors in files under `path`, which this rank's process has to itself; they go when it is closed or collected.

    Args:
        path: an existing folder; the ranks of one run may share it.
        rank: of the whole world.
        patience_s: how long to wait for a lock that another process holds.

    Raises InputError as :class:`RankFolder` does.
    """

    def __init__(self, path: Path | str, rank: int, *, patience_s: float = 5.0) -> None:
        super().__init__()
        self._rank = rank
        self._folder = RankFolder(Path(path), rank, patience_s=patience_s)
        self._files: dict[str, _File] = {}
        self._offsets: dict[str, int] = {}
        self._close = weakref.finalize(self, _close, self._folder, self._files)

    @property
    def folder(self) -> Path:
        """Where this rank's files are."""
        return self._folder.path

    @property
    def held_bytes(self) -> int:
        return sum(file.size_bytes for file in self._files.values())

    @property
    def working_device(self) -> torch.device:
        return torch.device("cpu")

    def close(self) -> None:
        self._close()
        self._regions.clear()

    def _allocate(self, region: Region) -> None:
        needed = -(-region.nbytes // BLOCK_BYTES) * BLOCK_BYTES
        held = self.held_bytes
        try:
            file = self._files.get(region.kind)
            if file is None:
                file = self._files[region.kind] = _File(self.folder / f"{region.kind}.bin")
            self._offsets[region.key] = file.extend(needed)
        except OSError as error:
            free = _free_bytes(self.folder)
            self.close()
            if error.errno in _FULL:
                raise InputError(
                    f"{self.folder.parent}: the disk is full: rank {self._rank} needs {needed} more bytes for "
                    f"{region.key}, {free} are free beside the {held} that it had; free some space, or give another "
                    f"folder"
                ) from None
            raise InputError(f"{self.folder}: {region.kind}: {error.strerror}") from None

    def _read(self, region: Region, start: int, out: torch.Tensor) -> Handle:
        file = self._files[region.kind]
        return file.start(file.read, _buffer(out), self._offset(region, start))

    def _write(self, region: Region, start: int, x: torch.Tensor) -> Handle:
        file = self._files[region.kind]
        return file.start(file.write, _buffer(x), self._offset(region, start))

    def _offset(self, region: Region, start: int) -> int:
        return self._offsets[region.key] + start * region.dtype.itemsize


class _File:
    """One kind's file, and the thread that takes its reads and writes in the order in which they were started."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"offload-{path.stem}")

    def extend(self, num_bytes: int) -> int:
        """Take `num_bytes` more of the disk, all or nothing. Returns where they begin. Raises OSError."""
        if num_bytes > _free_bytes(self.path.parent):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        at = self.size_bytes
        if num_bytes:
            os.posix_fallocate(self._descriptor, at, num_bytes)
        self.size_bytes = at + num_bytes
        return at

    def start(self, transfer: Callable[[memoryview, int], None], buffer: memoryview, offset: int) -> _InThread:
        """Have the thread call `transfer(buffer, offset)`."""
        return _InThread(self._thread.submit(transfer, buffer, offset), self.path)

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer`."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"it ends at byte {offset + done}; somebody has cut it")
            done += count

    def write(self, buffer: memoryview, offset: int) -> None:
        """Write all of `buffer`."""
        done = 0
        while done < len(buffer):
            done += os.pwrite(self._descriptor, buffer[done:], offset + done)

    def close(self) -> None:
        """Let the thread end what was started."""
        self._thread.shutdown()
        os.close(self._descriptor)


@dataclass(frozen=True, slots=True)
class _InThread:
    future: Future[None]
    path: Path

    def wait(self) -> None:
        """Return when the thread has done it. Raises InputError if it could not."""
        try:
            self.future.result()
        except OSError as error:
            raise InputError(
                f"{self.path}: the disk tier failed: {error.strerror}; the last checkpoint is untouched, resume from it"
            ) from None


def _close(folder: RankFolder, files: dict[str, _File]) -> None:
    for file in files.values():
        file.close()
    files.clear()
    folder.close()


def _buffer(x: torch.Tensor) -> memoryview:
    """The memory of a tensor of the host."""
    if not x.is_cpu:
        raise ValueError(f"the disk tier reads into memory of the host, not of {x.device}")
    return x.detach().view(torch.uint8).numpy().data


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
