"""Several column-parallel layers of one input, as one function: q, k and v; gate and up; the head.

    forward     x ──(gather)──▶ X ──▶ X·W1ᵀ, X·W2ᵀ, ...
    backward    start to gather X again │ dX = dY1·W1 + dY2·W2 + ..., start its sum over tp │ dW1, dW2, ... │ wait

So the sum of dX is on its way while the weight gradients are computed, and one sum serves all layers. With sequence
parallelism only this rank's tokens of X are kept; the others' are gathered again while dX is computed. A rank that has
nothing to sum computes dW1, dW2, ... first: what dp sums of them leaves while dX is computed.

What it needs: nothing more than `parallel.tensor`. What it costs: over tp an all-reduce of X's size in backward, or
with sequence parallelism an all-gather in forward, and in backward an all-gather and a reduce-scatter.

Sources: Shoeybi et al. 2019 §3; Korthikanti et al. 2022 §4.2.2 (the shard is kept, the rest gathered again).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from meshwright.comm.collectives import all_gather_start, all_reduce_start, reduce_scatter_start
from meshwright.comm.mesh import Axis
from meshwright.comm.work import Work
from meshwright.parallel.products import Products
from meshwright.parallel.states import GradientSink

Wait = Callable[[], torch.Tensor]
"""Returns when what was started has ended, with its result."""


class Column(Protocol):
    """A column-parallel layer, as it is read here."""

    @property
    def weight(self) -> torch.Tensor:
        """[out/t, in]."""

    @property
    def bias(self) -> torch.Tensor | None:
        """[out/t]."""

    @property
    def sink(self) -> GradientSink | None:
        """Where its weight's gradient goes; None: to autograd."""


@dataclass(slots=True)
class Region:
    """How the input of a column-parallel region comes to be whole, and how its gradient is summed.

    Attributes:
        axis: the tp axis.
        gathers: the input is this rank's tokens [b, s/t, h] of each sequence; otherwise all tokens [.., h].
        is_replicated: weights are whole on every rank, and so is what is made of them: nothing is gathered or summed.
        keeps_order: outputs are [b, s, ..]; otherwise [t·b, s/t, ..], one rank's tokens after the other's, which needs
            no copy and is enough where no token meets another.
    """

    axis: Axis
    gathers: bool = False
    keeps_order: bool = True
    is_replicated: bool = False
    products: Products = field(default_factory=Products)

    @property
    def is_cut(self) -> bool:
        """Whether a rank holds a part of the tokens only, and gathers the others'."""
        return self.gathers and self.axis.size > 1 and not self.is_replicated

    @property
    def is_alone(self) -> bool:
        """Whether a rank has nothing to gather or to sum."""
        return self.axis.size == 1 or self.is_replicated

    def whole_start(self, x: torch.Tensor) -> Wait:
        """Start to make the whole input."""
        if not self.is_cut:
            return lambda: x
        gathered = x.new_empty((self.axis.size, *x.shape))
        work = all_gather_start(gathered, x.contiguous(), self.axis)

        def wait() -> torch.Tensor:
            work.wait()
            return gathered.movedim(0, 1).flatten(1, 2) if self.keeps_order else gathered.flatten(0, 1)

        return wait

    def sum_start(self, grad: torch.Tensor) -> Wait:
        """Start to sum the gradient of the whole input; this rank's part of it. `grad` may be overwritten."""
        if self.is_alone:
            return lambda: grad
        if not self.is_cut:
            work = all_reduce_start(grad, self.axis)
            return lambda: _when_there(work, grad)
        parts = by_rank(grad, self.axis.size) if self.keeps_order else grad.unflatten(0, (self.axis.size, -1))
        parts = parts.contiguous()
        own = parts.new_empty(parts.shape[1:])
        scattered = reduce_scatter_start(own, parts, self.axis)
        return lambda: _when_there(scattered, own)


def _when_there(work: Work, x: torch.Tensor) -> torch.Tensor:
    work.wait()
    return x


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: Region) -> torch.Tensor:
        ctx.region = region
        whole = region.whole_start(x)()
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.region.sum_start(grad.clone(memory_format=torch.contiguous_format))(), None


def enter(x: torch.Tensor, region: Region) -> torch.Tensor:
    """What passes into a region without a product: made whole, and its gradient summed, like its layers' input."""
    return _Enter.apply(x, region)


def by_rank(x: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """[b, s, ..] → [t, b, s/t, ..]: each rank's tokens of every sequence."""
    return x.unflatten(1, (num_ranks, -1)).movedim(1, 0)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, region: Region, layers: Sequence[Column], *weights: Any
    ) -> tuple[torch.Tensor, ...]:
        """`weights`: of each layer its weight and its bias, tensors or None."""
        ctx.region, ctx.sinks = region, [layer.sink for layer in layers]
        ctx.save_for_backward(x, *weights[::2])
        whole = region.whole_start(x)()
        return tuple(F.linear(whole, weights[i], weights[i + 1]) for i in range(0, len(weights), 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        region: Region = ctx.region
        needs_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        trained = [i for i in range(len(rows)) if needs[2 * i]]
        written = [(ctx.sinks[i], rows[i]) for i in trained if ctx.sinks[i] is not None]
        is_later = region.products.is_postponed and len(written) == len(trained)
        whole = region.whole_start(x) if trained and not is_later else None

        def start_of_input() -> Wait | None:
            return region.sum_start(_of_input(rows, weights).view(*grads[0].shape[:-1], -1)) if needs_x else None

        summed = None if region.is_alone else start_of_input()
        found: list[torch.Tensor | None] = [None] * len(needs)
        for i in range(len(rows)):
            found[2 * i + 1] = rows[i].sum(0) if needs[2 * i + 1] else None
        if whole is not None:
            inputs = whole().reshape(-1, x.shape[-1])
            region.products.add(written, inputs)
            for i in trained:
                found[2 * i] = rows[i].t() @ inputs if ctx.sinks[i] is None else None
        elif trained:
            region.products.postpone(written, x, lambda: region.whole_start(x)().reshape(-1, x.shape[-1]))
        if region.is_alone:
            summed = start_of_input()
        return summed() if summed else None, None, None, *found


def _of_input(rows: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Σ dYi · Wi, [T, in]."""
    total = rows[0] @ weights[0]
    for grads, weight in zip(rows[1:], weights[1:], strict=True):
        total.addmm_(grads, weight)
    return total


def columns(x: torch.Tensor, region: Region, layers: Sequence[Column]) -> tuple[torch.Tensor, ...]:
    """Outputs [.., out/t] of each layer, of the region's input."""
    weights = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    return _Columns.apply(x, region, layers, *weights)
