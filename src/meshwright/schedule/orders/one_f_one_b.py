"""1F1B: one forward, one backward, with a flush at the end of the step.

Source: Narayanan et al. 2021 (PipeDream-2BW), section 3.2, "PipeDream-Flush"; Fan et al. 2021 (DAPPLE), section 3.
"""

from __future__ import annotations

from meshwright.core.program import Action, Kind

NAME = "1f1b"


def order(num_stages: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Warm-up min(p−1−r, m) forwards, then pairs of forward and backward, then the backwards that are left.

        r0: F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
        r1: .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .

    Stage r stands on rank r and holds at most min(p−r, m) micro-batches' activations.
    """

    def row(stage: int) -> tuple[Action, ...]:
        num_warmup = min(num_stages - 1 - stage, num_micro_batches)
        forwards = [Action(Kind.F, stage, k) for k in range(num_micro_batches)]
        backwards = [Action(Kind.B, stage, k) for k in range(num_micro_batches)]
        pairs = [action for pair in zip(forwards[num_warmup:], backwards) for action in pair]
        return (*forwards[:num_warmup], *pairs, *backwards[num_micro_batches - num_warmup :])

    return tuple(row(stage) for stage in range(num_stages))
