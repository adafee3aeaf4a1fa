"""2D, 2.5D and 3D tensor parallelism of a plain decoder.

What it divides (`core.layouts`): of every hidden state [b, s, h] the sequences and the hidden dim, of every weight both
dims, over a square, over several squares with sequences of their own, or over a cube:

    x [b', s, h'] ─ norm ─▶ q, k, v │ gate, up ─▶ whole heads of whole sequences │ local columns ─▶ o │ down ─▶ + x

Attention, activations and residuals are local. Every rank gets the micro-batch whole: embedding and loss take the
sequences that are theirs. Only biases, norms and learned positions are held by several ranks, and with 2.5D the
weights by each depth; their gradients are summed once a step (`Placement.sum_over`).
What it needs: rules `tensor-*`. What it costs: `cost.grids`.

Sources: Xu et al. 2021 (2D), Wang et al. 2021 (2.5D), Bian et al. 2021 (3D).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.comm.mesh import Axis, Mesh
from meshwright.core.axes import TP_COL, TP_DEPTH, TP_INPUT, TP_OUTPUT, TP_ROW, TP_WEIGHT
from meshwright.core.layouts import INNER_DIMS, Grid
from meshwright.core.model import ModelSpec, ParamSpec
from meshwright.core.placement import even_split
from meshwright.parallel.grids.cube import CubeLinear
from meshwright.parallel.grids.embedding import CubeEmbedding, SquareEmbedding
from meshwright.parallel.grids.norm import GridNorm
from meshwright.parallel.grids.product import Again, Algorithm, Core, Leave, multiply, multiply_core
from meshwright.parallel.grids.summa import Panels, SummaHead, SummaLinear

PROJECT = "project"
"""Name of the modules that run the first linear layers of one input together."""


class GridLinear(nn.Module):
    """A linear layer on a grid. Input [b', s, in'], output [b'', s, out'].

    Attributes:
        leaver: how it, or several of one input, leave their weight gradients; `parallel.direct` puts something here.
    """

    def __init__(self, plain: nn.Linear, algorithm: Algorithm) -> None:
        super().__init__()
        self.weight = plain.weight
        self.bias = plain.bias
        self.algorithm = algorithm
        self.leaver: Leaver | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return GridProjections()(x, self)[0]

    def after(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, core: Core, again: Again) -> torch.Tensor:
        """Of what a core makes of q, k and v, which are kept in its place (`grids.product.multiply_core`)."""
        y = multiply_core(q, k, v, self.weight, core, self.algorithm, leave_of([self]), again)
        return self.with_bias(y)

    def with_bias(self, y: torch.Tensor) -> torch.Tensor:
        """Its product as its output."""
        return y if self.bias is None else y + self.bias


Leaver = Callable[[Sequence[GridLinear]], Leave]
"""Layers of one input → where they leave their weight gradients together."""


def leave_of(layers: Sequence[GridLinear]) -> Leave | None:
    """Of layers of one input; None: to autograd."""
    leaver = layers[0].leaver
    return None if leaver is None else leaver(layers)


class GridProjections(nn.Module):
    """Linear layers of one input, together: as one layer whose outputs stand side by side."""

    def forward(self, x: torch.Tensor, *layers: GridLinear) -> tuple[torch.Tensor, ...]:
        weights = [layer.weight for layer in layers]
        found = multiply(x, weights, layers[0].algorithm, leave_of(layers))
        return tuple(layer.with_bias(y) for layer, y in zip(layers, found, strict=True))


class GridPositions(nn.Module):
    """Learned positions of this rank's sequences. Numbers [n], or with documents [b, n] of all → [.., n, h']."""

    def __init__(self, plain: nn.Embedding, own: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = plain.weight
        self.own = own

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return F.embedding(self.own(numbers) if numbers.dim() == 2 else numbers, self.weight)


def apply(
    model: nn.Module, spec: ModelSpec, grid: Grid, mesh: Mesh, panels: Panels, keeps_gathered: bool = True
) -> None:
    """Replace modules in place. Weights are cut elsewhere, by placement.

    Args:
        panels: what the products of squares work in.
        keeps_gathered: in a cube, whether backward finds what forward gathered.
    """
    weights = {param.name: param for param in spec.parameters()}
    axes = {name: mesh[name] for name, _ in grid.axes}
    for path, module in list(model.named_modules()):
        name = "embedding.weight" if path == "head" and spec.tied_embeddings else f"{path}.weight"
        parent, _, child = path.rpartition(".")
        if child == PROJECT:
            setattr(model.get_submodule(parent), child, GridProjections())
        if name not in weights:
            continue
        replacement = _replacement(module, weights[name], spec, grid, axes, keeps_gathered, panels)
        if weights[name].dims[0] == "position":
            replacement = GridPositions(module, lambda x: own_sequences(x, mesh, grid.batch_axes))
        if replacement is not None:
            setattr(model.get_submodule(parent), child, replacement)


def _replacement(
    module: nn.Module,
    weight: ParamSpec,
    spec: ModelSpec,
    grid: Grid,
    axes: dict[str, Axis],
    keeps_gathered: bool,
    panels: Panels,
) -> nn.Module | None:
    """What stands in a module's place; None where it works on what is local anyway."""
    if isinstance(module, nn.Linear):
        return GridLinear(module, _algorithm(weight, grid, axes, keeps_gathered, panels))
    if weight.dims[0] == "vocab" and isinstance(module, nn.Embedding):
        if grid.kind == "3d":
            return CubeEmbedding(module, axes[TP_INPUT], axes[TP_WEIGHT], spec.vocab_size)
        return SquareEmbedding(module, axes[TP_COL], axes.get(TP_DEPTH), spec.vocab_size)
    if weight.dims == ("embed",):
        (axis,) = grid.hidden_axes
        return GridNorm(module, spec.norm_eps, axes[axis])
    return None


def _algorithm(weight: ParamSpec, grid: Grid, axes: dict[str, Axis], keeps_gathered: bool, panels: Panels) -> Algorithm:
    if grid.kind == "3d":
        is_second = weight.dims[1] in INNER_DIMS
        into, out = (TP_OUTPUT, TP_INPUT) if is_second else (TP_INPUT, TP_OUTPUT)
        return CubeLinear(axes[into], axes[TP_WEIGHT], axes[out], keeps_gathered)
    row, col = axes[TP_ROW], axes[TP_COL]
    if weight.dims[0] == "vocab":
        num_rows = tuple(even_split(weight.shape[0], col.size, at)[1] for at in range(col.size))
        return SummaHead(row, col, num_rows, panels)
    return SummaLinear(row, col, panels)


def own_sequences(x: torch.Tensor, mesh: Mesh, axes: tuple[str, ...]) -> torch.Tensor:
    """This rank's part of x [b, ...], cut along dim 0 by these axes, the first one being the outer cut."""
    for name in axes:
        size = len(x) // mesh[name].size
        x = x.narrow(0, mesh[name].index * size, size)
    return x
