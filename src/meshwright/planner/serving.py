"""From requests to a serving plan: enumerate layouts, keep what fits, find what each sustains, order by throughput.

    layouts    replicas × tp × pp ≤ devices (× ep of a mixture), all devices in use as far as they go
      └─ refused by a rule of core/rules.py, or because weights, a step and one request do not fit a rank
    sizes      step_tokens, from `STEP_TOKENS`: the smallest that sustains nearly as much as the best
      └─ refused where not even one request keeps the limits, or the replicas together do not sustain the rate

Ordered by the requests that a device answers at most, within the limits. A fixed field has one value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import RuleError
from meshwright.core.model import ModelSpec
from meshwright.core.serving import Requests, ServingPlan, check_length
from meshwright.cost.serving_memory import most_blocks, serving_memory
from meshwright.planner.serving_nearest import nothing_served
from meshwright.planner.serving_search import Refused, ServingForecast, forecast, search


@dataclass(frozen=True, slots=True)
class ServingResult:
    """What planning found."""

    plan: ServingPlan
    forecast: ServingForecast
    """Of the plan's layout; the first of `ranked`."""
    ranked: tuple[ServingForecast, ...]
    """Most tokens per second and device first."""
    front: tuple[ServingForecast, ...]
    """No other layout both sustains more per device and has less time between tokens; most per device first."""
    refused: tuple[Refused, ...]


def plan_serving(
    model: ModelSpec,
    cluster: ClusterSpec,
    requests: Requests,
    fix: Mapping[str, Any] | None = None,
    explain: Callable[[ServingResult], str] | None = None,
) -> ServingResult:
    """The layout that answers most requests per device within the limits.

    Args:
        fix: fields of a layout that must have the given value.
        explain: writes the plan's `why`.

    Raises:
        InputError: requests that the model cannot hold, or a dtype that the devices have no peak for.
        RuleError: nothing legal agrees with `fix`, fits the memory, keeps the limits or sustains the rate; says what
            would.
    """
    fix = fix or {}
    check_length(model, requests)
    found, refused = search(model, cluster, requests, fix)
    sustained = [f for f in found if f.utilisation <= 1]
    refused += [
        Refused(f.layout, "rate", f"sustains {f.most_per_s:.3g} requests/s") for f in found if f.utilisation > 1
    ]
    if not sustained:
        raise nothing_served(model, cluster, requests, fix, found, refused)
    ranked = sorted(sustained, key=lambda f: (-f.tokens_per_device_s, f.now.tpot_s))
    plan = ServingPlan(model=model, cluster=cluster, requests=requests, layout=ranked[0].layout)
    result = ServingResult(plan, ranked[0], tuple(ranked), tuple(_front(ranked)), tuple(refused))
    if explain is not None:
        result = replace(result, plan=plan.model_copy(update={"why": explain(result)}))
    return result


def priced(plan: ServingPlan) -> ServingForecast:
    """A plan's forecast. Raises RuleError where it does not fit, breaks its limits, or does not sustain its rate."""
    found = forecast(plan.model, plan.cluster, plan.requests, plan.layout)
    name = plan.layout.describe()
    if isinstance(found, Refused):
        raise RuleError(f"{name} {found.reason}{_smaller_cache(plan) if found.rule == 'memory' else ''}", found.rule)
    if found.utilisation > 1:
        asked, most = plan.requests.rate_per_s, found.most_per_s
        raise RuleError(f"{name} sustains {most:.3g} requests/s, not {asked:g}: {found.most.limit}", "rate")
    return found


def under_load(plan: ServingPlan, requests: Requests) -> ServingForecast:
    """What a plan would do under other requests; their limits do not count. Raises RuleError where it does not fit, or
    cannot answer one of them."""
    check_length(plan.model, requests)
    layout = plan.layout
    asked = requests.model_copy(update={"max_ttft_s": None, "max_tpot_s": None})
    found = forecast(plan.model, plan.cluster, asked, layout)
    if isinstance(found, Refused):
        raise RuleError(f"{layout.describe()} {found.reason}", found.rule)
    return found


def _smaller_cache(plan: ServingPlan) -> str:
    """The largest cache that fits, where it holds a request."""
    room = most_blocks(serving_memory(plan.model, plan.layout), plan.layout, plan.cluster)
    return f"; nearest: num_blocks={room}" if room * plan.layout.block_size >= plan.requests.length else ""


def _front(ranked: list[ServingForecast]) -> Iterator[ServingForecast]:
    least_s = float("inf")
    for each in ranked:
        if each.now.tpot_s < least_s:
            least_s = each.now.tpot_s
            yield each
