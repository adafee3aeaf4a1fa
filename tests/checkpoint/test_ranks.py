"""Save and load by real ranks: any layout to any other, and one rank's failure is everybody's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint import Piece, latest, load, save
from meshwright.core.errors import CheckpointError, RankError
from meshwright.core.placement import Box
from tests.checkpoint.layouts import LAYOUTS, RankState, reference, spec_of

SAVED = ("D1", "D2z", "T2P2", "D2T2z", "Q4", "Q8", "C8")
LOADED = ("D1", "P2", "T4", "D4z", "Q4", "C8")


def save_layout(rank: int, world: int, folder: str, layout: str) -> None:
    state = RankState(spec_of(2), LAYOUTS[layout], rank)
    state.fill(reference(spec_of(2)))
    save(folder, 10, state.pieces(owned=True), {"layout": layout, "rank": rank})


def load_layout(rank: int, world: int, folder: str, layout: str) -> tuple[dict, list[str]]:
    state = RankState(spec_of(2), LAYOUTS[layout], rank)
    extra = load(folder, state.pieces(owned=False))
    return extra, state.differing(reference(spec_of(2)))


@pytest.mark.parametrize("saved", SAVED)
def test_saved_by_ranks_loaded_by_others(ranks, tmp_path, saved):
    ranks(save_layout, LAYOUTS[saved].world_size, str(tmp_path), saved)
    for loaded in LOADED:
        for extra, differing in ranks(load_layout, LAYOUTS[loaded].world_size, str(tmp_path), loaded):
            assert extra == {"layout": saved, "rank": 0, "step": 10}
            assert differing == [], f"{saved} → {loaded}"


def test_replicas_share_the_writing(ranks, tmp_path):
    """Four ranks that hold the same each write a part, and together the state once."""
    ranks(save_layout, 4, str(tmp_path), "D4")
    lengths = [(tmp_path / "step-00000010" / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert max(lengths) < 0.4 * sum(lengths)
    ranks(save_layout, 1, str(tmp_path / "one"), "D1")
    assert sum(lengths) == (tmp_path / "one" / "step-00000010" / "__0_0.distcp").stat().st_size


def row(rank: int, world: int, value: float, shape: tuple[int, ...] | None = None) -> list[Piece]:
    """Rank `rank`'s row of a tensor of `world` rows."""
    return [Piece("parameters/x", shape or (world, 3), Box((rank, 0), (1, 3)), torch.full((1, 3), value))]


def fail(rank: int, world: int, folder: str, how: str) -> str:
    """Save step 1; then rank 1 fails in step 2, or loading. Returns the error that this rank sees."""
    save(folder, 1, row(rank, world, 1.0), {})
    other = (world, 4) if rank == 1 else None
    try:
        if how == "disk":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "save", _full if rank == 1 else torch.save)
                save(folder, 2, row(rank, world, 2.0), {})
        elif how == "lacking":
            save(folder, 2, row(rank, world, 2.0) if rank != 1 else [], {})
        elif how == "shape":
            save(folder, 2, row(rank, world, 2.0, other), {})
        elif how == "load":
            load(folder, row(rank, world, 0.0, other))
        elif how == "unwritable":
            save(folder + "/step-00000001/.metadata", 2, row(rank, world, 2.0), {})
    except CheckpointError as error:
        return str(error)
    return "nothing"


def _full(*args: object, **kwargs: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("disk", "rank 1: OSError: [Errno 28] No space left on device"),
        ("lacking", "parameters/x: ranks hold 6 of its 9 elements"),
        ("shape", "parameters/x: ranks disagree on its shape or type"),
        ("load", "another model: parameters/x has shape (3, 3) there, (3, 4) here"),
        ("unwritable", "rank 0: NotADirectoryError"),
    ],
)
def test_a_rank_that_fails_fails_all_alike(ranks, tmp_path, how, message):
    errors = ranks(fail, 3, str(tmp_path), how)
    assert len(set(errors)) == 1
    assert message in errors[0]
    assert "\n" not in errors[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def die_in_save(rank: int, world: int, folder: str) -> str:
    """Rank 1 dies at its first byte of step 2. Returns what this rank hears of it."""
    save(folder, 1, row(rank, world, 1.0), {})
    if rank == 1:
        torch.save = lambda *args, **kwargs: os._exit(9)
    try:
        save(folder, 2, row(rank, world, 2.0), {})
    except RankError as error:
        return str(error)
    return "nothing"


def load_row(rank: int, world: int, folder: str) -> float:
    pieces = row(rank, world, 0.0)
    load(folder, pieces)
    return pieces[0].tensor.sum().item()


def test_a_rank_killed_while_saving_keeps_the_previous(ranks, tmp_path):
    heard = ranks(die_in_save, 2, str(tmp_path), may_die=(1,))
    assert "saving step 2" in heard[0]
    assert "lost" in heard[0]
    assert latest(tmp_path) == 1
    assert Path(tmp_path / "step-00000002.partial").is_dir()
    assert ranks(load_row, 2, str(tmp_path)) == [3.0, 3.0]
