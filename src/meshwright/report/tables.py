"""Tables for the terminal: strategies, memory, traffic, forecast beside measured, and a tiny curve.

Each function turns values into a `rich` table; printing is the caller's. Wire bytes and memory are
those of one rank, in decimal units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Protocol

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

from meshwright.core.axes import MESH_ORDER, WHOLE_AXIS
from meshwright.core.measures import PHASES, MemoryBreakdown, StepTime, Traffic, TrafficRow
from meshwright.core.strategy import Strategy
from meshwright.core.units import format_bytes, format_time, in_unit, unit_of

MEMORY_TIERS = {"on host": "host_bytes", "on disk": "disk_bytes"}
"""Name in tables → field of MemoryBreakdown that is no memory of the device; shown where anything is offloaded."""
MEMORY_CATEGORIES = {
    field.name.removesuffix("_bytes"): field.name
    for field in fields(MemoryBreakdown)
    if field.name not in MEMORY_TIERS.values()
}
"""Name in tables and figures → field of MemoryBreakdown that is."""

_SHORT = ("param", "grad", "optim", "activ", "buffer", "work")
NONE = "–"
_BLOCKS = "▁▂▃▄▅▆▇█"


class Candidate(Protocol):
    """What a ranked strategy must tell; the planner's forecasts do."""

    @property
    def strategy(self) -> Strategy: ...
    @property
    def memory(self) -> MemoryBreakdown:
        """Of the rank that needs most."""

    @property
    def traffic(self) -> Traffic:
        """Of that same rank."""

    @property
    def step_time(self) -> StepTime: ...
    @property
    def is_bound(self) -> bool:
        """Whether the step may take longer than `step_time`, but not shorter."""

    @property
    def fits(self) -> bool: ...


def report_console() -> Console:
    """Console on stdout: as wide as the terminal, 120 columns where the output is a file or a pipe.

    Names and paths are printed as they are: `[b]` and `:smile:` in them are no markup.
    """
    console = Console(markup=False, emoji=False)
    return console if console.is_terminal else Console(markup=False, emoji=False, width=max(120, console.width))


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of the strategies: its head and how to fill it. Details go below on a narrow terminal."""

    head: str
    cell: Callable[[Candidate], str]
    detail: bool = False


class StrategiesTable:
    """Renders as one table, or as two under each other where it is too wide."""

    def __init__(self, candidates: Sequence[Candidate], title: str) -> None:
        self.candidates = candidates
        self.title = title
        self.columns = _strategy_columns(candidates)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = self._rows(self.title, self.columns)
        if whole.least_width() <= options.max_width:
            yield whole
        else:
            yield self._rows(self.title, [column for column in self.columns if not column.detail])
            yield self._rows("Their memory and traffic", [column for column in self.columns if column.detail])

    def _rows(self, title: str, columns: Sequence[_Column]) -> PlainTable:
        table = plain_table(title)
        table.add_column("#", justify="right", no_wrap=True)
        for column in columns:
            is_name = column.head == "strategy"
            table.add_column(column.head, justify="left" if is_name else "right", no_wrap=not is_name)
        for rank, candidate in enumerate(self.candidates, 1):
            table.add_row(str(rank), *(column.cell(candidate) for column in columns))
        return table


def strategies_table(
    candidates: Sequence[Candidate], title: str = "Strategies, best first, one for each dp × tp × pp"
) -> StrategiesTable:
    """One row per candidate, in the order given: step time, bubble, memory by category, wire bytes by axis of the mesh.
    A time after `≥` is the closed form's; the clock, which was not asked, may find more.

    All memory columns share one unit, and so do all wire columns; the heads name it.
    """
    return StrategiesTable(candidates, title)


def told_apart(strategies: Sequence[Strategy], num_layers: int) -> list[str]:
    """Short names of strategies in one list; of those that share one, also the layers of each part of the pipeline."""
    names = [strategy.describe() for strategy in strategies]
    count = Counter(names)
    return [
        name
        if count[name] == 1
        else f"{name}, layers {', '.join(str(len(layers)) for layers in strategy.stage_layers(num_layers))}"
        for name, strategy in zip(names, strategies, strict=True)
    ]


def step_text(candidate: Candidate) -> str:
    """The step's time; `≥` before what only a bound is known of."""
    return "≥ " * candidate.is_bound + format_time(candidate.step_time.total_s)


def _strategy_columns(candidates: Sequence[Candidate]) -> list[_Column]:
    memory_unit = unit_of(max((c.memory.total_bytes for c in candidates), default=0))
    wire_unit = unit_of(max((size for c in candidates for size in _by_whole_axis(c.traffic).values()), default=0))

    def memory(name: str, field: str, detail: bool = True) -> _Column:
        return _Column(f"{name}\n{memory_unit}", lambda c: in_unit(getattr(c.memory, field), memory_unit), detail)

    def wire(axis: str) -> _Column:
        def cell(candidate: Candidate) -> str:
            size = _by_whole_axis(candidate.traffic).get(axis)
            return NONE if size is None else in_unit(size, wire_unit)

        return _Column(f"{axis} wire\n{wire_unit}", cell, True)

    return [
        _Column("strategy", lambda c: c.strategy.describe()),
        _Column("step", step_text),
        _Column("bubble", lambda c: f"{c.step_time.bubble_fraction:.1%}"),
        *(memory(name, field) for name, field in zip(_SHORT, MEMORY_CATEGORIES.values(), strict=True)),
        memory("total", "total_bytes", detail=False),
        *(memory(name, field) for name, field in used_tiers([c.memory for c in candidates]).items()),
        *(wire(axis) for axis in _axes(candidates)),
        _Column("fits", lambda c: "yes" if c.fits else "no"),
    ]


def memory_table(memories: Mapping[str, MemoryBreakdown], title: str = "Memory at the peak of a step") -> Table:
    """One row per label (a rank, or a witness), one column per category and the total."""
    table = plain_table(title)
    table.add_column("")
    shown = {**MEMORY_CATEGORIES, "total": "total_bytes", **used_tiers(memories.values())}
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for label, memory in memories.items():
        table.add_row(label, *(format_bytes(getattr(memory, field)) for field in shown.values()))
    return table


def used_tiers(memories: Iterable[MemoryBreakdown]) -> dict[str, str]:
    """Those of MEMORY_TIERS that any of these keeps something on."""
    memories = list(memories)
    return {name: field for name, field in MEMORY_TIERS.items() if any(getattr(m, field) for m in memories)}


def traffic_table(traffic: Traffic, title: str = "What one rank sends in a step") -> Table:
    """One row per (phase, axis, primitive) with calls, payload and wire bytes; the last row is the sum."""
    table = plain_table(title)
    for name in ("phase", "axis", "primitive"):
        table.add_column(name)
    for name in ("calls", "payload", "wire"):
        table.add_column(name, justify="right", no_wrap=True)
    for (primitive, axis, phase), row in traffic.sorted_rows():
        cells = (f"{row.calls:,}", format_bytes(row.payload_bytes), format_bytes(row.wire_bytes))
        table.add_row(phase, axis, primitive, *cells)
    table.add_section()
    calls = sum(row.calls for row in traffic.rows.values())
    table.add_row("all", "", "", f"{calls:,}", "", format_bytes(traffic.wire_bytes))
    return table


# ---------------------------------------------------------------- forecast beside measured


_DATA_PARALLEL_PHASES = ("gather", "gradients", "parameters")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One quantity as its witnesses tell it. `unit`: bytes, seconds, calls or fraction."""

    name: str
    forecast: float | None
    measured: float | None
    unit: str
    rehearsed: float | None = None
    """What a dry run counted."""

    @property
    def found(self) -> float | None:
        """What the forecast is held against: measured, or where nothing was, rehearsed."""
        return self.rehearsed if self.measured is None else self.measured

    @property
    def relative_difference(self) -> float | None:
        """(found − forecast) / forecast; None where one is missing, inf where only forecast is 0."""
        if self.forecast is None or self.found is None:
            return None
        if self.forecast == self.found:
            return 0.0
        return (self.found - self.forecast) / self.forecast if self.forecast else float("inf")


def compare_memory(forecast: MemoryBreakdown, measured: MemoryBreakdown) -> list[Comparison]:
    """Category by category, the total, and what is offloaded."""
    fields = {**MEMORY_CATEGORIES, "total": "total_bytes", **used_tiers([forecast, measured])}
    return [
        Comparison(f"memory, {name}", getattr(forecast, field), getattr(measured, field), "bytes")
        for name, field in fields.items()
    ]


def compare_traffic(forecast: Traffic, measured: Traffic) -> list[Comparison]:
    """Wire bytes and calls of every row that either has; a row that one lacks counts as 0 there."""
    comparisons = []
    for key, _ in Traffic({**forecast.rows, **measured.rows}).sorted_rows():
        primitive, axis, phase = key
        expected, found = (witness.rows.get(key, TrafficRow()) for witness in (forecast, measured))
        name = f"{phase}: {primitive} over {axis}"
        comparisons.append(Comparison(f"{name}, calls", expected.calls, found.calls, "calls"))
        comparisons.append(Comparison(f"{name}, wire", expected.wire_bytes, found.wire_bytes, "bytes"))
    return comparisons


def compare_step_time(
    forecast: StepTime, measured_s: float | None, measured_bubble: float | None = None
) -> list[Comparison]:
    """Step time and bubble; None where a run did not measure it."""
    return [
        Comparison("step time", forecast.total_s, measured_s, "seconds"),
        Comparison("bubble", forecast.bubble_fraction, measured_bubble, "fraction"),
    ]


def compare_waits(forecast: StepTime, waited_s: Mapping[str, float]) -> list[Comparison]:
    """What a step stood still for communication, by phase; forecast for what data parallelism does not hide."""
    exposed_s = sum(waited_s.get(phase, 0.0) for phase in _DATA_PARALLEL_PHASES) if waited_s else None
    others = (phase for phase in PHASES if phase in waited_s and phase not in _DATA_PARALLEL_PHASES)
    return [
        Comparison("waiting: data-parallel communication", forecast.data_comm_exposed_s, exposed_s, "seconds"),
        *(Comparison(f"waiting: {phase}", None, waited_s[phase], "seconds") for phase in others),
    ]


def beside_rehearsal(measured: Iterable[Comparison], rehearsed: Iterable[Comparison]) -> list[Comparison]:
    """What two witnesses say against the same forecast, as one list; a quantity that only one knows is shown too.

    Args:
        measured: of a run; may be empty.
        rehearsed: the same with a dry run in the place of the run.
    """
    counted = {c.name: c for c in rehearsed}
    rows = [replace(c, rehearsed=counted.pop(c.name).measured) if c.name in counted else c for c in measured]
    return rows + [replace(c, measured=None, rehearsed=c.measured) for c in counted.values()]


def comparison_table(comparisons: Sequence[Comparison], title: str = "Forecast beside measured") -> Table:
    """One row per quantity: forecast, what a dry run counted if there was one, measured, and how far it is off."""
    table = plain_table(title)
    is_rehearsed = any(c.rehearsed is not None for c in comparisons)
    table.add_column("")
    for name in ("forecast", *(("dry run",) if is_rehearsed else ()), "measured", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    for c in comparisons:
        values = (c.forecast, *((c.rehearsed,) if is_rehearsed else ()), c.measured)
        table.add_row(c.name, *(_quantity(value, c.unit) for value in values), _difference(c))
    return table


def changes_table(comparisons: Iterable[Comparison], heads: tuple[str, str, str], title: str) -> Table:
    """One row per quantity: as it is, as it would be, and by how much that differs."""
    table = plain_table(title)
    table.add_column("")
    for name in heads:
        table.add_column(name, justify="right", no_wrap=True)
    for c in comparisons:
        table.add_row(c.name, _quantity(c.forecast, c.unit), _quantity(c.measured, c.unit), _difference(c))
    return table


# ---------------------------------------------------------------- a curve in one line


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """A curve as one line of block characters, at most `width`; a blank where a value is not finite."""
    means = [_mean(values[start:stop]) for start, stop in _bins(len(values), width)]
    finite = [mean for mean in means if isfinite(mean)]
    if not finite:
        return " " * len(means)
    low, high = min(finite), max(finite)
    step = (high - low) / (len(_BLOCKS) - 1) or 1.0
    return "".join(_BLOCKS[round((mean - low) / step)] if isfinite(mean) else " " for mean in means)


def _bins(count: int, width: int) -> list[tuple[int, int]]:
    bins = min(count, width)
    return [(i * count // bins, (i + 1) * count // bins) for i in range(bins)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ---------------------------------------------------------------- cells


class PlainTable(Table):
    """A table; where the terminal is too narrow for its columns, the same as a list with one cell per line."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.least_width() <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        yield Text(f"{self.title or ''}", style="bold")
        heads = [" ".join(str(column.header).split()) for column in self.columns]
        for row in zip(*(column.cells for column in self.columns), strict=True):
            first, *others = ((head, str(cell)) for head, cell in zip(heads, row, strict=True))
            yield Text(" ".join(filter(None, first)))
            yield from (Text(f"  {head + ': ' if head else ''}{cell}") for head, cell in others if cell)
        yield Text("")

    def least_width(self) -> int:
        """Columns of the terminal that the table needs: no number is cut, and no word."""
        widths = (
            max(cell_len(word) for text in (column.header, *column.cells) for word in self._pieces(column, str(text)))
            for column in self.columns
        )
        return sum(widths) + 2 * len(self.columns)

    def _pieces(self, column: Column, text: str) -> list[str]:
        return (text.splitlines() if column.no_wrap else text.split()) or [""]


def plain_table(title: str | None, *, has_head: bool = True) -> PlainTable:
    """An empty table as all of them look."""
    return PlainTable(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_header=has_head,
        pad_edge=False,
        collapse_padding=True,
    )


def _axes(candidates: Sequence[Candidate]) -> list[str]:
    """Axes that anybody sends over: mesh order first, then others by name."""
    used = {axis for candidate in candidates for axis in _by_whole_axis(candidate.traffic)}
    return [axis for axis in MESH_ORDER if axis in used] + sorted(used.difference(MESH_ORDER))


def _by_whole_axis(traffic: Traffic) -> dict[str, int]:
    """Axis → wire bytes; what is sent over a part of an axis counts for the axis."""
    total: Counter[str] = Counter()
    for axis, size in traffic.by_axis().items():
        total[WHOLE_AXIS.get(axis, axis)] += size
    return dict(total)


def _quantity(value: float | None, unit: str) -> str:
    if value is None:
        return NONE
    formats = {"bytes": format_bytes, "seconds": format_time, "fraction": "{:.1%}".format, "calls": "{:,.0f}".format}
    return formats[unit](value)


def _difference(comparison: Comparison) -> str:
    """`equal`, `+3.1 %` or, where a percentage would hide it, the difference itself."""
    relative = comparison.relative_difference
    if relative is None or comparison.forecast is None or comparison.found is None:
        return NONE
    if relative == 0:
        return "equal"
    delta = comparison.found - comparison.forecast
    if comparison.unit == "fraction":
        return f"{delta * 100:+.1f} points"
    if not isfinite(relative) or abs(relative) < 0.0005:
        return f"{'+' if delta > 0 else '−'}{_quantity(abs(delta), comparison.unit)}"
    return f"{relative:+.1%}"
