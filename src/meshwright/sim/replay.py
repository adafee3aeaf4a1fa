"""The clock for many costs: a program's order is walked once, and replayed with other durations.

Which action may go next depends on the program alone, never on how long actions take. So the walk is written down as
a list of moves, and a replay is one pass over it: numbers alone, the same as :func:`meshwright.sim.clock.simulate`.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.program import COMPUTE_KINDS, SEND_KINDS, Action, Kind, Program
from meshwright.schedule.walk import walk
from meshwright.sim.clock import Costs, lanes_of

_Move = tuple[int, int, int, int, int]
"""(rank, lane, time that it waits for, time that it notes, duration), the last three by index."""

_ALWAYS, _NOBODY = 0, 1
"""Indices of times: of data that is at hand from the start, and of data that nobody takes."""


class Replay:
    """Of one program, under costs that give ARM, REDUCE and UPDATE no time."""

    def __init__(self, program: Program) -> None:
        """Of a program that has no transfers yet, each goes right behind what it sends, as `add_transfers` puts it.

        Raises Deadlock: a rank waits for what never comes.
        """
        recorder = _Recorder(program)
        walk(program, recorder)
        self._moves, self._timed = recorder.moves, tuple(recorder.durations)
        self._num_lanes, self._num_ranks, self._num_times = (
            recorder.num_lanes,
            program.num_ranks,
            len(recorder.is_there),
        )

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


@dataclass(frozen=True, slots=True)
class _Step:
    """What actions of one kind and stage do. Times are those of micro-batch 0; the others' follow."""

    lane: int
    """What is busy meanwhile: the rank, or the link to another rank."""
    source: int
    """The time that they wait for."""
    sink: int
    """The time that they note."""
    duration: int
    then: _Step | None = None
    """The sending of what they made, where the program leaves it open."""


class _Recorder:
    """Goes as the clock does, and writes down what takes time, in the order in which it goes."""

    def __init__(self, program: Program) -> None:
        self._program, self._ranks = program, program.stage_ranks
        self.durations: dict[tuple[Kind, int], int] = {}
        self.moves: list[_Move] = []
        self._num = num = program.num_micro_batches
        self._lanes = lanes_of(program)
        self.num_lanes = program.num_ranks + len(self._lanes)
        self.is_there = bytearray(_NOBODY + 1 + 2 * program.num_stages * num)
        self.is_there[_ALWAYS] = 1
        kinds = {action.kind for row in program.rows for action in row}
        self._sends = not kinds.isdisjoint(SEND_KINDS)
        self._steps = [self._steps_of(stage, kinds) for stage in range(program.num_stages)]

    def attempt(self, rank: int, action: Action) -> bool:
        step = self._steps[action.stage].get(action.kind)
        if step is None:
            return True
        k, is_there = action.micro_batch or 0, self.is_there
        source = step.source + k if step.source > _NOBODY else step.source
        if not is_there[source]:
            return False
        doing: _Step | None = step
        while doing:
            sink = doing.sink + k if doing.sink > _NOBODY else doing.sink
            self.moves.append((rank, doing.lane, source, sink, doing.duration))
            is_there[sink] = 1
            source, doing = _ALWAYS, doing.then
        return True

    def _steps_of(self, stage: int, kinds: set[Kind]) -> dict[Kind, _Step]:
        """At the last stage the way turns round: its backward starts from its own forward."""
        above, below = self._program.next_stage(stage), self._program.previous_stage(stage)
        into = _ALWAYS if below is None else self._input(stage)
        out = self._gradient(stage) if above is None else self._input(above)
        back = _NOBODY if below is None else self._gradient(below)
        steps: dict[Kind, _Step] = {}
        for kind in kinds.intersection(COMPUTE_KINDS):
            if kind is Kind.F:
                steps[kind] = self._step(kind, Kind.SEND_F, stage, above, into, out)
            elif kind is Kind.W:
                steps[kind] = _Step(self._ranks[stage], _ALWAYS, _NOBODY, self._duration(kind, stage))
            else:
                steps[kind] = self._step(kind, Kind.SEND_B, stage, below, self._gradient(stage), back)
        for kind, to, sink in ((Kind.SEND_F, above, out), (Kind.SEND_B, below, back)):
            if self._sends and to is not None:
                steps[kind] = self._send(kind, stage, to, sink)
        return steps

    def _step(self, kind: Kind, send: Kind, stage: int, to: int | None, source: int, sink: int) -> _Step:
        """Of compute actions, of which stage `to` takes what they make."""
        rank, duration = self._ranks[stage], self._duration(kind, stage)
        if to is None or self._ranks[to] == rank:
            return _Step(rank, source, sink, duration)
        return _Step(rank, source, _NOBODY, duration, None if self._sends else self._send(send, stage, to, sink))

    def _send(self, kind: Kind, stage: int, to: int, sink: int) -> _Step:
        rank = self._ranks[stage]
        return _Step(self._lanes.get((rank, self._ranks[to]), rank), _ALWAYS, sink, self._duration(kind, stage))

    def _duration(self, kind: Kind, stage: int) -> int:
        return self.durations.setdefault((kind, stage), len(self.durations))

    def _input(self, stage: int) -> int:
        return _NOBODY + 1 + stage * self._num

    def _gradient(self, stage: int) -> int:
        return self._input(self._program.num_stages + stage)
