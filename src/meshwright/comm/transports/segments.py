"""The shared memory of a group of ranks on one host, and the sockets over which they take turns."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transports.meeting import Sockets, make_memory, map_memory, meet

SLOT_BYTES = 4 << 20
_NUM_SLOTS = 2
_TURN = struct.Struct("<q")


class Segments:
    """Two slots of this rank, two of each peer, and the number of the round that they are in."""

    def __init__(
        self,
        index: int,
        ranks: Sequence[int],
        memory: Sequence[Tensor],
        sockets: Sockets,
        timeout_s: float,
    ) -> None:
        self._index, self._ranks, self._memory = index, ranks, memory
        self._sockets, self._timeout_s = sockets, timeout_s
        self._round = 0
        self._poll = select.poll()
        for peer in sockets.values():
            self._poll.register(peer, select.POLLIN)
        self._index_of_fd = {peer.fileno(): peer_index for peer_index, peer in sockets.items()}

    def own(self, dtype: torch.dtype, numel: int) -> Tensor:
        """This rank's slot of the coming round, to be filled."""
        return self._slot(self._index, self._round, dtype, numel)

    def peer(self, index: int, dtype: torch.dtype, numel: int) -> Tensor:
        """A peer's slot of the round that was last turned. Only read it."""
        return self._slot(index, self._round - 1, dtype, numel)

    def tell(self) -> None:
        """Tell all peers that the own slot is filled, and that their slots of the round before were read.

        Raises:
            RuntimeError: a peer is gone.
        """
        message = _TURN.pack(self._round)
        for index, peer in self._sockets.items():
            try:
                peer.sendall(message)
            except OSError as error:
                raise self._gone(index) from error

    @property
    def have_all_told(self) -> bool:
        """Whether :meth:`hear` would not have to wait."""
        return len(self._poll.poll(0)) == len(self._sockets)

    def hear(self) -> None:
        """Return when all peers' slots are filled; the next round begins.

        Raises:
            RuntimeError: a peer is gone, late by the timeout, or in another round.
        """
        missing = dict(self._index_of_fd)
        deadline = time.monotonic() + self._timeout_s
        while missing:
            ready = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                late = ", ".join(str(self._ranks[index]) for index in sorted(missing.values()))
                raise RuntimeError(f"rank {late} did not come within {self._timeout_s:g} s")
            for descriptor, _ in ready:
                if descriptor in missing:
                    self._hear(missing.pop(descriptor))
        self._round += 1

    def _hear(self, index: int) -> None:
        try:
            message = self._sockets[index].recv(_TURN.size)
        except OSError as error:
            raise self._gone(index) from error
        if not message:
            raise self._gone(index)
        (turn,) = _TURN.unpack(message)
        if turn != self._round:
            raise RuntimeError(
                f"rank {self._ranks[index]} is in round {turn}, this one in {self._round}: their calls differ"
            )

    def _gone(self, index: int) -> RuntimeError:
        return RuntimeError(f"the process of rank {self._ranks[index]} has ended")

    def _slot(self, index: int, turn: int, dtype: torch.dtype, numel: int) -> Tensor:
        start = turn % _NUM_SLOTS * SLOT_BYTES
        return self._memory[index][start : start + numel * dtype.itemsize].view(dtype)

    def __del__(self) -> None:
        for peer in self._sockets.values():
            peer.close()


def connect(group: dist.ProcessGroup, timeout_s: float) -> Segments | None:
    """Set up the segments of a group; None if its ranks are not all processes of one Linux host.

    Collective over the group: all ranks get segments, or none does.
    """
    sockets, complete = meet(group, timeout_s)
    if not complete:
        for peer in sockets.values():
            peer.close()
        return None
    ranks = dist.get_process_group_ranks(group)
    return Segments(group.rank(), ranks, _exchange_memory(group.rank(), group.size(), sockets), sockets, timeout_s)


def _exchange_memory(index: int, size: int, sockets: Sockets) -> list[Tensor]:
    """Make this rank's segment, pass it to every peer, and map theirs."""
    own = make_memory(_NUM_SLOTS * SLOT_BYTES)
    for peer in sockets.values():
        socket.send_fds(peer, [b"m"], [own])
    descriptors = {index: own}
    for rank, peer in sockets.items():
        _, received, _, _ = socket.recv_fds(peer, 1, 1)
        if not received:
            raise RuntimeError(f"the process at position {rank} of the group has ended")
        descriptors[rank] = received[0]
    return [map_memory(descriptors[rank], _NUM_SLOTS * SLOT_BYTES) for rank in range(size)]
