"""Adds ARM and REDUCE: when a stage's gradients may start to travel, and when they must have arrived.

... B5@0 ─ ARM@0 ─ B6@0 ─ REDUCE@0        only the last backward completes gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.core.program import Action, Kind, Program


def add_reductions(program: Program) -> Program:
    """The program with ARM right before each stage's last B, and one REDUCE per stage, by stage, at the row's end."""
    return replace(program, rows=tuple(_reduced(row) for row in program.rows))


def _reduced(row: Sequence[Action]) -> tuple[Action, ...]:
    last = {action.stage: index for index, action in enumerate(row) if action.kind is Kind.B}
    armed: list[Action] = []
    for index, action in enumerate(row):
        if last.get(action.stage) == index:
            armed.append(Action(Kind.ARM, action.stage))
        armed.append(action)
    return (*armed, *(Action(Kind.REDUCE, stage) for stage in sorted(last)))
