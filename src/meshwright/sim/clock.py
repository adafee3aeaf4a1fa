"""The clock: Program × costs → Timeline.

A rank does one thing at a time. Sends are asynchronous: a transfer starts when the sending rank reaches it, and a
boundary carries one transfer per direction at a time. A receive waits for the arrival.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from meshwright.core.errors import ProgramError
from meshwright.core.program import RECV_KINDS, SEND_KINDS, Action, Kind, Program
from meshwright.schedule.timeline import Event, Timeline
from meshwright.schedule.walk import walk


class Costs(Protocol):
    """How long actions take."""

    def duration_s(self, kind: Kind, stage: int) -> float:
        """Seconds of one action of `kind` at `stage`, equal for all micro-batches.

        For SEND_F it is the transfer from `stage` to `stage + 1`, for SEND_B that to `stage − 1`. RECV is not asked.
        """
        ...


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Equal stages. The defaults are the textbook's: F=1, B=2, transfers free."""

    forward: float = 1
    backward: float = 2
    transfer: float = 0

    def duration_s(self, kind: Kind, stage: int) -> float:
        if kind in SEND_KINDS:
            return self.transfer
        return {Kind.F: self.forward, Kind.B: self.backward}.get(kind, 0)


def simulate(program: Program, costs: Costs) -> Timeline:
    """Time of each action under `costs`.

    A program without any SEND is timed as if data crossed ranks at no cost.

    Raises:
        Deadlock: a rank waits for what never comes.
    """
    clock = _Clock(program, costs)
    walk(program, clock)
    return Timeline(program, tuple(tuple(row) for row in clock.events))


@dataclass(frozen=True, slots=True)
class _Step:
    """What actions of one kind and stage do, for the clock. Times are listed by micro-batch."""

    duration_s: float
    lane: int
    """What is busy meanwhile: the rank, or for a SEND one direction of a boundary."""
    source: list[float | None] | None
    """When the data it needs is at hand; None where it needs none from elsewhere."""
    sink: list[float | None] | None
    """Where it notes that its data is at hand; None where nobody takes it from here."""


class _Clock:
    """Every action starts when its rank reaches it, its data is at hand and its lane is free."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.events: list[list[Event]] = [[] for _ in program.rows]
        self._steps = _steps(program, costs)
        self._free_s = [0.0] * (program.num_ranks + 2 * program.num_stages)

    def attempt(self, rank: int, action: Action) -> bool:
        step = self._steps[action.stage][action.kind]
        free = self._free_s
        start = free[rank]
        if step.source is not None:
            arrival = step.source[action.micro_batch or 0]
            if arrival is None:
                return False
            start = max(start, arrival)
        start = max(start, free[step.lane])
        free[step.lane] = end = start + step.duration_s
        if step.sink is not None:
            step.sink[action.micro_batch or 0] = end
        self.events[rank].append(Event(start, end, action))
        return True


def _steps(program: Program, costs: Costs) -> list[dict[Kind, _Step]]:
    """`[stage][kind]`. At the last stage the way turns round: its backward starts from its own forward."""
    ranks, last = program.stage_ranks, program.num_stages - 1
    inputs = [_unknown(program) for _ in program.stage_ranks]
    gradients = [_unknown(program) for _ in program.stage_ranks]
    bare = not any(action.kind in SEND_KINDS for row in program.rows for action in row)
    durations = _durations(program, costs)

    def steps(stage: int) -> dict[Kind, _Step]:
        rank = ranks[stage]
        lanes = {Kind.SEND_F: program.num_ranks + 2 * stage, Kind.SEND_B: program.num_ranks + 2 * stage + 1}
        into = inputs[stage] if stage > 0 else None
        up = inputs[stage + 1] if stage < last else None
        down = gradients[stage - 1] if stage > 0 else None
        up_direct = up if stage < last and (bare or ranks[stage + 1] == rank) else None
        down_direct = down if stage > 0 and (bare or ranks[stage - 1] == rank) else None
        flows: dict[Kind, tuple[list[float | None] | None, list[float | None] | None]] = {
            Kind.F: (into, up_direct if stage < last else gradients[stage]),
            Kind.B: (gradients[stage], down_direct),
            Kind.SEND_F: (None, up),
            Kind.SEND_B: (None, down),
            Kind.RECV_F: (into, None),
            Kind.RECV_B: (gradients[stage], None),
        }
        return {
            kind: _Step(durations[stage].get(kind, 0.0), lanes.get(kind, rank), *flows.get(kind, (None, None)))
            for kind in Kind
        }

    return [steps(stage) for stage in range(program.num_stages)]


def _unknown(program: Program) -> list[float | None]:
    return [None] * program.num_micro_batches


def _durations(program: Program, costs: Costs) -> list[dict[Kind, float]]:
    """`[stage][kind]`: each asked once, only for what the program does."""
    durations: list[dict[Kind, float]] = [{} for _ in program.stage_ranks]
    for kind, stage in {(action.kind, action.stage) for row in program.rows for action in row}:
        seconds = 0.0 if kind in RECV_KINDS else costs.duration_s(kind, stage)
        if not seconds >= 0:
            raise ProgramError(f"{program.name}: {kind}@{stage} costs {seconds} s; a duration is 0 or more")
        durations[stage][kind] = seconds
    return durations
