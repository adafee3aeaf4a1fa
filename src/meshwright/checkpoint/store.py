"""Save and load training state by placement: pieces in, pieces out, any layout to any other, exact.

    rank 0 pieces ─┐                                  ┌─ rank 0 pieces
    rank 1 pieces ─┼─►  one logical tensor per key  ──┼─ rank 1 pieces      (another dp, tp, pp, ZeRO)
    ...           ─┘     with its global shape        └─ ...

A rank asks for boxes; it never needs to know how the writers were laid out. The files are those of
torch.distributed.checkpoint, and its own tools read them as whole tensors. That package takes a second to import;
a process that neither saves nor loads does without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed

from meshwright.checkpoint.folder import newest, open_step
from meshwright.checkpoint.pieces import Piece
from meshwright.core.errors import CheckpointError, MeshwrightError, MeshwrightWarning, RankError


def save(
    folder: Path | str, step: int, pieces: Iterable[Piece], extra: Mapping[str, Any], *, keep: int | None = None
) -> None:
    """Save a checkpoint of `step` in `folder`/step-XXXXXXXX. Every rank calls it; it returns once all is on disk.

    A kill at any moment leaves the previous checkpoints as they were.

    Args:
        folder: the folder of all checkpoints of a run, on a file system that all ranks share.
        pieces: this rank's share, possibly none. Each element must be saved exactly once, except that ranks may
            pass the very same box: then one of them writes it.
        extra: values for JSON, of rank 0: samples consumed, seed, strategy...
        keep: how many of the newest checkpoints up to this step to keep; None keeps all.

    Raises:
        CheckpointError: on all ranks alike, whichever rank it concerns.
        RankError: another rank died or did not come.
    """
    import torch.distributed.checkpoint as dcp

    from meshwright.checkpoint.planners import PieceSavePlanner
    from meshwright.checkpoint.storage import PieceWriter

    writer, planner = PieceWriter(Path(folder), step, extra, keep), PieceSavePlanner(pieces)
    try:
        with _as_one(f"saving step {step} to {folder}"):
            dcp.save({}, storage_writer=writer, planner=planner, no_dist=not _has_ranks())
    except CheckpointError:
        if planner.is_coordinator:
            writer.abandon()
        raise


def load(
    folder: Path | str, pieces: Iterable[Piece], step: int | None = None, *, partial: bool = False
) -> dict[str, Any]:
    """Fill `pieces` from the checkpoint of `step`, or the newest whole one. Every rank calls it.

    Like all files of torch.distributed.checkpoint these hold a pickle: load only what you trust.

    Args:
        folder: the folder of all checkpoints of a run.
        pieces: the boxes that this rank holds, in any layout; filled in place.
        partial: True permits that some tensors of the kinds asked for (`parameters/...`) are asked for by no rank.

    Returns:
        The `extra` that was saved, with "step".

    Raises:
        CheckpointError: missing, damaged, of another model, of another dtype. On all ranks alike. The memory
            behind `pieces` may then be filled in part.
        RankError: another rank died or did not come.
    """
    import torch.distributed.checkpoint as dcp

    from meshwright.checkpoint.planners import PieceLoadPlanner
    from meshwright.checkpoint.storage import PieceReader

    reader, planner = PieceReader(Path(folder), step), PieceLoadPlanner(pieces, partial=partial)
    with _as_one(f"loading from {folder}"):
        dcp.load({}, storage_reader=reader, planner=planner, no_dist=not _has_ranks())
    assert reader.manifest is not None
    for damage in reader.damages:
        warnings.warn(f"passed over a damaged checkpoint: {damage}", MeshwrightWarning, stacklevel=2)
    return {**reader.manifest.extra, "step": reader.manifest.step}


def latest(folder: Path | str) -> int | None:
    """The newest step whose checkpoint is whole: not partial, every file there at full length. None if none is."""
    return newest(Path(folder))[0]


def peek(folder: Path | str, step: int | None = None) -> dict[str, Any]:
    """What :func:`load` would return, without reading a tensor or talking to other ranks.

    Raises:
        CheckpointError: missing or damaged.
    """
    found = latest(folder) if step is None else step
    if found is None:
        raise CheckpointError(f"{folder}: no checkpoint here")
    _, manifest = open_step(Path(folder), found)
    return {**manifest.extra, "step": manifest.step}


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextmanager
def _as_one(what: str) -> Iterator[None]:
    """The failure of any rank becomes one CheckpointError on all."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as failure:
        rank = min(failure.failures)
        cause = failure.failures[rank][0]
        if isinstance(cause, MeshwrightError):
            raise CheckpointError(str(cause)) from cause
        if not isinstance(cause, Exception):
            raise cause from None  # an interrupt is not a failure of the checkpoint
        raise CheckpointError(f"{what}: rank {rank}: {type(cause).__name__}: {cause}") from cause
    except RuntimeError as error:  # of a step it would have come as above; so it is of the exchange between ranks
        raise RankError(f"{what}: a rank was lost: {str(error).splitlines()[0]}") from error
