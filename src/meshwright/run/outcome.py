"""Outcome: what came of training one model in one way, beside its own forecast. Imports no torch.

Trial (a name and a plan) ─▶ trained ─▶ Outcome (forecast and record of every rank, losses)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan

from meshwright.core.axes import DP, MESH_ORDER, coordinates_of
from meshwright.core.measures import MemoryBreakdown, Traffic
from meshwright.core.plan import Plan
from meshwright.core.record import RankRecord
from meshwright.cost.data_parallel import data_parallel_memory, data_parallel_traffic
from meshwright.cost.memory import memory
from meshwright.cost.traffic import traffic
from meshwright.rehearse.verify import Difference, record_differences
from meshwright.train.metrics import StepMetrics


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one rank (or device) is to hold and to send in a step."""

    memory: MemoryBreakdown
    traffic: Traffic


@dataclass(frozen=True, slots=True)
class Trial:
    """One way of training a model."""

    name: str
    """Short, and a folder's name."""
    plan: Plan
    one_process: bool = False
    """The `DataParallel` reference: the plan's dp ranks are devices of one process."""

    def forecasts(self) -> tuple[Forecast, ...]:
        """By rank, or by device."""
        return tuple(map(self._forecast, range(self.plan.strategy.world_size)))

    def coordinates(self, index: int) -> dict[str, int]:
        """Of a rank; devices lie along dp."""
        return device_coordinates(index) if self.one_process else coordinates_of(index, self.plan.strategy.sizes)

    def _forecast(self, index: int) -> Forecast:
        model, job, strategy = self.plan.model, self.plan.job, self.plan.strategy
        if self.one_process:
            split = (model, job, strategy, strategy.dp, index)
            return Forecast(data_parallel_memory(*split), data_parallel_traffic(*split))
        at = self.coordinates(index)
        return Forecast(memory(model, job, strategy, at), traffic(model, job, strategy, at))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a trial."""

    trial: Trial
    forecasts: tuple[Forecast, ...]
    records: tuple[RankRecord, ...]
    """By rank, as the forecasts."""
    metrics: tuple[StepMetrics, ...]

    @property
    def name(self) -> str:
        return self.trial.name

    @property
    def losses(self) -> list[float]:
        return [row.loss for row in self.metrics]

    @property
    def step_time_s(self) -> float:
        """Of the slowest rank."""
        return max(record.step_time_s for record in self.records)

    @property
    def fullest(self) -> int:
        """The rank that holds most."""
        return max(range(len(self.records)), key=lambda i: self.records[i].memory.total_bytes)

    @property
    def busiest(self) -> int:
        """The rank that sends most."""
        return max(range(len(self.records)), key=lambda i: self.records[i].traffic.wire_bytes)

    def differences(self) -> list[Difference]:
        """Every number of every rank that is not as forecast."""
        pairs = zip(self.forecasts, self.records, strict=True)
        return [d for forecast, record in pairs for d in record_differences(forecast.memory, forecast.traffic, record)]

    def loss_difference(self, other: Outcome, steps: int | None = None) -> float:
        """Largest relative difference of a step's loss, over the first `steps`, or all."""
        return largest_difference(self.losses[:steps], other.losses[:steps])


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest |ours − theirs| / |theirs|, step by step; nan where a value is not a number."""
    errors = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(ours, theirs, strict=True)]
    return nan if any(map(isnan, errors)) else max(errors, default=0.0)


def device_coordinates(index: int) -> dict[str, int]:
    """Mesh coordinates of a device of one process."""
    return {**dict.fromkeys(MESH_ORDER, 0), DP: index}
