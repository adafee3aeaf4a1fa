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

from meshwright.core.axes import PP
from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import InputError
from meshwright.core.job import Job
from meshwright.core.measures import StepTime, Traffic
from meshwright.core.model import ModelSpec
from meshwright.core.precision import DTYPE_BYTES
from meshwright.core.program import Kind
from meshwright.core.strategy import Strategy
from meshwright.cost.flops import stage_flops
from meshwright.cost.network import Route, boundary_link, flat_s, route
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


def routes(model: ModelSpec, strategy: Strategy, cluster: ClusterSpec, axes: Sequence[str]) -> dict[str, Route]:
    """The route of each axis."""
    return {axis: route(axis, model, strategy, cluster) for axis in axes}


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
    over = routes(model, strategy, cluster, sorted({axis for (_, axis, _), _ in rows}))
    total: dict[str, float] = {}
    for (primitive, axis, phase), row in rows:
        seconds = row.calls * over[axis].seconds(primitive, row.payload_bytes / row.calls)
        total[phase] = total.get(phase, 0.0) + seconds
    return total


def optimizer_s(num_parameters: int, job: Job, strategy: Strategy, cluster: ClusterSpec) -> float:
    """Bytes that one update moves, over the memory bandwidth: gradient read, moments and master read and written,
    parameter written (and read where it is its own master). ZeRO-1 updates a share of 1/dp."""
    recipe = strategy.recipe
    moments = 2 if job.optimizer == "adamw" else 0
    master = 2 * recipe.master_bytes if recipe.master else recipe.parameter_bytes
    per_element = DTYPE_BYTES[recipe.gradient] + 2 * moments * recipe.moment_bytes + master + recipe.parameter_bytes
    share = strategy.dp if strategy.zero else 1
    return num_parameters * per_element / share / cluster.device.memory_bandwidth_bytes_per_s


def boundaries_s(model: ModelSpec, job: Job, strategy: Strategy, cluster: ClusterSpec) -> tuple[float, ...]:
    """Seconds of sending one micro-batch's hidden states over each stage boundary."""
    payload = hidden_bytes(model, job, strategy)
    links = (boundary_link(stage, strategy, cluster) for stage in range(strategy.pp - 1))
    return tuple(flat_s("send", payload, 2, link, cluster.backend) for link in links)


def pipeline_s(costs: StepCosts, strategy: Strategy) -> float:
    """Makespan of the pipeline in closed form; exact for equal stages without transfer time.

    The first micro-batch passes every stage twice. Each further one adds the time of the slowest stage; under 1F1B,
    where stage r holds at most p−r micro-batches, at least the round trip from r over the p−r they share.
    """
    m, p = strategy.num_micro_batches, strategy.pp
    work = [stage.forward_s + stage.backward_s for stage in costs.stages]
    there_and_back = [2 * seconds for seconds in costs.boundaries_s] + [0.0]
    once = sum(work) + sum(there_and_back)
    if strategy.schedule == "naive":
        return m * once
    if strategy.schedule == "gpipe":
        slowest = max(s.forward_s for s in costs.stages) + max(s.backward_s for s in costs.stages)
        return once + (m - 1) * slowest
    trip, rate = 0.0, max(work)
    for stage in reversed(range(p)):
        trip += work[stage] + there_and_back[stage]
        rate = max(rate, trip / min(p - stage, m))
    return once + (m - 1) * rate


def stage_ends_s(costs: StepCosts, makespan_s: float) -> list[float]:
    """When each stage ends its last backward, in closed form: the last gradient still has to reach stage 0."""
    ends = [makespan_s]
    for stage, boundary_s in zip(costs.stages[:-1], costs.boundaries_s, strict=True):
        ends.append(ends[-1] - stage.backward_s - boundary_s)
    return ends


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
        Term("bubble and transfers", time.pipeline_s - sum(work.values())),
        Term("data-parallel communication", time.data_comm_exposed_s),
        Term("optimizer", time.optimizer_s),
    )
