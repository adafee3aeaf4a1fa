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
from functools import cached_property
from math import ceil, gcd
from typing import Any

from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import RuleError
from meshwright.core.legal import divisors
from meshwright.core.model import ModelSpec
from meshwright.core.serving import Layout, Requests, ServingPlan, broken_rules, check_layout, check_length
from meshwright.core.units import format_bytes
from meshwright.cost.serving import StepCosts
from meshwright.cost.serving_memory import ServingMemory, Weights, largest_weights, most_blocks, serving_memory
from meshwright.cost.steady import PRECISION, Capacity, Load, capacity, load_at, longest_step_s
from meshwright.planner.enumerate import default_precision

STEP_TOKENS = (256, 512, 1024, 2048, 4096)
MAX_RUNNING = 256
"""Sequences of a replica at once, unasked."""
MAX_SHARED = 64
"""Replicas that share experts, unasked, where fewer than all do."""
ROUGHLY = 0.01
"""Precision of what sizes of steps are compared by."""
NEARLY = 0.97
"""Of the best throughput: below, a larger step is worth its longer gaps between tokens."""
NUM_DEPTHS = 2
"""Values of pp that fit and are tried for each tp, the smallest ones: stages run one after the other, so that more of
them only add memory."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A layout that is not offered, and why."""

    layout: Layout
    rule: str
    """Id of a rule, `memory`, `limits` or `rate`."""
    reason: str


@dataclass(frozen=True)
class ServingForecast:
    """A layout that fits and keeps the limits."""

    layout: Layout
    requests: Requests
    costs: StepCosts
    memory: ServingMemory
    most: Capacity
    """Of one replica."""

    @property
    def cache_tokens(self) -> int:
        """Of one replica."""
        return self.layout.num_blocks * self.layout.block_size

    @property
    def cache_bytes(self) -> int:
        """Of the rank with the most layers."""
        return self.cache_tokens * self.memory.token_bytes

    @property
    def rank_bytes(self) -> int:
        """All that a rank holds."""
        return self.memory.fixed_bytes + self.cache_bytes

    @property
    def max_batch(self) -> int:
        """Requests whose prompt and answer the cache of a replica holds whole."""
        return max_batch(self.layout, self.requests)

    @property
    def most_per_s(self) -> float:
        """Requests that all replicas sustain together."""
        return self.most.load.rate_per_s * self.layout.replicas

    @property
    def tokens_per_device_s(self) -> float:
        """Tokens of answers at that rate."""
        return self.most_per_s * self.requests.output_tokens / self.layout.num_devices

    @property
    def utilisation(self) -> float:
        """The asked rate, over what is sustained at most."""
        return self.requests.rate_per_s / self.most_per_s

    @property
    def needed_replicas(self) -> int:
        """That sustain the asked rate."""
        return ceil(self.requests.rate_per_s / self.most.load.rate_per_s)

    @cached_property
    def now(self) -> Load:
        """Each replica at its share of the asked rate."""
        share = self.requests.rate_per_s / self.layout.replicas
        return load_at(self.costs, self.requests, share, self.most.load)

    @property
    def gap_s(self) -> float:
        """The longest time between tokens."""
        return longest_step_s(self.costs, self.requests, self.now)


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
    found, refused = _search(model, cluster, requests, fix)
    sustained = [f for f in found if f.utilisation <= 1]
    refused += [
        Refused(f.layout, "rate", f"sustains {f.most_per_s:.3g} requests/s") for f in found if f.utilisation > 1
    ]
    if not sustained:
        raise _nothing(model, cluster, requests, fix, found, refused)
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
    """What one replica of a plan would do under other requests; their limits do not count. Raises RuleError where it
    does not fit, or cannot answer one of them."""
    check_length(plan.model, requests)
    layout = plan.layout.model_copy(update={"replicas": 1})
    asked = requests.model_copy(update={"max_ttft_s": None, "max_tpot_s": None})
    found = forecast(plan.model, plan.cluster, asked, layout)
    if isinstance(found, Refused):
        raise RuleError(f"{layout.describe()} {found.reason}", found.rule)
    return found


def _smaller_cache(plan: ServingPlan) -> str:
    """The largest cache that fits, where it holds a request."""
    room = most_blocks(serving_memory(plan.model, plan.layout), plan.layout, plan.cluster)
    return f"; nearest: num_blocks={room}" if room * plan.layout.block_size >= plan.requests.length else ""


def forecast(
    model: ModelSpec,
    cluster: ClusterSpec,
    requests: Requests,
    layout: Layout,
    weights: Weights | None = None,
    precision: float = PRECISION,
) -> ServingForecast | Refused:
    """One layout with all its sizes. `weights` are those of its degrees, where they are known."""
    memory = serving_memory(model, layout, weights)
    held = memory.fixed_bytes + layout.num_blocks * layout.block_size * memory.token_bytes
    if held > cluster.usable_memory_bytes:
        return Refused(layout, "memory", _too_large(memory, held - memory.fixed_bytes, cluster))
    costs = StepCosts(model, layout, cluster)
    most = capacity(costs, requests, max_batch(layout, requests), precision)
    if isinstance(most, str):
        return Refused(layout, "limits", f"is too slow for one request at a time: {most}")
    return ServingForecast(layout, requests, costs, memory, most)


def max_batch(layout: Layout, requests: Requests) -> int:
    """Requests whose prompt and answer the cache of a replica holds whole."""
    return layout.num_blocks // -(-requests.length // layout.block_size)


def _too_large(memory: ServingMemory, cache_bytes: int, cluster: ClusterSpec) -> str:
    return (
        f"needs {format_bytes(memory.fixed_bytes + cache_bytes)} per rank of "
        f"{format_bytes(cluster.usable_memory_bytes)} usable ({format_bytes(memory.weights_bytes)} weights + "
        f"{format_bytes(memory.working_bytes)} working + {format_bytes(cache_bytes)} cache)"
    )


def _search(
    model: ModelSpec, cluster: ClusterSpec, requests: Requests, fix: Mapping[str, Any]
) -> tuple[list[ServingForecast], list[Refused]]:
    found: list[ServingForecast] = []
    refused: list[Refused] = []
    depths: dict[tuple[int, int], int] = {}
    for layout in layouts(model, cluster, fix):
        if broken := broken_rules(layout, model, cluster, requests):
            refused.append(Refused(layout, broken[0].rule.id, str(broken[0])))
            continue
        group = layout.tp, layout.ep
        if depths.get(group, 0) >= NUM_DEPTHS:
            continue
        best = _best_sizes(model, cluster, requests, layout, fix)
        if isinstance(best, Refused):
            refused.append(best)
        else:
            found.append(best)
        depths[group] = depths.get(group, 0) + (not isinstance(best, Refused) or best.rule != "memory")
    return found, refused


def layouts(model: ModelSpec, cluster: ClusterSpec, fix: Mapping[str, Any]) -> Iterator[Layout]:
    """Degrees that agree with `fix`, smallest pp first; sizes are those of a layout unless fixed."""
    usual = {"precision": default_precision(cluster), **fix}
    have = cluster.num_devices
    for tp in (fix["tp"],) if "tp" in fix else _degrees(have, model.num_heads):
        depths = _degrees(max(1, have // tp), model.num_layers)
        if "layers_per_stage" in fix:
            depths = [len(fix["layers_per_stage"])]
        for pp in (fix["pp"],) if "pp" in fix else depths:
            replicas = fix.get("replicas", max(1, have // (tp * pp)))
            for ep in (fix["ep"],) if "ep" in fix else _shares(model, cluster, replicas, tp):
                layout = Layout.parse({**usual, "replicas": replicas, "tp": tp, "pp": pp, "ep": ep}, "layout")
                if layout.num_devices <= have:
                    yield layout


def _degrees(num_devices: int, most: int) -> list[int]:
    """What divides so many devices, and powers of two, which models are made for."""
    powers = (1 << exponent for exponent in range(num_devices.bit_length()))
    return sorted(degree for degree in {*divisors(num_devices), *powers} if degree <= most)


def _shares(model: ModelSpec, cluster: ClusterSpec, replicas: int, tp: int) -> list[int]:
    """Replicas that may share experts: up to those of a node or `MAX_SHARED`, and all."""
    shared = gcd(replicas, model.num_experts) if model.num_experts else 1
    within = max(MAX_SHARED, cluster.devices_per_node // tp)
    return [degree for degree in divisors(shared) if degree <= within or degree == shared]


def _best_sizes(
    model: ModelSpec, cluster: ClusterSpec, requests: Requests, layout: Layout, fix: Mapping[str, Any]
) -> ServingForecast | Refused:
    """The smallest step that sustains nearly as much as the best."""
    weights = largest_weights(model, layout)
    tried = [
        _sized(model, cluster, requests, layout.model_copy(update={"step_tokens": tokens}), fix, weights)
        for tokens in ((fix["step_tokens"],) if "step_tokens" in fix else STEP_TOKENS)
    ]
    good = [each for each in tried if isinstance(each, ServingForecast)]
    if not good:
        return next(each for each in tried if isinstance(each, Refused))
    enough = NEARLY * max(each.most_per_s for each in good)
    best = next(each for each in good if each.most_per_s >= enough)
    return forecast(model, cluster, requests, best.layout, weights)


def _sized(
    model: ModelSpec,
    cluster: ClusterSpec,
    requests: Requests,
    layout: Layout,
    fix: Mapping[str, Any],
    weights: Weights,
) -> ServingForecast | Refused:
    """With as large a cache as finds room: on CPU ranks, whose memory is shared with others, as large as is used."""
    per_request = -(-requests.length // layout.block_size)
    asked = fix.get("max_running", min(MAX_RUNNING, layout.step_tokens))
    layout = layout.model_copy(update={"max_running": asked})
    memory = serving_memory(model, layout, weights)
    room = most_blocks(memory, layout, cluster)
    blocks = fix.get("num_blocks", room)
    if blocks < per_request and "num_blocks" in fix:
        check_layout(layout, model, cluster, requests)
    if room < max(per_request, fix.get("num_blocks", 0)):
        needed = max(per_request, fix.get("num_blocks", 0)) * layout.block_size * memory.token_bytes
        return Refused(layout, "memory", _too_large(memory, needed, cluster))
    running = asked if "max_running" in fix else min(asked, blocks // per_request)
    if cluster.backend == "gloo" and "num_blocks" not in fix:
        blocks = min(blocks, (running + 1) * per_request)
    sized = layout.model_copy(update={"num_blocks": blocks, "max_running": running})
    return forecast(model, cluster, requests, sized, weights, ROUGHLY)


def _front(ranked: list[ServingForecast]) -> Iterator[ServingForecast]:
    least_s = float("inf")
    for each in ranked:
        if each.now.tpot_s < least_s:
            least_s = each.now.tpot_s
            yield each


# --- nothing is offered --------------------------------------------------------------------------------------------

MAX_GROWTH = 64
"""How many times more nodes are tried."""


def _nothing(
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
        found, _ = _search(model, larger, requests.model_copy(update={"max_ttft_s": None, "max_tpot_s": None}), fix)
        if found:
            best = max(found, key=lambda f: f.most_per_s).layout
            yield f"it fits on {larger.num_devices} devices instead of {cluster.num_devices}: {best.describe()}"
        growth *= 2
