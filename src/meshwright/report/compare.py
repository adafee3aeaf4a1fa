"""Ways of training side by side: tables of 80 columns, and figures. Read from outcomes, never from engines."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

from rich.table import Table

from meshwright.core.measures import PRIMITIVES, MemoryBreakdown, Traffic
from meshwright.core.units import format_bytes, format_time, in_unit, unit_of
from meshwright.report.figures import COLOURS, lay_out, memory_figure, plotly
from meshwright.report.tables import MEMORY_CATEGORIES, NONE, plain_table, sparkline
from meshwright.run.outcome import Outcome
from meshwright.train.metrics import StepMetrics

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_SHORT = {"parameters": "param", "gradients": "grad", "optimizer": "optim", "activations": "activ",
          "buffers": "buffer", "working": "work"}  # fmt: skip
_CURVE_WIDTH = 24


def memory_comparison(outcomes: Sequence[Outcome]) -> Table:
    """Of each trial's fullest rank: what was forecast, above what was measured."""
    unit = unit_of(max(record.memory.total_bytes for outcome in outcomes for record in outcome.records))
    heads = [_SHORT.get(name, name) for name in MEMORY_CATEGORIES]

    def cells(memory: MemoryBreakdown) -> list[str]:
        sizes = [*(getattr(memory, field) for field in MEMORY_CATEGORIES.values()), memory.total_bytes]
        return [in_unit(size, unit) for size in sizes]

    return _pairs(
        f"Memory of the fullest rank at the peak of a step, {unit}",
        [*heads, "total"],
        [(o.name, cells(o.forecasts[o.fullest].memory), cells(o.records[o.fullest].memory)) for o in outcomes],
    )


def traffic_comparison(outcomes: Sequence[Outcome]) -> Table:
    """Wire bytes of each trial's busiest rank in a step by primitive, and in parameters of the model ("× N")."""
    unit = unit_of(max(record.traffic.wire_bytes for outcome in outcomes for record in outcome.records))
    used = {primitive for o in outcomes for r in o.records for primitive, _, _ in r.traffic.rows}
    primitives = [name for name in PRIMITIVES if name in used]

    def cells(outcome: Outcome, traffic: Traffic) -> list[str]:
        plan = outcome.trial.plan
        whole_bytes = plan.model.num_parameters * plan.strategy.recipe.parameter_bytes
        sizes = [_sent(traffic, primitive=name) for name in primitives]
        return [
            *(in_unit(size, unit) if size else NONE for size in sizes),
            in_unit(traffic.wire_bytes, unit),
            f"{traffic.wire_bytes / whole_bytes:.2f}",
        ]

    return _pairs(
        f"What the busiest rank sends in a step, {unit}, and × N parameters",
        [*(name.replace("_", "\n") for name in primitives), "total", "× N"],
        [(o.name, cells(o, o.forecasts[o.busiest].traffic), cells(o, o.records[o.busiest].traffic)) for o in outcomes],
    )


def verdict_table(outcomes: Sequence[Outcome], reference: Outcome) -> Table:
    """Loss, its largest relative difference from the reference's over all steps, agreement, median step time."""
    table = plain_table(f"Loss, and agreement over all ranks and {len(reference.losses)} steps")
    table.add_column("")
    for head in ("last loss", f"differs from\n{reference.name}", "traffic", "memory", "step"):
        table.add_column(head, justify="right", no_wrap=True)
    for outcome in outcomes:
        wrong = {difference.witness for difference in outcome.differences()}
        agreement = ("differs" if witness in wrong else "as forecast" for witness in ("traffic", "memory"))
        difference = _relative(outcome.loss_difference(reference))
        table.add_row(
            outcome.name, f"{outcome.losses[-1]:.5f}", difference, *agreement, format_time(outcome.step_time_s)
        )
    return table


def precision_table(outcomes: Sequence[Outcome], reference: Outcome) -> Table:
    """Loss curves in a line each, how far they end from the reference's, skipped steps, bytes of the states."""
    table = plain_table(f"The same training in {len(outcomes)} precisions, {len(reference.losses)} steps")
    table.add_column("")
    table.add_column("loss", no_wrap=True)
    for head in ("first", "last", f"from\n{reference.name}", "skipped", "states\nper rank"):
        table.add_column(head, justify="right", no_wrap=True)
    for outcome in outcomes:
        losses = outcome.losses
        states_bytes = max(record.memory.states_bytes for record in outcome.records)
        table.add_row(
            outcome.name,
            sparkline(losses, _CURVE_WIDTH),
            f"{losses[0]:.3f}",
            f"{losses[-1]:.3f}",
            NONE if outcome is reference else f"{losses[-1] - reference.losses[-1]:+.4f}",
            str(len(skipped_steps(outcome.metrics))),
            format_bytes(states_bytes),
        )
    return table


def skipped_steps(rows: Sequence[StepMetrics]) -> list[StepMetrics]:
    """The steps that an overflow of fp16 gradients made void."""
    return [row for row in rows if getattr(row, "skipped", False)]


def losses_figure(outcomes: Sequence[Outcome], title: str) -> Figure:
    """One loss curve per trial; a cross where a step was skipped after an overflow."""
    figure = plotly().Figure()
    for colour, outcome in zip(_colours(len(outcomes)), outcomes, strict=True):
        _curve(figure, outcome, colour)
    lay_out(figure, title, "steps", "loss per token, nats")
    figure.update_layout(hovermode="x unified")
    return figure


def _curve(figure: Figure, outcome: Outcome, colour: str) -> None:
    rows = outcome.metrics
    figure.add_scatter(
        x=[row.step + 1 for row in rows],
        y=[row.loss if isfinite(row.loss) else None for row in rows],
        name=outcome.name,
        mode="lines",
        line={"color": colour, "width": 1.5},
        hovertemplate="%{y:.4f}",
    )
    overflows = skipped_steps(rows)
    if overflows:
        figure.add_scatter(
            x=[row.step + 1 for row in overflows],
            y=[row.loss if isfinite(row.loss) else rows[0].loss for row in overflows],
            name=f"{outcome.name}: overflow, step skipped",
            mode="markers",
            marker={"symbol": "x", "color": colour, "size": 9},
            hovertemplate="overflow",
        )


def sent_figure(outcomes: Sequence[Outcome]) -> Figure:
    """Measured wire bytes of each trial's busiest rank, by phase."""
    figure = plotly().Figure()
    traffics = {outcome.name: outcome.records[outcome.busiest].traffic for outcome in outcomes}
    phases = dict.fromkeys(key[2] for traffic in traffics.values() for key, _ in traffic.sorted_rows())
    for colour, phase in zip(_colours(len(phases)), phases, strict=True):
        sizes = [_sent(traffic, phase=phase) for traffic in traffics.values()]
        figure.add_bar(
            x=[size / 1e6 for size in sizes],
            y=list(traffics),
            customdata=[format_bytes(size) for size in sizes],
            name=phase,
            orientation="h",
            marker_color=colour,
            hovertemplate=f"{phase} %{{customdata}}<extra>%{{y}}</extra>",
        )
    lay_out(figure, "What the busiest rank sends in a step", "MB", "")
    figure.update_layout(barmode="stack", legend_traceorder="normal")
    figure.update_yaxes(autorange="reversed")
    return figure


def zero_figures(outcomes: Sequence[Outcome]) -> list[Figure]:
    """Memory by category, bytes by phase, losses."""
    held = {outcome.name: outcome.records[outcome.fullest].memory for outcome in outcomes}
    return [memory_figure(held), sent_figure(outcomes), losses_figure(outcomes, "Loss")]


def _pairs(title: str, heads: Sequence[str], rows: Sequence[tuple[str, list[str], list[str]]]) -> Table:
    """Two lines per trial: forecast, measured."""
    table = plain_table(title)
    table.add_column("")
    table.add_column("")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for name, forecast, measured in rows:
        table.add_row(name, "forecast", *forecast)
        table.add_row("", "measured", *measured)
    return table


def _sent(traffic: Traffic, *, primitive: str | None = None, phase: str | None = None) -> int:
    """Wire bytes of one primitive, or of one phase."""
    wanted = {primitive, phase} - {None}
    return sum(row.wire_bytes for (called, _, at), row in traffic.rows.items() if wanted <= {called, at})


def _relative(difference: float) -> str:
    return "equal" if difference == 0 else f"{difference:.1e}"


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]
