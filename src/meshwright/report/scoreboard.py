"""The planner's scoreboard as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from meshwright.core.units import format_bytes, format_time
from meshwright.planner.scoreboard.score import TableScore
from meshwright.report.tables import NONE

_CAPTION = (
    "rows: expressed/all. In %: time, memory and regret as mean/worst, bias with its sign; constant: mean error "
    "in time of one utilisation, fitted on the table / borrowed from the others. false fit: rows that fit by the "
    "forecast alone / by the run alone"
)
_HEADS = ("table", "rows", "time", "bias", "memory", "false fit", "regret", "constant")


def percent(share: float | None, signed: bool = False) -> str:
    """`4.2`, or `+4.2`; a dash where there is nothing."""
    return NONE if share is None else f"{100 * share:{'+' if signed else ''}.1f}"


def scores_table(scores: Sequence[TableScore], use: str) -> Table:
    """One line per table; errors in per cent of what was measured."""
    table = Table(title=f"Forecast beside published measurements, rows marked {use}", box=box.SIMPLE, caption=_CAPTION)
    for head in _HEADS:
        table.add_column(head, justify="left" if head == "table" else "right", no_wrap=True)
    for score in scores:
        table.add_row(*_cells(score))
    return table


def _cells(score: TableScore) -> list[str]:
    regrets = score.regrets
    mean_regret = sum(regrets) / len(regrets) if regrets else None
    return [
        score.name,
        f"{score.num_expressed}/{score.num_rows}",
        _pair(score.time.mean, score.time.worst),
        percent(score.time.bias, signed=True),
        _pair(score.memory.mean, score.memory.worst),
        f"{score.false_fits}/{score.false_refusals}",
        _pair(mean_regret, max(regrets, default=None)),
        _pair(score.own_constant.mean, score.borrowed_constant.mean),
    ]


def _pair(first: float | None, second: float | None) -> str:
    return NONE if first is None and second is None else f"{percent(first)}/{percent(second)}"


def rows_table(score: TableScore) -> Table:
    """Every row that was replayed."""
    table = Table(title=score.name, box=box.SIMPLE)
    for head in ("row", "use", "model", "devices", "strategy", "forecast", "measured", "error", "needs", "held"):
        table.add_column(head, justify="left" if head in ("row", "use", "model", "strategy") else "right")
    for r in score.replayed:
        held = r.row.peak_bytes
        table.add_row(
            r.row.id,
            r.row.use,
            str(r.row.model.get("name")),
            str(r.row.hardware.get("gpus")),
            r.strategy.describe(),
            format_time(r.forecast_s),
            format_time(r.row.step_s) if r.row.step_s else "out of memory" if r.row.ran_out_of_memory else NONE,
            percent(r.time_error, signed=True),
            format_bytes(r.forecast_bytes) + ("" if r.fits else " !"),
            format_bytes(held) if held else NONE,
        )
    return table
