"""Naive model parallelism: a micro-batch passes all stages, there and back, before the next one begins."""

from __future__ import annotations

from meshwright.core.program import Action, Kind
from meshwright.core.schedule import PipelineSize, Rows, Schedule, StageTimes


def order(size: PipelineSize) -> Rows:
    """One rank works at any time. Rows are ranks, time runs right, a backward takes two slots:

        r0: F0 .  .  .  B0 B0 F1 .  .  .  B1 B1
        r1: .  F0 B0 B0 .  .  .  F1 B1 B1 .  .

    Stage r stands on rank r.
    """
    kinds = (Kind.F, Kind.B)
    return tuple(
        tuple(Action(kind, rank, k) for k in range(size.num_micro_batches) for kind in kinds)
        for rank in range(size.num_ranks)
    )


def further_s(times: StageTimes, num_micro_batches: int) -> list[float]:
    """Each micro-batch takes the whole way, there and back."""
    way_s = sum(times.work_s) + 2 * sum(times.boundaries_s)
    return [(num_micro_batches - 1) * way_s] * len(times.work_s)


SCHEDULE = Schedule(
    name="naive",
    order=order,
    is_offered=False,
    num_slots=lambda size: size.num_micro_batches * size.num_ranks,
    num_live=lambda size, rank: 1,
    further_s=further_s,
)
