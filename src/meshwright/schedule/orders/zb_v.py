"""ZB-V: a rank's two stages stand at both ends of the way, so that no rank waits and all hold what 1F1B's first holds.

Source: Qi et al. 2024 (arXiv 2401.10241), section 6; Qi et al. 2024 (arXiv 2405.15362), section 3.
"""

from __future__ import annotations

from meshwright.core.program import Action
from meshwright.core.schedule import PipelineSize, Rows, Schedule, folded
from meshwright.schedule.rows import CountedRow


def order(size: PipelineSize) -> Rows:
    """Down the ranks through their first stages (a), up again through their second ones (b).

        r0: F0a F1a F2a F0b I0b W0b F1b I1b W1b F3a I0a W0a F2b I2b W2b I1a W1a F3b I3b W3b I2a W2a I3a W3a .
        r1: .   F0a F0b F1a F1b I0b W0b F2a I0a W0a F2b I1b W1b F3a I1a W1a F3b I2b W2b I2a I3b I3a W2a W3b W3a

    Rank r has stages r and 2p−1−r, so the first and the last layer stand on one rank. With m ≥ 2p−1 and F = I = W no
    rank waits between its first and its last action; fewer micro-batches take the same order without the later ones.
    """
    return tuple(_row(size, rank) for rank in range(size.num_ranks))


def _row(size: PipelineSize, rank: int) -> tuple[Action, ...]:
    p, num_micro_batches = size.num_ranks, max(size.num_micro_batches, 2 * size.num_ranks - 1)
    first, second = rank, 2 * p - 1 - rank
    row = CountedRow()
    for _ in range(2 * (p - rank) - 1):
        row.forward(first)
    for _ in range(rank):
        row.forward(second).forward(first)
    for _ in range(p - rank):
        row.forward(second).input_gradient(second).weight_gradient()
    while row.num_forwards(second) < num_micro_batches:
        if row.num_forwards(first) < num_micro_batches:
            row.forward(first)
        row.input_gradient(first).weight_gradient()
        row.forward(second).input_gradient(second).weight_gradient()
    for _ in range(rank):
        row.input_gradient(first).input_gradient(second)
    for _ in range(p - rank):
        row.input_gradient(first).weight_gradient(first)
    return row.weight_gradients(second).weight_gradients(first).up_to(size.num_micro_batches)


SCHEDULE = Schedule(
    name="zb-v",
    order=order,
    chunks=2,
    stage_ranks=folded,
    is_offered=False,
    num_live=lambda size, rank: min(2 * size.num_ranks, 2 * size.num_micro_batches, size.num_micro_batches + rank + 1),
)
