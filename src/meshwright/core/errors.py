"""Every exception a user can meet.

MeshwrightError            one clear line; the command line prints it and exits with status 1
├── InputError             a file, name or option that cannot be used as it is
├── UnsupportedError       a feature that is not there, instead of pretending
├── RuleError              an illegal strategy: the rule, the numbers, the nearest legal one
├── ProgramError           a pipeline table that cannot run
│   └── Deadlock           one whose ranks wait for each other (schedule/walk.py)
├── CheckpointError        a checkpoint that is missing, damaged or does not match
├── ParityError            a layout that does not compute what one process computes
├── EngineFailure          an engine that serves no more requests (serve/loop.py)
└── RankError              a rank that failed; names it
"""

from __future__ import annotations

from collections.abc import Iterable


class MeshwrightError(Exception):
    """Base of all errors that are the user's to mend. The message is one line that teaches."""


class MeshwrightWarning(UserWarning):
    """Something that a user should know and need not mend. The command line prints it as one line."""


class InputError(MeshwrightError):
    """A file, name or option that cannot be used as it is."""


class UnsupportedError(MeshwrightError):
    """A feature that is not there."""


class RuleError(MeshwrightError):
    """An illegal strategy. `rule` is the id of the broken rule in `meshwright.core.rules`."""

    def __init__(self, message: str, rule: str = "") -> None:
        super().__init__(message)
        self.rule = rule


class ProgramError(MeshwrightError):
    """A pipeline table that cannot run. `places` are the cells in question: (rank, index into its row)."""

    def __init__(self, message: str, places: Iterable[tuple[int, int]] = ()) -> None:
        super().__init__(message)
        self.places = tuple(places)


class CheckpointError(MeshwrightError):
    """A checkpoint that is missing, damaged, or of another model."""


class ParityError(MeshwrightError):
    """A layout that does not compute what one process computes. Names the first number that differs."""


class RankError(MeshwrightError):
    """A rank that failed. The message names the rank."""
