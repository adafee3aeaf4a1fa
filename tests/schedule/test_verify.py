"""The verifier: legal tables pass, each single fault is caught."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshwright.core.errors import ProgramError
from meshwright.core.program import Action, Kind, Program
from meshwright.schedule.build import forward_program, program
from meshwright.schedule.edges import edges_between_ranks
from meshwright.schedule.liveness import peak_live
from meshwright.schedule.verify import verify

SCHEDULES = ("naive", "gpipe", "1f1b")


def with_row(table: Program, rank: int, row: list[Action]) -> Program:
    return replace(table, rows=(*table.rows[:rank], tuple(row), *table.rows[rank + 1 :]))


def hand_made(*rows: str, num_micro_batches: int = 1) -> Program:
    parsed = tuple(tuple(Action.parse(cell) for cell in row.split()) for row in rows)
    return Program("hand-made", parsed, tuple(range(len(rows))), num_micro_batches)


def cells(table: Program) -> list[tuple[int, int]]:
    return [(rank, index) for rank, row in enumerate(table.rows) for index in range(len(row))]


@pytest.mark.parametrize("name", SCHEDULES)
def test_removing_any_action_is_caught(name: str) -> None:
    table = program(name, 3, 4)
    for rank, index in cells(table):
        row = list(table.rows[rank])
        del row[index]
        with pytest.raises(ProgramError):
            verify(with_row(table, rank, row))


@pytest.mark.parametrize("name", SCHEDULES)
def test_doubling_any_action_is_caught(name: str) -> None:
    table = program(name, 3, 4)
    for rank, index in cells(table):
        row = list(table.rows[rank])
        with pytest.raises(ProgramError, match="stands twice"):
            verify(with_row(table, rank, [*row[:index], row[index], *row[index:]]))


@pytest.mark.parametrize("name", SCHEDULES)
def test_moving_any_action_to_another_rank_is_caught(name: str) -> None:
    table = program(name, 3, 3)
    for rank, index in cells(table):
        row = list(table.rows[rank])
        action = row.pop(index)
        other = (rank + 1) % 3
        moved = with_row(with_row(table, rank, row), other, [*table.rows[other], action])
        with pytest.raises(ProgramError, match=f"stage {rank} stands on rank {rank}"):
            verify(moved)


def strict_run_completes(table: Program) -> bool:
    """An independent oracle: run rows under blocking sends, checking data at each use; no code of the verifier.

    Every (kind, micro-batch) becomes available at most once; a transfer happens when both heads name it.
    """
    rows = [[str(action) for action in row] for row in table.rows]
    have: list[set[str]] = [set() for _ in rows]
    last = len(rows) - 1
    at = [0] * len(rows)

    def head(rank: int) -> str:
        return rows[rank][at[rank]] if at[rank] < len(rows[rank]) else ""

    def parts(cell: str) -> tuple[str, str]:
        kind_and_batch = cell.split("@")[0]
        kind = kind_and_batch.rstrip("0123456789")
        return kind, kind_and_batch[len(kind) :]

    def step(rank: int) -> bool:
        kind, k = parts(head(rank))
        needs = {"F": set() if rank == 0 else {f"in{k}"}, "B": {f"F{k}"} | (set() if rank == last else {f"grad{k}"})}
        needs |= {"SEND_F": {f"F{k}"}, "SEND_B": {f"B{k}"}, "REDUCE": {f"B{i}" for i in range(table.num_micro_batches)}}
        if not needs.get(kind, set()) <= have[rank]:
            return False
        if kind in ("SEND_F", "SEND_B"):
            peer = rank + (1 if kind == "SEND_F" else -1)
            if parts(head(peer)) != (kind.replace("SEND", "RECV"), k):
                return False
            have[peer].add(("in" if kind == "SEND_F" else "grad") + k)
            at[peer] += 1
        elif kind.startswith("RECV"):
            return False  # its sender moves it
        have[rank].add(kind + k)
        at[rank] += 1
        return True

    while any(head(rank) and step(rank) for rank in range(len(rows))):
        pass
    return not any(head(rank) for rank in range(len(rows)))


def armed_late_enough(table: Program) -> bool:
    """ARM before exactly one backward, and REDUCE last."""
    for row in table.rows:
        kinds = [action.kind for action in row]
        if kinds[kinds.index(Kind.ARM) :].count(Kind.B) != 1 or kinds[-1] is not Kind.REDUCE:
            return False
    return True


@pytest.mark.parametrize("name", SCHEDULES)
def test_verdict_on_random_swaps_is_the_oracles(name: str) -> None:
    """Two cells of a row change places: some such tables are legal, most are not, and the verifier knows which."""
    pick = random.Random(name)
    table = program(name, 3, 4)
    verdicts = []
    for _ in range(400):
        rank = pick.randrange(3)
        row = list(table.rows[rank])
        i, j = pick.sample(range(len(row)), 2)
        row[i], row[j] = row[j], row[i]
        mutant = with_row(table, rank, row)
        legal = strict_run_completes(mutant) and armed_late_enough(mutant)
        try:
            verify(mutant)
        except ProgramError:
            assert not legal, mutant.to_csv()
        else:
            assert legal, mutant.to_csv()
        verdicts.append(legal)
    assert 0 < sum(verdicts) < len(verdicts) / 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_swapping_dependent_actions_is_caught(name: str) -> None:
    table = program(name, 3, 4)
    pairs = [(e.producer, e.send) for e in edges_between_ranks(table)]
    pairs += [(e.recv, e.consumer) for e in edges_between_ranks(table)]
    pairs += [(Action(Kind.F, s, k), Action(Kind.B, s, k)) for s in range(3) for k in range(4)]
    for first, second in pairs:
        row = list(table.rows[first.stage])
        i, j = row.index(first), row.index(second)
        row[i], row[j] = row[j], row[i]
        with pytest.raises(ProgramError):
            verify(with_row(table, first.stage, row))


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
    ],
)
def test_cells_that_make_no_sense(row: str, fault: str) -> None:
    with pytest.raises(ProgramError, match=fault):
        verify(hand_made(row))


def test_stage_on_a_rank_that_is_not_there() -> None:
    with pytest.raises(ProgramError, match="stage 0 stands on rank 3"):
        verify(replace(hand_made("F0@0 B0@0"), stage_ranks=(3,)))


def test_a_training_step_needs_backwards_and_an_evaluation_has_none() -> None:
    with pytest.raises(ProgramError, match="B0@0 is missing"):
        verify(forward_program(2, 2))
    with pytest.raises(ProgramError, match="no purpose"):
        verify(program("gpipe", 2, 2), backward=False)


def test_peak_live_of_the_published_tables() -> None:
    assert peak_live(program("1f1b", 4, 8)) == (4, 3, 2, 1)
    assert peak_live(program("gpipe", 4, 8)) == (8, 8, 8, 8)
    assert peak_live(program("naive", 4, 8)) == (1, 1, 1, 1)
