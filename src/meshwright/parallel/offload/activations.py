"""Kept activations on the host: what layers keep for backward leaves the device, and comes back one unit ahead.

A unit is a layer, or layers that are run again together (`parallel.recompute`).

    forward     run 0 │ run 1, write 0 │ run 2, write 1 │ ...          two units at a time are on the device,
    backward    ... │ back through 2, read 1 │ back through 1, read 0   whatever the number of layers and micro-batches

What embedding, head and loss keep stays. Each storage that autograd keeps of a unit is written once, however many of
its views are kept; parameters, and what a micro-batch comes with, are not. The last unit of a stage is asked for when
the stage's backward begins, before head and loss go back.

What it needs: nothing. What it costs: `cost.memory`, `cost.memory.moved_traffic`; on CPU ranks copies are made where
they are asked for, on a GPU on a stream of their own.
Sources: Rhu et al. 2016 (vDNN), Rajbhandari et al. 2021 §5.2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.core.offload import TierTraffic
from meshwright.parallel.offload.tier import Done, Handle, Tier

KIND = "activations"


class _Kept:
    """One storage that a unit keeps: on the device, on the host, or on its way. Lives as long as autograd needs it."""

    __slots__ = ("__weakref__", "counted", "nbytes", "near", "start", "unit")

    def __init__(self, near: torch.UntypedStorage, start: int, unit: _Unit, counted: object) -> None:
        self.near: torch.UntypedStorage | None = near
        self.nbytes, self.start, self.unit, self.counted = near.nbytes(), start, unit, counted

    def leave(self) -> None:
        """The device's memory is not needed any more."""
        self.counted = self.near = None

    def __del__(self) -> None:
        self.leave()
        self.unit.lose_one()


class _Packed:
    """A saved tensor: a view of a storage."""

    __slots__ = ("dtype", "kept", "view")

    def __init__(self, kept: _Kept, x: torch.Tensor) -> None:
        self.kept, self.dtype = kept, x.dtype
        self.view = x.storage_offset(), x.shape, x.stride()

    def tensor(self) -> torch.Tensor:
        """Once it is back, and with it its unit."""
        self.kept.unit.come_back()
        assert self.kept.near is not None
        return torch.empty(0, dtype=self.dtype, device=self.kept.near.device).set_(self.kept.near, *self.view)


def _unpack(packed: torch.Tensor | _Packed) -> torch.Tensor:
    return packed if isinstance(packed, torch.Tensor) else packed.tensor()


class _Unit:
    """What one unit keeps of one micro-batch."""

    def __init__(self, activations: KeptActivations, before: _Unit | None) -> None:
        self._of, self._before = activations, before
        self._by_storage: dict[int, _Kept] = {}
        self._kept: list[ref[_Kept]] = []
        self._num_alive = self._num_bytes = 0
        self._key: str | None = None
        self._handle: Handle = Done()
        self._is_away = self._is_asked = False

    def pack(self, x: torch.Tensor) -> torch.Tensor | _Packed:
        """Called by autograd for each tensor that it keeps of the unit."""
        storage = x.untyped_storage()
        if storage._cdata in self._of.lasting or not storage.nbytes():
            return x
        kept = self._by_storage.get(storage._cdata)
        if kept is None:
            kept = _Kept(storage, self._num_bytes, self, self._of.keep(x))
            self._by_storage[storage._cdata] = kept
            self._kept.append(ref(kept))
            self._num_alive += 1
            self._num_bytes += kept.nbytes
        return _Packed(kept, x)

    def write_start(self) -> None:
        """Its forward has ended: start to copy what it keeps to the host."""
        self._by_storage.clear()
        alive = self._alive()
        if alive:
            self._key = self._of.room(self._num_bytes)
            parts = [(kept.start, _flat(kept.near)) for kept in alive if kept.near is not None]
            self._handle = self._of.tier.write_parts_start(self._key, parts)

    def leave(self) -> None:
        """Once it is there, give up the device's memory."""
        self._handle.wait()
        self._handle = Done()
        for kept in self._alive():
            kept.leave()
        self._is_away = True

    def read_start(self) -> None:
        """Start to have it back, unless that has begun."""
        if not self._is_away or self._key is None:
            return
        self._is_away, alive = False, self._alive()
        parts = []
        for kept in alive:
            back = torch.empty(kept.nbytes, dtype=torch.uint8, device=self._of.device)
            kept.near, kept.counted = back.untyped_storage(), self._of.keep(back)
            parts.append((kept.start, back))
        self._handle = self._of.tier.read_parts_start(self._key, parts)

    def come_back(self) -> None:
        """Its backward has begun: return when it is there, and the unit before is on its way."""
        if self._is_asked:
            return
        self._is_asked = True
        self.read_start()
        self._handle.wait()
        if self._before is not None:
            self._before.read_start()

    def lose_one(self) -> None:
        """Autograd has dropped one of its storages; with the last of them its place on the host is free."""
        self._num_alive -= 1
        if self._num_alive == 0 and self._key is not None:
            self._of.give_back(self._key, self._num_bytes)
            self._key = None

    def _alive(self) -> list[_Kept]:
        return [kept for kept in (each() for each in self._kept) if kept is not None]


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of its bytes, uint8 [n]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


class KeptActivations:
    """What a rank's units keep, on a tier.

    Args:
        tier: memory of the host.
        device: the rank's.
        constants: what is there as long as the model: parameters in all their versions, tables.

    Attributes:
        keep: called with what is on the device for backward; holds what it returns as long.
        lasting: storages that stay where they are.
    """

    def __init__(self, tier: Tier, device: torch.device, constants: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.tier, self.device, self._constants = tier, device, constants
        self.keep: Callable[[torch.Tensor], object] = lambda x: None
        self.lasting: frozenset[int] = frozenset()
        self._running: _Unit | None = None
        self._last: WeakValueDictionary[tuple[int, int], _Unit] = WeakValueDictionary()
        self._unused: dict[int, list[str]] = defaultdict(list)
        self._num_rooms = 0

    @contextmanager
    def forward(self, stage: int, micro_batch: int, further: Iterable[torch.Tensor]) -> Iterator[None]:
        """Around the forward of one micro-batch on a stage; `further` is what it comes with."""
        self.lasting = frozenset(x.untyped_storage()._cdata for x in (*self._constants(), *further))
        self._running = None
        yield
        if self._running is not None:
            self._running.leave()
            self._last[stage, micro_batch] = self._running
        self._running = None

    @contextmanager
    def unit(self) -> Iterator[None]:
        """Around the forward of a unit."""
        unit = _Unit(self, self._running)
        with saved_tensors_hooks(unit.pack, _unpack):
            yield
        unit.write_start()
        if self._running is not None:
            self._running.leave()
        self._running = unit

    def ask(self, stage: int, micro_batch: int) -> None:
        """Backward is about to begin: start to have the last unit back."""
        if (unit := self._last.pop((stage, micro_batch), None)) is not None:
            unit.read_start()

    def room(self, num_bytes: int) -> str:
        """The key of so much of the tier that nobody uses."""
        if not self._unused[num_bytes]:
            self._free_unused()
            self._num_rooms += 1
            self.tier.allocate(f"{KIND}/{self._num_rooms}", num_bytes, torch.uint8)
            return f"{KIND}/{self._num_rooms}"
        return self._unused[num_bytes].pop()

    def give_back(self, key: str, num_bytes: int) -> None:
        """Nobody needs it any more."""
        self._unused[num_bytes].append(key)

    def _free_unused(self) -> None:
        """What is unused has other sizes than are needed now."""
        for key in (key for keys in self._unused.values() for key in keys):
            self.tier.free(key)
        self._unused.clear()

    @property
    def held_bytes(self) -> int:
        """On the host."""
        return self.tier.held_bytes

    def take(self) -> TierTraffic:
        """What passed since the last call."""
        return self.tier.take()

    def close(self) -> None:
        """Give up the tier."""
        self._unused.clear()
        self.tier.close()


class OnHost(nn.Module):
    """A unit whose kept activations leave the device."""

    def __init__(self, unit: nn.Module, activations: KeptActivations) -> None:
        super().__init__()
        self.unit = unit
        self.activations = activations

    def forward(self, x: torch.Tensor, *further: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.unit(x, *further)
        with self.activations.unit():
            return self.unit(x, *further)


def apply(layers: nn.ModuleDict, activations: KeptActivations) -> None:
    """Change the layers of a pipeline rank, in place. Names of parameters change, so states are bound before."""
    for name in list(layers):
        layers[name] = OnHost(layers[name], activations)
