"""CPU ranks of one host: data through shared memory, signals through Unix sockets.

Every rank owns a small segment that the others map. A collective is a series of rounds:

    round r     fill own slot r mod 2  →  tell every peer  →  hear every peer  →  read the peers' slots

Two slots are enough: who hears "round r" from a peer knows that this peer has read round r−1, so slot
(r+1) mod 2 is free again. Large tensors pass in pieces of a slot, and sums read the peers' memory in
place. A signal is a system call, which also orders memory on every CPU; a peer that dies closes its
socket, so its loss is seen at once and its rank is known.

There are no threads: a started call tells its first round at once, if nothing is before it, and goes on, round by
round, whenever a call of the group is started or waited for. So a rank that computes longer is waited for at the
second call after its own, not at the first. A socket's bytes cost this rank's own cores more time than that
(`benchmarks/collectives.py`).
Exchanges of unequal blocks go through gloo, and of more than a slot, for which it is as fast; and so does everything if
the ranks of the group are not all processes of one Linux host. What goes through gloo is posted when it is started,
whatever memory still waits for: calls across nodes run while those inside a node are waited for.
Messages between two ranks of one host go through memory too (`messages`), where the group has met for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transports.base import Handle, ReduceOp, Splits, Transport
from meshwright.comm.transports.gloo import SMALL_BYTES, Gloo
from meshwright.comm.transports.meeting import meet
from meshwright.comm.transports.messages import Messages
from meshwright.comm.transports.reduce import reduce_in_order
from meshwright.comm.transports.segments import SLOT_BYTES, Segments, connect

_ALIGNMENT = 64
Rounds = Generator[None, None, None]
"""A call: each `yield` is where the own slot is filled, and goes on once all peers' slots are."""


class Host(Transport):
    """One group of ranks; those of one host share memory, others fall back to gloo."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._gloo, self._group, self._timeout_s = Gloo(group), group, timeout_s
        self._size, self._index = group.size(), group.rank()
        self._queue: _Queue | None = None
        self._connected = False
        self._messages: Messages | None = None

    def meet_for_messages(self) -> None:
        """From here on, messages between ranks of one host go through memory. Collective over the group."""
        if self._messages is None:
            sockets, _ = meet(self._group, self._timeout_s)
            self._messages = Messages(dist.get_process_group_ranks(self._group), sockets, self._timeout_s)

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

    def exchange(self, out: Tensor, x: Tensor) -> Handle:
        if x.nbytes > SLOT_BYTES:
            return self._gloo.exchange(out, x)
        return self._start(
            lambda s: self._exchange(s, out.view(self._size, -1), x.view(self._size, -1)),
            lambda: self._gloo.exchange(out, x),
        )

    def broadcast(self, x: Tensor, root: int) -> Handle:
        return self._start(lambda s: self._broadcast(s, x.view(-1), root), lambda: self._gloo.broadcast(x, root))

    def reduce(self, x: Tensor, root: int) -> Handle:
        return self._start(lambda s: self._reduce(s, x.view(-1), root), lambda: self._gloo.reduce(x, root))

    def barrier(self) -> Handle:
        return self._gloo.barrier()

    def send(self, x: Tensor, to: int, tag: int) -> Handle:
        messages = self._messages
        if messages is not None and messages.reaches(to):
            return messages.send(x, to, tag)
        return self._gloo.send(x, to, tag)

    def recv(self, out: Tensor, source: int, tag: int) -> Handle:
        messages = self._messages
        if messages is not None and messages.reaches(source):
            return messages.recv(out, source, tag)
        return self._gloo.recv(out, source, tag)

    def _start(self, rounds: Callable[[Segments], Rounds], over_gloo: Callable[[], Handle]) -> Handle:
        """Queue a call. All ranks start in the same order, and calls run in the order of their starts."""
        if not self._connected:
            segments, self._connected = connect(self._group, self._timeout_s), True
            self._queue = _Queue(segments) if segments is not None else None
        if self._queue is None:
            return over_gloo()
        return self._queue.add(rounds(self._queue.segments))

    def _peers(self) -> Iterator[int]:
        """The other ranks, the next one first, so that not all read the same memory at once."""
        return ((self._index + step) % self._size for step in range(1, self._size))

    def _all_reduce_small(self, segments: Segments, x: Tensor, op: ReduceOp) -> Rounds:
        """One round: every rank reads all and reduces in rank order."""
        flat = x.view(-1)
        if not flat.numel():
            return
        segments.own(flat.dtype, flat.numel()).copy_(flat)
        yield
        parts = [flat if j == self._index else segments.peer(j, x.dtype, x.numel()) for j in range(self._size)]
        reduce_in_order(parts, flat, op)

    def _all_reduce_large(self, segments: Segments, x: Tensor, op: ReduceOp) -> Rounds:
        """Two rounds per piece: every rank reduces its block of the piece, then reads the others' blocks."""
        per_slot = SLOT_BYTES // x.element_size()
        for piece in x.view(-1).split(per_slot):
            blocks = piece.tensor_split(self._size)
            offsets = _offsets(blocks)
            slot = segments.own(x.dtype, piece.numel())
            for j in self._peers():
                slot[offsets[j] : offsets[j + 1]].copy_(blocks[j])
            yield
            parts = [
                blocks[self._index]
                if j == self._index
                else segments.peer(j, x.dtype, piece.numel())[offsets[self._index] : offsets[self._index + 1]]
                for j in range(self._size)
            ]
            reduce_in_order(parts, blocks[self._index], op)
            own = blocks[self._index]
            segments.own(x.dtype, own.numel()).copy_(own)
            yield
            for j in self._peers():
                blocks[j].copy_(segments.peer(j, x.dtype, blocks[j].numel()))

    def _reduce_scatter(self, segments: Segments, out: Tensor, x: Tensor) -> Rounds:
        """out [n] ← row `index` of Σ x [P, n]; one round per piece of columns."""
        per_block = SLOT_BYTES // self._size // _ALIGNMENT * _ALIGNMENT // x.element_size()
        for start in range(0, out.numel(), per_block):
            columns = slice(start, min(start + per_block, out.numel()))
            width = columns.stop - columns.start
            slot = segments.own(x.dtype, self._size * width).view(self._size, width)
            for j in self._peers():
                slot[j].copy_(x[j, columns])
            yield
            parts = [
                x[j, columns]
                if j == self._index
                else segments.peer(j, x.dtype, self._size * width).view(self._size, width)[self._index]
                for j in range(self._size)
            ]
            reduce_in_order(parts, out[columns], "sum")

    def _all_gather(self, segments: Segments, out: Tensor, x: Tensor) -> Rounds:
        """out [P, n] ← x [n] of all ranks; one round per piece."""
        if out[self._index].data_ptr() != x.data_ptr():
            out[self._index].copy_(x)
        per_slot = SLOT_BYTES // x.element_size()
        for start in range(0, x.numel(), per_slot):
            columns = slice(start, min(start + per_slot, x.numel()))
            width = columns.stop - columns.start
            segments.own(x.dtype, width).copy_(x[columns])
            yield
            for j in self._peers():
                out[j, columns].copy_(segments.peer(j, x.dtype, width))

    def _exchange(self, segments: Segments, out: Tensor, x: Tensor) -> Rounds:
        """out [P, n] ← row `index` of x [P, n] of every rank, in one round."""
        out[self._index].copy_(x[self._index])
        if not x.numel():
            return
        slot = segments.own(x.dtype, x.numel()).view_as(x)
        for j in self._peers():
            slot[j].copy_(x[j])
        yield
        for j in self._peers():
            out[j].copy_(segments.peer(j, x.dtype, x.numel()).view_as(x)[self._index])

    def _broadcast(self, segments: Segments, x: Tensor, root: int) -> Rounds:
        """x [n] ← x of the root; one round per piece."""
        for piece in _pieces(x):
            if self._index == root:
                segments.own(x.dtype, piece.numel()).copy_(piece)
            yield
            if self._index != root:
                piece.copy_(segments.peer(root, x.dtype, piece.numel()))

    def _reduce(self, segments: Segments, x: Tensor, root: int) -> Rounds:
        """x [n] ← Σ x on the root; one round per piece."""
        for piece in _pieces(x):
            if self._index != root:
                segments.own(x.dtype, piece.numel()).copy_(piece)
            yield
            if self._index == root:
                parts = [piece if j == root else segments.peer(j, x.dtype, len(piece)) for j in range(self._size)]
                reduce_in_order(parts, piece, "sum")


def _pieces(x: Tensor) -> Sequence[Tensor]:
    """x [n] in pieces of a slot; none of an empty one."""
    return x.split(SLOT_BYTES // x.element_size()) if x.numel() else ()


class _Queue:
    """Started calls of a group, in order. After one has failed the group is lost, and so are the rest."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self._calls: deque[_Call] = deque()
        self._is_told = False
        """Whether the first call waits to hear the peers."""
        self._error: RuntimeError | None = None

    def add(self, rounds: Rounds) -> _Call:
        call = _Call(self, rounds)
        self._calls.append(call)
        self._run_ahead()
        return call

    def run_until(self, call: _Call) -> None:
        while self._error is None and not call.done:
            self._run_round()
        if self._error is not None:
            raise self._error
        self._run_ahead()

    def _run_ahead(self) -> None:
        """What needs no waiting."""
        while self._error is None and self._calls and not (self._is_told and not self.segments.have_all_told):
            self._run_round()

    def _run_round(self) -> None:
        """The first call, until it has filled its slot again or has ended."""
        try:
            if self._is_told:
                self.segments.hear()
            self._is_told = next(self._calls[0].rounds, _ENDED) is not _ENDED
            if self._is_told:
                self.segments.tell()
            else:
                self._calls.popleft().done = True
        except RuntimeError as error:
            self._error = error


_ENDED = object()


class _Call:
    """A started call: ended, after all that were started before it, when it was waited for, or before."""

    def __init__(self, queue: _Queue, rounds: Rounds) -> None:
        self._queue, self.rounds, self.done = queue, rounds, False

    def wait(self) -> None:
        self._queue.run_until(self)


def _offsets(blocks: Sequence[Tensor]) -> list[int]:
    """Where each block starts, and where the last one ends."""
    ends = [0]
    for block in blocks:
        ends.append(ends[-1] + block.numel())
    return ends
