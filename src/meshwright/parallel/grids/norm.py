"""Norms of hidden states whose hidden dim lies on several ranks.

What it divides: the hidden dim. Per token the sum of squares crosses the axis (RMSNorm), or the sum, and then the sum
of squared distances from the mean (LayerNorm): in two passes, so that a mean far above the spread costs no digits.
Backward sums one number per token, or two together. Statistics are in at least fp32.
Kept: the rank's part of the input, and the statistics. The gradients of weight and bias are this rank's rows' share.

Sources: Ba et al. 2016; Zhang & Sennrich 2019; Chan, Golub & LeVeque 1983 (why not E[x²] − E[x]²).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Axis


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In the dtype of the statistics."""
    return x.float() if x.dtype.itemsize < 4 else x


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, axis: Axis) -> torch.Tensor:
        rows = _wide(x)
        squares = all_reduce(rows.square().sum(-1, keepdim=True), axis)
        rstd = squares.mul_(1 / (x.shape[-1] * axis.size)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        ctx.axis = axis
        return (rows * rstd * weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        unit, grads = _wide(x) * rstd, _wide(grad)
        scaled = grads * weight
        along = all_reduce((scaled * unit).sum(-1, keepdim=True), ctx.axis).mul_(1 / (x.shape[-1] * ctx.axis.size))
        grad_x = (scaled - unit * along) * rstd
        return grad_x.to(x.dtype), _over_rows(grads * unit).to(weight.dtype), None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, axis: Axis
    ) -> torch.Tensor:
        rows, size = _wide(x), x.shape[-1] * axis.size
        mean = all_reduce(rows.sum(-1, keepdim=True), axis).mul_(1 / size)
        centred = rows - mean
        rstd = all_reduce(centred.square().sum(-1, keepdim=True), axis).mul_(1 / size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.axis = axis
        return (centred * rstd * weight + bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        unit, grads = (_wide(x) - mean) * rstd, _wide(grad)
        scaled = grads * weight
        sums = torch.stack((scaled.sum(-1, keepdim=True), (scaled * unit).sum(-1, keepdim=True)))
        level, along = all_reduce(sums, ctx.axis).mul_(1 / (x.shape[-1] * ctx.axis.size))
        grad_x = (scaled - level - unit * along) * rstd
        grad_weight, grad_bias = _over_rows(grads * unit), _over_rows(grads)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None


def _over_rows(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -2).sum(0)


class GridNorm(nn.Module):
    """The norm of x [.., h], of which this rank has [.., h/q], as it has of weight and bias."""

    def __init__(self, plain: nn.Module, eps: float, axis: Axis) -> None:
        super().__init__()
        self.weight = plain.weight
        self.bias = plain.bias if "bias" in plain._parameters else None
        self.eps, self.axis = eps, axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (
            _RMSNorm.apply(x, self.weight, self.eps, self.axis)
            if self.bias is None
            else _LayerNorm.apply(x, self.weight, self.bias, self.eps, self.axis)
        )
        return out
