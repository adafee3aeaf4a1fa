"""Ways to break a run in a worker, from outside: reductions left out, scales and counts that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from torch import Tensor

from meshwright.comm.ledger import Ledger
from meshwright.comm.mesh import Axis, Mesh
from meshwright.comm.transports.alone import Alone
from meshwright.comm.transports.base import Handle, ReduceOp, Splits
from meshwright.core.placement import Placement
from meshwright.parallel import states
from meshwright.parallel.apply import ParallelModel

Mutation = Callable[[pytest.MonkeyPatch, Mesh], None]


@dataclass
class _Lacking(Alone):
    """A transport without some of one primitive's calls: those leave this rank's own part as it is."""

    whole: Any
    primitive: str
    phase: str
    is_left_out: Callable[[int], bool]
    """Of the call's number, counted from 0 within the phase."""
    rank: int
    size: int
    ledger: Ledger
    num_calls: int = 0

    def _leaves_out(self, primitive: str) -> bool:
        if primitive != self.primitive or self.ledger.current_phase != self.phase:
            return False
        self.num_calls += 1
        return self.is_left_out(self.num_calls - 1)

    def all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        return super().all_reduce(x, op) if self._leaves_out("all_reduce") else self.whole.all_reduce(x, op)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Handle:
        if self._leaves_out("reduce_scatter"):
            return super().reduce_scatter(out, x.view(self.size, -1)[self.rank])
        return self.whole.reduce_scatter(out, x)

    def all_gather(self, out: Tensor, x: Tensor) -> Handle:
        if self._leaves_out("all_gather"):
            for peer, block in enumerate(out.view(self.size, -1)):
                if peer != self.rank:
                    block.zero_()  # else memory that was used before may hold what is missing
            return super().all_gather(out.view(self.size, -1)[self.rank], x)
        return self.whole.all_gather(out, x)

    def broadcast(self, x: Tensor, root: int) -> Handle:
        if self._leaves_out("broadcast"):
            if self.rank != root:
                x.zero_()  # likewise
            return super().broadcast(x, root)
        return self.whole.broadcast(x, root)

    def reduce(self, x: Tensor, root: int) -> Handle:
        return super().reduce(x, root) if self._leaves_out("reduce") else self.whole.reduce(x, root)

    def all_to_all(self, out: Tensor, x: Tensor, out_splits: Splits, in_splits: Splits) -> Handle:
        if self._leaves_out("all_to_all"):
            return super().all_to_all(out, x, out_splits, in_splits)
        return self.whole.all_to_all(out, x, out_splits, in_splits)

    def exchange(self, out: Tensor, x: Tensor) -> Handle:
        return super().exchange(out, x) if self._leaves_out("all_to_all") else self.whole.exchange(out, x)

    def send(self, x: Tensor, to: int, tag: int) -> Handle:
        handle: Handle = self.whole.send(x, to, tag)
        return handle

    def recv(self, out: Tensor, source: int, tag: int) -> Handle:
        handle: Handle = self.whole.recv(out, source, tag)
        return handle


@dataclass
class Calls:
    """The collective calls of one rank in order, on all axes but `world`, and which one of them is left out."""

    made: list[str]
    """`all_reduce tp_row forward` of each."""
    left_out: int | None = None

    def of_axis(self, axis: Axis, ledger: Ledger) -> Axis:
        """The same axis, whose calls are counted here."""
        lacking = _Numbered(axis.transport, axis.name, self, axis.index, axis.size, ledger)
        return replace(axis, transport=lacking)


class _Numbered(_Lacking):
    """A transport whose calls are numbered over all axes."""

    def __init__(self, whole: Any, axis: str, calls: Calls, rank: int, size: int, ledger: Ledger) -> None:
        super().__init__(whole, "", "", lambda number: False, rank, size, ledger)
        self._axis, self._calls = axis, calls

    def _leaves_out(self, primitive: str) -> bool:
        self._calls.made.append(f"{primitive} {self._axis} {self.ledger.current_phase}")
        return len(self._calls.made) - 1 == self._calls.left_out


def without(
    axis: str, primitive: str, phase: str, is_left_out: Callable[[int], bool] = lambda number: True
) -> Mutation:
    """Leave out this primitive on this axis in this phase, always or for some calls. Still counted by the ledger."""

    def apply(patch: pytest.MonkeyPatch, mesh: Mesh) -> None:
        whole = mesh.axes[axis]
        lacking = _Lacking(whole.transport, primitive, phase, is_left_out, whole.index, whole.size, mesh.ledger)
        patch.setitem(mesh.axes, axis, replace(whole, transport=lacking))

    return apply


def every(period: int, at: int) -> Callable[[int], bool]:
    """Call `at` of every `period` calls."""
    return lambda number: number % period == at % period


def tokens_times(factor: float) -> Mutation:
    """The step's loss is divided by a wrong number of tokens."""

    def apply(patch: pytest.MonkeyPatch, mesh: Mesh) -> None:
        right = ParallelModel.count_step
        patch.setattr(ParallelModel, "count_step", lambda self, batches: right(self, batches) * factor)

    return apply


def counted_again(is_again: Callable[[Placement], bool]) -> Mutation:
    """The norm counts copies of these parameters too."""

    def apply(patch: pytest.MonkeyPatch, mesh: Mesh) -> None:
        right = states.placements

        def wrong(*args: Any) -> tuple[Placement, ...]:
            return tuple(replace(p, owned=p.owned or is_again(p)) for p in right(*args))

        patch.setattr(states, "placements", wrong)

    return apply


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Mutation:
    """`make` turns what stands at `owner.name` into what shall stand there."""

    def apply(patch: pytest.MonkeyPatch, mesh: Mesh) -> None:
        patch.setattr(owner, name, make(getattr(owner, name)))

    return apply
