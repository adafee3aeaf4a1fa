"""Comparisons: tables of 80 columns with both witnesses, curves with overflows marked, pages without a network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from meshwright.core.units import format_bytes
from meshwright.report.compare import (
    losses_figure,
    memory_comparison,
    precision_table,
    sent_figure,
    traffic_comparison,
    verdict_table,
    zero_figures,
)
from meshwright.report.figures import write_page
from meshwright.run.compare import Request, precision_trials
from meshwright.run.outcome import Outcome
from meshwright.train.metrics import StepMetrics
from tests.run.outcomes import as_forecast, outcomes
from tests.shapes import make_model


@dataclass(frozen=True, slots=True)
class Skippable(StepMetrics):
    """A step of fp16."""

    skipped: bool = False


def show(table: Table) -> list[str]:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


def precisions() -> list[Outcome]:
    """bf16, and fp16 whose second step overflowed."""
    first, second = precision_trials(Request(make_model(), 1, 8, 4), ("bf16", "bf16-16"))
    overflowed = as_forecast(second)
    rows = [Skippable(r.step, nan if r.step == 1 else r.loss, r.grad_norm, r.lr, r.tokens, r.tokens_per_s, 0.1,
                      skipped=r.step == 1) for r in overflowed.metrics]  # fmt: skip
    return [as_forecast(first, (3.0, 2.0, 0.5)), replace(overflowed, metrics=tuple(rows))]


def tables() -> Sequence[Table]:
    found, pair = outcomes(), precisions()
    return (
        memory_comparison(found), traffic_comparison(found), verdict_table(found, found[1]),
        precision_table(pair, pair[0]),
    )  # fmt: skip


@pytest.mark.parametrize("index", range(4))
def test_tables_fit_80_columns_uncut(index: int) -> None:
    lines = show(tables()[index])
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)


def test_both_witnesses_are_shown() -> None:
    found = outcomes()
    record = found[1].records[0]
    more = replace(record, memory=replace(record.memory, activations_bytes=10 * record.memory.activations_bytes))
    lines = show(memory_comparison([replace(found[1], records=(more, *found[1].records[1:]))]))
    forecast, measured = (next(line for line in lines if word in line).split() for word in ("forecast", "measured"))
    assert forecast[-4] != measured[-4]
    assert forecast[-7:-4] == measured[-6:-4] or forecast[2:5] == measured[1:4]


def test_what_was_sent_is_told_in_parameters_too() -> None:
    """All-reduce over four ranks: each sends 2·3/4 of the parameters."""
    found = [outcome for outcome in outcomes() if outcome.name == "zero0"]
    measured = next(line for line in show(traffic_comparison(found)) if "measured" in line)
    assert float(measured.split()[-1]) == pytest.approx(1.5, abs=0.01)


def test_a_trial_that_is_not_as_forecast_says_so() -> None:
    found = outcomes()
    record = found[2].records[0]
    less = replace(record, memory=replace(record.memory, gradients_bytes=1))
    found[2] = replace(found[2], records=(less, *found[2].records[1:]))
    lines = show(verdict_table(found, found[1]))
    assert sum("differs " in line for line in lines[4:]) == 1
    assert next(line for line in lines if "zero1" in line).split()[-3:-2] == ["differs"]


def test_states_and_skipped_steps_are_counted() -> None:
    pair = precisions()
    lines = show(precision_table(pair, pair[0]))
    clean, overflowed = (next(line for line in lines if line.strip().startswith(f"{o.name} ")) for o in pair)
    assert format_bytes(pair[0].records[0].memory.states_bytes) in clean
    assert re.search(r"\+0\.5000 +1 ", overflowed)
    assert re.search(r"– +0 ", clean)


def test_overflows_are_marked_on_the_curve() -> None:
    curve, _, marks = losses_figure(precisions(), "Loss").data
    assert list(curve.y) == [3.0, 2.0, 0.5]
    assert (list(marks.x), marks.mode, marks.marker.symbol) == ([2], "markers", "x")


def test_bars_add_up_to_what_was_sent() -> None:
    found = outcomes()
    bars = sent_figure(found).data
    for index, outcome in enumerate(found):
        total = sum(bar.x[index] for bar in bars)
        assert total * 1e6 == pytest.approx(outcome.records[outcome.busiest].traffic.wire_bytes)


def test_a_page_is_self_contained(tmp_path: Path) -> None:
    page = write_page(zero_figures(outcomes()), tmp_path / "deep" / "page.html", "a <b>").read_text(encoding="utf-8")
    assert page.count("Plotly.newPlot(") >= 3
    assert not re.search(r'<(script|link)[^>]+(src|href)="http', page)
