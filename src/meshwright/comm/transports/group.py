"""A process group's own calls: what gloo and NCCL do alike."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transports.base import Handle, Pending, ReduceOp, Splits, Transport

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Group(Transport):
    """The part of a transport that one process group does by itself."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        return Pending([dist.all_reduce(x, _OPS[op], group=self._group, async_op=True)], alive=[x])

    def all_to_all(self, out: Tensor, x: Tensor, out_splits: Splits, in_splits: Splits) -> Handle:
        work = dist.all_to_all_single(
            out.view(-1), x.view(-1), list(out_splits), list(in_splits), group=self._group, async_op=True
        )
        return Pending([work], alive=[out, x])

    def exchange(self, out: Tensor, x: Tensor) -> Handle:
        work = dist.all_to_all_single(out.view(-1), x.view(-1), group=self._group, async_op=True)
        return Pending([work], alive=[out, x])

    def broadcast(self, x: Tensor, root: int) -> Handle:
        return Pending([dist.broadcast(x, group=self._group, group_src=root, async_op=True)], alive=[x])

    def barrier(self) -> Handle:
        return Pending([dist.barrier(group=self._group, async_op=True)])
