"""From a schedule's name to a Program: find the order, run the passes."""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.errors import ProgramError
from meshwright.core.program import Program
from meshwright.core.schedule import PipelineSize, Schedule, find_schedule
from meshwright.core.strategy import Strategy
from meshwright.schedule.own import complete
from meshwright.schedule.passes.reductions import add_reductions
from meshwright.schedule.passes.transfers import add_transfers


def program(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    reduce: bool = True,
    *,
    num_chunks: int | None = None,
    num_steps: int = 1,
) -> Program:
    """The program of one training step, or of several of an asynchronous schedule.

    Args:
        name: a schedule, such as `naive`, `gpipe` or `1f1b`, or the file of a table, such as `mine.csv`.
        num_ranks: pipeline ranks.
        num_micro_batches: micro-batches per step and pipeline.
        reduce: add ARM and REDUCE; False for a step that only accumulates. An UPDATE reduces by itself.
        num_chunks: stages of each rank; None: the schedule's own number, or 1.
        num_steps: steps of the table (:mod:`meshwright.schedule.slices` cuts it).

    Raises:
        InputError: no such schedule, or one that has not as many chunks.
        ProgramError: a size below 1 or one that the schedule has no timetable for, or an order that cannot run.
    """
    schedule = find_schedule(name)
    built = order_program(schedule, schedule.size(num_ranks, num_micro_batches, num_chunks, num_steps))
    if schedule.file:
        return complete(built, schedule.file, reduce)
    built = add_transfers(built)
    return add_reductions(built) if reduce and not schedule.is_asynchronous else built


def order_program(schedule: Schedule, size: PipelineSize) -> Program:
    """A schedule's compute actions, without communication. Raises ProgramError for a size without a timetable."""
    _check_sizes(size)
    fault = schedule.fault and schedule.fault(size)
    if size.num_steps > 1 and not schedule.is_asynchronous:
        fault = f"it ends with a flush, so there are no {size.num_steps} steps in one table; take 1"
    if fault:
        raise ProgramError(f"schedule `{schedule.name}` has no timetable of this size: {fault}")
    built = Program.from_rows(schedule.name, schedule.order(size), schedule.num_directions)
    for stage, (stands, declared) in enumerate(zip(built.stage_ranks, schedule.stage_ranks(size), strict=False)):
        if stands != declared:
            raise ProgramError(
                f"schedule `{schedule.name}` declares stage {stage} on rank {declared}, but its order has it on "
                f"rank {stands}; make `stage_ranks` and `order` agree"
            )
    return built


def build_program(strategy: Strategy) -> Program:
    """The program of one training step of `strategy`; every data-parallel replica runs the same.

    Of an asynchronous schedule, the program of so many steps that the last is one like all that follow, and of what
    it leaves under way.
    """
    size, num_steps = strategy.pipeline, _num_steps(strategy)
    return program(
        strategy.schedule, size.num_ranks, size.num_micro_batches, num_chunks=size.num_chunks, num_steps=num_steps
    )


def timed_program(strategy: Strategy) -> Program:
    """What takes time of :func:`build_program`, for :class:`meshwright.sim.replay.Replay`, which sends by itself; of a
    table of one's own all, since it may say when it sends."""
    schedule = strategy.pipeline_schedule
    if schedule.file:
        return build_program(strategy)
    return order_program(schedule, replace(strategy.pipeline, num_steps=_num_steps(strategy)))


def _num_steps(strategy: Strategy) -> int:
    return first_steady(strategy.pipeline) + 1 if strategy.pipeline_schedule.is_asynchronous else 1


def first_steady(size: PipelineSize) -> int:
    """Of an asynchronous schedule: the first step that begins with as many micro-batches under way on all ranks as it
    ends with (:mod:`meshwright.schedule.slices`)."""
    return -(-(size.num_ranks - 1) // size.num_micro_batches) + 1


def _check_sizes(size: PipelineSize) -> None:
    sizes = {
        "ranks": size.num_ranks,
        "micro-batches": size.num_micro_batches,
        "chunks": size.num_chunks,
        "steps": size.num_steps,
    }
    for what, number in sizes.items():
        if number < 1:
            raise ProgramError(f"a pipeline of {number} {what}: at least 1 is needed")
