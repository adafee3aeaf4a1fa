"""DualPipe: micro-batches enter at both ends, and the model stands on the ranks twice.

Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1; DeepSeek, DualPipe (2025), `dualpipe/dualpipe.py`.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.program import Action
from meshwright.core.schedule import PipelineSize, Rows, Schedule
from meshwright.schedule.orders.dualpipe_v import eight_steps


def order(size: PipelineSize) -> Rows:
    """The first half of the micro-batches goes down the ranks (a), the second half up (b).

        r0: F0a F2b F1a B2b B2b F3b B0a B0a B3b B3b I1a W1a
        r1: F2b F0a F3b B0a B0a F1a B2b B2b B1a B1a I3b W3b

    Direction a has stages 0 to p−1, stage s on rank s; direction b has stages p to 2p−1, with the same parts of the
    model, stage p+i on rank p−1−i. Of a forward and a backward next to each other, of different stages, a runtime may
    compute one while the other communicates. Needs m ≥ 2p to fill; fewer take the same order without the later ones.
    """
    share = size.num_micro_batches // 2
    return tuple(_row(size.num_ranks, rank, share) for rank in range(size.num_ranks))


def _row(p: int, rank: int, share: int) -> tuple[Action, ...]:
    """Of each direction `share` micro-batches; the nearer end is the one that a rank begins with."""
    down, up = rank, 2 * p - 1 - rank
    stages = (down, up) if rank < p // 2 else (up, down)
    row = eight_steps(p // 2, min(rank, p - 1 - rank), max(share, p), stages).up_to(share)
    return tuple(replace(a, micro_batch=(a.micro_batch or 0) + share * (a.stage >= p)) for a in row)


def stage_ranks(size: PipelineSize) -> tuple[int, ...]:
    """Down the ranks, and up again."""
    return (*range(size.num_ranks), *reversed(range(size.num_ranks)))


def fault(size: PipelineSize) -> str | None:
    """Both halves are equally large."""
    p, m = size.num_ranks, size.num_micro_batches
    if p % 2:
        return f"two directions need an even number of ranks, not {p}; take {f'{p - 1} or ' * (p > 1)}{p + 1} ranks"
    if m % 2:
        taken = f"{f'{m - 1} or ' * (m > 1)}{m + 1}"
        return f"two directions need an even number of micro-batches, not {m}; take {taken} micro-batches"
    return None


SCHEDULE = Schedule(
    name="dualpipe", order=order, chunks=2, num_directions=2, stage_ranks=stage_ranks, fault=fault, is_offered=False
)
