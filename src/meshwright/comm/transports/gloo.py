"""CPU ranks over sockets: gloo's messages, and its own all-reduce where that is the faster one.

What is faster was measured by `benchmarks/collectives.py`:

    reduce_scatter   direct exchange + local sum: gloo's own is an all-reduce, 2 to 5 times slower
    all_gather       direct exchange into the output: gloo's own copies twice
    reduce           direct to the root, and a sum there in rank order
    all_to_all       gloo's own: as fast as a direct exchange, faster for small tensors
    all_reduce       up to SMALL_BYTES every rank sends all to all and sums; above it gloo's ring.
                     16-bit floats of three and more ranks go reduce-scatter + all-gather, because gloo would
                     round every partial sum

A direct exchange posts all sends and receives at once, so that they progress in the background, and
sums in rank order: the same bits on every rank and in every run, whatever arrives first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transports.base import DONE, Handle, Pending, ReduceOp
from meshwright.comm.transports.group import Group
from meshwright.comm.transports.reduce import LOW_PRECISION, reduce_in_order

SMALL_BYTES = 64 * 1024
FIRST_OWN_TAG = 1 << 24
"""Tags below are the caller's; from here on they count the exchanges of this transport."""
_NUM_OWN_TAGS = 1 << 20


class Gloo(Group):
    """One gloo group; `size` ranks, this one is `index`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._size, self._index = group.size(), group.rank()
        self._sequence = itertools.count()

    def all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        if x.nbytes <= SMALL_BYTES:
            return self._all_reduce_small(x, op)
        if op == "sum" and x.dtype in LOW_PRECISION and self._size > 2:
            return self._all_reduce_low_precision(x)
        return super().all_reduce(x, op)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Handle:
        return self._reduce_blocks(self._blocks(x), out)

    def all_gather(self, out: Tensor, x: Tensor) -> Handle:
        blocks = self._blocks(out)
        _copy_own(blocks[self._index], x)
        return self._gather_blocks(blocks)

    def reduce(self, x: Tensor, root: int) -> Handle:
        flat, is_root = x.view(-1), self._index == root
        if not is_root:
            return self._one_way(flat, to=root)
        parts = [flat if peer == root else torch.empty_like(flat) for peer in range(self._size)]
        return self._one_way(flat, received=parts)

    def send(self, x: Tensor, to: int, tag: int) -> Handle:
        return Pending([self._group.send([x.view(-1)], to, tag)], alive=[x]) if x.numel() else DONE

    def recv(self, out: Tensor, source: int, tag: int) -> Handle:
        return Pending([self._group.recv([out.view(-1)], source, tag)], alive=[out]) if out.numel() else DONE

    def _one_way(self, flat: Tensor, to: int | None = None, received: Sequence[Tensor] = ()) -> Handle:
        """Send `flat` to one rank, or receive from all others and sum in rank order."""
        tag = FIRST_OWN_TAG + next(self._sequence) % _NUM_OWN_TAGS
        if not flat.numel():
            return DONE
        if to is not None:
            return Pending([self._group.send([flat], to, tag)], alive=[flat])
        works = [self._group.recv([part], peer, tag) for peer, part in enumerate(received) if peer != self._index]
        return Pending(works, lambda: self._reduce(received, flat, "sum"), [flat, *received])

    def _all_reduce_small(self, x: Tensor, op: ReduceOp) -> Handle:
        flat = x.view(-1)
        parts = [flat if peer == self._index else torch.empty_like(flat) for peer in range(self._size)]
        works = self._exchange([flat] * self._size, parts)
        return Pending(works, lambda: self._reduce(parts, flat, op), [x, *parts])

    def _all_reduce_low_precision(self, x: Tensor) -> Handle:
        blocks = self._blocks(x)
        reduced = self._reduce_blocks(blocks, blocks[self._index])
        return Pending([reduced], lambda: self._gather_blocks(blocks).wait(), [x])

    def _blocks(self, x: Tensor) -> Sequence[Tensor]:
        """One flat block per rank, as even as can be."""
        return x.view(-1).tensor_split(self._size)

    def _reduce_blocks(self, blocks: Sequence[Tensor], out: Tensor) -> Pending:
        own = blocks[self._index]
        parts = [own if peer == self._index else torch.empty_like(own) for peer in range(self._size)]
        works = self._exchange(blocks, parts)
        return Pending(works, lambda: self._reduce(parts, out.view(-1), "sum"), [*blocks, out, *parts])

    def _reduce(self, parts: Sequence[Tensor], out: Tensor, op: ReduceOp) -> None:
        """out ← parts reduced in order. The own part is kept (it may be `out`), a peer's is scratch."""
        reduce_in_order(parts, out, op, scratch=parts[1 if self._index == 0 else 0])

    def _gather_blocks(self, blocks: Sequence[Tensor]) -> Pending:
        return Pending(self._exchange([blocks[self._index]] * self._size, blocks), alive=blocks)

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[Handle]:
        """Post sent[j] to and received[j] from every other rank j; empty messages are not sent.

        Nearest neighbours first, each rank starting at another one, so that no rank is flooded.
        """
        tag = FIRST_OWN_TAG + next(self._sequence) % _NUM_OWN_TAGS
        works: list[Handle] = []
        for step in range(1, self._size):
            source, to = (self._index - step) % self._size, (self._index + step) % self._size
            if received[source].numel():
                works.append(self._group.recv([received[source]], source, tag))
            if sent[to].numel():
                works.append(self._group.send([sent[to]], to, tag))
        return works


def _copy_own(out: Tensor, x: Tensor) -> None:
    if out.data_ptr() != x.data_ptr():
        out.copy_(x.view(-1))
