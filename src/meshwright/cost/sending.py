"""Seconds of what a rank's collectives send in a step, by phase, and of what crosses the boundaries of stages.

They are derived from :class:`~meshwright.core.measures.Traffic`, the rows that the ledger counts, so that what is
priced is what is sent.

Source: Narayanan et al. 2021, §4.1 (transfers in parts).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from meshwright.core.axes import CP, EP, PP, TENSOR_AXES, TP
from meshwright.core.cluster import ClusterSpec
from meshwright.core.job import Job
from meshwright.core.measures import Traffic, TrafficRow
from meshwright.core.model import ModelSpec
from meshwright.core.profile import OWN, Stack
from meshwright.core.strategy import Strategy
from meshwright.cost.context import ATTENTION_PRIMITIVES
from meshwright.cost.network import Route, boundary_link, flat_s, route
from meshwright.cost.traffic import hidden_bytes


def seconds_by_phase(
    model: ModelSpec, strategy: Strategy, cluster: ClusterSpec, sent: Traffic, stack: Stack = OWN
) -> dict[str, float]:
    """Seconds in collectives by phase; transfers between stages are priced by boundary, not here. What attention over
    cp sends stands under keys of its own (:func:`of_attention`), as a ring's hops run under its blocks, and so does
    what goes to experts (:func:`of_experts`).

    With ZeRO-3 a stack may send all in one ring each, at a share of its speed. It may also scatter rows over tp before
    they are sent to their experts (:func:`_exchange_s`). A rank on the host's cores pays its own Python for each call,
    but where a grid starts them ahead of products.
    """
    ring_share = stack.ring_share if strategy.zero == 3 else None
    rows = [(key, row) for key, row in sent.rows.items() if key[1] != PP]
    over = {axis: route(axis, model, strategy, cluster) for axis in {axis for (_, axis, _), _ in rows}}
    if ring_share is not None:
        over = {axis: replace(way, num_local=1) for axis, way in over.items()}
    total: dict[str, float] = {}
    for (primitive, axis, phase), row in rows:
        each_bytes = row.payload_bytes / row.calls
        if axis == EP:
            seconds = row.calls * _exchange_s(each_bytes, model, strategy, stack, over[EP], over.get(TP))
        else:
            seconds = row.calls * over[axis].seconds(primitive, each_bytes)
        key = _key(primitive, axis, phase)
        total[key] = total.get(key, 0.0) + seconds / (ring_share or 1.0)
        total[key] += _num_waited(axis, row) * call_s(cluster)
    return total


def _key(primitive: str, axis: str, phase: str) -> str:
    if axis == CP and primitive in ATTENTION_PRIMITIVES:
        return of_attention(phase)
    return of_experts(phase) if axis == EP else phase


def num_waited(sent: Traffic) -> int:
    """Calls for each of which a rank pays the host's time (:func:`call_s`)."""
    return sum(_num_waited(axis, row) for (_, axis, _), row in sent.rows.items())


def _num_waited(axis: str, row: TrafficRow) -> int:
    """Not those of a grid, which starts them ahead of products, nor those between stages, priced by boundary."""
    return 0 if axis in (PP, *TENSOR_AXES) else row.calls


def call_s(cluster: ClusterSpec) -> float:
    """What the host adds to a call, where it was measured."""
    return cluster.device.profile.host.call_s if cluster.device.profile else 0.0


def _exchange_s(
    payload_bytes: float, model: ModelSpec, strategy: Strategy, stack: Stack, over_ep: Route, over_tp: Route | None
) -> float:
    """Rows on their way to experts of other ranks, or back.

    Scattered, each of the tp ranks sends a part, and tp gathers them where they arrive. A token's hidden state, of
    which the rows of k experts are copies, need not be gathered before, as the engine's own rows count it: k − 1 of k
    are further bytes.
    """
    k = model.experts_per_token
    num_rows = k if stack.rows_once else 1
    if not stack.scattered_rows or over_tp is None or strategy.tp == 1 or strategy.et != strategy.tp:
        return over_ep.exchange_s(payload_bytes, num_rows)
    gathered_s = over_tp.seconds("all_gather", payload_bytes * (k - 1) / k)
    return over_ep.exchange_s(payload_bytes / strategy.tp, num_rows) + gathered_s


def boundaries_s(
    model: ModelSpec, job: Job, strategy: Strategy, cluster: ClusterSpec, stack: Stack = OWN
) -> tuple[float, ...]:
    """Seconds that a micro-batch's hidden states are on their way over each stage boundary beside compute; nothing
    within a rank, and nothing where ranks wait for them, which is counted there."""
    if stack.transfers != "beside":
        return (0.0,) * (len(strategy.stage_ranks) - 1)
    return transfers_s(model, job, strategy, cluster, stack)


def transfers_s(
    model: ModelSpec, job: Job, strategy: Strategy, cluster: ClusterSpec, stack: Stack = OWN
) -> tuple[float, ...]:
    """Seconds of sending one micro-batch's hidden states over each stage boundary.

    Scattered, each tp rank sends its part, and the parts are gathered within the node (Narayanan et al. 2021, §4.1).
    """
    payload, ranks = hidden_bytes(model, job, strategy), strategy.stage_ranks
    gathered_s = 0.0
    if stack.transfers == "blocking-scattered" and strategy.tp > 1:
        gathered_s = route(TP, model, strategy, cluster).seconds("all_gather", payload)
        payload //= strategy.tp
    links = {pair: boundary_link(*pair, strategy, cluster) for pair in pairwise(ranks) if pair[0] != pair[1]}
    seconds = {pair: gathered_s + flat_s("send", payload, 2, link, cluster.backend) for pair, link in links.items()}
    return tuple(seconds.get(pair, 0.0) for pair in pairwise(ranks))


def of_attention(phase: str) -> str:
    """Key of a phase's messages between the ranks that share a sequence."""
    return f"{phase} {CP}"


def of_experts(phase: str) -> str:
    """Key of a phase's exchange of rows with experts of other ranks."""
    return f"{phase} {EP}"
