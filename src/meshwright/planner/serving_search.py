"""Layouts for requests, with the sizes that suit them: what fits and keeps the limits, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, gcd
from typing import Any

from meshwright.core.cluster import ClusterSpec
from meshwright.core.legal import divisors
from meshwright.core.model import ModelSpec
from meshwright.core.serving import Layout, Requests, broken_rules, check_layout
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


def search(
    model: ModelSpec, cluster: ClusterSpec, requests: Requests, fix: Mapping[str, Any]
) -> tuple[list[ServingForecast], list[Refused]]:
    """Layouts that agree with `fix`, with their best sizes: those that fit and keep the limits, and the others."""
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
