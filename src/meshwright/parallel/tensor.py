"""1D tensor parallelism (Megatron-LM, Shoeybi et al. 2019 §3): columns, then rows; and its sequence parallelism
(Korthikanti et al. 2022 §4.2.2).

What it divides:

    none       x [b,s,h]     ───▶ x · q,k,v / gate,up (columns)   ──▶ x_i · o / down (rows) ──all-reduce──▶ y [b,s,h]
                 all-reduce in backward    local heads, local ffn

    megatron   x [b,s/t,h]   ─all-gather─▶   the same             ──▶       ─reduce-scatter──▶ y [b,s/t,h]
                 reduce-scatter in backward                                   all-gather in backward

With `megatron` norms, residuals and what is kept of them are of this rank's tokens alone; the embedding's sum is
scattered, and the head's input gathered. Gradients of parameters that see a part of the tokens are summed over tp
(`core.placement`).

What it needs: rules `tp-heads`, `tp-kv-heads`, `tp-ffn`, `tp-vocab`, `sequence-tokens`.
What it costs: 2 sums of b·s·h per layer forward and 2 backward, and with `megatron` 2 all-gathers more of what is not
kept; `cost.traffic`, axis tp.
The plain modules are the base: with tp = 1 the same code runs over an axis of size 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.comm.differentiable import copy_to, reduce_from, reduce_scatter_first
from meshwright.comm.mesh import Axis
from meshwright.core.layouts import CUT_BY_1D, SequenceKind
from meshwright.core.model import ModelSpec, ParamSpec
from meshwright.core.placement import dim_range
from meshwright.parallel import experts
from meshwright.parallel.columns import Region, by_rank, columns, enter
from meshwright.parallel.states import GradientSink

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
LookUp = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

PROJECT = "project"
"""Name of the modules that run the column-parallel layers of a region together."""
EXPERTS = "experts"
"""Name of the module of all experts of a layer."""
ENTER = "enter"
"""Name of the modules through which something passes into a region without a product."""
LATENTS = "latents"
"""Parent of layers whose weights are whole on every rank: of latent attention, those before the heads."""
ELEMENTWISE = ("mlp", "shared")
"""Regions in which no token meets another, so that their order doesn't matter."""


class ColumnParallelLinear(nn.Module):
    """y_i = x · W_iᵀ + b_i. Input [b, s/t, h] or [b, s, h]; output [b, s, out/t].

    Attributes:
        multiply: (x, weight, bias) → product; `parallel.tiling` puts another one here. None: `parallel.columns`.
        sink: where the weight's gradient goes; `parallel.direct` sets it.
    """

    def __init__(self, plain: nn.Linear, region: Region) -> None:
        super().__init__()
        self.weight = plain.weight
        self.bias = plain.bias
        self.region = region
        self.multiply: Multiply | None = None
        self.sink: GradientSink | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ColumnProjections(self.region)(x, self)[0]


class ColumnProjections(nn.Module):
    """Column-parallel layers of one input, together."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def forward(self, x: torch.Tensor, *layers: ColumnParallelLinear) -> tuple[torch.Tensor, ...]:
        if all(layer.multiply is None for layer in layers):
            return columns(x, self.region, layers)
        x = x if self.region.is_replicated else copy_to(x, self.region.axis)
        return tuple((layer.multiply or F.linear)(x, layer.weight, layer.bias) for layer in layers)


class Enter(nn.Module):
    """x on its way into a region: this rank's tokens become all, gradients are summed."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return enter(x, self.region)


class RowParallelLinear(nn.Module):
    """y = Σ x_i · W_iᵀ + b over ranks. Input [.., in/t], output [.., out], whole or this rank's tokens of it.

    Attributes:
        multiply: (x, weight, bias) → product; `parallel.direct` puts another one here. Called without the bias.
        region: whose end this is.
        sink: where the weight's gradient goes; `parallel.direct` sets it.
    """

    def __init__(self, plain: nn.Linear, region: Region) -> None:
        super().__init__()
        self.weight = plain.weight
        self.bias = plain.bias
        self.region = region
        self.multiply: Multiply = F.linear
        self.sink: GradientSink | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.collect(self.multiply(x, self.weight, None))

    def collect(self, y: torch.Tensor) -> torch.Tensor:
        """Of this rank's product [.., out]: the sum over ranks, and the bias."""
        y = _scattered(y, self.region) if self.region.is_cut else reduce_from(y, self.region.axis)
        return y if self.bias is None else y + self.bias


def _scattered(y: torch.Tensor, region: Region) -> torch.Tensor:
    """This rank's tokens of Σ y, [b, s/t, out]."""
    if not region.keeps_order:
        return reduce_scatter_first(y, region.axis)
    return reduce_scatter_first(by_rank(y, region.axis.size), region.axis).squeeze(0)


class VocabParallelEmbedding(nn.Module):
    """Rows [first, first + n) of the table; other ids give zeros, and the sum over tp is the lookup.

    Ids [b, s]; output [b, s, h], or with sequence parallelism this rank's tokens of it.

    Attributes:
        look_up: (ids, weight) → rows; `parallel.direct` puts another one here.
    """

    def __init__(self, plain: nn.Embedding, region: Region, first: int, num_rows: int) -> None:
        super().__init__()
        self.weight = plain.weight
        self.region = region
        self.first = first
        self.num_rows = num_rows
        self.look_up: LookUp = F.embedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        axis, is_cut = self.region.axis, self.region.is_cut
        local = (by_rank(ids, axis.size) if is_cut else ids) - self.first
        outside = (local < 0) | (local >= self.num_rows)
        rows = self.look_up(local.masked_fill(outside, 0), self.weight)
        rows = rows.masked_fill(outside.unsqueeze(-1), 0.0)
        return reduce_scatter_first(rows, axis).squeeze(0) if is_cut else reduce_from(rows, axis)


class TokenParallelPositions(nn.Module):
    """Learned positions of this rank's tokens. Numbers [.., s] of all tokens → [.., s/t, h]."""

    def __init__(self, plain: nn.Embedding, axis: Axis) -> None:
        super().__init__()
        self.weight = plain.weight
        self.axis = axis

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        own = numbers.unflatten(-1, (self.axis.size, -1)).select(-2, self.axis.index)
        return F.embedding(own.clone(), self.weight)


def apply(
    model: nn.Module,
    spec: ModelSpec,
    axis: Axis,
    sequence: SequenceKind = "none",
    width: experts.Width | None = None,
) -> None:
    """Replace modules in place. Weights are cut elsewhere, by placement.

    Args:
        width: over which ranks the experts' width is cut; None: tp.
    """
    weights = {param.name: param for param in spec.parameters()}
    regions: dict[str, Region] = {}
    for path, module in list(model.named_modules()):
        parent, _, child = path.rpartition(".")
        region = regions.setdefault(parent, _region(parent, axis, sequence))
        name = "embedding.weight" if path == "head" and spec.tied_embeddings else f"{path}.weight"
        if child == PROJECT:
            replacement: nn.Module | None = ColumnProjections(region)
        elif child == ENTER:
            replacement = Enter(region)
        else:
            replacement = _replacement(module, weights.get(name), spec, region)
        if replacement is not None:
            setattr(model.get_submodule(parent), child, replacement)
        if child == EXPERTS:
            experts.cut(module, axis, sequence, width)


def _region(path: str, axis: Axis, sequence: SequenceKind) -> Region:
    name = path.rpartition(".")[2]
    return Region(axis, sequence == "megatron", name not in ELEMENTWISE, is_replicated=name == LATENTS)


def _replacement(module: nn.Module, weight: ParamSpec | None, spec: ModelSpec, region: Region) -> nn.Module | None:
    if weight is None:
        return None
    if EXPERTS in weight.dims:
        return experts.ExpertLinear(module)
    if isinstance(module, nn.Linear) and region.is_replicated:
        return ColumnParallelLinear(module, region)
    if isinstance(module, nn.Linear) and not any(dim in CUT_BY_1D for dim in weight.dims):
        return None  # such as the gate of shared experts: whole on every rank
    if isinstance(module, nn.Linear):
        kind = RowParallelLinear if weight.dims[1] in CUT_BY_1D else ColumnParallelLinear
        return kind(module, region)
    if isinstance(module, nn.Embedding) and weight.dims[0] in CUT_BY_1D:
        rows = dim_range(spec, weight.dims[0], weight.shape[0], region.axis.size, region.axis.index)
        return VocabParallelEmbedding(module, region, *rows)
    if isinstance(module, nn.Embedding) and region.is_cut:
        return TokenParallelPositions(module, region.axis)
    return None
