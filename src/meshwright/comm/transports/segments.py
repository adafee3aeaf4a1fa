"""The shared memory of a group of ranks on one host, and the sockets over which they take turns."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

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
        sockets: dict[int, socket.socket],
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

    Collective over the group: all ranks get segments, or none does. Addresses are names in the kernel
    and segments are passed as descriptors, so that nothing is left behind however a process ends. Such
    names belong to a network namespace: ranks in two of them, as in two containers with networks of their
    own, find each other over the network alone, whatever machine they share.
    """
    index, size = group.rank(), group.size()
    token = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.uint8)
    dist.broadcast(token, group=group, group_src=0)
    addresses = [f"\0meshwright-{bytes(token.tolist()).hex()}-{rank}" for rank in range(size)]
    with contextlib.ExitStack() as opened:
        listener = _listen(addresses[index], size, timeout_s)
        if listener is not None:
            opened.enter_context(listener)
        if not _all_agree(group, listener is not None):
            return None
        assert listener is not None
        sockets = {rank: _dial(addresses[rank], index, timeout_s) for rank in range(index)}
        if not _all_agree(group, None not in sockets.values()):
            return None
        for _ in range(index + 1, size):
            peer, _ = listener.accept()
            peer.settimeout(timeout_s)
            sockets[_TURN.unpack(peer.recv(_TURN.size))[0]] = peer
    connected = {rank: peer for rank, peer in sockets.items() if peer is not None}
    ranks = dist.get_process_group_ranks(group)
    return Segments(index, ranks, _exchange_memory(index, size, connected), connected, timeout_s)


def _all_agree(group: dist.ProcessGroup, mine: bool) -> bool:
    flag = torch.tensor([int(mine)])
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


def _listen(address: str, size: int, timeout_s: float) -> socket.socket | None:
    """None where the system has no such sockets."""
    if sys.platform != "linux":
        return None
    listener = socket.socket(socket.AF_UNIX)
    listener.settimeout(timeout_s)
    listener.bind(address)
    listener.listen(size)
    return listener


def _dial(address: str, index: int, timeout_s: float) -> socket.socket | None:
    """Connect, and say who calls. None where nobody of this host listens."""
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(timeout_s)
    try:
        peer.connect(address)
    except OSError:
        peer.close()
        return None
    peer.sendall(_TURN.pack(index))
    return peer


def _exchange_memory(index: int, size: int, sockets: dict[int, socket.socket]) -> list[Tensor]:
    """Make this rank's segment, pass it to every peer, and map theirs. Pages exist once they are used."""
    own = os.memfd_create("meshwright")
    os.ftruncate(own, _NUM_SLOTS * SLOT_BYTES)
    for peer in sockets.values():
        socket.send_fds(peer, [b"m"], [own])
    descriptors = {index: own}
    for rank, peer in sockets.items():
        _, received, _, _ = socket.recv_fds(peer, 1, 1)
        if not received:
            raise RuntimeError(f"the process at position {rank} of the group has ended")
        descriptors[rank] = received[0]
    return [_map(descriptors[rank]) for rank in range(size)]


def _map(descriptor: int) -> Tensor:
    try:
        return torch.frombuffer(mmap.mmap(descriptor, _NUM_SLOTS * SLOT_BYTES), dtype=torch.uint8)
    finally:
        os.close(descriptor)
