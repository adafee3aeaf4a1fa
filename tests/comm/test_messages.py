"""Messages between two ranks through shared memory: order, many under way, lost peers, and where they fall back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from meshwright.comm import collectives as c
from meshwright.comm.mesh import Axis, Mesh
from meshwright.comm.p2p import recv_start, send_start
from meshwright.comm.transports.host import Host
from meshwright.core.errors import RankError
from tests.comm.test_nodes import another_node, needs_namespaces, num_mapped

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def pipeline(world: int, shared_memory: bool = True) -> Axis:
    return Mesh.create({"pp": world}, shared_memory=shared_memory)["pp"]


def both_ways(rank: int, world: int, shared_memory: bool) -> None:
    """Every rank to every other: three tags, received in another order than sent; two messages per tag, in theirs."""
    axis = pipeline(world, shared_memory)
    peers = [peer for peer in range(world) if peer != rank]
    words = [(tag, turn) for turn in range(2) for tag in (0, 1, 2)]
    sends, receives = [], []
    for peer in peers:
        for tag, turn in words:
            x = torch.full((3, 1000 * tag + 5), 100.0 * rank + 10 * peer + tag + turn / 2)
            sends.append(send_start(x, axis, peer, tag))
    for peer in peers:
        for tag, turn in sorted(words, reverse=True, key=lambda word: word[0]):
            out = torch.empty(3, 1000 * tag + 5)
            receives.append((recv_start(out, axis, peer, tag), out, 100.0 * peer + 10 * rank + tag + turn / 2))
    for work, out, expected in reversed(receives):
        work.wait()
        assert out.unique().tolist() == [expected]
    for send in sends:
        send.wait()


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("world", [2, 4])
def test_tags_keep_messages_apart_and_their_order(ranks, world, shared_memory):
    ranks(both_ways, world, shared_memory)


def kinds(rank: int, world: int) -> None:
    axis, peer = pipeline(world), 1 - rank
    for shape in ((), (0,), (7,), (2, 3, 5), (100_000,)):
        for dtype in DTYPES:
            x = (torch.arange(max(1, torch.Size(shape).numel())) % 7 + rank).to(dtype)[: torch.Size(shape).numel()]
            x, out = x.view(shape), torch.zeros(shape, dtype=dtype)
            send = send_start(x, axis, peer, 3)
            x.zero_()  # free again at once: it is in the buffer
            recv_start(out, axis, peer, 3).wait()
            send.wait()
            expected = (torch.arange(max(1, out.numel())) % 7 + peer).to(dtype)[: out.numel()].view(shape)
            assert torch.equal(out, expected)


def test_every_shape_and_dtype_arrives_although_the_sent_tensor_changes(ranks):
    ranks(kinds, 2)


def flood(rank: int, world: int, num: int) -> tuple[list[float], int]:
    """More than a socket holds, both ways, before anybody receives; then twice as many, three under way."""
    axis, peer, before = pipeline(world), 1 - rank, num_mapped()
    sends = [send_start(torch.full((4,), float(at)), axis, peer, 0) for at in range(num)]
    received = []
    for _ in range(num):
        recv_start(out := torch.empty(4), axis, peer, 0).wait()
        received.append(out[0].item())
    for send in sends:
        send.wait()
    mapped = num_mapped() - before
    for at in range(2 * num):
        send = send_start(torch.full((4,), float(at)), axis, peer, 0)
        recv_start(torch.empty(4), axis, peer, 0).wait()
        send.wait()
    assert num_mapped() - before == mapped, "buffers were made although some are free"
    return received, mapped


def test_a_flood_both_ways_neither_hangs_nor_loses_order(ranks):
    for received, mapped in ranks(flood, 2, 600):
        assert received == [float(at) for at in range(600)]
        assert 600 < mapped <= 2 * 600


def few_under_way(rank: int, world: int) -> int:
    axis, before = pipeline(world), num_mapped()
    for _ in range(50):
        if rank == 0:
            send_start(torch.ones(1000), axis, 1, 0).wait()
        else:
            recv_start(torch.empty(1000), axis, 0, 0).wait()
    return num_mapped() - before


def test_a_send_is_over_when_it_was_taken_so_that_one_buffer_is_enough(ranks):
    assert ranks(few_under_way, 2) == [1, 1]


def wait_for_a_late_one(rank: int, world: int) -> float:
    axis = pipeline(world)
    c.barrier(axis)
    began = time.process_time()
    if rank == 1:
        time.sleep(0.6)
        send_start(torch.ones(5), axis, 0, 0).wait()
    else:
        recv_start(torch.empty(5), axis, 1, 0).wait()
    return time.process_time() - began


def test_a_rank_that_waits_takes_no_processor_time(ranks):
    assert ranks(wait_for_a_late_one, 2)[0] < 0.1


def lose_rank_1(rank: int, world: int, how: int, sends: bool) -> tuple[str, float]:
    axis = pipeline(world)
    c.barrier(axis)
    if rank == 1:
        os.kill(os.getpid(), how)
    start = send_start if rank == 0 and sends else recv_start
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        start(torch.ones(10), axis, 1, 0).wait()
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("sends", [True, False])
def test_a_killed_peer_is_noticed_within_seconds_and_named(ranks, sends):
    answers = ranks(lose_rank_1, 3, signal.SIGKILL, sends, may_die=[1])
    for rank in (0, 2):
        text, seconds = answers[rank]
        primitive = "send" if sends and rank == 0 else "receive"
        assert text.startswith(f"rank {rank}: {primitive} on axis `pp` (ranks 0, 1, 2) failed")
        assert text.endswith("the process of rank 1 has ended")
        assert seconds < 10


@pytest.mark.parametrize("sends", [True, False])
def test_a_stopped_peer_is_noticed_at_the_timeout(ranks, sends):
    text, seconds = ranks(lose_rank_1, 2, signal.SIGSTOP, sends, may_die=[1], group_timeout_s=2)[0]
    assert text.endswith("rank 1 did not come within 2 s")
    assert 1.5 < seconds < 12


def end_early(rank: int, world: int) -> list[float]:
    """Rank 1 sends, and ends without having read that what it got is taken."""
    axis = pipeline(world)
    if rank == 1:
        for at in range(3):
            send_start(torch.full((2000,), float(at)), axis, 0, at)
        send_start(torch.ones(1), axis, 0, 9).wait()
        os._exit(0)
    recv_start(torch.empty(1), axis, 1, 9).wait()
    time.sleep(0.3)
    received = []
    for at in (2, 0, 1):
        recv_start(out := torch.empty(2000), axis, 1, at).wait()
        received.append(out[0].item())
    with pytest.raises(RankError, match="the process of rank 1 has ended"):
        recv_start(torch.empty(1), axis, 1, 0).wait()
    return received


def test_what_a_peer_sent_before_it_ended_arrives(ranks):
    assert ranks(end_early, 2, may_die=[1])[0] == [2.0, 0.0, 1.0]


def other_size(rank: int, world: int) -> str:
    axis = pipeline(world)
    if rank == 1:
        send_start(torch.ones(10), axis, 0, 0)
        time.sleep(0.3)
        return ""
    with pytest.raises(RankError) as caught:
        recv_start(torch.empty(12), axis, 1, 0).wait()
    return str(caught.value)


def test_a_message_of_another_size_is_refused(ranks):
    assert ranks(other_size, 2)[0].endswith("rank 1 sent 40 bytes where 48 are expected")


def nodes_of_two(rank: int, world: int) -> list[int]:
    """Ranks 0 and 1 share a node, 2 and 3 each have one of their own: who shares memory with whom."""
    axis = pipeline(world, shared_memory=False)
    host = Host(axis.group, timeout_s=30)
    with another_node(rank >= 2):
        host.meet_for_messages()
    found = []
    for peer in range(world):
        if peer == rank:
            continue
        before, out = num_mapped(), torch.empty(500)
        send = host.send(torch.full((500,), float(rank)), peer, 0)
        host.recv(out, peer, 0).wait()
        send.wait()
        assert out.unique().tolist() == [peer]
        found += [peer] if num_mapped() > before else []
    return found


@needs_namespaces
def test_ranks_of_other_nodes_are_reached_over_the_network(ranks):
    assert ranks(nodes_of_two, 4) == [[1], [0], [], []]


def num_lines() -> int:
    """Unix sockets of this process."""
    unix = {line.split()[6] for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]}
    open_files = (os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
    return sum(name.removeprefix("socket:[").removesuffix("]") in unix for name in open_files)


def open_and_leave(rank: int, world: int) -> list[int]:
    counts = [num_lines()]
    mesh = Mesh.create({"pp": world})
    send = send_start(torch.ones(3), mesh["pp"], (rank + 1) % world, 0)
    recv_start(torch.empty(3), mesh["pp"], (rank - 1) % world, 0).wait()
    send.wait()
    counts.append(num_lines())
    c.barrier(mesh["pp"])
    mesh.close()
    del mesh, send
    return [*counts, num_lines()]


def test_the_sockets_of_a_mesh_that_nobody_holds_are_closed(ranks):
    for before, during, after in ranks(open_and_leave, 3):
        assert (during, after) == (before + 2, before)
