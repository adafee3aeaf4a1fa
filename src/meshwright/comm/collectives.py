"""Collectives over one axis, raw forms: blocking, and asynchronous (`*_start`, returns a Work).

Tensors are contiguous, of any shape; blocks are taken along dim 0, in order of the rank's position.
Nothing here is seen by autograd: for that, take :mod:`meshwright.comm.differentiable`.
All ranks of an axis start the same calls in the same order, and each rank waits for all that it
started: a rank that waits may need a peer to wait too.
Each call writes one row in the ledger; over an axis of one rank it copies, and writes none.

Semantics and costs: Chan et al., Collective communication: theory, practice, and experience, 2007.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from meshwright.comm.mesh import Axis
from meshwright.comm.transports.base import Handle, ReduceOp
from meshwright.comm.work import Work, begin, begin_counted
from meshwright.core.errors import InputError


def all_reduce(x: Tensor, axis: Axis, op: ReduceOp = "sum") -> Tensor:
    """x ← Σ or max over ranks, in place, bit-identical on all ranks. Returns x. Raises RankError."""
    all_reduce_start(x, axis, op).wait()
    return x


def all_reduce_start(x: Tensor, axis: Axis, op: ReduceOp = "sum") -> Work:
    """Asynchronous :func:`all_reduce`."""
    _check_contiguous("all_reduce", x)
    return begin_counted("all_reduce", axis, x.nbytes, lambda: axis.transport.all_reduce(x, op))


def reduce_scatter(out: Tensor, x: Tensor, axis: Axis) -> Tensor:
    """out [n/P, ...] ← this rank's block of Σ x [n, ...] over P ranks. Returns out. Raises RankError.

    `out` may be this rank's block of `x`; the other blocks of `x` are left as they are.
    """
    reduce_scatter_start(out, x, axis).wait()
    return out


def reduce_scatter_start(out: Tensor, x: Tensor, axis: Axis) -> Work:
    """Asynchronous :func:`reduce_scatter`. `x` may be changed after `wait` only."""
    _check_contiguous("reduce_scatter", out, x)
    _check_blocks("reduce_scatter", full=x, block=out, axis=axis)
    return begin_counted("reduce_scatter", axis, x.nbytes, lambda: axis.transport.reduce_scatter(out, x))


def all_gather(out: Tensor, x: Tensor, axis: Axis) -> Tensor:
    """out [n·P, ...] ← x [n, ...] of all P ranks, in order. Returns out. Raises RankError.

    `x` may be this rank's block of `out`: then nothing is copied.
    """
    all_gather_start(out, x, axis).wait()
    return out


def all_gather_start(out: Tensor, x: Tensor, axis: Axis) -> Work:
    """Asynchronous :func:`all_gather`; blocks are received into `out` directly."""
    _check_contiguous("all_gather", out, x)
    _check_blocks("all_gather", full=out, block=x, axis=axis)
    return begin_counted("all_gather", axis, out.nbytes, lambda: axis.transport.all_gather(out, x))


def all_to_all(
    out: Tensor,
    x: Tensor,
    axis: Axis,
    out_splits: Sequence[int] | None = None,
    in_splits: Sequence[int] | None = None,
) -> Tensor:
    """Rows of x [n, ...] to all ranks, rows of out [m, ...] from all ranks. Returns out. Raises RankError.

    Args:
        out_splits: rows that come from each rank; equal parts by default, on all ranks or on none.
        in_splits: rows that go to each rank; equal parts by default. A rank's `in_splits[j]` is
            rank j's `out_splits` for this rank.
    """
    all_to_all_start(out, x, axis, out_splits, in_splits).wait()
    return out


def all_to_all_start(
    out: Tensor,
    x: Tensor,
    axis: Axis,
    out_splits: Sequence[int] | None = None,
    in_splits: Sequence[int] | None = None,
) -> Work:
    """Asynchronous :func:`all_to_all`."""
    _check_contiguous("all_to_all", out, x)
    received, sent = _elements(out, axis, out_splits), _elements(x, axis, in_splits)
    sent_bytes = (x.numel() - sent[axis.index]) * x.element_size()

    def post() -> Handle:
        if out_splits is None and in_splits is None:
            return axis.transport.exchange(out, x)
        return axis.transport.all_to_all(out, x, received, sent)

    return begin_counted("all_to_all", axis, x.nbytes, post, sent_bytes)


def broadcast(x: Tensor, axis: Axis, root: int) -> Tensor:
    """x ← x of the rank at position `root`, in place. Returns x. Raises RankError."""
    broadcast_start(x, axis, root).wait()
    return x


def broadcast_start(x: Tensor, axis: Axis, root: int) -> Work:
    """Asynchronous :func:`broadcast`."""
    _check_contiguous("broadcast", x)
    _check_root("broadcast from", root, axis)
    return begin_counted("broadcast", axis, x.nbytes, lambda: axis.transport.broadcast(x, root))


def reduce(x: Tensor, axis: Axis, root: int) -> Tensor:
    """On the rank at position `root` x ← Σ x over ranks, in place; on the others x is left as it is. Returns x.

    Raises RankError.
    """
    reduce_start(x, axis, root).wait()
    return x


def reduce_start(x: Tensor, axis: Axis, root: int) -> Work:
    """Asynchronous :func:`reduce`. `x` may be changed after `wait` only."""
    _check_contiguous("reduce", x)
    _check_root("reduce to", root, axis)
    return begin_counted("reduce", axis, x.nbytes, lambda: axis.transport.reduce(x, root))


def barrier(axis: Axis) -> None:
    """Return when all ranks of the axis have come here. Not a row of the ledger. Raises RankError."""
    begin("barrier", axis, axis.transport.barrier).wait()


def _check_root(what: str, root: int, axis: Axis) -> None:
    if not 0 <= root < axis.size:
        raise InputError(f"{what} position {root} of {axis}: positions go from 0 to {axis.size - 1}")


def _check_contiguous(primitive: str, *tensors: Tensor) -> None:
    for x in tensors:
        if not x.is_contiguous():
            raise InputError(
                f"{primitive} of shape {list(x.shape)} with strides {list(x.stride())}: tensors must be contiguous; "
                f"call .contiguous() first"
            )


def _check_blocks(primitive: str, full: Tensor, block: Tensor, axis: Axis) -> None:
    if full.numel() != block.numel() * axis.size or full.dtype != block.dtype:
        raise InputError(
            f"{primitive} over {axis.size} ranks between {full.numel()} {full.dtype} and {block.numel()} "
            f"{block.dtype} elements: the full tensor holds one equal block per rank, of one dtype"
        )


def _elements(x: Tensor, axis: Axis, splits: Sequence[int] | None) -> list[int]:
    """Elements per rank, from rows per rank."""
    if splits is None:
        if len(x) % axis.size:
            raise InputError(f"all_to_all: {len(x)} rows are not {axis.size} equal parts; give the splits")
        splits = [len(x) // axis.size] * axis.size
    if len(splits) != axis.size or sum(splits) != len(x) or min(splits) < 0:
        raise InputError(f"all_to_all: splits {list(splits)} do not cut {len(x)} rows into {axis.size} parts")
    width = prod(x.shape[1:])
    return [rows * width for rows in splits]
