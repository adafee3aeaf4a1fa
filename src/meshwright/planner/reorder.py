"""The winner under the schedules that are not searched: would one of them be faster, and what would it hold?

Schedules of several stages per rank, or with split backwards, are timed by the clock for each size. So they are not
offered for every strategy; the winner's degrees, micro-batches and ZeRO stage are tried with each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.core.cluster import ClusterSpec
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.rules import violations
from meshwright.core.schedule import Schedule, schedules
from meshwright.core.strategy import Strategy
from meshwright.planner.balance import balanced
from meshwright.planner.enumerate import chunk_choices
from meshwright.planner.must import Must, broken
from meshwright.planner.price import Forecast, Pricer, num_cells

MAX_CELLS = 2**12
"""Stages × micro-batches of a timetable that is tried."""
LEAST_GAIN = 0.005
"""Share of the step below which another schedule is not worth a word."""


@dataclass(frozen=True, slots=True)
class Reordered:
    """A faster order of the same work."""

    forecast: Forecast
    gain: float
    """Share of the winner's step that it saves."""
    more_bytes: int
    """What it holds more than the winner; less, if below 0."""


def faster_order(winner: Forecast, pricer: Pricer, musts: Sequence[Must] = ()) -> Reordered | None:
    """The fastest that fits among the winner's other schedules; None where there is none worth a word."""
    if winner.strategy.pp == 1 or not winner.simulated:
        return None
    others = _others(winner.strategy, pricer.model, pricer.cluster, pricer.job)
    best = _fastest(winner, others, pricer, musts)
    gain = 1 - best.step_time.total_s / winner.step_time.total_s
    more_bytes = best.memory.total_bytes - winner.memory.total_bytes
    return Reordered(best, gain, more_bytes) if gain >= LEAST_GAIN else None


def in_order_of(winner: Strategy, other: Forecast, pricer: Pricer, musts: Sequence[Must] = ()) -> Forecast:
    """`other` under the winner's schedule, if that was not searched, and makes it faster, and fits."""
    if winner.pp == 1 or other.strategy.pp == 1 or _is_searched(winner.pipeline_schedule, pricer.cluster):
        return other
    ways = _under(winner.schedule, winner.num_chunks, other.strategy, pricer.model, pricer.cluster, pricer.job)
    return _fastest(other, ways, pricer, musts)


def _fastest(known: Forecast, ways: Iterable[Strategy], pricer: Pricer, musts: Sequence[Must]) -> Forecast:
    """`known`, or that of `ways` which keeps `musts`, fits, and is faster by the clock. A forecast is a lower bound on
    what the clock finds: what is no faster by it is not looked at, neither its memory nor its timetable."""
    kept = [s for s in ways if broken(musts, s) is None]
    best = known
    for bound_s, _, strategy in sorted((pricer.step_time(s).total_s, at, s) for at, s in enumerate(kept)):
        if bound_s >= best.step_time.total_s:
            break
        forecast = pricer.forecast(strategy)
        if forecast.fits:
            best = min(best, pricer.simulate(forecast), key=lambda f: (f.step_time.total_s, f.memory.total_bytes))
    return best


def _is_searched(schedule: Schedule, cluster: ClusterSpec) -> bool:
    return schedule.is_offered or (schedule.fills_bubbles and cluster.backend != "gloo")


def _others(winner: Strategy, model: ModelSpec, cluster: ClusterSpec, job: Job) -> Iterator[Strategy]:
    for name, schedule in schedules().items():
        if _is_searched(schedule, cluster) or schedule.is_asynchronous:
            continue
        for chunks in chunk_choices(schedule, winner.pp, model.num_layers):
            yield from _under(name, chunks, winner, model, cluster, job)


def _under(
    schedule: str, chunks: int, strategy: Strategy, model: ModelSpec, cluster: ClusterSpec, job: Job
) -> Iterator[Strategy]:
    """The same degrees under another schedule, cut evenly and by what layers take, where that is legal."""
    even = strategy.model_copy(update={"schedule": schedule, "num_chunks": chunks, "layers_per_stage": None})
    if num_cells(even) <= MAX_CELLS and not violations(even, model, cluster, job):
        yield from (even, *balanced([even], model, job))
