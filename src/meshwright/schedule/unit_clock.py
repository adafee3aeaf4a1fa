"""The textbook clock: F takes 1, B takes 2, nothing else takes time. Numbers transfers and draws programs."""

from __future__ import annotations

from meshwright.core.program import Action, Kind, Program
from meshwright.schedule.timeline import Event, Timeline
from meshwright.schedule.walk import walk

FORWARD_SLOTS = 1
BACKWARD_SLOTS = 2


def unit_timeline(program: Program) -> Timeline:
    """Time of each action in slots; works with or without transfers. Raises Deadlock."""
    clock = _UnitClock(program)
    walk(program, clock)
    return Timeline(program, tuple(tuple(row) for row in clock.events))


class _UnitClock:
    """Data is where it is needed as soon as it is made. `ready[kind][stage][micro-batch]` is that time."""

    def __init__(self, program: Program) -> None:
        self.events: list[list[Event]] = [[] for _ in program.rows]
        self._now = [0] * program.num_ranks
        self._last = program.num_stages - 1
        num = program.num_micro_batches
        self._ready_f: list[list[int | None]] = [[None] * num for _ in program.stage_ranks]
        self._ready_b: list[list[int | None]] = [[None] * num for _ in program.stage_ranks]
        self._ready_f[0] = [0] * num

    def attempt(self, rank: int, action: Action) -> bool:
        start = self._now[rank]
        end = start
        k, stage = action.micro_batch, action.stage
        if k is not None and (action.kind is Kind.F or action.kind is Kind.B):
            forward = action.kind is Kind.F
            ready = (self._ready_f if forward else self._ready_b)[stage][k]
            if ready is None:
                return False
            start = max(start, ready)
            end = start + (FORWARD_SLOTS if forward else BACKWARD_SLOTS)
            self._pass_on(forward, stage, k, end)
        self._now[rank] = end
        self.events[rank].append(Event(start, end, action))
        return True

    def _pass_on(self, forward: bool, stage: int, k: int, end: int) -> None:
        """At the last stage the way turns round: its backward follows its forward."""
        if not forward:
            if stage > 0:
                self._ready_b[stage - 1][k] = end
        elif stage < self._last:
            self._ready_f[stage + 1][k] = end
        else:
            self._ready_b[stage][k] = end
