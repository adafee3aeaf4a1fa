"""Drawings: text in other time than the unit grid, cropping, the figure, the trace."""

from __future__ import annotations

import json

from meshwright.core.program import Kind
from meshwright.schedule.build import program
from meshwright.schedule.draw import chrome_trace, figure, table, text
from meshwright.sim.clock import UnitCosts, simulate


def test_a_timeline_is_drawn_in_its_own_time() -> None:
    timeline = simulate(program("gpipe", 2, 2), UnitCosts(forward=0.01, backward=0.01, transfer=0.01))
    assert text(timeline).splitlines() == [
        "r0: F0 F1 .  .  .  .  B0 B1",
        "r1: .  .  F0 F1 B0 B1 .  .",
    ]


def test_unit_costs_draw_the_same_text_as_the_program() -> None:
    built = program("1f1b", 4, 8)
    assert text(simulate(built, UnitCosts())) == text(built)


def test_a_wide_table_is_cut() -> None:
    assert text(program("gpipe", 2, 3), max_cells=4).splitlines() == ["r0: F0 F1 F2 .  …", "r1: .  F0 F1 F2 …"]


def test_rows_align_from_ten_micro_batches_and_ranks_on() -> None:
    lines = text(program("gpipe", 11, 11)).splitlines()
    assert lines[0].startswith("r0:  F0  F1")
    assert lines[10].startswith("r10: .   .")
    assert "F10" in lines[0]


def test_table_shows_the_surroundings_of_a_mark() -> None:
    drawn = table(program("gpipe", 2, 8), {(1, 12)})
    assert drawn.startswith("r1: … ")
    assert drawn.endswith(" …")
    assert drawn.count("[") == 1
    assert "r0" not in drawn


def test_figure_has_one_bar_per_action() -> None:
    drawing = figure(simulate(program("1f1b", 4, 8), UnitCosts()))
    bars = {trace.name: len(trace.x) for trace in drawing.data}
    assert bars == {"forward": 32, "backward": 32}
    forward = next(trace for trace in drawing.data if trace.name == "forward")
    assert set(forward.text) == {str(k) for k in range(8)}
    assert drawing.layout.title.text == "1f1b: bubble 27.3% of 33 s"
    assert figure(program("1f1b", 4, 8)).layout.title.text == "1f1b: bubble 27.3% of 33 slots"


def test_trace_holds_work_and_transfers_of_every_rank() -> None:
    timeline = simulate(program("1f1b", 2, 3), UnitCosts(transfer=0.5))
    trace = json.loads(json.dumps(chrome_trace(timeline)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert sum(event["cat"] in (Kind.F, Kind.B) for event in spans) == 2 * 2 * 3
    assert sum(event["tid"] for event in spans) == 6, "one transfer per micro-batch and direction"
    assert max(event["ts"] + event["dur"] for event in spans) == timeline.makespan_s * 1e6
