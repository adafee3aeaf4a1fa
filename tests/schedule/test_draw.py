"""Drawings: text in other time than the unit grid, cropping, the figure, the trace."""

from __future__ import annotations

import io
import json
from xml.etree import ElementTree

from PIL import Image, ImageColor

from meshwright.core.program import Kind
from meshwright.schedule.build import program
from meshwright.schedule.draw import chrome_trace, figure, table, text
from meshwright.schedule.picture import Box, picture, png, svg
from meshwright.sim.clock import UnitCosts, simulate

SVG = "{http://www.w3.org/2000/svg}"


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


def test_a_table_is_cut_to_a_width() -> None:
    built = program("zb-v", 2, 12)
    for max_columns in (9, 24, 79, 80, 81):
        lines = text(built, max_columns=max_columns).splitlines()
        assert max(map(len, lines)) <= max_columns
        cells = [line.removesuffix(" …").split()[1:] for line in lines]
        assert len(cells[0]) == len(cells[1]) == (max_columns - 5) // 5 or max_columns == 9
    assert text(built, max_columns=10_000) == text(built)


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


def test_split_backwards_have_bars_of_their_own() -> None:
    drawing = figure(program("zb-h1", 2, 3))
    assert {trace.name: len(trace.x) for trace in drawing.data} == {
        "forward": 6,
        "input gradient": 6,
        "weight gradient": 6,
    }


def bars(picture: str) -> list[ElementTree.Element]:
    """Rectangles that carry an action."""
    return [rect for rect in ElementTree.fromstring(picture).iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


def test_picture_has_one_bar_per_action_where_and_as_long_as_it_runs() -> None:
    built = program("interleaved-1f1b", 2, 4, num_chunks=2)
    found = bars(svg(built))
    assert len(found) == 2 * 2 * 4 * 2
    titles = {rect.find(f"{SVG}title").text: rect for rect in found}
    first, backward = titles["F0@0: 0 to 1"], titles["B0@2: 6 to 8"]
    assert (float(first.get("x")), float(first.get("width"))) == (64, 26)
    assert (float(backward.get("x")), float(backward.get("width"))) == (64 + 6 * 26, 2 * 26)
    assert first.get("y") == backward.get("y") != titles["F0@1: 1 to 2"].get("y")
    assert first.get("fill-opacity") != titles["F0@2: 2 to 3"].get("fill-opacity")
    shown = [element.text for element in ElementTree.fromstring(svg(built)).iter(f"{SVG}text")]
    assert {"rank 0", "rank 1", "0a", "3b", "forward (F)", "backward (B)", "slots"} <= set(shown)
    assert "interleaved-1f1b: bubble 11.1% of 27 slots" in shown


def test_picture_in_seconds_stays_inside_its_frame() -> None:
    timeline = simulate(program("1f1b", 3, 200), UnitCosts(forward=0.001, backward=0.002))
    picture = svg(timeline)
    width = float(ElementTree.fromstring(picture).get("width"))
    assert max(float(rect.get("x")) + float(rect.get("width")) for rect in bars(picture)) <= width <= 6100
    assert " s</text>" in picture


def test_trace_holds_work_and_transfers_of_every_rank() -> None:
    timeline = simulate(program("1f1b", 2, 3), UnitCosts(transfer=0.5))
    trace = json.loads(json.dumps(chrome_trace(timeline)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert sum(event["cat"] in (Kind.F, Kind.B) for event in spans) == 2 * 2 * 3
    assert sum(event["tid"] for event in spans) == 6, "one transfer per micro-batch and direction"
    assert max(event["ts"] + event["dur"] for event in spans) == timeline.makespan_s * 1e6


def test_png_shows_the_same_shapes() -> None:
    built = program("zb-h1", 2, 3)
    image = Image.open(io.BytesIO(png(built)))
    drawn = picture(built)
    assert image.size == (2 * drawn.width, 2 * drawn.height)
    boxes = [shape for shape in drawn.shapes if isinstance(shape, Box) and shape.title]
    assert len(boxes) == 2 * 3 * 3
    for box in boxes:  # a corner of each bar, away from its label
        color = image.getpixel((round(2 * box.x) + 4, round(2 * box.y) + 4))
        assert color == ImageColor.getrgb(box.color)
