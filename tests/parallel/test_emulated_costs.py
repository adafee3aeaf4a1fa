"""The clock against real ranks: the runtime's rows, with real messages, where every action takes what it is said to.

Ranks sleep until an action's time is over, so that they may share cores, and bubbles are seen all the same. That a step
takes no longer than the clock says is a matter of what else the machine does, and is asked for with `--timed`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from meshwright.comm.collectives import barrier
from meshwright.core.axes import WORLD
from meshwright.core.plan import Plan
from meshwright.core.program import COMPUTE_KINDS, Action, Kind
from meshwright.core.schedule import schedules
from meshwright.run.engine import Engine
from meshwright.schedule.build import build_program
from meshwright.sim.clock import simulate
from tests.parallel.layouts import llama, make_plan
from tests.parallel.runs import SGD, counted_batches, make_engine

SYNCHRONOUS = tuple(name for name, schedule in schedules().items() if not schedule.is_asynchronous)
QUICK = ("1f1b", "zb-h1", "dualpipe")
TOLERANCE = 0.05
Makespans = dict[str, tuple[float, float]]
"""Schedule → when this rank began and ended its computing, on the clock that all ranks of a machine share."""


@dataclass(frozen=True)
class Emulated:
    """Seconds of each action; stages differ, and I and W are not halves."""

    forward_s: float = 0.04
    input_share: float = 0.45

    def duration_s(self, kind: Kind, stage: int) -> float:
        forward_s = self.forward_s * (1 + 0.15 * (stage % 3))
        shares = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 2 * self.input_share, Kind.W: 2 * (1 - self.input_share)}
        return forward_s * shares.get(kind, 0.0)


TOLD = Emulated()


def emulated_plan(name: str, num_ranks: int) -> Plan:
    """As few micro-batches as there is a timetable for; of `naive`, whose ranks take turns, even fewer."""
    schedule = schedules()[name]
    chunks = schedule.chunks or 2
    fits = (
        m
        for m in (num_ranks, 2 * num_ranks)
        if not (schedule.fault and schedule.fault(schedule.size(num_ranks, m, chunks)))
    )
    return make_plan(
        llama(num_layers=chunks * num_ranks),
        pp=num_ranks,
        schedule=name,
        num_chunks=chunks if schedule.chunks is None else 1,
        num_micro_batches=2 if name == "naive" else next(fits),
    )


def clock_s(schedule: str, num_ranks: int, told: Emulated = TOLD) -> float:
    """What the clock says that a step takes."""
    return simulate(build_program(emulated_plan(schedule, num_ranks).strategy), told).makespan_s


def lasting(engine: Engine, costs: Emulated) -> None:
    """From now on an action of the engine that computes lasts as long as it is said to."""
    runner = engine.parallel.runner

    def stretched(do: Callable[[Any, Action], None], step: Any, action: Action) -> None:
        ends_s = time.perf_counter() + costs.duration_s(action.kind, action.stage)
        do(step, action)
        time.sleep(max(0.0, ends_s - time.perf_counter()))

    for kind in COMPUTE_KINDS:
        runner._do[kind] = lambda step, action, do=runner._do[kind]: stretched(do, step, action)


def spans(rank: int, world: int, names: Sequence[str], costs: Emulated) -> Makespans:
    """Of one step of each schedule, after an unmeasured one."""
    found = {}
    for name in names:
        plan = emulated_plan(name, world)
        engine = make_engine(plan, SGD)
        batches = counted_batches(plan.model, [5] * plan.strategy.num_micro_batches)
        engine.forward_backward(batches)
        engine.parallel.zero_gradients()
        lasting(engine, costs)
        engine.parallel.runner.trace = trace = []
        barrier(engine.mesh[WORLD])
        engine.forward_backward(batches)
        computing = [(start, end) for action, start, end in trace if action.kind in COMPUTE_KINDS]
        found[name] = computing[0][0], computing[-1][1]
        engine.close()
    return found


def ratios(
    ranks: Callable[..., list[Any]], world: int, names: Sequence[str], costs: Emulated = TOLD, told: Emulated = TOLD
) -> dict[str, float]:
    """Schedule → makespan of ranks whose actions cost `costs` / that of the clock, which is told `told`."""
    by_rank: list[Makespans] = ranks(spans, world, names, costs, timeout_s=100)
    found = {}
    for name in names:
        began, ended = zip(*(spans[name] for spans in by_rank), strict=True)
        found[name] = (max(ended) - min(began)) / clock_s(name, world, told)
    return found


def off(found: dict[str, float]) -> dict[str, float]:
    """Those that are not what the clock says."""
    return {name: ratio for name, ratio in found.items() if abs(ratio - 1) > TOLERANCE}


def test_no_step_is_faster_than_its_actions(ranks: Callable[..., list[Any]]) -> None:
    """The runtime does what the clock times: an order that left something out, or did it elsewhere, would be faster."""
    short = Emulated(forward_s=0.01)
    assert min(ratios(ranks, 4, QUICK, short, short).values()) > 0.999


@pytest.mark.timed
@pytest.mark.parametrize("names", [SYNCHRONOUS[:4], SYNCHRONOUS[4:7], SYNCHRONOUS[7:]], ids=" ".join)
@pytest.mark.parametrize("world", [4, 8])
def test_a_step_takes_what_the_clock_says(ranks: Callable[..., list[Any]], world: int, names: list[str]) -> None:
    found = ratios(ranks, world, names)
    if late := off(found):  # another process may have taken a core; once more
        again = ratios(ranks, world, list(late))
        found |= {name: min(late[name], again[name]) for name in again}
    assert not off(found)


@pytest.mark.timed
def test_ranks_that_take_longer_than_the_clock_was_told_are_seen(ranks: Callable[..., list[Any]]) -> None:
    assert off(ratios(ranks, 4, ("zb-h1",), Emulated(forward_s=1.08 * TOLD.forward_s)))


def test_these_costs_tell_schedules_apart() -> None:
    assert clock_s("zb-h1", 4) < 0.8 * clock_s("1f1b", 4)
