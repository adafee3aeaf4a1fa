"""Looped breadth-first: all micro-batches pass a rank's first stage, then its second, and so on.

The parameters of a stage are needed in one period per direction, so that a sharded stage is gathered once for all
micro-batches. Source: Lamy-Poirier 2023, section 4.
"""

from __future__ import annotations

from meshwright.core.program import Action, Kind
from meshwright.core.schedule import PipelineSize, Rows, Schedule, looped_slots


def order(size: PipelineSize) -> Rows:
    """Stages ascend in forward and descend in backward; micro-batches ascend in both.

        r0: F0a F1a F2a F3a F0b F1b F2b F3b .   .   .   B0b B0b B1b B1b B2b B2b B3b B3b B0a B0a B1a B1a B2a B2a B3a B3a
        r1: .   F0a F1a F2a F3a F0b F1b F2b F3b B0b B0b B1b B1b B2b B2b B3b B3b B0a B0a B1a B1a B2a B2a B3a B3a .   .

    Stage s stands on rank s % p; every rank holds all activations of the step at once. One chunk per rank is GPipe.
    """

    def row(rank: int) -> tuple[Action, ...]:
        stages, numbers = range(rank, size.num_stages, size.num_ranks), range(size.num_micro_batches)
        forwards = [Action(Kind.F, stage, k) for stage in stages for k in numbers]
        backwards = [Action(Kind.B, stage, k) for stage in reversed(stages) for k in numbers]
        return (*forwards, *backwards)

    return tuple(row(rank) for rank in range(size.num_ranks))


SCHEDULE = Schedule(
    name="bfs",
    order=order,
    chunks=None,
    is_offered=False,
    num_slots=looped_slots,
    num_live=lambda size, rank: size.num_chunks * size.num_micro_batches,
)
