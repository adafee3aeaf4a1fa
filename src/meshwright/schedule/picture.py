"""A timetable as a picture, SVG or PNG: one row of bars per rank, time to the right, for papers, slides and pages."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Literal

from meshwright.core.program import Program
from meshwright.schedule.draw import COLORS, NAMES, label, stage_letters
from meshwright.schedule.timeline import Event, Timeline
from meshwright.schedule.unit_clock import unit_timeline

LEFT, TOP, ROW, BAR, BOTTOM, TICK = 64, 34, 28, 24, 52, 26
"""Pixels: margins, a rank's row and the bars in it, and the shortest action."""
MAX_WIDTH = 6000
"""Pixels; a longer timetable is drawn with narrower bars."""
CHUNK_OPACITY = (1.0, 0.7, 0.5, 0.35)
"""Of a rank's stages, the first is drawn darkest."""
GREY = "#555555"


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle; SVG shows `title` where the pointer rests on it."""

    x: float
    y: float
    width: float
    height: float
    color: str
    opacity: float = 1.0
    title: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """A line of text; y is its baseline."""

    x: float
    y: float
    text: str
    anchor: Literal["start", "middle", "end"] = "start"
    color: str = "#000000"
    size: int = 11


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn, in pixels."""

    width: int
    height: int
    shapes: tuple[Box | Words, ...]


def picture(drawn: Program | Timeline) -> Picture:
    """The timetable as shapes.

    Args:
        drawn: a program is drawn on the unit grid (F=I=W=1, B=2), a timeline in its own seconds.

    Bars carry the micro-batch, and a letter where a rank has several stages.
    """
    timeline = drawn if isinstance(drawn, Timeline) else unit_timeline(drawn)
    unit = "s" if isinstance(drawn, Timeline) else "slots"
    shown = [
        [event for event in row if event.action.kind in COLORS and event.end_s > event.start_s]
        for row in timeline.events
    ]
    shortest = min((event.end_s - event.start_s for row in shown for event in row), default=1.0)
    end = timeline.makespan_s or 1.0
    scale = min(TICK / shortest, MAX_WIDTH / end)
    bottom = TOP + ROW * len(shown)
    title = f"{timeline.program.name}: bubble {timeline.bubble_fraction:.1%} of {timeline.makespan_s:.4g} {unit}"
    shapes = (
        Words(LEFT, 20, title, size=14),
        *_bars(timeline.program, shown, scale),
        *_axis(end, scale, bottom, unit),
        *_legend(shown, bottom + 40),
    )
    return Picture(round(LEFT + end * scale + 20), bottom + BOTTOM, shapes)


def _bars(program: Program, shown: list[list[Event]], scale: float) -> Iterator[Box | Words]:
    letters = stage_letters(program)
    for rank, row in enumerate(shown):
        y = TOP + ROW * rank
        yield Words(LEFT - 8, y + 16, f"rank {rank}", "end")
        for start, end, action in row:
            x, width = LEFT + start * scale, (end - start) * scale
            chunk = max(0, ord(letters[action.stage] or "a") - ord("a"))
            opacity = CHUNK_OPACITY[min(chunk, len(CHUNK_OPACITY) - 1)]
            yield Box(x, y, width, BAR, COLORS[action.kind], opacity, f"{action}: {start:.4g} to {end:.4g}")
            name = label(action, letters).removeprefix(action.kind)
            if len(name) * 7 <= width:
                yield Words(x + width / 2, y + 16, name, "middle")


def _axis(end: float, scale: float, y: float, unit: str) -> Iterator[Words]:
    num_ticks = max(1, min(10, round(end * scale / 120)))
    for tick in range(num_ticks + 1):
        yield Words(LEFT + end * scale * tick / num_ticks, y + 14, f"{end * tick / num_ticks:.4g}", "middle", GREY)
    yield Words(LEFT - 8, y + 14, unit, "end", GREY)


def _legend(shown: list[list[Event]], y: float) -> Iterator[Box | Words]:
    kinds = {event.action.kind for row in shown for event in row}
    x = LEFT
    for kind in (kind for kind in COLORS if kind in kinds):
        yield Box(x, y - 9, 10, 10, COLORS[kind])
        yield Words(x + 14, y, f"{NAMES[kind]} ({kind})")
        x += 30 + 7 * len(f"{NAMES[kind]} ({kind})")


def svg(drawn: Program | Timeline | Picture) -> str:
    """The picture as SVG; hovering over a bar shows the action and its time."""
    found = drawn if isinstance(drawn, Picture) else picture(drawn)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{found.width}" height="{found.height}" '
        f'viewBox="0 0 {found.width} {found.height}" font-family="sans-serif">'
    )
    body = map(_svg_shape, found.shapes)
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>", ""])


def _svg_shape(shape: Box | Words) -> str:
    if isinstance(shape, Words):
        return (
            f'<text x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size}" text-anchor="{shape.anchor}" '
            f'fill="{shape.color}" pointer-events="none">{escape(shape.text)}</text>'
        )
    edges = f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" height="{shape.height:.2f}"'
    title = f"<title>{escape(shape.title)}</title>" if shape.title else ""
    return f'<rect {edges} fill="{shape.color}" fill-opacity="{shape.opacity}" stroke="white">{title}</rect>'


def png(drawn: Program | Timeline | Picture) -> bytes:
    """The picture as PNG, two dots per pixel."""
    from PIL import Image, ImageColor, ImageDraw, ImageFont

    found, dots = drawn if isinstance(drawn, Picture) else picture(drawn), 2
    image = Image.new("RGB", (found.width * dots, found.height * dots), "white")
    canvas = ImageDraw.Draw(image)
    anchors = {"start": "ls", "middle": "ms", "end": "rs"}
    for shape in found.shapes:
        if isinstance(shape, Words):
            font = ImageFont.load_default(shape.size * dots)
            at = (shape.x * dots, shape.y * dots)
            canvas.text(at, shape.text, fill=shape.color, font=font, anchor=anchors[shape.anchor])
        else:
            solid = ImageColor.getrgb(shape.color)[:3]
            color = tuple(round(shape.opacity * part + (1 - shape.opacity) * 255) for part in solid)
            right, low = (shape.x + shape.width) * dots, (shape.y + shape.height) * dots
            canvas.rectangle((shape.x * dots, shape.y * dots, right, low), fill=color, outline="white")
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()
