"""How many micro-batches' activations a rank holds at once.

F k ──────────── I k ──────────── W k       B k ends both spans at once
└ for the input gradient ┘
└ for the weight gradient: inputs of linear layers ┘
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.core.program import Action, Kind, Program


def peak_live(program: Program) -> tuple[int, ...]:
    """Per rank, the most (stage, micro-batch) pairs whose F has begun and whose B or W has not ended.

    The unit is the activations of one stage for one micro-batch: with v chunks, 1/v of a rank's layers.
    """
    num = program.num_stages
    return tuple(map(int, peak_held(program, [0] * num, [1] * num)))


def peak_live_until_input(program: Program) -> tuple[int, ...]:
    """As :func:`peak_live`, but only until B or I has ended: what the input gradients need."""
    num = program.num_stages
    return tuple(map(int, peak_held(program, [1] * num, [0] * num)))


def peak_held(program: Program, until_input: Sequence[float], until_weight: Sequence[float]) -> tuple[float, ...]:
    """Per rank, the most that it holds at once.

    Args:
        until_input: per stage, what a micro-batch's F sets up and its B or I frees, in bytes or any other unit.
        until_weight: per stage, what F sets up and B or W frees.
    """
    change = {
        Kind.F: [a + b for a, b in zip(until_input, until_weight, strict=True)],
        Kind.B: [-a - b for a, b in zip(until_input, until_weight, strict=True)],
        Kind.I: [-a for a in until_input],
        Kind.W: [-b for b in until_weight],
    }
    return tuple(_peak(row, change) for row in program.rows)


def _peak(row: tuple[Action, ...], change: dict[Kind, list[float]]) -> float:
    held = peak = 0.0
    for action in row:
        if action.kind in change:
            held += change[action.kind][action.stage]
            peak = max(peak, held)
    return peak
