"""Where no serving plan is offered: the reason that comes closest, and the smallest change that helps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import RuleError
from meshwright.core.model import ModelSpec
from meshwright.core.serving import Layout, Requests, broken_rules, check_layout
from meshwright.cost.serving_memory import serving_memory
from meshwright.cost.steady import load_at
from meshwright.planner.enumerate import default_precision
from meshwright.planner.serving_search import Refused, ServingForecast, forecast, search

MAX_GROWTH = 64
"""How many times more nodes are tried."""


def nothing_served(
    model: ModelSpec,
    cluster: ClusterSpec,
    requests: Requests,
    fix: Mapping[str, Any],
    found: list[ServingForecast],
    refused: list[Refused],
) -> RuleError:
    """The reason that comes closest, and the smallest change that helps."""
    fixed = f" with {', '.join(f'{name}={value}' for name, value in fix.items())}" if fix else ""
    where = f"`{model.name}` on `{cluster.name}`{fixed}"
    if found:
        best = max(found, key=lambda f: f.most_per_s)
        devices = ceil(requests.rate_per_s / best.most_per_s * best.layout.num_devices)
        return RuleError(
            f"{where} sustains at most {best.most_per_s:.3g} requests/s within the limits ({best.layout.describe()}: "
            f"{best.most.limit}), not {requests.rate_per_s:g}; nearest: --rate {_below(best.most_per_s)}, or about "
            f"{devices} devices",
            "rate",
        )
    limited = [r for r in refused if r.rule == "limits"]
    if limited:
        return RuleError(f"{where}: {_loosened(model, cluster, requests, limited)}", "limits")
    too_large = [r for r in refused if r.rule == "memory"]
    if too_large:
        closest = min(too_large, key=lambda r: serving_memory(model, r.layout).fixed_bytes)
        change = next(_larger(model, cluster, requests, fix), "no number of devices tried here makes it fit")
        return RuleError(
            f"{where} does not fit: the closest, {closest.layout.describe()}, {closest.reason}; {change}", "memory"
        )
    if refused:
        first = min(refused, key=lambda r: len(broken_rules(r.layout, model, cluster, requests)))
        return RuleError(f"nothing legal to serve {where}: {first.reason}", first.rule)
    check_layout(Layout.parse({"precision": default_precision(cluster), **fix}, "layout"), model, cluster, requests)
    return RuleError(f"nothing legal to serve {where}: no layout agrees with all of it", "fix")


def _below(rate: float) -> str:
    """At most that, in three digits."""
    return f"{rate * 0.995:.3g}"


def _loosened(model: ModelSpec, cluster: ClusterSpec, requests: Requests, limited: list[Refused]) -> str:
    """What the fastest layout needs, where no layout keeps the limits even with one request at a time."""
    free = requests.model_copy(update={"max_ttft_s": None, "max_tpot_s": None})
    alone = []
    for each in limited:
        priced = forecast(model, cluster, free, each.layout)
        if isinstance(priced, ServingForecast):
            load = load_at(priced.costs, free, 1e-6, priced.most.load)
            over = max(
                load.ttft_s / (requests.max_ttft_s or float("inf")), load.tpot_s / (requests.max_tpot_s or float("inf"))
            )
            alone.append((over, each.layout, load))
    if not alone:
        return f"{limited[0].layout.describe()}: {limited[0].reason}"
    _, layout, load = min(alone, key=lambda entry: entry[0])
    asked = {"--max-ttft": (requests.max_ttft_s, load.ttft_s), "--max-tpot": (requests.max_tpot_s, load.tpot_s)}
    needs = [
        f"{name} {value * 1.01:.3g}" for name, (limit, value) in asked.items() if limit is not None and value > limit
    ]
    return (
        f"no layout keeps the limits: the closest, {layout.describe()}, brings the first token after "
        f"{load.ttft_s:.3g} s and each other after {load.tpot_s:.3g} s with one request at a time; nearest: "
        f"{' '.join(needs)}"
    )


def _larger(model: ModelSpec, cluster: ClusterSpec, requests: Requests, fix: Mapping[str, Any]) -> Iterator[str]:
    """More nodes on which something fits."""
    growth = 2
    while growth <= MAX_GROWTH:
        larger = cluster.model_copy(update={"num_nodes": cluster.num_nodes * growth})
        found, _ = search(model, larger, requests.model_copy(update={"max_ttft_s": None, "max_tpot_s": None}), fix)
        if found:
            best = max(found, key=lambda f: f.most_per_s).layout
            yield f"it fits on {larger.num_devices} devices instead of {cluster.num_devices}: {best.describe()}"
        growth *= 2
