"""A rank that dies, stops or stays away: the others end with a RankError that says where."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from meshwright.comm import collectives as c
from meshwright.comm.mesh import Axis, Mesh
from meshwright.comm.p2p import recv_start
from meshwright.core.errors import RankError
from tests.pool import RanksFailed

SMALL, LARGE = 10, 3_000_000


def call(primitive: str, axis: Axis, numel: int) -> None:
    block, full = torch.ones(numel), torch.ones(numel * axis.size)
    calls = {
        "all_reduce": lambda: c.all_reduce(full, axis),
        "reduce_scatter": lambda: c.reduce_scatter(block, full, axis),
        "all_gather": lambda: c.all_gather(full, block, axis),
        "all_to_all": lambda: c.all_to_all(torch.empty_like(full), full, axis),
        "broadcast": lambda: c.broadcast(block, axis, 1),
        "reduce": lambda: c.reduce(block, axis, 0),
        "receive": lambda: recv_start(block, axis, 1, 0).wait(),
        "barrier": lambda: c.barrier(axis),
    }
    calls[primitive]()


def lose_rank_1(
    rank: int, world: int, primitive: str, numel: int, how: int, shared_memory: bool = True
) -> tuple[str, float]:
    axis = Mesh.create({"dp": world}, shared_memory=shared_memory)["dp"]
    c.barrier(axis)
    if primitive != "all_to_all":  # that one is lost before the ranks have met in memory
        c.all_reduce(torch.ones(1), axis)
    if rank == 1:
        os.kill(os.getpid(), how)
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        call(primitive, axis, numel)
    return str(caught.value), time.monotonic() - began


PRIMITIVES = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "receive", "barrier"]


CASES = [
    ("all_reduce", LARGE, True),
    *((primitive, SMALL, True) for primitive in PRIMITIVES),
    *((primitive, SMALL, False) for primitive in PRIMITIVES[:3]),
]


@pytest.mark.parametrize(("primitive", "numel", "shared_memory"), CASES)
def test_a_killed_rank_is_noticed_within_seconds(ranks, primitive, numel, shared_memory):
    answers = ranks(lose_rank_1, 3, primitive, numel, signal.SIGKILL, shared_memory, may_die=[1])
    assert answers[1] is None
    for rank in (0, 2):
        text, seconds = answers[rank]
        assert f"rank {rank}: {primitive} on axis `dp` (ranks 0, 1, 2) failed" in text
        assert seconds < 10


def test_the_lost_rank_is_named(ranks):
    assert ranks(lose_rank_1, 2, "all_reduce", SMALL, signal.SIGKILL, may_die=[1])[0][0].endswith(
        "the process of rank 1 has ended"
    )
    stopped = ranks(lose_rank_1, 2, "all_reduce", SMALL, signal.SIGSTOP, may_die=[1], group_timeout_s=4)
    assert stopped[0][0].endswith("rank 1 did not come within 4 s")


@pytest.mark.parametrize("primitive", ["broadcast", "receive"])
def test_a_stopped_rank_is_noticed_at_the_timeout(ranks, primitive):
    answers = ranks(lose_rank_1, 2, primitive, SMALL, signal.SIGSTOP, may_die=[1], group_timeout_s=4)
    text, seconds = answers[0]
    assert f"{primitive} on axis `dp` (ranks 0, 1) failed" in text
    assert 3.0 < seconds < 15


def raise_on_1(rank: int, world: int) -> None:
    axis = Mesh.create({"dp": world})["dp"]
    if rank == 1:
        raise ZeroDivisionError("rank 1 cannot go on")
    c.barrier(axis)


def add(rank: int, world: int) -> float:
    return c.all_reduce(torch.ones(1), Mesh.create({"dp": world})["dp"]).item()


def test_the_pool_reports_the_cause_first_and_recovers(ranks):
    with pytest.raises(
        RanksFailed, match=r"^\n--- rank 1 ---\n(.*\n)*ZeroDivisionError: rank 1 cannot go on"
    ) as caught:
        ranks(raise_on_1, 3)
    assert "raise_on_1" in caught.value.errors[1]
    assert ranks(add, 3) == [3.0, 3.0, 3.0]


def sleep_on_1(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(60)


def test_the_pool_ends_a_job_that_hangs(ranks):
    with pytest.raises(RanksFailed, match="no answer; the job had") as caught:
        ranks(sleep_on_1, 2, timeout_s=2.0)
    assert list(caught.value.errors) == [1]
    assert ranks(add, 2) == [2.0, 2.0]
