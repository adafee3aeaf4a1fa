"""Initial weights that do not depend on the layout: any cut of a parameter, put together again, is the same
tensor bit for bit.

A parameter is drawn in tiles of at most 256 × 256 elements, each with its own generator seeded by a hash of
(seed, name, tile). A rank draws only the tiles that its box touches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import product

import numpy as np
import torch

from meshwright.core.model import ModelSpec, ParamSpec
from meshwright.core.placement import Box
from meshwright.models.decoder import Decoder

TILE = 256
"""Elements of a tile along each dim."""

_RESIDUAL = ("attention.o.weight", "mlp.down.weight")


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
    for tile in product(*(_tiles(offset, size) for offset, size in zip(box.offsets, box.sizes, strict=True))):
        values = _draw(param, tile, seed)
        low = [max(index * TILE, offset) for index, offset in zip(tile, box.offsets, strict=True)]
        high = [
            min((index + 1) * TILE, offset + size)
            for index, offset, size in zip(tile, box.offsets, box.sizes, strict=True)
        ]
        into = tuple(slice(a - offset, b - offset) for a, b, offset in zip(low, high, box.offsets, strict=True))
        taken = tuple(slice(a - index * TILE, b - index * TILE) for a, b, index in zip(low, high, tile, strict=True))
        out[into] = values[taken]
    return torch.from_numpy(out).mul_(initial_std(param, spec))


def _tiles(offset: int, size: int) -> Iterator[int]:
    return iter(range(offset // TILE, -(-(offset + size) // TILE)))


def _draw(param: ParamSpec, tile: tuple[int, ...], seed: int) -> np.ndarray:
    """Standard normal values of one whole tile."""
    key = hashlib.sha256(f"{seed}/{param.name}/{tile}".encode()).digest()[:16]
    sizes = [min(TILE, total - index * TILE) for total, index in zip(param.shape, tile, strict=True)]
    generator = np.random.Generator(np.random.SFC64(int.from_bytes(key, "little")))
    return generator.standard_normal(sizes, dtype=np.float32)


@torch.no_grad()
def initialize(model: Decoder, spec: ModelSpec, seed: int) -> None:
    """Fill a plain model that has storage, in place."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for param in spec.parameters():
        parameters[param.name].copy_(initial_box(param, spec, Box.whole(param.shape), seed))
