"""Strategy: its words are those of the tables that they choose from; stages are cut as evenly as can be."""

from __future__ import annotations

from typing import get_args

import pytest

from meshwright.core.job import Job
from meshwright.core.precision import NUM_MOMENTS, RECIPES
from meshwright.core.strategy import Precision, Strategy, inner_stages_first, split_layers


def test_every_word_has_its_row() -> None:
    assert get_args(Precision) == tuple(RECIPES)
    assert set(get_args(Job.model_fields["optimizer"].annotation)) == NUM_MOMENTS.keys()


@pytest.mark.parametrize("num_stages", range(1, 7))
def test_layers_are_split_evenly_and_inner_stages_take_what_is_left(num_stages: int) -> None:
    for num_layers in range(num_stages, 30):
        counts = split_layers(num_layers, num_stages)
        assert sum(counts) == num_layers
        assert max(counts) - min(counts) <= 1
        assert counts[-1] == min(counts), "the last stage has the head"


def test_order_in_which_stages_take_layers() -> None:
    assert [inner_stages_first(n) for n in (1, 2, 4)] == [(0,), (0, 1), (1, 2, 0, 3)]
    assert split_layers(6, 4) == (1, 2, 2, 1)
    assert split_layers(7, 4) == (2, 2, 2, 1)


def test_stages_are_consecutive() -> None:
    assert Strategy(pp=3).stage_layers(7) == (range(0, 2), range(2, 5), range(5, 7))
    assert Strategy(pp=2, layers_per_stage=(1, 3)).stage_layers(4) == (range(0, 1), range(1, 4))


def test_a_rank_has_several_stages_where_the_schedule_says_so() -> None:
    looped = Strategy(pp=2, schedule="interleaved-1f1b", num_chunks=3, num_micro_batches=4)
    assert (looped.stages_per_rank, looped.num_parts, looped.end_ranks) == (3, 6, (0, 1))
    assert [looped.rank_stages(rank) for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert looped.stage_layers(7) == (range(0, 1), range(1, 3), *(range(n, n + 1) for n in range(3, 7)))
    folded = Strategy(pp=2, schedule="zb-v", num_micro_batches=4)
    assert [folded.rank_stages(rank) for rank in range(2)] == [(0, 3), (1, 2)]
    assert (folded.stage_ends(0), folded.stage_ends(3), folded.end_ranks) == ((True, False), (False, True), (0, 0))


def test_two_directions_hold_the_same_parts_and_share_the_micro_batches() -> None:
    strategy = Strategy(pp=4, schedule="dualpipe", num_micro_batches=6)
    assert (strategy.stages_per_rank, strategy.num_parts, strategy.micro_batches_per_stage) == (2, 4, 3)
    assert [strategy.rank_stages(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert strategy.stage_layers(4) == 2 * tuple(range(n, n + 1) for n in range(4))
    assert [strategy.stage_ends(stage) for stage in (0, 3, 4, 7)] == 2 * [(True, False), (False, True)]


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved-1f1b", "bfs"])
def test_a_schedule_with_whole_backwards(name: str) -> None:
    assert not Strategy(pp=2, schedule=name).splits_backward


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v"])
def test_a_schedule_that_splits_backwards(name: str) -> None:
    assert Strategy(pp=2, schedule=name, num_micro_batches=2).splits_backward


def test_short_name() -> None:
    assert Strategy().describe() == "D1 T1 P1 zero0 m1×b1 fp32"
    long = Strategy(dp=2, tp=4, pp=2, zero=1, num_micro_batches=8, recompute="full", precision="bf16")
    assert long.describe() == "D2 T4 P2 zero1 1f1b m8×b1 recompute bf16"
    looped = Strategy(pp=2, schedule="bfs", num_chunks=2)
    assert looped.describe() == "D1 T1 P2 zero0 bfs v2 m1×b1 fp32"
