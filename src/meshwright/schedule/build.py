"""From a schedule's name to a Program: find the order, run the passes."""

from __future__ import annotations

from meshwright.core.errors import InputError, ProgramError
from meshwright.core.program import Action, Kind, Program
from meshwright.core.schedule import PipelineSize, Rows, find_schedule
from meshwright.core.strategy import Strategy
from meshwright.schedule.passes.reductions import add_reductions
from meshwright.schedule.passes.transfers import add_transfers


def program(name: str, num_ranks: int, num_micro_batches: int, reduce: bool = True, *, num_chunks: int = 1) -> Program:
    """The program of one training step.

    Args:
        name: a schedule, such as `naive`, `gpipe` or `1f1b`.
        num_ranks: pipeline ranks.
        num_micro_batches: micro-batches per step and pipeline.
        reduce: add ARM and REDUCE; False for a step that only accumulates.
        num_chunks: stages of each rank.

    Raises:
        InputError: no such schedule, or one that has no chunks.
        ProgramError: a size below 1, or an order that cannot run.
    """
    schedule = find_schedule(name)
    size = PipelineSize(num_ranks, num_micro_batches, num_chunks)
    _check_sizes(size)
    if num_chunks > 1 and schedule.chunks == 1:
        raise InputError(
            f"schedule `{name}` puts one stage on a rank, but {num_chunks} chunks are asked for; "
            "take 1 chunk, or a schedule that has chunks"
        )
    built = add_transfers(from_rows(name, schedule.order(size)))
    return add_reductions(built) if reduce else built


def build_program(strategy: Strategy) -> Program:
    """The program of one training step of `strategy`; every data-parallel replica runs the same."""
    return program(strategy.schedule, strategy.pp, strategy.num_micro_batches)


def forward_program(num_stages: int, num_micro_batches: int) -> Program:
    """Forward only, for evaluation; a rank holds one micro-batch's activations at a time."""
    _check_sizes(PipelineSize(num_stages, num_micro_batches))
    rows = tuple(tuple(Action(Kind.F, stage, k) for k in range(num_micro_batches)) for stage in range(num_stages))
    return add_transfers(from_rows("forward", rows))


def from_rows(name: str, rows: Rows) -> Program:
    """A program of compute actions; a stage stands on the rank whose row has its forwards.

    Raises ProgramError where a stage of the numbering has no forward.
    """
    ranks = {a.stage: rank for rank, row in enumerate(rows) for a in row if a.kind is Kind.F}
    missing = sorted(set(range(max(ranks, default=0) + 1)) - ranks.keys())
    if missing:
        raise ProgramError(f"{name}: stages {missing} have no forward; every stage from 0 to the last needs one")
    num_micro_batches = 1 + max(a.micro_batch or 0 for row in rows for a in row)
    return Program(name, rows, tuple(ranks[stage] for stage in range(len(ranks))), num_micro_batches)


def _check_sizes(size: PipelineSize) -> None:
    sizes = {"ranks": size.num_ranks, "micro-batches": size.num_micro_batches, "chunks": size.num_chunks}
    for what, number in sizes.items():
        if number < 1:
            raise ProgramError(f"a pipeline of {number} {what}: at least 1 is needed")
