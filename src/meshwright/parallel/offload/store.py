"""What one rank keeps on its tiers: of every bucket its own part, of the kinds that a strategy offloads.

    bucket 0   | own part |  ──▶  master/0/…  moment1/0/…  on tiers, in groups
    bucket 1   | own part |  ──▶  master/1/…  moment1/1/…

A kind that stays in memory is a tensor, one that does not a `StoredRun`; who cuts and copies them asks neither.
What it costs: `cost.offload`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshwright.core.flat import Bucket
from meshwright.core.offload import TierTraffic, cut_groups, staging_bytes, stored_kinds
from meshwright.core.sharding import Range
from meshwright.core.strategy import Strategy
from meshwright.parallel.offload.disk import DiskTier
from meshwright.parallel.offload.stream import StoredRun, StoredState, Update, WorkingSet, stream
from meshwright.parallel.offload.tier import HostTier, Tier
from meshwright.parallel.offload.unseen import UnseenTier

Flat = torch.Tensor | StoredRun
"""A flat run of elements, in memory or on a tier."""


def read(x: Flat) -> torch.Tensor:
    """The tensor itself, or a copy of what lies on a tier."""
    return x if isinstance(x, torch.Tensor) else x.read()


def in_memory(x: Flat) -> torch.Tensor:
    """The tensor itself, of what is known to lie on no tier."""
    assert isinstance(x, torch.Tensor)
    return x


def on_tier(x: Flat) -> StoredRun:
    """Likewise of what is known to lie on one."""
    assert isinstance(x, StoredRun)
    return x


def copy(target: Flat, source: Flat) -> None:
    """target [n] ← source [n], a group at a time where one of them lies on a tier."""
    for run in (target, source):
        if isinstance(run, StoredRun):
            for part in run.parts():
                _copy(target[part], source[part])
            return
    _copy(target, source)


def _copy(target: Flat, source: Flat) -> None:
    if isinstance(target, StoredRun):
        target.write(read(source))
    else:
        target.copy_(read(source))


def _tier(name: str, path: str, rank: int, device: torch.device) -> Tier:
    if device.type == "meta":
        return UnseenTier.like(name)
    return HostTier(device) if name == "cpu" else DiskTier(path, rank)


class Store:
    """A rank's tiers, and all that it keeps on them.

    Args:
        strategy: what is offloaded, and where to.
        optimizer: `adamw` or `sgd`: what there is to offload.
        rank: of the whole world.
        device: the rank's.
        dtypes: by the names that recipes use.

    Attributes:
        settle: called before a kind is written that an update beside the step may still read.
        on_sum: called with a bucket and the sum of this rank's part of its gradients, whenever a sum on a tier changes.

    Raises InputError where a tier cannot be used.
    """

    def __init__(
        self, strategy: Strategy, optimizer: str, rank: int, device: torch.device, dtypes: Mapping[str, torch.dtype]
    ) -> None:
        offload = strategy.offload
        self.stored = stored_kinds(strategy.recipe, optimizer, offload)
        self.settle: Callable[[], None] = lambda: None
        self.on_sum: Callable[[Any, torch.Tensor], None] = lambda bucket, sums: None
        self._group_numel, self._device, self._dtypes = offload.group_numel, device, dtypes
        self._tiers: dict[str, Tier] = {}
        for name in dict.fromkeys(each.tier for each in self.stored):
            self._tiers[name] = _tier(name, offload.path or "", rank, device)
        self._states: list[StoredState] = []
        self._own: list[Range] = []

    def add(self, layout: Bucket, start: int, stop: int, frozen: frozenset[str]) -> StoredState:
        """Make room for elements [start, stop) of the next bucket. Raises InputError where there is none."""
        groups = cut_groups(layout.segments(start, stop, frozen), start, stop, self._group_numel)
        state = StoredState(str(len(self._states)), self.stored, groups, self._tiers, self._dtypes)
        self._states.append(state)
        self._own.append((start, stop))
        return state

    def make_buffers(self) -> None:
        """Once all buckets are there: the memory that streaming and summing take."""
        near = all(tier.working_device == self._device for tier in self._tiers.values())
        self._working = WorkingSet(self._states, self._device if near else torch.device("cpu"))
        num_bytes = staging_bytes(self.stored, self._own)
        self._staging = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def staging(self, x: torch.Tensor) -> torch.Tensor:
        """Working memory as large as x [n], a part of a bucket's gradients. The same for all buckets."""
        return self._staging[: x.nbytes].view(x.dtype)

    @property
    def working_bytes(self) -> int:
        """Of the buffers."""
        return self._working.held_bytes + self._staging.nbytes

    def held_bytes(self, tier: str) -> int:
        """Taken on a tier, `cpu` or `disk`."""
        return self._tiers[tier].held_bytes if tier in self._tiers else 0

    def stream(self, update: Update) -> None:
        """Run `update` over all groups (:func:`stream`), each on the rank's device."""
        device = self._device

        def near(state: StoredState, group: Range, run: dict[str, torch.Tensor]) -> None:
            here = {kind: x.to(device) for kind, x in run.items()}
            update(state, group, here)
            for kind, x in run.items():
                if here[kind] is not x:
                    x.copy_(here[kind])

        stream(self._states, self._working, near)

    def take(self) -> dict[str, TierTraffic]:
        """Tier → what passed since the last call."""
        return {name: tier.take() for name, tier in self._tiers.items()}

    def forget_reads(self, kind: str) -> None:
        """What was read of a kind since the last :meth:`take` does not count."""
        for tier in self._tiers.values():
            tier.forget_reads(kind)

    def close(self) -> None:
        """Give up all tiers, and what is kept on them. Closing twice is right."""
        for tier in self._tiers.values():
            tier.close()
