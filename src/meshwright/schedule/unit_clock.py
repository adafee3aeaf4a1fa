"""The textbook clock: F, I and W take 1, B takes 2, nothing else takes time. Numbers transfers and draws programs."""

from __future__ import annotations

from meshwright.core.program import Action, Kind, Program
from meshwright.schedule.timeline import Event, Timeline
from meshwright.schedule.walk import walk

SLOTS = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}


def unit_timeline(program: Program) -> Timeline:
    """Time of each action in slots; works with or without transfers. Raises Deadlock."""
    clock = _UnitClock(program)
    walk(program, clock)
    return Timeline(program, tuple(tuple(row) for row in clock.events))


class _UnitClock:
    """Data is where it is needed as soon as it is made. `ready[stage][micro-batch]` is that time."""

    def __init__(self, program: Program) -> None:
        self.events: list[list[Event]] = [[] for _ in program.rows]
        self._now = [0] * program.num_ranks
        stages, num = range(program.num_stages), program.num_micro_batches
        self._above = [program.next_stage(stage) for stage in stages]
        self._below = [program.previous_stage(stage) for stage in stages]
        self._ready_f: list[list[int | None]] = [[0 if self._below[stage] is None else None] * num for stage in stages]
        self._ready_b: list[list[int | None]] = [[None] * num for _ in stages]

    def attempt(self, rank: int, action: Action) -> bool:
        start = self._now[rank]
        end = start
        k, stage, kind = action.micro_batch, action.stage, action.kind
        if k is not None and kind in SLOTS:
            if kind is not Kind.W:
                ready = (self._ready_f if kind is Kind.F else self._ready_b)[stage][k]
                if ready is None:
                    return False
                start = max(start, ready)
            end = start + SLOTS[kind]
            self._pass_on(kind, stage, k, end)
        self._now[rank] = end
        self.events[rank].append(Event(start, end, action))
        return True

    def _pass_on(self, kind: Kind, stage: int, k: int, end: int) -> None:
        """At the last stage the way turns round: its backward follows its forward."""
        above, below = self._above[stage], self._below[stage]
        if kind is Kind.F:
            if above is None:
                self._ready_b[stage][k] = end
            else:
                self._ready_f[above][k] = end
        elif kind is not Kind.W and below is not None:
            self._ready_b[below][k] = end
