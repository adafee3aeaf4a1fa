"""The ledger: what this rank sends, one row per (primitive, axis, phase).

It returns the same :class:`~meshwright.core.measures.Traffic` that the cost model predicts.
"""

from __future__ import annotations

from meshwright.core.errors import InputError
from meshwright.core.measures import PHASES, Traffic


class Ledger:
    """Counts the calls of one rank. The phase is plain state of the rank, not of a thread:
    autograd runs backward in threads of its own, and their calls belong to the same phase."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.waited_s: dict[str, float] = {}
        """Phase → seconds that this rank's code stood still for calls it had started: communication that computation
        did not hide. On CUDA the host does not wait, the stream does, and this stays near zero."""
        self.waited_on_s: dict[str, float] = {}
        """The same seconds by axis."""
        self.current_phase = "other"

    def phase(self, name: str) -> Phase:
        """Calls inside belong to phase `name`, one of `core.measures.PHASES`. The innermost wins.

        Raises:
            InputError: an unknown phase.
        """
        if name not in PHASES:
            raise InputError(f"`{name}` is not a phase of a step; known phases: {', '.join(PHASES)}")
        return Phase(self, name)

    def record(self, primitive: str, axis: str, payload_bytes: int, size: int, sent_bytes: int | None = None) -> None:
        """Count one call over `size` ranks; payloads as in :func:`meshwright.core.measures.wire_bytes`."""
        self.traffic.add(primitive, axis, self.current_phase, payload_bytes, size, sent_bytes=sent_bytes)

    def record_wait(self, phase: str, axis: str, seconds: float) -> None:
        """Add to what was waited in a phase, on an axis."""
        self.waited_s[phase] = self.waited_s.get(phase, 0.0) + seconds
        self.waited_on_s[axis] = self.waited_on_s.get(axis, 0.0) + seconds

    def take_waits(self) -> dict[str, float]:
        """Seconds waited by phase since the last call; counting starts anew."""
        taken, self.waited_s, self.waited_on_s = self.waited_s, {}, {}
        return taken

    def take(self) -> Traffic:
        """What was counted since the last call; counting starts anew."""
        taken, self.traffic = self.traffic, Traffic()
        return taken


class Phase:
    """A phase of a ledger, as a context. A class, not a generator: every action of a pipeline enters one or two."""

    __slots__ = ("_ledger", "_name", "_outer")

    def __init__(self, ledger: Ledger, name: str) -> None:
        self._ledger, self._name, self._outer = ledger, name, ""

    def __enter__(self) -> None:
        self._outer, self._ledger.current_phase = self._ledger.current_phase, self._name

    def __exit__(self, *error: object) -> None:
        self._ledger.current_phase = self._outer
