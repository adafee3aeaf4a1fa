"""A pipeline that is never flushed between steps: PipeDream, PipeDream-2BW.

    step 0           step 1                   step 2                   finish
    F0 F1 F2 │ B0 UPDATE0 F3 B1 UPDATE1 ... │ ...                    │ B7 UPDATE7 B8 UPDATE8

A step runs its slice of the rank's endless row (`schedule.slices`): up to the forward of its own last micro-batch. What
it leaves under way, the next step goes on with, or `finish`. Forward and backward of a micro-batch use the same version
of the weights (`parallel.versions`). An update sums the gradients of its micro-batches over dp and changes the latest
version, at the learning rate of the step that the last of them belongs to.

What it needs: rule `asynchronous`. What it costs: the weights of further versions, and as many gradient reductions and
updates as the table has UPDATE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from meshwright.core.program import Action, Kind
from meshwright.core.strategy import Strategy
from meshwright.parallel.context.share import Share
from meshwright.parallel.data import GradientReducer
from meshwright.parallel.pipeline import StageRunner, UnderWay
from meshwright.parallel.states import FlatStates
from meshwright.parallel.versions import WeightVersions
from meshwright.schedule.slices import drain_slice, step_slice
from meshwright.schedule.versions import version_of

Update = Callable[[float, bool], None]
"""(learning rate, whether it is the last of a slice) → the optimizer's update of the rank's weights."""


class EndlessPipeline:
    """One rank's stage under an asynchronous schedule.

    Attributes:
        versions: of its weights.
        num_steps: run since the pipeline was empty.
    """

    def __init__(
        self, runner: StageRunner, states: FlatStates, reducer: GradientReducer, strategy: Strategy, rank: int
    ) -> None:
        self._runner, self._states, self._reducer = runner, states, reducer
        self._name, self._size, self._rank = strategy.schedule, strategy.pipeline, rank
        schedule = strategy.pipeline_schedule
        self.versions = WeightVersions(states, schedule.num_versions(self._size, rank))
        self._version = version_of(schedule, self._size)
        self._micro_batches: dict[int, Share] = {}
        self._loss_gradients: dict[int, torch.Tensor] = {}
        self._rates: dict[int, float] = {}
        self._step = UnderWay(self._micro_batches, self._loss_gradients, self._size.num_ranks + 1)
        self.num_steps = self._num_forwards = self._num_backwards = 0

    @property
    def is_empty(self) -> bool:
        """Whether no micro-batch is under way."""
        return self.num_steps == 0

    def step(
        self,
        micro_batches: Sequence[Share],
        loss_gradients: Sequence[torch.Tensor],
        learning_rate: float,
        update: Update,
    ) -> torch.Tensor:
        """Take in the micro-batches of a step, and go on with those of the steps before.

        Args:
            micro_batches: of this dp rank.
            loss_gradients: per micro-batch, 1 / counted tokens of those that are updated with together.

        Returns:
            the sum of the step's losses where the last stage stands, zero elsewhere (float64 scalar).
        """
        first = self.num_steps * len(micro_batches)
        self._micro_batches.update(enumerate(micro_batches, first))
        self._loss_gradients.update(enumerate(loss_gradients, first))
        self._rates.update(dict.fromkeys(range(first, first + len(micro_batches)), learning_rate))
        self._run(step_slice(self._name, self._size, self._rank, self.num_steps), update)
        self.num_steps += 1
        return self._runner.take_losses(self._step)

    def finish(self, update: Update) -> None:
        """Run what is under way to its end. The next step finds the pipeline empty."""
        if self.is_empty:
            return
        self._run(drain_slice(self._name, self._size, self._rank, self.num_steps), update)
        self._runner.end(self._step)
        self.versions.restart()
        self.num_steps = self._num_forwards = self._num_backwards = 0

    def _run(self, row: Sequence[Action], update: Update) -> None:
        last = max((index for index, action in enumerate(row) if action.kind is Kind.UPDATE), default=-1)
        for index, action in enumerate(row):
            if action.kind is Kind.UPDATE:
                do = partial(self._update, update=update, is_last=index == last)
                self._runner.act(self._step, action, do)
                continue
            if action.kind in (Kind.F, Kind.B):
                self.versions.use(self._version(action))
            self._runner.act(self._step, action)
            self._num_forwards += action.kind is Kind.F
            if action.kind is Kind.B:
                self._num_backwards += 1
                del self._loss_gradients[action.place[1]]
        self._runner.watch(None)

    def _update(self, step: UnderWay, action: Action, *, update: Update, is_last: bool) -> None:
        _, k = action.place
        self._reducer.arm(action.stage)
        self._reducer.finish(action.stage)
        self.versions.add(self._needed())
        update(self._rates[k], is_last)
        self._states.zero_gradients()
        self._reducer.start_step()
        for done in [number for number in self._rates if number <= k]:
            del self._rates[done], self._micro_batches[done]

    def _needed(self) -> set[int]:
        """Versions of the micro-batches between forward and backward, and of all that are to come."""
        used = {self._version(Action(Kind.F, self._rank, k)) for k in range(self._num_backwards, self._num_forwards)}
        following = self._version(Action(Kind.F, self._rank, self._num_forwards))
        return used | set(range(following, self.versions.latest + 1))
