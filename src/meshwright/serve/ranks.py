"""How a step reaches the ranks that compute it. Rank 0 decides what runs; the other ranks follow it, step by step.

    rank 0 ─┬─ batch as one vector, over all ranks of its replica ─▶ every rank's runner ─▶ logits on rank 0
            └─ batch ─▶ first rank of another replica ─▶ its ranks ─▶ their runners ─▶ logits ─▶ rank 0

With dp = n there are n replicas, each of tp × pp ranks, and rank 0 decides for all of them: the first rank of each
hears it over dp, and tells its own ranks, those of the first stage over tp and each of these its stages over pp.

Replicas that share the experts of a mixture step together: what was started of all is computed when one is waited for,
with an empty batch for those that have nothing to do.

Instead of a batch's length, `STOP` ends :func:`follow`, and `NOTHING` is a sign of life: a rank gives up where nothing
comes for too long.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from meshwright.comm.collectives import broadcast
from meshwright.comm.mesh import Axis, Mesh
from meshwright.comm.p2p import recv_start, send_start
from meshwright.core.axes import DP, EP, PP, TP, WORLD
from meshwright.serve.batch import Batch, make_batch
from meshwright.serve.runner import Runner

STOP, NOTHING = 0, -1
LENGTH_TAG, BATCH_TAG, LOGITS_TAG = 2, 3, 4
"""Between rank 0 and the first ranks of other replicas."""


class Ranks(Protocol):
    """Who computes the steps of an engine: each is started, and then waited for."""

    def start(self, batch: Batch) -> None:
        """Tell it. Raises RankError: a rank is lost."""

    def wait(self) -> torch.Tensor | None:
        """Logits [W, V] of the wanted rows; None where none are wanted. Raises RankError: a rank is lost."""

    def beat(self) -> None:
        """A sign of life. Raises RankError: a rank is lost."""

    def stop(self) -> None:
        """No more steps come."""


class Alone:
    """This rank by itself, also where other ranks run."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._batch: Batch | None = None

    def start(self, batch: Batch) -> None:
        """Nobody else is told."""
        self._batch = batch

    def wait(self) -> torch.Tensor | None:
        """Computes it here."""
        batch, self._batch = self._batch, None
        assert batch is not None
        return self._runner.run(batch)

    def beat(self) -> None:
        """Nobody listens."""

    def stop(self) -> None:
        """Nobody listens."""


class Together(Alone):
    """The ranks of one replica, of which this is the first; the others :func:`follow`."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._device, self._axes = runner.mesh.device, _axes(runner.mesh)

    def start(self, batch: Batch) -> None:
        """Tell those that follow."""
        super().start(batch)
        if not self._axes:
            return
        vector = torch.from_numpy(batch.to_vector()).to(self._device)
        self._say(len(vector))
        _pass_on(vector, self._axes)

    def beat(self) -> None:
        """For those that follow."""
        self._say(NOTHING)

    def stop(self) -> None:
        """End :func:`follow`."""
        self._say(STOP)

    def _say(self, number: int) -> None:
        _pass_on(torch.tensor([number], device=self._device), self._axes)


class Distant:
    """The ranks of another replica: on rank 0.

    Args:
        runner: of rank 0.
        index: of the replica.
    """

    def __init__(self, runner: Runner, index: int) -> None:
        self._dp, self._index, self._shape = runner.mesh[DP], index, runner.logits_shape
        self._wanted = 0

    def start(self, batch: Batch) -> None:
        """Send it."""
        vector = torch.from_numpy(batch.to_vector()).to(self._dp.device)
        self._wanted = len(batch.wanted)
        self._say(len(vector))
        send_start(vector, self._dp, self._index, BATCH_TAG).wait()

    def wait(self) -> torch.Tensor | None:
        """Receive its logits."""
        if not self._wanted:
            return None
        width, dtype = self._shape
        logits = torch.empty(self._wanted, width, dtype=dtype, device=self._dp.device)
        recv_start(logits, self._dp, self._index, LOGITS_TAG).wait()
        return logits

    def beat(self) -> None:
        """For all of them."""
        self._say(NOTHING)

    def stop(self) -> None:
        """End :func:`follow` there."""
        self._say(STOP)

    def _say(self, number: int) -> None:
        send_start(torch.tensor([number], device=self._dp.device), self._dp, self._index, LENGTH_TAG).wait()


class InStep:
    """One of several replicas that step together.

    Args:
        of: who computes its steps.
        group: all of them, in order, which this one joins.
    """

    def __init__(self, of: Ranks, group: list[InStep]) -> None:
        self._of, self._group = of, group
        self._batch: Batch | None = None
        self._is_done = False
        self._logits: torch.Tensor | None = None
        group.append(self)

    def start(self, batch: Batch) -> None:
        """Keep it until the others are started too."""
        assert self._batch is None
        self._batch = batch

    def wait(self) -> torch.Tensor | None:
        """Compute what was started of all, where that was not done."""
        if not self._is_done:
            self._step_together()
        logits, self._logits, self._batch, self._is_done = self._logits, None, None, False
        return logits

    def beat(self) -> None:
        """As :meth:`Ranks.beat`."""
        self._of.beat()

    def stop(self) -> None:
        """As :meth:`Ranks.stop`."""
        self._of.stop()

    def _step_together(self) -> None:
        assert self._batch is not None
        nothing = make_batch([], self._batch.block_size)
        batches = [each._batch or nothing for each in self._group]
        counts = np.array([batch.num_tokens for batch in batches], dtype=np.int64)
        for each, batch in zip(self._group, batches, strict=True):
            each._of.start(replace(batch, shared=counts))
        for each in self._group:
            logits = each._of.wait()
            if each._batch is not None:
                each._logits, each._is_done = logits, True


def num_sharing(mesh: Mesh) -> int:
    """Neighbouring replicas that share experts."""
    return mesh[EP].size if EP in mesh.axes else 1


def _axes(mesh: Mesh) -> list[Axis]:
    """Along which this rank hears of a step, or tells of it, in order; none where its replica has no other rank."""
    axes = [mesh[WORLD]]
    if mesh[DP].size > 1:
        axes = [mesh[PP]] if mesh[PP].index else [mesh[TP], mesh[PP]]
    return [axis for axis in axes if axis.size > 1]


def _pass_on(numbers: torch.Tensor, axes: list[Axis]) -> torch.Tensor:
    """numbers ← those of the replica's first rank, on all of its ranks. Returns them."""
    for axis in axes:
        broadcast(numbers, axis, 0)
    return numbers


def follow(runner: Runner) -> None:
    """On a rank other than 0: compute what rank 0 tells, until it stops. Raises RankError where it is lost."""
    mesh = runner.mesh
    if mesh[DP].index and not mesh[TP].index and not mesh[PP].index:
        _lead(runner)
        return
    axes = _axes(mesh)
    length = torch.empty(1, dtype=torch.int64, device=mesh.device)
    while (count := int(_pass_on(length, axes))) != STOP:
        if count != NOTHING:
            vector = torch.empty(count, dtype=torch.int64, device=mesh.device)
            runner.run(Batch.from_vector(_pass_on(vector, axes).cpu().numpy()))


def _lead(runner: Runner) -> None:
    """On the first rank of a replica other than that of rank 0."""
    dp, own = runner.mesh[DP], Together(runner)
    length = torch.empty(1, dtype=torch.int64, device=dp.device)
    while True:
        recv_start(length, dp, 0, LENGTH_TAG).wait()
        if (count := int(length)) == STOP:
            own.stop()
            return
        if count == NOTHING:
            own.beat()
            continue
        vector = torch.empty(count, dtype=torch.int64, device=dp.device)
        recv_start(vector, dp, 0, BATCH_TAG).wait()
        own.start(Batch.from_vector(vector.cpu().numpy()))
        logits = own.wait()
        if logits is not None:
            send_start(logits.contiguous(), dp, 0, LOGITS_TAG).wait()
