"""Direct weight gradients: layers write dW into the flat buckets themselves.

    autograd    gradᵀ · x ──▶ new tensor ──add──▶ view of a bucket, zeroed at the start of the step
    here        gradᵀ · x ────────────────────────▶ view of a bucket; the first micro-batch replaces, the others add

What it divides: nothing. What it saves, per weight, step and micro-batch: an allocation, a pass that writes dW, one
that adds it, and the zeroing; of an embedding, a dense gradient of the whole table per micro-batch.
What it needs: weights that are used by the layers below only, each once per micro-batch. Biases, norms and learned
positions are left to autograd.
What it costs: nothing; the same tensors are kept for backward. Measured in `docs/performance.md`.
dW is written before dX is computed, so that its bucket leaves the earlier.

Where a schedule splits backward, I computes dX and postpones the product: x and the gradient are kept until W computes
dW from them. Biases, norms and look-ups are part of I.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from meshwright.parallel.experts import ExpertLinear
from meshwright.parallel.grids.apply import GridLinear, Leaver
from meshwright.parallel.grids.embedding import GridEmbedding
from meshwright.parallel.grids.product import Leave
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
        if needs_weight:
            ctx.products.add([(ctx.sink, grads)], x.reshape(-1, x.shape[-1]))
        grad_x = (grads @ weight).view_as(x) if needs_x else None
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
    on_grid: dict[nn.Module, GradientSink] = {}
    leaver = _leaver(products, on_grid)
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
                if isinstance(module, GridLinear):
                    on_grid[module], module.leaver = sink, leaver
                else:
                    _install(module, sink, products)
    return products


def _leaver(products: Products, sinks: Mapping[nn.Module, GradientSink]) -> Leaver:
    """Where layers of one input on a grid leave their weight gradients, of which the algorithm computes this rank's
    blocks, of all together."""

    def leaver(layers: Sequence[GridLinear]) -> Leave:
        own, algorithm = [sinks[layer] for layer in layers], layers[0].algorithm
        widths = [len(layer.weight) for layer in layers]

        def add(prepared: torch.Tensor, inputs: torch.Tensor) -> None:
            found = algorithm.weight_gradient(prepared, inputs)
            for layer, sink, part in zip(layers, own, found.split(widths), strict=True):
                if layer.weight.requires_grad:
                    sink.add(part)

        def leave(grads: torch.Tensor, prepared: torch.Tensor, inputs: torch.Tensor) -> None:
            if not products.is_postponed:
                add(prepared, inputs)
                return
            columns = grads.split(widths, 1) if len(layers) > 1 else [grads]  # the head's lie in another way
            parts = zip(layers, own, columns, strict=True)
            trained = [(sink, part) for layer, sink, part in parts if layer.weight.requires_grad]
            products.postpone(
                trained, inputs, lambda: inputs, put=lambda written, inputs: add(algorithm.prepare(grads), inputs)
            )

        return leave

    return leaver


def _writes(module: nn.Module) -> bool:
    return isinstance(
        module,
        ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding | ExpertLinear | GridLinear | GridEmbedding,
    )


def _install(module: nn.Module, sink: GradientSink, products: Products) -> None:
    if isinstance(module, ExpertLinear):
        module.write = partial(products.take_runs, sink)
    elif isinstance(module, VocabParallelEmbedding | GridEmbedding):
        module.look_up = lambda ids, weight: _Embedding.apply(ids, weight, sink)
    elif isinstance(module, ColumnParallelLinear):
        module.sink, module.region.products = sink, products
    elif isinstance(module, RowParallelLinear):
        module.sink, module.region.products = sink, products
        module.multiply = lambda x, weight, bias: _Linear.apply(x, weight, bias, sink, products)
