"""What is written and what is read: pieces, in the terms of torch.distributed.checkpoint.

Its planner interface calls `create_local_plan` on every rank and `create_global_plan` on one, and hands
an error of any of them to all ranks.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from meshwright.checkpoint.pieces import Piece, StoredBox, slabs
from meshwright.core.errors import CheckpointError

SLAB_BYTES = 64 * 2**20
"""Larger pieces are stored as several chunks, since a chunk is read whole."""


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.box.offsets), torch.Size(piece.box.sizes))


class PieceSavePlanner(DefaultSavePlanner):
    """Writes each piece as one shard of its logical tensor; of identical pieces on several ranks, one."""

    def __init__(self, pieces: Iterable[Piece], slab_bytes: int = SLAB_BYTES) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = tuple(pieces)
        self._slab_bytes = slab_bytes
        self._written: dict[MetadataIndex, Piece] = {}

    def create_local_plan(self) -> SavePlan:
        items = []
        for whole in self._pieces:
            whole.check()
            for piece in slabs(whole, self._slab_bytes) if whole.box.numel else ():
                index = MetadataIndex(piece.key, piece.box.offsets)
                self._written[index] = piece
                data = TensorWriteData(
                    chunk=_chunk(piece),
                    properties=TensorProperties(dtype=piece.tensor.dtype),
                    size=torch.Size(piece.shape),
                )
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _check_whole(item for plan in all_plans for item in plan.items)
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        tensor = self._written[write_item.index].read()
        if tensor.is_cpu and tensor.is_contiguous():
            # A view of a large buffer would be copied first; as a tensor of its own storage it is not.
            return torch.from_dlpack(tensor)
        return tensor


def _check_whole(items: Iterable[WriteItem]) -> None:
    """Every logical tensor must be there in full, and all ranks must mean the same one by its key."""
    kinds: dict[str, set[tuple[tuple[int, ...], torch.dtype]]] = defaultdict(set)
    boxes: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], int]] = defaultdict(dict)
    for item in items:
        data = item.tensor_data
        assert data is not None
        kinds[item.index.fqn].add((tuple(data.size), data.properties.dtype))
        boxes[item.index.fqn][tuple(data.chunk.offsets), tuple(data.chunk.sizes)] = prod(data.chunk.sizes)
    for key, found in kinds.items():
        if len(found) > 1:
            raise CheckpointError(f"{key}: ranks disagree on its shape or type: {sorted(map(str, found))}")
        shape = next(iter(found))[0]
        if sum(boxes[key].values()) != prod(shape):
            raise CheckpointError(
                f"{key}: ranks hold {sum(boxes[key].values())} of its {prod(shape)} elements; "
                "each element must be saved exactly once"
            )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What one rank tells the rank that looks over all plans."""

    checkpoint: str
    keys: frozenset[str] = field(default_factory=frozenset)


class PieceLoadPlanner(LoadPlanner):
    """Reads each piece's box from whatever shards hold it, straight into the piece's memory."""

    def __init__(self, pieces: Iterable[Piece], *, partial: bool) -> None:
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in pieces:
            self._pieces[piece.key].append(piece)
        self._partial = partial
        self._metadata = Metadata({})
        self._path = Path()

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if metadata is not None and metadata.storage_meta is not None:
            self._metadata = metadata
            self._path = Path(metadata.storage_meta.checkpoint_id or "")

    def create_local_plan(self) -> LoadPlan:
        items = []
        for key, pieces in self._pieces.items():
            saved = self._saved(key, pieces)
            reads = create_read_items_for_chunk_list(key, saved, [_chunk(piece) for piece in pieces])
            self._check_covered(key, pieces, reads)
            items += [read for read in reads if prod(read.lengths)]
        return LoadPlan(items, planner_data=_Wanted(self._path.name, frozenset(self._pieces)))

    def _saved(self, key: str, pieces: list[Piece]) -> TensorStorageMetadata:
        saved = self._metadata.state_dict_metadata.get(key)
        if not isinstance(saved, TensorStorageMetadata):
            raise CheckpointError(f"{self._path}: holds no tensor {key}: saved without it, or of another model")
        for piece in pieces:
            piece.check()
            if piece.shape != tuple(saved.size):
                raise CheckpointError(
                    f"{self._path}: is of another model: {key} has shape {tuple(saved.size)} there, {piece.shape} here"
                )
            if piece.tensor.dtype != saved.properties.dtype:
                raise CheckpointError(
                    f"{self._path}: {key} is {saved.properties.dtype} there, {piece.tensor.dtype} here; "
                    "load with the precision that saved it"
                )
        return saved

    def _check_covered(self, key: str, pieces: list[Piece], reads: list[ReadItem]) -> None:
        found = [0] * len(pieces)
        for read in reads:
            found[read.dest_index.index or 0] += prod(read.lengths)
        for piece, numel in zip(pieces, found, strict=True):
            if numel != piece.box.numel:
                raise CheckpointError(
                    f"{self._path}: holds {numel} of the {piece.box.numel} elements of {key} "
                    f"at {piece.box.offsets} of {piece.box.sizes}"
                )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        wanted: list[_Wanted] = [plan.planner_data for plan in global_plan]
        names = sorted({each.checkpoint for each in wanted})
        if len(names) > 1:
            raise CheckpointError(f"ranks see different newest checkpoints: {', '.join(names)}; name the step")
        keys = frozenset().union(*(each.keys for each in wanted))
        kinds = {key.partition("/")[0] for key in keys}
        left = sorted(k for k in self._metadata.state_dict_metadata if k.partition("/")[0] in kinds and k not in keys)
        if left and not self._partial:
            raise CheckpointError(
                f"{self._path}: is of another model: {len(left)} of its tensors belong nowhere here, such as {left[0]}"
            )
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{self._path}: {read_item.dest_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor = self._target(read_item)
        if not isinstance(tensor, torch.Tensor):
            return torch.empty(read_item.lengths, dtype=tensor.dtype)
        tensor = tensor.detach()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """`tensor` is a view into the piece, unless that is not in memory."""
        target = self._target(read_item)
        if not isinstance(target, torch.Tensor):
            target.write_part(tuple(read_item.dest_offsets), tensor)

    def _target(self, read_item: ReadItem) -> torch.Tensor | StoredBox:
        return self._pieces[read_item.dest_index.fqn][read_item.dest_index.index or 0].tensor
