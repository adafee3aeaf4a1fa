"""Bytes that ranks hold at least all through a step: parameters, gradients, optimizer.

    mean rank      holds no more than the fullest, whatever the cut: all layers and ends over pp
    a cut's rank   as many layers of each kind as it has, and the ends that it has

Priced as one bucket (with ZeRO 2 and 3 without a pipeline one for each block) by the formula of the price itself, which
pads more buckets by no less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.core.flat import BACK, FRONT, HEAD_WEIGHT, Bucket, Slot, part_of
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.placement import Box, Placement, placements
from meshwright.core.strategy import Offload, Strategy
from meshwright.cost.memory import constant_memory
from meshwright.planner.bounds.cuts import Cut, Layers, Pair, Rank, dot
from meshwright.planner.parts import Key, first_of

ALONE = {
    "pp": 1, "schedule": Strategy().schedule, "num_chunks": 1, "layers_per_stage": None, "zero": 0, "prefetch": 1,
    "num_micro_batches": 1, "keep_gathered": False, "reduce_each": False, "shard_over": "all", "offload": Offload(),
    "recompute_layers": None, "tile": 1,
}  # fmt: skip
"""What one micro-batch on one stage does not depend on."""


@dataclass(frozen=True, slots=True)
class Size:
    """Elements of parameters that a rank of one stage holds: (whole, of its own experts)."""

    layers: tuple[Pair, Pair]
    """Of a layer of each kind."""
    front: Pair
    """Of the embeddings."""
    back: Pair
    """Of final norm and head."""
    all: Pair

    def mean(self, num_ranks: int) -> Pair:
        """Of the mean of so many pipeline ranks."""
        return self.all[0] // num_ranks, self.all[1] // num_ranks

    def of(self, counts: Pair) -> Pair:
        """Of so many layers of each kind."""
        (dense, own_dense), (sparse, own_sparse) = self.layers
        return counts[0] * dense + counts[1] * sparse, counts[0] * own_dense + counts[1] * own_sparse


@dataclass(slots=True)
class Split:
    """What the degrees, ZeRO and shards decide."""

    key: Key
    mean_bytes: int
    """States of the mean rank: the fullest holds no less."""
    states: dict[Key, int] = field(default_factory=dict)
    """Of ranks by what they hold, as far as they were asked for."""
    by_cut: dict[Key, tuple[int, ...]] = field(default_factory=dict)
    """Likewise of the ranks of cuts."""


class Holdings:
    """For one model and job."""

    def __init__(self, model: ModelSpec, job: Job, layers: Layers) -> None:
        self.model = model
        self.job = job
        self._layers = layers
        of_kinds = {"num_layers": 2, "dense_layers": (0,)} if model.dense_layers else {"num_layers": 1}
        self._small = model.model_copy(update=of_kinds)
        self._blocks: dict[Size, tuple[Bucket, ...]] = {}
        self._sizes: dict[Key, Size] = {}
        self._splits: dict[Key, Split] = {}

    def split(self, s: Strategy) -> Split:
        """Of a strategy whose micro-batches, schedule and cut may be open."""
        zero = s.zero, s.shard_over, s.ranks_per_node, s.keeps_gathered, s.reduces_each, s.bucket_bytes, s.offload
        times = s.num_micro_batches if s.reduces_each else 1
        key = s.dp, s.tp, s.pp, s.expert, s.tensor, s.sequence, s.context, s.precision, zero, times
        if key not in self._splits:
            self._splits[key] = Split(key, self._mean_bytes(s))
        return self._splits[key]

    def _mean_bytes(self, s: Strategy) -> int:
        size = self.size(s)
        has_mean = s.pp == 1 or not s.pipeline_schedule.is_asynchronous  # whose ranks keep unequally many versions
        is_by_block = s.pp == 1 and s.zero >= 2 and s.tile == 1
        held = self._by_block(size) if is_by_block else buckets_of(*size.mean(s.pp), 1)
        return self._states(s, held, 0) if has_mean else 0

    def by_rank(self, s: Strategy, split: Split, cut: Cut) -> tuple[int, ...]:
        """Of each kind of ranks of a cut."""
        endless = s.schedule if s.pipeline_schedule.is_asynchronous else ""
        key = id(cut), endless
        if key not in split.by_cut:
            split.by_cut[key] = tuple(self._rank_states(s, split, rank, endless) for rank in cut.ranks)
        return split.by_cut[key]

    def _rank_states(self, s: Strategy, split: Split, rank: Rank, endless: str) -> int:
        key = rank.own, rank.has_front, rank.has_back, endless and (endless, rank.last)
        if key not in split.states:
            size = self.size(s)
            held = [size.of(rank.own)]
            held += [end for end, has in ((size.front, rank.has_front), (size.back, rank.has_back)) if has]
            whole, spread = sum(of[0] for of in held), sum(of[1] for of in held)
            split.states[key] = self._states(s, buckets_of(whole, spread, 1), rank.last)
        return split.states[key]

    def _by_block(self, size: Size) -> tuple[Bucket, ...]:
        """Of a rank that holds all layers."""
        if size not in self._blocks:
            self._blocks[size] = tuple(self._find_blocks(size))
        return self._blocks[size]

    def _find_blocks(self, size: Size) -> Iterator[Bucket]:
        layers = [(f"layers.{layer}", size.layers[self.model.is_sparse(layer)]) for layer in range(self._layers.num)]
        blocks = [(FRONT, size.front), *layers, (BACK, size.back)]
        head = "" if self.model.tied_embeddings else HEAD_WEIGHT
        for block, held in reversed(blocks):
            yield from buckets_of(*held, 1, block, head if block == BACK else "")

    def _states(self, s: Strategy, buckets: tuple[Bucket, ...], rank: int) -> int:
        """And the working buffers of blocks that are gathered and reduced, where the buckets are blocks."""
        held = constant_memory(self.model, self.job, s, first_of(rank), buckets)
        is_exact = s.pp == 1 and s.tile == 1 and not s.offload.is_used
        return held.states_bytes + (held.buffers_bytes + held.working_bytes if is_exact else 0)

    def size(self, s: Strategy) -> Size:
        """Of a rank that holds the whole model."""
        key = s.tp, s.expert, s.tensor, s.sequence, s.context
        if key not in self._sizes:
            self._sizes[key] = self._find_size(s)
        return self._sizes[key]

    def _find_size(self, s: Strategy) -> Size:
        """Read off a model that has one layer of each kind: layers of a kind are alike."""
        placed = placements(self._small, s.model_copy(update={**ALONE, "dp": s.expert_dp}), first_of(0))
        found: dict[str | int, list[int]] = {FRONT: [0, 0], BACK: [0, 0]}
        for placement in placed:
            part = placement.layer if placement.layer is not None else part_of(placement)
            found.setdefault(part, [0, 0])[placement.is_spread] += placement.box.numel
        parts = (FRONT, 0, self._small.num_layers - 1, BACK)
        front, dense, sparse, back = ((found[part][0], found[part][1]) for part in parts)
        whole, spread = (front[at] + int(dot(self._layers.all, (dense[at], sparse[at]))) + back[at] for at in (0, 1))
        return Size((dense, sparse), front, back, (whole, spread))


def buckets_of(whole: int, spread: int, num: int, block: str = "layers.0", name: str = "") -> tuple[Bucket, ...]:
    """So many equal buckets for all that a rank holds, and as many for experts of its own; at most a remainder less."""
    sizes = ((False, whole // num), (True, spread // num))
    return num * tuple(
        Bucket((Slot(_placement(is_spread, name), 0, numel),), numel, (), block, is_spread)
        for is_spread, numel in sizes
        if numel
    )


def _placement(is_spread: bool, name: str) -> Placement:
    return Placement(name, (1,), Box((0,), (1,)), "mlp", 0, (), True, is_spread=is_spread)
