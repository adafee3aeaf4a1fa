"""Initial weights that do not depend on the layout: any cut of a parameter, put together again, is the same
tensor bit for bit.

A parameter is drawn in tiles of at most 256 × 256 elements (of one expert), each with its own generator seeded by a
hash of (seed, name, tile). A rank draws only the tiles that its box touches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import product

import numpy as np
import torch

from meshwright.core.model import ModelSpec, ParamSpec
from meshwright.core.placement import Box
from meshwright.models.decoder import Decoder

TILE = 256
"""Elements of a tile along each dim."""
EXPERT_TILE = 1
"""Likewise along a dim of experts."""

_RESIDUAL = ("attention.o.weight", ".down.weight")


def initial_std(param: ParamSpec, spec: ModelSpec) -> float:
    """Standard deviation of a matrix: the projections into the residual stream are smaller by √(2·layers).

    Source: Radford et al. 2019 (GPT-2), §2.3.
    """
    residual = param.name.endswith(_RESIDUAL)
    return spec.initializer_std / (2 * spec.num_layers) ** 0.5 if residual else spec.initializer_std


def initial_box(param: ParamSpec, spec: ModelSpec, box: Box, seed: int) -> torch.Tensor:
    """The initial values of `box` of `param`: fp32 tensor of shape `box.sizes`, on the CPU.

    Matrices are normal(0, :func:`initial_std`), norm weights 1, biases 0.

    Args:
        param: one of `spec.parameters()`.
        box: which piece of it.
        seed: of the whole model, any integer.
    """
    if len(param.shape) == 1:
        return torch.full(box.sizes, float(param.part == "norm" and param.name.endswith(".weight")))
    out = np.empty(box.sizes, dtype=np.float32)
    tile_sizes = [EXPERT_TILE if dim == "experts" else TILE for dim in param.dims]
    for tile in product(*map(_tiles, box.offsets, box.sizes, tile_sizes)):
        values = _draw(param, tile, tile_sizes, seed)
        starts = [index * size for index, size in zip(tile, tile_sizes, strict=True)]
        low = [max(start, offset) for start, offset in zip(starts, box.offsets, strict=True)]
        high = [
            min(start + length, offset + size)
            for start, length, offset, size in zip(starts, values.shape, box.offsets, box.sizes, strict=True)
        ]
        into = tuple(slice(a - offset, b - offset) for a, b, offset in zip(low, high, box.offsets, strict=True))
        taken = tuple(slice(a - start, b - start) for a, b, start in zip(low, high, starts, strict=True))
        out[into] = values[taken]
    return torch.from_numpy(out).mul_(initial_std(param, spec))


def _tiles(offset: int, size: int, tile_size: int) -> range:
    return range(offset // tile_size, -(-(offset + size) // tile_size))


def _draw(param: ParamSpec, tile: tuple[int, ...], tile_sizes: Sequence[int], seed: int) -> np.ndarray:
    """Standard normal values of one whole tile."""
    key = hashlib.sha256(f"{seed}/{param.name}/{tile}".encode()).digest()[:16]
    sizes = [min(size, total - index * size) for size, total, index in zip(tile_sizes, param.shape, tile, strict=True)]
    generator = np.random.Generator(np.random.SFC64(int.from_bytes(key, "little")))
    return generator.standard_normal(sizes, dtype=np.float32)


@torch.no_grad()
def initialize(model: Decoder, spec: ModelSpec, seed: int) -> None:
    """Fill a plain model that has storage, in place."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for param in spec.parameters():
        parameters[param.name].copy_(initial_box(param, spec, Box.whole(param.shape), seed))
