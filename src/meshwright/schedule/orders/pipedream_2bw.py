"""PipeDream-2BW: 1F1B that never flushes, with one update per step and two versions of the weights.

Source: Narayanan et al. 2021 (ICML), section 3.1.
"""

from __future__ import annotations

from meshwright.core.program import Action
from meshwright.core.schedule import PipelineSize, Rows, Schedule
from meshwright.schedule.rows import one_forward_one_backward, with_updates


def order(size: PipelineSize) -> Rows:
    """1F1B over the micro-batches of all steps, with an update behind the last backward of each step.

        r0: F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
        r1: .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .

    Stage r stands on rank r. A step uses the weights that the step before the last has left, at every stage: two
    versions are kept. Needs m ≥ p, so that these are there when the step begins.
    """
    p, m = size.num_ranks, size.num_in_all
    return tuple(with_updates(one_forward_one_backward(r, p, m), every=size.num_micro_batches) for r in range(p))


def version(size: PipelineSize, action: Action) -> int:
    """One update fewer than there have been steps."""
    return max(0, (action.micro_batch or 0) // size.num_micro_batches - 1)


def fault(size: PipelineSize) -> str | None:
    """More versions would be needed."""
    p, m = size.num_ranks, size.num_micro_batches
    if m >= p:
        return None
    return f"two versions of the weights need as many micro-batches per step as ranks, {p}, not {m}; take {p} or more"


SCHEDULE = Schedule(
    name="pipedream-2bw",
    order=order,
    fault=fault,
    is_offered=False,
    is_asynchronous=True,
    version=version,
    num_versions=lambda size, rank: 2,
    num_live=lambda size, rank: size.num_ranks - rank,
)
