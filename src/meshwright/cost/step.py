"""A training step, put together from what its stages take.

    step = pipeline (forward, backward, recompute, tensor-parallel reductions, context-parallel messages, transfers,
                     bubble)
         + what backward does not hide of the gradient reduction, + parameter gather and scalar reductions
         + optimizer

When a pipeline ends is a closed form here, or found by the clock (`sim.clock`); :mod:`meshwright.cost.latency` prices
its stages.

Sources: Narayanan et al. 2021 §3 (pipeline), Li et al. 2020 §3.2 (overlap with backward).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from meshwright.core.errors import UnsupportedError
from meshwright.core.measures import StepTime
from meshwright.core.program import Kind
from meshwright.core.schedule import StageTimes
from meshwright.core.strategy import Strategy
from meshwright.cost.terms import TimeTerm, total_s


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
    """The step by cause, as the mean over the pipeline's ranks; the terms add up to `time.total_s`.

    Over all devices the layers and the head cost as much however they are split, so that strategies can be compared;
    what a split loses by uneven stages stands with the bubble: both are ranks that wait.
    """
    work: dict[str, float] = {}
    for stage in costs.stages:
        for term in (*stage.forward, *stage.backward):
            seconds = strategy.micro_batches_per_stage * term.seconds / strategy.pp
            work[term.name] = work.get(term.name, 0.0) + seconds
    return (
        *(TimeTerm(name, seconds) for name, seconds in work.items()),
        TimeTerm("bubble, uneven stages and transfers", max(0.0, time.pipeline_s - sum(work.values()))),
        TimeTerm("data-parallel communication", time.data_comm_exposed_s),
        TimeTerm("optimizer", time.optimizer_s),
    )
