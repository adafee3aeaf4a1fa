"""3D products: matrices in blocks on a q × q × q cube (Agarwal et al. 1995; Bian et al. 2021).

A linear layer has a group that gathers its input, one that gathers its weight and one that sums its output:

    x [T/q², in/q]  ──all_gather, `into`──▶ [T/q, in/q] ┐
                                                         ├─ · ─▶ [T/q, out/q] ──reduce_scatter, `out`──▶ y [T/q², out/q]
    w [out/q, in/q²] ──all_gather, `weight`─▶ [out/q, in/q] ┘

The output's columns lie as the input group, and its rows as the output group: in the next linear layer the two have
changed roles, and behind that one all lies as before. So first layers (q, k, v, gate, up, head) have
`into` = tp_input, `out` = tp_output, and second ones (o, down) the other way round.
Backward takes the gathered input and weight, of which 1/q² is kept, or gathers them again and keeps 1/q³.
What is needed next is on its way while blocks are gathered or multiplied. What it costs: `cost.grids`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.comm.collectives import all_gather_start, reduce_scatter_start
from meshwright.comm.mesh import Axis
from meshwright.comm.work import Work


@dataclass(frozen=True)
class CubeLinear:
    """A linear layer on a cube."""

    into: Axis
    weight: Axis
    out: Axis
    keeps: bool
    """What is gathered in forward, for backward."""

    def gather(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self._gathered(x, weight) if self.keeps else None

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        whole_x, whole_weight = (x, weight) if self.keeps else self._gathered(x, weight)
        return _scattered(whole_x @ whole_weight.t(), self.out)

    def prepare(self, grad: torch.Tensor) -> torch.Tensor:
        return _ended(*_gather_start(grad, self.out))

    def input_gradient(self, prepared: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not self.keeps:
            weight = _columns(_ended(*_gather_start(weight, self.weight)), self.weight.size)
        return _scattered(prepared @ weight, self.into)

    def weight_gradient(self, prepared: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        whole_x = x if self.keeps else _ended(*_gather_start(x, self.into))
        parts = whole_x.unflatten(1, (self.weight.size, -1)).transpose(0, 1)
        products = torch.matmul(prepared.t(), parts).flatten(0, 1)  # [q · out/q, in/q²]
        return _scattered(products, self.weight)

    def _gathered(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, inputs = _gather_start(x, self.into), _gather_start(weight, self.weight)
        return _ended(*rows), _columns(_ended(*inputs), self.weight.size)


def _gather_start(own: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, Work]:
    whole = own.new_empty(len(own) * axis.size, own.shape[1])
    return whole, all_gather_start(whole, own.detach(), axis)


def _ended(whole: torch.Tensor, work: Work) -> torch.Tensor:
    work.wait()
    return whole


def _columns(gathered: torch.Tensor, num_parts: int) -> torch.Tensor:
    """[q · n, m] that lies part by part → [n, q · m]."""
    return gathered.unflatten(0, (num_parts, -1)).transpose(0, 1).flatten(1)


def _scattered(products: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's block of rows of the sum over the axis."""
    out = products.new_empty(len(products) // axis.size, products.shape[1])
    reduce_scatter_start(out, products.contiguous(), axis).wait()
    return out
