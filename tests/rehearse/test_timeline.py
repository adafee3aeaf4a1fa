"""The measured timeline: the run's own times, what it refuses, and what the clock makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.core.errors import InputError
from meshwright.core.measures import MemoryBreakdown, Traffic
from meshwright.core.program import COMPUTE_KINDS, Kind
from meshwright.core.record import RankRecord
from meshwright.rehearse.timeline import MeasuredCosts, measured_timeline, traced
from meshwright.schedule.build import build_program
from meshwright.sim.clock import UnitCosts, simulate
from tests.parallel.layouts import llama, make_plan

PLAN = make_plan(llama(num_layers=3), pp=3, num_micro_batches=4)
LATE_S = 7.0


def records() -> list[RankRecord]:
    """As if the ranks had taken the clock's times, from `LATE_S` on; sends and waits cost what transfers do."""
    timeline = simulate(build_program(PLAN.strategy), UnitCosts(transfer=0.25))
    empty = MemoryBreakdown(0, 0, 0, 0, 0)
    found = []
    for rank, row in enumerate(timeline.events):
        trace = traced(((action, start + 100, end + 100) for start, end, action in row), 100 - LATE_S)
        found.append(RankRecord(rank, {"pp": rank, "dp": 0, "tp": 0}, empty, Traffic(), trace=trace))
    return found


def test_it_is_what_the_ranks_did_from_zero_on():
    measured, clock = (
        measured_timeline(PLAN, records()),
        simulate(build_program(PLAN.strategy), UnitCosts(transfer=0.25)),
    )
    for found, expected in zip(measured.events, clock.events, strict=True):
        assert [event.action for event in found] == [event.action for event in expected]
        for event, right in zip(found, expected, strict=True):
            if event.action.kind in COMPUTE_KINDS:
                assert (event.start_s, event.end_s) == pytest.approx((right.start_s, right.end_s))
    assert measured.makespan_s == pytest.approx(clock.makespan_s)
    assert measured.busy_s == pytest.approx(clock.busy_s)


def test_waiting_is_not_work():
    """A receive that lasts long does not make its rank busy."""
    first, *rest = records()
    late = tuple(
        (action, start - 1, end) if action.startswith(("RECV", "REDUCE")) else (action, start, end)
        for action, start, end in first.trace
    )
    assert measured_timeline(PLAN, [replace(first, trace=late), *rest]).busy_s[0] == pytest.approx(12.0)


def test_the_clock_under_measured_times():
    costs = MeasuredCosts.of(measured_timeline(PLAN, records()))
    assert costs.duration_s(Kind.F, 1) == pytest.approx(1.0)
    assert costs.duration_s(Kind.B, 2) == pytest.approx(2.0)
    assert costs.duration_s(Kind.SEND_F, 0) == 0
    assert simulate(build_program(PLAN.strategy), costs).makespan_s == pytest.approx(18.0)


def test_a_run_without_traces_is_refused():
    first, *rest = records()
    with pytest.raises(InputError, match=r"pipeline rank 0 has a trace of 0 actions, but .* train it again"):
        measured_timeline(PLAN, [replace(first, trace=()), *rest])
    with pytest.raises(InputError, match="pipeline rank 2 has a trace of 0 actions"):
        measured_timeline(PLAN, [first, rest[0]])
