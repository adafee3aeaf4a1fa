"""What the commands that draw timetables share: text as wide as the terminal, and files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.core.errors import InputError
from meshwright.core.units import counted
from meshwright.core.values import make_ready, write_bytes, writing

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.core.program import Program
    from meshwright.schedule.timeline import Timeline

MAX_TIMETABLE_RANKS = 16


def legend(program: Program) -> str:
    """What the letters of a timetable mean: `F forward, B backward`."""
    from meshwright.core.program import COMPUTE_KINDS
    from meshwright.schedule.draw import NAMES

    kinds = {action.kind for row in program.rows for action in row}
    return ", ".join(f"{kind} {NAMES[kind]}" for kind in COMPUTE_KINDS if kind in kinds)


def timetable(drawn: Program | Timeline, width: int, tick_s: float | None = None) -> str:
    """The rows of the first ranks, cut to the width; a cell is `tick_s`, or the shortest action."""
    from meshwright.schedule.draw import text

    lines = text(drawn, tick_s, max_columns=width).splitlines()
    hidden = len(lines) - MAX_TIMETABLE_RANKS
    return "\n".join([*lines[:MAX_TIMETABLE_RANKS], *([f"… and {counted(hidden, 'more rank')}"] if hidden > 0 else [])])


def trace_text(timeline: Timeline) -> str:
    """The file for ui.perfetto.dev: one process per pipeline rank, in microseconds."""
    from meshwright.schedule.draw import chrome_trace

    return json.dumps(chrome_trace(timeline))


def write(path: Path, content: str | bytes) -> None:
    """Whole or not at all."""
    write_bytes(path, content.encode() if isinstance(content, str) else content)


def check_outputs(paths: Mapping[str, Path | None]) -> None:
    """Before anything is drawn: option → the file that it names.

    Raises InputError for a file that two of them name, or that cannot be written.
    """
    by_file: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        first = by_file.setdefault(path.resolve(), option)
        if first != option:
            raise InputError(f"{first} and {option} both name {path}; give each a file of its own")
        make_ready(path)


def write_files(console: Console, files: Iterable[tuple[Path | None, str, Callable[[], str | bytes]]]) -> None:
    """Write each (path, what it is, its content) that has a path, and say so."""
    for path, what, content in files:
        if path is not None:
            with writing(path):
                write(path, content())
            console.print(f"{what} written to {path}", highlight=False, soft_wrap=True)
