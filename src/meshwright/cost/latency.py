"""Seconds of one training step, each a list of named terms.

    step = pipeline (forward, backward, recompute, tensor-parallel reductions, transfers, bubble)
         + what backward does not hide of the gradient reduction, + parameter gather and scalar reductions
         + optimizer

Collective seconds are derived from :class:`~meshwright.core.measures.Traffic`, the rows that the ledger counts, so that
what is priced is what is sent. Backward counts twice the FLOPs of forward.

Sources: Narayanan et al. 2021 §3 (pipeline), Korthikanti et al. 2022 (FLOPs), Li et al. 2020 §3.2 (overlap with
backward), Rajbhandari et al. 2020 §7 (ZeRO).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from meshwright.core.axes import PP
from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import InputError
from meshwright.core.job import Job
from meshwright.core.measures import StepTime, Traffic
from meshwright.core.model import ModelSpec
from meshwright.core.precision import NUM_MOMENTS
from meshwright.core.program import Kind
from meshwright.core.strategy import Strategy
from meshwright.cost.flops import stage_flops
from meshwright.cost.network import boundary_link, flat_s, route
from meshwright.cost.traffic import hidden_bytes


@dataclass(frozen=True, slots=True)
class Term:
    """One named part of a duration."""

    name: str
    seconds: float


def total_s(terms: Sequence[Term]) -> float:
    """Sum of terms."""
    return sum(term.seconds for term in terms)


@dataclass(frozen=True)
class StageCosts:
    """What one rank of a pipeline stage spends. `forward` and `backward` are of one micro-batch."""

    forward: tuple[Term, ...]
    backward: tuple[Term, ...]
    reduction: tuple[Term, ...]
    """Gradient buckets; backward of the last micro-batch may hide them."""
    num_reductions: int
    after: tuple[Term, ...]
    """Scalar reductions and the gather of updated parameters; nothing hides them."""
    optimizer: tuple[Term, ...]

    @cached_property
    def forward_s(self) -> float:
        return total_s(self.forward)

    @cached_property
    def backward_s(self) -> float:
        return total_s(self.backward)

    @cached_property
    def exposed_reduction_s(self) -> float:
        """Gradient reduction beyond the overlap window. The last bucket is complete only when backward ends."""
        reduction_s, share = total_s(self.reduction), 1 / max(1, self.num_reductions)
        return max(reduction_s - (1 - share) * self.backward_s, share * reduction_s)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Prices of one step: of every stage, and of the transfer over every stage boundary (each direction)."""

    stages: tuple[StageCosts, ...]
    boundaries_s: tuple[float, ...]

    def duration_s(self, kind: Kind, stage: int) -> float:
        """Seconds of one action, as the clock asks for them. ARM and REDUCE take none: :func:`step_time` adds what
        backward does not hide."""
        match kind:
            case Kind.F:
                return self.stages[stage].forward_s
            case Kind.B:
                return self.stages[stage].backward_s
            case Kind.SEND_F:
                return self.boundaries_s[stage]
            case Kind.SEND_B:
                return self.boundaries_s[stage - 1]
        return 0.0


def stage_costs(
    model: ModelSpec,
    job: Job,
    strategy: Strategy,
    cluster: ClusterSpec,
    stage: int,
    sent: Traffic,
    num_parameters: int,
) -> StageCosts:
    """Price a stage.

    Args:
        sent: what a rank of the stage sends in one step, as from :func:`meshwright.cost.traffic.traffic`.
        num_parameters: elements of the parameters that the rank holds.

    Raises InputError where the cluster states no peak for the strategy's compute dtype.
    """
    flops = stage_flops(model, job, strategy, stage)
    speed = flops_per_s(cluster, strategy)
    phases = _seconds_by_phase(model, strategy, cluster, sent)
    m = strategy.num_micro_batches

    def collectives(phase: str) -> float:
        return phases.get(phase, 0.0) / m

    recompute = strategy.recompute == "full"
    return StageCosts(
        forward=(
            Term("layers", flops.layers / speed),
            Term("head", flops.head / speed),
            Term("tensor-parallel reductions", collectives("forward")),
        ),
        backward=(
            Term("layers", 2 * flops.layers / speed),
            Term("head", 2 * flops.head / speed),
            Term("tensor-parallel reductions", collectives("backward")),
            Term("recomputation", flops.layers / speed * recompute + collectives("recompute")),
        ),
        reduction=(Term("gradients", phases.get("gradients", 0.0)),),
        num_reductions=sum(row.calls for (_, _, phase), row in sent.rows.items() if phase == "gradients"),
        after=tuple(Term(phase, phases[phase]) for phase in ("count", "norm", "parameters") if phase in phases),
        optimizer=(Term("optimizer", optimizer_s(num_parameters, job, strategy, cluster)),),
    )


def flops_per_s(cluster: ClusterSpec, strategy: Strategy) -> float:
    """Matrix-product speed of one device in the strategy's compute dtype: peak × efficiency."""
    dtype, peaks = strategy.recipe.parameter, cluster.device.peak_flops_per_s
    if dtype not in peaks:
        raise InputError(
            f"cluster `{cluster.name}`: device `{cluster.device.name}` states no peak FLOP/s for {dtype}; "
            f"it has {', '.join(sorted(peaks))}"
        )
    return peaks[dtype] * cluster.compute_efficiency


def _seconds_by_phase(model: ModelSpec, strategy: Strategy, cluster: ClusterSpec, sent: Traffic) -> dict[str, float]:
    """Seconds in collectives by phase; transfers between stages are priced by boundary, not here."""
    rows = [(key, row) for key, row in sent.rows.items() if key[1] != PP]
    over = {axis: route(axis, model, strategy, cluster) for axis in {axis for (_, axis, _), _ in rows}}
    total: dict[str, float] = {}
    for (primitive, axis, phase), row in rows:
        seconds = row.calls * over[axis].seconds(primitive, row.payload_bytes / row.calls)
        total[phase] = total.get(phase, 0.0) + seconds
    return total


def optimizer_s(num_parameters: int, job: Job, strategy: Strategy, cluster: ClusterSpec) -> float:
    """Bytes that one update moves, over the memory bandwidth: gradient read, moments and master read and written,
    parameter written (and read where it is its own master). ZeRO-1 updates a share of 1/dp."""
    recipe = strategy.recipe
    moments = NUM_MOMENTS[job.optimizer]
    master = 2 * recipe.master_bytes if recipe.master else recipe.parameter_bytes
    per_element = recipe.sent_gradient_bytes + 2 * moments * recipe.moment_bytes + master + recipe.parameter_bytes
    share = strategy.dp if strategy.zero else 1
    return num_parameters * per_element / share / cluster.device.memory_bandwidth_bytes_per_s


def boundaries_s(model: ModelSpec, job: Job, strategy: Strategy, cluster: ClusterSpec) -> tuple[float, ...]:
    """Seconds of sending one micro-batch's hidden states over each stage boundary."""
    payload = hidden_bytes(model, job, strategy)
    links = (boundary_link(stage, strategy, cluster) for stage in range(strategy.pp - 1))
    return tuple(flat_s("send", payload, 2, link, cluster.backend) for link in links)


def stage_ends_s(costs: StepCosts, strategy: Strategy) -> list[float]:
    """When each stage ends its last backward, in closed form; the first of them is the pipeline's makespan.

    The way of the first micro-batch, and what the others add at least: a lower bound on what the clock finds, exact
    for equal stages without transfer time. What a stage adds also delays the stages before it.
    """
    added = accumulate(reversed(_added_s(costs, strategy)), max)
    alone = accumulate(
        (stage.backward_s + link for stage, link in zip(reversed(costs.stages), _links_after(costs), strict=True)),
        initial=sum(stage.forward_s for stage in costs.stages) + sum(costs.boundaries_s),
    )
    next(alone)
    return [end + more for end, more in zip(alone, added, strict=True)][::-1]


def _links_after(costs: StepCosts) -> list[float]:
    """Transfer seconds behind each stage, last stage first; behind the last there is none."""
    return [0.0, *reversed(costs.boundaries_s)]


def _added_s(costs: StepCosts, strategy: Strategy) -> list[float]:
    """Per stage, the seconds that micro-batches after the first add at least before it ends."""
    further = strategy.num_micro_batches - 1
    stages, slowest_link = costs.stages, max(costs.boundaries_s, default=0.0)
    work = [stage.forward_s + stage.backward_s for stage in stages]
    if strategy.schedule == "naive":
        return [further * (sum(work) + 2 * sum(costs.boundaries_s))] * len(stages)
    if strategy.schedule == "gpipe":
        forward_s = max(slowest_link, *(stage.forward_s for stage in stages))
        links = _links_after(costs)[::-1]
        return [further * (forward_s + max(s.backward_s, link)) for s, link in zip(stages, links, strict=True)]
    trips = accumulate(w + 2 * link for w, link in zip(reversed(work), _links_after(costs), strict=True))
    held = (_further_1f1b_s(further, n, stage, trip) for n, (stage, trip) in enumerate(zip(stages[::-1], trips), 1))
    return [max(further * slowest_link, seconds) for seconds in held][::-1]


def _further_1f1b_s(further: int, num_held: int, stage: StageCosts, trip_s: float) -> float:
    """What `further` micro-batches add on a stage that holds at most `num_held` at once.

    `trip_s` is the way of one micro-batch from this stage to the last and back. Two waits bound the time: the first
    backward and the last one each come a whole trip after their forward, with the other work between; and of every
    `num_held`-th micro-batch the trip begins when the one before has ended its own.
    """
    if further < num_held:
        return further * max(stage.forward_s, stage.backward_s)
    between = (further - num_held) * (stage.forward_s + stage.backward_s) + trip_s
    num_trips, rest = divmod(further, num_held)
    return max(between, num_trips * trip_s + rest * stage.backward_s)


def step_time(costs: StepCosts, strategy: Strategy, ends_s: Sequence[float]) -> StepTime:
    """Put the terms of all stages together; `ends_s` is when each stage ends its last backward."""
    makespan_s = max(ends_s)
    reduced_s = max(end_s + stage.exposed_reduction_s for stage, end_s in zip(costs.stages, ends_s, strict=True))
    busy_s = strategy.num_micro_batches * sum(stage.forward_s + stage.backward_s for stage in costs.stages)
    return StepTime(
        pipeline_s=makespan_s,
        data_comm_exposed_s=max(reduced_s - makespan_s, 0.0) + max(total_s(stage.after) for stage in costs.stages),
        optimizer_s=max(total_s(stage.optimizer) for stage in costs.stages),
        bubble_fraction=max(0.0, 1 - busy_s / (strategy.pp * makespan_s)),
    )


def step_terms(costs: StepCosts, strategy: Strategy, time: StepTime) -> tuple[Term, ...]:
    """The step by cause, on the stage that works longest; the terms add up to `time.total_s`."""
    slowest = max(costs.stages, key=lambda stage: stage.forward_s + stage.backward_s)
    m = strategy.num_micro_batches
    work: dict[str, float] = {}
    for term in (*slowest.forward, *slowest.backward):
        work[term.name] = work.get(term.name, 0.0) + m * term.seconds
    return (
        *(Term(name, seconds) for name, seconds in work.items()),
        Term("bubble and transfers", max(0.0, time.pipeline_s - sum(work.values()))),
        Term("data-parallel communication", time.data_comm_exposed_s),
        Term("optimizer", time.optimizer_s),
    )
