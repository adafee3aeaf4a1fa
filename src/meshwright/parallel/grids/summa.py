"""SUMMA: products of matrices that lie in blocks on a q × q grid (Van de Geijn & Watts 1997; Xu et al. 2021, Optimus).

Rank (i, j) of the grid has block i of the rows and block j of the columns. `row` below is the group of its row (it is
at position j), `col` that of its column (at position i).

    what               block of rank (i, j)                           goes round                        sums
    x · wᵀ             Σ_l x[i,l] · w[j,l]ᵀ                           x along rows, w along columns     at home
    grad · w           Σ_l grad[i,l] · w[l,j], reduced to column j    w along columns                   along rows
    gradᵀ · x          Σ_l grad[l,j]ᵀ · x[l,i], reduced to row i      x along rows                      along columns

A linear layer's weight lies as its transpose: rank (i, j) has w[out block j, in block i]. The table of the head lies as
it is, [vocabulary block i, hidden block j], so that its products are the same three in other roles.
What comes next is under way while a block is multiplied: the next broadcast, and the last reduction.
What it costs: in each product q blocks of each operand that goes round, q of each sum; `cost.grids`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from meshwright.comm.collectives import broadcast_start, reduce_start
from meshwright.comm.mesh import Axis
from meshwright.comm.work import Work


def blocks(own: torch.Tensor, axis: Axis, shapes: Sequence[tuple[int, ...]]) -> Iterator[torch.Tensor]:
    """The block of every rank of the axis in turn, the next one on its way. Only read them."""

    def start(at: int) -> tuple[torch.Tensor, Work]:
        block = own if at == axis.index else own.new_empty(shapes[at])
        return block, broadcast_start(block, axis, at)

    ahead = start(0)
    for at in range(axis.size):
        block, work = ahead
        if at + 1 < axis.size:
            ahead = start(at + 1)
        work.wait()
        yield block


def reduced(parts: Iterable[torch.Tensor], axis: Axis) -> torch.Tensor:
    """Σ over the ranks of the axis of part `index`, the one of this rank's position; one part per rank, in order."""
    own, before = None, None
    for at, part in enumerate(parts):
        work = reduce_start(part, axis, at)
        if before is not None:
            before.wait()
        before = work
        if at == axis.index:
            own = part
    assert before is not None
    assert own is not None
    before.wait()
    return own


@dataclass(frozen=True)
class SummaLinear:
    """A linear layer: x [T/q, in/q], weight [out/q, in/q], y [T/q, out/q]."""

    row: Axis
    col: Axis

    def gather(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        return None

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x.new_zeros(len(x), len(weight))
        for x_l, weight_l in zip(self._along_row(x), self._along_col(weight), strict=True):
            y.addmm_(x_l, weight_l.t())
        return y

    def prepare(self, grad: torch.Tensor) -> torch.Tensor:
        return grad

    def input_gradient(self, prepared: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return reduced((prepared @ weight_l for weight_l in self._along_col(weight)), self.row)

    def weight_gradient(self, prepared: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return reduced((prepared.t() @ x_l for x_l in self._along_row(x)), self.col)

    def _along_row(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        return blocks(x, self.row, [x.shape] * self.row.size)

    def _along_col(self, weight: torch.Tensor) -> Iterator[torch.Tensor]:
        return blocks(weight.detach(), self.col, [weight.shape] * self.col.size)


@dataclass(frozen=True)
class SummaHead:
    """The head: x [T/q, h/q], weight [V/q, h/q] with block i of the rows, y [T/q, V/q] with block j of the columns."""

    row: Axis
    col: Axis
    num_rows: tuple[int, ...]
    """Of the vocabulary, in each of its q blocks."""

    def gather(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        return None

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return reduced((x @ weight_l.t() for weight_l in self._along_col(weight)), self.row)

    def prepare(self, grad: torch.Tensor) -> torch.Tensor:
        return grad

    def input_gradient(self, prepared: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        grad_x = prepared.new_zeros(len(prepared), weight.shape[1])
        for grad_l, weight_l in zip(self._along_row(prepared), self._along_col(weight), strict=True):
            grad_x.addmm_(grad_l, weight_l)
        return grad_x

    def weight_gradient(self, prepared: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return reduced((grad_l.t() @ x for grad_l in self._along_row(prepared)), self.col)

    def _along_row(self, grad: torch.Tensor) -> Iterator[torch.Tensor]:
        return blocks(grad, self.row, [(len(grad), rows) for rows in self.num_rows])

    def _along_col(self, weight: torch.Tensor) -> Iterator[torch.Tensor]:
        return blocks(weight.detach(), self.col, [(rows, weight.shape[1]) for rows in self.num_rows])
