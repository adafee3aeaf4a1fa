"""What a strategy costs: memory of its fullest rank, traffic of that rank, seconds of a step.

A `Pricer` belongs to one model, cluster and job and remembers what candidates share: stages of one kind (first, last,
number of layers) cost the same, and seconds and traffic of a stage do not depend on the schedule. The pipeline's
makespan is a closed form first; the clock replays the table of actions for the few strategies that are worth it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.core.axes import DP, PP, TP, rank_of
from meshwright.core.cluster import ClusterSpec
from meshwright.core.flat import Bucket, rank_buckets
from meshwright.core.job import Job
from meshwright.core.measures import MemoryBreakdown, StepTime, Traffic
from meshwright.core.model import ModelSpec
from meshwright.core.program import COMPUTE_KINDS
from meshwright.core.strategy import Strategy
from meshwright.core.units import format_bytes
from meshwright.cost.latency import (
    StageCosts,
    StepCosts,
    TimeTerm,
    boundaries_s,
    has_bound,
    stage_costs,
    stage_ends_s,
    step_terms,
    step_time,
)
from meshwright.cost.memory import memory
from meshwright.cost.offload import offload_forecast
from meshwright.cost.traffic import micro_batch_traffic, step_traffic
from meshwright.schedule.build import build_program
from meshwright.schedule.closed_form import peak_live
from meshwright.schedule.timeline import Timeline
from meshwright.sim.clock import simulate

Key = tuple[object, ...]


MAX_CELLS = 2**15
"""Stages × micro-batches of a timetable that is replayed or drawn; of a longer one the closed form must do."""


def is_long(strategy: Strategy) -> bool:
    """Whether the timetable has more than `MAX_CELLS` cells."""
    return strategy.pp * strategy.num_micro_batches > MAX_CELLS


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
    """True where the pipeline's time comes from the clock, False where from the closed form."""

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


def stage_kinds(strategy: Strategy, num_layers: int) -> tuple[int, ...]:
    """For each stage the first stage of its kind: the same ends of the model, the same number of layers."""
    first_of: dict[tuple[bool, bool, int], int] = {}
    kinds = []
    for stage, layers in enumerate(strategy.stage_layers(num_layers)):
        kind = (stage == 0, stage == strategy.pp - 1, len(layers))
        kinds.append(first_of.setdefault(kind, stage))
    return tuple(kinds)


@dataclass(frozen=True, slots=True)
class _Held:
    """What a rank holds: its flat buckets, and the elements in them without padding."""

    buckets: tuple[Bucket, ...]
    num_parameters: int


def _held_key(strategy: Strategy, stage: int) -> Key:
    """All that decides what a rank of a stage holds."""
    s = strategy
    by_block = s.zero >= 2
    return s.dp, s.tp, s.pp, s.layers_per_stage, s.bucket_bytes, s.precision, s.tile, by_block, stage


def _once_key(strategy: Strategy, stage: int) -> Key:
    """All that decides what it sends over dp: once per step, or with ZeRO-2 and 3 per micro-batch."""
    s = strategy
    times = s.num_micro_batches if s.zero >= 2 else 1
    return *_held_key(s, stage), s.zero, s.shard_over, s.ranks_per_node, s.keep_gathered, times


class Pricer:
    """Prices strategies of one model, cluster and job."""

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, job: Job) -> None:
        self.model = model
        self.cluster = cluster
        self.job = job
        self.num_simulations = 0
        self._stages: dict[Key, tuple[Traffic, StageCosts]] = {}
        self._steps: dict[Key, Traffic] = {}
        self._held: dict[Key, _Held] = {}
        self._stage_kinds: dict[tuple[int, tuple[int, ...] | None], tuple[int, ...]] = {}

    def forecast(self, strategy: Strategy) -> Forecast:
        """Memory and traffic exactly; seconds in closed form, or by the clock for a schedule that declares none."""
        costs = self.step_costs(strategy)
        stage, breakdown = self.fullest(strategy)
        is_bounded = has_bound(strategy)
        ends_s = stage_ends_s(costs, strategy) if is_bounded else last_work_ends_s(self._clocked(costs, strategy))
        return Forecast(
            strategy=strategy,
            memory=breakdown,
            rank=rank_of({PP: stage, DP: 0, TP: 0}, strategy.sizes),
            traffic=self._stage(strategy, stage)[0],
            step_time=step_time(costs, strategy, ends_s),
            usable_memory_bytes=self.cluster.usable_memory_bytes,
            host_is_device=self.cluster.host_is_device,
            host_limit_bytes=_share(self.cluster.host_memory_bytes, self.cluster),
            disk_limit_bytes=_share(self.cluster.disk_bytes, self.cluster),
            simulated=not is_bounded,
        )

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
        kinds = self._kinds(strategy)
        priced = {stage: self._stage(strategy, stage)[1] for stage in set(kinds)}
        return StepCosts(
            stages=tuple(priced[stage] for stage in kinds),
            boundaries_s=boundaries_s(self.model, self.job, strategy, self.cluster),
        )

    def _kinds(self, strategy: Strategy) -> tuple[int, ...]:
        key = (strategy.pp, strategy.layers_per_stage)
        if key not in self._stage_kinds:
            self._stage_kinds[key] = stage_kinds(strategy, self.model.num_layers)
        return self._stage_kinds[key]

    def _stage(self, strategy: Strategy, stage: int) -> tuple[Traffic, StageCosts]:
        """Traffic and seconds of a stage: the same for every schedule."""
        s = strategy
        key = (*_once_key(s, stage), s.micro_batch_size, s.num_micro_batches, s.recompute, s.prefetch, s.offload)
        if key not in self._stages:
            held = self._rank_buckets(strategy, stage)
            repeated = micro_batch_traffic(self.model, self.job, strategy, stage)
            sent = Traffic({**repeated.rows, **self._per_step(strategy, stage).rows})
            moved = offload_forecast(s, self.job.optimizer, held.buckets) if s.offload.is_used else None
            costs = stage_costs(self.model, self.job, s, self.cluster, stage, sent, held.num_parameters, moved)
            self._stages[key] = sent, costs
        return self._stages[key]

    def _per_step(self, strategy: Strategy, stage: int) -> Traffic:
        """What is sent once per step: the same for all micro-batches and any recomputation."""
        key = _once_key(strategy, stage)
        if key not in self._steps:
            held = self._rank_buckets(strategy, stage)
            self._steps[key] = step_traffic(self.model, strategy, {PP: stage, DP: 0, TP: 0}, held.buckets)
        return self._steps[key]

    def _rank_buckets(self, strategy: Strategy, stage: int) -> _Held:
        """Buckets of the stage's first rank: the same whatever its micro-batches and its ZeRO stage."""
        key = _held_key(strategy, stage)
        if key not in self._held:
            buckets = rank_buckets(self.model, strategy, {PP: stage, DP: 0, TP: 0})
            self._held[key] = _Held(buckets, sum(slot.stop - slot.start for b in buckets for slot in b.slots))
        return self._held[key]

    def memory_by_stage(self, strategy: Strategy) -> dict[int, MemoryBreakdown]:
        """Stage → memory of its fullest rank, for the stage of each kind with the most micro-batches in flight.

        Index 0 of dp and tp has the larger part where a split is uneven.
        """
        live = peak_live(strategy.schedule, strategy.pp, strategy.num_micro_batches)
        fullest: dict[int, int] = {}
        for stage, kind in enumerate(self._kinds(strategy)):
            if live[stage] > live[fullest.setdefault(kind, stage)]:
                fullest[kind] = stage
        return {
            stage: memory(
                self.model,
                self.job,
                strategy,
                {PP: stage, DP: 0, TP: 0},
                self._rank_buckets(strategy, stage).buckets,
            )
            for stage in sorted(fullest.values())
        }

    def fullest(self, strategy: Strategy) -> tuple[int, MemoryBreakdown]:
        """The stage whose ranks hold most, and what they hold."""
        shared = self.cluster.host_is_device
        return max(
            self.memory_by_stage(strategy).items(), key=lambda item: item[1].total_bytes + item[1].host_bytes * shared
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
