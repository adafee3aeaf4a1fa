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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from meshwright.core.axes import PP
from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.job import Job
from meshwright.core.measures import StepTime, Traffic
from meshwright.core.model import ModelSpec
from meshwright.core.precision import NUM_MOMENTS
from meshwright.core.program import Kind
from meshwright.core.schedule import StageTimes, find_schedule
from meshwright.core.sharding import sharding
from meshwright.core.strategy import Strategy
from meshwright.cost.flops import StageFlops, stage_flops
from meshwright.cost.network import boundary_link, flat_s, route
from meshwright.cost.offload import OffloadForecast, TierSeconds, streamed_s, tier_seconds
from meshwright.cost.traffic import hidden_bytes


@dataclass(frozen=True, slots=True)
class TimeTerm:
    """One named part of a duration."""

    name: str
    seconds: float


def total_s(terms: Sequence[TimeTerm]) -> float:
    """Sum of terms."""
    return sum(term.seconds for term in terms)


@dataclass(frozen=True)
class StageCosts:
    """What one rank of a pipeline stage spends. `forward` and `backward` are of one micro-batch."""

    forward: tuple[TimeTerm, ...]
    backward: tuple[TimeTerm, ...]
    reduction: tuple[TimeTerm, ...]
    """Gradient buckets; backward of the last micro-batch may hide them."""
    num_reductions: int
    after: tuple[TimeTerm, ...]
    """Scalar reductions and the gather of updated parameters; nothing hides them."""
    optimizer: tuple[TimeTerm, ...]
    num_reducing: int = 1
    """Backwards of a step that reduce: the last one, or with ZeRO-2 and 3 each."""

    @cached_property
    def forward_s(self) -> float:
        return total_s(self.forward)

    @cached_property
    def backward_s(self) -> float:
        return total_s(self.backward)

    @cached_property
    def exposed_reduction_s(self) -> float:
        """Gradient reduction beyond the overlap window. The last bucket is complete only when backward ends."""
        each_s = total_s(self.reduction) / self.num_reducing
        share = self.num_reducing / max(1, self.num_reductions)
        return self.num_reducing * max(each_s - (1 - share) * self.backward_s, share * each_s)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Prices of one step: of every stage, and of the transfer over every stage boundary (each direction)."""

    stages: tuple[StageCosts, ...]
    boundaries_s: tuple[float, ...]

    @property
    def times(self) -> StageTimes:
        """What a schedule's bound is computed from."""
        return StageTimes(
            forward_s=tuple(stage.forward_s for stage in self.stages),
            backward_s=tuple(stage.backward_s for stage in self.stages),
            boundaries_s=self.boundaries_s,
        )

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
    moved: OffloadForecast | None = None,
) -> StageCosts:
    """Price a stage.

    Args:
        moved: what the rank offloads.
        sent: what a rank of the stage sends in one step, as from :func:`meshwright.cost.traffic.traffic`.
        num_parameters: elements of the parameters that the rank holds.

    Raises InputError where the cluster states no peak for the strategy's compute dtype.
    """
    flops = stage_flops(model, job, strategy, stage)
    phases = _seconds_by_phase(model, strategy, cluster, sent)
    m = strategy.num_micro_batches

    def collectives(phase: str) -> float:
        return phases.get(phase, 0.0) / m

    forward, backward = _compute_terms(flops, flops_per_s(cluster, strategy), strategy, collectives)
    num_blocks = len(strategy.stage_layers(model.num_layers)[stage]) + 1
    tiers = tier_seconds(moved, cluster) if moved else TierSeconds()
    gathers_s = _gathers_s(phases.get("gather", 0.0), strategy)
    reads_s = _gathers_s(tiers.gathers_s, strategy)
    fetches = [
        _gathering(gather_s, read_s, compute_s, num_blocks, strategy)
        for gather_s, read_s, compute_s in zip(gathers_s, reads_s, (total_s(forward), total_s(backward)), strict=True)
    ]
    sums = (TimeTerm("offloaded gradients", tiers.sums_s / m),) if strategy.offload.gradients != "none" else ()
    update_s = optimizer_s(num_parameters, job, strategy, cluster)
    if moved:
        update_s = streamed_s(update_s, tiers.update_s, len(moved.groups))
    beside_s = m * (total_s(forward) + total_s(backward)) if strategy.offload.delayed else 0.0
    return StageCosts(
        forward=(*forward, *fetches[0]),
        backward=(*backward, *fetches[1], *sums),
        reduction=(TimeTerm("gradients", phases.get("gradients", 0.0)),),
        num_reductions=sum(row.calls for (_, _, phase), row in sent.rows.items() if phase == "gradients"),
        num_reducing=m if strategy.zero >= 2 else 1,
        after=tuple(TimeTerm(phase, phases[phase]) for phase in ("count", "norm", "parameters") if phase in phases),
        optimizer=(TimeTerm("optimizer", max(0.0, update_s - beside_s) + tiers.handover_s),),
    )


def _compute_terms(
    flops: StageFlops, speed: float, strategy: Strategy, collectives: Callable[[str], float]
) -> tuple[tuple[TimeTerm, ...], tuple[TimeTerm, ...]]:
    """(forward, backward) of one micro-batch, but for what comes and goes over dp and tiers."""
    recompute = strategy.recompute == "full"
    forward = (
        TimeTerm("layers", flops.layers / speed),
        TimeTerm("head", flops.head / speed),
        TimeTerm("tensor-parallel reductions", collectives("forward")),
    )
    backward = (
        TimeTerm("layers", 2 * flops.layers / speed),
        TimeTerm("head", 2 * flops.head / speed),
        TimeTerm("tensor-parallel reductions", collectives("backward")),
        TimeTerm("recomputation", flops.layers / speed * recompute + collectives("recompute")),
    )
    return forward, backward


def _gathers_s(gather_s: float, strategy: Strategy) -> tuple[float, float]:
    """Seconds of gathering a stage's blocks, per forward and per backward of one micro-batch."""
    if strategy.keep_gathered:
        return gather_s / strategy.num_micro_batches, 0.0
    each_s = gather_s / (2 * strategy.num_micro_batches)
    return each_s, each_s


def _gathering(
    gather_s: float, read_s: float, compute_s: float, num_blocks: int, strategy: Strategy
) -> tuple[TimeTerm, ...]:
    """What gathering adds, and reading from a tier before it: all of it, or, where it is done ahead, that of the first
    block and what the others take longer than the blocks that run meanwhile. With shards on a tier, of the blocks
    ahead the last is read and not gathered."""
    ahead = strategy.prefetch - (strategy.offload.parameters != "none")

    def hidden_s(seconds: float) -> float:
        return min(seconds, compute_s) * (1 - 1 / num_blocks)

    gathering = TimeTerm("parameter gathering", gather_s - (hidden_s(gather_s) if ahead > 0 else 0.0))
    if strategy.offload.parameters == "none":
        return (gathering,)
    return gathering, TimeTerm("offloaded parameters", read_s - (hidden_s(read_s) if strategy.prefetch else 0.0))


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
    parameter written (and read where it is its own master). ZeRO updates this rank's shard."""
    recipe = strategy.recipe
    moments = NUM_MOMENTS[job.optimizer]
    master = 2 * recipe.master_bytes if recipe.master else recipe.parameter_bytes
    per_element = recipe.sent_gradient_bytes + 2 * moments * recipe.moment_bytes + master + recipe.parameter_bytes
    share = sharding(strategy).num_shards
    return num_parameters * per_element / share / cluster.device.memory_bandwidth_bytes_per_s


def boundaries_s(model: ModelSpec, job: Job, strategy: Strategy, cluster: ClusterSpec) -> tuple[float, ...]:
    """Seconds of sending one micro-batch's hidden states over each stage boundary."""
    payload = hidden_bytes(model, job, strategy)
    links = (boundary_link(stage, strategy, cluster) for stage in range(strategy.pp - 1))
    return tuple(flat_s("send", payload, 2, link, cluster.backend) for link in links)


def has_bound(strategy: Strategy) -> bool:
    """Whether :func:`stage_ends_s` can be asked; where not, the clock must time the program."""
    return find_schedule(strategy.schedule).further_s is not None


def stage_ends_s(costs: StepCosts, strategy: Strategy) -> list[float]:
    """When each stage ends its last backward, in closed form; the first of them is the pipeline's makespan.

    The way of the first micro-batch, and what the others add at least, which the schedule declares: a lower bound on
    what the clock finds, exact for equal stages without transfer time. What a stage adds also delays the stages
    before it.

    Raises UnsupportedError for a schedule that declares no bound.
    """
    further_s = find_schedule(strategy.schedule).further_s
    if further_s is None:
        raise UnsupportedError(f"schedule `{strategy.schedule}` declares no bound on its time; simulate it instead")
    times = costs.times
    added = accumulate(reversed(further_s(times, strategy.num_micro_batches)), max)
    alone = accumulate(
        (backward_s + link_s for backward_s, link_s in zip(times.backward_s[::-1], times.links_s[::-1], strict=True)),
        initial=sum(times.forward_s) + sum(times.boundaries_s),
    )
    next(alone)
    return [end + more for end, more in zip(alone, added, strict=True)][::-1]


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


def step_terms(costs: StepCosts, strategy: Strategy, time: StepTime) -> tuple[TimeTerm, ...]:
    """The step by cause, on the stage that works longest; the terms add up to `time.total_s`."""
    slowest = max(costs.stages, key=lambda stage: stage.forward_s + stage.backward_s)
    return _by_cause([slowest], strategy.num_micro_batches, "bubble and transfers", time)


def mean_terms(costs: StepCosts, strategy: Strategy, time: StepTime) -> tuple[TimeTerm, ...]:
    """The step by cause, as the mean over its stages; the terms add up to `time.total_s`.

    For comparing strategies, whose slowest stages may do different work: over all devices the layers and the head cost
    as much however they are split, and what a split loses by uneven stages stands in a term of its own.
    """
    return _by_cause(costs.stages, strategy.num_micro_batches, "bubble, uneven stages and transfers", time)


def _by_cause(stages: Sequence[StageCosts], m: int, waiting: str, time: StepTime) -> tuple[TimeTerm, ...]:
    work: dict[str, float] = {}
    for stage in stages:
        for term in (*stage.forward, *stage.backward):
            work[term.name] = work.get(term.name, 0.0) + m * term.seconds / len(stages)
    return (
        *(TimeTerm(name, seconds) for name, seconds in work.items()),
        TimeTerm(waiting, max(0.0, time.pipeline_s - sum(work.values()))),
        TimeTerm("data-parallel communication", time.data_comm_exposed_s),
        TimeTerm("optimizer", time.optimizer_s),
    )
