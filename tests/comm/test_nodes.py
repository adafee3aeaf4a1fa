"""Ranks in different network namespaces are on different nodes: memory is shared inside one, never between two."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from meshwright.comm import collectives as c
from meshwright.comm.mesh import Axis, Mesh
from meshwright.core.axes import DP, DP_ACROSS, DP_NODE

_CLONE_NEWNET = 0x40000000


def why_not() -> str:
    """Why this machine cannot make a network namespace; empty where it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    try:
        done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    except FileNotFoundError:
        return "`unshare` (util-linux) is not installed"
    return done.stderr.strip() if done.returncode else ""


needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=why_not() or "they can be made")


@contextlib.contextmanager
def another_node(mine: bool) -> Iterator[None]:
    """Where `mine`: this thread in a network namespace of its own. What it has connected stays connected."""
    if not mine:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        assert libc.unshare(_CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        yield
    finally:
        assert libc.setns(home, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(home)


def num_mapped() -> int:
    """Segments of other ranks and of its own that this process has mapped."""
    return sum("memfd:meshwright" in line for line in Path("/proc/self/maps").read_text().splitlines())


def sums_and_segments(axis: Axis) -> tuple[list[float], int]:
    """A sum, a block of a sum, and everybody's value; and how many segments that has mapped."""
    before, own = num_mapped(), torch.full((40_000,), float(axis.index + 1))
    block = c.reduce_scatter(torch.empty(own.numel() // axis.size), own.clone(), axis)
    gathered = c.all_gather(torch.empty(axis.size * own.numel()), own, axis)
    total = c.all_reduce(own.clone(), axis)
    values = [total.unique().item(), block.unique().item(), gathered.view(axis.size, -1)[-1].unique().item()]
    return values, num_mapped() - before


def on_two_nodes(rank: int, world: int) -> dict[str, tuple[list[float], int]]:
    """The lower half shares a node; each rank of the upper half is on a node of its own."""
    mesh = Mesh.create({"dp": world}, dp_local=world // 2)
    with another_node(rank >= world // 2):
        return {name: sums_and_segments(mesh[name]) for name in (DP_ACROSS, DP)}


@needs_namespaces
@pytest.mark.parametrize("world", [2, 4])
def test_no_memory_is_shared_between_network_namespaces(ranks, world):
    expected = sum(range(1, world + 1))
    for answers in ranks(on_two_nodes, world):
        assert answers[DP_ACROSS] == ([3.0, 3.0, 2.0], 0)
        assert answers[DP] == ([expected, expected, world], 0)


def on_one_node(rank: int, world: int) -> tuple[list[float], int]:
    return sums_and_segments(Mesh.create({"dp": world}, dp_local=world // 2)[DP_NODE])


@needs_namespaces
def test_memory_is_shared_inside_one(ranks):
    """The witness of the test above can see segments."""
    for values, segments in ranks(on_one_node, 4):
        assert values == [3.0, 3.0, 2.0]
        assert segments == 2
