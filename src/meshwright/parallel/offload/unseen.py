"""A tier for rehearsals: it counts what is kept on it and what passes, and keeps nothing."""

from __future__ import annotations

import torch

from meshwright.core.offload import BLOCK_BYTES
from meshwright.parallel.offload.tier import Done, Handle, Region, Tier


class UnseenTier(Tier):
    """Of tensors on the meta device.

    Args:
        block_bytes: each tensor fills whole blocks of so many bytes: `BLOCK_BYTES` of a disk, 1 of memory.
    """

    def __init__(self, block_bytes: int = 1) -> None:
        super().__init__()
        self._block_bytes = block_bytes

    @classmethod
    def like(cls, name: str) -> UnseenTier:
        """In the place of tier `cpu` or `disk`."""
        return cls(BLOCK_BYTES if name == "disk" else 1)

    @property
    def held_bytes(self) -> int:
        block = self._block_bytes
        return sum(-(-region.nbytes // block) * block for region in self._regions.values())

    @property
    def working_device(self) -> torch.device:
        return torch.device("meta")

    def close(self) -> None:
        self._regions.clear()

    def _allocate(self, region: Region) -> None:
        return

    def _free(self, region: Region) -> None:
        return

    def _read(self, region: Region, start: int, out: torch.Tensor) -> Handle:
        return Done()

    def _write(self, region: Region, start: int, x: torch.Tensor) -> Handle:
        return Done()
