"""Flat ranges of boxes as rectangles, against brute force."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from meshwright.checkpoint.pieces import Piece, flat_pieces, rectangles, slabs
from meshwright.core.errors import CheckpointError
from meshwright.core.placement import Box
from tests.checkpoint.layouts import LAYOUTS, RankState, spec_of

BOXES = [
    Box((), ()),
    Box((3,), (7,)),
    Box((2, 5), (4, 6)),
    Box((0, 1), (1, 5)),
    Box((0, 1), (5, 1)),
    Box((1, 0, 2), (3, 2, 4)),
    Box((0, 0, 0), (2, 1, 3)),
    Box((1, 2, 3, 4), (2, 3, 2, 3)),
    Box((0, 4), (0, 3)),
]


def positions(box: Box) -> list[tuple[int, ...]]:
    """Global coordinates of a box's elements, in row-major order."""
    return [tuple(o + i for o, i in zip(box.offsets, at)) for at in product(*map(range, box.sizes))]


@pytest.mark.parametrize("box", BOXES, ids=lambda box: "x".join(map(str, box.sizes)) or "scalar")
def test_rectangles_are_the_flat_range(box):
    elements = positions(box)
    for start in range(box.numel + 1):
        for stop in range(start, box.numel + 1):
            parts = rectangles(box, start, stop)
            assert [at for part, _, _ in parts for at in positions(part)] == elements[start:stop]
            assert [(low, high) for _, low, high in parts] == _consecutive(start, [part.numel for part, _, _ in parts])
            assert len(parts) <= max(1, 2 * len(box.sizes) - 1)


def _consecutive(start: int, lengths: list[int]) -> list[tuple[int, int]]:
    ends = [start + sum(lengths[: i + 1]) for i in range(len(lengths))]
    return list(zip([start, *ends], ends))


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (2, 25), (5, 4)])
def test_rectangles_refuse_a_range_outside(start, stop):
    with pytest.raises(ValueError, match="leave a box of 24"):
        rectangles(Box((0, 0), (4, 6)), start, stop)


def test_flat_pieces_are_views():
    memory = torch.zeros(10)
    pieces = flat_pieces("k/x", (5, 9), Box((1, 2), (4, 6)), 4, memory)
    whole = torch.arange(45.0).view(5, 9)
    for piece in pieces:
        piece.tensor.copy_(whole[piece.box.slices])
    assert torch.equal(memory, whole[1:5, 2:8].flatten()[4:14])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_owned_pieces_of_all_ranks_hold_each_element(layout):
    """The union over ranks is the model: once per element outside dp, `dp` times where dp replicates."""
    spec, strategy = spec_of(), LAYOUTS[layout]
    counts = {}
    for rank in range(strategy.world_size):
        for piece in RankState(spec, strategy, rank).pieces(owned=True):
            counts.setdefault(piece.key, torch.zeros(piece.shape))[piece.box.slices] += 1
    assert len(counts) == 3 * len(spec.parameters())
    for key, count in counts.items():
        times = 1 if strategy.zero and not key.startswith("parameters/") else strategy.dp
        assert bool((count == times).all()), key


@pytest.mark.parametrize("cap_bytes", [1, 20, 48, 100, 10_000])
def test_slabs_cover_a_piece_and_respect_the_cap(cap_bytes):
    memory = torch.arange(60.0)
    piece = Piece("k/x", (9, 7, 8), Box((1, 2, 3), (1, 5, 4)), memory[:20].view(1, 5, 4))
    parts = list(slabs(piece, cap_bytes))
    assert torch.equal(torch.cat([part.tensor for part in parts], 1), piece.tensor)
    assert [at for part in parts for at in positions(part.box)] == positions(piece.box)
    for part in parts:
        part.check()
        assert part.tensor.numel() * 4 <= max(cap_bytes, 16)


def test_a_piece_that_does_not_fit_is_refused():
    with pytest.raises(CheckpointError, match=r"k/x: the box at \(3,\) of \(4,\) leaves .* shape \(6,\)"):
        Piece("k/x", (6,), Box((3,), (4,)), torch.zeros(4)).check()
    with pytest.raises(CheckpointError, match=r"k/x: the memory is of shape \(5,\), its box of \(4,\)"):
        Piece("k/x", (6,), Box((2,), (4,)), torch.zeros(5)).check()
