"""The ledger: what this rank sends, one row per (primitive, axis, phase).

It returns the same :class:`~meshwright.core.measures.Traffic` that the cost model predicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.core.errors import InputError
from meshwright.core.measures import PHASES, Traffic


class Ledger:
    """Counts the calls of one rank. The phase is plain state of the rank, not of a thread:
    autograd runs backward in threads of its own, and their calls belong to the same phase."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.current_phase = "other"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Calls inside belong to phase `name`, one of `core.measures.PHASES`. The innermost wins.

        Raises:
            InputError: an unknown phase.
        """
        if name not in PHASES:
            raise InputError(f"`{name}` is not a phase of a step; known phases: {', '.join(PHASES)}")
        outer, self.current_phase = self.current_phase, name
        try:
            yield
        finally:
            self.current_phase = outer

    def record(self, primitive: str, axis: str, payload_bytes: int, size: int) -> None:
        """Count one call over `size` ranks; payloads as in :func:`meshwright.core.measures.wire_bytes`."""
        self.traffic.add(primitive, axis, self.current_phase, payload_bytes, size)

    def take(self) -> Traffic:
        """What was counted since the last call; counting starts anew."""
        taken, self.traffic = self.traffic, Traffic()
        return taken
