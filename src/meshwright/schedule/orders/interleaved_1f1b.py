"""Interleaved 1F1B: 1F1B over several stages per rank, which divides the bubble by their number.

Source: Narayanan et al. 2021 (SC21), section 2.2. Rounds of other than p micro-batches: torch.distributed.pipelining.
"""

from __future__ import annotations

from meshwright.core.program import Action, Kind
from meshwright.core.schedule import PipelineSize, Rows, Schedule, looped_slots
from meshwright.schedule.rows import in_pairs


def order(size: PipelineSize) -> Rows:
    """Round by round, a rank takes as many micro-batches as there are ranks through its first stage, then the next.

        r0: F0a F1a F0b F1b F2a .   B0b B0b F3a B1b B1b F2b B0a B0a F3b B1a B1a .   B2b B2b .   B3b B3b B2a B2a B3a B3a
        r1: .   F0a F1a F0b B0b B0b F1b B1b B1b F2a B0a B0a F3a B1a B1a F2b B2b B2b F3b B3b B3b B2a B2a B3a B3a .   .

    Backwards go through the stages the other way round. Warm-up min(2(p−1−r) + (v−1)·round, m·v) forwards. Stage s
    stands on rank s % p. One chunk per rank is 1F1B.
    """
    return tuple(_row(size, rank) for rank in range(size.num_ranks))


def _row(size: PipelineSize, rank: int) -> tuple[Action, ...]:
    of_rank = range(rank, size.num_stages, size.num_ranks)
    length = _round_length(size)
    rounds = [range(first, first + length) for first in range(0, size.num_micro_batches, length)]
    forwards = [Action(Kind.F, stage, k) for numbers in rounds for stage in of_rank for k in numbers]
    backwards = [Action(Kind.B, stage, k) for numbers in rounds for stage in reversed(of_rank) for k in numbers]
    return in_pairs(forwards, backwards, _num_warmup(size, rank))


def _num_warmup(size: PipelineSize, rank: int) -> int:
    """Forwards ahead of the first pair: two more per rank towards the pipeline's beginning, in 1F1B one."""
    per_rank = 1 if size.num_chunks == 1 else 2
    ahead = per_rank * (size.num_ranks - 1 - rank) + (size.num_chunks - 1) * _round_length(size)
    return min(ahead, size.num_chunks * size.num_micro_batches)


def _round_length(size: PipelineSize) -> int:
    """Micro-batches of a round: p, or a few more or less where m is no multiple of p."""
    num_rounds = max(1, size.num_micro_batches // size.num_ranks)
    return size.num_micro_batches // num_rounds if size.num_chunks > 1 else 1


def fault(size: PipelineSize) -> str | None:
    """All rounds are equally long."""
    p, m = size.num_ranks, size.num_micro_batches
    num_rounds = max(1, m // p)
    if size.num_chunks == 1 or m % num_rounds == 0:
        return None
    nearest = f"{m - m % num_rounds} or {(m // p + 1) * p}"
    return f"{m} micro-batches on {p} ranks make {num_rounds} rounds of unequal length; take {nearest} micro-batches"


SCHEDULE = Schedule(
    name="interleaved-1f1b",
    order=order,
    chunks=None,
    fault=fault,
    is_offered=False,
    fills_bubbles=True,
    num_slots=looped_slots,
    num_live=lambda size, rank: min(_num_warmup(size, rank) + 1, size.num_chunks * size.num_micro_batches),
)
