"""GPipe: all forwards, then all backwards. Source: Huang et al. 2019, section 2.2."""

from __future__ import annotations

from meshwright.core.program import Action, Kind
from meshwright.core.schedule import PipelineSize, Rows, Schedule, StageTimes


def order(size: PipelineSize) -> Rows:
    """Micro-batches ascend in both directions, so gradients add up in the order of one process.

        r0: F0 F1 F2 .  .  .  B0 B0 B1 B1 B2 B2
        r1: .  F0 F1 F2 B0 B0 B1 B1 B2 B2 .  .

    Stage r stands on rank r; every rank holds all micro-batches' activations at once.
    """
    kinds = (Kind.F, Kind.B)
    return tuple(
        tuple(Action(kind, rank, k) for kind in kinds for k in range(size.num_micro_batches))
        for rank in range(size.num_ranks)
    )


def further_s(times: StageTimes, num_micro_batches: int) -> list[float]:
    """The slowest forward or link holds up every forward; every backward takes its own time or its gradient's."""
    forward_s = max(*times.forward_s, *times.links_s)
    backwards_s = (max(pair) for pair in zip(times.backward_s, times.links_s, strict=True))
    return [(num_micro_batches - 1) * (forward_s + backward_s) for backward_s in backwards_s]


SCHEDULE = Schedule(
    name="gpipe",
    order=order,
    num_slots=lambda size: size.num_micro_batches + size.num_ranks - 1,
    num_live=lambda size, rank: size.num_micro_batches,
    further_s=further_s,
)
