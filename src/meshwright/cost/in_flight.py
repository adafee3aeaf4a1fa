"""Which micro-batches a pipeline rank holds at the instants of a step at which its memory may be fullest.

                     F ────────────── B                whole: activations, then nothing
                     F ────── I ───── W                split: activations, then what the weight gradients need

Read off the schedule's order: transfers change nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import ge

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
    declared, stages = is_declared(strategy), strategy.stages_by_rank
    for rank in ranks:
        if declared and schedule.num_live is not None:
            live = (schedule.num_live(size, rank),)
            yield Instant(live, (0,), Kind.F, 0), Instant(live, (0,), Kind.B, 0)
        else:
            yield _read(schedule, size, rank, stages[rank])


def fullest_ranks(strategy: Strategy, kinds: Sequence[int]) -> dict[int, tuple[Instant, ...]]:
    """Of pipeline ranks of one kind each, those that may hold most, and when.

    Args:
        kinds: for each pipeline rank the first one of its kind.
    """
    schedule, size = strategy.pipeline_schedule, strategy.pipeline
    if is_declared(strategy) and schedule.num_live is not None:
        live = [schedule.num_live(size, rank) for rank in range(strategy.pp)]
        most: dict[int, int] = {}
        for rank, kind in enumerate(kinds):
            if live[rank] > live[most.setdefault(kind, rank)]:
                most[kind] = rank
        ranks = sorted(most.values())
        return dict(zip(ranks, instants(strategy, ranks), strict=True))
    found: dict[tuple[int, tuple[Instant, ...]], int] = {}
    for rank, one in enumerate(instants(strategy, range(strategy.pp))):
        found.setdefault((kinds[rank], one), rank)
    return {rank: one for (_, one), rank in found.items()}


def is_declared(strategy: Strategy) -> bool:
    """Whether the schedule says how many micro-batches a rank holds, so that no order is read."""
    schedule = strategy.pipeline_schedule
    return schedule.num_live is not None and strategy.stages_per_rank == 1 and not strategy.splits_backward


@lru_cache(maxsize=4096)
def _read(schedule: Schedule, size: PipelineSize, rank: int, stages: tuple[int, ...]) -> tuple[Instant, ...]:
    """A planner asks thousands of times."""
    found = sorted(dict.fromkeys(_walk(_rows(schedule, size)[rank], stages)), key=_total, reverse=True)
    fullest: list[Instant] = []
    for one in found:
        if not any(_exceeds(other, one) for other in fullest):
            fullest.append(one)
    return tuple(fullest)


def _total(one: Instant) -> int:
    """No instant exceeds one with a larger total."""
    return sum(one.live) + sum(one.postponed)


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
            if following is None or (following.kind, following.stage) != (Kind.F, action.stage):
                yield Instant(tuple(live), tuple(postponed), Kind.F, at)
        elif action.kind in (Kind.B, Kind.I):
            yield Instant(tuple(live), tuple(postponed), action.kind, at)
            live[at] -= 1
            postponed[at] += action.kind is Kind.I
        elif action.kind is Kind.W:
            postponed[at] -= 1


def _exceeds(other: Instant, one: Instant) -> bool:
    """Whether `other` holds at least what `one` holds."""
    if other.runs is not one.runs or other.stage != one.stage:
        return False
    return all(map(ge, other.live, one.live)) and all(map(ge, other.postponed, one.postponed))
