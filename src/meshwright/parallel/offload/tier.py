"""Tiers: where tensors are kept between their uses. Here the interface, and the memory of the host.

    tier.allocate("moment1/3", numel, dtype)          zeros
    handle = tier.read_start("moment1/3", start, out)
    handle.wait()                                     now `out` is filled
    handle = tier.write_start("moment1/3", start, x)
    handle.wait()                                     now `x` may be changed

Transfers of one kind (what stands before the first `/` of a key) take effect in the order in which they were started,
so what was written is what is read. What it costs: the tier counts, `core.offload.TierTraffic`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol, final

import torch

from meshwright.core.errors import InputError
from meshwright.core.offload import TierTraffic


class Handle(Protocol):
    """A transfer that was started."""

    def wait(self) -> None:
        """Return when it has ended. Raises InputError if it failed."""


@dataclass(frozen=True, slots=True)
class Done:
    """A transfer that has already ended."""

    def wait(self) -> None:
        """Return at once."""


@dataclass(frozen=True, slots=True)
class All:
    """Several transfers."""

    handles: Sequence[Handle]

    def wait(self) -> None:
        """All of them, also where one fails; then its error."""
        failure: InputError | None = None
        for handle in self.handles:
            try:
                handle.wait()
            except InputError as error:
                failure = failure or error
        if failure is not None:
            raise failure


@dataclass(frozen=True, slots=True)
class Region:
    """A flat tensor on a tier."""

    key: str
    numel: int
    dtype: torch.dtype

    @property
    def kind(self) -> str:
        return self.key.partition("/")[0]

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Tier(ABC):
    """Flat tensors by key, KIND/NAME. May be used by several threads."""

    def __init__(self) -> None:
        self._regions: dict[str, Region] = {}
        self._traffic = TierTraffic()
        self._lock = Lock()

    @final
    def allocate(self, key: str, numel: int, dtype: torch.dtype) -> None:
        """Make room for a tensor of zeros.

        Raises:
            ValueError: the key is taken.
            InputError: there is no room. The tier is closed then, and keeps nothing.
        """
        if key in self._regions:
            raise ValueError(f"{key} is already on this tier")
        region = Region(key, numel, dtype)
        self._allocate(region)
        self._regions[key] = region

    @final
    def read_start(self, key: str, start: int, out: torch.Tensor) -> Handle:
        """out [n] ← elements [start, start + n) of `key`. `out` must not be used until the handle was waited for."""
        region = self._part(key, start, out)
        with self._lock:
            self._traffic.add_reads(region.kind, out.nbytes)
        return self._read(region, start, out) if out.numel() else Done()

    @final
    def write_start(self, key: str, start: int, x: torch.Tensor) -> Handle:
        """Elements [start, start + n) of `key` ← x [n]. `x` must not be changed until the handle was waited for."""
        region = self._part(key, start, x)
        with self._lock:
            self._traffic.add_writes(region.kind, x.nbytes)
        return self._write(region, start, x) if x.numel() else Done()

    @final
    def read_parts_start(self, key: str, parts: Sequence[tuple[int, torch.Tensor]]) -> Handle:
        """Fill several tensors (start, out) as :meth:`read_start` does; counted as one read."""
        with self._lock:
            self._traffic.add_reads(self._regions[key].kind, sum(out.nbytes for _, out in parts))
        return All([self._read(self._part(key, start, out), start, out) for start, out in parts])

    @final
    def write_parts_start(self, key: str, parts: Sequence[tuple[int, torch.Tensor]]) -> Handle:
        """Take over several tensors (start, x) as :meth:`write_start` does; counted as one write."""
        with self._lock:
            self._traffic.add_writes(self._regions[key].kind, sum(x.nbytes for _, x in parts))
        return All([self._write(self._part(key, start, x), start, x) for start, x in parts])

    @final
    def free(self, key: str) -> None:
        """Give up what is kept under `key`."""
        self._free(self._regions.pop(key))

    @final
    def take(self) -> TierTraffic:
        """What was started since the last call; counting starts anew."""
        with self._lock:
            taken, self._traffic = self._traffic, TierTraffic()
        return taken

    @final
    def forget_reads(self, kind: str) -> None:
        """What was read of a kind since the last call of :meth:`take` does not count."""
        with self._lock:
            self._traffic.forget_reads(kind)

    def _part(self, key: str, start: int, x: torch.Tensor) -> Region:
        region = self._regions[key]
        if x.dim() != 1 or not x.is_contiguous() or x.dtype != region.dtype:
            raise ValueError(f"{key}: flat {region.dtype} is kept here, not {x.dtype} of shape {tuple(x.shape)}")
        if not 0 <= start <= start + x.numel() <= region.numel:
            raise ValueError(f"{key}: elements [{start}, {start + x.numel()}) leave its {region.numel}")
        return region

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes taken on the tier."""

    @property
    @abstractmethod
    def working_device(self) -> torch.device:
        """Where working buffers should lie."""

    @abstractmethod
    def close(self) -> None:
        """Give up all that is kept. Closing twice is right."""

    @abstractmethod
    def _allocate(self, region: Region) -> None: ...

    def _free(self, region: Region) -> None:
        raise NotImplementedError(f"{type(self).__name__} keeps what it has until it is closed")

    @abstractmethod
    def _read(self, region: Region, start: int, out: torch.Tensor) -> Handle: ...

    @abstractmethod
    def _write(self, region: Region, start: int, x: torch.Tensor) -> Handle: ...


class HostTier(Tier):
    """Memory of the host. Of a CUDA rank it is pinned, and copies run on a stream of their own; of a CPU rank it is
    other memory than the rank's working memory, and copies are real."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._memory: dict[str, torch.Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def held_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())

    @property
    def working_device(self) -> torch.device:
        return self._device

    def close(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        self._memory.clear()
        self._regions.clear()

    def _allocate(self, region: Region) -> None:
        try:
            memory = torch.zeros(region.numel, dtype=region.dtype, pin_memory=self._stream is not None)
        except RuntimeError:
            held = self.held_bytes
            self.close()
            raise InputError(
                f"the host's memory is full: {region.nbytes} more bytes are needed for {region.key} beside the {held} "
                f"that were there; offload to disk, or over more nodes"
            ) from None
        self._memory[region.key] = memory

    def _free(self, region: Region) -> None:
        del self._memory[region.key]

    def _read(self, region: Region, start: int, out: torch.Tensor) -> Handle:
        return self._copy(out, self._memory[region.key][start : start + out.numel()])

    def _write(self, region: Region, start: int, x: torch.Tensor) -> Handle:
        return self._copy(self._memory[region.key][start : start + x.numel()], x)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Handle:
        stream = self._stream
        if stream is None or not (target.is_cuda or source.is_cuda):
            if stream is not None:
                stream.synchronize()
            target.copy_(source)
            return Done()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        (target if target.is_cuda else source).record_stream(stream)
        return _OnStream(stream.record_event(), self._device)


@dataclass(frozen=True, slots=True)
class _OnStream:
    event: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        """The device waits, not the host: what is launched from now on comes after the copy."""
        torch.cuda.current_stream(self.device).wait_event(self.event)
