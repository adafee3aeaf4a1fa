"""Orders: the published tables, all sizes, what is refused."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace

import pytest

from meshwright.core.errors import InputError, ProgramError
from meshwright.core.program import COMPUTE_KINDS, Action, Kind, Program
from meshwright.core.schedule import PipelineSize, choices, looped, schedules
from meshwright.core.strategy import Strategy
from meshwright.schedule.build import build_program, order_program, program
from meshwright.schedule.draw import text
from meshwright.schedule.evaluation import evaluation_program
from meshwright.schedule.verify import verify
from meshwright.sim.clock import UnitCosts, simulate
from tests.schedule.sizes import Table, tables

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

INTERLEAVED_2_4_2 = """
r0: F0a F1a F0b F1b F2a .   B0b B0b F3a B1b B1b F2b B0a B0a F3b B1a B1a .   B2b B2b .   B3b B3b B2a B2a B3a B3a
r1: .   F0a F1a F0b B0b B0b F1b B1b B1b F2a B0a B0a F3a B1a B1a F2b B2b B2b F3b B3b B3b B2a B2a B3a B3a .   .
"""

BFS_2_4_2 = """
r0: F0a F1a F2a F3a F0b F1b F2b F3b .   .   .   B0b B0b B1b B1b B2b B2b B3b B3b B0a B0a B1a B1a B2a B2a B3a B3a
r1: .   F0a F1a F2a F3a F0b F1b F2b F3b B0b B0b B1b B1b B2b B2b B3b B3b B0a B0a B1a B1a B2a B2a B3a B3a .   .
"""

ZB_H1_4_8 = """
r0: F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
r1: .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
r2: .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
r3: .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7
"""

ZB_H2_4_8 = """
r0: F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7 .  .  .
r1: .  F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 F7 I3 W1 I4 W2 I5 W3 I6 W4 I7 W5 W6 W7 .  .
r2: .  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 F7 I5 W1 I6 W2 I7 W3 W4 W5 W6 W7 .
r3: .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7
"""

ZB_V_2_4 = """
r0: F0a F1a F2a F0b I0b W0b F1b I1b W1b F3a I0a W0a F2b I2b W2b I1a W1a F3b I3b W3b I2a W2a I3a W3a .
r1: .   F0a F0b F1a F1b I0b W0b F2a I0a W0a F2b I1b W1b F3a I1a W1a F3b I2b W2b I2a I3b I3a W2a W3b W3a
"""

DUALPIPE_4_8 = (
    "F0a F1a F2a F0b I0b W0b F1b F3a B1b F2b B0a B2b F3b B1a B3b I2a W2a I3a W3a",
    "F0a F0b F1a F1b F2a B0b F2b B0a F3a B1b F3b B1a B2b B2a I3b I3a W3b W3a",
)
"""The upper two ranks, micro-batches counted in each direction from 0; the lower two are the same, turned round."""

DUALPIPE_V_2_4 = (
    "F0a F1a F2a F0b I0b W0b F1b F3a B1b F2b B0a B2b F3b B1a B3b I2a W2a I3a W3a",
    "F0a F0b F1a F1b F2a B0b F2b B0a F3a B1b F3b B1a B2b B2a I3b I3a W3b W3a",
)

NAIVE_2_2 = """
r0: F0 .  .  .  B0 B0 F1 .  .  .  B1 B1
r1: .  F0 B0 B0 .  .  .  F1 B1 B1 .  .
"""


PICTURES = {
    "naive": (2, 2),
    "gpipe": (2, 3),
    "1f1b": (2, 3),
    "interleaved-1f1b": (2, 4, 2),
    "bfs": (2, 4, 2),
    "zb-h1": (3, 4),
    "zb-h2": (2, 4),
    "zb-v": (2, 4),
    "dualpipe": (2, 4),
    "dualpipe-v": (2, 4),
    "pipedream": (2, 4),
    "pipedream-vertical-sync": (2, 4),
    "pipedream-2bw": (2, 4),
}
"""Size of the picture in each order's docstring: p, m, v."""


def drawn(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int | None = None) -> list[str]:
    return without_trailing_space(text(program(name, num_ranks, num_micro_batches, num_chunks=num_chunks)))


def without_trailing_space(drawing: str) -> list[str]:
    return [line.rstrip() for line in drawing.strip().splitlines()]


@pytest.mark.parametrize(
    ("name", "size", "golden"),
    [
        ("gpipe", (4, 4), GPIPE_4_4),
        ("1f1b", (4, 8), ONE_F_ONE_B_4_8),
        ("naive", (2, 2), NAIVE_2_2),
        ("interleaved-1f1b", (2, 4, 2), INTERLEAVED_2_4_2),
        ("bfs", (2, 4, 2), BFS_2_4_2),
        ("zb-h1", (4, 8), ZB_H1_4_8),
        ("zb-h2", (4, 8), ZB_H2_4_8),
        ("zb-v", (2, 4), ZB_V_2_4),
    ],
)
def test_published_tables(name: str, size: tuple[int, ...], golden: str) -> None:
    assert drawn(name, *size) == without_trailing_space(golden)


def order_text(name: str, num_ranks: int, num_micro_batches: int) -> list[str]:
    """Cells without time, stages as letters, micro-batches counted in each direction from 0."""
    schedule = schedules()[name]
    built = order_program(schedule, schedule.size(num_ranks, num_micro_batches))
    letter = ["ab"[stage >= num_ranks] for stage in range(2 * num_ranks)]
    return [
        " ".join(f"{a.kind}{(a.micro_batch or 0) - built.micro_batches(a.stage).start}{letter[a.stage]}" for a in row)
        for row in built.rows
    ]


def test_published_order_of_dualpipe() -> None:
    exchanged = [row.translate(str.maketrans("ab", "ba")) for row in DUALPIPE_4_8[::-1]]
    assert order_text("dualpipe", 4, 8) == [*DUALPIPE_4_8, *exchanged]


def test_published_order_of_dualpipe_v() -> None:
    assert order_text("dualpipe-v", 2, 4) == list(DUALPIPE_V_2_4)


@pytest.mark.parametrize("name", list(schedules()))
def test_the_picture_in_an_orders_docstring_is_what_it_draws(name: str) -> None:
    doc = schedules()[name].order.__doc__ or ""
    picture = "\n".join(line.strip() for line in doc.splitlines() if re.match(r" *r\d+: ", line))
    assert without_trailing_space(picture) == drawn(name, *PICTURES[name])


@pytest.mark.parametrize("name", list(schedules()))
def test_every_program_verifies(name: str) -> None:
    """A choice of all sizes up to p=16, m=64, v=4, which verify as well."""
    for table in (*tables(range(1, 9), (1, 2, 3, 5, 8, 13), [name], (1, 2, 3)), *tables((16,), (64,), [name], (2,))):
        verify(table.build())
    for table in tables((1, 2, 4), (1, 4), [name], (2,)):
        verify(table.build(reduce=False))


def test_every_evaluation_verifies() -> None:
    for num_ranks, num_micro_batches in itertools.product(range(1, 9), (1, 2, 3, 5, 8)):
        verify(evaluation_program(Strategy(pp=num_ranks), num_micro_batches), backward=False)


def test_one_chunk_per_rank_is_the_plain_schedule() -> None:
    for num_ranks, num_micro_batches in itertools.product(range(1, 6), range(1, 10)):
        size = PipelineSize(num_ranks, num_micro_batches)
        for in_loops, plain in (("interleaved-1f1b", "1f1b"), ("bfs", "gpipe")):
            assert schedules()[in_loops].order(size) == schedules()[plain].order(size)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (("interleaved-1f1b", 4, 9, 2), "9 micro-batches on 4 ranks make 2 rounds of unequal length; take 8 or 12 "),
        (("dualpipe", 3, 4, 2), "an even number of ranks, not 3; take 2 or 4 ranks"),
        (("dualpipe", 1, 4, 2), "an even number of ranks, not 1; take 2 ranks"),
        (("dualpipe", 4, 5, 2), "an even number of micro-batches, not 5; take 4 or 6 micro-batches"),
    ],
)
def test_a_size_without_a_timetable_names_the_nearest_one(table: tuple[str, int, int, int], words: str) -> None:
    with pytest.raises(ProgramError, match=words) as caught:
        Table(*table).build()
    assert "\n" not in str(caught.value)
    for number in re.findall(r"\d+", words.split("take")[1]):
        changed = table[1] if "micro-batches" in words.split("take")[1] else int(number)
        m = int(number) if changed == table[1] else table[2]
        verify(Table(table[0], changed, m, table[3]).build())


def test_a_flushing_schedule_has_one_step_per_table() -> None:
    with pytest.raises(ProgramError, match="ends with a flush, so there are no 2 steps in one table; take 1"):
        program("1f1b", 2, 4, num_steps=2)


def test_a_stage_must_stand_where_the_schedule_says() -> None:
    wrong = replace(schedules()["zb-v"], stage_ranks=looped)
    with pytest.raises(ProgramError, match="declares stage 2 on rank 0, but its order has it on rank 1"):
        order_program(wrong, wrong.size(2, 4))


def test_one_stage_has_no_transfers() -> None:
    (row,) = program("1f1b", 1, 2).rows
    assert [str(action) for action in row] == ["F0@0", "B0@0", "F1@0", "ARM@0", "B1@0", "REDUCE@0"]


@pytest.mark.parametrize("name", [name for name, found in schedules().items() if not found.is_asynchronous])
def test_each_stage_is_armed_ahead_of_what_completes_its_gradients(name: str) -> None:
    built = program(name, 4, 6)
    for row in built.rows:
        for stage in {action.stage for action in row}:
            armed = row.index(Action(Kind.ARM, stage))
            makes = [a for a in row[armed:] if a.stage == stage and a.kind in (Kind.B, Kind.W)]
            assert makes == [row[armed + 1]]
        num_stages = len({action.stage for action in row})
        assert [built.part(action.stage) for action in row[-num_stages:]] == sorted(
            built.part(action.stage) for action in row if action.kind is Kind.REDUCE
        )


def test_ranks_that_hold_the_same_parts_reduce_them_in_the_same_order() -> None:
    built = program("dualpipe", 4, 8)
    reduced = [[built.part(a.stage) for a in row if a.kind is Kind.REDUCE] for row in built.rows]
    assert reduced == [[0, 3], [1, 2], [1, 2], [0, 3]]


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


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe"])
def test_strategy_of_any_schedule_names_its_program(name: str) -> None:
    assert build_program(Strategy(pp=2, schedule=name, num_micro_batches=4)) == program(name, 2, 4)
    looped = Strategy(pp=2, schedule="bfs", num_chunks=3, num_micro_batches=4)
    assert build_program(looped) == program("bfs", 2, 4, num_chunks=3)


def test_of_an_asynchronous_schedule_the_last_step_is_one_like_all_that_follow() -> None:
    built = build_program(Strategy(pp=2, schedule="pipedream", num_micro_batches=4))
    assert built == program("pipedream", 2, 4, num_steps=3)


@pytest.mark.parametrize("name", ["1f1b", "bfs", "zb-v", "dualpipe"])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8])
def test_every_stage_is_evaluated_on_any_number_of_micro_batches(name: str, num_micro_batches: int) -> None:
    strategy = Strategy(pp=4, schedule=name, num_chunks=2 if name == "bfs" else 1)
    built = evaluation_program(strategy, num_micro_batches)
    forwards = Counter(a.micro_batch for row in built.rows for a in row if a.kind is Kind.F)
    assert forwards == dict.fromkeys(range(num_micro_batches), strategy.num_parts)
    simulate(built, UnitCosts(transfer=0.5))


def test_evaluation_is_forward_only() -> None:
    kinds = {action.kind for row in evaluation_program(Strategy(pp=3), 4).rows for action in row}
    assert kinds == {Kind.F, Kind.SEND_F, Kind.RECV_F}


def test_unknown_schedule_names_the_known_ones() -> None:
    with pytest.raises(InputError, match=f"`zigzag` is not known; {choices()}"):
        program("zigzag", 2, 2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpipe", "`gpipe` puts one stage on a rank, but 3 chunks are asked for; take 1 chunk, or"),
        ("zb-v", "`zb-v` puts 2 stages on a rank, but 3 chunks are asked for; take 2 chunks, or"),
    ],
)
def test_chunks_need_a_schedule_that_has_them(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        program(name, 2, 4, num_chunks=3)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 4)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ProgramError, match="at least 1"):
        program("gpipe", *sizes)


def test_stages_without_a_forward_are_refused() -> None:
    rows = ((Action(Kind.F, 0, 0), Action(Kind.F, 2, 0)),)
    with pytest.raises(ProgramError, match=r"stages \[1\] have no forward"):
        Program.from_rows("gap", rows)


def test_orders_hold_compute_only() -> None:
    for schedule in schedules().values():
        rows = schedule.order(schedule.size(4, 4))
        updates = {Kind.UPDATE} if schedule.is_asynchronous else set()
        assert {action.kind for row in rows for action in row} - set(COMPUTE_KINDS) == updates
