"""A timetable as an SVG picture: one row of bars per rank, time to the right, for papers, slides and pages."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

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


def svg(drawn: Program | Timeline) -> str:
    """The picture as text.

    Args:
        drawn: a program is drawn on the unit grid (F=I=W=1, B=2), a timeline in its own seconds.

    Bars carry the micro-batch, and a letter where a rank has several stages; hovering shows the action and its time.
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
    width, height = LEFT + end * scale + 20, TOP + ROW * len(shown) + BOTTOM
    title = f"{timeline.program.name}: bubble {timeline.bubble_fraction:.1%} of {timeline.makespan_s:.4g} {unit}"
    body = [
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        *_bars(timeline.program, shown, scale),
        *_axis(end, scale, TOP + ROW * len(shown), unit),
        *_legend(shown, TOP + ROW * len(shown) + 40),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>", ""])


def _bars(program: Program, shown: list[list[Event]], scale: float) -> Iterator[str]:
    letters = stage_letters(program)
    for rank, row in enumerate(shown):
        y = TOP + ROW * rank
        yield f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">rank {rank}</text>'
        for start, end, action in row:
            x, width = LEFT + start * scale, (end - start) * scale
            chunk = max(0, ord(letters[action.stage] or "a") - ord("a"))
            opacity = CHUNK_OPACITY[min(chunk, len(CHUNK_OPACITY) - 1)]
            yield (
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR}" fill="{COLORS[action.kind]}" '
                f'fill-opacity="{opacity}" stroke="white"><title>{action}: {start:.4g} to {end:.4g}</title></rect>'
            )
            name = label(action, letters).removeprefix(action.kind)
            if len(name) * 7 <= width:
                at = f'x="{x + width / 2:.2f}" y="{y + 16}"'
                yield f'<text {at} text-anchor="middle" pointer-events="none">{name}</text>'


def _axis(end: float, scale: float, y: float, unit: str) -> Iterator[str]:
    num_ticks = max(1, min(10, round(end * scale / 120)))
    for tick in range(num_ticks + 1):
        x = LEFT + end * scale * tick / num_ticks
        yield f'<text x="{x:.2f}" y="{y + 14}" text-anchor="middle" fill="#555">{end * tick / num_ticks:.4g}</text>'
    yield f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end" fill="#555">{unit}</text>'


def _legend(shown: list[list[Event]], y: float) -> Iterator[str]:
    kinds = {event.action.kind for row in shown for event in row}
    x = LEFT
    for kind in (kind for kind in COLORS if kind in kinds):
        yield f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLORS[kind]}"/>'
        yield f'<text x="{x + 14}" y="{y}">{NAMES[kind]} ({kind})</text>'
        x += 30 + 7 * len(f"{NAMES[kind]} ({kind})")
