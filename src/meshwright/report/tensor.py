"""Ways to divide each layer, side by side: a table and a figure. Read from `planner.tensor_kinds`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from meshwright.core.units import format_bytes
from meshwright.planner.tensor_kinds import Way
from meshwright.report.figures import traffic_figure
from meshwright.report.tables import plain_table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def ways_table(ways: Sequence[Way]) -> Table:
    """Bytes on a rank of one layer and one micro-batch; of the refused ways nothing but their names."""
    table = plain_table("One layer and one micro-batch on a rank: bytes held and sent, and calls")
    table.add_column("")
    for head in ("weights", "activations", "sent", "calls", "once a step"):
        table.add_column(head, justify="right")
    for way in ways:
        if way.sent is None or way.summed is None:
            table.add_row(way.name, *["–"] * 5)
            continue
        sizes = (way.weights_bytes, way.activations_bytes, way.sent.wire_bytes, way.summed.wire_bytes)
        weights, activations, sent, summed = map(format_bytes, sizes)
        table.add_row(way.name, weights, activations, sent, f"{way.messages}", summed)
    return table


def refusals(ways: Sequence[Way]) -> list[str]:
    """One line for each way that cannot be had."""
    return [f"not {way.name}: {way.refusal}" for way in ways if way.refusal is not None]


def ways_figure(ways: Sequence[Way]) -> Figure:
    """What each sends, by primitive and axis."""
    return traffic_figure({way.name: way.sent for way in ways if way.sent is not None})
