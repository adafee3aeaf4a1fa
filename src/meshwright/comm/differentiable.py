"""Collectives that autograd sees, each beside its adjoint.

    function               forward              backward             consumers downstream
    copy_to                identity             all-reduce           sharded    (input of a column-parallel layer)
    reduce_from            all-reduce           identity             replicated (output of a row-parallel layer)
    gather_last            all-gather, last     own slice            replicated
    scatter_last           own slice, last      all-gather           sharded
    gather_first           all-gather, dim 0    own block            replicated
    scatter_first          own block, dim 0     all-gather           sharded
    gather_first_partial   all-gather, dim 0    reduce-scatter       sharded
    reduce_scatter_first   reduce-scatter       all-gather           sharded along dim 0
    all_to_all_first       all-to-all, dim 0    all-to-all back      sharded; in two halves as all_to_all_first_start
                                                                     and arrived

Which adjoint is right is decided by one question: do the ranks downstream hold identical copies of the
cotangent (then backward is identity or slice), or partial ones (then it is a sum)?
No input and no cotangent is changed in place, since autograd may hold them elsewhere too.

Source: Megatron-LM, Shoeybi et al. 2019, §3 (f and g); Korthikanti et al. 2022, §4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.collectives import all_gather, all_reduce, all_to_all, all_to_all_start, reduce_scatter
from meshwright.comm.mesh import Axis
from meshwright.comm.work import Work
from meshwright.core.errors import InputError

Map = Callable[[Tensor, Axis], Tensor]


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """x [...] as it is, for consumers that each use it for their own shard. Adjoint: all-reduce."""
    return _apply(x, axis, _same, _sum)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Σ x [...] over ranks, for consumers that are replicated. Adjoint: identity."""
    return _apply(x, axis, _sum, _same)


def gather_last(x: Tensor, axis: Axis) -> Tensor:
    """x [..., n] of all P ranks as [..., n·P], for replicated consumers. Adjoint: own slice."""
    return _apply(x, axis, _join_last, _own_last)


def scatter_last(x: Tensor, axis: Axis) -> Tensor:
    """Own slice [..., n/P] of a replicated x [..., n]. Adjoint: all-gather along the last dim.

    Raises:
        InputError: the ranks do not divide the last dim.
    """
    _check_divides("scatter_last", x.shape[-1], axis)
    return _apply(x, axis, _own_last, _join_last)


def gather_first(x: Tensor, axis: Axis) -> Tensor:
    """x [n, ...] of all P ranks as [n·P, ...], for replicated consumers. Adjoint: own block."""
    return _apply(x, axis, _join_first, _own_first)


def scatter_first(x: Tensor, axis: Axis) -> Tensor:
    """Own block [n/P, ...] of a replicated x [n, ...]. Adjoint: all-gather along dim 0.

    Raises:
        InputError: the ranks do not divide dim 0.
    """
    _check_divides("scatter_first", x.shape[0], axis)
    return _apply(x, axis, _own_first, _join_first)


def gather_first_partial(x: Tensor, axis: Axis) -> Tensor:
    """x [n, ...] of all P ranks as [n·P, ...], for sharded consumers. Adjoint: reduce-scatter along dim 0."""
    return _apply(x, axis, _join_first, _sum_own_first)


def reduce_scatter_first(x: Tensor, axis: Axis) -> Tensor:
    """Own block [n/P, ...] of Σ x [n, ...] over P ranks. Adjoint: all-gather along dim 0.

    Raises:
        InputError: the ranks do not divide dim 0.
    """
    _check_divides("reduce_scatter_first", x.shape[0], axis)
    return _apply(x, axis, _sum_own_first, _join_first)


def all_to_all_first(
    x: Tensor, axis: Axis, out_splits: Sequence[int] | None = None, in_splits: Sequence[int] | None = None
) -> Tensor:
    """Rows of x [n, ...] to all ranks, returns the rows from all ranks [m, ...].

    Splits as in :func:`meshwright.comm.collectives.all_to_all`. Adjoint: all-to-all with the splits swapped.
    """

    def forward(t: Tensor, on: Axis) -> Tensor:
        return _exchange_rows(t, on, out_splits, in_splits)

    def adjoint(t: Tensor, on: Axis) -> Tensor:
        return _exchange_rows(t, on, in_splits, out_splits)

    return _apply(x, axis, forward, adjoint)


class Flight:
    """An exchange under way, forward or backward: its work, and in backward where its rows go."""

    __slots__ = ("received", "work")

    def __init__(self) -> None:
        self.work: Work | None = None
        self.received: Tensor | None = None

    def wait(self) -> None:
        """Until it is there."""
        work, self.work = self.work, None
        if work is not None:
            work.wait()


def all_to_all_first_start(
    x: Tensor, axis: Axis, out_splits: Sequence[int], in_splits: Sequence[int]
) -> tuple[Tensor, Flight]:
    """Asynchronous :func:`all_to_all_first`: (rows [m, ...] to give to :func:`arrived`, and nobody else; the flight).

    What runs between the two runs while rows travel, and its backward while their gradients travel back.
    """
    flight = Flight()
    out: Tensor = _Depart.apply(x, axis, tuple(out_splits), tuple(in_splits), flight)
    return out, flight


def arrived(x: Tensor, axis: Axis, out_splits: Sequence[int], in_splits: Sequence[int], flight: Flight) -> Tensor:
    """The rows [m, ...] of a flight that was started with these splits, when they are there."""
    out: Tensor = _Arrive.apply(x, axis, tuple(out_splits), tuple(in_splits), flight)
    return out


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, out_splits: tuple[int, ...], in_splits: tuple[int, ...], flight: Flight
    ) -> Tensor:
        ctx.flight = flight
        out = x.new_empty((sum(out_splits), *x.shape[1:]))
        flight.work = all_to_all_start(out, x.contiguous(), axis, out_splits, in_splits)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        ctx.flight.wait()  # what has come is not what autograd hands on, which has the wrong shape
        received, ctx.flight.received = ctx.flight.received, None
        return received, None, None, None, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, out_splits: tuple[int, ...], in_splits: tuple[int, ...], flight: Flight
    ) -> Tensor:
        ctx.of = axis, out_splits, in_splits, flight
        flight.wait()
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        axis, out_splits, in_splits, flight = ctx.of
        grad = grad.contiguous()
        flight.received = grad.new_empty((sum(in_splits), *grad.shape[1:]))
        flight.work = all_to_all_start(flight.received, grad, axis, in_splits, out_splits)
        return grad, None, None, None, None


class _Pair(torch.autograd.Function):
    """A linear map over an axis, and its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forward: Map, adjoint: Map) -> Tensor:
        ctx.axis, ctx.adjoint = axis, adjoint
        return forward(x, axis)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.adjoint(grad, ctx.axis), None, None, None


def _apply(x: Tensor, axis: Axis, forward: Map, adjoint: Map) -> Tensor:
    out: Tensor = _Pair.apply(x, axis, forward, adjoint)
    return out


def _same(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, axis: Axis) -> Tensor:
    if axis.size == 1:
        return _same(x, axis)  # nothing is written, so nothing needs a copy
    return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)


def _join_first(x: Tensor, axis: Axis) -> Tensor:
    return all_gather(x.new_empty((len(x) * axis.size, *x.shape[1:])), x.contiguous(), axis)


def _own_first(x: Tensor, axis: Axis) -> Tensor:
    return x.chunk(axis.size)[axis.index].clone(memory_format=torch.contiguous_format)


def _sum_own_first(x: Tensor, axis: Axis) -> Tensor:
    return reduce_scatter(x.new_empty((len(x) // axis.size, *x.shape[1:])), x.contiguous(), axis)


def _join_last(x: Tensor, axis: Axis) -> Tensor:
    gathered = all_gather(x.new_empty((axis.size, *x.shape)), x.contiguous(), axis)
    return gathered.movedim(0, -2).flatten(-2)


def _own_last(x: Tensor, axis: Axis) -> Tensor:
    width = x.shape[-1] // axis.size
    return x.narrow(-1, axis.index * width, width).clone(memory_format=torch.contiguous_format)


def _exchange_rows(x: Tensor, axis: Axis, out_splits: Sequence[int] | None, in_splits: Sequence[int] | None) -> Tensor:
    rows = len(x) if out_splits is None else sum(out_splits)
    return all_to_all(x.new_empty((rows, *x.shape[1:])), x.contiguous(), axis, out_splits, in_splits)


def _check_divides(what: str, length: int, axis: Axis) -> None:
    if length % axis.size:
        raise InputError(f"{what}: {axis} of {axis.size} ranks does not divide a dim of {length}")
