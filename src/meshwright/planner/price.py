"""What a strategy costs: memory of its fullest rank, traffic of that rank, seconds of a step.

A `Pricer` belongs to one model, cluster and job and remembers what candidates share: pipeline ranks of one kind (for
each stage first, last, number of layers) cost the same, and seconds and traffic of a rank do not depend on the order in
which it works. The pipeline's
makespan is a closed form first; the clock replays the table of actions for the few strategies that are worth it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.core.axes import MESH_ORDER, PP, rank_of
from meshwright.core.cluster import ClusterSpec
from meshwright.core.flat import Bucket, rank_buckets
from meshwright.core.job import Job
from meshwright.core.measures import MemoryBreakdown, StepTime, Traffic
from meshwright.core.model import ModelSpec
from meshwright.core.profile import OWN, Stack
from meshwright.core.program import COMPUTE_KINDS
from meshwright.core.strategy import Strategy
from meshwright.core.units import format_bytes
from meshwright.cost.latency import (
    StageCosts,
    StepCosts,
    boundaries_s,
    has_bound,
    rank_ends_s,
    stage_costs,
    step_terms,
    step_time,
)
from meshwright.cost.memory import activations_by_rank, memory
from meshwright.cost.offload import offload_forecast
from meshwright.cost.stack_memory import with_stack
from meshwright.cost.terms import TimeTerm
from meshwright.cost.traffic import micro_batch_traffic, stages_traffic, step_traffic
from meshwright.schedule.build import build_program
from meshwright.schedule.timeline import Timeline
from meshwright.sim.clock import simulate

Key = tuple[object, ...]


MAX_CELLS = 2**15
"""Stages × micro-batches of a timetable that is replayed or drawn; of a longer one the closed form must do."""


def is_long(strategy: Strategy) -> bool:
    """Whether the timetable has more than `MAX_CELLS` cells."""
    return num_cells(strategy) > MAX_CELLS


def num_cells(strategy: Strategy) -> int:
    """Stages × micro-batches of its timetable."""
    return strategy.pp * strategy.stages_per_rank * strategy.num_micro_batches


@dataclass(frozen=True, slots=True)
class Forecast:
    """One priced strategy."""

    strategy: Strategy
    memory: MemoryBreakdown
    """Of the rank that holds most."""
    rank: int
    """That rank; memory and traffic are its own."""
    traffic: Traffic
    step_time: StepTime
    usable_memory_bytes: int
    host_is_device: bool = False
    """Whether what is offloaded to the host takes the device's memory."""
    host_limit_bytes: int | None = None
    """What a rank may offload to the host; None where the cluster does not say."""
    disk_limit_bytes: int | None = None
    """Likewise to a disk."""
    simulated: bool = False
    """True where the pipeline's time comes from the clock, or from the closed form of a table without an end; False
    where the clock may still replay it."""

    @property
    def fits(self) -> bool:
        return self._excess is None

    @property
    def device_bytes(self) -> int:
        """Of the device's memory, that the rank takes."""
        return self.memory.total_bytes + self.memory.host_bytes * self.host_is_device

    @property
    def _excess(self) -> str | None:
        """Where more is needed than there is."""
        pairs = {
            "usable": (self.device_bytes, self.usable_memory_bytes),
            "of the host": (self.memory.host_bytes, self.host_limit_bytes),
            "of the disk": (self.memory.disk_bytes, self.disk_limit_bytes),
        }
        return next((name for name, (needs, has) in pairs.items() if has is not None and needs > has), None)

    @property
    def limit(self) -> str:
        """What memory allows, in words."""
        needs, has = {
            "of the host": (self.memory.host_bytes, self.host_limit_bytes),
            "of the disk": (self.memory.disk_bytes, self.disk_limit_bytes),
        }.get(self._excess or "", (self.device_bytes, self.usable_memory_bytes))
        where = self._excess or "usable"
        return f"needs {format_bytes(needs)} per rank of {format_bytes(has or 0)} {where}"


def rank_kinds(strategy: Strategy, num_layers: int) -> tuple[int, ...]:
    """For each pipeline rank the first of its kind: for each stage the same ends of the model, the same number of
    layers, and the same neighbours on the rank itself."""
    layers, ranks = strategy.stage_layers(num_layers), strategy.stage_ranks
    first_of: dict[tuple[object, ...], int] = {}
    kinds = []
    for rank, stages in enumerate(strategy.stages_by_rank):
        kind = tuple(
            (*strategy.stage_ends(stage), len(layers[stage]), *(ranks[near : near + 1] == (rank,) for near in beside))
            for stage in stages
            for beside in [(max(0, stage - 1), stage + 1)]
        )
        kinds.append(first_of.setdefault(kind, rank))
    return tuple(kinds)


@dataclass(frozen=True, slots=True)
class _Held:
    """What a rank holds: its flat buckets, and the elements in them without padding."""

    buckets: tuple[Bucket, ...]
    num_parameters: int


def first_of(rank: int) -> dict[str, int]:
    """Mesh coordinates of the first device of a pipeline rank."""
    return {**dict.fromkeys(MESH_ORDER, 0), PP: rank}


def _held_key(strategy: Strategy, rank: int) -> Key:
    """All that decides what a pipeline rank holds."""
    s = strategy
    by_block = s.zero >= 2
    cut = s.layers_per_stage, s.stage_ranks, s.num_parts
    return (
        s.dp,
        s.tp,
        s.pp,
        s.ep,
        s.tensor,
        s.sequence,
        s.context,
        cut,
        s.bucket_bytes,
        s.precision,
        s.tile,
        by_block,
        rank,
    )


def _once_key(strategy: Strategy, rank: int) -> Key:
    """All that decides what it sends over dp: once per step, or with ZeRO-2 and 3 per micro-batch."""
    s = strategy
    times = s.num_micro_batches if s.reduces_each else 1
    return *_held_key(s, rank), s.zero, s.shard_over, s.ranks_per_node, s.keeps_gathered, times


def _again(strategy: Strategy) -> tuple[str, int | None, int]:
    return strategy.recompute, strategy.recompute_layers, strategy.recompute_group


class Pricer:
    """Prices strategies of one model, cluster and job."""

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, job: Job, stack: Stack = OWN) -> None:
        self.model = model
        self.cluster = cluster
        self.job = job
        self.stack = stack
        self.num_simulations = 0
        self._ranks: dict[Key, tuple[Traffic, tuple[StageCosts, ...]]] = {}
        self._steps: dict[Key, Traffic] = {}
        self._held: dict[Key, _Held] = {}
        self._rank_kinds: dict[Key, tuple[int, ...]] = {}

    def forecast(self, strategy: Strategy) -> Forecast:
        """Memory and traffic exactly; seconds in closed form, or by the clock for a schedule that declares none."""
        costs = self.step_costs(strategy)
        rank, breakdown = self.fullest(strategy)
        is_bounded = has_bound(strategy)
        ends_s = rank_ends_s(costs, strategy) if is_bounded else last_work_ends_s(self._clocked(costs, strategy))
        return Forecast(
            strategy=strategy,
            memory=breakdown,
            rank=rank_of(first_of(rank), strategy.sizes),
            traffic=self._rank(strategy, rank)[0],
            step_time=step_time(costs, strategy, ends_s),
            usable_memory_bytes=self._usable_bytes,
            host_is_device=self.cluster.host_is_device,
            host_limit_bytes=_share(self.cluster.host_memory_bytes, self.cluster),
            disk_limit_bytes=_share(self.cluster.disk_bytes, self.cluster),
            simulated=not is_bounded or strategy.pipeline_schedule.is_asynchronous,
        )

    @property
    def _usable_bytes(self) -> int:
        """All of the device's memory where the stack says what it takes beside the job."""
        cluster = self.cluster
        return cluster.device.memory_bytes if self.stack.context_bytes else cluster.usable_memory_bytes

    def simulate(self, forecast: Forecast) -> Forecast:
        """The same forecast, its pipeline timed by the clock; unchanged where it is already, or where it `is_long`."""
        if forecast.simulated or is_long(forecast.strategy):
            return forecast
        costs = self.step_costs(forecast.strategy)
        ends_s = last_work_ends_s(self._clocked(costs, forecast.strategy))
        return replace(forecast, step_time=step_time(costs, forecast.strategy, ends_s), simulated=True)

    def timeline(self, strategy: Strategy) -> Timeline:
        """When each action of the pipeline runs."""
        return self._clocked(self.step_costs(strategy), strategy)

    def _clocked(self, costs: StepCosts, strategy: Strategy) -> Timeline:
        self.num_simulations += 1
        return simulate(build_program(strategy), costs)

    def terms(self, forecast: Forecast) -> tuple[TimeTerm, ...]:
        """The step's seconds by cause; they add up to the forecast's total."""
        return step_terms(self.step_costs(forecast.strategy), forecast.strategy, forecast.step_time)

    def step_costs(self, strategy: Strategy) -> StepCosts:
        """Prices of every stage and every stage boundary."""
        kinds, ranks = self._kinds(strategy), strategy.stage_ranks
        priced = {rank: self._rank(strategy, rank)[1] for rank in set(kinds)}
        costs = [iter(priced[kind]) for kind in kinds]
        return StepCosts(
            stages=tuple(next(costs[rank]) for rank in ranks),
            boundaries_s=boundaries_s(self.model, self.job, strategy, self.cluster, self.stack),
            stage_ranks=ranks,
        )

    def _kinds(self, strategy: Strategy) -> tuple[int, ...]:
        key = (strategy.pp, strategy.layers_per_stage, strategy.stage_ranks, strategy.num_parts)
        if key not in self._rank_kinds:
            self._rank_kinds[key] = rank_kinds(strategy, self.model.num_layers)
        return self._rank_kinds[key]

    def _rank(self, strategy: Strategy, rank: int) -> tuple[Traffic, tuple[StageCosts, ...]]:
        """Traffic of a pipeline rank, and seconds of its stages: the same for every order."""
        s = strategy
        key = (*_once_key(s, rank), s.micro_batch_size, s.num_micro_batches, _again(s), s.prefetch, s.offload)
        if key not in self._ranks:
            held, once = self._rank_buckets(s, rank), self._per_step(s, rank)
            moved = offload_forecast(s, self.job.optimizer, held.buckets) if s.offload.is_used else None
            costs = []
            for stage in s.rank_stages(rank):
                sent = Traffic({**stages_traffic(self.model, self.job, s, [stage]).rows, **once.rows})
                costs.append(
                    stage_costs(
                        self.model, self.job, s, self.cluster, stage, sent, held.num_parameters, moved, self.stack
                    )
                )
            repeated = micro_batch_traffic(self.model, self.job, s, rank)
            self._ranks[key] = Traffic({**repeated.rows, **once.rows}), tuple(costs)
        return self._ranks[key]

    def _per_step(self, strategy: Strategy, rank: int) -> Traffic:
        """What is sent once per step: the same for all micro-batches and any recomputation."""
        key = _once_key(strategy, rank)
        if key not in self._steps:
            held = self._rank_buckets(strategy, rank)
            self._steps[key] = step_traffic(self.model, strategy, first_of(rank), held.buckets)
        return self._steps[key]

    def _rank_buckets(self, strategy: Strategy, rank: int) -> _Held:
        """Buckets of the first device of a pipeline rank: the same whatever its micro-batches and its ZeRO stage."""
        key = _held_key(strategy, rank)
        if key not in self._held:
            buckets = rank_buckets(self.model, strategy, first_of(rank))
            self._held[key] = _Held(buckets, sum(slot.stop - slot.start for b in buckets for slot in b.slots))
        return self._held[key]

    def memory_by_rank(self, strategy: Strategy) -> dict[int, MemoryBreakdown]:
        """Pipeline rank → memory of its fullest device, for the rank of each kind with the most activations.

        Index 0 of dp and tp has the larger part where a split is uneven.
        """
        fullest: dict[int, tuple[int, int]] = {}
        kept = activations_by_rank(self.model, self.job, strategy, range(strategy.pp))
        for rank, (kind, kept_bytes) in enumerate(zip(self._kinds(strategy), kept, strict=True)):
            if kind not in fullest or kept_bytes > fullest[kind][0]:
                fullest[kind] = kept_bytes, rank
        return {rank: self._memory(strategy, rank) for _, rank in sorted(fullest.values(), key=lambda item: item[1])}

    def _memory(self, strategy: Strategy, rank: int) -> MemoryBreakdown:
        held = self._rank_buckets(strategy, rank)
        own = memory(self.model, self.job, strategy, first_of(rank), held.buckets)
        if self.stack == OWN:
            return own
        return with_stack(own, self.model, self.job, strategy, rank, held.num_parameters, self.stack)

    def fullest(self, strategy: Strategy) -> tuple[int, MemoryBreakdown]:
        """The pipeline rank whose devices hold most, and what they hold."""
        shared = self.cluster.host_is_device
        return max(
            self.memory_by_rank(strategy).items(), key=lambda item: item[1].total_bytes + item[1].host_bytes * shared
        )


def _share(node_bytes: int | None, cluster: ClusterSpec) -> int | None:
    """A rank's part of what a node has."""
    return None if node_bytes is None else node_bytes // cluster.devices_per_node


def last_work_ends_s(timeline: Timeline) -> list[float]:
    """When each rank ends its last backward; its last gradient is on the way from then on."""
    return [max(event.end_s for event in row if event.action.kind in COMPUTE_KINDS) for row in timeline.events]


def price(model: ModelSpec, cluster: ClusterSpec, job: Job, strategy: Strategy) -> Forecast:
    """The simulated forecast of one strategy."""
    pricer = Pricer(model, cluster, job)
    return pricer.simulate(pricer.forecast(strategy))
