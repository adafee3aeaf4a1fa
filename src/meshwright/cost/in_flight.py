"""Which micro-batches a pipeline rank holds at the instants of a step at which its memory may be fullest.

                     F ────────────── B                whole: activations, then nothing
                     F ────── I ───── W                split: activations, then what the weight gradients need

Read off the schedule's order: transfers change nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwright.core.program import Action, Kind
from meshwright.core.schedule import PipelineSize, Rows, Schedule
from meshwright.core.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Instant:
    """Micro-batches per stage of the rank, the stages ascending."""

    live: tuple[int, ...]
    """Forward has ended, B or I has not."""
    postponed: tuple[int, ...]
    """I has ended, W has not."""
    runs: Kind
    """What runs: F has just ended, B and I are on their way; their micro-batch counts as live."""
    stage: int
    """On which of the rank's stages, counted from 0."""


def instants(strategy: Strategy, ranks: Iterable[int]) -> Iterator[tuple[Instant, ...]]:
    """For each of these pipeline ranks, those at which it may hold most."""
    schedule, size = strategy.pipeline_schedule, strategy.pipeline
    is_declared = schedule.num_live is not None and size.num_chunks == 1 and not strategy.splits_backward
    stages = strategy.stages_by_rank
    for rank in ranks:
        if is_declared and schedule.num_live is not None:
            live = (schedule.num_live(size, rank),)
            yield Instant(live, (0,), Kind.F, 0), Instant(live, (0,), Kind.B, 0)
        else:
            yield _read(schedule, size, rank, stages[rank])


@lru_cache(maxsize=4096)
def _read(schedule: Schedule, size: PipelineSize, rank: int, stages: tuple[int, ...]) -> tuple[Instant, ...]:
    """A planner asks thousands of times."""
    found = list(dict.fromkeys(_walk(_rows(schedule, size)[rank], stages)))
    return tuple(one for one in found if not any(_exceeds(other, one) for other in found))


@lru_cache(maxsize=4)
def _rows(schedule: Schedule, size: PipelineSize) -> Rows:
    """Asked for rank by rank."""
    return schedule.order(size)


def _walk(row: Sequence[Action], stages: Sequence[int]) -> Iterator[Instant]:
    live, postponed = [0] * len(stages), [0] * len(stages)
    for action, following in zip(row, (*row[1:], None), strict=True):
        at = stages.index(action.stage)
        if action.kind is Kind.F:
            live[at] += 1
            if following is None or following.kind is not Kind.F:
                yield Instant(tuple(live), tuple(postponed), Kind.F, 0)
        elif action.kind in (Kind.B, Kind.I):
            yield Instant(tuple(live), tuple(postponed), action.kind, at)
            live[at] -= 1
            postponed[at] += action.kind is Kind.I
        elif action.kind is Kind.W:
            postponed[at] -= 1


def _exceeds(other: Instant, one: Instant) -> bool:
    """Whether `other` holds at least what `one` holds, and is another."""
    if other == one or (other.runs, other.stage) != (one.runs, one.stage):
        return False
    pairs = zip((*other.live, *other.postponed), (*one.live, *one.postponed), strict=True)
    return all(more >= less for more, less in pairs)
