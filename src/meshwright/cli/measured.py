"""`meshwright timeline RUN`: what the ranks of a run did, beside what the clock said."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli.drawing import MAX_TIMETABLE_RANKS, timetable, write_files
from meshwright.core.units import format_time

if TYPE_CHECKING:
    from rich.table import Table

    from meshwright.run.folder import RunFolder
    from meshwright.schedule.timeline import Timeline

MEASURED, FORECAST = "measured", "forecast"


def print_run(run: RunFolder, paths: Mapping[str, Path | None]) -> None:
    """Draw both, each as wide as the terminal; pictures are of what was measured, the trace holds both.

    Raises InputError where it is no run, or one that left no traces.
    """
    import json

    from meshwright.core.record import RankRecord
    from meshwright.planner.price import Pricer
    from meshwright.rehearse.timeline import MeasuredCosts, measured_timeline
    from meshwright.report.tables import report_console
    from meshwright.schedule import picture
    from meshwright.schedule.draw import traces_side_by_side
    from meshwright.sim.clock import simulate

    plan = run.plan()
    measured = measured_timeline(plan, RankRecord.load_all(run.measured))
    forecast = Pricer(plan.model, plan.cluster, plan.job).timeline(plan.strategy)
    recosted = simulate(measured.program, MeasuredCosts.of(measured))
    drawn = {MEASURED: measured, FORECAST: forecast}
    console = report_console()
    console.print(f"{plan.strategy.describe()}: the pipeline of dp rank 0", style="bold", highlight=False)
    for name, timeline in drawn.items():
        cell_s = _cell_s(timeline, console.width)
        console.print(f"{name}, one cell is {format_time(cell_s)}:", highlight=False)
        console.print(timetable(timeline, console.width, cell_s), highlight=False, soft_wrap=True)
    console.print(_table(drawn))
    console.print(
        f"the clock, with the times that the actions took: {format_time(recosted.makespan_s)}, bubble "
        f"{recosted.bubble_fraction:.1%}; what was measured beyond it is transfers, waiting and the interpreter",
        highlight=False,
    )
    files = (
        (paths["svg"], "picture", lambda: picture.svg(measured)),
        (paths["png"], "picture", lambda: picture.png(measured)),
        (paths["trace"], "trace", lambda: json.dumps(traces_side_by_side(drawn))),
        (paths["csv"], "program", measured.program.to_csv),
    )
    write_files(console, files)


def _cell_s(timeline: Timeline, width: int) -> float:
    """Seconds of a cell, so that the step fills the width."""
    cell = len(str(timeline.program.num_micro_batches - 1)) + 3
    return timeline.makespan_s / max(1, (width - 6) // cell) or 1.0


def _table(drawn: Mapping[str, Timeline]) -> Table:
    """Busy and idle of each rank, and of all."""
    from meshwright.report.tables import plain_table

    table = plain_table(None)
    for name in ("rank", *(f"{what}, {name}" for name in drawn for what in ("busy", "idle"))):
        table.add_column(name, justify="right")
    for rank in range(min(MAX_TIMETABLE_RANKS, drawn[MEASURED].program.num_ranks)):
        cells = ((format_time(t.busy_s[rank]), f"{t.rank_bubbles[rank]:.1%}") for t in drawn.values())
        table.add_row(str(rank), *(cell for pair in cells for cell in pair))
    every = ((format_time(t.makespan_s), f"{t.bubble_fraction:.1%}") for t in drawn.values())
    table.add_row("makespan", *(cell for pair in every for cell in pair))
    return table
