"""Orders: the published tables, and the same order as another implementation's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed.pipelining.schedules as torch_schedules  # noqa: TID251

from meshwright.core.errors import InputError, ProgramError
from meshwright.core.program import COMPUTE_KINDS, Action, Kind
from meshwright.core.schedule import PipelineSize, schedules
from meshwright.core.strategy import Strategy
from meshwright.schedule.build import build_program, forward_program, from_rows, program
from meshwright.schedule.draw import text
from meshwright.schedule.verify import verify

GPIPE_4_4 = """
r0: F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
r1: .  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .
r2: .  .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .
r3: .  .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .  .  .
"""

ONE_F_ONE_B_4_8 = """
r0: F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 F4 B1 B1 F5 B2 B2 F6 B3 B3 F7 B4 B4 .  B5 B5 .  B6 B6 .  B7 B7
r1: .  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3 F6 B4 B4 F7 B5 B5 .  B6 B6 .  B7 B7 .  .
r2: .  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4 F6 B5 B5 F7 B6 B6 .  B7 B7 .  .  .  .
r3: .  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5 F6 B6 B6 F7 B7 B7 .  .  .  .  .  .
"""

NAIVE_2_2 = """
r0: F0 .  .  .  B0 B0 F1 .  .  .  B1 B1
r1: .  F0 B0 B0 .  .  .  F1 B1 B1 .  .
"""


def test_what_is_there() -> None:
    assert list(schedules()) == ["1f1b", "gpipe", "naive"]


def without_trailing_space(drawing: str) -> list[str]:
    return [line.rstrip() for line in drawing.strip().splitlines()]


@pytest.mark.parametrize(
    ("name", "num_stages", "num_micro_batches", "golden"),
    [("gpipe", 4, 4, GPIPE_4_4), ("1f1b", 4, 8, ONE_F_ONE_B_4_8), ("naive", 2, 2, NAIVE_2_2)],
)
def test_published_tables(name: str, num_stages: int, num_micro_batches: int, golden: str) -> None:
    drawn = text(program(name, num_stages, num_micro_batches))
    assert without_trailing_space(drawn) == without_trailing_space(golden)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_the_picture_in_an_orders_docstring_is_what_it_draws(name: str) -> None:
    doc = schedules()[name].order.__doc__ or ""
    picture = "\n".join(line.strip() for line in doc.splitlines() if line.strip().startswith("r"))
    num_micro_batches = 2 if name == "naive" else 3
    assert without_trailing_space(picture) == without_trailing_space(text(program(name, 2, num_micro_batches)))


def torch_order(schedule: type, num_stages: int, num_micro_batches: int) -> list[list[str]]:
    state = SimpleNamespace(
        _n_microbatches=num_micro_batches, pp_group_size=num_stages, _num_stages=num_stages, _stage=None
    )
    table = schedule._get_pipeline_order(state)
    return [
        [str(action)[1:] for action in table[rank] if action is not None and "REDUCE" not in str(action)]
        for rank in range(num_stages)
    ]


@pytest.mark.parametrize(
    ("name", "schedule"), [("gpipe", torch_schedules.ScheduleGPipe), ("1f1b", torch_schedules.Schedule1F1B)]
)
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(2, 2), (3, 7), (4, 4), (4, 8)])
def test_same_order_as_torch(name: str, schedule: type, num_stages: int, num_micro_batches: int) -> None:
    theirs = torch_order(schedule, num_stages, num_micro_batches)
    rows = schedules()[name].order(PipelineSize(num_stages, num_micro_batches))
    ours = [[f"{action.kind}{action.micro_batch}" for action in row] for row in rows]
    assert ours[:-1] == theirs[:-1]
    # torch 2.13 counts the last rank's 1F1B forwards from 1; their order of kinds is the same.
    assert [cell[0] for cell in ours[-1]] == [cell[0] for cell in theirs[-1]]


@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 5, 8, 13, 24])
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_every_program_verifies(name: str, num_stages: int, num_micro_batches: int) -> None:
    verify(program(name, num_stages, num_micro_batches))
    verify(program(name, num_stages, num_micro_batches, reduce=False))
    verify(forward_program(num_stages, num_micro_batches), backward=False)


def test_one_stage_has_no_transfers() -> None:
    (row,) = program("1f1b", 1, 2).rows
    assert [str(action) for action in row] == ["F0@0", "B0@0", "F1@0", "ARM@0", "B1@0", "REDUCE@0"]


def test_reductions_stand_where_only_the_last_backward_is_armed() -> None:
    for row in program("1f1b", 4, 6).rows:
        kinds = [action.kind for action in row]
        assert kinds[-1] is Kind.REDUCE
        assert row[kinds.index(Kind.ARM) + 1].kind is Kind.B
        assert Kind.B not in kinds[kinds.index(Kind.ARM) + 2 :]
    assert not any(a.kind in (Kind.ARM, Kind.REDUCE) for row in program("1f1b", 4, 6, reduce=False).rows for a in row)


def test_strategy_names_its_program() -> None:
    strategy = Strategy(pp=2, schedule="gpipe", num_micro_batches=4)
    assert build_program(strategy) == program("gpipe", 2, 4)


def test_forward_program_is_forward_only() -> None:
    kinds = {action.kind for row in forward_program(3, 4).rows for action in row}
    assert kinds == {Kind.F, Kind.SEND_F, Kind.RECV_F}


def test_unknown_schedule_names_the_known_ones() -> None:
    with pytest.raises(InputError, match="`zigzag` is not known; choose one of 1f1b, gpipe, naive"):
        program("zigzag", 2, 2)


def test_chunks_need_a_schedule_that_has_them() -> None:
    with pytest.raises(InputError, match="`gpipe` puts one stage on a rank, but 2 chunks are asked for"):
        program("gpipe", 2, 4, num_chunks=2)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 4)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ProgramError, match="at least 1"):
        program("gpipe", *sizes)


def test_stages_without_a_forward_are_refused() -> None:
    rows = ((Action(Kind.F, 0, 0), Action(Kind.F, 2, 0)),)
    with pytest.raises(ProgramError, match=r"stages \[1\] have no forward"):
        from_rows("gap", rows)


def test_orders_hold_compute_only() -> None:
    for schedule in schedules().values():
        rows = schedule.order(PipelineSize(3, 4))
        assert {action.kind for row in rows for action in row} <= set(COMPUTE_KINDS)
