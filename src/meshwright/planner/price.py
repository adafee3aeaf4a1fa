"""What a strategy costs: memory of its fullest rank, traffic of that rank, seconds of a step.

What candidates share is computed once (:mod:`meshwright.planner.parts`). The pipeline's makespan is a closed form
first; the clock replays the table of actions for the few strategies that are worth it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.core.axes import rank_of
from meshwright.core.cluster import ClusterSpec
from meshwright.core.job import Job
from meshwright.core.measures import MemoryBreakdown, StepTime, Traffic
from meshwright.core.model import ModelSpec
from meshwright.core.profile import OWN, Stack
from meshwright.core.strategy import Strategy
from meshwright.core.units import format_bytes
from meshwright.cost.step import StepCosts, has_bound, rank_ends_s, step_terms, step_time
from meshwright.cost.terms import TimeTerm
from meshwright.planner.parts import Parts, first_of
from meshwright.schedule.build import build_program
from meshwright.schedule.timeline import Timeline
from meshwright.sim.clock import simulate

MAX_CELLS = 2**15
"""Stages × micro-batches of a timetable that is replayed or drawn; of a longer one the closed form must do."""


def is_long(strategy: Strategy) -> bool:
    """Whether the timetable has more than `MAX_CELLS` cells."""
    return num_cells(strategy) > MAX_CELLS


def num_cells(strategy: Strategy) -> int:
    """Stages × micro-batches of its timetable."""
    return strategy.pp * strategy.stages_per_rank * strategy.num_micro_batches


@dataclass(frozen=True, slots=True)
class Room:
    """What a rank may fill."""

    usable_memory_bytes: int
    host_is_device: bool = False
    """Whether what is offloaded to the host takes the device's memory."""
    host_limit_bytes: int | None = None
    """What a rank may offload to the host; None where the cluster does not say."""
    disk_limit_bytes: int | None = None
    """Likewise to a disk."""

    def least(self, num_bytes: int) -> str:
        """What is too much even by a lower bound, in words."""
        usable = format_bytes(self.usable_memory_bytes)
        return f"needs at least {format_bytes(num_bytes)} per rank of {usable} usable"


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
    room: Room
    simulated: bool = False
    """True where the pipeline's time comes from the clock, or from the closed form of a table without an end; False
    where the clock may still replay it."""

    @property
    def fits(self) -> bool:
        return self._excess is None

    @property
    def is_bound(self) -> bool:
        """Whether the clock may find more seconds: those of a pipeline are at least those of the closed form."""
        return not self.simulated and self.strategy.pp > 1

    @property
    def device_bytes(self) -> int:
        """Of the device's memory, that the rank takes."""
        return self.memory.total_bytes + self.memory.host_bytes * self.room.host_is_device

    @property
    def _excess(self) -> str | None:
        """Where more is needed than there is."""
        pairs = {
            "usable": (self.device_bytes, self.room.usable_memory_bytes),
            "of the host": (self.memory.host_bytes, self.room.host_limit_bytes),
            "of the disk": (self.memory.disk_bytes, self.room.disk_limit_bytes),
        }
        return next((name for name, (needs, has) in pairs.items() if has is not None and needs > has), None)

    @property
    def limit(self) -> str:
        """What memory allows, in words."""
        needs, has = {
            "of the host": (self.memory.host_bytes, self.room.host_limit_bytes),
            "of the disk": (self.memory.disk_bytes, self.room.disk_limit_bytes),
        }.get(self._excess or "", (self.device_bytes, self.room.usable_memory_bytes))
        where = self._excess or "usable"
        return f"needs {format_bytes(needs)} per rank of {format_bytes(has or 0)} {where}"


class Pricer:
    """Prices strategies of one model, cluster and job."""

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, job: Job, stack: Stack = OWN) -> None:
        self.model = model
        self.cluster = cluster
        self.job = job
        self.stack = stack
        self.num_simulations = 0
        self.parts = Parts(model, cluster, job, stack)
        self.room = _room(cluster, stack)

    def forecast(self, strategy: Strategy) -> Forecast:
        """Memory and traffic exactly; seconds in closed form, or by the clock for a schedule that declares none."""
        rank, breakdown = self.fullest(strategy)
        return Forecast(
            strategy=strategy,
            memory=breakdown,
            rank=rank_of(first_of(rank), strategy.sizes),
            traffic=self.parts.traffic(strategy, rank),
            step_time=self.step_time(strategy),
            room=self.room,
            simulated=not has_bound(strategy) or strategy.pipeline_schedule.is_asynchronous,
        )

    def step_time(self, strategy: Strategy) -> StepTime:
        """In closed form, or by the clock for a schedule that declares none."""
        costs = self.step_costs(strategy)
        is_bounded = has_bound(strategy)
        ends_s = rank_ends_s(costs, strategy) if is_bounded else self._clocked_s(costs, strategy)
        return step_time(costs, strategy, ends_s)

    def simulate(self, forecast: Forecast) -> Forecast:
        """The same forecast, its pipeline timed by the clock; unchanged where it is already, or where it `is_long`."""
        if forecast.simulated or is_long(forecast.strategy):
            return forecast
        costs = self.step_costs(forecast.strategy)
        ends_s = self._clocked_s(costs, forecast.strategy)
        return replace(forecast, step_time=step_time(costs, forecast.strategy, ends_s), simulated=True)

    def timeline(self, strategy: Strategy) -> Timeline:
        """When each action of the pipeline runs."""
        return simulate(build_program(strategy), self.step_costs(strategy))

    def _clocked_s(self, costs: StepCosts, strategy: Strategy) -> list[float]:
        """When each rank ends its last backward; its last gradient is on the way from then on."""
        self.num_simulations += 1
        return self.parts.replay(strategy).ends_s(costs)

    def terms(self, forecast: Forecast) -> tuple[TimeTerm, ...]:
        """The step's seconds by cause, on the mean rank; they add up to the forecast's total."""
        return step_terms(self.step_costs(forecast.strategy), forecast.strategy, forecast.step_time)

    def step_costs(self, strategy: Strategy) -> StepCosts:
        """Prices of every stage and every stage boundary."""
        return self.parts.step_costs(strategy)

    def memory_by_rank(self, strategy: Strategy) -> dict[int, MemoryBreakdown]:
        """Pipeline rank → memory of its fullest device, for the rank of each kind with the most activations."""
        return self.parts.memory_by_rank(strategy)

    def memory(self, strategy: Strategy, rank: int) -> MemoryBreakdown:
        """Of the fullest device of a pipeline rank."""
        return self.parts.memory(strategy, rank)

    def fullest(self, strategy: Strategy) -> tuple[int, MemoryBreakdown]:
        """The pipeline rank whose devices hold most, and what they hold."""
        shared = self.cluster.host_is_device
        return max(
            self.memory_by_rank(strategy).items(), key=lambda item: item[1].total_bytes + item[1].host_bytes * shared
        )


def _room(cluster: ClusterSpec, stack: Stack) -> Room:
    """All that the driver leaves of the device's memory where the stack says what it takes beside the job."""
    return Room(
        usable_memory_bytes=cluster.device.offered_memory_bytes if stack.context_bytes else cluster.usable_memory_bytes,
        host_is_device=cluster.host_is_device,
        host_limit_bytes=_share(cluster.host_memory_bytes, cluster),
        disk_limit_bytes=_share(cluster.disk_bytes, cluster),
    )


def _share(node_bytes: int | None, cluster: ClusterSpec) -> int | None:
    """A rank's part of what a node has."""
    return None if node_bytes is None else node_bytes // cluster.devices_per_node


def price(model: ModelSpec, cluster: ClusterSpec, job: Job, strategy: Strategy) -> Forecast:
    """The simulated forecast of one strategy."""
    pricer = Pricer(model, cluster, job)
    return pricer.simulate(pricer.forecast(strategy))
