"""Outcomes of trials that went as forecast."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.core.record import RankRecord
from meshwright.run.compare import Request, zero_trials
from meshwright.run.outcome import Outcome, Trial
from meshwright.train.metrics import StepMetrics
from tests.shapes import make_model


def as_forecast(trial: Trial, losses: Sequence[float] = (3.0, 2.0, 1.0)) -> Outcome:
    """What its ranks would have measured if the forecast were true."""
    forecasts = trial.forecasts()
    records = [
        RankRecord(rank, trial.coordinates(rank), forecast.memory, forecast.traffic, 0.1)
        for rank, forecast in enumerate(forecasts)
    ]
    rows = [StepMetrics(step, loss, 1.0, 1e-3, 64, 640.0, 0.1) for step, loss in enumerate(losses)]
    return Outcome(trial, forecasts, tuple(records), tuple(rows))


def outcomes() -> list[Outcome]:
    """Of every way that four ranks allow."""
    return [as_forecast(trial) for trial in zero_trials(Request(make_model(), 4, 8, 8), "fp32")]
