"""Offload in closed form: bytes kept on a tier, bytes that pass in a step, the working set that stays, and seconds.

| with fp32 masters and AdamW, N parameters over dp ranks, per rank | bytes |
| --- | --- |
| kept on the tier | 12·N/dp |
| read in a step, written in a step | 12·N/dp each |
| working set | 3 · group · 12 |

Sources: Ren et al. 2021 §4 (ZeRO-Offload), Rajbhandari et al. 2021 §4.2, §5.2 (ZeRO-Infinity).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.core.flat import Bucket
from meshwright.core.offload import (
    GROUP_NUMEL,
    Stored,
    TierTraffic,
    cut_groups,
    stored_kinds,
    tier_bytes,
    working_set_bytes,
)
from meshwright.core.sharding import Range, sharding
from meshwright.core.strategy import Strategy, Tier


@dataclass(frozen=True, slots=True)
class OffloadForecast:
    """What one rank keeps away from its device, and what passes in a step."""

    stored: tuple[Stored, ...]
    groups: tuple[Range, ...]
    """Of all buckets, one after the other."""
    num_gathers: int = 0
    """How often each block's parameters are gathered in a step."""
    num_reductions: int = 1
    """How often each block's gradients are reduced in a step."""
    delayed: bool = False

    @property
    def working_set_bytes(self) -> int:
        """Memory of the update's buffers."""
        return working_set_bytes(self.stored, self.groups)

    @property
    def tier_bytes(self) -> dict[Tier, int]:
        """Tier → bytes kept there, on disk in whole blocks."""
        return tier_bytes(self.stored, self.groups)

    def traffic(self, tier: Tier) -> TierTraffic:
        """What a tier counts in a step."""
        total = TierTraffic()
        for each in (each for each in self.stored if each.tier == tier):
            num_bytes = sum(stop - start for start, stop in self.groups) * each.element_bytes
            count = sum(stop > start for start, stop in self.groups)
            reads, writes = self._passes(each)
            total.add_reads(each.kind, reads * num_bytes, reads * count)
            total.add_writes(each.kind, writes * num_bytes, writes * count)
        return total

    def _passes(self, each: Stored) -> tuple[int, int]:
        """How often all of a kind is (read, written) in a step."""
        reads, writes = int(each.is_read), int(each.is_written)
        if each.kind == "master":
            reads += self.delayed  # when the parameters take it over
        elif each.kind == "gradients":  # a later reduction adds to what is there
            reads, writes = reads + self.num_reductions - 1, self.num_reductions
        elif each.kind == "parameters":
            reads, writes = reads + self.num_gathers, 1
        return reads, writes


def offload_forecast(
    strategy: Strategy,
    optimizer: str,
    buckets: Sequence[Bucket],
    dp_index: int = 0,
    *,
    num_gathers: int = 0,
    num_reductions: int = 1,
    group_numel: int = GROUP_NUMEL,
) -> OffloadForecast:
    """Of the rank at `dp_index` that holds `buckets`.

    Args:
        optimizer: `adamw` or `sgd`.
        num_gathers: of a block's parameters in a step, that are read from a tier.
        num_reductions: of a block's gradients in a step.
        group_numel: elements of a group.

    Raises InputError as :func:`core.offload.stored_kinds` does.
    """
    stored = stored_kinds(strategy.recipe, optimizer, strategy.offload)
    groups = tuple(_groups(strategy, buckets, dp_index, group_numel)) if stored else ()
    return OffloadForecast(stored, groups, num_gathers, num_reductions, strategy.offload.delayed)


def _groups(strategy: Strategy, buckets: Sequence[Bucket], dp_index: int, group_numel: int) -> Iterator[Range]:
    way = sharding(strategy)
    for bucket in buckets:
        start, stop = way.own(bucket.numel, dp_index)
        yield from cut_groups(bucket.segments(start, stop), start, stop, group_numel)


def transfer_s(traffic: TierTraffic, read_bytes_per_s: float, write_bytes_per_s: float) -> float:
    """Seconds of a step's transfers at a tier's bandwidths, as if it did one thing at a time."""
    return traffic.read_bytes / read_bytes_per_s + traffic.written_bytes / write_bytes_per_s


def streamed_s(compute_s: float, transfer_s: float, num_groups: int) -> float:
    """Seconds of an update that streams: the longer of both, and of the shorter one group's share, which the first read
    and the last write leave uncovered."""
    return max(compute_s, transfer_s) + min(compute_s, transfer_s) / max(1, num_groups)
