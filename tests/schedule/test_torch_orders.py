"""The same order as `torch.distributed.pipelining`'s, or what differs and why."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch.distributed.pipelining.schedules as torch_schedules  # noqa: TID251

from meshwright.core.schedule import PipelineSize, schedules

SIZES = [(2, 2), (2, 6), (3, 7), (4, 4), (4, 8), (4, 12), (5, 10)]


def ours(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> list[list[str]]:
    rows = schedules()[name].order(PipelineSize(num_ranks, num_micro_batches, num_chunks))
    return [[f"{action.stage}{action.kind}{action.micro_batch}" for action in row] for row in rows]


def theirs(table: dict[int, list]) -> list[list[str]]:
    """An overlapped pair as its two parts, one after the other; without idle cells and reductions."""
    rows = []
    for rank in sorted(table):
        parts = [part for action in table[rank] if action for part in (action.sub_actions or (action,))]
        rows.append([str(part) for part in parts if "REDUCE" not in str(part)])
    return rows


def single_stage(schedule: type, num_ranks: int, num_micro_batches: int) -> list[list[str]]:
    state = SimpleNamespace(
        _n_microbatches=num_micro_batches, pp_group_size=num_ranks, _num_stages=num_ranks, _stage=None
    )
    return theirs(schedule._get_pipeline_order(state))


def multi_stage(schedule: type, num_ranks: int, num_micro_batches: int, num_chunks: int) -> list[list[str]]:
    """What the schedule's constructor computes, without stages and process groups."""
    num_rounds = max(1, num_micro_batches // num_ranks)
    state = SimpleNamespace(
        _n_microbatches=num_micro_batches,
        pp_group_size=num_ranks,
        n_local_stages=num_chunks,
        num_stages=num_chunks * num_ranks,
        number_of_rounds=num_rounds,
        microbatches_per_round=num_micro_batches // num_rounds,
        _stages=[None] * num_chunks,
    )
    row: Callable = schedule._calculate_single_rank_operations
    return theirs({rank: row(state, rank) for rank in range(num_ranks)})


@pytest.mark.parametrize(
    ("name", "schedule"), [("gpipe", torch_schedules.ScheduleGPipe), ("1f1b", torch_schedules.Schedule1F1B)]
)
@pytest.mark.parametrize("size", SIZES)
def test_one_stage_per_rank(name: str, schedule: type, size: tuple[int, int]) -> None:
    expected = single_stage(schedule, *size)
    found = ours(name, *size)
    assert found[:-1] == expected[:-1]
    # torch 2.13 counts the last rank's 1F1B forwards from 1; their order of kinds is the same.
    assert [cell[:2] for cell in found[-1]] == [cell[:2] for cell in expected[-1]]


@pytest.mark.parametrize("size", [*itertools.product((2, 4), (2, 4, 6, 8, 12), (2, 3)), (3, 5, 2), (4, 3, 2)])
def test_interleaved_1f1b(size: tuple[int, int, int]) -> None:
    expected = multi_stage(torch_schedules.ScheduleInterleaved1F1B, *size)
    assert ours("interleaved-1f1b", *size) == expected


def test_interleaved_1f1b_of_one_chunk_is_1f1b_and_in_torch_twice_as_far_ahead() -> None:
    """A choice: one chunk per rank needs no more activations than 1F1B."""
    expected = multi_stage(torch_schedules.ScheduleInterleaved1F1B, 4, 8, 1)
    found = ours("interleaved-1f1b", 4, 8, 1)
    assert [row.index(next(cell for cell in row if "B" in cell)) for row in expected] == [7, 5, 3, 1]
    assert [row.index(next(cell for cell in row if "B" in cell)) for row in found] == [4, 3, 2, 1]


@pytest.mark.parametrize("size", [(2, 4, 2), (3, 5, 2), (4, 8, 3)])
def test_looped_bfs(size: tuple[int, int, int]) -> None:
    """A choice: backwards take micro-batches in the order of the forwards, torch's in the opposite one."""
    m = size[1]
    expected = multi_stage(torch_schedules.ScheduleLoopedBFS, *size)
    turned = [
        [cell if "F" in cell else f"{cell.split('B')[0]}B{m - 1 - int(cell.split('B')[1])}" for cell in row]
        for row in expected
    ]
    assert ours("bfs", *size) == turned


@pytest.mark.parametrize("size", SIZES)
def test_interleaved_zero_bubble_of_one_chunk_is_zb_h1(size: tuple[int, int]) -> None:
    expected = multi_stage(torch_schedules.ScheduleInterleavedZeroBubble, *size, 1)
    assert ours("zb-h1", *size) == expected


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (2, 2), (2, 4), (3, 5), (4, 4), (4, 7), (4, 16)])
def test_zbv(size: tuple[int, int]) -> None:
    expected = multi_stage(torch_schedules.ScheduleZBVZeroBubble, *size, 2)
    assert ours("zb-v", *size, 2) == expected


@pytest.mark.parametrize("size", [(1, 2), (2, 4), (3, 6), (3, 9), (4, 8), (4, 13), (6, 12)])
def test_dualpipe_v(size: tuple[int, int]) -> None:
    """torch has none for fewer micro-batches than stages; here these take the same order without the later ones."""
    expected = multi_stage(torch_schedules.ScheduleDualPipeV, *size, 2)
    assert ours("dualpipe-v", *size, 2) == expected
