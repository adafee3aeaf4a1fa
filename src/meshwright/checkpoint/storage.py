"""How it reaches the disk: torch.distributed.checkpoint's file format, committed by a rename, checked when read.

Its storage interface calls `prepare_global_plan` and `finish` on one rank while all others wait, and hands an
error to all ranks: the folder is prepared in the one and committed in the other, without a barrier of our own.
"""

from __future__ import annotations

import io
import shutil
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshwright.checkpoint.folder import Manifest, clean, commit, newest, open_step, partial_path, prune
from meshwright.core.errors import CheckpointError


class PieceWriter(FileSystemWriter):
    """Writes one checkpoint into its partial folder and commits it."""

    def __init__(self, folder: Path, step: int, extra: Mapping[str, Any], keep: int | None) -> None:
        super().__init__(partial_path(folder, step))
        self._folder, self._step, self._extra, self._keep = folder, step, dict(extra), keep

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self._keep is not None and self._keep < 1:
            raise CheckpointError(f"keep is {self._keep}: at least the checkpoint just saved is kept")
        Manifest(self._step, {}, self._extra).to_json()  # refused now rather than after the writing
        clean(self._folder)
        Path(self.path).mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # `torch.save` closes its archive after a write that failed, and fails again
            raise _system_error(error) or error from None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        files = {file.name: file.stat().st_size for file in sorted(Path(self.path).iterdir())}
        lost = {result.storage_data.relative_path for rank in results for result in rank} - files.keys()
        if lost:
            raise CheckpointError(
                f"{self.path}: {min(lost)} was written but is not here; all ranks need one shared file system"
            )
        commit(self._folder, Manifest(self._step, files, self._extra))
        if self._keep is not None:
            prune(self._folder, self._step, self._keep)

    def abandon(self) -> None:
        """Remove what a failed save has written."""
        shutil.rmtree(self.path, ignore_errors=True)


class PieceReader(FileSystemReader):
    """Opens one checkpoint, the newest whole one if `step` is None, and reads each stored chunk once."""

    def __init__(self, folder: Path, step: int | None) -> None:
        super().__init__(folder)
        self._folder, self._step = folder, step
        self._failure: CheckpointError | None = None
        self.manifest: Manifest | None = None
        self.damages: list[CheckpointError] = []
        """What is wrong with each newer checkpoint that was passed over."""

    def read_metadata(self) -> Metadata:
        try:
            self.path, self.manifest = self._open()
            metadata = super().read_metadata()
        except CheckpointError as error:
            self._failure = error  # an error raised from here would be logged and replaced by the caller
            return Metadata({})
        except Exception as error:
            self._failure = CheckpointError(f"{Path(self.path) / '.metadata'}: damaged: {error!r}")
            return Metadata({})
        if metadata.storage_meta is not None:
            metadata.storage_meta.checkpoint_id = self.path
        return metadata

    def _open(self) -> tuple[Path, Manifest]:
        if self._step is not None:
            return open_step(self._folder, self._step)
        step, self.damages = newest(self._folder)
        if step is not None:
            return open_step(self._folder, step)
        if self.damages:
            raise self.damages[0]
        raise CheckpointError(f"{self._folder}: no checkpoint here")

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._failure is not None:
            raise self._failure
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, dict[MetadataIndex, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            files[self.storage_data[item.storage_index].relative_path][item.storage_index].append(item)
        for name, chunks in files.items():
            with (Path(self.path) / name).open("rb") as file:
                for index in sorted(chunks, key=lambda index: self.storage_data[index].offset):
                    self._read_chunk(file, index, chunks[index], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_chunk(self, file: BinaryIO, index: MetadataIndex, items: list[ReadItem], planner: LoadPlanner) -> None:
        place = self.storage_data[index]
        file.seek(place.offset)
        chunk = _decode(file.read(place.length), f"{file.name}: {index.fqn}")
        for item in items:
            source = chunk
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, start, length)
            target = planner.resolve_tensor(item)
            target.copy_(source)
            planner.commit_tensor(item, target)


def _system_error(error: BaseException) -> OSError | None:
    """What the system said while `error` came about, for example that the disk is full; None if it was not asked."""
    seen = error.__context__
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__context__
    return seen


def _decode(data: bytes, where: str) -> torch.Tensor:
    """A stored chunk. `torch.load` does not look at the checksums that `torch.save` wrote, so that is done here."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if (bad := archive.testzip()) is not None:
                raise CheckpointError(f"{where}: damaged: the checksum of {bad} differs")
        tensor: torch.Tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{where}: damaged: {error!r}") from None
    return tensor
