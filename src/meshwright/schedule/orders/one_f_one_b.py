"""1F1B: one forward, one backward, with a flush at the end of the step.

Source: Narayanan et al. 2021 (PipeDream-2BW), section 3.2, "PipeDream-Flush"; Fan et al. 2021 (DAPPLE), section 3.
"""

from __future__ import annotations

from itertools import accumulate

from meshwright.core.schedule import PipelineSize, Rows, Schedule, StageTimes
from meshwright.schedule.rows import one_forward_one_backward


def order(size: PipelineSize) -> Rows:
    """Warm-up min(p−1−r, m) forwards, then pairs of forward and backward, then the backwards that are left.

        r0: F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
        r1: .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .

    Stage r stands on rank r and holds at most min(p−r, m) micro-batches' activations.
    """
    p, m = size.num_ranks, size.num_micro_batches
    return tuple(one_forward_one_backward(rank, p, m) for rank in range(p))


def further_s(times: StageTimes, num_micro_batches: int) -> list[float]:
    """From the last stage, which holds one micro-batch at once, to the first: each bounds itself.

    A trip is the way of one micro-batch from a stage to the last and back.
    """
    further, slowest_link_s = num_micro_batches - 1, max(times.links_s)
    ways_s = (work + 2 * link for work, link in zip(times.work_s[::-1], times.links_s[::-1], strict=True))
    stages = zip(times.forward_s[::-1], times.backward_s[::-1], accumulate(ways_s), strict=True)
    held_s = [_held_up_s(further, num_held, *stage) for num_held, stage in enumerate(stages, 1)]
    return [max(further * slowest_link_s, seconds) for seconds in held_s][::-1]


def _held_up_s(further: int, num_held: int, forward_s: float, backward_s: float, trip_s: float) -> float:
    """What `further` micro-batches add on a stage that holds at most `num_held` at once.

    Two waits bound the time: the first backward and the last one each come a whole trip after their forward, with the
    other work between; and of every `num_held`-th micro-batch the trip begins when the one before has ended its own.
    """
    if further < num_held:
        return further * max(forward_s, backward_s)
    between_s = (further - num_held) * (forward_s + backward_s) + trip_s
    num_trips, rest = divmod(further, num_held)
    return max(between_s, num_trips * trip_s + rest * backward_s)


SCHEDULE = Schedule(
    name="1f1b",
    order=order,
    num_slots=lambda size: size.num_micro_batches + size.num_ranks - 1,
    num_live=lambda size, rank: min(size.num_ranks - rank, size.num_micro_batches),
    further_s=further_s,
)
