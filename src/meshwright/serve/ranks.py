"""How a step reaches the ranks that compute it. Rank 0 decides what runs; the other ranks follow it, step by step.

    batch ── as one vector, over all ranks ──▶ every rank's runner ─▶ logits on rank 0

Instead of a batch's length, `STOP` ends :func:`follow`, and `NOTHING` is a sign of life: a rank gives up where nothing
comes for too long.
"""

from __future__ import annotations

from typing import Protocol

import torch

from meshwright.comm.collectives import broadcast
from meshwright.core.axes import WORLD
from meshwright.serve.batch import Batch
from meshwright.serve.runner import Runner

STOP, NOTHING = 0, -1


class Ranks(Protocol):
    """Who computes the steps of an engine."""

    def compute(self, batch: Batch) -> torch.Tensor | None:
        """Logits [W, V] of the wanted rows; None where none are wanted. Raises RankError: a rank is lost."""

    def beat(self) -> None:
        """A sign of life. Raises RankError: a rank is lost."""

    def stop(self) -> None:
        """No more steps come."""


class Alone:
    """This rank by itself, also where other ranks run."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def compute(self, batch: Batch) -> torch.Tensor | None:
        """As :meth:`Ranks.compute`."""
        return self._runner.run(batch)

    def beat(self) -> None:
        """Nobody listens."""

    def stop(self) -> None:
        """Nobody listens."""


class Together:
    """All ranks of a run, of which this is rank 0; the others :func:`follow`."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._world = runner, runner.mesh[WORLD]

    def compute(self, batch: Batch) -> torch.Tensor | None:
        """As :meth:`Ranks.compute`."""
        if self._world.size > 1:
            vector = torch.from_numpy(batch.to_vector()).to(self._world.device)
            self._say(len(vector))
            broadcast(vector, self._world, 0)
        return self._runner.run(batch)

    def beat(self) -> None:
        """A sign of life for those that follow."""
        self._say(NOTHING)

    def stop(self) -> None:
        """End :func:`follow`."""
        self._say(STOP)

    def _say(self, number: int) -> None:
        if self._world.size > 1:
            broadcast(torch.tensor([number], device=self._world.device), self._world, 0)


def follow(runner: Runner) -> None:
    """On a rank other than 0: compute what rank 0 tells, until it stops. Raises RankError where it is lost."""
    world = runner.mesh[WORLD]
    length = torch.empty(1, dtype=torch.int64, device=world.device)
    while (count := int(broadcast(length, world, 0))) != STOP:
        if count != NOTHING:
            vector = torch.empty(count, dtype=torch.int64, device=world.device)
            runner.run(Batch.from_vector(broadcast(vector, world, 0).cpu().numpy()))
