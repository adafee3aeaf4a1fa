"""What a rank was doing when it ended: a few bytes of a file that its launcher reads, however it ended.

The rank writes into mapped memory before each action of its row: no call of the system, and nothing to flush.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from meshwright.core.errors import ProgramError
from meshwright.core.program import Action

_NUM_BYTES = 64


def doing_path(record: Path) -> Path:
    """Where the rank writes whose failure is recorded in `record`."""
    return record.with_suffix(".doing")


class Doing:
    """The writing side."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_NUM_BYTES))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _NUM_BYTES)

    def note(self, action: Action | None) -> None:
        """From now on it does `action`; None: something outside the program."""
        self._memory[:] = (str(action) if action else "").encode().ljust(_NUM_BYTES, b"\0")


def read_doing(path: Path) -> Action | None:
    """What the rank that wrote here did last; None where that was no action, or nothing was written."""
    try:
        return Action.parse(path.read_bytes().rstrip(b"\0").decode())
    except (OSError, UnicodeDecodeError, ProgramError):
        return None
