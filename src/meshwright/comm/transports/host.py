"""CPU ranks of one host: data through shared memory, signals through Unix sockets.

Every rank owns a small segment that the others map. A collective is a series of rounds:

    round r     fill own slot r mod 2  →  tell every peer  →  hear every peer  →  read the peers' slots

Two slots are enough: who hears "round r" from a peer knows that this peer has read round r−1, so slot
(r+1) mod 2 is free again. Large tensors pass in pieces of a slot, and sums read the peers' memory in
place. A signal is a system call, which also orders memory on every CPU; a peer that dies closes its
socket, so its loss is seen at once and its rank is known.

Nothing moves in the background: a started call runs when it, or a later one of the group, is waited
for. A socket's bytes cost this rank's own cores more time than that (`benchmarks/collectives.py`).
Messages, broadcasts and exchanges go through gloo, and so does everything if the ranks of the group
are not all processes of one Linux host. What goes through gloo is posted when it is started, whatever
memory still waits for: calls across nodes run while those inside a node are waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transports.base import Handle, ReduceOp, Splits, Transport
from meshwright.comm.transports.gloo import SMALL_BYTES, Gloo
from meshwright.comm.transports.reduce import reduce_in_order
from meshwright.comm.transports.segments import SLOT_BYTES, Segments, connect

_ALIGNMENT = 64


class Host(Transport):
    """One group of ranks; those of one host share memory, others fall back to gloo."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._gloo, self._group, self._timeout_s = Gloo(group), group, timeout_s
        self._size, self._index = group.size(), group.rank()
        self._segments: Segments | None = None
        self._connected = False
        self._queue = _Queue()

    def all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        if x.nbytes <= SMALL_BYTES:
            return self._start(lambda s: self._all_reduce_small(s, x, op), lambda: self._gloo.all_reduce(x, op))
        return self._start(lambda s: self._all_reduce_large(s, x, op), lambda: self._gloo.all_reduce(x, op))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Handle:
        return self._start(
            lambda s: self._reduce_scatter(s, out.view(-1), x.view(self._size, -1)),
            lambda: self._gloo.reduce_scatter(out, x),
        )

    def all_gather(self, out: Tensor, x: Tensor) -> Handle:
        return self._start(
            lambda s: self._all_gather(s, out.view(self._size, -1), x.view(-1)),
            lambda: self._gloo.all_gather(out, x),
        )

    def all_to_all(self, out: Tensor, x: Tensor, out_splits: Splits, in_splits: Splits) -> Handle:
        return self._gloo.all_to_all(out, x, out_splits, in_splits)

    def broadcast(self, x: Tensor, root: int) -> Handle:
        return self._gloo.broadcast(x, root)

    def barrier(self) -> Handle:
        return self._gloo.barrier()

    def send(self, x: Tensor, to: int, tag: int) -> Handle:
        return self._gloo.send(x, to, tag)

    def recv(self, out: Tensor, source: int, tag: int) -> Handle:
        return self._gloo.recv(out, source, tag)

    def _start(self, run: Callable[[Segments], None], over_gloo: Callable[[], Handle]) -> Handle:
        """Queue a call. All ranks start in the same order, and calls run in the order of their starts."""
        if not self._connected:
            self._segments, self._connected = connect(self._group, self._timeout_s), True
        segments = self._segments
        if segments is None:
            return over_gloo()
        return self._queue.add(lambda: run(segments))

    def _peers(self) -> Iterator[int]:
        """The other ranks, the next one first, so that not all read the same memory at once."""
        return ((self._index + step) % self._size for step in range(1, self._size))

    def _all_reduce_small(self, segments: Segments, x: Tensor, op: ReduceOp) -> None:
        """One round: every rank reads all and reduces in rank order."""
        flat = x.view(-1)
        if not flat.numel():
            return
        segments.own(flat.dtype, flat.numel()).copy_(flat)
        segments.turn()
        parts = [flat if j == self._index else segments.peer(j, x.dtype, x.numel()) for j in range(self._size)]
        reduce_in_order(parts, flat, op)

    def _all_reduce_large(self, segments: Segments, x: Tensor, op: ReduceOp) -> None:
        """Two rounds per piece: every rank reduces its block of the piece, then reads the others' blocks."""
        per_slot = SLOT_BYTES // x.element_size()
        for piece in x.view(-1).split(per_slot):
            blocks = piece.tensor_split(self._size)
            offsets = _offsets(blocks)
            slot = segments.own(x.dtype, piece.numel())
            for j in self._peers():
                slot[offsets[j] : offsets[j + 1]].copy_(blocks[j])
            segments.turn()
            parts = [
                blocks[self._index]
                if j == self._index
                else segments.peer(j, x.dtype, piece.numel())[offsets[self._index] : offsets[self._index + 1]]
                for j in range(self._size)
            ]
            reduce_in_order(parts, blocks[self._index], op)
            own = blocks[self._index]
            segments.own(x.dtype, own.numel()).copy_(own)
            segments.turn()
            for j in self._peers():
                blocks[j].copy_(segments.peer(j, x.dtype, blocks[j].numel()))

    def _reduce_scatter(self, segments: Segments, out: Tensor, x: Tensor) -> None:
        """out [n] ← row `index` of Σ x [P, n]; one round per piece of columns."""
        per_block = SLOT_BYTES // self._size // _ALIGNMENT * _ALIGNMENT // x.element_size()
        for start in range(0, out.numel(), per_block):
            columns = slice(start, min(start + per_block, out.numel()))
            width = columns.stop - columns.start
            slot = segments.own(x.dtype, self._size * width).view(self._size, width)
            for j in self._peers():
                slot[j].copy_(x[j, columns])
            segments.turn()
            parts = [
                x[j, columns]
                if j == self._index
                else segments.peer(j, x.dtype, self._size * width).view(self._size, width)[self._index]
                for j in range(self._size)
            ]
            reduce_in_order(parts, out[columns], "sum")

    def _all_gather(self, segments: Segments, out: Tensor, x: Tensor) -> None:
        """out [P, n] ← x [n] of all ranks; one round per piece."""
        if out[self._index].data_ptr() != x.data_ptr():
            out[self._index].copy_(x)
        per_slot = SLOT_BYTES // x.element_size()
        for start in range(0, x.numel(), per_slot):
            columns = slice(start, min(start + per_slot, x.numel()))
            width = columns.stop - columns.start
            segments.own(x.dtype, width).copy_(x[columns])
            segments.turn()
            for j in self._peers():
                out[j, columns].copy_(segments.peer(j, x.dtype, width))


class _Queue:
    """Started calls of a group, in order. After one has failed the group is lost, and so are the rest."""

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque()
        self._error: RuntimeError | None = None

    def add(self, run: Callable[[], None]) -> _Call:
        call = _Call(self, run)
        self._calls.append(call)
        return call

    def run_until(self, call: _Call) -> None:
        while self._error is None and not call.done:
            first = self._calls.popleft()
            try:
                first.run()
            except RuntimeError as error:
                self._error = error
            first.done = True
        if self._error is not None:
            raise self._error


class _Call:
    """A started call: runs, after all that were started before it, when it is waited for."""

    def __init__(self, queue: _Queue, run: Callable[[], None]) -> None:
        self._queue, self.run, self.done = queue, run, False

    def wait(self) -> None:
        self._queue.run_until(self)


def _offsets(blocks: Sequence[Tensor]) -> list[int]:
    """Where each block starts, and where the last one ends."""
    ends = [0]
    for block in blocks:
        ends.append(ends[-1] + block.numel())
    return ends
