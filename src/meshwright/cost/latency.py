"""Seconds of one training step, each a list of named terms.

    step = pipeline (forward, backward, recompute, tensor-parallel reductions, context-parallel messages, transfers,
                     bubble)
         + what backward does not hide of the gradient reduction, + parameter gather and scalar reductions
         + optimizer

Collective seconds are derived from :class:`~meshwright.core.measures.Traffic`, the rows that the ledger counts, so that
what is priced is what is sent. Backward counts twice the FLOPs of forward.

Sources: Narayanan et al. 2021 §3 (pipeline), Korthikanti et al. 2022 (FLOPs), Li et al. 2020 §3.2 (overlap with
backward), Rajbhandari et al. 2020 §7 (ZeRO).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise

from meshwright.core.axes import CP, EP, PP, TP
from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import UnsupportedError
from meshwright.core.job import Job
from meshwright.core.measures import StepTime, Traffic
from meshwright.core.model import ModelSpec
from meshwright.core.precision import NUM_MOMENTS
from meshwright.core.profile import OWN, Stack
from meshwright.core.program import Kind
from meshwright.core.schedule import StageTimes
from meshwright.core.sharding import sharding
from meshwright.core.strategy import Strategy
from meshwright.cost.compute import Collectives, Compute, Passes, stage_compute
from meshwright.cost.context import ATTENTION_PRIMITIVES
from meshwright.cost.memory import moved_units
from meshwright.cost.network import Route, boundary_link, flat_s, route
from meshwright.cost.offload import OffloadForecast, TierSeconds, streamed_s, tier_seconds
from meshwright.cost.terms import TimeTerm, total_s
from meshwright.cost.traffic import hidden_bytes


@dataclass(frozen=True)
class StageCosts:
    """What one rank of a pipeline stage spends. `forward` and `backward` are of one micro-batch; the rest is of all
    the rank's stages together."""

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
    weight_gradients_s: float = 0.0
    """Of backward, what W takes where it is run apart."""
    hides_reduction: bool = True
    """Whether backward goes on meanwhile."""
    slowdown: float = 1.0
    """Of backward while it does."""
    exposed_share: float = 1.0
    """Of what backward leaves of the reduction, that is seen."""
    network_busy_s: float = 0.0
    """Of one backward, that the network gathers parameters."""

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
        if not self.hides_reduction:
            return self.num_reducing * each_s
        share = self.num_reducing / max(1, self.num_reductions)
        window_s = max(0.0, self.backward_s - self.network_busy_s)
        exposed_s = max(each_s - (1 - share) * window_s, share * each_s)
        return self.num_reducing * (self.exposed_share * exposed_s + (self.slowdown - 1) * (each_s - exposed_s))


@dataclass(frozen=True)
class StepCosts:
    """Prices of one step: of every stage, and of the transfer over every stage boundary (each direction)."""

    stages: tuple[StageCosts, ...]
    boundaries_s: tuple[float, ...]
    """Nothing where the two stages stand on one rank."""
    stage_ranks: tuple[int, ...] = ()
    """Pipeline rank of each stage; empty where each has one."""
    turns: float = 1.0
    """Of its seconds, that a rank takes while all others wait: less than 1 where ranks share cores."""

    @cached_property
    def by_rank(self) -> tuple[tuple[StageCosts, ...], ...]:
        """Pipeline rank → its stages, ascending."""
        ranks = self.stage_ranks or tuple(range(len(self.stages)))
        pairs = tuple(zip(ranks, self.stages, strict=True))
        return tuple(tuple(stage for of, stage in pairs if of == rank) for rank in range(max(ranks) + 1))

    @property
    def times(self) -> StageTimes:
        """What a schedule's bound is computed from, where every rank has one stage."""
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
            case Kind.I:
                return self.stages[stage].backward_s - self.stages[stage].weight_gradients_s
            case Kind.W:
                return self.stages[stage].weight_gradients_s
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
    stack: Stack = OWN,
) -> StageCosts:
    """Price a stage.

    Args:
        moved: what the rank offloads.
        sent: what a rank of the stage sends in one step, as from :func:`meshwright.cost.traffic.traffic`; where it has
            several stages, of what each micro-batch sends this stage's part alone.
        num_parameters: elements of the parameters that the rank holds, with all its stages.
        stack: the software that runs it.

    Raises InputError where the cluster states no peak for the strategy's compute dtype.
    """
    phases = seconds_by_phase(model, strategy, cluster, sent, stack)
    compute = stage_compute(model, job, strategy, cluster, stage, in_layers(strategy, phases), stack)
    reductions = sum(row.calls for (_, _, phase), row in sent.rows.items() if phase == "gradients")
    states = RankStates(num_parameters, moved=moved)
    return joined_costs(model, job, strategy, cluster, stage, compute, Sent(phases, reductions), states, stack)


@dataclass(frozen=True, slots=True)
class Sent:
    """What a rank's collectives take in a step."""

    seconds: Mapping[str, float]
    """By phase."""
    num_reductions: int
    """Calls that reduce gradients."""


@dataclass(frozen=True, slots=True)
class RankStates:
    """What a rank updates, with all its stages."""

    num_parameters: int
    """Elements."""
    num_spread: int = 0
    """Of them, of experts that only some data-parallel ranks hold."""
    moved: OffloadForecast | None = None
    """What of it is offloaded."""


def in_layers(strategy: Strategy, phases: Mapping[str, float]) -> Collectives:
    """Of one micro-batch."""
    m, passes = strategy.micro_batches_per_stage, ("forward", "recompute", "backward")
    forward_s, again_s, backward_s = (phases.get(phase, 0.0) / m for phase in passes)
    messages = Passes(*(phases.get(of_attention(phase), 0.0) / m for phase in passes))
    return Collectives(forward_s, again_s, backward_s, messages)


def of_attention(phase: str) -> str:
    """Key of a phase's messages between the ranks that share a sequence."""
    return f"{phase} {CP}"


def joined_costs(
    model: ModelSpec,
    job: Job,
    strategy: Strategy,
    cluster: ClusterSpec,
    stage: int,
    compute: Compute,
    sent: Sent,
    states: RankStates,
    stack: Stack,
) -> StageCosts:
    """A stage from its parts: :func:`stage_costs` for who has what it computes, and what is sent, already."""
    phases, moved = sent.seconds, states.moved
    m, per_rank = strategy.micro_batches_per_stage, strategy.stages_per_rank
    moves = _moves(model, job, strategy, cluster, stage, compute, phases, moved, stack)
    update_s = strategy.num_updates * stack.optimizer_passes
    update_s *= optimizer_s(states.num_parameters, job, strategy, cluster, states.num_spread)
    step_s = stack.step_s + (cluster.device.profile.host.step_s if cluster.device.profile else 0.0)
    tiers = tier_seconds(moved, cluster) if moved else TierSeconds()
    if moved:
        update_s = streamed_s(update_s, tiers.update_s, moved.num_groups)
    forward, backward = (*compute.forward, *moves.forward), (*compute.backward, *moves.backward)
    beside_s = (
        m * per_rank * (total_s(compute.forward) + total_s(compute.backward)) if strategy.offload.delayed else 0.0
    )
    return StageCosts(
        forward=forward,
        backward=backward,
        reduction=(TimeTerm("gradients", phases.get("gradients", 0.0)),),
        num_reductions=sent.num_reductions,
        num_reducing=m * per_rank if strategy.reduces_each else strategy.num_updates,
        after=_after(phases, total_s(forward), stack),
        optimizer=(TimeTerm("optimizer", max(0.0, update_s - beside_s) + tiers.handover_s + step_s),),
        weight_gradients_s=compute.weight_gradients_s,
        network_busy_s=moves.gathered_s if strategy.reduces_each else 0.0,
        hides_reduction=stack.overlaps_gradients,
        exposed_share=stack.exposed_gradient_share,
        slowdown=_slowdown(cluster, stack),
    )


def _slowdown(cluster: ClusterSpec, stack: Stack) -> float:
    """Of compute while a collective runs beside it."""
    profile = cluster.device.profile
    return stack.overlap_slowdown or (profile.overlap_slowdown if profile else 1.0)


def _after(phases: Mapping[str, float], forward_s: float, stack: Stack) -> tuple[TimeTerm, ...]:
    """What follows the update; its parameters may be gathered under the first forward."""
    seconds = {phase: phases[phase] for phase in ("count", "router", "norm", "parameters") if phase in phases}
    if stack.overlaps_parameters and "parameters" in seconds:
        seconds["parameters"] = stack.exposed_gradient_share * max(0.0, seconds["parameters"] - forward_s)
    return tuple(TimeTerm(phase, value) for phase, value in seconds.items())


@dataclass(frozen=True, slots=True)
class _Moves:
    """Terms of one micro-batch beside compute and its reductions: gathering, tiers, transfers that block."""

    forward: tuple[TimeTerm, ...]
    backward: tuple[TimeTerm, ...]
    gathered_s: float
    """Of one backward, that the network gathers."""


def _moves(
    model: ModelSpec,
    job: Job,
    strategy: Strategy,
    cluster: ClusterSpec,
    stage: int,
    compute: Compute,
    phases: Mapping[str, float],
    moved: OffloadForecast | None,
    stack: Stack,
) -> _Moves:
    m, per_rank = strategy.micro_batches_per_stage, strategy.stages_per_rank
    num_blocks = len(strategy.stage_layers(model.num_layers)[stage]) + 1
    tiers = tier_seconds(moved, cluster) if moved else TierSeconds()
    gathered_s = phases.get("gather", 0.0) / per_rank
    gathers_s, reads_s = _gathers_s(gathered_s, strategy), _gathers_s(tiers.gathers_s / per_rank, strategy)
    windows = (total_s(compute.forward), total_s(compute.backward))
    fetches = [
        _gathering(gather_s, read_s, compute_s, num_blocks, strategy, _slowdown(cluster, stack))
        for gather_s, read_s, compute_s in zip(gathers_s, reads_s, windows, strict=True)
    ]
    sums_s = tiers.sums_s / (m * per_rank)
    sums = (TimeTerm("offloaded gradients", sums_s),) if strategy.offload.gradients != "none" else ()
    waits = _blocking(model, job, strategy, cluster, stage, stack)
    away = [_moving(model, job, strategy, cluster, stage, compute_s) for compute_s in windows]
    return _Moves((*fetches[0], *away[0], *waits), (*fetches[1], *sums, *away[1], *waits), gathers_s[1])


def _moving(
    model: ModelSpec, job: Job, strategy: Strategy, cluster: ClusterSpec, stage: int, compute_s: float
) -> tuple[TimeTerm, ...]:
    """What the copies of kept activations add, one way: of the first unit all, of the others what they take longer than
    what runs meanwhile. CPU ranks copy by themselves, and hide nothing."""
    speed = cluster.tier_bytes_per_s("cpu")
    if not strategy.offload.moves_activations or speed is None:
        return ()
    num_units, num_bytes = moved_units(model, job, strategy, stage)
    seconds = num_bytes / speed[0]
    hides = cluster.backend != "gloo" and num_units > 0
    hidden_s = min(seconds, compute_s) * (1 - 1 / num_units) if hides else 0.0
    return (TimeTerm("offloaded activations", seconds - hidden_s),)


def _blocking(
    model: ModelSpec, job: Job, strategy: Strategy, cluster: ClusterSpec, stage: int, stack: Stack
) -> tuple[TimeTerm, ...]:
    """The transfer that a rank waits for, each way: sending on and receiving the next go together."""
    if stack.transfers == "beside" or strategy.pp == 1:
        return ()
    crossed_s = transfers_s(model, job, strategy, cluster, stack)
    beside = crossed_s[max(0, stage - 1) : stage + 1]
    return (TimeTerm("transfers", max(beside) + stack.transfer_s),)


def _gathers_s(gather_s: float, strategy: Strategy) -> tuple[float, float]:
    """Seconds of gathering a stage's blocks, per forward and per backward of one micro-batch."""
    if strategy.keeps_gathered:
        return gather_s / strategy.micro_batches_per_stage, 0.0
    each_s = gather_s / (2 * strategy.micro_batches_per_stage)
    return each_s, each_s


def _gathering(
    gather_s: float, read_s: float, compute_s: float, num_blocks: int, strategy: Strategy, slowdown: float
) -> tuple[TimeTerm, ...]:
    """What gathering adds, and reading from a tier before it: all of it, or, where it is done ahead, that of the first
    block and what the others take longer than the blocks that run meanwhile, or slow those down. With shards on a tier,
    of the blocks ahead the last is read and not gathered."""
    ahead = strategy.prefetch - (strategy.offload.parameters != "none")

    def hidden_s(seconds: float) -> float:
        return min(seconds, compute_s) * (1 - 1 / num_blocks)

    beside_s = hidden_s(gather_s) if ahead > 0 else 0.0
    first_s = gather_s / num_blocks if ahead > 0 else gather_s
    gathering = TimeTerm("parameter gathering", max(gather_s - beside_s, first_s + (slowdown - 1) * beside_s))
    if strategy.offload.parameters == "none":
        return (gathering,)
    return gathering, TimeTerm("offloaded parameters", read_s - (hidden_s(read_s) if strategy.prefetch else 0.0))


def seconds_by_phase(
    model: ModelSpec, strategy: Strategy, cluster: ClusterSpec, sent: Traffic, stack: Stack = OWN
) -> dict[str, float]:
    """Seconds in collectives by phase; transfers between stages are priced by boundary, not here. What attention over
    cp sends stands under keys of its own (:func:`of_attention`), because a ring's hops run under its blocks.

    With ZeRO-3 a stack may send all in one ring each, at a share of its speed. It may also scatter rows over tp before
    they are sent to their experts (:func:`_exchange_s`).
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
        key = of_attention(phase) if axis == CP and primitive in ATTENTION_PRIMITIVES else phase
        total[key] = total.get(key, 0.0) + seconds / (ring_share or 1.0)
    return total


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


def optimizer_s(num_parameters: int, job: Job, strategy: Strategy, cluster: ClusterSpec, num_spread: int = 0) -> float:
    """Bytes that one update moves, over the memory bandwidth: gradient read, moments and master read and written,
    parameter written (and read where it is its own master). ZeRO updates this rank's shard: of the `num_spread` of
    experts of a few ranks' own, one among those ranks."""
    recipe = strategy.recipe
    moments = NUM_MOMENTS[job.optimizer]
    master = 2 * recipe.master_bytes if recipe.master else recipe.parameter_bytes
    per_element = recipe.sent_gradient_bytes + 2 * moments * recipe.moment_bytes + master + recipe.parameter_bytes
    num_own = (num_parameters - num_spread) / sharding(strategy).num_shards
    num_own += num_spread / sharding(strategy, True).num_shards if num_spread else 0
    profile = cluster.device.profile
    reached = profile.memory_efficiency / profile.optimizer_passes if profile else 1.0
    return num_own * per_element / (reached * cluster.device.memory_bandwidth_bytes_per_s)


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


def has_bound(strategy: Strategy) -> bool:
    """Whether :func:`rank_ends_s` can be asked; where not, the clock must time the program."""
    declares = strategy.pipeline_schedule.further_s is not None
    is_endless = strategy.pipeline_schedule.is_asynchronous
    return declares or is_endless or strategy.stages_per_rank > 1 or strategy.splits_backward


def rank_ends_s(costs: StepCosts, strategy: Strategy) -> list[float]:
    """When each pipeline rank ends its work, in closed form; the largest is the pipeline's makespan.

    The way of the first micro-batch, and what the others add at least, which the schedule declares: a lower bound on
    what the clock finds, exact for equal stages without transfer time. What a stage adds also delays the stages
    before it. Where a rank has several stages, or backward is split, the bound is that of any order.

    Raises UnsupportedError for any other schedule that declares no bound.
    """
    if strategy.pipeline_schedule.is_asynchronous:
        return _steady_ends_s(costs, strategy)
    further_s = strategy.pipeline_schedule.further_s
    if strategy.stages_per_rank > 1 or (further_s is None and strategy.splits_backward):
        return _any_order_ends_s(costs, strategy)
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


def _steady_ends_s(costs: StepCosts, strategy: Strategy) -> list[float]:
    """Seconds of one step of many that follow each other without a flush, on each rank.

    Each micro-batch takes what the slowest stage works on it, or, where transfers are slow, the way from a stage to the
    last and back, shared by the micro-batches that the stage may have under way. Then all ranks wait for the step's
    loss: the way of its last micro-batch to the last stage.
    """
    times, p = costs.times, strategy.pp
    ways_s = (sum(times.work_s[r:]) + 2 * sum(times.boundaries_s[r:]) for r in range(p))
    each_s = max(*times.work_s, *(way_s / (p - r) for r, way_s in enumerate(ways_s)))
    loss_s = sum(times.forward_s[1:]) + sum(times.boundaries_s)
    return [strategy.num_micro_batches * each_s + loss_s] * p


def _any_order_ends_s(costs: StepCosts, strategy: Strategy) -> list[float]:
    """A rank begins when the first micro-batch has come to its first stage, and does all its work; behind its last
    input gradient those of the stages before it still follow."""
    ranks, m = strategy.stage_ranks, strategy.micro_batches_per_stage
    splits, two_ways = strategy.splits_backward, strategy.pipeline_schedule.num_directions > 1
    links_s = (*costs.boundaries_s, 0.0)
    inputs_s = [stage.backward_s - stage.weight_gradients_s * splits for stage in costs.stages]
    ends_s = [0.0] * strategy.pp
    for rank, stages in enumerate(costs.by_rank):
        ways = [_way_in(stage, strategy) for stage in strategy.rank_stages(rank)]
        begin_s = min(sum(costs.stages[s].forward_s + links_s[s] for s in way) for way in ways)
        work_s = m * sum(stage.forward_s + stage.backward_s for stage in stages)
        ends_s[rank] = max(ends_s[rank], begin_s + work_s)
        end_s = begin_s + work_s - m * sum(stage.weight_gradients_s for stage in stages) * splits
        for stage in () if two_ways else reversed(ways[0]):
            end_s += links_s[stage] + inputs_s[stage]
            ends_s[ranks[stage]] = max(ends_s[ranks[stage]], end_s)
    return ends_s


def _way_in(stage: int, strategy: Strategy) -> range:
    """The stages that a micro-batch passes before this one."""
    return range(stage - stage % strategy.num_parts, stage)


def step_time(costs: StepCosts, strategy: Strategy, ends_s: Sequence[float]) -> StepTime:
    """Put the terms of all stages together; `ends_s` is when each pipeline rank ends its last backward."""
    ends_s = _in_turns(costs, strategy, ends_s)
    makespan_s = max(ends_s)
    reduced_s = max(end_s + of[0].exposed_reduction_s for of, end_s in zip(costs.by_rank, ends_s, strict=True))
    busy_s = strategy.micro_batches_per_stage * sum(stage.forward_s + stage.backward_s for stage in costs.stages)
    return StepTime(
        pipeline_s=makespan_s,
        data_comm_exposed_s=max(reduced_s - makespan_s, 0.0) + max(total_s(stage.after) for stage in costs.stages),
        optimizer_s=max(total_s(stage.optimizer) for stage in costs.stages),
        bubble_fraction=max(0.0, 1 - busy_s / (strategy.pp * makespan_s)),
    )


def _in_turns(costs: StepCosts, strategy: Strategy, ends_s: Sequence[float]) -> Sequence[float]:
    """Where ranks share cores, one works faster while another waits: no sooner than all work is done, and no sooner
    than the pipeline takes with cores for each."""
    if costs.turns >= 1:
        return ends_s
    work_s = strategy.micro_batches_per_stage * sum(stage.forward_s + stage.backward_s for stage in costs.stages)
    return [max(costs.turns * end_s, min(end_s, work_s / strategy.pp)) for end_s in ends_s]


def step_terms(costs: StepCosts, strategy: Strategy, time: StepTime) -> tuple[TimeTerm, ...]:
    """The step by cause, on the pipeline rank that works longest; the terms add up to `time.total_s`."""
    slowest = max(costs.by_rank, key=lambda stages: sum(stage.forward_s + stage.backward_s for stage in stages))
    return _by_cause([slowest], strategy.micro_batches_per_stage, "bubble and transfers", time)


def mean_terms(costs: StepCosts, strategy: Strategy, time: StepTime) -> tuple[TimeTerm, ...]:
    """The step by cause, as the mean over the pipeline's ranks; the terms add up to `time.total_s`.

    For comparing strategies, whose slowest stages may do different work: over all devices the layers and the head cost
    as much however they are split, and what a split loses by uneven stages stands in a term of its own.
    """
    return _by_cause(costs.by_rank, strategy.micro_batches_per_stage, "bubble, uneven stages and transfers", time)


def _by_cause(ranks: Sequence[Sequence[StageCosts]], m: int, waiting: str, time: StepTime) -> tuple[TimeTerm, ...]:
    work: dict[str, float] = {}
    for stage in chain.from_iterable(ranks):
        for term in (*stage.forward, *stage.backward):
            work[term.name] = work.get(term.name, 0.0) + m * term.seconds / len(ranks)
    return (
        *(TimeTerm(name, seconds) for name, seconds in work.items()),
        TimeTerm(waiting, max(0.0, time.pipeline_s - sum(work.values()))),
        TimeTerm("data-parallel communication", time.data_comm_exposed_s),
        TimeTerm("optimizer", time.optimizer_s),
    )
