"""DualPipeV: DualPipe folded in the middle, so that the model stands on the ranks once.

Source: DeepSeek, DualPipe (2025), `dualpipe/dualpipev.py`; DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1.
"""

from __future__ import annotations

from meshwright.core.schedule import PipelineSize, Rows, Schedule, folded
from meshwright.schedule.rows import CountedRow


def order(size: PipelineSize) -> Rows:
    """Down the ranks through their first stages (a), up again through their second ones (b).

        r0: F0a F1a F2a F0b I0b W0b F1b F3a B1b B1b F2b B0a B0a B2b B2b F3b .   B1a B1a B3b B3b I2a W2a I3a W3a
        r1: .   F0a F0b F1a F1b F2a B0b B0b F2b B0a B0a F3a B1b B1b F3b B1a B1a B2b B2b B2a B2a I3b I3a W3b W3a

    Rank r has stages r and 2p−1−r. Of a forward and a backward next to each other, of different stages, a runtime may
    compute one while the other communicates. Needs m ≥ 2p to fill; fewer take the same order without the later ones.
    """
    p = size.num_ranks
    num = max(size.num_micro_batches, 2 * p)
    return tuple(eight_steps(p, r, num, (r, 2 * p - 1 - r)).up_to(size.num_micro_batches) for r in range(p))


def eight_steps(num_ranks: int, rank: int, num_micro_batches: int, stages: tuple[int, int]) -> CountedRow:
    """One rank's row in the eight steps of the published order, which DualPipe and DualPipeV share.

    Args:
        num_ranks: ranks up to the fold.
        rank: how far this one stands from where micro-batches enter.
        num_micro_batches: that enter there, at least twice `num_ranks`.
        stages: the one that this rank runs first, and the one on the way back.
    """
    to_fold, (near, far), row = num_ranks - 1 - rank, stages, CountedRow()
    for _ in range(2 * to_fold):
        row.forward(near)
    for _ in range(rank + 1):
        row.forward(near).forward(far)
    for _ in range(to_fold):
        row.input_gradient(far).weight_gradient().forward(far)
    for _ in range(num_micro_batches - 2 * num_ranks + rank + 1):
        row.forward(near).backward(far).forward(far).backward(near)
    for _ in range(to_fold):
        row.backward(far).forward(far).backward(near)
    num_whole = (rank + 1) // 2
    for index in range(rank + 1):
        _backward(row, far, whole=index < num_whole + (rank % 2 == 0))
        _backward(row, near, whole=index < num_whole)
    for _ in range(to_fold):
        row.weight_gradient().input_gradient(near)
    return row.weight_gradients()


def _backward(row: CountedRow, stage: int, whole: bool) -> CountedRow:
    return row.backward(stage) if whole else row.input_gradient(stage)


SCHEDULE = Schedule(name="dualpipe-v", order=order, chunks=2, stage_ranks=folded, is_offered=False)
