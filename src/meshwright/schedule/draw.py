"""Drawings of timetables: text for terminals, a figure for notebooks and pages, a trace for Perfetto.

r0: F0 F1 .  .  .  B0 B0 B1 B1        `text`: rows are ranks, time runs right, `.` is idle
r1: .  F0 F1 B0 B0 B1 B1 .  .
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from meshwright.core.errors import ProgramError
from meshwright.core.program import COMPUTE_KINDS, SEND_KINDS, Action, Kind, Program
from meshwright.schedule.timeline import Event, Timeline
from meshwright.schedule.unit_clock import unit_timeline

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLORS = {Kind.F: "#4C78A8", Kind.B: "#F58518", Kind.I: "#E45756", Kind.W: "#72B7B2", Kind.REDUCE: "#54A24B"}
NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.REDUCE: "reduce",
}
"""What is drawn in time, in words."""
_TABLE_MARGIN = 5
_TABLE_RANKS = 16


def text(
    drawn: Program | Timeline,
    tick_s: float | None = None,
    max_cells: int | None = None,
    max_columns: int | None = None,
) -> str:
    """The timetable as lines of text, one per rank.

    Args:
        drawn: a program is drawn on the unit grid (F=I=W=1, B=2), a timeline in its own time.
        tick_s: seconds of one cell; by default the shortest compute action. A cell shows what runs at its middle.
        max_cells: cut rows after so many cells, with `…`.
        max_columns: cut them so that no line is wider, where at least one cell fits.

    Stages of a rank that has several are told apart by letters: a, b, c, ...
    """
    timeline = drawn if isinstance(drawn, Timeline) else unit_timeline(drawn)
    computed = [[event for event in row if event.action.kind in COMPUTE_KINDS] for row in timeline.events]
    tick = tick_s or min((e.end_s - e.start_s for row in computed for e in row if e.end_s > e.start_s), default=1.0)
    num_cells = round(max((e.end_s for row in computed for e in row), default=0.0) / tick)
    letters = stage_letters(timeline.program)
    shown = num_cells if max_cells is None else min(num_cells, max_cells)
    if max_columns is not None:
        width = max((len(label(event.action, letters)) for row in computed for event in row), default=1)
        shown = min(shown, max(1, (max_columns - len(f"r{len(computed) - 1}: …")) // (width + 1)))
    grid = [_cells(row, tick, shown, letters) for row in computed]
    return _lines(grid, "…" if shown < num_cells else "")


def table(program: Program, marked: Collection[tuple[int, int]] = ()) -> str:
    """Rows in order of execution, without time; cells at `marked` (rank, index) stand in brackets.

    Around marked cells only: far columns and rows are left out.
    """
    indices = [index for _, index in marked]
    first = max(0, min(indices, default=0) - _TABLE_MARGIN)
    last = max(indices, default=2 * _TABLE_MARGIN) + _TABLE_MARGIN
    ranks = sorted({rank for rank, _ in marked} or range(program.num_ranks))[:_TABLE_RANKS]
    lines = []
    for rank in ranks:
        row = program.rows[rank]
        cells = [f"[{a}]" if (rank, i) in marked else str(a) for i, a in enumerate(row) if first <= i <= last]
        head, tail = ("… " if first else ""), (" …" if last + 1 < len(row) else "")
        lines.append(f"r{rank}: {head}{' '.join(cells)}{tail}")
    return "\n".join(lines)


def refused(program: Program, fault: str, places: Iterable[tuple[int, int]] = ()) -> ProgramError:
    """The error to raise for a table: one line, then the table with `places` marked."""
    marked = set(places)
    return ProgramError(f"{program.name}: {fault}\n{table(program, marked)}", marked)


def figure(drawn: Program | Timeline) -> go.Figure:
    """The timetable as a plotly figure: bars by kind, labelled with micro-batches; one row per rank."""
    import plotly.graph_objects as go

    timeline = drawn if isinstance(drawn, Timeline) else unit_timeline(drawn)
    letters = stage_letters(timeline.program)
    bars = [_bars(timeline, kind, letters) for kind in COLORS]
    drawing = go.Figure([go.Bar(**bar) for bar in bars if bar["y"]])
    unit, axis = ("s", "seconds") if isinstance(drawn, Timeline) else ("slots", "slots (forward 1, backward 2)")
    drawing.update_layout(
        barmode="overlay",
        title=f"{timeline.program.name}: bubble {timeline.bubble_fraction:.1%} of {timeline.makespan_s:.4g} {unit}",
        xaxis_title=axis,
        yaxis={"autorange": "reversed"},
        bargap=0.15,
        template="plotly_white",
    )
    return drawing


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline in the trace-event format that Perfetto and chrome://tracing open; one process per rank.

    Track 0 holds the rank's work, track 1 the transfers it sends. Times are microseconds.
    """
    events: list[dict[str, Any]] = []
    for rank, row in enumerate(timeline.events):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for track, name in enumerate(("compute", "transfers")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}})
        events += [_trace_event(rank, event) for event in row if event.end_s > event.start_s]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def traces_side_by_side(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Several timelines in one trace, each name's ranks after those of the one before."""
    merged: dict[str, Any] = {"traceEvents": [], "displayTimeUnit": "ms"}
    first = 0
    for name, timeline in timelines.items():
        for event in chrome_trace(timeline)["traceEvents"]:
            if event["name"] == "process_name":
                event["args"]["name"] = f"{name}, {event['args']['name']}"
            merged["traceEvents"].append({**event, "pid": first + event["pid"]})
        first += timeline.program.num_ranks
    return merged


def _trace_event(rank: int, event: Event) -> dict[str, Any]:
    start_s, end_s, action = event
    return {
        "ph": "X",
        "name": str(action),
        "cat": str(action.kind),
        "pid": rank,
        "tid": int(action.kind in SEND_KINDS),
        "ts": start_s * 1e6,
        "dur": (end_s - start_s) * 1e6,
        "args": {"stage": action.stage, "micro_batch": action.micro_batch},
    }


def _bars(timeline: Timeline, kind: Kind, letters: dict[int, str]) -> dict[str, Any]:
    """Arguments of one plotly bar trace: all actions of `kind`."""
    found = [
        (rank, event) for rank, event in _events(timeline) if event.action.kind is kind and event.end_s > event.start_s
    ]
    labels = [label(event.action, letters).removeprefix(kind) for _, event in found]
    return {
        "orientation": "h",
        "name": NAMES[kind],
        "marker": {"color": COLORS[kind], "line": {"color": "white", "width": 1}},
        "y": [f"rank {rank}" for rank, _ in found],
        "base": [event.start_s for _, event in found],
        "x": [event.end_s - event.start_s for _, event in found],
        "text": labels,
        "textposition": "inside",
        "insidetextanchor": "middle",
        "hovertext": [f"{event.action}: {event.start_s:.4g} to {event.end_s:.4g}" for _, event in found],
        "hoverinfo": "text",
    }


def _events(timeline: Timeline) -> Iterator[tuple[int, Event]]:
    return ((rank, event) for rank, row in enumerate(timeline.events) for event in row)


def stage_letters(program: Program) -> dict[int, str]:
    """Stage → letter by its place on its rank; empty letters where every rank has one stage."""
    if program.num_stages == program.num_ranks:
        return dict.fromkeys(range(program.num_stages), "")
    ranks = program.stage_ranks
    return {stage: chr(ord("a") + ranks[:stage].count(rank)) for stage, rank in enumerate(ranks)}


def label(action: Action, letters: dict[int, str]) -> str:
    """`F3`, or `F3b` on a rank's second stage."""
    return f"{action.kind}{'' if action.micro_batch is None else action.micro_batch}{letters[action.stage]}"


def _cells(row: list[Event], tick: float, num_cells: int, letters: dict[int, str]) -> list[str]:
    """Label of what runs at the middle of each tick."""
    cells = ["."] * num_cells
    for start, end, action in row:
        for cell in range(max(0, round(start / tick)), min(num_cells, round(end / tick))):
            cells[cell] = label(action, letters)
    return cells


def _lines(grid: list[list[str]], end: str) -> str:
    width = max((len(cell) for row in grid for cell in row), default=1)
    head = len(f"r{len(grid) - 1}:")
    lines = []
    for rank, row in enumerate(grid):
        cells = " ".join(cell.ljust(width) for cell in row)
        lines.append(f"{f'r{rank}:'.ljust(head)} {cells} {end}".rstrip())
    return "\n".join(lines)
