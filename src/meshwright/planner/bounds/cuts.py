"""How a pipeline cuts a model, as far as lower bounds look at it: counts of layers of each kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from meshwright.core.model import ModelSpec
from meshwright.core.schedule import folded, looped
from meshwright.core.strategy import Strategy
from meshwright.planner.enumerate import MAX_CHUNKS

Pair = tuple[int, int]
"""Something of layers with an MLP, and of layers with experts."""
Share = tuple[float, float]
"""Likewise, as counts that no price is below."""
Number = TypeVar("Number", int, float)


def dot(counts: tuple[float, float], each: tuple[float, float]) -> float:
    """So many of each kind, times what one takes."""
    return counts[0] * each[0] + counts[1] * each[1]


@dataclass(frozen=True, slots=True)
class Way:
    """Layers of a pipeline rank, and of the stages before its first one; of both those that are run again."""

    before: Pair
    before_again: Share
    own: Pair
    own_again: Share
    is_first: bool
    has_head: bool


@dataclass(frozen=True, slots=True)
class Rank:
    """Pipeline ranks that hold as many layers of each kind, and the same ends."""

    first: int
    last: int
    own: Pair
    stages: tuple[tuple[Pair, Pair], ...]
    """Layers of each stage that are run again, and the others; each once."""
    has_front: bool
    has_back: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """How a pipeline cuts the model."""

    ways: tuple[Way, ...]
    """Of ranks with equally many layers that which is furthest from the first stage."""
    ranks: tuple[Rank, ...]
    again: Share
    """Layers that are run again, of all stages."""
    first: int
    """Layers of the first stage."""


@dataclass(frozen=True, slots=True)
class Order:
    """A schedule, and how it cuts the model, as far as lower bounds look at it."""

    change: Mapping[str, object]
    """Fields of a strategy that it decides."""
    cut: Cut | None
    """None without a pipeline."""
    has_ways: bool
    """Whether micro-batches go one way, and a step ends with a flush: then ranks wait for the first and the last."""
    has_tails: bool
    """Whether gradients of a stage's weights are there when that of its input is: then a rank's last backward is
    followed by those of the stages before it."""


def least_layers(s: Strategy, num_layers: int, *, is_cut: bool) -> int:
    """Of the first rank, whatever the schedule: an even cut, or one that spares the end with the head, gives it no
    fewer than the stages of up to `MAX_CHUNKS` per rank have, rounded down; any number where a cut is given."""
    if s.pp == 1:
        return num_layers
    if is_cut or s.layers_per_stage is not None:
        return 0
    chunks = range(1, MAX_CHUNKS + 1)
    return min(v * (num_layers // (s.pp * v)) for v in chunks if s.pp * v <= num_layers)


class Layers:
    """Of one model, which of its layers have experts."""

    def __init__(self, model: ModelSpec) -> None:
        self.num = model.num_layers
        self._sparse = [*accumulate(map(model.is_sparse, range(model.num_layers)), initial=0)]
        self.all = self.pair(0, self.num)
        self._cuts: dict[object, Cut] = {}

    def pair(self, start: int, stop: int) -> Pair:
        """Layers of each kind in [start, stop)."""
        sparse = self._sparse[stop] - self._sparse[start]
        return stop - start - sparse, sparse

    def priced_again(self, start: int, stop: int, s: Strategy) -> Share:
        """Of a stage's layers those that are run again, as few of each kind as the price counts: products by their
        share of the stage, collectives one by one."""
        num_again = s.num_recomputed(stop - start)
        exact, (dense, sparse) = self.pair(start, start + num_again), self.pair(start, stop)
        share = num_again / max(1, stop - start)
        return min(exact[0], share * dense), min(exact[1], share * sparse)

    def order(self, s: Strategy, change: Mapping[str, object]) -> Order:
        """That of a whole strategy, which decides the fields of `change`."""
        schedule = s.pipeline_schedule
        has_ways = schedule.num_directions == 1 and not schedule.is_asynchronous
        return Order(change, self._cut(s) if s.pp > 1 else None, has_ways, not s.splits_backward)

    def _cut(self, s: Strategy) -> Cut:
        """Of schedules that lay stages on ranks alike, it is one."""
        schedule, again = s.pipeline_schedule, s.recompute_layers if s.recompute != "none" else 0
        placed = () if schedule.stage_ranks in (looped, folded) else (s.num_micro_batches,)
        key = schedule.stage_ranks, schedule.num_directions, s.pp, s.stages_per_rank, placed, s.layers_per_stage, again
        if key not in self._cuts:
            self._cuts[key] = self._find_cut(s)
        return self._cuts[key]

    def _find_cut(self, s: Strategy) -> Cut:
        stages = s.stage_layers(self.num)
        counts = [self.pair(part.start, part.stop) for part in stages]
        again = [self.pair(part.start, part.start + s.num_recomputed(len(part))) for part in stages]
        before = [self.pair(0, part.start) for part in stages]
        priced = [self.priced_again(part.start, part.stop, s) for part in stages]
        before_again = [*accumulate(priced, _plus, initial=(0.0, 0.0))]
        ways: dict[object, Way] = {}
        ranks: dict[object, Rank] = {}
        parts = s.num_parts
        for rank, of_rank in enumerate(s.stages_by_rank):
            own = _total([counts[stage] for stage in of_rank])
            own_again = _total([priced[stage] for stage in of_rank])
            way = Way(before[of_rank[0]], before_again[of_rank[0]], own, own_again, of_rank[0] == 0,
                      rank == s.end_ranks[1])  # fmt: skip
            ways[way.is_first, own, own_again, way.has_head] = way
            each = {(again[stage], _less(counts[stage], again[stage])) for stage in of_rank}
            ends = any(stage % parts == 0 for stage in of_rank), any(stage % parts == parts - 1 for stage in of_rank)
            key = own, frozenset(each), ends
            first = ranks[key].first if key in ranks else rank
            ranks[key] = Rank(first, rank, own, tuple(each), *ends)
        return Cut(tuple(ways.values()), tuple(ranks.values()), _total(priced[:parts]), len(stages[0]))


def _plus(a: Share, b: Share) -> Share:
    return a[0] + b[0], a[1] + b[1]


def _less(a: Pair, b: Pair) -> Pair:
    return a[0] - b[0], a[1] - b[1]


def _total(pairs: Sequence[tuple[Number, Number]]) -> tuple[Number, Number]:
    return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)


def least(pairs: Iterable[tuple[Pair, Pair]], again: Pair, whole: Pair) -> int:
    """Bytes of the stage that keeps least, by what layers that are run again keep, and others."""
    return int(min(dot(run, again) + dot(kept, whole) for run, kept in pairs))
