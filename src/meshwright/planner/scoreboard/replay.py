"""The planner's forecast of a published row, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.strategy import Strategy
from meshwright.cost.flops import hardware_flops
from meshwright.planner.price import Forecast, Pricer
from meshwright.planner.scoreboard.express import Expressed, express
from meshwright.planner.scoreboard.published import PublishedRow


@dataclass(frozen=True, slots=True)
class Replayed:
    """One row that could be expressed."""

    row: PublishedRow
    strategy: Strategy
    """The row's, with what the source leaves open as the planner chooses."""
    forecast_s: float
    forecast_bytes: int
    fits: bool
    ideal_s: float
    """The step's FLOPs, recomputation included, at the peak of all devices: what a model of one constant utilisation
    divides by that constant."""

    @property
    def time_error(self) -> float | None:
        """Forecast over measured, less one; None where no time was printed."""
        return None if self.row.step_s is None else self.forecast_s / self.row.step_s - 1

    @property
    def memory_error(self) -> float | None:
        """Likewise of the fullest device's memory."""
        measured = self.row.peak_bytes
        return None if measured is None else self.forecast_bytes / measured - 1

    @property
    def is_false_fit(self) -> bool:
        """The forecast fits; the run did not."""
        return self.fits and self.row.ran_out_of_memory

    @property
    def is_false_refusal(self) -> bool:
        """The run fitted; the forecast says that it could not."""
        return not self.fits and not self.row.ran_out_of_memory


@dataclass(frozen=True, slots=True)
class NotReplayed:
    """A row that the library, or the row itself, cannot express."""

    row: PublishedRow
    reason: str


def replay(rows: Iterable[PublishedRow]) -> tuple[list[Replayed], list[NotReplayed]]:
    """Forecast every row that can be expressed."""
    done: list[Replayed] = []
    passed_over: list[NotReplayed] = []
    for row in rows:
        try:
            done.append(_replay(row, express(row)))
        except (UnsupportedError, InputError) as error:
            passed_over.append(NotReplayed(row, str(error)))
    return done, passed_over


def _replay(row: PublishedRow, asked: Expressed) -> Replayed:
    pricer = Pricer(asked.model, asked.cluster, asked.job, asked.stack)
    chosen = pricer.simulate(_choice([pricer.forecast(strategy) for strategy in asked.candidates]))
    peaks = asked.cluster.device.peak_flops_per_s
    recipe = chosen.strategy.recipe
    peak = peaks.get(recipe.product or recipe.parameter, max(peaks.values()))
    flops = hardware_flops(asked.model, asked.job, chosen.strategy.recompute)
    return Replayed(
        row=row,
        strategy=chosen.strategy,
        forecast_s=chosen.step_time.total_s,
        forecast_bytes=_bytes_of(row, chosen, pricer),
        fits=chosen.fits,
        ideal_s=flops / (peak * asked.cluster.num_devices),
    )


def _bytes_of(row: PublishedRow, chosen: Forecast, pricer: Pricer) -> int:
    """Of the rank that was measured, or of the fullest."""
    strategy = chosen.strategy
    if row.rank is None or row.rank >= strategy.world_size:
        return chosen.device_bytes
    return pricer.memory(strategy, row.rank * strategy.pp // strategy.world_size).total_bytes


def _choice(forecasts: Sequence[Forecast]) -> Forecast:
    """The fastest that fits; where none does, the smallest."""
    fitting = [f for f in forecasts if f.fits]
    if fitting:
        return min(fitting, key=lambda f: f.step_time.total_s)
    return min(forecasts, key=lambda f: f.device_bytes)
