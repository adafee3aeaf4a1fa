"""Program: the pipeline timetable as a table of actions per rank.

Text form of an action: `{KIND}{micro_batch}@{stage}`, e.g. `F0@1`, `SEND_F0@1`, `REDUCE@1`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count, islice

from meshwright.core.errors import ProgramError


class Kind(StrEnum):
    """What an action does. Compute kinds come from a schedule's order; the rest from passes."""

    F = "F"
    """Forward of a micro-batch on a stage."""
    B = "B"
    """Backward of a micro-batch on a stage: I and W at once."""
    I = "I"
    """Gradient of a stage's input: the part of backward that the stage before waits for."""
    W = "W"
    """Gradients of a stage's weights, from what I has kept; at any time after I."""
    SEND_F = "SEND_F"
    """Send a stage's output to the next stage."""
    RECV_F = "RECV_F"
    """Receive a stage's input from the previous stage."""
    SEND_B = "SEND_B"
    """Send the gradient of a stage's input to the previous stage."""
    RECV_B = "RECV_B"
    """Receive the gradient of a stage's output from the next stage."""
    ARM = "ARM"
    """From here on this stage's gradient buckets may be reduced as soon as they are complete."""
    REDUCE = "REDUCE"
    """Reduce what is left of this stage's gradients, and wait for all of it."""
    UPDATE = "UPDATE"
    """Reduce this stage's gradients of all micro-batches since its last update, up to this one, and update its weights.
    Only in tables that do not end with a step."""


COMPUTE_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
INPUT_GRADIENT_KINDS = (Kind.B, Kind.I)
"""These make the gradient that the stage before waits for."""
WEIGHT_GRADIENT_KINDS = (Kind.B, Kind.W)
"""These make the gradients of the stage's own weights."""
SEND_KINDS = (Kind.SEND_F, Kind.SEND_B)
RECV_KINDS = (Kind.RECV_F, Kind.RECV_B)
_WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradients",
    Kind.SEND_F: "sending of the output",
    Kind.RECV_F: "receiving of the input",
    Kind.SEND_B: "sending of the input's gradient",
    Kind.RECV_B: "receiving of the output's gradient",
    Kind.ARM: "start of the reduction",
    Kind.REDUCE: "reduction of gradients",
    Kind.UPDATE: "update",
}
_TEXT = re.compile(rf"({'|'.join(Kind)})([0-9]{{0,18}})@([0-9]{{1,18}})")
_MAX_NAMED = 4
"""So many stages without a forward are named one by one."""


@dataclass(frozen=True, slots=True)
class Action:
    """One cell of a timetable. `micro_batch` is None for ARM and REDUCE; for UPDATE it is the last one it takes in."""

    kind: Kind
    stage: int
    micro_batch: int | None = None

    @property
    def place(self) -> tuple[int, int]:
        """(stage, micro-batch), of an action that has one."""
        assert self.micro_batch is not None
        return self.stage, self.micro_batch

    @property
    def words(self) -> str:
        """For messages: `forward of micro-batch 3 on stage 1 (F3@1)`."""
        of = "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        return f"{_WORDS[self.kind]}{of} on stage {self.stage} ({self})"

    def __str__(self) -> str:
        return f"{self.kind}{'' if self.micro_batch is None else self.micro_batch}@{self.stage}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Inverse of str(). Raises ProgramError."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ProgramError(f"`{text}` is not an action; write for example F0@1, SEND_B3@2 or REDUCE@0")
        kind, micro_batch, stage = match.groups()
        return cls(Kind(kind), int(stage), int(micro_batch) if micro_batch else None)


@dataclass(frozen=True, slots=True)
class Program:
    """One row of actions per pipeline rank, and the rank that runs each stage.

    With two directions (DualPipe) the model stands on the ranks twice: the stages of the second follow those of the
    first in the numbering, hold the same layers again, and take the other half of the micro-batches.
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    stage_ranks: tuple[int, ...]
    num_micro_batches: int
    num_directions: int = 1

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def num_parts(self) -> int:
        """Parts that the model is cut into: the stages of one direction."""
        return self.num_stages // self.num_directions

    def part(self, stage: int) -> int:
        """Which part of the model a stage runs."""
        return stage % self.num_parts

    def next_stage(self, stage: int) -> int | None:
        """The stage that takes a stage's output; None behind the last of its direction."""
        return stage + 1 if self.part(stage) + 1 < self.num_parts else None

    def previous_stage(self, stage: int) -> int | None:
        """The stage whose output a stage takes; None ahead of the first of its direction."""
        return stage - 1 if self.part(stage) > 0 else None

    def micro_batches(self, stage: int) -> range:
        """Those that pass a stage: all, or its direction's share."""
        direction, share = stage // self.num_parts, self.num_micro_batches // self.num_directions
        return range(direction * share, (direction + 1) * share)

    @classmethod
    def from_rows(cls, name: str, rows: tuple[tuple[Action, ...], ...], num_directions: int = 1) -> Program:
        """A program whose stages stand on the ranks whose rows have their forwards.

        Raises ProgramError where a stage of the numbering has no forward.
        """
        ranks = {a.stage: rank for rank, row in enumerate(rows) for a in row if a.kind is Kind.F}
        num_missing = max(ranks, default=0) + 1 - len(ranks)
        if num_missing:
            named = list(islice((s for s in count() if s not in ranks), min(num_missing, _MAX_NAMED)))
            more = f" and {num_missing - _MAX_NAMED:,} more" if num_missing > _MAX_NAMED else ""
            raise ProgramError(
                f"{name}: stages {named}{more} have no forward; every stage from 0 to the last needs one"
            )
        num_micro_batches = 1 + max(a.micro_batch or 0 for row in rows for a in row)
        return cls(name, rows, tuple(ranks[stage] for stage in range(len(ranks))), num_micro_batches, num_directions)

    @classmethod
    def from_csv(cls, text: str, name: str = "table") -> Program:
        """Inverse of :meth:`to_csv`. Empty cells are skipped, so that a timetable may show its idle time.

        There are two directions where the first stage runs just half of the micro-batches.

        Raises ProgramError, which names line and cell of what is no action.
        """
        rows = tuple(tuple(action for _, action in row) for row in read_cells(text, name))
        table = cls.from_rows(name, rows)
        entered = {a.micro_batch for row in rows for a in row if a.kind is Kind.F and a.stage == 0}
        is_double = 2 * len(entered) == table.num_micro_batches and table.num_stages % 2 == 0
        return replace(table, num_directions=2) if is_double else table

    def to_csv(self) -> str:
        """One line per rank, actions separated by commas."""
        return "\n".join(",".join(str(action) for action in row) for row in self.rows) + "\n"


def read_cells(text: str, name: str) -> list[list[tuple[int, Action]]]:
    """Per line, its actions with their cells, counted from 1.

    Raises ProgramError, which starts with `name` and names line and cell of what is no action.
    """
    rows: list[list[tuple[int, Action]]] = []
    for line, row in enumerate(text.rstrip().split("\n"), 1):
        rows.append([])
        for cell, written in enumerate(row.split(","), 1):
            try:
                rows[-1] += [(cell, Action.parse(written))] if written.strip() else []
            except ProgramError as error:
                raise ProgramError(f"{name}, line {line}, cell {cell}: {error}") from None
        if not rows[-1]:
            raise ProgramError(f"{name}, line {line}: no actions; every line is the row of a rank")
    return rows
