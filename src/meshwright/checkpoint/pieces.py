"""Pieces: the boxes of logical tensors that a rank holds, as views into its own memory or its tiers.

A checkpoint knows logical tensors only (`parameters/NAME`, `moment1/NAME`, ...) with their global shapes.
A ZeRO shard is a run of elements that may begin and end anywhere in a parameter; cut into rectangles
it speaks the same language as every other layout:

    a 4 x 6 box, elements [3, 20)      . . . # # #     head: the rest of a row
                                       # # # # # #     body: whole rows
                                       # # # # # #
                                       # # . . . .     tail: the start of a row
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from meshwright.core.errors import CheckpointError
from meshwright.core.flat import Bucket
from meshwright.core.placement import Box


class Stored(Protocol):
    """A flat run of elements that is not in memory, such as :class:`parallel.offload.stream.StoredRun`."""

    @property
    def dtype(self) -> torch.dtype: ...
    def numel(self) -> int:
        """Number of elements."""

    def __getitem__(self, part: slice) -> Stored: ...
    def read(self) -> torch.Tensor:
        """A flat copy in memory."""

    def write(self, x: torch.Tensor) -> None:
        """Take over the values of x, flat."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredBox:
    """A stored run in the shape of a box: read and written in whole rows of its first dim longer than 1."""

    run: Stored
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.run.dtype

    @property
    def nbytes(self) -> int:
        return self.run.numel() * self.dtype.itemsize

    def narrow(self, dim: int, start: int, length: int) -> StoredBox:
        """Like that of a tensor, along the first dim longer than 1."""
        assert prod(self.shape[:dim]) == 1, "such rows do not follow one another"
        row = prod(self.shape[dim + 1 :])
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return StoredBox(self.run[start * row : (start + length) * row], shape)

    def read(self) -> torch.Tensor:
        """A copy in memory, of the box's shape."""
        return self.run.read().view(self.shape)

    def rows_of(self, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> StoredBox:
        """The whole rows that hold the part at `offsets` of `lengths`."""
        dim = row_dim(self.shape)
        return self if dim is None else self.narrow(dim, offsets[dim], lengths[dim])

    def write_part(self, offsets: tuple[int, ...], x: torch.Tensor) -> None:
        """The part at `offsets` of x's shape ← x. Where it does not fill its rows, they are read first."""
        rows, dim = self.rows_of(offsets, tuple(x.shape)), row_dim(self.shape)
        if rows.shape == tuple(x.shape):
            rows.run.write(x.reshape(-1))
            return
        values = rows.read()
        at = tuple(0 if d == dim else offset for d, offset in enumerate(offsets))
        values[tuple(slice(low, low + size) for low, size in zip(at, x.shape, strict=True))] = x
        rows.run.write(values.view(-1))


def row_dim(shape: tuple[int, ...]) -> int | None:
    """The first dim longer than 1: its rows follow one another in memory. None where there is none."""
    return next((dim for dim, size in enumerate(shape) if size > 1), None)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One box of a logical tensor, in this rank's memory or on one of its tiers."""

    key: str
    """KIND/NAME, with the logical name of the parameter: `moment1/layers.3.mlp.up.weight`."""
    shape: tuple[int, ...]
    """Global shape of the logical tensor."""
    box: Box
    """In global coordinates."""
    tensor: torch.Tensor | StoredBox
    """Of the box's sizes. A view into the owner's memory: saved from there, loaded into there."""

    def read(self) -> torch.Tensor:
        """The values: that view, or a copy of what is not in memory."""
        return self.tensor.detach() if isinstance(self.tensor, torch.Tensor) else self.tensor.read()

    def check(self) -> None:
        """Raises CheckpointError unless tensor, box and shape fit each other."""
        fits = len(self.shape) == len(self.box.sizes) == len(self.box.offsets) and all(
            offset >= 0 and offset + size <= total
            for offset, size, total in zip(self.box.offsets, self.box.sizes, self.shape, strict=True)
        )
        if not fits:
            raise CheckpointError(
                f"{self.key}: the box at {self.box.offsets} of {self.box.sizes} leaves the tensor's shape {self.shape}"
            )
        if tuple(self.tensor.shape) != self.box.sizes:
            raise CheckpointError(
                f"{self.key}: the memory is of shape {tuple(self.tensor.shape)}, its box of {self.box.sizes}"
            )


def rectangles(box: Box, start: int, stop: int) -> list[tuple[Box, int, int]]:
    """Cut elements [start, stop) of a row-major box into rectangles.

    Args:
        box: in global coordinates; any number of dims.
        start, stop: flat positions, counted from the box's first element.

    Returns:
        (rectangle in global coordinates, flat start, flat stop), in flat order, without gaps. Each is
        contiguous in the flat range. At most 2·dims - 1 of them.

    Raises:
        ValueError: the range leaves the box.
    """
    if not 0 <= start <= stop <= box.numel:
        raise ValueError(f"elements [{start}, {stop}) leave a box of {box.numel} elements")
    return list(_rectangles(box, start, stop))


def _rectangles(box: Box, start: int, stop: int) -> Iterator[tuple[Box, int, int]]:
    if start == stop:
        return
    if stop - start == box.numel:
        yield box, start, stop
        return
    row = prod(box.sizes[1:])
    first, last = -(-start // row), stop // row  # the whole rows are [first, last)
    if first > last:
        yield from _within_row(box, last, start, stop)
        return
    if start < first * row:
        yield from _within_row(box, first - 1, start, first * row)
    if first < last:
        body = Box((box.offsets[0] + first, *box.offsets[1:]), (last - first, *box.sizes[1:]))
        yield body, first * row, last * row
    if last * row < stop:
        yield from _within_row(box, last, last * row, stop)


def _within_row(box: Box, index: int, start: int, stop: int) -> Iterator[tuple[Box, int, int]]:
    inner = Box(box.offsets[1:], box.sizes[1:])
    before = index * inner.numel
    for part, low, high in _rectangles(inner, start - before, stop - before):
        yield Box((box.offsets[0] + index, *part.offsets), (1, *part.sizes)), before + low, before + high


def flat_pieces(key: str, shape: tuple[int, ...], box: Box, start: int, memory: torch.Tensor | Stored) -> list[Piece]:
    """Pieces of the run of elements of `box` that begins at flat position `start` and fills `memory`.

    Args:
        memory: one-dim and contiguous; the pieces are views into it.
    """
    return [
        Piece(key, shape, part, _in_shape(memory[low - start : high - start], part.sizes))
        for part, low, high in rectangles(box, start, start + memory.numel())
    ]


def _in_shape(run: torch.Tensor | Stored, shape: tuple[int, ...]) -> torch.Tensor | StoredBox:
    return run.view(shape) if isinstance(run, torch.Tensor) else StoredBox(run, shape)


def bucket_pieces(kind: str, bucket: Bucket, start: int, memory: torch.Tensor | Stored, *, owned: bool) -> list[Piece]:
    """Pieces of bucket elements [start, start + len(memory)): the whole bucket or one ZeRO shard.

    Args:
        kind: parameters, master, moment1 or moment2; the first part of each key.
        start: first bucket element that `memory` holds.
        memory: one-dim and contiguous. Padding in it belongs to no piece.
        owned: True leaves out replicas that another rank saves. Load with False.
    """
    stop = start + memory.numel()
    pieces = []
    for slot in bucket.slots:
        low, high = max(start, slot.start), min(stop, slot.stop)
        if low < high and (slot.placement.owned or not owned):
            key, place = f"{kind}/{slot.placement.name}", slot.placement
            pieces += flat_pieces(key, place.shape, place.box, low - slot.start, memory[low - start : high - start])
    return pieces


def slabs(piece: Piece, cap_bytes: int) -> Iterator[Piece]:
    """Cut a piece along its first dim longer than 1 into slabs of at most `cap_bytes`, or of one row.

    A stored chunk is read whole; so the reader of a small box reads little more than that box.
    """
    dim, num_bytes = row_dim(piece.box.sizes), piece.tensor.nbytes
    if dim is None or num_bytes <= cap_bytes:
        yield piece
        return
    size = piece.box.sizes[dim]
    rows = max(1, cap_bytes * size // num_bytes)
    for at in range(0, size, rows):
        count = min(rows, size - at)
        offsets, sizes = list(piece.box.offsets), list(piece.box.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + at, count
        yield Piece(piece.key, piece.shape, Box(tuple(offsets), tuple(sizes)), piece.tensor.narrow(dim, at, count))
