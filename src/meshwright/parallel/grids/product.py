"""What a linear layer on a grid asks of an algorithm, and what autograd sees of it.

Each rank has a block of the input, of the weight and of the output; the algorithm moves blocks so that products of
whole matrices come out. Backward keeps the rank's own blocks alone and moves the others' again, or where the algorithm
gathers, what it gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

Leave = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(gradient of the output, the same prepared, input): computes the weight's gradient now or later, and keeps it."""

Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Again = Callable[[], AbstractContextManager[None]]


class Algorithm(Protocol):
    """Products of matrices that lie in blocks on a grid. All are collective: every rank of the grid takes part.

    Blocks of this rank: x [T', in'], weight [out', in'], y and grad [T'', out']. Where `gather` gives something, the
    others take that for x and weight.
    """

    def gather(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What is kept for backward in place of both; None: they are, and others' blocks move again."""

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """y = x · weightᵀ."""

    def prepare(self, grad: torch.Tensor) -> torch.Tensor:
        """What both gradients need of the output's gradient."""

    def input_gradient(self, prepared: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """grad · weight, as x lies."""

    def weight_gradient(self, prepared: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """gradᵀ · x, as the weight lies."""


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, algorithm: Algorithm, leave: Leave | None, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        rows, weight = x.reshape(-1, x.shape[-1]).contiguous(), _stacked(weights)
        whole = algorithm.gather(rows, weight)
        ctx.save_for_backward(*(whole or (rows, *weights)))
        ctx.algorithm, ctx.leave, ctx.shape = algorithm, leave, x.shape
        ctx.widths = [len(weight) for weight in weights]
        y = algorithm.multiply(*(whole or (rows, weight)))
        if len(weights) == 1:
            return (y,)
        # each by itself: of q, k and v only v is kept as it is
        return tuple(part.contiguous() for part in y.split(ctx.widths, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        grad = of_outputs[0].contiguous() if len(of_outputs) == 1 else torch.cat(of_outputs, 1)
        needs = ctx.needs_input_grad
        prepared = ctx.algorithm.prepare(grad)
        grad_x, grads = None, (None,) * len(ctx.widths)
        if needs[0]:
            grad_x = ctx.algorithm.input_gradient(prepared, _stacked(weights)).view(ctx.shape)
        if any(needs[3:]):
            whole = _weight_gradient(ctx.algorithm, ctx.leave, grad, prepared, rows)
            grads = grads if whole is None else whole.split(ctx.widths)
        return grad_x, None, None, *grads


def _weight_gradient(
    algorithm: Algorithm, leave: Leave | None, grad: torch.Tensor, prepared: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor | None:
    """Computed here, or None where `leave` takes it over."""
    if leave is None:
        return algorithm.weight_gradient(prepared, rows)
    leave(grad, prepared, rows)
    return None


def _stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return weights[0] if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])


def multiply(
    x: torch.Tensor, weights: Sequence[torch.Tensor], algorithm: Algorithm, leave: Leave | None = None
) -> tuple[torch.Tensor, ...]:
    """x · weightᵀ over a grid, differentiable. Several weights go as one: x passes once, and so does its gradient.

    Args:
        x: this rank's block [b', s, in'].
        weights: this rank's blocks [out', in'] of layers with this input.
        leave: takes over the weights' gradient, of all together; None leaves it to autograd.

    Returns:
        this rank's blocks [b'', s, out'].
    """
    return tuple(rows.view(-1, x.shape[1], rows.shape[-1]) for rows in _Product.apply(x, algorithm, leave, *weights))


class _CoreThenProduct(torch.autograd.Function):
    """The product of what attention's core makes of q, k and v, which alone are kept: backward makes it again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        weight: torch.Tensor,
        core: Core,
        algorithm: Algorithm,
        leave: Leave | None,
        again: Again,
    ) -> torch.Tensor:
        ctx.of, ctx.again = (core, algorithm, leave), again
        ctx.save_for_backward(q, k, v, weight)
        with torch.no_grad():
            return algorithm.multiply(_rows(core(q, k, v)), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        core, algorithm, leave = ctx.of
        *qkv, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        q, k, v = (x.detach().requires_grad_(needed) for x, needed in zip(qkv, needs[:3], strict=True))
        with torch.enable_grad(), ctx.again():
            inputs = _rows(core(q, k, v))
        grad = grad.contiguous()
        prepared, rows, grad_weight = algorithm.prepare(grad), inputs.detach(), None
        if any(needs[:3]):
            inputs.backward(algorithm.input_gradient(prepared, weight))
        if needs[3]:
            grad_weight = _weight_gradient(algorithm, leave, grad, prepared, rows)
        return q.grad, k.grad, v.grad, grad_weight, None, None, None, None


def _rows(out: torch.Tensor) -> torch.Tensor:
    """[b', heads, s, d] → [b'·s, heads·d]."""
    return out.transpose(1, 2).flatten(2).flatten(0, 1).contiguous()


def multiply_core(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    core: Core,
    algorithm: Algorithm,
    leave: Leave | None,
    again: Again,
) -> torch.Tensor:
    """:func:`multiply` of `core(q, k, v)` [b', heads, s, d], of which only q, k and v are kept.

    Args:
        again: a context around the core when it is run again.
    """
    rows: torch.Tensor = _CoreThenProduct.apply(q, k, v, weight, core, algorithm, leave, again)
    return rows.view(-1, q.shape[2], rows.shape[-1])
