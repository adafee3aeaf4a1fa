"""Adds ARM and REDUCE: when a stage's gradients may start to travel, and when they must have arrived.

... B5@0 ─ ARM@0 ─ B6@0 ─ REDUCE@0        only the last backward completes gradients
... W5@0 ─ ARM@0 ─ W6@0 ─ REDUCE@0        the same where it is split
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.core.program import WEIGHT_GRADIENT_KINDS, Action, Kind, Program


def add_reductions(program: Program) -> Program:
    """The program with ARM right before each stage's last B or W, and one REDUCE per stage at the row's end.

    They stand by part of the model, so that two ranks that hold the same two parts reduce them in the same order.
    """
    return replace(program, rows=tuple(_reduced(program, row) for row in program.rows))


def _reduced(program: Program, row: Sequence[Action]) -> tuple[Action, ...]:
    last = {action.stage: index for index, action in enumerate(row) if action.kind in WEIGHT_GRADIENT_KINDS}
    armed: list[Action] = []
    for index, action in enumerate(row):
        if last.get(action.stage) == index:
            armed.append(Action(Kind.ARM, action.stage))
        armed.append(action)
    stages = sorted(last, key=lambda stage: (program.part(stage), stage))
    return (*armed, *(Action(Kind.REDUCE, stage) for stage in stages))
