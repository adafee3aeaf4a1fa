"""Closed forms of the schedules on equal stages, transfers free: for ranking strategies without a clock.

p ranks with one stage each, m micro-batches, seconds F and B per stage and micro-batch. What a schedule's file declares
is the makespan in slots of F+B and the live micro-batches per rank; the rest follows. Live micro-batches are counted
in the program where none are declared.

Sources: Huang et al. 2019 (GPipe), section 2.3; Narayanan et al. 2021 (SC21), section 2.2, whose "bubble" is the share
of ideal time, (p−1)/m.
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.core.errors import UnsupportedError
from meshwright.core.schedule import PipelineSize, Schedule, find_schedule, schedules
from meshwright.schedule import liveness
from meshwright.schedule.build import from_rows


def makespan_s(name: str, num_ranks: int, num_micro_batches: int, forward_s: float, backward_s: float) -> float:
    """Seconds of one step's table. `forward_s`, `backward_s`: one stage, one micro-batch."""
    return _num_slots(name, num_ranks, num_micro_batches) * (forward_s + backward_s)


def bubble_fraction(name: str, num_ranks: int, num_micro_batches: int) -> float:
    """Idle share of the makespan."""
    slots = _num_slots(name, num_ranks, num_micro_batches)
    return (slots - num_micro_batches) / slots


def bubble_of_ideal(name: str, num_ranks: int, num_micro_batches: int) -> float:
    """Idle time relative to the ideal time m·(F+B): (p−1)/m for gpipe and 1f1b."""
    return (_num_slots(name, num_ranks, num_micro_batches) - num_micro_batches) / num_micro_batches


def peak_live(name: str, num_ranks: int, num_micro_batches: int) -> tuple[int, ...]:
    """Micro-batches whose activations rank r holds at once, per rank; of any schedule. Raises InputError."""
    schedule, size = find_schedule(name), PipelineSize(num_ranks, num_micro_batches)
    if schedule.num_live is None:
        return _counted_live(schedule, size)
    return tuple(schedule.num_live(size, rank) for rank in range(num_ranks))


@lru_cache(maxsize=1024)
def _counted_live(schedule: Schedule, size: PipelineSize) -> tuple[int, ...]:
    """Counted in the order's rows: no transfer changes what a rank holds. A planner asks thousands of times."""
    return liveness.peak_live(from_rows(schedule.name, schedule.order(size)))


def _num_slots(name: str, num_ranks: int, num_micro_batches: int) -> int:
    """Raises UnsupportedError for a schedule without a closed form; the clock times any."""
    num_slots = find_schedule(name).num_slots
    if num_slots is None:
        have = ", ".join(name for name, schedule in schedules().items() if schedule.num_slots is not None)
        raise UnsupportedError(f"schedule `{name}` has no closed form ({have} have); simulate it instead")
    return num_slots(PipelineSize(num_ranks, num_micro_batches))
