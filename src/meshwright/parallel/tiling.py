"""Memory-centric tiling: a linear layer that is too large to be gathered whole runs in tiles, one after the other.

What it divides: the rows of each weight of a layer, and of the head; in time, not over ranks.

    forward     gather W0 │ y0 = x·W0ᵀ, gather W1 │ y1 = x·W1ᵀ, ...      y = [y0 y1 ...]
    backward    gather W1 │ dx += dy1·W1, dW1 = dy1ᵀ·x, gather W0 │ ...

A tile is a bucket of its own: gathered for each use, its gradient scattered as soon as it is there. So at most
1 + `prefetch` whole tiles exist of parameters, and 2 of gradients (`core.flat`), whatever the size of the layer.
Activations stay as they are.
What it needs: rules `tile-zero`, `tile-rows`. What it costs: `cost.memory` (pools), phase `gather` in `cost.traffic`;
with full recompute tiles are gathered a third time.

Source: Rajbhandari et al. 2021 (ZeRO-Infinity), §5.1.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from meshwright.comm.mesh import Mesh
from meshwright.core.flat import Slot
from meshwright.core.strategy import Strategy
from meshwright.parallel.shards import Started, gather_start
from meshwright.parallel.states import FlatBucket, FlatStates, GradientSink
from meshwright.parallel.tensor import ColumnParallelLinear, RowParallelLinear


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Rows [start, stop) of a weight of [out, in], and how their gradient is written."""

    bucket: FlatBucket
    weight: torch.Tensor
    """[stop - start, in], valid while the tile is gathered."""
    start: int
    stop: int
    sink: GradientSink
    is_trained: bool


class TileGatherer:
    """Gathers tiles for one use each.

    Attributes:
        most_gathered: the largest number of tiles that were gathered, or on their way, at a time.
    """

    def __init__(self, states: FlatStates, mesh: Mesh, prefetch: int) -> None:
        self._levels, self._mesh, self._prefetch = states.way.scatter, mesh, prefetch
        self.most_gathered = 0

    def each(self, tiles: Iterable[Tile]) -> Iterator[Tile]:
        """The tiles in this order, each gathered while it is at hand; `prefetch` further ones are on their way."""
        waiting = list(tiles)
        running: list[tuple[Tile, Started]] = []
        while waiting or running:
            while waiting and len(running) <= self._prefetch:
                tile = waiting.pop(0)
                running.append((tile, self._start(tile)))
            self.most_gathered = max(self.most_gathered, len(running))
            tile, work = running[0]
            work.wait()
            yield tile
            running.pop(0)

    def _start(self, tile: Tile) -> Started:
        with self._mesh.ledger.phase("gather"):
            tile.bucket.read_start().wait()
            return gather_start(tile.bucket.parameters, tile.bucket.shard, self._levels, self._mesh)


class _TiledLinear(torch.autograd.Function):
    """x [.., in] → [.., out], tile by tile. `anchor` requires a gradient, so that there is a backward for any x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        anchor: torch.Tensor,
        tiles: tuple[Tile, ...],
        gatherer: TileGatherer,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.tiles, ctx.gatherer = tiles, gatherer
        y = x.new_empty(*x.shape[:-1], tiles[-1].stop)
        for tile in gatherer.each(tiles):
            y[..., tile.start : tile.stop] = x @ tile.weight.t()
        return y if bias is None else y + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        needs_x, needs_bias = ctx.needs_input_grad[:2]
        grads, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = torch.zeros_like(inputs) if needs_x else None
        for tile in ctx.gatherer.each(reversed(ctx.tiles)):
            of_tile = grads[:, tile.start : tile.stop]
            if grad_x is not None:
                grad_x.addmm_(of_tile, tile.weight)
            if tile.is_trained:
                tile.sink.add_product(of_tile, inputs)
        return None if grad_x is None else grad_x.view_as(x), grads.sum(0) if needs_bias else None, None, None, None


def apply(states: FlatStates, mesh: Mesh, strategy: Strategy) -> TileGatherer:
    """Let every linear layer whose weight lies in tiles run tile by tile. Its weight is no parameter any more."""
    gatherer = TileGatherer(states, mesh, strategy.prefetch)
    of_weight: dict[str, list[tuple[FlatBucket, Slot]]] = {}
    for bucket, slot in states.slots():
        if slot.placement.tile is not None:
            of_weight.setdefault(slot.placement.name, []).append((bucket, slot))
    for name, found in of_weight.items():
        tiles = tuple(_tiles(states, sorted(found, key=lambda item: item[1].placement.tile or 0)))
        for module, _ in states.owners[name]:
            _install(module, tiles, gatherer)
    return gatherer


def _tiles(states: FlatStates, found: list[tuple[FlatBucket, Slot]]) -> Iterator[Tile]:
    at = 0
    for bucket, slot in found:
        key, stop = slot.placement.key, at + slot.placement.box.sizes[0]
        sink = states.sinks[key] = GradientSink(bucket.view(bucket.gradients, slot), 1)
        weight = states.parameters[key].detach()
        yield Tile(bucket, weight, at, stop, sink, slot.placement.name not in states.frozen)
        at = stop


def _install(module: nn.Module, tiles: tuple[Tile, ...], gatherer: TileGatherer) -> None:
    assert isinstance(module, ColumnParallelLinear | RowParallelLinear)
    anchor = torch.empty(0, requires_grad=True)
    module._parameters["weight"] = None
    module.multiply = lambda x, weight, bias: _TiledLinear.apply(x, bias, anchor, tiles, gatherer)
