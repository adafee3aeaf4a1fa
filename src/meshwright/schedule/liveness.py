"""How many micro-batches' activations a rank holds at once."""

from __future__ import annotations

from meshwright.core.program import Action, Kind, Program


def peak_live(program: Program) -> tuple[int, ...]:
    """Per rank, the most (stage, micro-batch) pairs whose F has begun and whose B has not ended.

    The unit is the activations of one stage for one micro-batch.
    """
    return tuple(_peak(row) for row in program.rows)


def _peak(row: tuple[Action, ...]) -> int:
    live = peak = 0
    for action in row:
        if action.kind is Kind.F:
            live += 1
            peak = max(peak, live)
        elif action.kind is Kind.B:
            live -= 1
    return peak
