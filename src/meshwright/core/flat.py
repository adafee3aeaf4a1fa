"""Flat buckets: how a rank's parameters lie in a few one-dim buffers.

A bucket is the unit of gradient reduction, of the optimizer and of ZeRO sharding. Parameters and
gradients are *views* into it, so nothing is ever copied into place.

    bucket   | head.weight | norm.weight | layer 7 ... | pad |     numel is a multiple of dp
    dp shard | rank 0          | rank 1          |                  cut without regard to tensors
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshwright.core.model import ModelSpec
from meshwright.core.placement import Placement, placements
from meshwright.core.strategy import Strategy


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

    def shard(self, dp: int, index: int) -> tuple[int, int]:
        """Elements [start, stop) of dp rank `index`."""
        size = self.numel // dp
        return index * size, (index + 1) * size

    def segments(self, start: int, stop: int) -> tuple[Segment, ...]:
        """The part of [start, stop) that holds parameters, cut where treatment changes."""
        merged: list[Segment] = []
        for slot in self.slots:
            low, high = max(start, slot.start), min(stop, slot.stop)
            if low >= high:
                continue
            decay, owned = slot.placement.decay, slot.placement.owned
            last = merged[-1] if merged else None
            if last and (last.stop, last.decay, last.owned) == (low, decay, owned):
                merged[-1] = Segment(last.start, high, decay, owned)
            else:
                merged.append(Segment(low, high, decay, owned))
        return tuple(merged)


def make_buckets(held: Iterable[Placement], dp: int, cap_bytes: int, gradient_bytes: int) -> tuple[Bucket, ...]:
    """Buckets in the order in which backward fills them: reverse forward order, partial ones last.

    A bucket is closed when it has reached `cap_bytes`; a layer's parameters are never sorted away
    from each other by more than one bucket.

    Args:
        held: a rank's parameters in forward order.
        dp: size of the data-parallel axis; the padded length is a multiple of it.
        cap_bytes: size at which a bucket is closed.
        gradient_bytes: bytes that a rank holds of one gradient element; what `cap_bytes` is compared with.
    """
    backward = list(held)[::-1]
    buckets = []
    for kind in sorted({p.sum_over for p in backward}, key=lambda axes: (len(axes), axes)):
        open_bucket: list[Placement] = []
        size = 0
        for placement in (p for p in backward if p.sum_over == kind):
            open_bucket.append(placement)
            size += placement.box.numel * gradient_bytes
            if size >= cap_bytes:
                buckets.append(_close(open_bucket, dp, kind))
                open_bucket, size = [], 0
        if open_bucket:
            buckets.append(_close(open_bucket, dp, kind))
    return tuple(buckets)


def rank_buckets(spec: ModelSpec, strategy: Strategy, at: Mapping[str, int]) -> tuple[Bucket, ...]:
    """The buckets of the rank at mesh coordinates `at` (pp, dp, tp)."""
    held = placements(spec, strategy, at)
    return make_buckets(held, strategy.dp, strategy.bucket_bytes, strategy.recipe.gradient_bytes)


def _close(members: list[Placement], dp: int, sum_over: tuple[str, ...]) -> Bucket:
    """Sorted so that equal treatment lies side by side; then few segments cover a shard."""
    ordered = sorted(members, key=lambda p: (not p.decay, not p.owned))
    slots, at = [], 0
    for placement in ordered:
        slots.append(Slot(placement, at, at + placement.box.numel))
        at += placement.box.numel
    return Bucket(tuple(slots), -(-at // dp) * dp, sum_over)
