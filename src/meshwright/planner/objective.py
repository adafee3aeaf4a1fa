"""What a plan is to be best at, beside the fastest step.

    fewest-gpus       the smallest part of the cluster on which the job fits
    cheapest          the part of the cluster whose devices × hours × price are least for a number of tokens
    longest-context   the longest sequence that fits, in steps of `CONTEXT_STEP` tokens
    largest-model     the most layers of the model's shape that fit

Each asks the same planner for other clusters, jobs or models; the plan that comes back is the fastest of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import InputError
from meshwright.core.expert_rules import check_imbalance
from meshwright.core.job import Job
from meshwright.core.legal import divisors
from meshwright.core.model import ModelSpec
from meshwright.core.units import counted
from meshwright.planner.rank import Options, PlanResult, fits, plan

OBJECTIVES = ("fastest", "fewest-gpus", "cheapest", "longest-context", "largest-model")
CONTEXT_STEP = 1024
"""Tokens."""
MAX_TRIES = 24
"""Times that a size is doubled or halved."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked, whatever the objective."""

    model: ModelSpec
    cluster: ClusterSpec
    job: Job
    fix: Mapping[str, Any]
    options: Options


@dataclass(frozen=True, slots=True)
class Price:
    """Of a training run."""

    num_tokens: float
    per_device_hour: float

    def of(self, result: PlanResult) -> float:
        """What the run costs under a plan."""
        return self.hours(result) * result.plan.cluster.num_devices * self.per_device_hour

    def hours(self, result: PlanResult) -> float:
        """How long it takes."""
        steps = self.num_tokens / result.plan.job.tokens_per_step
        return steps * result.forecast.step_time.total_s / 3600


@dataclass(frozen=True, slots=True)
class Best:
    """The plan, and in one sentence what it is best at."""

    result: PlanResult
    words: str


def best(wanted: Wanted, objective: str, price: Price | None = None) -> Best:
    """Plan for an objective.

    Raises:
        InputError: no such objective, or `cheapest` without tokens and a price.
        RuleError: as :func:`meshwright.planner.rank.plan`, where nothing legal fits; or an imbalance that experts
            cannot have.
    """
    check_imbalance(wanted.model, wanted.job)
    match objective:
        case "fastest":
            return Best(_planned(wanted), "")
        case "fewest-gpus":
            return _fewest(wanted)
        case "cheapest":
            return _cheapest(wanted, price)
        case "longest-context":
            return _longest(wanted)
        case "largest-model":
            return _largest(wanted)
    raise InputError(f"--objective {objective}: one of {', '.join(OBJECTIVES)}")


def _planned(wanted: Wanted) -> PlanResult:
    return plan(wanted.model, wanted.cluster, wanted.job, wanted.fix, wanted.options)


def _fits(wanted: Wanted) -> bool:
    return fits(wanted.model, wanted.cluster, wanted.job, wanted.fix, wanted.options)


def parts(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """Every part of a cluster that divides it: of one node, then whole nodes; ascending."""
    for devices in divisors(cluster.devices_per_node)[:-1]:
        yield _part(cluster, 1, devices)
    for nodes in divisors(cluster.num_nodes):
        yield _part(cluster, nodes, cluster.devices_per_node)


def _part(cluster: ClusterSpec, nodes: int, devices: int) -> ClusterSpec:
    if (nodes, devices) == (cluster.num_nodes, cluster.devices_per_node):
        return cluster
    name = f"{nodes}x{devices} of {cluster.name}"
    return cluster.model_copy(update={"name": name, "num_nodes": nodes, "devices_per_node": devices})


def _on(wanted: Wanted, cluster: ClusterSpec) -> Wanted:
    return Wanted(wanted.model, cluster, wanted.job, wanted.fix, wanted.options)


def _fewest(wanted: Wanted) -> Best:
    for part in parts(wanted.cluster):
        if _fits(asked := _on(wanted, part)):
            devices = counted(part.num_devices, "device")
            return Best(
                _planned(asked), f"{devices} of {wanted.cluster.num_devices:,} are enough: on no smaller part it fits"
            )
    return Best(_planned(wanted), "")  # raises: the whole cluster is the last part


def _cheapest(wanted: Wanted, price: Price | None) -> Best:
    if price is None:
        raise InputError(
            "--objective cheapest: say how many tokens (--tokens 1e12) and what a device costs (--price 2.5)"
        )
    found = [_planned(asked) for part in parts(wanted.cluster) if _fits(asked := _on(wanted, part))]
    if not found:
        return Best(_planned(wanted), "")
    cheapest = min(found, key=price.of)
    fastest = min(found, key=price.hours)
    devices = counted(cheapest.plan.cluster.num_devices, "device")
    words = (
        f"{price.num_tokens:.3g} tokens cost {price.of(cheapest):,.0f} on {devices} in {_days(price.hours(cheapest))}"
    )
    if fastest is cheapest:
        return Best(cheapest, f"{words}; more devices would not be faster here")
    others = (
        f"{fastest.plan.cluster.num_devices:,} devices cost {price.of(fastest):,.0f} in {_days(price.hours(fastest))}"
    )
    return Best(cheapest, f"{words}; {others}")


def _days(hours: float) -> str:
    return f"{hours / 24:.1f} days" if hours >= 48 else f"{hours:.1f} hours"


def _longest(wanted: Wanted) -> Best:
    def of(steps: int) -> Wanted:
        length = steps * CONTEXT_STEP
        job = wanted.job.model_copy(update={"seq_length": length})
        stretch = {"max_positions": max(length, wanted.model.max_positions)}
        model = wanted.model if wanted.model.positions == "learned" else wanted.model.model_copy(update=stretch)
        return Wanted(model, wanted.cluster, job, wanted.fix, wanted.options)

    limit = wanted.model.max_positions // CONTEXT_STEP if wanted.model.positions == "learned" else None
    steps = _most(of, limit)
    result = _planned(of(max(1, steps)))  # raises where not even 1 fits
    batch = counted(wanted.job.global_batch_size, "sequence")
    return Best(
        result, f"sequences of {steps * CONTEXT_STEP:,} tokens fit in steps of {batch}; {CONTEXT_STEP:,} more do not"
    )


def _largest(wanted: Wanted) -> Best:
    def of(layers: int) -> Wanted:
        model = wanted.model.model_copy(update={"num_layers": layers, "name": f"{wanted.model.name}, {layers} layers"})
        return Wanted(model, wanted.cluster, wanted.job, wanted.fix, wanted.options)

    layers = _most(of, None)
    result = _planned(of(max(1, layers)))  # raises where not even 1 fits
    size = f"{result.plan.model.num_parameters / 1e9:.1f} billion parameters"
    return Best(result, f"{layers} layers of this shape fit, {size}; {layers + 1} do not")


def _most(of: Callable[[int], Wanted], limit: int | None) -> int:
    """The largest number that can be planned for, by doubling and halving; 0 where not even 1 can.

    What fits need not be every number below: a split may ask for divisors. So the last failure is a neighbour's only.
    """

    def can(number: int) -> bool:
        return (limit is None or number <= limit) and _fits(of(number))

    if not can(1):
        return 0
    low, high = 1, 2
    for _ in range(MAX_TRIES):
        if not can(high):
            break
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if can(middle) else (low, middle)
    return low
