"""ZB-H2: so many forwards ahead that no rank waits between its first and its last action, for twice ZB-H1's memory.

Source: Qi et al. 2024 (arXiv 2401.10241), section 2.2. The rule for the weight gradients is derived from its figure.
"""

from __future__ import annotations

from meshwright.core.program import Action
from meshwright.core.schedule import PipelineSize, Rows, Schedule
from meshwright.schedule.rows import CountedRow


def order(size: PipelineSize) -> Rows:
    """Warm-up min(2(p−r)−1, m) forwards; then an input gradient and, while there are any, a forward in turn.

        r0: F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 .
        r1: .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    On rank r, weight gradients follow from the input gradient after the first 2r on, one each; the others come last.
    With m ≥ 2p−1 and F = I = W no rank waits in between; the ranks end one after the other as they began.
    """

    def row(rank: int) -> tuple[Action, ...]:
        written = CountedRow()
        for _ in range(2 * (size.num_ranks - rank) - 1):
            written.forward(rank)
        for k in range(size.num_micro_batches):
            written.input_gradient(rank)
            if k >= 2 * rank:
                written.weight_gradient()
            written.forward(rank)
        return written.weight_gradients().up_to(size.num_micro_batches)

    return tuple(row(rank) for rank in range(size.num_ranks))


SCHEDULE = Schedule(
    name="zb-h2",
    order=order,
    is_offered=False,
    num_live=lambda size, rank: min(2 * size.num_ranks - 1, size.num_micro_batches),
)
