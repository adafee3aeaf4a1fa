"""Rows of experts: tokens copied to where their experts' rows stand, and what comes out of these summed by token.

    x [T,h] ──permute──▶ rows by expert [n,h] ─▶ experts ─▶ [n,h] ──unpermute: Σ over choices of weight · row──▶ [T,h]

Each way is one pass over the rows, forward and backward: a token's rows are summed as bags of an embedding are; what
is gathered to be weighed stands, on a CPU, in a block that stays in its cache. Gradients of rows take the place of the
rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_BLOCK_BYTES = 1 << 18
"""Of rows that are gathered at a time on a CPU: a part of its second cache."""


@dataclass(frozen=True, slots=True)
class Order:
    """Which choice each row is of: choice c is of token c // k."""

    order: torch.Tensor
    """[n] row → choice."""
    inverse: torch.Tensor
    """[T·k] choice → row; undefined of choices without a row."""
    k: int
    """Choices of a token."""
    is_whole: bool
    """Whether every choice has a row."""


def in_cache(x: torch.Tensor) -> bool:
    """Whether what is done to x is better done block by block."""
    return x.device.type == "cpu" and not is_fake(x)


def blocks(num_rows: int, x: torch.Tensor, multiple: int = 1) -> Iterator[slice]:
    """Rows in blocks of as many rows like those of x [.., h] as a cache has room for, in multiples; elsewhere all."""
    size = num_rows
    if in_cache(x):
        size = max(_BLOCK_BYTES // (x.shape[-1] * x.element_size()) // multiple, 1) * multiple
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size or 1))


def permute(x: torch.Tensor, of: Order) -> torch.Tensor:
    """x [T, h] → rows [n, h]. Backward sums a token's rows, in the order of its choices."""
    return _Permute.apply(x, of)


def unpermute(rows: torch.Tensor, weights: torch.Tensor, of: Order) -> torch.Tensor:
    """Rows [n, h], weights [T, k] → Σ over a token's choices of weight · row [T, h], in at least fp32.

    Backward overwrites `rows`, of which nobody else may need the values.
    """
    return _Unpermute.apply(rows, weights, of)


class _Permute(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, of: Order) -> torch.Tensor:
        ctx.k, ctx.is_whole, ctx.num_tokens = of.k, of.is_whole, len(x)
        ctx.save_for_backward(of.inverse if of.is_whole else of.order)
        return x.index_select(0, of.order // of.k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places,), k = ctx.saved_tensors, ctx.k
        if not ctx.is_whole:
            return grad.new_zeros(ctx.num_tokens, grad.shape[1]).index_add_(0, places // k, grad), None
        return F.embedding_bag(places.view(-1, k), grad, mode="sum"), None


class _Unpermute(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, of: Order) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, of.order)
        if not of.is_whole:
            weighted = rows * weights.flatten()[of.order].unsqueeze(-1)
            out = weighted.new_zeros(len(weights), rows.shape[1])
            return out.index_add_(0, of.order // of.k, weighted).to(rows.dtype)
        if rows.dtype == weights.dtype:
            return F.embedding_bag(of.inverse.view(-1, of.k), rows, mode="sum", per_sample_weights=weights)
        out = rows.new_empty(len(weights), rows.shape[1])
        for block in blocks(len(of.inverse), rows, of.k):
            tokens = slice(block.start // of.k, block.stop // of.k)
            own = rows.index_select(0, of.inverse[block]).unflatten(0, (-1, of.k)).to(weights.dtype)
            out[tokens] = torch.bmm(weights[tokens].unsqueeze(1), own).squeeze(1)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, weights, order = ctx.saved_tensors
        tokens, scales = order // weights.shape[1], weights.flatten()[order]
        dots = torch.empty_like(scales)
        for block in blocks(len(rows), rows):
            own = grad.index_select(0, tokens[block])
            dots[block] = torch.linalg.vecdot(own.to(weights.dtype), rows[block].to(weights.dtype))
            torch.mul(own, scales[block].unsqueeze(-1).to(rows.dtype), out=rows[block])
        grad_weights = torch.zeros_like(weights)
        grad_weights.view(-1)[order] = dots
        return rows, grad_weights, None
