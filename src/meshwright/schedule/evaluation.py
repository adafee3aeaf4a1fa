"""Forward only, for evaluation: the table that any schedule's stages are evaluated with.

p=2, two stages per rank, m=4    r0: F0a F1a F0b F1b F2a F3a F2b F3b
                                 r1: .   F0a F1a F0b F1b F2a F3a F2b F3b

Micro-batches go in groups of p through a rank's stages: with fewer a rank would stand still between its stages, with
more it would hold more hidden states. Any number of micro-batches will do.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.program import Action, Kind, Program
from meshwright.core.strategy import Strategy
from meshwright.schedule.passes.transfers import add_transfers


def evaluation_program(strategy: Strategy, num_micro_batches: int) -> Program:
    """Every forward of `strategy`'s stages on `num_micro_batches`, with its transfers."""
    ranks, directions = strategy.stage_ranks, strategy.pipeline_schedule.num_directions
    rows = tuple(tuple(_row(strategy, rank, num_micro_batches)) for rank in range(strategy.pp))
    return add_transfers(Program("forward", rows, ranks, num_micro_batches, directions))


def _row(strategy: Strategy, rank: int, num_micro_batches: int) -> Iterator[Action]:
    directions = strategy.pipeline_schedule.num_directions
    for first in range(0, num_micro_batches, strategy.pp):
        for stage in strategy.rank_stages(rank):
            for k in range(first, min(first + strategy.pp, num_micro_batches)):
                if k * directions // num_micro_batches == stage // strategy.num_parts:
                    yield Action(Kind.F, stage, k)
