"""Offload in closed form: bytes kept on a tier, bytes that pass in a step, the working set that stays, and seconds.

| with fp32 masters and AdamW, N parameters over dp ranks, per rank | bytes |
| --- | --- |
| kept on the tier | 12·N/dp |
| read in a step, written in a step | 12·N/dp each |
| working set | 3 · group · 12 |

Sources: Ren et al. 2021 §4 (ZeRO-Offload), Rajbhandari et al. 2021 §4.2, §5.2 (ZeRO-Infinity).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.core.axes import DP
from meshwright.core.cluster import ClusterSpec, Tier
from meshwright.core.flat import Bucket
from meshwright.core.offload import (
    Stored,
    TierTraffic,
    count_groups,
    staging_bytes,
    stored_kinds,
    tier_bytes,
    working_set_bytes,
)
from meshwright.core.sharding import Range, sharding
from meshwright.core.strategy import Strategy
from meshwright.cost.traffic import num_gathers as gathers_of


@dataclass(frozen=True, slots=True)
class BucketPart:
    """A rank's part of a bucket, and what happens to it in a step."""

    numel: int
    num_groups: int
    num_gathers: int
    """How often its parameters are gathered."""
    num_reductions: int
    """How often its gradients are reduced."""
    num_sums: int
    """How often they are summed over further ranks at the end of the step: 1 or 0."""


@dataclass(frozen=True, slots=True)
class OffloadForecast:
    """What one rank keeps away from its device, and what passes in a step."""

    stored: tuple[Stored, ...]
    parts: tuple[BucketPart, ...]
    own: tuple[Range, ...]
    """Elements of each bucket that are the rank's."""
    num_of_size: Mapping[int, int]
    """Elements of a group → how many groups of all buckets have them."""
    delayed: bool = False

    @property
    def num_groups(self) -> int:
        """Of all buckets."""
        return sum(part.num_groups for part in self.parts)

    @property
    def working_set_bytes(self) -> int:
        """Memory of the update's buffers, and of the one in which gradients are added up."""
        return working_set_bytes(self.stored, max(self.num_of_size, default=0)) + staging_bytes(self.stored, self.own)

    @property
    def tier_bytes(self) -> dict[Tier, int]:
        """Tier → bytes kept there, on disk in whole blocks."""
        return tier_bytes(self.stored, self.num_of_size)

    def traffic(self, tier: Tier) -> TierTraffic:
        """What a tier counts in a step."""
        total = TierTraffic()
        for each in (each for each in self.stored if each.tier == tier):
            for part in self.parts:
                num_bytes = part.numel * each.element_bytes
                reads, writes = self._passes(each, part)
                total.add_reads(each.kind, reads * num_bytes, reads * part.num_groups)
                total.add_writes(each.kind, writes * num_bytes, writes * part.num_groups)
        return total

    def _passes(self, each: Stored, part: BucketPart) -> tuple[int, int]:
        """How often all of a kind is (read, written) in a step."""
        reads, writes = int(each.is_read), int(each.is_written)
        if each.kind == "master":
            reads += self.delayed  # when the parameters take it over
        elif each.kind == "gradients" and each.is_copy:  # copied there
            writes = 1
        elif each.kind == "gradients":  # a later sum adds to what is there
            reads, writes = reads + part.num_reductions - 1 + part.num_sums, part.num_reductions + part.num_sums
        elif each.kind == "parameters":
            reads, writes = reads + part.num_gathers, 1
        return reads, writes


def offload_forecast(
    strategy: Strategy,
    optimizer: str,
    buckets: Sequence[Bucket],
    at: Mapping[str, int] | None = None,
    *,
    num_gathers: int | None = None,
    num_reductions: int | None = None,
    group_numel: int | None = None,
) -> OffloadForecast:
    """Of the rank at mesh coordinates `at` (None: the first) that holds `buckets`.

    Args:
        optimizer: `adamw` or `sgd`.
        num_gathers: of each block's parameters in a step; None: as the strategy has it.
        num_reductions: of each block's gradients in a step; likewise.
        group_numel: elements of a group; likewise.

    Raises InputError as :func:`core.offload.stored_kinds` does.
    """
    stored = stored_kinds(strategy.recipe, optimizer, strategy.offload)
    sized = group_numel or strategy.offload.group_numel
    own = tuple(_own(strategy, bucket, at or {DP: 0}) for bucket in buckets) if stored else ()
    counted = [
        count_groups(bucket.segments(start, stop), start, stop, sized)
        for bucket, (start, stop) in zip(buckets, own, strict=bool(stored))
    ]
    num_of_size: Counter[int] = Counter()
    for groups in counted:
        num_of_size.update(groups)
    parts = tuple(
        BucketPart(
            stop - start,
            sum(groups.values()),
            _gathers(strategy, bucket) if num_gathers is None else num_gathers,
            strategy.num_micro_batches if num_reductions is None else num_reductions,
            int(bool(bucket.sum_over or sharding(strategy, bucket.is_spread).replicate)),
        )
        for bucket, (start, stop), groups in zip(buckets, own, counted, strict=bool(stored))
    )
    return OffloadForecast(stored, parts, own, num_of_size, strategy.offload.delayed)


def _own(strategy: Strategy, bucket: Bucket, at: Mapping[str, int]) -> Range:
    index = strategy.shard_index(at, bucket.is_spread)
    return sharding(strategy, bucket.is_spread).own(bucket.numel, index)


def _gathers(strategy: Strategy, bucket: Bucket) -> int:
    return gathers_of(strategy, bucket) if strategy.offload.parameters != "none" else 0


@dataclass(frozen=True, slots=True)
class TierSeconds:
    """What a step's transfers take, as if each tier did one thing at a time. Tiers of unstated speed take none."""

    update_s: float = 0.0
    """Of the update."""
    handover_s: float = 0.0
    """Of a delayed update, what does not run beside the next step: copies of the gradients, and masters taken over."""
    sums_s: float = 0.0
    """Of gradients, as they are summed."""
    gathers_s: float = 0.0
    """Of parameters, before they are gathered, and where they take masters over."""


def tier_seconds(moved: OffloadForecast, cluster: ClusterSpec) -> TierSeconds:
    """Of a rank's step, at the bandwidths that the cluster states."""
    seconds = {"update": 0.0, "handover": 0.0, "gradients": 0.0, "parameters": 0.0}
    numel = sum(part.numel for part in moved.parts)
    traffic = {tier: moved.traffic(tier) for tier in dict.fromkeys(each.tier for each in moved.stored)}
    for each in moved.stored:
        speed = cluster.tier_bytes_per_s(each.tier)
        row = traffic[each.tier].rows.get(each.kind)
        if speed is None or row is None:
            continue
        read, written = numel * each.element_bytes * each.is_read, numel * each.element_bytes * each.is_written
        is_beside = each.kind in seconds and not each.is_copy
        more_s = (row.read_bytes - read) / speed[0] + (row.written_bytes - written) / speed[1]
        seconds["update"] += read / speed[0] + written / speed[1]
        seconds[each.kind if is_beside else "handover"] += more_s
    return TierSeconds(seconds["update"], seconds["handover"], seconds["gradients"], seconds["parameters"])


def transfer_s(traffic: TierTraffic, read_bytes_per_s: float, write_bytes_per_s: float) -> float:
    """Seconds of a step's transfers at a tier's bandwidths, as if it did one thing at a time."""
    return traffic.read_bytes / read_bytes_per_s + traffic.written_bytes / write_bytes_per_s


def streamed_s(compute_s: float, transfer_s: float, num_groups: int) -> float:
    """Seconds of an update that streams: the longer of both, and of the shorter one group's share, which the first read
    and the last write leave uncovered."""
    return max(compute_s, transfer_s) + min(compute_s, transfer_s) / max(1, num_groups)
