"""Weight gradients of linear layers: computed at once, or postponed (Qi et al. 2023, I and W)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from meshwright.parallel.states import GradientSink

Written = tuple[GradientSink, torch.Tensor]
"""Where a weight's gradient goes, and the gradient of its layer's output [T, out]."""
Put = Callable[[Sequence[Written], torch.Tensor], None]
"""(weights, their input [T, in]): leaves each one's gradient in its sink."""


@dataclass(frozen=True, slots=True)
class Product:
    """Weight gradients, of layers with the same input, that are still to be computed."""

    written: tuple[Written, ...]
    inputs: Callable[[], torch.Tensor]
    """Their input [T, in]; asked for once."""
    kept: tuple[object, ...]
    """What counts what is kept for it, while it is."""
    counts: Sequence[int] | None = None
    """Of experts: rows of each run (`GradientSink.add_product`)."""
    put: Put | None = None
    """How they are computed and left in their sinks, where they are not products alone."""

    @property
    def sinks(self) -> list[GradientSink]:
        return [sink for sink, _ in self.written]

    @torch.no_grad()
    def write(self) -> None:
        """dW, to their sinks."""
        if self.put is None:
            write(self.written, self.inputs(), self.counts)
        else:
            self.put(self.written, self.inputs())


class Products:
    """Where linear layers leave their weight gradients.

    Attributes:
        keep: called with what a postponed product keeps; holds what it returns as long.
    """

    def __init__(self) -> None:
        self.keep: Callable[[torch.Tensor], object] = lambda x: None
        self._postponed: deque[Product] | None = None

    @property
    def is_postponed(self) -> bool:
        """Whether the backward that runs leaves its products in a queue."""
        return self._postponed is not None

    @contextmanager
    def postponed(self) -> Iterator[deque[Product]]:
        """Backward that runs inside leaves its products in the queue, in order."""
        self._postponed = queue = deque[Product]()
        try:
            yield queue
        finally:
            self._postponed = None

    def add(self, written: Sequence[Written], inputs: torch.Tensor) -> None:
        """dW [out, in] = gradsᵀ · inputs of each layer, of inputs [T, in]: now, or later."""
        if self._postponed is None:
            write(written, inputs)
        elif written:
            self.postpone(written, inputs, lambda: inputs)

    def take_runs(
        self, sink: GradientSink, grads: torch.Tensor, inputs: torch.Tensor, counts: Sequence[int]
    ) -> Callable[[int], None]:
        """:meth:`add` of experts, run by run, as :meth:`GradientSink.take_runs`; later all at once."""
        if self._postponed is None:
            return sink.take_runs(grads, inputs, counts)
        self.postpone([(sink, grads)], inputs, lambda: inputs, counts)
        return lambda index: None

    def postpone(
        self,
        written: Sequence[Written],
        kept: torch.Tensor,
        inputs: Callable[[], torch.Tensor],
        counts: Sequence[int] | None = None,
        put: Put | None = None,
    ) -> None:
        """Leave products for later.

        Args:
            kept: what `inputs` is made of.
            inputs: makes the layers' common input [T, in].
            counts: of experts, rows of each run.
            put: computes them, where they are not products of the two alone.
        """
        assert self._postponed is not None
        counted = tuple(self.keep(grads) for _, grads in written)
        self._postponed.append(Product(tuple(written), inputs, (*counted, self.keep(kept)), counts, put))


def write(written: Sequence[Written], inputs: torch.Tensor, counts: Sequence[int] | None = None) -> None:
    """dW [out, in] = gradsᵀ · inputs of each layer, of inputs [T, in]; of experts each of its own rows."""
    for sink, grads in written:
        sink.add_product(grads, inputs, counts)
