"""Outcomes: what is as forecast passes, what isn't is named, losses are compared step by step."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isnan, nan

import pytest

from meshwright.run.compare import Request, zero_trials
from meshwright.run.outcome import Outcome, largest_difference
from tests.run.outcomes import as_forecast, outcomes
from tests.shapes import make_model


def test_what_is_as_forecast_has_no_differences() -> None:
    assert [o.differences() for o in outcomes()] == [[]] * 7


@pytest.mark.parametrize("index", range(7))
def test_every_trial_is_held_to_its_own_forecast(index: int) -> None:
    """A byte more or less, on any rank, is named."""
    outcome = outcomes()[index]
    last = outcome.records[-1]
    wrong = replace(last, memory=replace(last.memory, parameters_bytes=last.memory.parameters_bytes + 1))
    (difference,) = replace(outcome, records=(*outcome.records[:-1], wrong)).differences()
    assert (difference.rank, difference.witness, difference.what) == (3, "memory", "parameters")
    traffic = outcome.forecasts[0].traffic
    (swapped,) = {
        d.witness for d in replace(outcome, records=_with_traffic_of(outcome, traffic.rows.copy())).differences()
    }
    assert swapped == "traffic"


def _with_traffic_of(outcome: Outcome, rows: dict) -> tuple:
    """The first record with one row less."""
    rows.pop(next(iter(rows)))
    first = outcome.records[0]
    return (replace(first, traffic=replace(first.traffic, rows=rows)), *outcome.records[1:])


def test_trials_differ_in_what_they_hold_and_send() -> None:
    """Memory of states falls from stage to stage; stage 3 sends half as much again as the others."""
    trials = {t.name: t.forecasts()[0] for t in zero_trials(Request(make_model(), 4, 8, 8), "fp32")}
    states = [trials[f"zero{stage}"].memory.states_bytes for stage in (0, 1, 2, 3)]
    assert states == sorted(states, reverse=True)
    assert len(set(states)) == 4
    assert trials["zero3"].memory.states_bytes < trials["zero3-node"].memory.states_bytes < states[0]
    sent = {name: forecast.traffic.wire_bytes for name, forecast in trials.items()}
    assert sent["zero3"] / sent["zero0"] == pytest.approx(1.5, abs=0.01)
    assert sent["zero3-kept"] == pytest.approx(sent["zero0"], rel=0.01)


def test_fullest_and_busiest_are_found() -> None:
    first = outcomes()[0]
    assert (first.name, first.fullest, first.busiest) == ("DataParallel", 0, 0)
    turned = replace(first, records=first.records[::-1])
    assert (turned.fullest, turned.busiest) == (3, 3)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [([1.0, 2.0], [1.0, 2.0], 0.0), ([1.0, 2.2], [1.0, 2.0], 0.1), ([3.0, 2.2], [2.0, 2.0], 0.5), ([inf], [1.0], inf)],
)
def test_the_largest_difference_of_a_loss(ours: list[float], theirs: list[float], expected: float) -> None:
    assert largest_difference(ours, theirs) == pytest.approx(expected)


def test_a_loss_that_is_no_number_is_never_equal() -> None:
    assert isnan(largest_difference([1.0, nan, 1.0], [1.0, 1.0, 1.0]))


def test_only_the_first_steps_are_looked_at_where_asked() -> None:
    ours, other = (as_forecast(outcomes()[1].trial, losses) for losses in ([1.0, 9.0], [1.0, 3.0]))
    assert ours.loss_difference(other, 1) == 0
    assert ours.loss_difference(other) == 2
