"""Differentiable forms: in a sandwich replicated → sharded → replicated they are one process's function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshwright.comm.differentiable import (
    all_to_all_first,
    copy_to,
    gather_first_partial,
    gather_last,
    reduce_from,
    reduce_scatter_first,
    scatter_last,
)
from meshwright.comm.mesh import Axis, Mesh
from meshwright.core.errors import InputError

ROWS, WIDTH = 12, 12
"""Divisible by 1, 2, 3 and 4 ranks."""


def weight() -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def columns(axis: Axis) -> Tensor:
    return weight().chunk(axis.size, dim=1)[axis.index]


def column_then_row(x: Tensor, axis: Axis) -> Tensor:
    """tanh(x W) Wᵀ over column shards: copy_to in, reduce_from out."""
    return reduce_from(torch.tanh(copy_to(x, axis) @ columns(axis)) @ columns(axis).t(), axis)


def column_then_gather(x: Tensor, axis: Axis) -> Tensor:
    """tanh(x W), output columns gathered for a replicated consumer."""
    return gather_last(torch.tanh(copy_to(x, axis) @ columns(axis)), axis)


def scatter_then_row(x: Tensor, axis: Axis) -> Tensor:
    """tanh(x) W, input columns scattered from a replicated producer."""
    rows = weight().chunk(axis.size, dim=0)[axis.index]
    return reduce_from(torch.tanh(scatter_last(x, axis)) @ rows, axis)


def through_row_shards(x: Tensor, axis: Axis) -> Tensor:
    """tanh(x W) Wᵀ with activations sharded by rows on both sides of the column shards."""
    own = rows_of(x, axis)
    h = torch.tanh(gather_first_partial(own, axis) @ columns(axis)) @ columns(axis).t()
    return gather_rows(reduce_scatter_first(h, axis), axis)


def through_exchange(x: Tensor, axis: Axis) -> Tensor:
    """Rows swapped between ranks, a function per row, rows swapped back."""
    own = rows_of(x, axis)
    swapped = torch.tanh(all_to_all_first(own, axis)) if len(own) % axis.size == 0 else uneven(own, axis)
    if len(own) % axis.size == 0:
        swapped = all_to_all_first(swapped, axis)
    return gather_rows(swapped, axis)


def uneven(own: Tensor, axis: Axis) -> Tensor:
    """All rows to rank 0 and back."""
    counts = [len(own)] + [0] * (axis.size - 1)
    at_first = [len(own)] * axis.size if axis.index == 0 else [0] * axis.size
    there = torch.tanh(all_to_all_first(own, axis, at_first, counts))
    return all_to_all_first(there, axis, counts, at_first)


def rows_of(x: Tensor, axis: Axis) -> Tensor:
    return scatter_last(x.t(), axis).t()


def gather_rows(x: Tensor, axis: Axis) -> Tensor:
    return gather_last(x.t(), axis).t()


def plain_column_row(x: Tensor) -> Tensor:
    return torch.tanh(x @ weight()) @ weight().t()


SANDWICHES: dict[str, tuple[Callable[[Tensor, Axis], Tensor], Callable[[Tensor], Tensor]]] = {
    "copy-reduce": (column_then_row, plain_column_row),
    "copy-gather": (column_then_gather, lambda x: torch.tanh(x @ weight())),
    "scatter-reduce": (scatter_then_row, lambda x: torch.tanh(x) @ weight()),
    "first-partial": (through_row_shards, plain_column_row),
    "exchange": (through_exchange, torch.tanh),
}


def start_value() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).mul(0.3).requires_grad_()


def sandwich(rank: int, world: int, name: str) -> tuple[Tensor, Tensor]:
    axis = Mesh.create({"tp": world})["tp"]
    x = start_value()
    y = SANDWICHES[name][0](x, axis)
    y.sin().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SANDWICHES)
def test_value_and_gradient_equal_one_process(ranks, name, world):
    x = start_value()
    expected = SANDWICHES[name][1](x)
    expected.sin().sum().backward()
    for y, grad in ranks(sandwich, world, name):
        torch.testing.assert_close(y, expected.detach(), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(grad, x.grad, rtol=1e-12, atol=1e-13)


def check_gradient_numerically(rank: int, world: int, name: str) -> None:
    axis = Mesh.create({"tp": world})["tp"]
    x = start_value().detach()[:, :].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: SANDWICHES[name][0](t, axis), (x,), fast_mode=True)


@pytest.mark.parametrize("name", SANDWICHES)
def test_gradcheck(ranks, name):
    ranks(check_gradient_numerically, 2, name)


def shared_values(rank: int, world: int) -> None:
    """An input that autograd saved and a cotangent that two branches share must not be changed."""
    axis = Mesh.create({"tp": world})["tp"]
    x = torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True)
    squared = x * x
    total = reduce_from(squared, axis) + squared.exp()
    assert torch.equal(squared, torch.full_like(squared, 4.0))
    total.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (1 + squared.detach().exp()) * 4)
    y = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (copy_to(y, axis) + y).backward(torch.full((3,), 5.0, dtype=torch.float64))
    assert y.grad is not None
    assert torch.equal(y.grad, torch.full((3,), 5.0 * world + 5.0, dtype=torch.float64))


@pytest.mark.parametrize("world", [1, 3])
def test_nothing_that_autograd_holds_is_changed(ranks, world):
    ranks(shared_values, world)


def check_refusals(rank: int, world: int) -> None:
    axis = Mesh.create({"tp": world})["tp"]
    with pytest.raises(InputError, match="does not divide a dim of 5"):
        scatter_last(torch.ones(2, 5), axis)
    with pytest.raises(InputError, match="does not divide a dim of 3"):
        reduce_scatter_first(torch.ones(3, 2), axis)


def test_dims_that_do_not_divide_are_refused(ranks):
    ranks(check_refusals, 2)
