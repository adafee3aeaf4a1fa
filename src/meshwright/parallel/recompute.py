"""Full recompute: keep a layer's input, run the layer again in backward (Chen et al. 2016).

What it divides: time, not space: 1 extra forward per layer, its tensor-parallel all-reduces included,
for activations of one layer at a time.
What it costs: `cost.activations` (one hidden state per layer), phase `recompute` in `cost.traffic`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.comm.ledger import Ledger


class _Recompute(torch.autograd.Function):
    """Runs `layer` without a graph; backward runs it again with one. Parameters collect their gradients there.

    `anchor` is any tensor that requires a gradient: an input that does not (behind frozen layers) has a backward too.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, layer: nn.Module, ledger: Ledger) -> torch.Tensor:
        ctx.layer, ctx.ledger = layer, ledger
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad(), ctx.ledger.phase("recompute"):
            y = ctx.layer(x)
        torch.autograd.backward(y, grads[0])
        return x.grad, None, None, None


class Recomputed(nn.Module):
    """A layer that is run again in backward."""

    def __init__(self, layer: nn.Module, ledger: Ledger) -> None:
        super().__init__()
        self.layer = layer
        self.ledger = ledger
        self.anchor = torch.empty(0, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._recomputed(x) if torch.is_grad_enabled() else self.layer(x)

    def _recomputed(self, x: torch.Tensor) -> torch.Tensor:
        return _Recompute.apply(x, self.anchor, self.layer, self.ledger)


def apply(layers: nn.ModuleDict, ledger: Ledger) -> None:
    """Wrap every layer, in place. Names of parameters change, so states are bound before."""
    for name in list(layers):
        layers[name] = Recomputed(layers[name], ledger)
