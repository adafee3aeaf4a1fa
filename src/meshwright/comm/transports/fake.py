"""Ranks that are not there: every call ends at once, and no byte moves. Only the ledger sees it.

For rehearsals with tensors that have a shape and no values; what a call would have brought is never looked at.
"""

from __future__ import annotations

from torch import Tensor

from meshwright.comm.transports.base import DONE, Handle, ReduceOp, Splits, Transport


class Fake(Transport):
    """Leaves all tensors as they are."""

    def all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        return DONE

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Handle:
        return DONE

    def all_gather(self, out: Tensor, x: Tensor) -> Handle:
        return DONE

    def all_to_all(self, out: Tensor, x: Tensor, out_splits: Splits, in_splits: Splits) -> Handle:
        return DONE

    def exchange(self, out: Tensor, x: Tensor) -> Handle:
        return DONE

    def broadcast(self, x: Tensor, root: int) -> Handle:
        return DONE

    def reduce(self, x: Tensor, root: int) -> Handle:
        return DONE

    def barrier(self) -> Handle:
        return DONE

    def send(self, x: Tensor, to: int, tag: int) -> Handle:
        return DONE

    def recv(self, out: Tensor, source: int, tag: int) -> Handle:
        return DONE
