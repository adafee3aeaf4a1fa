"""Cuts the table of an asynchronous schedule into steps, so that a runtime runs step by step what never flushes.

row of rank 0, p=2, m=2     F0 SEND F1 SEND │ RECV B0 UPDATE0 F2 SEND RECV B1 UPDATE1 F3 SEND │ ... │ the rest
                                slice 0     │                     slice 1                     │     │  drain

A slice ends when the step's last micro-batch has left the rank, so it needs no data of a later step. No slice waits for
what a later slice of another rank does; but a gradient may still be on its way to a rank that takes it in its next
slice, so a sender must not wait for it at its own slice's end. All slices from :func:`first_steady` on but the last are
the same, with higher micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from meshwright.core.program import Action, Kind, Program
from meshwright.core.schedule import PipelineSize
from meshwright.schedule.build import first_steady, program


def slices(program: Program, num_steps: int) -> tuple[tuple[tuple[Action, ...], ...], ...]:
    """Per rank, one slice of its row per step, and a last one that drains the pipeline.

    Args:
        program: of `num_steps` steps, stage r on rank r.
    """
    m = program.num_micro_batches // num_steps
    lasts = range(m - 1, program.num_micro_batches, m)
    return tuple(_cut(row, lasts) for row in program.rows)


def shifted(row: Sequence[Action], num_micro_batches: int) -> tuple[Action, ...]:
    """The same actions of so many micro-batches later."""
    return tuple(replace(action, micro_batch=(action.micro_batch or 0) + num_micro_batches) for action in row)


def step_slice(name: str, size: PipelineSize, rank: int, step: int) -> tuple[Action, ...]:
    """Slice of a rank in a step, counted from where the pipeline was empty, of the row that never ends."""
    steady = first_steady(size)
    later = max(0, step - steady)
    return shifted(_row_slices(name, size, rank, steady + 1)[step - later], later * size.num_micro_batches)


def drain_slice(name: str, size: PipelineSize, rank: int, num_steps: int) -> tuple[Action, ...]:
    """What is left of a rank's row after so many steps since the pipeline was empty."""
    steady = first_steady(size)
    later = max(0, num_steps - steady)
    return shifted(_row_slices(name, size, rank, num_steps - later)[-1], later * size.num_micro_batches)


@lru_cache(maxsize=64)
def _row_slices(name: str, size: PipelineSize, rank: int, num_steps: int) -> tuple[tuple[Action, ...], ...]:
    built = program(name, size.num_ranks, size.num_micro_batches, num_chunks=size.num_chunks, num_steps=num_steps)
    return slices(built, num_steps)[rank]


def _cut(row: tuple[Action, ...], lasts: Sequence[int]) -> tuple[tuple[Action, ...], ...]:
    """Behind what carries each of these micro-batches on: SEND_F, or F where there is none."""
    leaves = {a.micro_batch: index + 1 for index, a in enumerate(row) if a.kind is Kind.F}
    leaves |= {a.micro_batch: index + 1 for index, a in enumerate(row) if a.kind is Kind.SEND_F}
    return tuple(row[start:stop] for start, stop in pairwise([0, *(leaves[k] for k in lasts), len(row)]))
