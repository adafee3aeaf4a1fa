"""A group of one rank: every collective is the identity, and nothing is sent."""

from __future__ import annotations

from torch import Tensor

from meshwright.comm.transports.base import DONE, Handle, ReduceOp, Splits, Transport
from meshwright.core.errors import InputError


class Alone(Transport):
    """Copies where input and output are different memory."""

    def all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        return DONE

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Handle:
        return _copy(out, x)

    def all_gather(self, out: Tensor, x: Tensor) -> Handle:
        return _copy(out, x)

    def all_to_all(self, out: Tensor, x: Tensor, out_splits: Splits, in_splits: Splits) -> Handle:
        return _copy(out, x)

    def exchange(self, out: Tensor, x: Tensor) -> Handle:
        return _copy(out, x)

    def broadcast(self, x: Tensor, root: int) -> Handle:
        return DONE

    def reduce(self, x: Tensor, root: int) -> Handle:
        return DONE

    def barrier(self) -> Handle:
        return DONE

    def send(self, x: Tensor, to: int, tag: int) -> Handle:
        raise InputError(f"a group of one rank has no peer {to} to send to; keep the value on the rank")

    def recv(self, out: Tensor, source: int, tag: int) -> Handle:
        raise InputError(f"a group of one rank has no peer {source} to receive from; keep the value on the rank")


def _copy(out: Tensor, x: Tensor) -> Handle:
    if out.data_ptr() != x.data_ptr():
        out.view(-1).copy_(x.view(-1))
    return DONE
