"""The delayed update: each step's gradients are applied in the background, while the next step computes.

    step       |  forward, backward i  | forward, backward i+1 |
    thread     |  U(θ_i, g_{i-1})      | U(θ_{i+1}, g_i)       |       θ_{i+1} = U(θ_i, g_{i−1})

What it needs: a master copy and a copy of the gradients of its own (`core.offload.stored_kinds`), and an update without
collectives: norm, overflow and learning rate are decided where the gradients arise, and travel with them.
What it costs: one read of the masters more, when the parameters take them over. Source: Ren et al. 2021 §5.2.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from meshwright.core.errors import InputError
from meshwright.core.offload import NUM_SYNCHRONOUS_STEPS

Given = TypeVar("Given")
"""What a step hands to its update: learning rate, clip divisor, scale, and where its gradients were put."""


class DelayedUpdate(Generic[Given]):
    """Runs updates one step late, in order, in a thread.

    Step N = `num_synchronous` changes no parameters: its gradients are the first that are late.

    Args:
        update: changes masters and moments, never the parameters that a step computes with; in a thread, without
            gradients being recorded.
        adopt: parameters ← masters; in the caller's thread.
        num_synchronous: steps at first whose update is waited for.
    """

    def __init__(
        self,
        update: Callable[[Given], None],
        adopt: Callable[[], None],
        num_synchronous: int = NUM_SYNCHRONOUS_STEPS,
    ) -> None:
        if num_synchronous < 0:
            raise InputError(f"{num_synchronous} synchronous steps before the delayed update: at least 0 are needed")
        self._update, self._adopt = update, adopt
        self._num_synchronous = num_synchronous
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="delayed-update")
        self._running: Future[None] | None = None
        self.num_steps = 0
        """Steps so far, those that were skipped included."""
        self.is_pending = False
        """Whether an update was started whose result the parameters have not taken over."""

    def step(self, prepare: Callable[[], Given | None]) -> None:
        """End a step, after its backward: take over the update that ran beside it, and start this step's.

        Args:
            prepare: copies the step's gradients away and returns what belongs to them; called when no update uses the
                copies of the step before any more. None skips the update (an overflow).

        Raises what the update beside this step has raised.
        """
        self.settle()
        given = prepare()
        self._adopt_pending()
        if given is not None:
            self._running = self._thread.submit(_without_gradients, self._update, given)
            self.is_pending = True
            if self.num_steps < self._num_synchronous:
                self.finish()
        self.num_steps += 1

    def settle(self) -> None:
        """Wait for the update that runs; the parameters stay as they are. What a checkpoint needs: its parameters are
        then those that the next step computes with, its masters and moments are an update ahead."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def finish(self) -> None:
        """Wait for it, and take it over: at the end of training."""
        self.settle()
        self._adopt_pending()

    def restore(self, num_steps: int, is_pending: bool) -> None:
        """Go on from a checkpoint, with the two values that it was saved with."""
        self.settle()
        self.num_steps, self.is_pending = num_steps, is_pending

    def close(self) -> None:
        """End the thread; what runs is waited for, its failure is not raised."""
        self._thread.shutdown()
        self._running = None

    def _adopt_pending(self) -> None:
        if self.is_pending:
            self._adopt()
            self.is_pending = False


@torch.no_grad()
def _without_gradients(update: Callable[[Given], None], given: Given) -> None:
    """Whether gradients are recorded is a setting of each thread."""
    update(given)
