"""Where nothing fits the devices: the same search with offload to the host, whose room and speed the cluster states.

It is asked last, because every byte passes a slow link in each step, and no more is offloaded than it takes: the first
of `TO_HOST` with which anything fits is searched, not all of them. Disks are left to who knows a folder on one:
`--fix offload=...`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import RuleError
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.units import format_bytes
from meshwright.planner.balance import Ends
from meshwright.planner.must import Must
from meshwright.planner.offloads import TO_HOST, devices_may_hold, hosts_may_hold
from meshwright.planner.price import Forecast, Pricer
from meshwright.planner.search import Search, searched


def is_stated(cluster: ClusterSpec) -> bool:
    """Whether the host's room and speed are known, so that what passes is timed and what lies there is bounded."""
    return cluster.host_memory_bytes is not None and cluster.tier_bytes_per_s("cpu") is not None


def offloading(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: Job,
    fix: Mapping[str, Any],
    must: tuple[Must, ...] = (),
    ends: Ends | None = None,
) -> Iterator[tuple[dict[str, Any], Search]]:
    """(what is fixed, search) of each kind of offload; none where `fix` decides, or the cluster does not state it."""
    if "offload" in fix or not is_stated(cluster):
        return
    pricer = Pricer(model, cluster, job)
    for offload in TO_HOST:
        wanted = {**fix, "offload": offload}
        if not (hosts_may_hold(model, cluster, job, fix, offload) and devices_may_hold(model, cluster, job, wanted)):
            continue
        try:
            yield wanted, searched(model, cluster, job, wanted, must, ends, pricer)
        except RuleError:
            continue


def in_words(winner: Forecast, closest: Forecast, cluster: ClusterSpec) -> str:
    """Why something is offloaded, and where the figures of the host come from.

    Args:
        winner: with offload.
        closest: what needs least without.
    """
    speed = cluster.tier_bytes_per_s("cpu")
    assert speed is not None
    assert cluster.host_memory_bytes is not None
    node_bytes = winner.memory.host_bytes * cluster.devices_per_node
    return (
        f"Nothing fits without offload: the closest, {closest.strategy.describe()}, {closest.limit}. Of each node's "
        f"host this takes {format_bytes(node_bytes)} of {format_bytes(cluster.host_memory_bytes)}, which each device "
        f"reads and writes at {format_bytes(round(speed[0]))}/s."
    )
