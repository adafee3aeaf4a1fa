"""Nothing fits the memory: the numbers of the closest strategy, and the smallest change that would make one fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import RuleError
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.units import format_bytes
from meshwright.planner.enumerate import strategies
from meshwright.planner.fix import in_words
from meshwright.planner.price import Forecast, Pricer

MAX_GROWTH = 64
"""How many times more nodes are tried."""


def nothing_fits(
    model: ModelSpec, cluster: ClusterSpec, job: Job, fix: Mapping[str, Any], priced: Sequence[Forecast]
) -> RuleError:
    """The error to raise, one line."""
    closest = min(priced, key=lambda f: f.memory.total_bytes)
    fixed = f" with {in_words(fix)}" if fix else ""
    held = closest.memory
    message = (
        f"`{model.name}` does not fit on `{cluster.name}`{fixed}: the closest, {closest.strategy.describe()}, "
        f"{closest.limit} ({format_bytes(held.states_bytes)} states + {format_bytes(held.activations_bytes)} "
        f"activations + {format_bytes(held.buffers_bytes)} buffers on rank {closest.rank})"
    )
    change = next(_changes(model, cluster, job, fix), None)
    return RuleError(f"{message}; {change or 'no single change tried here makes it fit'}", "memory")


def _changes(model: ModelSpec, cluster: ClusterSpec, job: Job, fix: Mapping[str, Any]) -> Iterator[str]:
    """Changes that make something fit, smallest first: give one fixed field free, then more devices."""
    for name, value in fix.items():
        freed = {other: kept for other, kept in fix.items() if other != name}
        found = _smallest(model, cluster, job, freed)
        if found and found.fits:
            yield f"it fits with {name}={getattr(found.strategy, name)} instead of {value}"
    growth = 2
    while growth <= MAX_GROWTH:
        larger = cluster.model_copy(update={"num_nodes": cluster.num_nodes * growth})
        found = _smallest(model, larger, job, fix)
        if found and found.fits:
            more = f"{larger.num_devices} devices instead of {cluster.num_devices}"
            yield f"it fits on {more}: {found.strategy.describe()}"
        growth *= 2


def _smallest(model: ModelSpec, cluster: ClusterSpec, job: Job, fix: Mapping[str, Any]) -> Forecast | None:
    """The legal strategy that needs least memory; larger micro-batches never need less."""
    sized = "micro_batch_size" in fix or "num_micro_batches" in fix
    try:
        legal = strategies(model, cluster, job, fix if sized else {**fix, "micro_batch_size": 1}).legal
    except RuleError:
        return None
    pricer = Pricer(model, cluster, job)
    return pricer.forecast(min(legal, key=lambda s: pricer.fullest(s)[1].total_bytes))
