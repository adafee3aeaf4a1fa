"""Experts cut over tp: every expert's first products by columns, its last one by rows.

What it divides:

    x [T,h], weights [T,k] ──copy_to──▶ rows · gate, up (columns) ─▶ · down (rows) ─▶ weighed sum ──reduce_from──▶ y
                           AR in backward                                                          AR in forward

All ranks of a tp group route alike: router and weights are whole on each. So a token's output is summed over tp once,
after its experts' outputs were, and the gradient of the weights too.
What it needs: rule `tp-ffn`. What it costs: as an MLP, and backward k numbers per token more; `cost.experts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from meshwright.comm.differentiable import copy_to, reduce_from
from meshwright.comm.mesh import Axis

Write = Callable[[torch.Tensor, torch.Tensor, Sequence[int]], None]
Product = Callable[[torch.Tensor, torch.Tensor, Sequence[int], Write | None], torch.Tensor]


class ExpertLinear(nn.Module):
    """One matrix of each expert. (rows [n, in], rows of each run) → [n, out].

    Attributes:
        write: takes (gradients, inputs, rows of each run) instead of the weight's gradient; `parallel.direct` sets it.
    """

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.weight = plain.weight
        self._product: Product = plain.product
        self.write: Write | None = None

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return self._product(rows, self.weight, counts, self.write)


def cut(experts: nn.Module, axis: Axis) -> None:
    """Let a layer's experts take whole inputs, and give whole outputs, over tp. Weights are cut by placement."""
    experts.register_forward_pre_hook(lambda _, inputs: (*(copy_to(x, axis) for x in inputs[:2]), *inputs[2:]))
    experts.register_forward_hook(lambda _, inputs, out: reduce_from(out, axis))
