"""Timeline: a Program with the time of each action; what clocks return and drawings read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshwright.core.program import SEND_KINDS, Action, Program
from meshwright.schedule.liveness import peak_live


class Event(NamedTuple):
    """One action in time. A SEND's span is the transfer, beside the rank's work; a RECV stands at the arrival."""

    start_s: float
    end_s: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """When each action of a program runs. `events[rank]` stands in the order of `program.rows[rank]`."""

    program: Program
    events: tuple[tuple[Event, ...], ...]

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the first action to the end of the last."""
        return max((event.end_s for row in self.events for event in row), default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds each rank works: everything but transfers and waiting."""
        return tuple(
            sum(end - start for start, end, action in row if action.kind not in SEND_KINDS) for row in self.events
        )

    @property
    def rank_bubbles(self) -> tuple[float, ...]:
        """Idle share of the makespan, per rank."""
        return tuple(1 - busy / self.makespan_s if self.makespan_s else 0.0 for busy in self.busy_s)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the makespan over all ranks: (p−1)/(m+p−1) for 1F1B and GPipe on equal stages."""
        return sum(self.rank_bubbles) / self.program.num_ranks

    @property
    def peak_live(self) -> tuple[int, ...]:
        """Micro-batch activations alive at once, per rank (:func:`~meshwright.schedule.liveness.peak_live`)."""
        return peak_live(self.program)
