"""Naive model parallelism: a micro-batch passes all stages, there and back, before the next one begins."""

from __future__ import annotations

from meshwright.core.program import Action, Kind

NAME = "naive"


def order(num_stages: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """One rank works at any time. Rows are ranks, time runs right, a backward takes two slots:

        r0: F0 .  .  .  B0 B0 F1 .  .  .  B1 B1
        r1: .  F0 B0 B0 .  .  .  F1 B1 B1 .  .

    Stage r stands on rank r.
    """
    kinds = (Kind.F, Kind.B)
    return tuple(
        tuple(Action(kind, stage, k) for k in range(num_micro_batches) for kind in kinds) for stage in range(num_stages)
    )
