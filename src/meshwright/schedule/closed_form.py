"""Closed forms of the schedules on equal stages, transfers free: for ranking strategies without a clock.

p ranks with v stages each (chunks; 1 unless said otherwise), m micro-batches, seconds F and B per stage and
micro-batch. What a schedule's file declares is the makespan in slots of F+B and the live micro-batches per rank; the
rest follows. Live micro-batches are counted in the program where none are declared.

Sources: Huang et al. 2019 (GPipe), section 2.3; Narayanan et al. 2021 (SC21), section 2.2, whose "bubble" is the share
of ideal time, (p−1)/m.
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.core.errors import UnsupportedError
from meshwright.core.schedule import PipelineSize, Schedule, find_schedule, schedules
from meshwright.schedule import liveness
from meshwright.schedule.build import order_program


def makespan_s(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    forward_s: float,
    backward_s: float,
    num_chunks: int | None = None,
) -> float:
    """Seconds of one step's table. `forward_s`, `backward_s`: one stage, one micro-batch."""
    return _num_slots(*_found(name, num_ranks, num_micro_batches, num_chunks)) * (forward_s + backward_s)


def bubble_fraction(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int | None = None) -> float:
    """Idle share of the makespan."""
    schedule, size = _found(name, num_ranks, num_micro_batches, num_chunks)
    slots = _num_slots(schedule, size)
    return (slots - size.num_chunks * num_micro_batches) / slots


def bubble_of_ideal(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int | None = None) -> float:
    """Idle time relative to the ideal time m·(F+B): (p−1)/m for gpipe and 1f1b, (p−1)/(v·m) for interleaved-1f1b."""
    schedule, size = _found(name, num_ranks, num_micro_batches, num_chunks)
    return _num_slots(schedule, size) / (size.num_chunks * num_micro_batches) - 1


def peak_live(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int | None = None) -> tuple[int, ...]:
    """Stages times micro-batches whose activations rank r holds at once, per rank; of any schedule.

    Of v chunks, each is 1/v of the rank's layers. Raises InputError, and ProgramError for a size without a timetable.
    """
    schedule, size = _found(name, num_ranks, num_micro_batches, num_chunks)
    if schedule.num_live is None:
        return _counted_live(schedule, size)
    return tuple(schedule.num_live(size, rank) for rank in range(num_ranks))


@lru_cache(maxsize=1024)
def _counted_live(schedule: Schedule, size: PipelineSize) -> tuple[int, ...]:
    """Counted in the order's rows: no transfer changes what a rank holds. A planner asks thousands of times."""
    return liveness.peak_live(order_program(schedule, size))


def _found(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int | None) -> tuple[Schedule, PipelineSize]:
    schedule = find_schedule(name)
    return schedule, schedule.size(num_ranks, num_micro_batches, num_chunks)


def _num_slots(schedule: Schedule, size: PipelineSize) -> int:
    """Raises UnsupportedError for a schedule without a closed form; the clock times any."""
    if schedule.num_slots is None:
        have = ", ".join(name for name, schedule in schedules().items() if schedule.num_slots is not None)
        raise UnsupportedError(f"schedule `{schedule.name}` has no closed form ({have} have); simulate it instead")
    return schedule.num_slots(size)
