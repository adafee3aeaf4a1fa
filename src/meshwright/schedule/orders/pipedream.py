"""PipeDream: 1F1B that never flushes; every backward is followed by an update, every stage keeps older weights.

Source: Narayanan et al. 2019 (SOSP), sections 3.2 and 3.3.
"""

from __future__ import annotations

from meshwright.core.program import Action
from meshwright.core.schedule import PipelineSize, Rows, Schedule
from meshwright.schedule.rows import one_forward_one_backward, with_updates


def order(size: PipelineSize) -> Rows:
    """1F1B over the micro-batches of all steps, with an update behind each backward.

        r0: F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
        r1: .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .

    Stage r stands on rank r. Forward and backward of a micro-batch use the same weights, those that the forward found:
    p−r versions are kept.
    """
    p, m = size.num_ranks, size.num_in_all
    return tuple(with_updates(one_forward_one_backward(rank, p, m), every=1) for rank in range(p))


def version(size: PipelineSize, action: Action) -> int:
    """The latest when micro-batch k enters the stage: it has seen the updates of all but the p−1−stage before k."""
    return max(0, (action.micro_batch or 0) - (size.num_ranks - 1 - action.stage))


SCHEDULE = Schedule(
    name="pipedream",
    order=order,
    is_offered=False,
    is_asynchronous=True,
    version=version,
    num_versions=lambda size, rank: size.num_ranks - rank,
    num_live=lambda size, rank: size.num_ranks - rank,
)
