"""GPU ranks: NCCL's own collectives. `wait` orders the current CUDA stream, it does not block the host."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transports.base import Handle, Pending
from meshwright.comm.transports.group import Group


class Nccl(Group):
    """One NCCL communicator. Messages are ordered per pair of ranks; NCCL has no tags."""

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Handle:
        work = dist.reduce_scatter_single(out.view(-1), x.view(-1), group=self._group, async_op=True)
        return Pending([work], alive=[out, x])

    def all_gather(self, out: Tensor, x: Tensor) -> Handle:
        work = dist.all_gather_single(out.view(-1), x.view(-1), group=self._group, async_op=True)
        return Pending([work], alive=[out, x])

    def reduce(self, x: Tensor, root: int) -> Handle:
        return Pending([dist.reduce(x, group=self._group, group_dst=root, async_op=True)], alive=[x])

    def send(self, x: Tensor, to: int, tag: int) -> Handle:
        return Pending([self._group.send([x], to, tag)], alive=[x])

    def recv(self, out: Tensor, source: int, tag: int) -> Handle:
        return Pending([self._group.recv([out], source, tag)], alive=[out])
