"""The clock for many costs: a program's order is walked once, and replayed with other durations.

Which action may go next depends on the program alone, never on how long actions take. So the walk is written down as
a list of moves, and a replay is one pass over it: numbers alone, the same as :func:`meshwright.sim.clock.simulate`.
"""

from __future__ import annotations

from meshwright.core.program import COMPUTE_KINDS, SEND_KINDS, Action, Kind, Program
from meshwright.schedule.walk import walk
from meshwright.sim.clock import Clock, Costs, UnitCosts

_Move = tuple[int, int, int, int, int]
"""(rank, lane, time that it waits for, time that it notes, duration), the last three by index."""

_ALWAYS, _NOBODY = 0, 1
"""Indices of times: of data that is at hand from the start, and of data that nobody takes."""


class Replay:
    """Of one program, under costs that give ARM, REDUCE and UPDATE no time."""

    def __init__(self, program: Program) -> None:
        """Raises Deadlock: a rank waits for what never comes."""
        recorder = _Recorder(program)
        walk(program, recorder)
        self._moves, self._timed = recorder.moves, tuple(recorder.durations)
        self._num_lanes, self._num_ranks, self._num_times = recorder.num_lanes, program.num_ranks, recorder.num_times

    def ends_s(self, costs: Costs) -> list[float]:
        """When each rank ends its last compute action, in seconds."""
        durations_s = [costs.duration_s(kind, stage) for kind, stage in self._timed]
        free_s, known_s = [0.0] * self._num_lanes, [0.0] * self._num_times
        for rank, lane, source, sink, duration in self._moves:
            start_s, arrival_s, lane_s = free_s[rank], known_s[source], free_s[lane]
            if arrival_s > start_s:
                start_s = arrival_s
            if lane_s > start_s:
                start_s = lane_s
            free_s[lane] = known_s[sink] = start_s + durations_s[duration]
        return free_s[: self._num_ranks]


class _Recorder:
    """Goes with the clock, and writes down what took time, in the order in which it went."""

    def __init__(self, program: Program) -> None:
        self._clock = Clock(program, UnitCosts(transfer=1))
        self.moves: list[_Move] = []
        self.durations: dict[tuple[Kind, int], int] = {}
        self.num_lanes = self._clock.num_lanes
        self._first: dict[int, int] = {}
        self._num = program.num_micro_batches
        self.num_times = _NOBODY + 1

    def attempt(self, rank: int, action: Action) -> bool:
        if not self._clock.attempt(rank, action):
            return False
        if action.kind in COMPUTE_KINDS or action.kind in SEND_KINDS:
            step, k = self._clock.step(action), action.micro_batch or 0
            source = _ALWAYS if step.source is None else self._index(step.source) + k
            sink = _NOBODY if step.sink is None else self._index(step.sink) + k
            duration = self.durations.setdefault((action.kind, action.stage), len(self.durations))
            self.moves.append((rank, step.lane, source, sink, duration))
        return True

    def _index(self, times: list[float | None]) -> int:
        """Of the first of the times that the clock keeps in this list."""
        if id(times) not in self._first:
            self._first[id(times)] = self.num_times
            self.num_times += self._num
        return self._first[id(times)]
