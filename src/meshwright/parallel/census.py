"""Counts the activation bytes that autograd keeps, while it keeps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks


class Keeper(Protocol):
    """What has to say what it keeps: postponed products, or activations that leave the device."""

    keep: Callable[[torch.Tensor], object]
    """Called with what is kept; what it returns is held as long."""


class _Kept:
    """One saved tensor; when autograd drops it, the census counts it off."""

    __slots__ = ("census", "key", "tensor")

    def __init__(self, census: ActivationCensus, tensor: torch.Tensor) -> None:
        self.census, self.tensor = census, tensor
        self.key = census._add(tensor)

    def __del__(self) -> None:
        self.census._drop(self.key)


class ActivationCensus:
    """Context in which the memory that forward leaves for backward is counted, each storage once.

    Storages that were there before (parameters, constant tables) do not count; name them in `ignore`. What is kept
    besides counts too; name the keepers.

    Attributes:
        peak_bytes: largest sum of kept storages so far.
    """

    def __init__(self, ignore: list[torch.Tensor], keepers: Sequence[Keeper] = ()) -> None:
        self._keepers = keepers
        self._ignored = {t.untyped_storage()._cdata for t in ignore}
        self._uses: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        self._hooks = saved_tensors_hooks(lambda tensor: _Kept(self, tensor), lambda kept: kept.tensor)

    def __enter__(self) -> ActivationCensus:
        self._hooks.__enter__()
        for keeper in self._keepers:
            keeper.keep = lambda tensor: _Kept(self, tensor)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        for keeper in self._keepers:
            keeper.keep = lambda tensor: None

    def _add(self, tensor: torch.Tensor) -> int:
        """The storage, by itself and not by its memory: in a rehearsal there is none."""
        key = tensor.untyped_storage()._cdata
        if key in self._ignored:
            return 0
        self._uses[key] = self._uses.get(key, 0) + 1
        if self._uses[key] == 1:
            self._bytes[key] = tensor.untyped_storage().nbytes()
            self.live_bytes += self._bytes[key]
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return key

    def _drop(self, key: int) -> None:
        if key == 0:
            return
        self._uses[key] -= 1
        if self._uses[key] == 0:
            self.live_bytes -= self._bytes.pop(key)
            del self._uses[key]
