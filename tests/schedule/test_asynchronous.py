"""PipeDream and PipeDream-2BW: versions of the weights, updates, and the cut into steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from meshwright.core.errors import ProgramError, UnsupportedError
from meshwright.core.program import Action, Kind, Program
from meshwright.core.schedule import PipelineSize, Schedule, schedules
from meshwright.schedule.build import program
from meshwright.schedule.closed_form import peak_live
from meshwright.schedule.liveness import peak_live as counted_live
from meshwright.schedule.slices import drain_slice, first_steady, shifted, slices, step_slice
from meshwright.schedule.unit_clock import unit_timeline
from meshwright.schedule.verify import verify
from meshwright.schedule.versions import check_versions, peak_versions, version_of
from tests.schedule.oracle import runs_to_its_end, with_row

NAMES = [name for name, schedule in schedules().items() if schedule.is_asynchronous]


def made(name: str, num_ranks: int, m: int, num_steps: int) -> tuple[Program, Schedule, PipelineSize]:
    schedule = schedules()[name]
    return program(name, num_ranks, m, num_steps=num_steps), schedule, schedule.size(num_ranks, m, None, num_steps)


def sizes(name: str) -> Iterator[tuple[int, int, int]]:
    fault = schedules()[name].fault
    for size in ((p, m, t) for p in (1, 2, 3, 4, 6) for m in (1, 2, 4, 7) for t in (1, 2, 6)):
        if not (fault and fault(PipelineSize(*size[:2]))):
            yield size


def versions(name: str, m: int, num_steps: int) -> list[list[int]]:
    """Per stage of four, the version of each micro-batch's forward."""
    built, schedule, size = made(name, 4, m, num_steps)
    version = version_of(schedule, size)
    return [[version(action) for action in row if action.kind is Kind.F] for row in built.rows]


def test_what_is_there() -> None:
    assert NAMES == ["pipedream", "pipedream-2bw", "pipedream-vertical-sync"]


@pytest.mark.parametrize("name", NAMES)
def test_tables_of_any_number_of_steps_are_legal(name: str) -> None:
    for size in sizes(name):
        built, schedule, asked = made(name, *size)
        verify(built)
        check_versions(built, schedule, asked)
        assert built.num_micro_batches == size[1] * size[2]


def test_versions_of_pipedream() -> None:
    """Narayanan et al. 2019, section 3.3: the weights a stage has when the micro-batch comes."""
    first, second, third, last = versions("pipedream", 1, 8)
    assert first == [0, 0, 0, 0, 1, 2, 3, 4]
    assert second == [0, 0, 0, 1, 2, 3, 4, 5]
    assert third == [0, 0, 1, 2, 3, 4, 5, 6]
    assert last == [0, 1, 2, 3, 4, 5, 6, 7]


def test_versions_of_pipedream_are_the_latest_of_the_table() -> None:
    """Said by the rule, and counted: updates of the stage that stand before the forward."""
    built, schedule, size = made("pipedream", 4, 2, 6)
    version = version_of(schedule, size)
    for row in built.rows:
        for index, action in enumerate(row):
            if action.kind is Kind.F:
                assert version(action) == sum(before.kind is Kind.UPDATE for before in row[:index])


def test_versions_with_vertical_sync_are_those_of_the_first_stage() -> None:
    assert versions("pipedream-vertical-sync", 1, 8) == [[0, 0, 0, 0, 1, 2, 3, 4]] * 4


def test_versions_of_2bw() -> None:
    """Narayanan et al. 2021, section 3.1: each step uses what the step before the last has left."""
    assert versions("pipedream-2bw", 4, 4) == [[*[0] * 8, *[1] * 4, *[2] * 4]] * 4
    built, _, _ = made("pipedream-2bw", 4, 4, 2)
    for row in built.rows:
        updates = [index for index, action in enumerate(row) if action.kind is Kind.UPDATE]
        assert [str(row[index]).split("@")[0] for index in updates] == ["UPDATE3", "UPDATE7"]


@pytest.mark.parametrize(
    ("name", "kept"),
    [("pipedream", (4, 3, 2, 1)), ("pipedream-vertical-sync", (4, 4, 4, 4)), ("pipedream-2bw", (2, 2, 2, 2))],
)
def test_versions_kept_are_the_published_ones(name: str, kept: tuple[int, ...]) -> None:
    built, schedule, size = made(name, 4, 4, 4)
    assert peak_versions(built, version_of(schedule, size)) == kept
    assert tuple(schedule.num_versions(size, rank) for rank in range(4)) == kept


@pytest.mark.parametrize("name", NAMES)
def test_activations_are_those_of_1f1b_and_steps_follow_without_a_bubble(name: str) -> None:
    built, _, _ = made(name, 4, 4, 5)
    assert counted_live(built) == peak_live(name, 4, 4) == (4, 3, 2, 1)
    assert unit_timeline(built).makespan_s == (5 * 4 + 3) * 3


@pytest.mark.parametrize("name", NAMES)
def test_slices_are_the_row_and_hold_one_step_of_forwards_each(name: str) -> None:
    for p, m, num_steps in sizes(name):
        built, _, _ = made(name, p, m, num_steps)
        for row, cut in zip(built.rows, slices(built, num_steps), strict=True):
            assert sum(cut, ()) == row
            assert len(cut) == num_steps + 1
            forwards = [[a.micro_batch for a in part if a.kind is Kind.F] for part in cut]
            assert forwards == [*(list(range(t * m, (t + 1) * m)) for t in range(num_steps)), []]


@pytest.mark.parametrize("name", NAMES)
def test_no_slice_waits_for_a_later_one(name: str) -> None:
    """All ranks' first slices run to their end by themselves; so do the first two, and so on."""
    for p, m, num_steps in sizes(name):
        built, _, _ = made(name, p, m, num_steps)
        cut = slices(built, num_steps)
        for t in range(num_steps + 1):
            begun = replace(built, rows=tuple(sum(row[: t + 1], ()) for row in cut))
            assert runs_to_its_end(begun), (p, m, num_steps, t)


def test_a_slice_cut_elsewhere_would_wait() -> None:
    """Else the test above could not fail: one rank's last transfer moved behind its cut."""
    built, _, _ = made("pipedream", 2, 2, 2)
    first, second = (list(row[0]) for row in slices(built, 2))
    assert runs_to_its_end(replace(built, rows=(tuple(first), tuple(second))))
    assert first.pop().kind is Kind.SEND_F
    assert not runs_to_its_end(replace(built, rows=(tuple(first), tuple(second))))


@pytest.mark.parametrize("name", NAMES)
def test_steady_slices_are_the_same_up_to_their_micro_batches(name: str) -> None:
    for p, m, _ in sizes(name):
        first = first_steady(PipelineSize(p, m))
        built, _, _ = made(name, p, m, first + 3)
        for row in slices(built, first + 3):
            assert row[first + 1] == shifted(row[first], m)
            assert row[first + 2] == shifted(row[first], 2 * m)
        longer, _, _ = made(name, p, m, first + 4)
        for row, further in zip(slices(built, first + 3), slices(longer, first + 4), strict=True):
            assert further[: first + 3] == row[: first + 3], "a slice doesn't depend on how many follow"
            assert further[-1] == shifted(row[-1], m)


@pytest.mark.parametrize("name", NAMES)
def test_the_row_without_an_end_is_that_of_any_number_of_steps(name: str) -> None:
    """What a runtime asks for step by step, and when it ends, is what a table of just as many steps has."""
    for p, m, _ in sizes(name):
        size = PipelineSize(p, m)
        for num_steps in (1, 2, first_steady(size) + 3):
            built, _, _ = made(name, p, m, num_steps)
            for rank, cut in enumerate(slices(built, num_steps)):
                asked = [step_slice(name, size, rank, step) for step in range(num_steps)]
                assert (*asked, drain_slice(name, size, rank, num_steps)) == cut, (p, m, num_steps, rank)


def test_2bw_needs_as_many_micro_batches_as_ranks() -> None:
    with pytest.raises(ProgramError, match="need as many micro-batches per step as ranks, 4, not 3; take 4 or more"):
        program("pipedream-2bw", 4, 3)


def test_too_few_micro_batches_would_need_a_third_version() -> None:
    """What the rule above prevents: below m = p−1 the step's weights are not there when it begins."""
    schedule, size = schedules()["pipedream-2bw"], PipelineSize(4, 2, 1, 4)
    built = Program.from_rows("2bw", schedule.order(size))
    with pytest.raises(ProgramError, match="uses version 1 of the weights, but the latest is 0"):
        check_versions(built, schedule, size)


def backward_with_the_latest(size: PipelineSize, action: Action) -> int:
    """PipeDream without weight stashing."""
    k = action.micro_batch or 0
    return k if action.kind is Kind.B else max(0, k - (size.num_ranks - 1 - action.stage))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"version": backward_with_the_latest}, r"B1@0 on rank 0 uses version 1 of the weights, its forward 0"),
        ({"version": lambda size, action: action.micro_batch}, r"F1@0 on rank 0 uses version 1 .* the latest is 0"),
        ({"version": lambda size, action: -1}, r"uses version -1 of the weights"),
        ({"num_versions": lambda size, rank: 2}, r"rank 0 keeps 3 versions of its weights, not 2"),
        ({"version": lambda size, action: 0}, r"rank 2 keeps 2 versions of its weights, not 1"),
    ],
)
def test_versions_out_of_range_are_refused(changes: dict[str, object], fault: str) -> None:
    built, schedule, size = made("pipedream", 3, 2, 3)
    check_versions(built, schedule, size)
    with pytest.raises(ProgramError, match=fault) as caught:
        check_versions(built, replace(schedule, **changes), size)
    assert "[" in str(caught.value).splitlines()[1]


def test_a_late_update_is_refused() -> None:
    """Legal as a table, but a forward finds older weights than the schedule says."""
    built, schedule, size = made("pipedream", 2, 2, 2)
    row = list(built.rows[0])
    at = row.index(Action(Kind.UPDATE, 0, 0))
    later = row.index(Action(Kind.F, 0, 2))
    row.insert(later, row.pop(at))
    moved = with_row(built, 0, row)
    verify(moved)
    with pytest.raises(ProgramError, match="F2@0 on rank 0 uses version 1 of the weights, but the latest is 0"):
        check_versions(moved, schedule, size)


def test_a_synchronous_schedule_has_no_versions() -> None:
    with pytest.raises(UnsupportedError, match="`1f1b` is synchronous"):
        version_of(schedules()["1f1b"], PipelineSize(2, 2))
