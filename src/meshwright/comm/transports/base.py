"""What every way of moving bytes offers to `comm.collectives` and `comm.p2p`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from torch import Tensor

ReduceOp = Literal["sum", "max"]
Splits = Sequence[int]
"""Rows (dim 0) exchanged with each rank of the group."""


class Handle(Protocol):
    """Something that was started and can be waited for; a `torch.distributed.Work` is one."""

    def wait(self) -> object: ...


class Pending:
    """Started handles, and what remains to be done with what they bring.

    Keeps every tensor in `alive` from being freed, and its memory from being reused, until `wait`.
    """

    __slots__ = ("_alive", "_finish", "_handles")

    def __init__(
        self,
        handles: Sequence[Handle] = (),
        finish: Callable[[], None] | None = None,
        alive: Sequence[Tensor] = (),
    ) -> None:
        self._handles, self._finish, self._alive = handles, finish, alive

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
        if self._finish is not None:
            self._finish()
        self._handles, self._finish, self._alive = (), None, ()


DONE = Pending()
"""Nothing to wait for."""


class Transport(ABC):
    """One group of ranks. Tensors are contiguous and of agreeing sizes: `comm.collectives` has checked.

    Every method starts the operation and returns at once; results are there after `wait`.
    All ranks of the group call the collective ones in the same order.
    """

    @abstractmethod
    def all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        """x ← op over ranks, bit-identical on all of them. In place."""

    @abstractmethod
    def reduce_scatter(self, out: Tensor, x: Tensor) -> Handle:
        """out ← this rank's block of Σ x. `out` may be that block of `x` itself."""

    @abstractmethod
    def all_gather(self, out: Tensor, x: Tensor) -> Handle:
        """out ← the blocks x of all ranks, in order. `x` may be this rank's block of `out` itself."""

    @abstractmethod
    def all_to_all(self, out: Tensor, x: Tensor, out_splits: Splits, in_splits: Splits) -> Handle:
        """Block j of x to rank j; block j of out from rank j. Splits count elements here."""

    @abstractmethod
    def exchange(self, out: Tensor, x: Tensor) -> Handle:
        """Likewise, in equal blocks."""

    @abstractmethod
    def broadcast(self, x: Tensor, root: int) -> Handle:
        """x ← x of rank `root`."""

    @abstractmethod
    def reduce(self, x: Tensor, root: int) -> Handle:
        """x ← Σ x on rank `root`; x of the others is only read."""

    @abstractmethod
    def barrier(self) -> Handle:
        """Done when all ranks have called it."""

    @abstractmethod
    def send(self, x: Tensor, to: int, tag: int) -> Handle:
        """Send x to rank `to`. x may be changed after `wait` only."""

    @abstractmethod
    def recv(self, out: Tensor, source: int, tag: int) -> Handle:
        """Receive into `out` from rank `source`."""
