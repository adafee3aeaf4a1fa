"""Flat buckets: how a rank's parameters lie in a few one-dim buffers.

A bucket is the unit of gradient reduction, of the optimizer and of ZeRO sharding. Parameters and
gradients are *views* into it, so nothing is ever copied into place.

    bucket   | head.weight | norm.weight | layer 7 ... | pad |     numel is a multiple of dp (× cp)
    dp shard | rank 0          | rank 1          |                  cut without regard to tensors

Where ZeRO leaves only a shard of a bucket on a rank, the whole bucket exists in working memory while its block runs:

    pool     | layers 0, 2, 4 ... | layers 1, 3, 5 ... | front or back |     one is used, the next is on its way
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.core.axes import PP_MIRROR
from meshwright.core.model import ModelSpec
from meshwright.core.placement import Placement, placements
from meshwright.core.strategy import Strategy

FRONT, BACK = "front", "back"
"""The two ends of a model as blocks: embeddings; final norm and head."""
HEAD_WEIGHT = "head.weight"
NUM_GRADIENT_BUFFERS = 2
"""Blocks of whole gradients at a time, with ZeRO 2 and 3: one is filled while the other is reduced."""


_Kind = tuple[bool, tuple[str, ...]]
"""Whether ranks of ep hold different boxes, and the axes to sum over besides dp."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in a bucket: elements [start, stop)."""

    placement: Placement
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of bucket elements that the optimizer and the norm treat alike."""

    start: int
    stop: int
    decay: bool
    owned: bool


@dataclass(frozen=True, slots=True)
class Bucket:
    """Slots laid end to end and padded so that dp divides the length."""

    slots: tuple[Slot, ...]
    numel: int
    sum_over: tuple[str, ...]
    """Axes besides dp over which the whole bucket's gradient must be summed."""
    block: str = ""
    """The block of the model that its parameters belong to, where buckets are cut by block (ZeRO 2 and 3)."""
    is_spread: bool = False
    """Whether it holds experts of this rank's own: then it is reduced, and divided, over edp instead of dp."""

    def shard(self, dp: int, index: int) -> tuple[int, int]:
        """Elements [start, stop) of dp rank `index`."""
        size = self.numel // dp
        return index * size, (index + 1) * size

    def segments(self, start: int, stop: int, frozen: Container[str] = ()) -> tuple[Segment, ...]:
        """The part of [start, stop) that holds parameters, cut where treatment changes; without the `frozen` names."""
        merged: list[Segment] = []
        for slot in self.slots:
            low, high = max(start, slot.start), min(stop, slot.stop)
            if low >= high or slot.placement.name in frozen:
                continue
            decay, owned = slot.placement.decay, slot.placement.owned
            last = merged[-1] if merged else None
            if last and (last.stop, last.decay, last.owned) == (low, decay, owned):
                merged[-1] = Segment(last.start, high, decay, owned)
            else:
                merged.append(Segment(low, high, decay, owned))
        return tuple(merged)


def make_buckets(
    held: Iterable[Placement], dp: int, cap_bytes: int, gradient_bytes: int, *, by_block: bool = False
) -> tuple[Bucket, ...]:
    """Buckets in the order in which backward fills them: reverse forward order, partial ones last.

    A bucket is closed when it has reached `cap_bytes`; a layer's parameters are never sorted away
    from each other by more than one bucket.

    Args:
        held: a rank's parameters in forward order.
        dp: what the padded length is a multiple of: ranks of the data-parallel axis, times those of cp.
        cap_bytes: size at which a bucket is closed.
        gradient_bytes: bytes that a rank holds of one gradient element; what `cap_bytes` is compared with.
        by_block: a bucket holds what one block of the model needs (for each kind of partial gradient), whatever its
            size; all buckets of a block follow one another.
    """
    backward = list(held)[::-1]
    if by_block:
        return tuple(_block_buckets(backward, dp))
    buckets = []
    for kind in _kinds(backward):
        open_bucket: list[Placement] = []
        size = 0
        for placement in (p for p in backward if _kind_of(p) == kind):
            open_bucket.append(placement)
            size += placement.box.numel * gradient_bytes
            if size >= cap_bytes:
                buckets.append(_close(open_bucket, dp, kind))
                open_bucket, size = [], 0
        if open_bucket:
            buckets.append(_close(open_bucket, dp, kind))
    return tuple(buckets)


def rank_buckets(spec: ModelSpec, strategy: Strategy, at: Mapping[str, int]) -> tuple[Bucket, ...]:
    """The buckets of the rank at mesh coordinates `at`."""
    return held_buckets(placements(spec, strategy, at), strategy)


def held_buckets(held: Iterable[Placement], strategy: Strategy) -> tuple[Bucket, ...]:
    """The buckets of a rank that holds these placements, as the strategy cuts them."""
    cap_bytes, gradient_bytes = strategy.bucket_bytes, strategy.recipe.gradient_bytes
    return make_buckets(held, strategy.bucket_multiple, cap_bytes, gradient_bytes, by_block=strategy.zero >= 2)


def padded(buckets: Iterable[Bucket], dp: int) -> tuple[Bucket, ...]:
    """The same buckets for another number of ranks that divide them."""
    return tuple(replace(bucket, numel=-(-bucket.slots[-1].stop // dp) * dp) for bucket in buckets)


def _kind_of(placement: Placement) -> _Kind:
    return placement.is_spread, placement.sum_over


def _kinds(held: Iterable[Placement]) -> list[_Kind]:
    """Different ways of summing gradients: over fewest axes first, experts of a rank's own last."""
    return sorted({_kind_of(p) for p in held}, key=lambda kind: (kind[0], len(kind[1]), kind[1]))


def _block_buckets(backward: Sequence[Placement], dp: int) -> Iterator[Bucket]:
    """Tiles before the rest of their layer, whose gradients are complete last."""
    by_block: dict[str, list[Placement]] = {}
    for placement in backward:
        by_block.setdefault(block_of(placement), []).append(placement)
    for block in sorted(by_block, key=_order_of(backward).__getitem__):
        members = by_block[block]
        for kind in _kinds(members):
            yield _close([p for p in members if _kind_of(p) == kind], dp, kind, block)


def _order_of(backward: Sequence[Placement]) -> dict[str, tuple[int, bool, int]]:
    """Block → its place in the order of backward."""
    part_order = {part: at for at, part in enumerate(dict.fromkeys(map(part_of, backward)))}
    order: dict[str, tuple[int, bool, int]] = {}
    for at, placement in enumerate(backward):
        order.setdefault(block_of(placement), (part_order[part_of(placement)], placement.tile is None, at))
    return order


def block_of(placement: Placement) -> str:
    """The block that a parameter belongs to: the part of the model, or a tile by itself."""
    return part_of(placement) if placement.tile is None else placement.key


def part_of(placement: Placement) -> str:
    """The part of the model that a parameter belongs to: `layers.3`, or one of the two ends."""
    if placement.layer is not None:
        return f"layers.{placement.layer}"
    at_front = placement.part == "embedding" or placement.name.startswith("embedding_norm")
    return FRONT if at_front else BACK


def _close(members: list[Placement], dp: int, kind: _Kind, block: str = "") -> Bucket:
    """Sorted so that equal treatment lies side by side; then few segments cover a shard. Ranks that sum up a bucket
    sort it alike: of mirrored pipeline ranks only one owns what both hold."""
    is_spread, sum_over = kind
    is_mirrored = PP_MIRROR in sum_over
    ordered = sorted(members, key=lambda p: (not p.decay, not p.owned and not is_mirrored))
    slots, at = [], 0
    for placement in ordered:
        slots.append(Slot(placement, at, at + placement.box.numel))
        at += placement.box.numel
    return Bucket(tuple(slots), -(-at // dp) * dp, sum_over, block, is_spread)


@dataclass(frozen=True, slots=True)
class Pool:
    """Working buffers that the blocks of a model take in turn; each block always takes the same one."""

    numels: tuple[int, ...]
    """Elements of each buffer."""
    buffer_of: Mapping[str, int]
    """Block → its buffer."""

    @property
    def numel(self) -> int:
        return sum(self.numels)


def make_pool(buckets: Sequence[Bucket], depth: int) -> Pool:
    """Buffers for whole blocks, `depth` of which may be in use at a time.

    Layers go round `depth` buffers, and so do tiles. The two ends of the model share one: they are never in use
    together, unless they share a parameter.
    """
    sizes = _block_sizes(buckets)
    held = {bucket.block: bucket.slots[0].placement for bucket in buckets}
    names = {slot.placement.name for bucket in buckets for slot in bucket.slots}
    shared_end = "end" if HEAD_WEIGHT in names else None
    layers = (block for block in sizes if block not in (FRONT, BACK) and held[block].tile is None)
    tiles = (block for block in sizes if held[block].tile is not None)
    place: dict[str, object] = {block: at % depth for at, block in enumerate(layers)}
    place |= {block: ("tile", at % depth) for at, block in enumerate(tiles)}
    place |= {block: shared_end or block for block in (FRONT, BACK) if block in sizes}
    order = list(dict.fromkeys(place.values()))
    numels = [max(sizes[block] for block, at in place.items() if at == buffer) for buffer in order]
    return Pool(tuple(numels), {block: order.index(at) for block, at in place.items()})


def own_pool(buckets: Sequence[Bucket]) -> Pool:
    """A buffer of its own for every block: all may be in use at a time."""
    sizes = _block_sizes(buckets)
    return Pool(tuple(sizes.values()), {block: at for at, block in enumerate(sizes)})


def parameter_pool(buckets: Sequence[Bucket], strategy: Strategy) -> Pool | None:
    """Where blocks are gathered; None where parameters are kept whole."""
    if strategy.zero < 3:
        return None
    return own_pool(buckets) if strategy.keeps_gathered else make_pool(buckets, 1 + strategy.prefetch)


def gradient_pool(buckets: Sequence[Bucket], strategy: Strategy) -> Pool | None:
    """Where blocks' gradients are summed up until they are reduced; None where gradients are kept whole."""
    return make_pool(buckets, NUM_GRADIENT_BUFFERS) if strategy.reduces_each else None


def _block_sizes(buckets: Sequence[Bucket]) -> dict[str, int]:
    """Block → elements, in forward order."""
    sizes: dict[str, int] = {}
    for bucket in reversed(buckets):
        sizes[bucket.block] = sizes.get(bucket.block, 0) + bucket.numel
    return sizes
