"""The verifier: legal tables pass, each single fault is caught."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import ProgramError
from meshwright.core.program import Action, Kind, Program
from meshwright.core.schedule import schedules
from meshwright.core.strategy import Strategy
from meshwright.schedule.build import program
from meshwright.schedule.edges import edges, edges_between_ranks
from meshwright.schedule.evaluation import evaluation_program
from meshwright.schedule.liveness import peak_held, peak_live, peak_live_until_input
from meshwright.schedule.verify import verify
from tests.schedule.oracle import WAYS, is_legal, spoilt, with_row

SCHEDULES = tuple(schedules())


@cache
def built(name: str, reduce: bool = True) -> Program:
    """Three ranks, or two where the schedule needs an even number; two chunks where it may have several."""
    schedule = schedules()[name]
    if schedule.is_asynchronous:
        return program(name, 3, 3, reduce, num_steps=2)
    return program(name, 4 - schedule.num_directions, 4, reduce, num_chunks=schedule.chunks or 2)


def verdict(table: Program) -> bool:
    """Whether the verifier accepts it."""
    try:
        verify(table)
    except ProgramError:
        return False
    return True


def hand_made(*rows: str, num_micro_batches: int = 1) -> Program:
    parsed = tuple(tuple(Action.parse(cell) for cell in row.split()) for row in rows)
    return Program("hand-made", parsed, tuple(range(len(rows))), num_micro_batches)


def cells(table: Program) -> list[tuple[int, int]]:
    return [(rank, index) for rank, row in enumerate(table.rows) for index in range(len(row))]


@pytest.mark.parametrize("name", SCHEDULES)
def test_removing_any_action_is_caught(name: str) -> None:
    table = built(name)
    for rank, index in cells(table):
        row = list(table.rows[rank])
        del row[index]
        with pytest.raises(ProgramError):
            verify(with_row(table, rank, row))


@pytest.mark.parametrize("name", SCHEDULES)
def test_doubling_any_action_is_caught(name: str) -> None:
    table = built(name)
    for rank, index in cells(table):
        row = list(table.rows[rank])
        with pytest.raises(ProgramError, match="stands twice"):
            verify(with_row(table, rank, [*row[:index], row[index], *row[index:]]))


@pytest.mark.parametrize("name", SCHEDULES)
def test_moving_any_action_to_another_rank_is_caught(name: str) -> None:
    table = built(name)
    for rank, index in cells(table):
        row = list(table.rows[rank])
        action = row.pop(index)
        other = (rank + 1) % table.num_ranks
        moved = with_row(with_row(table, rank, row), other, [*table.rows[other], action])
        with pytest.raises(ProgramError, match=f"stage {action.stage} stands on rank {rank}"):
            verify(moved)


@pytest.mark.parametrize("name", SCHEDULES)
def test_verdict_on_random_swaps_is_the_oracles(name: str) -> None:
    """Two cells of a row change places: some such tables are legal, most are not, and the verifier knows which."""
    pick = random.Random(name)
    table = built(name)
    verdicts = []
    for _ in range(120):
        mutant = spoilt(table, "swap", pick)
        assert verdict(mutant) == is_legal(mutant), mutant.to_csv()
        verdicts.append(is_legal(mutant))
    assert 0 < sum(verdicts) < len(verdicts) / 2


@settings(max_examples=400, deadline=None)
@given(name=st.sampled_from(SCHEDULES), how=st.sampled_from(WAYS), seed=st.integers(0, 10**6), reduce=st.booleans())
def test_verdict_on_any_fault_is_the_oracles(name: str, how: str, seed: int, reduce: bool) -> None:
    mutant = spoilt(built(name, reduce), how, random.Random(seed))
    assert verdict(mutant) == is_legal(mutant), mutant.to_csv()


def test_the_oracle_accepts_what_is_right_and_some_of_each_harmless_change() -> None:
    """Else the two tests above would compare one `no` with another."""
    for name in SCHEDULES:
        assert is_legal(built(name))
    pick = random.Random(1)
    harmless = {
        how: sum(is_legal(spoilt(built(name), how, pick)) for name in SCHEDULES for _ in range(6)) for how in WAYS
    }
    assert min(harmless[how] for how in ("swap", "nudge", "move", "split")) > 0
    assert max(harmless[how] for how in ("drop", "double", "other rank")) == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_swapping_dependent_actions_is_caught(name: str) -> None:
    table = built(name)
    pairs = [(e.producer, e.send) for e in edges_between_ranks(table)]
    pairs += [(e.recv, e.consumer) for e in edges_between_ranks(table)]
    pairs += [(e.producer, e.consumer) for e in edges(table) if e not in set(edges_between_ranks(table))]
    cells = {action for row in table.rows for action in row}
    for first, second in ((Kind.F, Kind.B), (Kind.F, Kind.I), (Kind.I, Kind.W)):
        found = [a for a in cells if a.kind is second]
        pairs += [(replace(a, kind=first), a) for a in found]
    for first, second in pairs:
        rank = table.stage_ranks[first.stage]
        row = list(table.rows[rank])
        i, j = row.index(first), row.index(second)
        row[i], row[j] = row[j], row[i]
        with pytest.raises(ProgramError):
            verify(with_row(table, rank, row))


def test_messages_out_of_order_are_named() -> None:
    table = hand_made(
        "F0@0 F1@0 SEND_F0@0 SEND_F1@0 RECV_B0@0 B0@0 RECV_B1@0 B1@0",
        "RECV_F1@1 RECV_F0@1 F0@1 F1@1 B0@1 SEND_B0@1 B1@1 SEND_B1@1",
        num_micro_batches=2,
    )
    with pytest.raises(ProgramError, match="rank 0 sends SEND_F0@0 where rank 1 expects RECV_F1@1") as caught:
        verify(table)
    assert "[SEND_F0@0]" in str(caught.value)
    assert "[RECV_F1@1]" in str(caught.value)


def test_deadlock_of_crossing_sends_is_reported_with_its_cells() -> None:
    """Fine with buffered sends, stuck with blocking ones: both ranks send before either receives."""
    table = hand_made(
        "F0@0 SEND_F0@0 F1@0 SEND_F1@0 RECV_B0@0 B0@0 RECV_B1@0 B1@0",
        "RECV_F0@1 F0@1 B0@1 SEND_B0@1 RECV_F1@1 F1@1 B1@1 SEND_B1@1",
        num_micro_batches=2,
    )
    with pytest.raises(ProgramError, match="deadlock: rank 0 waits at SEND_F1@0, rank 1 waits at SEND_B0@1") as caught:
        verify(table)
    first, *drawn = str(caught.value).splitlines()
    assert first.startswith("hand-made: deadlock")
    assert any("[SEND_F1@0]" in line for line in drawn)
    assert any("[SEND_B0@1]" in line for line in drawn)


def test_work_after_reduce_is_caught() -> None:
    table = hand_made("F0@0 ARM@0 B0@0 REDUCE@0 ARM@0")
    with pytest.raises(ProgramError, match="ARM@0 stands twice"):
        verify(table)
    with pytest.raises(ProgramError, match="B0@0 on rank 0 stands after REDUCE@0"):
        verify(hand_made("F0@0 ARM@0 REDUCE@0 B0@0"))


def test_arm_too_early_is_caught() -> None:
    with pytest.raises(ProgramError, match="ahead of 2 backwards"):
        verify(hand_made("F0@0 ARM@0 B0@0 F1@0 B1@0 REDUCE@0", num_micro_batches=2))


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("F0@0 B0@0 F0@5 B0@5", "there are 1 stages"),
        ("F0@0 B0@0 F7@0", "there are 1 micro-batches"),
        ("F0@0 B0@0 SEND_F0@0", "no purpose"),
        ("F0@0 B0@0 REDUCE0@0", "for all micro-batches"),
        ("F@0 B0@0", "there are 1 micro-batches"),
        ("B0@0 F0@0", "B0@0 stands before F0@0"),
        ("F0@0 W0@0 I0@0", "W0@0 stands before I0@0"),
        ("F0@0 I0@0", "W0@0 is missing"),
        ("F0@0 UPDATE0@0 B0@0", "UPDATE0@0 stands before B0@0"),
        ("F0@0 B0@0 UPDATE@0", "there are 1 micro-batches"),
        ("F0@0 ARM@0 B0@0 UPDATE0@0 REDUCE@0", "ARM and REDUCE beside UPDATE"),
        ("F0@0 W0@0", "I0@0 is missing"),
        ("F0@0 I0@0 W0@0 B0@0", "B0@0 and I0@0 stand both on rank 0; a backward is whole or split"),
        ("F0@0 B0@0 W0@0", "B0@0 and W0@0 stand both"),
    ],
)
def test_cells_that_make_no_sense(row: str, fault: str) -> None:
    with pytest.raises(ProgramError, match=fault):
        verify(hand_made(row))


def test_a_fault_in_a_split_backward_marks_its_cells() -> None:
    with pytest.raises(ProgramError) as caught:
        verify(hand_made("F0@0 W0@0 I0@0"))
    assert str(caught.value).splitlines()[1:] == ["r0: F0@0 [W0@0] [I0@0]"]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("F0@0 B0@0 UPDATE0@0 F1@0 B1@0", "UPDATE1@0 is missing on rank 0"),
        ("F0@0 F1@0 B0@0 B1@0 UPDATE0@0 UPDATE1@0", "B1@0 stands before UPDATE0@0"),
        ("F0@0 F1@0 B0@0 UPDATE1@0 B1@0", "UPDATE1@0 stands before B1@0"),
    ],
)
def test_an_update_takes_in_what_it_should(row: str, fault: str) -> None:
    with pytest.raises(ProgramError, match=fault):
        verify(hand_made(row, num_micro_batches=2))


def test_all_stages_update_after_the_same_micro_batches() -> None:
    table = program("pipedream-2bw", 2, 2, num_steps=2)
    row = [action for action in table.rows[1] if str(action) != "UPDATE1@1"]
    with pytest.raises(ProgramError, match="UPDATE1@1 is missing on rank 1"):
        verify(with_row(table, 1, row))


def test_a_micro_batch_keeps_to_its_direction() -> None:
    table = program("dualpipe", 2, 4)
    row = [replace(action, micro_batch=3) if str(action) == "F0@0" else action for action in table.rows[0]]
    with pytest.raises(ProgramError, match="F3@0 on rank 0: micro-batches 0 to 1 go in the direction of stage 0"):
        verify(with_row(table, 0, row))


def test_deadlock_of_three_ranks_is_drawn_with_all_that_wait() -> None:
    """Each rank sends to the next before it receives, in a ring of stages."""
    rows = (
        "F0@0 SEND_F0@0 F1@0 SEND_F1@0 RECV_F0@3 F0@3 RECV_F1@3 F1@3",
        "RECV_F0@1 F0@1 SEND_F0@1 RECV_F1@1 F1@1 SEND_F1@1",
        "RECV_F0@2 F0@2 RECV_F1@2 F1@2 SEND_F0@2 SEND_F1@2",
    )
    parsed = tuple(tuple(Action.parse(cell) for cell in row.split()) for row in rows)
    table = Program("ring", parsed, (0, 1, 2, 0), 2)
    verify(table, backward=False)
    stuck = list(parsed[0])
    stuck.insert(2, stuck.pop(4))
    with pytest.raises(ProgramError, match="deadlock: rank 0 waits at RECV_F0@3, rank 1 waits at RECV_F1@1") as caught:
        verify(with_row(table, 0, stuck), backward=False)
    drawn = str(caught.value).splitlines()[1:]
    assert [line.count("[") for line in drawn] == [1, 1, 1]
    assert "[RECV_F0@3]" in drawn[0]


def test_stage_on_a_rank_that_is_not_there() -> None:
    with pytest.raises(ProgramError, match="stage 0 stands on rank 3"):
        verify(replace(hand_made("F0@0 B0@0"), stage_ranks=(3,)))


def test_a_training_step_needs_backwards_and_an_evaluation_has_none() -> None:
    with pytest.raises(ProgramError, match="B0@0 is missing"):
        verify(evaluation_program(Strategy(pp=2), 2))
    with pytest.raises(ProgramError, match="no purpose"):
        verify(program("gpipe", 2, 2), backward=False)


def test_peak_live_of_the_published_tables() -> None:
    assert peak_live(program("1f1b", 4, 8)) == (4, 3, 2, 1)
    assert peak_live(program("gpipe", 4, 8)) == (8, 8, 8, 8)
    assert peak_live(program("naive", 4, 8)) == (1, 1, 1, 1)


def test_a_split_backward_frees_in_two_steps() -> None:
    table = program("zb-h1", 4, 8)
    assert peak_live(table) == (4, 4, 4, 4)
    assert peak_live_until_input(table) == (4, 3, 2, 1)
    row = hand_made("F0@0 F1@0 I0@0 I1@0 W0@0 F2@0 B2@0 W1@0", num_micro_batches=3)
    assert peak_live(row) == (2,)
    assert peak_held(row, until_input=[10], until_weight=[1]) == (22,)
    assert peak_held(replace(row, rows=(row.rows[0][2:],)), [10], [1]) == (0,)
