"""1D tensor parallelism (Megatron-LM, Shoeybi et al. 2019 §3): columns, then rows.

What it divides:

    x [T,h] ──copy_to──▶ x · q,k,v / gate,up (columns, heads)  ──▶ x_i · o / down (rows) ──reduce_from──▶ y [T,h]
              AR in backward      local heads, local ffn                                  AR in forward

What it needs: rules `tp-heads`, `tp-kv-heads`, `tp-ffn`, `tp-vocab`.
What it costs: 2 all-reduces of b·s·h per layer forward and 2 backward; `cost.traffic`, axis tp.
The plain modules are the base: with tp = 1 the same code runs over an axis of size 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.comm.differentiable import copy_to, reduce_from
from meshwright.comm.mesh import Axis
from meshwright.core.layouts import CUT_BY_1D
from meshwright.core.model import ModelSpec, ParamSpec
from meshwright.core.placement import dim_range

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
LookUp = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

REGIONS = ("attention", "mlp", "head")
"""Modules whose input is whole on every rank and whose inside is sharded."""


class ColumnParallelLinear(nn.Module):
    """y_i = x · W_iᵀ + b_i. Input [.., in], whole on every rank; output [.., out/t].

    Attributes:
        multiply: (x, weight, bias) → product; `parallel.direct` puts another one here.
    """

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight = plain.weight
        self.bias = plain.bias
        self.multiply: Multiply = F.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = all_reduce(x_i · W_iᵀ) + b. Input [.., in/t], output [.., out], whole on every rank.

    Attributes:
        multiply: as of :class:`ColumnParallelLinear`; called without the bias.
    """

    def __init__(self, plain: nn.Linear, axis: Axis) -> None:
        super().__init__()
        self.weight = plain.weight
        self.bias = plain.bias
        self.axis = axis
        self.multiply: Multiply = F.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = reduce_from(self.multiply(x, self.weight, None), self.axis)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Rows [first, first + n) of the table; other ids give zeros, and the sum over tp is the lookup.

    Attributes:
        look_up: (ids, weight) → rows; `parallel.direct` puts another one here.
    """

    def __init__(self, plain: nn.Embedding, axis: Axis, first: int, num_rows: int) -> None:
        super().__init__()
        self.weight = plain.weight
        self.axis = axis
        self.first = first
        self.num_rows = num_rows
        self.look_up: LookUp = F.embedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - self.first
        outside = (local < 0) | (local >= self.num_rows)
        rows = self.look_up(local.masked_fill(outside, 0), self.weight)
        return reduce_from(rows.masked_fill(outside.unsqueeze(-1), 0.0), self.axis)


def apply(model: nn.Module, spec: ModelSpec, axis: Axis) -> None:
    """Replace modules and hook inputs in place. Weights are cut elsewhere, by placement."""
    weights = {param.name: param for param in spec.parameters()}
    for path, module in list(model.named_modules()):
        name = "embedding.weight" if path == "head" and spec.tied_embeddings else f"{path}.weight"
        if (replacement := _replacement(module, weights.get(name), spec, axis)) is not None:
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, replacement)
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in REGIONS:
            module.register_forward_pre_hook(lambda _, inputs: (copy_to(inputs[0], axis), *inputs[1:]))


def _replacement(module: nn.Module, weight: ParamSpec | None, spec: ModelSpec, axis: Axis) -> nn.Module | None:
    if weight is None:
        return None
    if isinstance(module, nn.Linear):
        return RowParallelLinear(module, axis) if weight.dims[1] in CUT_BY_1D else ColumnParallelLinear(module)
    if isinstance(module, nn.Embedding) and weight.dims[0] in CUT_BY_1D:
        rows = dim_range(spec, weight.dims[0], weight.shape[0], axis.size, axis.index)
        return VocabParallelEmbedding(module, axis, *rows)
    return None
