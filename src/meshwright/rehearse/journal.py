"""What one rank does in a step, in order: its actions, every call to the network in each, and what it keeps after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.comm.ledger import Ledger
from meshwright.core.program import Action


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, or one message that is sent."""

    primitive: str
    axis: str
    phase: str
    payload_bytes: int
    size: int
    """Ranks that take part, or that the axis has."""


@dataclass(slots=True)
class Entry:
    """One action and its calls; before the first action and after the last, what the step does around them."""

    action: Action | None
    calls: list[Call] = field(default_factory=list)
    kept_bytes: int = 0
    """Activations when it has ended."""


class Journal(Ledger):
    """A ledger that also keeps every call, in the entry of the action that made it.

    Attributes:
        entries: of the current step.
        kept_bytes: asked for the activations that are kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept_bytes: Callable[[], int] = lambda: 0
        self.entries = [Entry(None)]

    def start(self) -> None:
        """A new step."""
        self.entries = [Entry(None)]

    def begin(self, action: Action | None) -> None:
        """The runner begins an action, or has ended the last."""
        self.entries[-1].kept_bytes = self.kept_bytes()
        self.entries.append(Entry(action))

    def record(self, primitive: str, axis: str, payload_bytes: int, size: int, sent_bytes: int | None = None) -> None:
        """As of every ledger; calls over one rank are none."""
        super().record(primitive, axis, payload_bytes, size, sent_bytes)
        if size > 1:
            self.entries[-1].calls.append(Call(primitive, axis, self.current_phase, payload_bytes, size))
