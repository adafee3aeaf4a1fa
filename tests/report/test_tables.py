"""Tables: numbers, units and order as a reader sees them."""

import io
from dataclasses import dataclass, replace

import pytest
from rich.console import Console

from meshwright.core.measures import MemoryBreakdown, StepTime, Traffic
from meshwright.core.strategy import Strategy
from meshwright.core.units import format_bytes, format_time, in_unit, unit_of
from meshwright.report.tables import (
    Comparison,
    beside_rehearsal,
    compare_memory,
    compare_step_time,
    compare_traffic,
    compare_waits,
    comparison_table,
    memory_table,
    plain_table,
    report_console,
    sparkline,
    strategies_table,
    told_apart,
    traffic_table,
)


@dataclass(frozen=True)
class Candidate:
    strategy: Strategy
    memory: MemoryBreakdown
    traffic: Traffic
    step_time: StepTime
    fits: bool
    is_bound: bool = False


def traffic(wire=1):
    made = Traffic()
    made.add("all_reduce", "tp", "forward", 3_000_000 * wire, 4, calls=24)
    made.add("all_reduce", "dp", "gradients", 500_000_000, 2)
    made.add("send", "pp", "backward", 1_500, 2, calls=8)
    return made


MEMORY = MemoryBreakdown(1_234_000_000, 2_000_000_000, 80_000_000_000, 4_560_000_000, 1_000, 500_000_000)


def show(table, width=160):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]


def row(table, start, width=160):
    """Cells of the line that starts with `start`."""
    [line] = [line for line in show(table, width) if line.strip().startswith(start)]
    return [cell for cell in line.split("  ") if cell.strip()]


def cells(table, start):
    return [cell.strip() for cell in row(table, start)]


def test_names_are_no_markup(capsys):
    table = plain_table("[b]run[/b]")
    table.add_column("[i]head")
    table.add_row("[red]x[/blue] :smile:")
    console = report_console()
    console.print(table)
    console.print("a/[b]/c")
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("[b]run[/b]", "[i]head", "[red]x[/blue] :smile:", "a/[b]/c"))


@pytest.mark.parametrize("width", range(24, 90, 6))
def test_on_a_narrow_terminal_nothing_is_cut(width):
    """Every number stands whole on one line, in a table where there is room, else in a list."""
    split = Candidate(Strategy(dp=2, tp=2, pp=2), MEMORY, traffic(), StepTime(1.0, 0.5, 0.1, 0.25), True)
    for table, values in (
        (memory_table({"rank 0": MEMORY}), ("1.23 GB", "80.0 GB", "4.56 GB", "1.00 kB")),
        (traffic_table(traffic()), ("72.0 MB", "500 MB", "12.0 kB", "all_reduce", "gradients")),
        (strategies_table([split]), ("1.60 s", "25.0%", "88.3", "500", "1f1b", "yes")),
    ):
        lines = show(table, width)
        assert all(any(value in line for line in lines) for value in values), "\n".join(lines)
        assert not any("…" in line for line in lines)
        assert max(map(len, lines)) <= width


def test_a_table_that_fits_stays_one():
    lines = show(traffic_table(traffic()), 70)
    assert lines[1].split() == ["phase", "axis", "primitive", "calls", "payload", "wire"]
    assert "  axis: tp" in show(traffic_table(traffic()), 30)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_499, "999 kB"), (999_500, "1.00 MB"), (1.5e6, "1.50 MB"),
     (9_996_000, "10.0 MB"), (80e9, "80.0 GB"), (2**30, "1.07 GB"), (3e12, "3.00 TB"),
     (4e18, "4000 PB"), (-1.5e6, "-1.50 MB")],
)  # fmt: skip
def test_bytes_are_decimal_and_name_their_unit(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (4.5e-6, "4.50 µs"), (0.0123, "12.3 ms"), (0.99951, "1.00 s"), (1.234, "1.23 s"), (59.9, "59.9 s"),
     (59.97, "1 min 00 s"), (123, "2 min 03 s"), (3599.6, "1 h 00 min"), (3720, "1 h 02 min"), (273_600, "3 d 04 h"),
     (float("inf"), "inf s")],
)  # fmt: skip
def test_times_carry_over_to_the_next_unit(seconds, text):
    assert format_time(seconds) == text


def test_shared_units_never_show_something_as_nothing():
    assert unit_of(80e9) == "GB"
    assert [in_unit(size, "GB") for size in (0, 1000, 5_000_000, 80e9)] == ["0", "<0.01", "0.01", "80.0"]
    assert in_unit(512, "B") == "512"


def test_strategies_show_all_that_decides():
    time = StepTime(1.2, 0.02, 0.014, 0.2727)
    one = Candidate(Strategy(dp=2, tp=2, pp=2), MEMORY, traffic(), time, True)
    alone = Candidate(Strategy(), MEMORY, Traffic(), StepTime(9, 0, 0, 0), False)
    table = strategies_table([one, alone])
    first = cells(table, "1")
    assert first[1] == "D2 T2 P2 zero0 1f1b m1×b1 fp32"
    assert first[2:] == [
        "1.23 s", "27.3%", "1.23", "2.00", "80.0", "4.56", "<0.01", "0.50", "88.3", "0.01", "500", "108", "yes",
    ]  # fmt: skip
    assert cells(table, "2")[2:4] == ["9.00 s", "0.0%"]
    assert cells(table, "2")[-4:] == ["–", "–", "–", "no"]
    assert cells(strategies_table([replace(one, is_bound=True)]), "1")[2] == "≥ 1.23 s"
    head = " ".join(show(table)[1:3])
    for name in (
        "param",
        "grad",
        "optim",
        "activ",
        "buffer",
        "work",
        "total",
        "GB",
        "pp wire",
        "dp wire",
        "tp wire",
        "MB",
    ):
        assert name in head


@pytest.mark.parametrize("width", [78, 110, 118, 160])
def test_strategies_are_whole_at_every_width(width):
    one = Candidate(Strategy(dp=16, tp=8, pp=4, recompute="full"), MEMORY, traffic(), StepTime(1, 0, 0, 0.1), True)
    text = "\n".join(show(strategies_table([one]), width))
    assert "…" not in text
    for number in ("1.00 s", "10.0%", "1.23", "2.00", "80.0", "4.56", "<0.01", "0.50", "88.3", "500", "108", "yes"):
        assert number in text
    assert ("Their memory" in text) == (width < 118)


def test_what_is_sent_over_parts_of_an_axis_counts_for_the_axis():
    sent = Traffic()
    for axis, size in (("dp_node", 1_000_000), ("dp_across", 2_000_000), ("dp", 4_000_000)):
        sent.add("broadcast", axis, "gradients", size, 2)
    table = strategies_table([Candidate(Strategy(), MEMORY, sent, StepTime(1, 0, 0, 0), True)])
    assert cells(table, "1")[-2:] == [f"{sent.wire_bytes / 1e6:.2f}", "yes"]
    assert "dp_" not in "\n".join(show(table))


def test_no_candidates_is_an_empty_table():
    assert show(strategies_table([]))


def test_memory_by_category_and_total():
    table = memory_table({"rank 0": MEMORY, "rank 1": MemoryBreakdown(1, 2, 3, 4, 5)})
    assert cells(table, "rank 0")[1:] == ["1.23 GB", "2.00 GB", "80.0 GB", "4.56 GB", "1.00 kB", "500 MB", "88.3 GB"]
    assert cells(table, "rank 1")[1:] == ["1 B", "2 B", "3 B", "4 B", "5 B", "0 B", "15 B"]


def test_traffic_in_the_order_of_a_step_with_the_sum():
    lines = show(traffic_table(traffic()))
    order = [line.split()[0] for line in lines if line.split()[0] in ("forward", "backward", "gradients", "all")]
    assert order == ["forward", "backward", "gradients", "all"]
    assert cells(traffic_table(traffic()), "forward") == [
        "forward", "tp", "all_reduce", "24", "72.0 MB", "108 MB",
    ]  # fmt: skip
    assert cells(traffic_table(traffic()), "all") == ["all", "33", "608 MB"]


def test_equal_witnesses_are_equal_and_others_are_not():
    same = compare_traffic(traffic(), traffic())
    assert len(same) == 6
    assert all(comparison.relative_difference == 0 for comparison in same)
    changed = [c for c in compare_traffic(traffic(), traffic(wire=2)) if c.relative_difference]
    assert [(c.name, c.relative_difference) for c in changed] == [("forward: all_reduce over tp, wire", 1.0)]


def test_a_row_that_only_one_witness_has_is_shown():
    less = traffic()
    del less.rows["send", "pp", "backward"]
    for first, second in ((less, traffic()), (traffic(), less)):
        found = {c.name: c for c in compare_traffic(first, second)}
        assert found["backward: send over pp, wire"].relative_difference != 0
        assert {found["backward: send over pp, calls"].forecast, found["backward: send over pp, calls"].measured} == {
            0,
            8,
        }


def test_waits_are_shown_by_phase_beside_what_was_forecast_of_them():
    step = StepTime(pipeline_s=1.0, data_comm_exposed_s=0.25, optimizer_s=0.1, bubble_fraction=0)
    waits = compare_waits(step, {"norm": 0.5, "gradients": 0.125, "parameters": 0.25, "forward": 1.0})
    assert [(c.name.removeprefix("waiting: "), c.forecast, c.measured) for c in waits] == [
        ("data-parallel communication", 0.25, 0.375),
        ("forward", None, 1.0),
        ("norm", None, 0.5),
    ]
    assert [c.measured for c in compare_waits(step, {})] == [None]


def test_comparison_shows_both_and_the_difference():
    comparisons = [
        *compare_memory(MEMORY, MemoryBreakdown(1_234_000_001, 2_000_000_000, 80_000_000_000, 4_700_000_000, 0)),
        *compare_step_time(StepTime(1.0, 0, 0, 0.25), 1.2, None),
        Comparison("new", 0, 5, "calls"),
        Comparison("bubble measured", 0.25, 0.3, "fraction"),
    ]
    table = comparison_table(comparisons)
    assert cells(table, "memory, parameters")[1:] == ["1.23 GB", "1.23 GB", "+1 B"]
    assert cells(table, "memory, gradients")[1:] == ["2.00 GB", "2.00 GB", "equal"]
    assert cells(table, "memory, activations")[1:] == ["4.56 GB", "4.70 GB", "+3.1%"]
    assert cells(table, "memory, buffers")[1:] == ["1.00 kB", "0 B", "-100.0%"]
    assert cells(table, "step time")[1:] == ["1.00 s", "1.20 s", "+20.0%"]
    assert cells(table, "bubble  ")[1:] == ["25.0%", "–", "–"]
    assert cells(table, "new")[1:] == ["0", "5", "+5"]
    assert cells(table, "bubble measured")[1:] == ["25.0%", "30.0%", "+5.0 points"]


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 10, ""),
        ([1.0, 1.0], 10, "▁▁"),
        ([8, 7, 6, 5, 4, 3, 2, 1], 10, "█▇▆▅▄▃▂▁"),
        ([2, 0, 1, 1, 8, 8], 3, "▁▁█"),
        ([0.0, float("nan"), 1.0], 10, "▁ █"),
        ([float("nan")], 10, " "),
    ],
)
def test_sparkline(values, width, line):
    assert sparkline(values, width) == line


def test_a_dry_run_stands_between_forecast_and_measurement():
    held = MemoryBreakdown(1_234_000_001, 2_000_000_000, 80_000_000_000, 4_700_000_000, 0)
    measured, rehearsed = compare_memory(MEMORY, MEMORY), compare_memory(MEMORY, held)
    extra = [Comparison("only rehearsed", 1, 2, "calls")]
    table = comparison_table(beside_rehearsal(measured, [*rehearsed, *extra]))
    assert cells(table, "memory, activations")[1:] == ["4.56 GB", "4.70 GB", "4.56 GB", "equal"]
    assert cells(table, "only rehearsed")[1:] == ["1", "2", "–", "+100.0%"]
    alone = comparison_table(beside_rehearsal([], rehearsed))
    assert cells(alone, "memory, activations")[1:] == ["4.56 GB", "4.70 GB", "–", "+3.1%"]
    assert len(show(comparison_table(beside_rehearsal(measured, [])))[1].split()) == 3


def test_strategies_that_share_a_name_are_told_apart_by_their_layers() -> None:
    even = Strategy(pp=2, num_micro_batches=4)
    uneven = even.model_copy(update={"layers_per_stage": (3, 1)})
    names = told_apart([even, uneven, even.model_copy(update={"zero": 1})], 4)
    assert names == [
        f"{even.describe()}, layers 2, 2",
        f"{even.describe()}, layers 3, 1",
        "D1 T1 P2 zero1 1f1b m4×b1 fp32",
    ]
