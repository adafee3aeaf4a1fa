"""How a flat bucket is divided over the dp (× cp) ranks, and in which order their collectives go.

    zero 0             all_reduce dp
    zero 1, 2, 3       reduce_scatter dp                                 ◀─ backwards ─ all_gather
    ... on nodes       reduce_scatter dp_node, reduce_scatter dp_across  ◀─ backwards ─ all_gather, all_gather
    ... shard on node  reduce_scatter dp_node, all_reduce dp_across      ◀─ backwards ─ all_gather dp_node
    zero 0 on nodes    reduce_scatter dp_node, all_reduce dp_across, all_gather dp_node
    own experts        the first two, over edp

Read by the runtime, by the forecasts, and by checkpoints. Sources: Rajbhandari et al. 2020 §5 (ZeRO), Zhao et al. 2023
§3.2 (hybrid sharding), Mikami et al. 2018 (two levels).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from meshwright.core.axes import DP, DP_ACROSS, DP_CP, DP_NODE, EDP
from meshwright.core.strategy import Strategy

Range = tuple[int, int]
"""Elements [start, stop) of a bucket."""


@dataclass(frozen=True, slots=True)
class Level:
    """One axis that a collective over dp passes, and its number of ranks."""

    axis: str
    size: int


@dataclass(frozen=True, slots=True)
class Sharding:
    """What happens to a bucket's gradients, and which part of a bucket belongs to which dp rank."""

    scatter: tuple[Level, ...]
    """Reduce-scattered over, in this order; gathered over in the reverse order."""
    replicate: tuple[Level, ...]
    """All-reduced over, what the scattering has left."""
    stays_scattered: bool
    """Each rank updates its shard (ZeRO); otherwise gradients are gathered again, and each rank updates all."""
    levels: tuple[Level, ...]
    """All levels: what divides a bucket into one part for every dp rank."""

    @property
    def num_shards(self) -> int:
        """Parts of a bucket that different ranks keep."""
        return prod(level.size for level in self.scatter) if self.stays_scattered else 1

    def own(self, numel: int, index: int) -> Range:
        """The part of a bucket of `numel` elements that the rank at `index` (`Strategy.shard_index`) updates."""
        return _part(numel, self.scatter if self.stays_scattered else (), self._positions(index))

    def counted(self, numel: int, index: int) -> Range:
        """The part, within its own, that it alone counts in norms and saves in checkpoints."""
        return _part(numel, self.levels, self._positions(index))

    def _positions(self, index: int) -> dict[str, int]:
        """Level's axis → position on it. Ranks of a node follow one another on dp."""
        local = next((level.size for level in self.levels if level.axis == DP_NODE), 1)
        across, node = divmod(index, local)
        return {DP: index, DP_CP: index, EDP: index, DP_NODE: node, DP_ACROSS: across}


def _part(numel: int, levels: tuple[Level, ...], positions: dict[str, int]) -> Range:
    """Cut [0, numel) evenly, level by level."""
    start, length = 0, numel
    for level in levels:
        length //= level.size
        start += positions[level.axis] * length
    return start, start + length


def sharding(strategy: Strategy, is_spread: bool = False) -> Sharding:
    """The way of a strategy's buckets, of those with experts of a rank's own if `is_spread`.

    Two levels where a dp group has several ranks on each of several nodes; experts of a rank's own go in one.
    """
    s = strategy
    if is_spread:
        return _spread(s.expert_replicas, s.zero > 0)
    return _whole(Level(s.data_axis, s.data_ranks), s.dp_local, s.zero > 0, s.shard_over == "all")


@lru_cache(maxsize=1024)
def _spread(num_replicas: int, zero: bool) -> Sharding:
    own = (Level(EDP, num_replicas),)
    return Sharding(own if zero else (), () if zero else own, zero, own)


@lru_cache(maxsize=1024)
def _whole(data: Level, local: int, zero: bool, shards_all: bool) -> Sharding:
    """A planner asks for the same ones many thousand times."""
    if not 1 < local < data.size:
        return Sharding((data,) if zero else (), () if zero else (data,), zero, (data,))
    node, across = Level(DP_NODE, local), Level(DP_ACROSS, data.size // local)
    if zero and shards_all:
        return Sharding((node, across), (), True, (node, across))
    return Sharding((node,), (across,), zero, (node, across))
