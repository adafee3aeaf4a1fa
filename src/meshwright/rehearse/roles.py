"""Which ranks a rehearsal needs: one for each role. Ranks of one role hold, run and send the same.

pipeline rank      always a role of its own: its stages, and how many micro-batches it keeps
tensor rank        a role where it holds or computes other sizes than its neighbours (a vocabulary uneven over tp;
                   on a grid rows of the table and columns of the logits are cut over different ranks)
data rank          the same everywhere on dp and cp, but for how an offloaded shard is cut into groups
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.core.axes import CP, DP, PP, TP, rank_of
from meshwright.core.flat import Bucket, rank_buckets
from meshwright.core.offload import cut_groups
from meshwright.core.placement import even_split
from meshwright.core.plan import Plan
from meshwright.core.sharding import sharding
from meshwright.core.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Role:
    """One rank, and how many are like it."""

    rank: int
    coordinates: dict[str, int]
    num_ranks: int


def roles(plan: Plan) -> tuple[Role, ...]:
    """All roles of a plan, in the order of their first ranks."""
    first: dict[tuple[object, ...], dict[str, int]] = {}
    counts: dict[tuple[object, ...], int] = {}
    for at, key, count in _kinds(plan):
        first.setdefault(key, at)
        counts[key] = counts.get(key, 0) + count
    found = (Role(rank_of(at, plan.strategy.sizes), at, counts[key]) for key, at in first.items())
    return tuple(sorted(found, key=lambda role: role.rank))


def _kinds(plan: Plan) -> Iterator[tuple[dict[str, int], tuple[object, ...], int]]:
    """(coordinates, what makes its role, ranks that differ in their data only) of ranks that may differ."""
    strategy = plan.strategy
    for pp in range(strategy.pp):
        for tp in range(strategy.tp):
            at = {PP: pp, DP: 0, CP: 0, TP: tp}
            buckets = rank_buckets(plan.model, strategy, at)
            held = _num_logits(plan, pp, tp), *((b.numel, b.sum_over, _sizes(b)) for b in buckets)
            if not strategy.offload.moves_states:
                yield at, (pp, held), strategy.data_ranks
                continue
            for index in range(strategy.data_ranks):
                dp, cp = divmod(index, strategy.cp)
                of_data = {**at, DP: dp, CP: cp}
                yield of_data, (pp, held, _groups(strategy, buckets, of_data)), 1


def _num_logits(plan: Plan, pp: int, tp: int) -> int:
    """Of a token, that a tensor rank computes; none where the head is on another pipeline rank."""
    strategy, grid = plan.strategy, plan.strategy.grid
    if not any(strategy.stage_ends(stage)[1] for stage in strategy.rank_stages(pp)):
        return 0
    return even_split(plan.model.vocab_size, grid.sizes[grid.vocab_axis], grid.coordinates(tp)[grid.vocab_axis])[1]


def _sizes(bucket: Bucket) -> tuple[tuple[int, ...], ...]:
    """Of its tensors, in any order: replicas that another rank counts in the norm stand behind the others."""
    return tuple(sorted(slot.placement.box.sizes for slot in bucket.slots))


def _groups(strategy: Strategy, buckets: tuple[Bucket, ...], at: dict[str, int]) -> tuple[tuple[int, ...], ...]:
    """Sizes of the groups in which an offloaded shard of each bucket is kept."""
    cuts = []
    for bucket in buckets:
        index = strategy.shard_index(at, bucket.is_spread)
        start, stop = sharding(strategy, bucket.is_spread).own(bucket.numel, index)
        groups = cut_groups(bucket.segments(start, stop), start, stop, strategy.offload.group_numel)
        cuts.append(tuple(high - low for low, high in groups))
    return tuple(cuts)
