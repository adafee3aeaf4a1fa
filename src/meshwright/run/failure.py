"""Which rank failed first, and why: the records that ranks leave for the process that started them.

When one rank dies, the others fail as well a moment later, because their peer is gone. A `Failure`
knows whether it is such a consequence; `first_cause` picks the one that a person must read about.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.core.errors import MeshwrightError, RankError

PEER_IS_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|connection (?:was )?closed|peer (?:is )?gone"
    r"|DistNetworkError|DistStoreError|NCCL communicator was aborted",
    re.IGNORECASE,
)
"""What the network says when it was another rank that failed."""

WEAK_SIGNALS = (signal.SIGTERM, signal.SIGABRT, signal.SIGINT)
"""How ranks end that the launcher stops, or that give up because a peer is gone."""

HINTS: dict[int, str] = {
    signal.SIGKILL: ", often by the system when memory runs out",
    signal.SIGSEGV: ", a crash in native code",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank ended."""

    rank: int
    what: str
    """In words, after the rank's name: `: no such file` or ` was killed by signal 9 (SIGKILL)`."""
    time_s: float
    """When, in seconds since the epoch."""
    is_consequence: bool
    """It failed because another one had failed."""
    doing: str = ""
    """The action of its pipeline program that it was in, in words; empty where it was in none."""
    is_silent: bool = False
    """It left no words of its own: all that is known is how its process ended."""

    def __str__(self) -> str:
        return f"rank {self.rank}{self.what}{f', in the {self.doing}' if self.doing else ''}"

    def save(self, path: Path) -> None:
        """Write the record whole or not at all."""
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(asdict(self)), encoding="utf-8")
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> Failure:
        """Inverse of :meth:`save`."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def from_exception(rank: int, error: BaseException) -> Failure:
    """The failure of a rank by an exception. A MeshwrightError's message speaks for itself."""
    lines = str(error).strip().splitlines()
    message = lines[0] if lines else "no message"
    named = message if isinstance(error, MeshwrightError) else f"{type(error).__name__}: {message}"
    is_consequence = isinstance(error, RankError) or PEER_IS_GONE.search(f"{type(error).__name__} {error}") is not None
    return Failure(rank, f": {named}", time.time(), is_consequence)


def from_exit(rank: int, exit_code: int, time_s: float) -> Failure:
    """The failure of a rank that left no record: its exit status, or minus the signal that killed it."""
    if exit_code >= 0:
        return Failure(rank, f" exited with status {exit_code}", time_s, is_consequence=False, is_silent=True)
    number = -exit_code
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    hint = HINTS.get(number, "")
    what = f" was killed by signal {number} ({name}{hint})"
    return Failure(rank, what, time_s, number in WEAK_SIGNALS, is_silent=True)


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The earliest failure that isn't a consequence of another; where all are, the earliest."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.time_s))
