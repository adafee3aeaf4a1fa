"""ZB-H1: 1F1B with the weight gradients put off into the bubble; the memory of 1F1B's first rank on every rank.

Source: Qi et al. 2024 (arXiv 2401.10241), section 2.1.
"""

from __future__ import annotations

from meshwright.core.program import Action
from meshwright.core.schedule import PipelineSize, Rows, Schedule
from meshwright.schedule.rows import CountedRow


def order(size: PipelineSize) -> Rows:
    """Warm-up min(p−1−r, m) forwards; then a forward, while there are any, and an input gradient in turn.

        r0: F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        r1: .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        r2: .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    On rank r, weight gradients follow from the input gradient after the first r on, one each; the others come last.
    """

    def row(rank: int) -> tuple[Action, ...]:
        written = CountedRow()
        for _ in range(size.num_ranks - 1 - rank):
            written.forward(rank)
        for k in range(size.num_micro_batches):
            written.forward(rank).input_gradient(rank)
            if k >= rank:
                written.weight_gradient()
        return written.weight_gradients().up_to(size.num_micro_batches)

    return tuple(row(rank) for rank in range(size.num_ranks))


SCHEDULE = Schedule(
    name="zb-h1",
    order=order,
    is_offered=False,
    num_live=lambda size, rank: min(size.num_ranks, size.num_micro_batches),
)
