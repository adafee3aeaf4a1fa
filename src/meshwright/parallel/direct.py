"""Direct weight gradients: layers write dW into the flat buckets themselves.

    autograd    gradᵀ · x ──▶ new tensor ──add──▶ view of a bucket, zeroed at the start of the step
    here        gradᵀ · x ────────────────────────▶ view of a bucket; the first micro-batch replaces, the others add

What it divides: nothing. What it saves, per weight, step and micro-batch: an allocation, a pass that writes dW, one
that adds it, and the zeroing; of an embedding, a dense gradient of the whole table per micro-batch.
What it needs: weights that are used by the layers below only, each once per micro-batch. Biases, norms and learned
positions are left to autograd.
What it costs: nothing; the same tensors are kept for backward. Measured in `docs/performance.md`.

Where a schedule splits backward, I computes dX and postpones the product: x and the gradient are kept until W computes
dW from them. Biases, norms and look-ups are part of I.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from meshwright.parallel.experts import ExpertLinear
from meshwright.parallel.grids.apply import GridLinear
from meshwright.parallel.grids.embedding import GridEmbedding
from meshwright.parallel.grids.product import Algorithm, Leave
from meshwright.parallel.products import Products
from meshwright.parallel.states import FlatStates, GradientSink
from meshwright.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding


class _Linear(torch.autograd.Function):
    """F.linear; the weight's gradient goes to its sink, and autograd sees none. Columns: `parallel.columns`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sink: GradientSink,
        products: Products,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink, ctx.products = sink, products
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grads = grad.reshape(-1, grad.shape[-1])
        grad_x = (grads @ weight).view_as(x) if needs_x else None
        if needs_weight:
            ctx.products.add([(ctx.sink, grads)], x.reshape(-1, x.shape[-1]))
        return grad_x, None, grads.sum(0) if needs_bias else None, None, None


class _Embedding(torch.autograd.Function):
    """F.embedding; likewise."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, sink: GradientSink) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.sink = sink
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        ctx.sink.add_rows(ids.flatten(), grad.flatten(0, -2))
        return None, None, None


def apply(states: FlatStates) -> Products:
    """Give every weight that only such layers use a sink, and let its layers write into it."""
    products = Products()
    for bucket, slot in states.slots():
        name = slot.placement.name
        places = states.owners.get(name, [])
        if (
            places
            and slot.placement.tile is None
            and all(_writes(module) and attribute == "weight" for module, attribute in places)
        ):
            sink = states.sinks[name] = GradientSink(bucket.view(bucket.gradients, slot), len(places))
            for module, _ in places:
                _install(module, sink, products)
    return products


def _leaver(products: Products, sink: GradientSink, algorithm: Algorithm) -> Leave:
    """Where a layer on a grid leaves its weight gradient, of which `algorithm` computes this rank's block."""

    def put(to: GradientSink, grads: torch.Tensor, inputs: torch.Tensor) -> None:
        to.add(algorithm.weight_gradient(algorithm.prepare(grads), inputs))

    def leave(grads: torch.Tensor, prepared: torch.Tensor, inputs: torch.Tensor) -> None:
        if products.is_postponed:
            products.postpone([(sink, grads)], inputs, lambda: inputs, put=put)
        else:
            sink.add(algorithm.weight_gradient(prepared, inputs))

    return leave


def _writes(module: nn.Module) -> bool:
    return isinstance(
        module,
        ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding | ExpertLinear | GridLinear | GridEmbedding,
    )


def _install(module: nn.Module, sink: GradientSink, products: Products) -> None:
    if isinstance(module, ExpertLinear):
        module.write = lambda grads, inputs, counts: products.add([(sink, grads)], inputs, counts)
    elif isinstance(module, GridLinear):
        module.leave = _leaver(products, sink, module.algorithm)
    elif isinstance(module, VocabParallelEmbedding | GridEmbedding):
        module.look_up = lambda ids, weight: _Embedding.apply(ids, weight, sink)
    elif isinstance(module, ColumnParallelLinear):
        module.sink, module.region.products = sink, products
    elif isinstance(module, RowParallelLinear):
        module.sink, module.region.products = sink, products
        module.multiply = lambda x, weight, bias: _Linear.apply(x, weight, bias, sink, products)
