"""Raw collectives: each equals its definition, and the identities between them."""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import Tensor

from meshwright.comm.collectives import (
    all_gather,
    all_gather_start,
    all_reduce,
    all_reduce_start,
    all_to_all,
    barrier,
    broadcast,
    reduce,
    reduce_scatter,
    reduce_scatter_start,
)
from meshwright.comm.mesh import Axis, Mesh
from meshwright.comm.p2p import recv_start, send_start
from meshwright.comm.transports.segments import SLOT_BYTES
from meshwright.comm.work import Work
from meshwright.core.errors import InputError

SIZES = [1, 2, 3, 4, 5]
NUMELS = [0, 7, 20_011]
"""The last one is above the small-message limit."""


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """What `rank` holds; every rank can compute it."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(10).to(dtype)


def axis_of(world: int, shared_memory: bool = True) -> Axis:
    return Mesh.create({"dp": world}, shared_memory=shared_memory)["dp"]


TRANSPORTS = pytest.mark.parametrize("shared_memory", [True, False], ids=["memory", "sockets"])


def check_definitions(rank: int, world: int, shared_memory: bool) -> None:
    axis = axis_of(world, shared_memory)
    for numel in NUMELS:
        everyone = [values(r, (world * numel,)) for r in range(world)]
        own = slice(rank * numel, (rank + 1) * numel)
        torch.testing.assert_close(all_reduce(everyone[rank].clone(), axis), sum(everyone))
        maximum = all_reduce(everyone[rank].clone(), axis, "max")
        assert torch.equal(maximum, torch.stack(everyone).amax(0))
        block = reduce_scatter(torch.empty(numel, dtype=torch.float64), everyone[rank], axis)
        torch.testing.assert_close(block, sum(everyone)[own])
        gathered = all_gather(torch.empty(world * numel, dtype=torch.float64), everyone[rank][own], axis)
        assert torch.equal(gathered, torch.cat([x[r * numel : (r + 1) * numel] for r, x in enumerate(everyone)]))
        for root in {0, world - 1}:
            assert torch.equal(broadcast(everyone[rank].clone(), axis, root), everyone[root])
            reduced = reduce(everyone[rank].clone(), axis, root)
            if rank == root:
                torch.testing.assert_close(reduced, sum(everyone))
            else:
                assert torch.equal(reduced, everyone[rank])
    barrier(axis)


@TRANSPORTS
@pytest.mark.parametrize("world", SIZES)
def test_each_primitive_equals_its_definition(ranks, world, shared_memory):
    ranks(check_definitions, world, shared_memory)


def check_identities(rank: int, world: int) -> None:
    axis = axis_of(world)
    for rows, width in ((world, 3), (2 * world, 0), (3 * world, 1001)):
        x = values(rank, (rows, width))
        block = reduce_scatter(x.new_empty(rows // world, width), x, axis)
        torch.testing.assert_close(all_gather(torch.empty_like(x), block, axis), all_reduce(x.clone(), axis))
        back = all_to_all(torch.empty_like(x), all_to_all(torch.empty_like(x), x, axis), axis)
        assert torch.equal(back, x)


@pytest.mark.parametrize("world", SIZES)
def test_gather_undoes_scatter_and_exchange_undoes_itself(ranks, world):
    ranks(check_identities, world)


def check_uneven_exchange(rank: int, world: int) -> None:
    """Rank i sends (i + 2j) mod 4 rows to rank j: some none at all."""
    axis = axis_of(world)
    rows = [[(i + 2 * j) % 4 for j in range(world)] for i in range(world)]
    sent, received = rows[rank], [rows[j][rank] for j in range(world)]
    x = torch.cat([torch.full((n, 3), 10.0 * rank + j) for j, n in enumerate(sent)])
    out = all_to_all(torch.empty(sum(received), 3), x, axis, received, sent)
    expected = torch.cat([torch.full((n, 3), 10.0 * j + rank) for j, n in enumerate(received)])
    assert torch.equal(out, expected)
    assert torch.equal(all_to_all(torch.empty_like(x), out, axis, sent, received), x)


@pytest.mark.parametrize("world", SIZES)
def test_uneven_exchange_with_empty_parts(ranks, world):
    ranks(check_uneven_exchange, world)


def reduced(rank: int, world: int, numel: int, dtype: torch.dtype, shared_memory: bool) -> tuple[Tensor, Tensor]:
    axis = axis_of(world, shared_memory)
    x = values(rank, (numel * world,), dtype)
    block = reduce_scatter(x.new_empty(numel), x, axis)
    return all_reduce(x, axis), block


@TRANSPORTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [5, 30_001])
@pytest.mark.parametrize("world", [3, 4])
def test_sums_have_the_same_bits_on_all_ranks_and_in_every_run(ranks, world, numel, dtype, shared_memory):
    job = (reduced, world, numel, dtype, shared_memory)
    first, second = ranks(*job), ranks(*job)
    for (total, block), (total_again, block_again) in zip(first, second):
        assert torch.equal(total, first[0][0])
        assert torch.equal(total, total_again)
        assert torch.equal(block, block_again)


@TRANSPORTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_16_bit_floats_are_summed_in_fp32_and_rounded_once(ranks, world, dtype, shared_memory):
    for numel in (5, 30_001):
        exact = sum(values(r, (numel * world,), dtype).float() for r in range(world)).to(dtype)
        for rank, (total, block) in enumerate(ranks(reduced, world, numel, dtype, shared_memory)):
            assert torch.equal(total, exact)
            assert torch.equal(block, exact[rank * numel : (rank + 1) * numel])


def check_in_place(rank: int, world: int, shared_memory: bool) -> None:
    """Shards are views into the flat buffer: the other blocks must stay as they are."""
    axis, numel = axis_of(world, shared_memory), 1000
    own = slice(rank * numel, (rank + 1) * numel)
    everyone = [values(r, (world * numel,)) for r in range(world)]
    flat = everyone[rank].clone()
    reduce_scatter(flat[own], flat, axis)
    expected = everyone[rank].clone()
    expected[own] = sum(everyone)[own]
    torch.testing.assert_close(flat, expected)
    untouched = everyone[rank].clone()
    reduce_scatter(torch.empty(numel, dtype=torch.float64), untouched, axis)
    assert torch.equal(untouched, everyone[rank])
    flat = everyone[rank].clone()
    all_gather(flat, flat[own], axis)
    assert torch.equal(flat, torch.cat([x[r * numel : (r + 1) * numel] for r, x in enumerate(everyone)]))


@TRANSPORTS
@pytest.mark.parametrize("world", SIZES)
def test_shards_may_be_views_of_the_full_buffer(ranks, world, shared_memory):
    ranks(check_in_place, world, shared_memory)


def check_overlapping(rank: int, world: int, shared_memory: bool) -> None:
    """Several calls in flight, waited for in order, their inputs dropped by the caller."""
    axis, numel = axis_of(world, shared_memory), 40_000
    everyone = [[values(10 * k + r, (world * numel,)) for r in range(world)] for k in range(3)]
    blocks = [torch.empty(numel, dtype=torch.float64) for _ in range(3)]
    works = [reduce_scatter_start(blocks[k], everyone[k][rank].clone(), axis) for k in range(3)]
    gathered = torch.empty(world * numel, dtype=torch.float64)
    works.append(all_gather_start(gathered, everyone[0][rank][:numel].clone(), axis))
    total = everyone[1][rank].clone()
    works.append(all_reduce_start(total, axis))
    for work in works:
        work.wait()
        work.wait()  # a second wait is free
    for k in range(3):
        torch.testing.assert_close(blocks[k], sum(everyone[k])[rank * numel : (rank + 1) * numel])
    assert torch.equal(gathered, torch.cat([x[:numel] for x in everyone[0]]))
    torch.testing.assert_close(total, sum(everyone[1]))


@TRANSPORTS
@pytest.mark.parametrize("world", [1, 2, 4])
def test_calls_overlap(ranks, world, shared_memory):
    ranks(check_overlapping, world, shared_memory)


def check_messages(rank: int, world: int) -> None:
    """Around a ring, two tags that are received in the opposite order, beside a collective."""
    axis = axis_of(world)
    to, source = (rank + 1) % world, (rank - 1) % world
    sends = [send_start(torch.full((2, 3), 10.0 * rank + tag), axis, to, tag) for tag in (0, 1)]
    total = all_reduce(torch.ones(1), axis)
    inbox = [torch.empty(2, 3), torch.empty(2, 3)]
    receives = [recv_start(inbox[tag], axis, source, tag) for tag in (1, 0)]
    for work in (*receives, *sends):
        work.wait()
    assert total.item() == world
    assert [x[0, 0].item() for x in inbox] == [10.0 * source, 10.0 * source + 1]


@pytest.mark.parametrize("world", [2, 4])
def test_messages_find_their_tag(ranks, world):
    ranks(check_messages, world)


def check_large(rank: int, world: int) -> None:
    """Several pieces of a slot, not of equal length."""
    axis, numel = axis_of(world), 2 * SLOT_BYTES // 4 // world + 13
    everyone = [torch.arange(world * numel).remainder(1000).float() + r for r in range(world)]
    own = slice(rank * numel, (rank + 1) * numel)
    total = sum(everyone)
    assert torch.equal(all_reduce(everyone[rank].clone(), axis), total)
    assert torch.equal(reduce_scatter(torch.empty(numel), everyone[rank], axis), total[own])
    long = torch.arange(2 * SLOT_BYTES // 4 + 7).float() + rank
    gathered = all_gather(torch.empty(world * long.numel()), long, axis).view(world, -1)
    assert all(torch.equal(gathered[r], long - rank + r) for r in range(world))


@pytest.mark.parametrize("world", [2, 3])
def test_tensors_that_pass_in_pieces(ranks, world):
    ranks(check_large, world)


def waits_out_of_order(rank: int, world: int) -> None:
    """A call runs after those that were started before it, also when it is waited for first."""
    axis = axis_of(world)
    first, second = torch.full((4,), 1.0 + rank), torch.full((4,), 10.0 * (1 + rank))
    works = [all_reduce_start(first, axis), all_reduce_start(second, axis)]
    for work in works if rank == 0 else works[::-1]:
        work.wait()
    assert first[0].item() == 3.0
    assert second[0].item() == 30.0


def test_ranks_may_wait_in_different_orders(ranks):
    ranks(waits_out_of_order, 2)


def first_round_needs_no_waiting(rank: int, world: int) -> None:
    """Rank 0 ends its call though the others wait for theirs only afterwards: they have told what they bring."""
    axis = axis_of(world)
    all_gather(torch.empty(world), torch.ones(1), axis)  # connected from here on
    out, word = torch.empty(world * 1000), torch.zeros(1)
    work = all_gather_start(out, torch.full((1000,), float(rank)), axis)
    if rank == 0:
        work.wait()
        for peer in range(1, world):
            send_start(word, axis, peer, 0).wait()
    else:
        recv_start(word, axis, 0, 0).wait()
        work.wait()
    assert torch.equal(out, torch.arange(float(world)).repeat_interleave(1000))


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_waits_later_holds_nobody_up(ranks, world):
    ranks(first_round_needs_no_waiting, world)


def calls_at_random_times(rank: int, world: int) -> None:
    """Ranks that are early now and late then, with up to four calls under way, some in several pieces."""
    axis, together, mine = axis_of(world), random.Random(7), random.Random(rank)
    under_way: list[tuple[Work, Tensor, Tensor]] = []
    for call in range(30):
        numel = together.choice([0, 3, 1000, 40_000, SLOT_BYTES // 8 + 5])
        x = [torch.arange(100.0 * call + r, 100 * call + r + world * numel).double() for r in range(world)]
        own = slice(rank * numel, (rank + 1) * numel)
        total = sum(x[1:], x[0])
        if together.random() < 0.5:
            out = torch.empty(numel, dtype=torch.float64)
            under_way.append((reduce_scatter_start(out, x[rank], axis), out, total[own]))
        else:
            out = torch.empty(world * numel, dtype=torch.float64)
            under_way.append((all_gather_start(out, total[own].clone(), axis), out, total))
        time.sleep(mine.choice([0, 0, 0.003]))
        while len(under_way) > mine.choice([0, 1, 3]):
            work, out, expected = under_way.pop(mine.randrange(len(under_way)))
            work.wait()
            torch.testing.assert_close(out, expected)
    for work, out, expected in under_way:
        work.wait()
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("world", [2, 3])
def test_calls_that_are_waited_for_at_random_times(ranks, world):
    ranks(calls_at_random_times, world)


def one_rank() -> Axis:
    return Mesh.create({})["tp"]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda a: all_reduce(torch.ones(4, 4).t()[:2], a), "contiguous"),
        (lambda a: reduce_scatter(torch.ones(2), torch.ones(5), a), "5 torch.float32 and 2"),
        (lambda a: all_gather(torch.ones(4), torch.ones(4, dtype=torch.float64), a), "one dtype"),
        (lambda a: all_to_all(torch.ones(4), torch.ones(4), a, [3], [4]), r"\[3\] do not cut 4 rows"),
        (lambda a: broadcast(torch.ones(1), a, 1), "from 0 to 0"),
        (lambda a: send_start(torch.ones(1), a, 0, 0), "no peer 0"),
        (lambda a: recv_start(torch.ones(1), a, 1, 0), "no peer 1"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(call, says):
    with pytest.raises(InputError, match=says):
        call(one_rank())
