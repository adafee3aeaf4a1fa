"""GPipe: all forwards, then all backwards. Source: Huang et al. 2019, section 2.2."""

from __future__ import annotations

from meshwright.core.program import Action, Kind

NAME = "gpipe"


def order(num_stages: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Micro-batches ascend in both directions, so gradients add up in the order of one process.

        r0: F0 F1 F2 .  .  .  B0 B0 B1 B1 B2 B2
        r1: .  F0 F1 F2 B0 B0 B1 B1 B2 B2 .  .

    Stage r stands on rank r; every rank holds all micro-batches' activations at once.
    """
    kinds = (Kind.F, Kind.B)
    return tuple(
        tuple(Action(kind, stage, k) for kind in kinds for k in range(num_micro_batches)) for stage in range(num_stages)
    )
