"""A user's own table in a file: read, completed, verified, refused with line and cell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.core.errors import InputError, ProgramError
from meshwright.core.program import Program
from meshwright.core.schedule import find_schedule, schedules
from meshwright.schedule.build import order_program, program
from meshwright.schedule.closed_form import peak_live
from meshwright.schedule.verify import verify
from tests.schedule.sizes import tables


@pytest.fixture
def file(tmp_path: Path):
    """`file(*lines)`: the path of a table of these lines."""

    def write(*lines: str) -> str:
        path = tmp_path / "mine.csv"
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return write


@pytest.mark.parametrize("name", list(schedules()))
def test_every_program_comes_back_from_its_text(name: str) -> None:
    for table in tables((1, 2, 4), (1, 2, 6), [name], (1, 2)):
        for built in (table.build(), table.build(reduce=False)):
            assert Program.from_csv(built.to_csv(), name) == built
        bare = order_program(schedules()[name], schedules()[name].size(*table[1:]))
        assert Program.from_csv(bare.to_csv(), name) == bare


def test_idle_time_and_space_are_skipped() -> None:
    built = Program.from_csv("F0@0, F1@0,,,,,B0@0,B1@0\r\n,F0@1,B0@1,,F1@1,B1@1,\r\n\r\n", "mine")
    assert built.rows == order_program(schedules()["1f1b"], schedules()["1f1b"].size(2, 2)).rows
    assert (built.name, built.stage_ranks, built.num_micro_batches, built.num_directions) == ("mine", (0, 1), 2, 1)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["F0@0,B0@0", "F0@1,G0@1"], r"line 2, cell 2: `G0@1` is not an action; write for example F0@1"),
        (["F0@0,,F0@zero"], r"line 1, cell 3: `F0@zero` is not an action"),
        (["F0@0,B0@0", "", "F0@1,B0@1"], r"line 2: no actions; every line is the row of a rank"),
        (["F0@0,B0@0,UPDATE0@0"], r"UPDATE is not for tables from a file; write one step, without it"),
        (["F0@0,B0@0", "F0@2,B0@2"], r"stages \[1\] have no forward"),
        (["F0@0,B0@0", "F0@5,B0@5"], r"stages \[1, 2, 3, 4\] have no forward"),
        ([f"F0@{10**12},B0@{10**12}"], r"stages \[0, 1, 2, 3\] and 999,999,999,996 more have no forward"),
        ([f"F{'9' * 5000}@0"], r"line 1, cell 1: `F9+@0` is not an action"),
        (["F\u0661@0"], r"line 1, cell 1: `F\u0661@0` is not an action"),
        (["F0@0,F0@1,B0@1,B0@0", "F0@2,B0@2"], r"3 stages on 2 ranks; every rank needs as many as the others"),
    ],
)
def test_what_is_no_table_is_named_by_its_place(file, lines: list[str], words: str) -> None:
    path = file(*lines)
    with pytest.raises(ProgramError, match=words) as caught:
        find_schedule(path)
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)


def test_compute_actions_are_completed(file) -> None:
    path = file("F0@0,F1@0,,,B0@0,B1@0", ",F0@1,B0@1,F1@1,B1@1")
    built = program(path, 2, 2)
    verify(built)
    assert built == replace(program("1f1b", 2, 2), name=path)
    assert program(path, 2, 2, reduce=False) == replace(program("1f1b", 2, 2, reduce=False), name=path)
    assert peak_live(path, 2, 2) == (2, 1)


def test_a_whole_program_is_taken_as_it_is(file) -> None:
    whole = program("dualpipe", 4, 8)
    path = file(*whole.to_csv().splitlines())
    assert program(path, 4, 8) == replace(whole, name=path)
    assert program(path, 4, 8, reduce=False) == replace(program("dualpipe", 4, 8, reduce=False), name=path)


def test_transfers_without_reductions_get_them(file) -> None:
    path = file(*program("zb-v", 2, 4, reduce=False).to_csv().splitlines())
    assert program(path, 2, 4) == replace(program("zb-v", 2, 4), name=path)


def test_a_table_is_good_for_its_own_size_alone(file) -> None:
    path = file("F0@0,B0@0,F1@0,B1@0")
    verify(program(path, 1, 2))
    for size in ((1, 4), (2, 2)):
        with pytest.raises(ProgramError, match="the file is for 1 rank and 2 micro-batches; take these"):
            program(path, *size)
    with pytest.raises(InputError, match="puts one stage on a rank, but 2 chunks"):
        program(path, 1, 2, num_chunks=2)


@pytest.mark.parametrize(
    ("lines", "place", "words"),
    [
        (["F0@0,B0@0", ",F0@1,,W0@1,I0@1"], "line 2, cell 4", "W0@1 stands before I0@1 on rank 1, which it needs"),
        (["F0@0,B0@0", "B0@1,,F0@1"], "line 2, cell 1", "B0@1 stands before F0@1"),
        (["F0@0,,F0@0,B0@0"], "line 1, cell 1", "F0@0 stands twice on rank 0"),
        (["F0@0,B0@0", "F0@1,I0@1"], "", "W0@1 is missing on rank 1"),
        (["F0@0,,B1@0,F1@0", "F0@1,B0@1,F1@1,B1@1"], "", "B0@0 is missing on rank 0"),
        (["F0@0,SEND_F0@0,RECV_B0@0,B0@0", "RECV_F0@1,F0@1,B0@1"], "", "SEND_B0@1 is missing on rank 1"),
        (["F0@0,B0@0,SEND_F0@0"], "line 1, cell 3", "SEND_F0@0 on rank 0 has no purpose in this step"),
    ],
)
def test_what_cannot_run_is_named_by_line_and_cell(file, lines: list[str], place: str, words: str) -> None:
    path = file(*lines)
    built = find_schedule(path).order(None)
    micro_batches = {action.micro_batch for row in built for action in row}
    with pytest.raises(ProgramError) as caught:
        program(path, len(lines), len(micro_batches))
    assert str(caught.value).startswith(f"{path}, {place}: {words}" if place else f"{path}: {words}")
    assert "\n" not in str(caught.value)


def test_a_deadlock_is_drawn(file) -> None:
    path = file("F0@0,B0@0,F1@0,B1@0", "F1@1,B1@1,F0@1,B0@1")
    with pytest.raises(ProgramError, match="deadlock: rank 0 waits at B0@0, rank 1 waits at F1@1") as caught:
        program(path, 2, 2)
    assert str(caught.value).splitlines()[1:] == ["r0: F0@0 [B0@0] F1@0 B1@0", "r1: [F1@1] B1@1 F0@1 B0@1"]


def test_a_deadlock_of_blocking_sends_is_drawn(file) -> None:
    path = file(
        "F0@0,SEND_F0@0,F1@0,SEND_F1@0,RECV_B0@0,B0@0,RECV_B1@0,B1@0",
        "RECV_F0@1,F0@1,B0@1,SEND_B0@1,RECV_F1@1,F1@1,B1@1,SEND_B1@1",
    )
    with pytest.raises(ProgramError, match=r"deadlock: .*\(sends block until received\)") as caught:
        program(path, 2, 2)
    assert "[SEND_F1@0]" in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.csv: no such file") as caught:
        find_schedule(str(tmp_path / "none.csv"))
    assert "\n" not in str(caught.value)


def test_a_changed_file_is_read_again(file) -> None:
    assert find_schedule(file("F0@0,B0@0")).order(None) != find_schedule(file("F0@0,I0@0,W0@0")).order(None)
