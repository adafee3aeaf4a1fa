"""Figures as self-contained HTML pages: loss curve, memory bars, traffic bars.

Each `*_figure` turns values into a plotly figure; `write_figure` puts one, and `write_page` several, into a file that
needs no network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.core.errors import InputError
from meshwright.core.measures import MemoryBreakdown, Traffic
from meshwright.core.units import format_bytes, format_time
from meshwright.core.values import write_text
from meshwright.report.tables import MEMORY_CATEGORIES
from meshwright.train.metrics import StepMetrics, read_metrics

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

LOSS_FILE = "loss.html"
EXPERTS_FILE = "experts.html"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""Okabe & Ito: told apart by colour-blind readers too."""


def loss_figure(rows: Sequence[StepMetrics], title: str = "Loss") -> Figure:
    """Training and evaluation loss by step; hovering shows tokens/s, gradient norm and learning rate."""
    go = plotly()
    details = [[row.tokens_per_s, row.grad_norm, row.lr, format_time(row.step_time_s)] for row in rows]
    figure = go.Figure()
    figure.add_scatter(
        x=[row.step + 1 for row in rows],
        y=[row.loss for row in rows],
        customdata=details,
        name="training",
        mode="lines",
        line={"color": COLOURS[0], "width": 1.5},
        hovertemplate="%{y:.4f}<br>%{customdata[0]:,.0f} tokens/s, %{customdata[3]} per step"
        "<br>gradient norm %{customdata[1]:.3f}, learning rate %{customdata[2]:.2e}",
    )
    evaluated = [row for row in rows if row.eval_loss is not None]
    if evaluated:
        figure.add_scatter(
            x=[row.step + 1 for row in evaluated],
            y=[row.eval_loss for row in evaluated],
            name="evaluation",
            mode="lines+markers",
            line={"color": COLOURS[5], "width": 2, "dash": "dot"},
            hovertemplate="%{y:.4f}",
        )
    lay_out(figure, title, "steps", "loss per token, nats")
    figure.update_layout(hovermode="x unified")
    return figure


def write_loss_figure(run_dir: Path | str) -> Path:
    """Draw `metrics.jsonl` of a run into its `loss.html`; returns the file. Raises InputError."""
    rows = read_metrics(run_dir)
    if not rows:
        raise InputError(f"{run_dir}: no steps in the metrics yet, nothing to draw")
    title = f"Loss: {rows[0].loss:.3f} → {rows[-1].loss:.3f} in {rows[-1].step + 1:,} steps"
    return write_figure(loss_figure(rows, title), Path(run_dir) / LOSS_FILE)


def experts_figures(rows: Sequence[StepMetrics]) -> list[Figure]:
    """Of a mixture: each layer's largest load over its mean load by step, and every expert's load in the last step over
    the mean of its layer. Empty where there are no loads."""
    go, steps, imbalance = plotly(), [], dict[str, list[float]]()
    last: Mapping[str, list[float]] = {}
    for row in rows:
        if row.expert_loads is None:
            continue
        last = {layer: _over_mean(loads) for layer, loads in row.expert_loads.items()}
        steps.append(row.step + 1)
        for layer, loads in last.items():
            imbalance.setdefault(layer, []).append(max(loads))
    if not steps:
        return []
    lines, heat = go.Figure(), go.Figure()
    for number, (layer, values) in enumerate(imbalance.items()):
        colour = {"color": COLOURS[number % len(COLOURS)], "width": 1.5}
        lines.add_scatter(x=steps, y=values, name=f"layer {layer}", mode="lines", line=colour)
    lay_out(lines, "Imbalance of experts: largest load over mean load", "steps", "largest load / mean load")
    heat.add_heatmap(
        z=list(last.values()),
        y=[f"layer {layer}" for layer in last],
        colorscale="Viridis",
        zmin=0,
        colorbar={"title": "load / mean"},
        hovertemplate="%{y}, expert %{x}: %{z:.2f} of the mean load<extra></extra>",
    )
    lay_out(heat, f"Loads of experts in step {steps[-1]:,}, over the mean of their layer", "expert", "")
    heat.update_yaxes(autorange="reversed")
    return [lines, heat]


def _over_mean(loads: Sequence[int]) -> list[float]:
    mean = max(sum(loads) / len(loads), 1e-9)
    return [load / mean for load in loads]


def write_experts_figures(run_dir: Path | str) -> Path | None:
    """Draw the loads in `metrics.jsonl` of a run into its `experts.html`; returns the file, or None without any. Raises
    InputError."""
    figures = experts_figures(read_metrics(run_dir))
    return write_page(figures, Path(run_dir) / EXPERTS_FILE, "loads of experts") if figures else None


def memory_figure(memories: Mapping[str, MemoryBreakdown], limit_bytes: int | None = None) -> Figure:
    """Stacked bars by category, one per label (a rank, a strategy, a witness); a line at what a device has."""
    go = plotly()
    figure = go.Figure()
    labels = list(memories)
    for colour, (category, field) in zip(COLOURS, MEMORY_CATEGORIES.items(), strict=False):
        sizes = [getattr(memory, field) for memory in memories.values()]
        figure.add_bar(
            x=[size / 1e9 for size in sizes],
            y=labels,
            customdata=[format_bytes(size) for size in sizes],
            name=category,
            orientation="h",
            marker_color=colour,
            hovertemplate=f"{category} %{{customdata}}<extra>%{{y}}</extra>",
        )
    if limit_bytes is not None:
        figure.add_vline(x=limit_bytes / 1e9, line_dash="dash", annotation_text=f"usable {format_bytes(limit_bytes)}")
    lay_out(figure, "Memory of one rank at the peak of a step", "GB", "")
    figure.update_layout(barmode="stack", legend_traceorder="normal")
    figure.update_yaxes(autorange="reversed")
    return figure


def traffic_figure(traffics: Mapping[str, Traffic]) -> Figure:
    """Wire bytes of one rank and step by (phase, primitive, axis), one bar per label (forecast, measured)."""
    go = plotly()
    merged: dict[tuple[str, str, str], None] = {}
    for traffic in traffics.values():
        merged.update((key, None) for key, _ in traffic.sorted_rows())
    names = [f"{phase}: {primitive} over {axis}" for primitive, axis, phase in merged]
    figure = go.Figure()
    for colour, (label, traffic) in zip(COLOURS, traffics.items(), strict=False):
        rows = [traffic.rows.get(key) for key in merged]
        figure.add_bar(
            x=[row.wire_bytes / 1e6 if row else 0 for row in rows],
            y=names,
            customdata=[[format_bytes(row.wire_bytes), row.calls] if row else ["0 B", 0] for row in rows],
            name=label,
            orientation="h",
            marker_color=colour,
            hovertemplate=f"{label}: %{{customdata[0]}} in %{{customdata[1]:,}} calls<extra>%{{y}}</extra>",
        )
    lay_out(figure, "What one rank sends in a step", "MB", "")
    figure.update_layout(barmode="group", legend_traceorder="normal")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


def write_figure(figure: Figure, path: Path | str) -> Path:
    """Write one HTML page that holds all it needs; all of it or nothing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, figure.to_html(include_plotlyjs=True, full_html=True, config={"displaylogo": False}))
    return path


def page(figures: Sequence[Figure], title: str) -> str:
    """Figures under each other as one HTML page that holds all it needs."""
    parts = [
        figure.to_html(include_plotlyjs=index == 0, full_html=False, config={"displaylogo": False})
        for index, figure in enumerate(figures)
    ]
    head = f'<html lang="en"><head><meta charset="utf-8"><title>Meshwright: {escape(title)}</title></head>'
    return "\n".join(["<!DOCTYPE html>", head, "<body>", *parts, "</body></html>", ""])


def write_page(figures: Sequence[Figure], path: Path | str, title: str) -> Path:
    """Write :func:`page`, and the folders above it; all of it or nothing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page(figures, title))
    return path


def lay_out(figure: Figure, title: str, x: str, y: str) -> None:
    """Title, axes, legend and colours of every figure."""
    figure.update_layout(
        title=title,
        xaxis_title=x,
        yaxis_title=y,
        template="plotly_white",
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom"},
    )


def plotly() -> Any:
    """Slow to import, so only drawing pays for it."""
    import plotly.graph_objects as go

    return go
