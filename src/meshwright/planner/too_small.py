"""Nothing fits the memory: the numbers of the closest strategy, and the smallest change that would make one fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import RuleError
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.units import format_bytes
from meshwright.planner.fix import in_words
from meshwright.planner.offloads import STATES, TO_DISK, TO_HOST, devices_may_hold, hosts_may_hold
from meshwright.planner.price import Forecast, Pricer
from meshwright.planner.search import searched

MAX_GROWTH = 64
"""How many times more nodes are tried."""


def nothing_fits(
    model: ModelSpec, cluster: ClusterSpec, job: Job, fix: Mapping[str, Any], closest: Forecast
) -> RuleError:
    """The error to raise, one line. `closest`: the strategy that needs least."""
    fixed = f" with {in_words(fix)}" if fix else ""
    held = closest.memory
    message = (
        f"`{model.name}` does not fit on `{cluster.name}`{fixed}: the closest, {closest.strategy.describe()}, "
        f"{closest.limit} ({format_bytes(held.states_bytes)} states + {format_bytes(held.activations_bytes)} "
        f"activations + {format_bytes(held.buffers_bytes)} buffers + {format_bytes(held.working_bytes)} working "
        f"on rank {closest.rank})"
    )
    others = (next(found(model, cluster, job, fix), None) for found in (_offloads, _larger))
    change = next(_freed(model, cluster, job, fix), None) or "; or ".join(
        filter(None, (_higher_limit(cluster, closest), *others))
    )
    return RuleError(f"{message}; {change or 'no single change tried here makes it fit'}", "memory")


def _higher_limit(cluster: ClusterSpec, closest: Forecast) -> str | None:
    """Where ranks were kept from filling what they might: the limit that would do."""
    usual = ClusterSpec.model_fields["usable_memory_fraction"].default * cluster.device.memory_bytes
    if not cluster.usable_memory_bytes < closest.device_bytes <= usual:
        return None
    return f"it fits with a memory limit of {ceil(closest.device_bytes / 1e8) / 10:.1f}GB"


def _freed(model: ModelSpec, cluster: ClusterSpec, job: Job, fix: Mapping[str, Any]) -> Iterator[str]:
    """Fixed fields one of which, given free, makes something fit."""
    pricer = Pricer(model, cluster, job)
    for name, value in fix.items():
        freed = {other: kept for other, kept in fix.items() if other != name}
        found = _smallest(pricer, freed)
        if found and found.fits:
            yield f"it fits with {name}={getattr(found.strategy, name)} instead of {value}"


def _offloads(model: ModelSpec, cluster: ClusterSpec, job: Job, fix: Mapping[str, Any]) -> Iterator[str]:
    """What to offload so that something fits, given that the nodes have the room."""
    pricer = Pricer(model, cluster, job)
    for offload in (*TO_HOST, *TO_DISK) if "offload" not in fix else ():
        if not hosts_may_hold(model, cluster, job, fix, offload):
            continue
        found = _smallest(pricer, {**fix, "offload": offload})
        if found and found.fits:
            yield _offloaded(found, cluster)


def _larger(model: ModelSpec, cluster: ClusterSpec, job: Job, fix: Mapping[str, Any]) -> Iterator[str]:
    """More devices on which something fits."""
    growth = 2
    while growth <= MAX_GROWTH:
        larger = cluster.model_copy(update={"num_nodes": cluster.num_nodes * growth})
        found = _smallest(Pricer(model, larger, job), fix)
        if found and found.fits:
            more = f"{larger.num_devices} devices instead of {cluster.num_devices}"
            yield f"it fits on {more}: {found.strategy.describe()}"
        growth *= 2


def _offloaded(found: Forecast, cluster: ClusterSpec) -> str:
    """How to ask for it, and what each node must have for it."""
    offload, held = found.strategy.offload, found.memory
    named = [
        f"{kind}:{getattr(offload, kind)}" for kind in (*STATES, "activations") if getattr(offload, kind) != "none"
    ]
    named += [f"path:{offload.path}"] if offload.path else []
    needed = ((held.host_bytes, "of the host's memory"), (held.disk_bytes, "of disk"))
    per_node = " and ".join(f"{format_bytes(n * cluster.devices_per_node)} {what}" for n, what in needed if n)
    return f"it fits with offload={','.join(named)} and {per_node} per node: {found.strategy.describe()}"


def _smallest(pricer: Pricer, fix: Mapping[str, Any]) -> Forecast | None:
    """The legal strategy that needs least of the device's memory, if it has that; lower bounds alone rule out most
    that have not. Larger micro-batches, and what is not run again, never need less."""
    if not devices_may_hold(pricer.model, pricer.cluster, pricer.job, fix):
        return None
    is_sized = "micro_batch_size" in fix or "num_micro_batches" in fix
    least: dict[str, Any] = {} if is_sized else {"micro_batch_size": 1}
    least |= {} if "recompute" in fix or "tile" in fix else {"recompute": "full"}
    for more in (least, {}):
        try:
            search = searched(pricer.model, pricer.cluster, pricer.job, {**fix, **more}, pricer=pricer)
        except RuleError:
            continue
        return search.smallest_fitting()
    return None
