"""A rank's parameters and gradients as views into a few flat buffers.

What it divides: nothing by itself; it lays out what the placements leave on this rank (`core.flat`).
What it costs: `cost.memory`, parameters and gradients.

    bucket.parameters  | q.weight | k.weight | norm | pad |    every nn.Parameter is a view
    bucket.gradients   | q.weight | k.weight | norm | pad |    every gradient is accumulated in place

Autograd adds to a gradient that was zeroed. Layers that write their own (`parallel.direct`) do it through a
GradientSink, whose first write of a step replaces what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.core.errors import InputError
from meshwright.core.flat import Bucket, Slot, make_buckets
from meshwright.core.model import ModelSpec
from meshwright.core.placement import Placement, placements
from meshwright.core.precision import Recipe
from meshwright.core.strategy import Strategy

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class GradientSink:
    """A weight's gradient as its layers write it: the first write of a step replaces, later ones add.

    Attributes:
        view: the gradient, in the weight's local shape and the recipe's gradient dtype.
        num_uses: layers that write it, each once per micro-batch; 2 where embedding and head are tied.
        on_written: called after every write.
    """

    __slots__ = ("_is_fresh", "num_uses", "on_written", "view")

    def __init__(self, view: torch.Tensor, num_uses: int) -> None:
        self.view = view
        self.num_uses = num_uses
        self.on_written: Callable[[], None] = lambda: None
        self._is_fresh = True

    def start_step(self) -> None:
        """What the view holds does not count any more."""
        self._is_fresh = True

    def settle(self) -> None:
        """A gradient that nobody wrote is zero."""
        if self._is_fresh:
            self.view.zero_()
            self._is_fresh = False

    def add_product(self, grads: torch.Tensor, inputs: torch.Tensor) -> None:
        """view [out, in] += gradsᵀ · inputs, of grads [T, out] and inputs [T, in]."""
        if grads.dtype == self.view.dtype:
            self.view.addmm_(grads.t(), inputs, beta=0 if self._is_fresh else 1)
        elif self._is_fresh:
            self.view.copy_(grads.t() @ inputs)
        else:
            self.view.add_(grads.t() @ inputs)
        self._is_fresh = False
        self.on_written()

    def add_rows(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """view [n, h]: row ids[t] += rows[t], of ids [T] and rows [T, h]."""
        self.settle()
        self.view.index_add_(0, ids, rows.to(self.view.dtype))
        self.on_written()


@dataclass(slots=True)
class FlatBucket:
    """One bucket's layout and its two buffers, each of `layout.numel` elements."""

    layout: Bucket
    parameters: torch.Tensor
    gradients: torch.Tensor

    def view(self, buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
        """A slot of `buffer` in its parameter's local shape."""
        return buffer[slot.start : slot.stop].view(slot.placement.box.sizes)


class FlatStates:
    """All buckets of a rank, bound to the parameters of its (already cut) model.

    Attributes:
        buckets: in the order in which backward completes them.
        parameters: logical name → the nn.Parameter, a view of a bucket.
        owners: logical name → the (module, attribute) places that use it.
        sinks: logical name → how its layers write its gradient; the others are left to autograd.
        recipe: dtypes of each copy.
    """

    def __init__(
        self, model: nn.Module, spec: ModelSpec, strategy: Strategy, at: dict[str, int], device: torch.device
    ) -> None:
        self.recipe: Recipe = strategy.recipe
        self.placements = placements(spec, strategy, at)
        layouts = make_buckets(self.placements, strategy.dp, strategy.bucket_bytes, self.recipe.gradient_bytes)
        self.buckets = [self._allocate(layout, device) for layout in layouts]
        self.parameters: dict[str, nn.Parameter] = {}
        self.sinks: dict[str, GradientSink] = {}
        self.owners = _owners(model, spec)
        for bucket, slot in self.slots():
            parameter = nn.Parameter(bucket.view(bucket.parameters, slot))
            self.parameters[slot.placement.name] = parameter
            for module, attribute in self.owners.get(slot.placement.name, ()):
                module._parameters[attribute] = parameter
        unknown = self.owners.keys() - self.parameters.keys()
        if unknown:
            raise InputError(
                f"the model has parameters that its spec does not place here: {', '.join(sorted(unknown))}"
            )

    def _allocate(self, layout: Bucket, device: torch.device) -> FlatBucket:
        return FlatBucket(
            layout,
            torch.zeros(layout.numel, dtype=DTYPES[self.recipe.parameter], device=device),
            torch.zeros(layout.numel, dtype=DTYPES[self.recipe.gradient], device=device),
        )

    def slots(self) -> Iterator[tuple[FlatBucket, Slot]]:
        """Every (bucket, slot)."""
        return ((bucket, slot) for bucket in self.buckets for slot in bucket.layout.slots)

    @torch.no_grad()
    def fill(self, read: Callable[[Placement], torch.Tensor]) -> None:
        """Set every parameter from `read(placement)`, a tensor of the placement's box."""
        for bucket, slot in self.slots():
            bucket.view(bucket.parameters, slot).copy_(read(slot.placement))

    def gradients(self) -> Iterator[tuple[Placement, torch.Tensor]]:
        """Each placement with its accumulated gradient, a view of the box's shape."""
        return ((slot.placement, bucket.view(bucket.gradients, slot)) for bucket, slot in self.slots())

    @torch.no_grad()
    def zero_gradients(self) -> None:
        """Start a new step. What a sink will replace is not zeroed."""
        for bucket, slot in self.slots():
            sink = self.sinks.get(slot.placement.name)
            if sink is None:
                bucket.gradients[slot.start : slot.stop].zero_()
            else:
                sink.start_step()

    @torch.no_grad()
    def settle(self, bucket: FlatBucket) -> None:
        """Make `bucket.gradients` valid as a whole, also where no micro-batch has written."""
        for slot in bucket.layout.slots:
            if (sink := self.sinks.get(slot.placement.name)) is not None:
                sink.settle()

    @property
    def parameter_bytes(self) -> int:
        return sum(b.parameters.numel() * b.parameters.element_size() for b in self.buckets)

    @property
    def gradient_bytes(self) -> int:
        return sum(b.gradients.numel() * b.gradients.element_size() for b in self.buckets)


def _owners(model: nn.Module, spec: ModelSpec) -> dict[str, list[tuple[nn.Module, str]]]:
    """Logical name → the (module, attribute) places that use it. A tied head uses the embedding's."""
    owners: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for attribute in module._parameters:
            if module._parameters[attribute] is None:
                continue
            name = f"{path}.{attribute}" if path else attribute
            if spec.tied_embeddings and name == "head.weight":
                name = "embedding.weight"
            owners.setdefault(name, []).append((module, attribute))
    return owners
