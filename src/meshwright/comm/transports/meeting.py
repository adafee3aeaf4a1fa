"""Ranks of one host find each other: a socket to each, whatever their processes are.

Addresses are names in the kernel, so that nothing is left behind however a process ends. Such names belong to a
network namespace: ranks in two of them, as in two containers with networks of their own, find each other over the
network alone, whatever machine they share. Memory is passed over these sockets as descriptors, and has no name either.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys

import torch
import torch.distributed as dist
from torch import Tensor

_INDEX = struct.Struct("<q")
Sockets = dict[int, socket.socket]
"""Position in the group → the line to that rank. What one side sends at once, the other receives at once."""


def meet(group: dist.ProcessGroup, timeout_s: float) -> tuple[Sockets, bool]:
    """Sockets to all ranks of a group that are processes of this Linux host, and whether every pair of ranks has one.

    Collective over the group.
    """
    index, size = group.rank(), group.size()
    token = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.uint8)
    dist.broadcast(token, group=group, group_src=0)
    addresses = [f"\0meshwright-{bytes(token.tolist()).hex()}-{rank}" for rank in range(size)]
    listener = _listen(addresses[index], size, timeout_s)
    try:
        dist.barrier(group=group)
        dialled = {rank: _dial(addresses[rank], index, timeout_s) for rank in range(index)}
        sockets = {rank: peer for rank, peer in dialled.items() if peer is not None}
        callers = _callers(group, sockets)
        for _ in range(int(callers[index])):
            assert listener is not None
            peer, _ = listener.accept()
            peer.settimeout(timeout_s)
            sockets[_INDEX.unpack(peer.recv(_INDEX.size))[0]] = peer
    finally:
        if listener is not None:
            listener.close()
    return sockets, int(callers.sum()) == size * (size - 1) // 2


def _callers(group: dist.ProcessGroup, dialled: Sockets) -> Tensor:
    """How many ranks have reached each rank [size]."""
    reached = torch.zeros(group.size(), dtype=torch.int64)
    reached[list(dialled)] = 1
    dist.all_reduce(reached, group=group)
    return reached


def _listen(address: str, size: int, timeout_s: float) -> socket.socket | None:
    """None where the system has no such sockets."""
    if sys.platform != "linux":
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.settimeout(timeout_s)
    listener.bind(address)
    listener.listen(size)
    return listener


def _dial(address: str, index: int, timeout_s: float) -> socket.socket | None:
    """Connect, and say who calls. None where nobody of this host listens."""
    if sys.platform != "linux":
        return None
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(timeout_s)
    try:
        peer.connect(address)
    except OSError:
        peer.close()
        return None
    peer.sendall(_INDEX.pack(index))
    return peer


def make_memory(num_bytes: int) -> int:
    """A descriptor of new memory that can be passed to other processes. Pages exist once they are used."""
    descriptor = os.memfd_create("meshwright")
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def map_memory(descriptor: int, num_bytes: int) -> Tensor:
    """The memory behind a descriptor [num_bytes], which is closed."""
    try:
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)
