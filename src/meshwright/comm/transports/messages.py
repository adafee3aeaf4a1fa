"""Messages between ranks of one host: data through shared memory, news of it through a socket per pair of ranks.

    sender                                          receiver
    copy x into a free buffer of its own   ──▶      "buffer 3, tag 7, n bytes"
                                                    copy it to where it was asked for
    buffer 3 is free again                 ◀──      "taken: 3"

A send is under way as soon as it is started, whatever its rank does next, and is waited for until it was taken. A rank
has as many buffers per peer as sends under way at its fullest; they are used again, and a peer maps each of them once.
There are no threads, and nobody spins: a rank that waits sleeps until a socket has something for it. A peer that dies
closes its socket, after everything that it had sent.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import defaultdict, deque
from collections.abc import Sequence

from torch import Tensor, uint8

from meshwright.comm.transports.base import DONE, Handle
from meshwright.comm.transports.meeting import Sockets, make_memory, map_memory

_NEWS = struct.Struct("<qqq")
"""A buffer, the tag of what lies in it or one of the two below, and its bytes."""
_TAKEN, _NEW = -1, -2
_DESCRIPTOR_BYTES = socket.CMSG_SPACE(4)
_MIN_BUFFER_BYTES = 4096


class Messages:
    """The lines of this rank to the ranks of its group that share its host."""

    def __init__(self, ranks: Sequence[int], sockets: Sockets, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._poll = select.poll()
        self._lines = {index: _Line(ranks[index], peer) for index, peer in sockets.items()}
        self._line_of_fd = {line.socket.fileno(): line for line in self._lines.values()}
        for descriptor in self._line_of_fd:
            self._poll.register(descriptor, select.POLLIN)

    def reaches(self, index: int) -> bool:
        """Whether the rank at this position shares the host."""
        return index in self._lines

    def send(self, x: Tensor, to: int, tag: int) -> Handle:
        """Send x (contiguous) to the rank at position `to`. x may be changed at once; ended when it was taken.

        Raises:
            RuntimeError: here or in `wait`: the peer is gone, or did not take it within the timeout.
        """
        if not x.numel():
            return DONE
        line, data = self._lines[to], _bytes_of(x)
        self._read(line)
        at = line.free_buffer(data.numel())
        if at is None:
            at, descriptor = line.make_buffer(data.numel())
            try:
                self._tell(line, at, _NEW, line.own[at].numel(), descriptor)
            finally:
                os.close(descriptor)
        line.own[at][: data.numel()].copy_(data)
        sent = line.under_way[at] = _Message(self, line)
        self._tell(line, at, tag, data.numel())
        if line.is_gone:
            raise RuntimeError(f"the process of rank {line.rank} has ended")
        return sent

    def recv(self, out: Tensor, source: int, tag: int) -> Handle:
        """Receive into `out` (contiguous) from the rank at position `source`.

        Raises:
            RuntimeError: here or in `wait`: the peer is gone, did not send within the timeout, or sent another size.
        """
        if not out.numel():
            return DONE
        line = self._lines[source]
        received = _Message(self, line, _bytes_of(out))
        if line.arrived[tag] and not line.expected[tag]:
            self._take(line, received, *line.arrived[tag].popleft())
        else:
            line.expected[tag].append(received)
        return received

    def wait_for(self, message: _Message) -> None:
        """Return when it was sent and taken, or has arrived."""
        line = message.line
        self._read(line)
        deadline = time.monotonic() + self._timeout_s
        while not message.done:
            if line.is_gone:
                raise RuntimeError(f"the process of rank {line.rank} has ended")
            self._sleep(line, deadline)

    def _sleep(self, line: _Line, deadline: float) -> None:
        """Until any peer has told something, which is read, or another may be told something."""
        ready = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready:
            raise RuntimeError(f"rank {line.rank} did not come within {self._timeout_s:g} s")
        for descriptor, events in ready:
            if events & ~select.POLLOUT:
                self._read(self._line_of_fd[descriptor])

    def _tell(self, line: _Line, buffer: int, tag: int, num_bytes: int, descriptor: int | None = None) -> None:
        """Send news, if the peer is still there. Where it has not read for long, hear meanwhile what it says."""
        news, descriptors = [_NEWS.pack(buffer, tag, num_bytes)], [] if descriptor is None else [descriptor]
        deadline = time.monotonic() + self._timeout_s
        while not line.is_gone:
            try:
                socket.send_fds(line.socket, news, descriptors) if descriptors else line.socket.send(news[0])
                return
            except BlockingIOError:
                self._poll.modify(line.socket, select.POLLIN | select.POLLOUT)
                self._sleep(line, deadline)
                if not line.is_gone:
                    self._poll.modify(line.socket, select.POLLIN)
            except OSError:
                self._read(line)  # what it had sent before it ended
                if not line.is_gone:
                    self._lose(line)

    def _read(self, line: _Line) -> None:
        """Everything that a peer has told so far."""
        while not line.is_gone:
            try:
                news, passed, _, _ = line.socket.recvmsg(_NEWS.size, _DESCRIPTOR_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it ended without having read everything; what it had sent before is still to be read
            if not news:
                self._lose(line)
                return
            buffer, tag, num_bytes = _NEWS.unpack(news)
            if tag == _TAKEN:
                line.under_way.pop(buffer).done = True
                line.free.append(buffer)
            elif tag == _NEW:
                descriptor = int.from_bytes(passed[0][2][:4], "little")
                line.theirs.append(map_memory(descriptor, num_bytes))
            elif line.expected[tag]:
                self._take(line, line.expected[tag].popleft(), buffer, num_bytes)
            else:
                line.arrived[tag].append((buffer, num_bytes))

    def _take(self, line: _Line, message: _Message, buffer: int, num_bytes: int) -> None:
        out = message.out
        assert out is not None
        if num_bytes != out.numel():
            raise RuntimeError(f"rank {line.rank} sent {num_bytes} bytes where {out.numel()} are expected")
        out.copy_(line.theirs[buffer][:num_bytes])
        message.out, message.done = None, True
        self._tell(line, buffer, _TAKEN, 0)

    def _lose(self, line: _Line) -> None:
        line.is_gone = True
        self._poll.unregister(line.socket)

    def __del__(self) -> None:
        for line in self._lines.values():
            line.socket.close()


class _Line:
    """What passes between this rank and one peer."""

    def __init__(self, rank: int, line: socket.socket) -> None:
        line.setblocking(False)
        self.rank, self.socket, self.is_gone = rank, line, False
        self.own: list[Tensor] = []
        """Buffers of this rank."""
        self.free: list[int] = []
        """Of its own, the one that was used last at the end: its memory is nearest to the processor."""
        self.under_way: dict[int, _Message] = {}
        """Buffer → what was sent in it and not taken yet."""
        self.theirs: list[Tensor] = []
        """Buffers of the peer."""
        self.expected: defaultdict[int, deque[_Message]] = defaultdict(deque)
        """Tag → receives that were started and have not ended."""
        self.arrived: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)
        """Tag → what came before it was asked for: a buffer of the peer, and bytes."""

    def free_buffer(self, num_bytes: int) -> int | None:
        """A buffer for so many bytes, the last used; None where there is none."""
        for place in reversed(range(len(self.free))):
            if self.own[self.free[place]].numel() >= num_bytes:
                return self.free.pop(place)
        return None

    def make_buffer(self, num_bytes: int) -> tuple[int, int]:
        """A new buffer, and its descriptor to be passed on and closed."""
        size = max(_MIN_BUFFER_BYTES, 1 << (num_bytes - 1).bit_length())
        descriptor = make_memory(size)
        self.own.append(map_memory(os.dup(descriptor), size))
        return len(self.own) - 1, descriptor


class _Message:
    """A started send or receive."""

    __slots__ = ("_messages", "done", "line", "out")

    def __init__(self, messages: Messages, line: _Line, out: Tensor | None = None) -> None:
        self._messages, self.line, self.out, self.done = messages, line, out, False

    def wait(self) -> None:
        if not self.done:
            self._messages.wait_for(self)


def _bytes_of(x: Tensor) -> Tensor:
    return x.detach().view(-1).view(uint8)
