"""A bucket over the dp ranks: scattered, replicated and gathered, level by level (`core.sharding`).

    scatter    whole ──reduce_scatter──▶ block of this node's position ──reduce_scatter──▶ shard
    gather     shard ──all_gather across──▶ block ──all_gather on the node──▶ whole

What it costs: `cost.traffic`, phases `gradients`, `parameters` and `gather`. All calls are started in the order in
which they are written here, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from meshwright.comm.collectives import all_gather_start, all_reduce_start, reduce_scatter, reduce_scatter_start
from meshwright.comm.mesh import Axis, Mesh
from meshwright.core.sharding import Level, Sharding


class Started(Protocol):
    """Something that can be waited for."""

    def wait(self) -> None: ...


class Then:
    """A started call and what follows it: started, in the same phase, once the first has ended."""

    def __init__(self, first: Started, mesh: Mesh, follow: Callable[[], Started]) -> None:
        self._first, self._follow = first, follow
        self._ledger, self._phase = mesh.ledger, mesh.ledger.current_phase

    def wait(self) -> None:
        """Return when both have ended."""
        self._first.wait()
        with self._ledger.phase(self._phase):
            self._follow().wait()


def own_block(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's part of x [n], n a multiple of the axis' size."""
    size = x.numel() // axis.size
    return x[axis.index * size : (axis.index + 1) * size]


def scatter_start(out: torch.Tensor, whole: torch.Tensor, levels: Sequence[Level], mesh: Mesh) -> Started:
    """out [n/S] ← this rank's shard of Σ whole [n]; whole is scratch afterwards. At least one level.

    All levels but the last are waited for here: they stay inside a node.
    """
    for level in levels[:-1]:
        axis = mesh[level.axis]
        block = own_block(whole, axis)
        reduce_scatter(block, whole, axis)
        whole = block
    return reduce_scatter_start(out, whole, mesh[levels[-1].axis])


def gather_start(whole: torch.Tensor, part: torch.Tensor, levels: Sequence[Level], mesh: Mesh) -> Started:
    """whole [n] ← the shards part [n/S] of all ranks. At least one level."""
    axis = mesh[levels[0].axis]
    if len(levels) == 1:
        return all_gather_start(whole, part, axis)
    block = own_block(whole, axis)
    return Then(gather_start(block, part, levels[1:], mesh), mesh, lambda: all_gather_start(whole, block, axis))


def reduce_start(whole: torch.Tensor, way: Sharding, mesh: Mesh) -> Started:
    """Sum `whole` [n] over all dp ranks, in place: this rank's own part of it, or all where nothing stays scattered."""
    part = whole
    for level in way.scatter if way.replicate else way.scatter[:-1]:
        axis = mesh[level.axis]
        block = own_block(part, axis)
        reduce_scatter(block, part, axis)
        part = block
    if not way.replicate:
        axis = mesh[way.scatter[-1].axis]
        return reduce_scatter_start(own_block(part, axis), part, axis)
    (level,) = way.replicate
    summed = all_reduce_start(part, mesh[level.axis])
    if way.stays_scattered or not way.scatter:
        return summed
    return Then(summed, mesh, lambda: gather_start(whole, part, way.scatter, mesh))
