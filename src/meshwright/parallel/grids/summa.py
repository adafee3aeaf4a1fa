"""SUMMA: products of matrices that lie in blocks on a q × q grid (Van de Geijn & Watts 1997; Xu et al. 2021, Optimus).

Rank (i, j) of the grid has block i of the rows and block j of the columns. `row` below is the group of its row (it is
at position j), `col` that of its column (at position i).

    what               block of rank (i, j)                           goes round                        sums
    x · wᵀ             Σ_l x[i,l] · w[j,l]ᵀ                           x along rows, w along columns     at home
    grad · w           Σ_l grad[i,l] · w[l,j], reduced to column j    w along columns                   along rows
    gradᵀ · x          Σ_l grad[l,j]ᵀ · x[l,i], reduced to row i      x along rows                      along columns

A linear layer's weight lies as its transpose: rank (i, j) has w[out block j, in block i]. The table of the head lies as
it is, [vocabulary block i, hidden block j], so that its products are the same three in other roles.
What comes next is under way while a block is multiplied: the next broadcast, and the last reduction. So of each operand
that goes round two blocks of other ranks are there at a time, and of each sum two of other ranks' parts (`Panels`).
What it costs: in each product q blocks of each operand that goes round, q of each sum; `cost.grids`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import prod

import torch

from meshwright.comm.collectives import broadcast_start, reduce_start
from meshwright.comm.mesh import Axis
from meshwright.comm.work import Work


class Panels:
    """Memory for other ranks' blocks and parts on their way, the same for all products of a model, one after the
    other: as much as the largest of them asked for."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def take(self, like: torch.Tensor, *wanted: tuple[Axis, int]) -> list[list[torch.Tensor]]:
        """For each (axis, elements) the flat panels that go over that axis at a time, of `like`'s dtype and device;
        they are the product's until the next one takes some."""
        numels = [numel for axis, numel in wanted for _ in range(_num_panels(axis))]
        memory = self._memory
        if memory is None or memory.numel() < sum(numels) or (memory.dtype, memory.device) != (like.dtype, like.device):
            memory = self._memory = like.new_empty(sum(numels))
        parts = iter(memory[: sum(numels)].split(numels) if numels else ())
        return [[next(parts) for _ in range(_num_panels(axis))] for axis, _ in wanted]


def _num_panels(axis: Axis) -> int:
    """One that is read, and the next one; a rank's own block is where it lies."""
    return min(2, axis.size - 1)


def blocks(
    own: torch.Tensor, axis: Axis, shapes: Sequence[tuple[int, ...]], panels: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """The block of every rank of the axis in turn, the next one on its way. Only read them, and only until the next."""
    free = cycle(panels)

    def start(at: int) -> tuple[torch.Tensor, Work]:
        block = own if at == axis.index else _as(next(free), shapes[at])
        return block, broadcast_start(block, axis, at)

    ahead = start(0)
    for at in range(axis.size):
        block, work = ahead
        if at + 1 < axis.size:
            ahead = start(at + 1)
        work.wait()
        yield block


def reduced(
    factors: Iterable[tuple[torch.Tensor, torch.Tensor]], axis: Axis, panels: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Σ over the ranks of the axis of part `index`, the one of this rank's position; for each rank, in order, the two
    matrices whose product its part is."""
    own, before, free = None, None, cycle(panels)
    for at, (left, right) in enumerate(factors):
        if at == axis.index:
            own = part = left @ right
        else:
            part = torch.mm(left, right, out=_as(next(free), (left.shape[0], right.shape[1])))
        work = reduce_start(part, axis, at)
        if before is not None:
            before.wait()
        before = work
    assert before is not None
    assert own is not None
    before.wait()
    return own


def _as(panel: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Its first elements."""
    return panel[: prod(shape)].view(shape)


@dataclass(frozen=True)
class SummaLinear:
    """A linear layer: x [T/q, in/q], weight [out/q, in/q], y [T/q, out/q]."""

    row: Axis
    col: Axis
    panels: Panels

    def gather(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        return None

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        along_row, along_col = self.panels.take(x, (self.row, x.numel()), (self.col, weight.numel()))
        y = x.new_zeros(len(x), len(weight))
        for x_l, weight_l in zip(self._along_row(x, along_row), self._along_col(weight, along_col), strict=True):
            y.addmm_(x_l, weight_l.t())
        return y

    def prepare(self, grad: torch.Tensor) -> torch.Tensor:
        return grad

    def input_gradient(self, prepared: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        part_numel = len(prepared) * weight.shape[1]
        along_col, parts = self.panels.take(prepared, (self.col, weight.numel()), (self.row, part_numel))
        factors = ((prepared, weight_l) for weight_l in self._along_col(weight, along_col))
        return reduced(factors, self.row, parts)

    def weight_gradient(self, prepared: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        part_numel = prepared.shape[1] * x.shape[1]
        along_row, parts = self.panels.take(x, (self.row, x.numel()), (self.col, part_numel))
        return reduced(((prepared.t(), x_l) for x_l in self._along_row(x, along_row)), self.col, parts)

    def _along_row(self, x: torch.Tensor, panels: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        return blocks(x, self.row, [x.shape] * self.row.size, panels)

    def _along_col(self, weight: torch.Tensor, panels: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        return blocks(weight.detach(), self.col, [weight.shape] * self.col.size, panels)


@dataclass(frozen=True)
class SummaHead:
    """The head: x [T/q, h/q], weight [V/q, h/q] with block i of the rows, y [T/q, V/q] with block j of the columns."""

    row: Axis
    col: Axis
    num_rows: tuple[int, ...]
    """Of the vocabulary, in each of its q blocks."""
    panels: Panels

    def gather(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        return None

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        along_col, parts = self._take(x, len(x), weight.shape[1])
        return reduced(((x, weight_l.t()) for weight_l in self._along_col(weight, along_col)), self.row, parts)

    def prepare(self, grad: torch.Tensor) -> torch.Tensor:
        return grad

    def input_gradient(self, prepared: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        along_col, along_row = self._take(prepared, len(prepared), weight.shape[1])
        grad_x = prepared.new_zeros(len(prepared), weight.shape[1])
        pairs = zip(self._along_row(prepared, along_row), self._along_col(weight, along_col), strict=True)
        for grad_l, weight_l in pairs:
            grad_x.addmm_(grad_l, weight_l)
        return grad_x

    def weight_gradient(self, prepared: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        parts, along_row = self._take(prepared, len(prepared), x.shape[1])
        return reduced(((grad_l.t(), x) for grad_l in self._along_row(prepared, along_row)), self.col, parts)

    def _take(self, like: torch.Tensor, num_tokens: int, hidden: int) -> list[list[torch.Tensor]]:
        """Panels of weights, or of their gradient, and of logits."""
        most = max(self.num_rows)
        return self.panels.take(like, (self.col, most * hidden), (self.row, num_tokens * most))

    def _along_row(self, grad: torch.Tensor, panels: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        return blocks(grad, self.row, [(len(grad), rows) for rows in self.num_rows], panels)

    def _along_col(self, weight: torch.Tensor, panels: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        return blocks(weight.detach(), self.col, [(rows, weight.shape[1]) for rows in self.num_rows], panels)
