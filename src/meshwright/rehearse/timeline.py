"""What the ranks of one pipeline did in a run's measured step, and what the clock makes of the times they took."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.core.axes import PP, is_first_device
from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.plan import Plan
from meshwright.core.program import COMPUTE_KINDS, SEND_KINDS, Action, Kind
from meshwright.core.record import RankRecord, TracedAction
from meshwright.schedule.build import build_program
from meshwright.schedule.timeline import Event, Timeline


def measured_timeline(plan: Plan, records: Iterable[RankRecord]) -> Timeline:
    """The timeline of the pipeline of dp rank 0 and tp rank 0; the first action starts at 0.

    A receive stands where it ended, and a reduction takes no time, as on the clock's timelines: both are waited for.

    Raises:
        UnsupportedError: an asynchronous schedule.
        InputError: a rank left no trace, or one of other actions than the plan's.
    """
    if plan.strategy.pipeline_schedule.is_asynchronous:
        raise UnsupportedError(
            f"the steps of schedule `{plan.strategy.schedule}` are parts of a table without an end, and are not drawn; "
            f"`meshwright timeline {plan.strategy.schedule}` draws the table"
        )
    program = build_program(plan.strategy)
    traces = {r.coordinates[PP]: r.trace for r in records if is_first_device(r.coordinates)}
    for rank, row in enumerate(program.rows):
        found = [action for action, _, _ in traces.get(rank, ())]
        if found != [str(action) for action in row]:
            raise InputError(
                f"pipeline rank {rank} has a trace of {len(found)} actions, but the plan's program has {len(row)}; "
                "train it again to its end, with this version"
            )
    zero_s = min(start for trace in traces.values() for _, start, _ in trace)
    return Timeline(program, tuple(tuple(_event(*it, zero_s) for it in traces[rank]) for rank in sorted(traces)))


def _event(text: str, start_s: float, end_s: float, zero_s: float) -> Event:
    action = Action.parse(text)
    if action.kind in COMPUTE_KINDS or action.kind in SEND_KINDS:
        return Event(start_s - zero_s, end_s - zero_s, action)
    stands_s = (start_s if action.kind is Kind.REDUCE else end_s) - zero_s
    return Event(stands_s, stands_s, action)


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """For the clock: the median time of each kind of action at each stage. Transfers take none: work hides them."""

    durations_s: dict[tuple[Kind, int], float]

    @classmethod
    def of(cls, timeline: Timeline) -> MeasuredCosts:
        """From what was measured."""
        seen: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        for row in timeline.events:
            for start_s, end_s, action in row:
                if action.kind in COMPUTE_KINDS:
                    seen[action.kind, action.stage].append(end_s - start_s)
        return cls({key: statistics.median(times) for key, times in seen.items()})

    def duration_s(self, kind: Kind, stage: int) -> float:
        """Seconds of one action."""
        return self.durations_s.get((kind, stage), 0.0)


def traced(trace: Iterable[tuple[Action, float, float]], zero_s: float) -> tuple[TracedAction, ...]:
    """A runner's trace as a record keeps it: seconds after `zero_s`."""
    return tuple((str(action), start - zero_s, end - zero_s) for action, start, end in trace)
