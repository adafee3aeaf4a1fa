"""Differentiable functions that keep less for backward than their plain compositions, and are as fast.

    function    keeps                plain composition keeps    CPU time, forward + backward, against plain
    rms_norm    x, 1/rms per row     x, x/rms, 1/rms            0.24 to 0.29
    layer_norm  x, 2 numbers a row   likewise; in low precision on the CPU wide weights too
    swiglu      gate, up             gate, silu(gate), up       0.9 to 1.0
    rotate      nothing              the tables                 0.55 to 0.65

Measured by `benchmarks/model_functions.py` (width 256 to 768, fp32, one thread).
The plain compositions are the oracles of `tests/models/test_functions.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable

LOW_PRECISION = (torch.bfloat16, torch.float16)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = torch.float32 if x.dtype in LOW_PRECISION else x.dtype
        rows = x.to(wide)
        rstd = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        rstd = rstd.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (rows * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        # The gradient is LayerNorm's with mean 0, without the term that centres it.
        x, weight, rstd = ctx.saved_tensors
        size = x.shape[-1]
        rows, grads, scale = x.to(rstd.dtype), grad.to(rstd.dtype).contiguous(), weight.to(rstd.dtype)
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grads, rows, [size], torch.zeros_like(rstd), rstd, scale, None, [True, True, False]
        )
        centring = torch.mv(grads.view(-1, size), scale).view_as(rstd).mul_(rstd).mul_(1 / size)
        return grad_x.add_(centring).to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dim; statistics in at least fp32.

    Args:
        x: [.., n].
        weight: [n].

    Source: Zhang & Sennrich 2019.
    """
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)  # one fused kernel there, which keeps the same
    return _RMSNorm.apply(x, weight, eps)


class _LayerNorm(Function):
    """In low precision on the CPU, whose kernel has fp32 statistics only beside fp32 weights: those are made twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight.float(), bias.float(), eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad.contiguous(), x, weight.shape, mean, rstd, weight.float(), bias.float(), [True] * 3
        )
        return grad_x, grad_weight.to(weight.dtype), grad_bias.to(bias.dtype), None


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x − mean(x)) / sqrt(var(x) + eps) · weight + bias over the last dim; statistics in at least fp32.

    Args:
        x: [.., n].
        weight: [n].
        bias: [n].

    Source: Ba et al. 2016.
    """
    if x.dtype in LOW_PRECISION and x.is_cpu:
        return _LayerNorm.apply(x, weight, bias, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grad)
        grad_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, grad_up


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, elementwise; silu is computed again in backward. Source: Shazeer 2020."""
    return _SwiGLU.apply(gate, up)


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.tables = cos, sin  # constants of the model, not activations: kept away from saved-tensor hooks
        return _turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.tables
        return _turn(grad, cos, sin, -1), None, None


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    half = sin.shape[-1]
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin, value=sign)
    return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, halves convention: dim i turns with dim i + d/2. Backward turns back.

    Args:
        x: [b, s, heads, d].
        cos: [s, 1, d], the half table twice.
        sin: [s, 1, d/2].

    Source: Su et al. 2021, §3.2.
    """
    return _Rotate.apply(x, cos, sin)
