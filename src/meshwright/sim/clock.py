"""The clock: Program × costs → Timeline.

A rank does one thing at a time. Sends are asynchronous: a transfer starts when the sending rank reaches it, and the
link from one rank to another carries one transfer at a time. What is received is waited for where it is used. Stages
of one rank hand over at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from meshwright.core.errors import ProgramError
from meshwright.core.program import INPUT_GRADIENT_KINDS, RECV_KINDS, SEND_KINDS, Action, Kind, Program
from meshwright.schedule.timeline import Event, Timeline
from meshwright.schedule.walk import walk


class Costs(Protocol):
    """How long actions take."""

    def duration_s(self, kind: Kind, stage: int) -> float:
        """Seconds of one action of `kind` at `stage`, equal for all micro-batches.

        For SEND_F it is the transfer from `stage` to `stage + 1`, for SEND_B that to `stage − 1`. RECV is not asked.
        I and W together are B.
        """
        ...


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Equal stages. The defaults are the textbook's: F=1, B=2, of which I=1 and W=1, transfers free."""

    forward: float = 1
    backward: float = 2
    transfer: float = 0
    weight_share: float = 0.5
    """W's share of a backward; I takes the rest."""

    def duration_s(self, kind: Kind, stage: int) -> float:
        match kind:
            case Kind.F:
                return self.forward
            case Kind.B:
                return self.backward
            case Kind.I:
                return self.backward * (1 - self.weight_share)
            case Kind.W:
                return self.backward * self.weight_share
            case Kind.SEND_F | Kind.SEND_B:
                return self.transfer
        return 0


def simulate(program: Program, costs: Costs) -> Timeline:
    """Time of each action under `costs`.

    A program without any SEND is timed as if data crossed ranks at no cost.

    Raises:
        Deadlock: a rank waits for what never comes.
    """
    clock = Clock(program, costs)
    walk(program, clock)
    return Timeline(program, tuple(tuple(row) for row in clock.events))


@dataclass(frozen=True, slots=True)
class _Step:
    """What actions of one kind and stage do, for the clock. Times are listed by micro-batch."""

    duration_s: float
    lane: int
    """What is busy meanwhile: the rank, or for a SEND the link to the other rank."""
    source: list[float | None] | None
    """When the data it needs is at hand; None where it needs none from elsewhere."""
    sink: list[float | None] | None
    """Where it notes that its data is at hand; None where nobody takes it from here."""


class Clock:
    """Every action starts when its rank reaches it, its data is at hand and its lane is free. The machine that
    :func:`simulate` walks with."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.events: list[list[Event]] = [[] for _ in program.rows]
        lanes = lanes_of(program)
        self._steps = _steps(program, costs, lanes)
        self._free_s = [0.0] * (program.num_ranks + len(lanes))

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


def lanes_of(program: Program) -> dict[tuple[int, int], int]:
    """(sending rank, receiving rank) → lane, for each link that the stages' boundaries use; behind the ranks' own."""
    ranks = program.stage_ranks
    ways = ((ranks[a], ranks[b]) for a in range(program.num_stages) if (b := program.next_stage(a)) is not None)
    links = dict.fromkeys(link for way in ways for link in (way, way[::-1]))
    return {link: program.num_ranks + index for index, link in enumerate(links)}


def _steps(program: Program, costs: Costs, lanes: dict[tuple[int, int], int]) -> list[dict[Kind, _Step]]:
    """`[stage][kind]`. At the last stage the way turns round: its backward starts from its own forward."""
    ranks = program.stage_ranks
    inputs = [_unknown(program) for _ in ranks]
    gradients = [_unknown(program) for _ in ranks]
    bare = not any(action.kind in SEND_KINDS for row in program.rows for action in row)
    durations = _durations(program, costs)

    def steps(stage: int) -> dict[Kind, _Step]:
        rank, above, below = ranks[stage], program.next_stage(stage), program.previous_stage(stage)
        into = None if below is None else inputs[stage]
        up = None if above is None else inputs[above]
        down = None if below is None else gradients[below]
        to_above, to_below = (rank if to is None else ranks[to] for to in (above, below))
        up_direct = up if bare or to_above == rank else None
        down_direct = down if bare or to_below == rank else None
        flows: dict[Kind, tuple[list[float | None] | None, list[float | None] | None]] = {
            Kind.F: (into, gradients[stage] if above is None else up_direct),
            **dict.fromkeys(INPUT_GRADIENT_KINDS, (gradients[stage], down_direct)),
            Kind.SEND_F: (None, up),
            Kind.SEND_B: (None, down),
        }
        lane = {Kind.SEND_F: lanes.get((rank, to_above), rank), Kind.SEND_B: lanes.get((rank, to_below), rank)}
        return {
            kind: _Step(durations[stage].get(kind, 0.0), lane.get(kind, rank), *flows.get(kind, (None, None)))
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
