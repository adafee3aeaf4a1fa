"""The clock: Program × costs → Timeline.

A rank does one thing at a time. Sends are asynchronous: a transfer starts when the sending rank reaches it, and a
boundary carries one transfer per direction at a time. A receive waits for the arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from meshwright.core.errors import ProgramError
from meshwright.core.program import RECV_KINDS, SEND_KINDS, Action, Kind, Program
from meshwright.schedule.timeline import Event, Timeline
from meshwright.schedule.walk import walk

__all__ = ["Costs", "Event", "StageCosts", "Timeline", "UnitCosts", "simulate"]


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


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds per stage, and per boundary between stages i and i+1."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    transfer_s: Sequence[float]
    """One less than stages; both directions carry the same bytes."""
    reduce_s: Sequence[float] = ()
    """What the REDUCE of each stage still takes after its last backward; empty for none."""

    def duration_s(self, kind: Kind, stage: int) -> float:
        match kind:
            case Kind.F:
                return self.forward_s[stage]
            case Kind.B:
                return self.backward_s[stage]
            case Kind.SEND_F:
                return self.transfer_s[stage]
            case Kind.SEND_B:
                return self.transfer_s[stage - 1]
            case Kind.REDUCE if self.reduce_s:
                return self.reduce_s[stage]
        return 0


def simulate(program: Program, costs: Costs) -> Timeline:
    """Time of each action under `costs`.

    A program without any SEND is timed as if data crossed ranks at no cost.

    Raises:
        Deadlock: a rank waits for what never comes.
    """
    clock = _Clock(program, costs)
    walk(program, clock)
    return Timeline(program, tuple(tuple(row) for row in clock.events))


class _Clock:
    """`_input[F][stage][k]` is when stage's activation input of micro-batch k is at hand, `_input[B]` its gradient."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.events: list[list[Event]] = [[] for _ in program.rows]
        self._now = [0.0] * program.num_ranks
        self._durations = _durations(program, costs)
        self._link_free_s = {kind: [0.0] * program.num_stages for kind in SEND_KINDS}
        self._direct = _direct_edges(program)
        unknown: list[float | None] = [None] * program.num_micro_batches
        self._input = {kind: [unknown[:] for _ in program.stage_ranks] for kind in (Kind.F, Kind.B)}
        self._input[Kind.F][0] = [0.0] * program.num_micro_batches
        self._last = program.num_stages - 1

    def attempt(self, rank: int, action: Action) -> bool:
        kind, k = action.kind, action.micro_batch
        if k is None:
            return self._record(rank, self._now[rank], self._durations[kind][action.stage], action)
        if kind is Kind.F or kind is Kind.B:
            return self._compute(rank, action, kind, k)
        if kind is Kind.SEND_F or kind is Kind.SEND_B:
            return self._send(rank, action, kind, k)
        return self._receive(rank, action, Kind.F if kind is Kind.RECV_F else Kind.B, k)

    def _compute(self, rank: int, action: Action, kind: Kind, k: int) -> bool:
        ready = self._input[kind][action.stage][k]
        if ready is None:
            return False
        self._record(rank, max(self._now[rank], ready), self._durations[kind][action.stage], action)
        after = self._direct[kind][action.stage]
        if after is not None:
            self._input[after[0]][after[1]][k] = self._now[rank]
        return True

    def _send(self, rank: int, action: Action, kind: Kind, k: int) -> bool:
        """The rank goes on at once; the boundary is taken for the transfer's duration."""
        stage, free = action.stage, self._link_free_s[kind]
        start = max(self._now[rank], free[stage])
        free[stage] = end = start + self._durations[kind][stage]
        carried, to = (Kind.F, stage + 1) if kind is Kind.SEND_F else (Kind.B, stage - 1)
        self._input[carried][to][k] = end
        self.events[rank].append(Event(start, end, action))
        return True

    def _receive(self, rank: int, action: Action, carried: Kind, k: int) -> bool:
        arrival = self._input[carried][action.stage][k]
        if arrival is None:
            return False
        return self._record(rank, self._now[rank], max(0.0, arrival - self._now[rank]), action)

    def _record(self, rank: int, start_s: float, duration_s: float, action: Action) -> bool:
        end = start_s + duration_s
        self._now[rank] = end
        self.events[rank].append(Event(start_s, end, action))
        return True


def _durations(program: Program, costs: Costs) -> dict[Kind, list[float]]:
    """`[kind][stage]`: each asked once, only for what the program does."""
    durations = {kind: [0.0] * program.num_stages for kind in Kind}
    for kind, stage in {(action.kind, action.stage) for row in program.rows for action in row}:
        if kind in RECV_KINDS:
            continue
        seconds = costs.duration_s(kind, stage)
        if not seconds >= 0:
            raise ProgramError(f"{program.name}: {kind}@{stage} costs {seconds} s; a duration is 0 or more")
        durations[kind][stage] = seconds
    return durations


def _direct_edges(program: Program) -> dict[Kind, list[tuple[Kind, int] | None]]:
    """`[kind][stage]`: whose input is at hand as soon as the action ends, without a transfer.

    At the last stage the way turns round: its backward starts from its own forward.
    """
    ranks, last = program.stage_ranks, program.num_stages - 1
    bare = not any(action.kind in SEND_KINDS for row in program.rows for action in row)
    up: list[tuple[Kind, int] | None] = [
        (Kind.F, stage + 1) if bare or ranks[stage] == ranks[stage + 1] else None for stage in range(last)
    ]
    down: list[tuple[Kind, int] | None] = [
        (Kind.B, stage - 1) if bare or ranks[stage] == ranks[stage - 1] else None for stage in range(1, last + 1)
    ]
    return {Kind.F: [*up, (Kind.B, last)], Kind.B: [None, *down]}
