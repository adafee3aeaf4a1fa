"""Ways to divide each layer, side by side: a table and a figure. Read from `planner.tensor_kinds`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from meshwright.core.units import format_bytes
from meshwright.planner.tensor_kinds import Way
from meshwright.report.figures import COLOURS, traffic_figure
from meshwright.report.tables import plain_table
from meshwright.schedule.picture import Box, Picture, Words

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


def refusals(ways: Sequence[Way], remedies: Mapping[str, str]) -> list[str]:
    """One line for each way that cannot be had, with what would do instead, by name."""
    refused = ((way, remedies.get(way.name)) for way in ways if way.refusal is not None)
    return [f"not {way.name}: {way.refusal}{f'; {near}' if near else ''}" for way, near in refused]


def ways_figure(ways: Sequence[Way]) -> Figure:
    """What each sends, by primitive and axis."""
    return traffic_figure({way.name: way.sent for way in ways if way.sent is not None})


LEFT, TOP, ROW, BAR, WIDTH = 150, 56, 66, 16, 560
"""Pixels: margins, a way's rows, each of their bars, and the longest bar."""
QUANTITIES = (("weights", COLOURS[0]), ("activations", COLOURS[1]), ("sent", COLOURS[2]))


def ways_picture(ways: Sequence[Way], title: str) -> Picture:
    """What each way holds and sends, as bars in one scale, with numbers; a refused way has none."""
    largest = max((size for way in ways for size in _sizes(way)), default=0) or 1
    shapes = (Words(LEFT, 20, title, size=14), *_legend(), *_bars(ways, WIDTH / largest))
    return Picture(LEFT + WIDTH + 110, TOP + ROW * len(ways) + 8, shapes)


def _sizes(way: Way) -> tuple[int, ...]:
    return () if way.sent is None else (way.weights_bytes, way.activations_bytes, way.sent.wire_bytes)


def _legend() -> Iterator[Box | Words]:
    for at, (name, color) in enumerate(QUANTITIES):
        yield Box(LEFT + 110 * at, 32, 10, 10, color)
        yield Words(LEFT + 110 * at + 14, 41, name)


def _bars(ways: Sequence[Way], scale: float) -> Iterator[Box | Words]:
    for row, way in enumerate(ways):
        y = TOP + ROW * row
        yield Words(LEFT - 8, y + 29, way.name, "end")
        if not _sizes(way):
            yield Words(LEFT, y + 29, "not possible")
        for at, (size, (name, color)) in enumerate(zip(_sizes(way), QUANTITIES)):
            yield Box(LEFT, y + at * BAR, max(1.0, size * scale), BAR - 1, color, title=f"{name}: {size:,} bytes")
            yield Words(LEFT + max(1.0, size * scale) + 6, y + at * BAR + 12, format_bytes(size))
