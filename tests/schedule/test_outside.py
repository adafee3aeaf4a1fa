"""A schedule is one file: two are added from outside the package, and every reader takes them as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.core.errors import InputError, RuleError, UnsupportedError
from meshwright.core.job import Job
from meshwright.core.plan import Plan
from meshwright.core.schedule import FOLDER, choices, schedules
from meshwright.core.strategy import Strategy
from meshwright.planner.enumerate import strategies
from meshwright.planner.fix import parse_fix
from meshwright.planner.price import Pricer, price
from meshwright.planner.rank import plan
from meshwright.schedule import orders
from meshwright.schedule.build import build_program, program
from meshwright.schedule.closed_form import bubble_fraction, peak_live
from meshwright.schedule.draw import text
from meshwright.schedule.verify import verify
from meshwright.sim.clock import simulate
from tests.planner.conftest import make_cluster
from tests.shapes import make_model

LAST_FIRST = '''
"""All forwards, then all backwards from the last micro-batch to the first."""
from meshwright.core.program import Action, Kind
from meshwright.core.schedule import Schedule

def order(size):
    numbers = range(size.num_micro_batches)
    return tuple(
        (*(Action(Kind.F, rank, k) for k in numbers), *(Action(Kind.B, rank, k) for k in reversed(numbers)))
        for rank in range(size.num_ranks)
    )

SCHEDULE = Schedule(name="last-first", order=order)
'''

LOOPED = '''
"""Several stages per rank, visited in loops: all forwards, then all backwards."""
from meshwright.core.program import Action, Kind
from meshwright.core.schedule import Schedule

def order(size):
    def row(rank):
        stages = range(rank, size.num_stages, size.num_ranks)
        forwards = [Action(Kind.F, s, k) for s in stages for k in range(size.num_micro_batches)]
        backwards = [Action(Kind.B, s, k) for s in reversed(stages) for k in range(size.num_micro_batches)]
        return (*forwards, *backwards)
    return tuple(row(rank) for rank in range(size.num_ranks))

SCHEDULE = Schedule(name="looped", order=order, chunks=None, is_offered=False)
'''


@pytest.fixture
def add_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """`add_file(name, source)`: one more file beside those of `schedule/orders`, gone again after the test."""

    def add(name: str, source: str) -> None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{name}.py").write_text(source)
        monkeypatch.setattr(orders, "__path__", [*orders.__path__, str(folder)])
        monkeypatch.delitem(sys.modules, f"{FOLDER}.{name}", raising=False)

    return add


def test_a_strategy_and_its_program(add_file) -> None:
    with pytest.raises(InputError, match=f"no such schedule; {choices()}"):
        Strategy(schedule="last-first")
    before = set(schedules())
    add_file("last_first", LAST_FIRST)
    assert schedules().keys() - before == {"last-first"}
    built = build_program(Strategy(pp=3, schedule="last-first", num_micro_batches=2))
    verify(built)
    assert text(built).splitlines() == [
        "r0: F0 F1 .  .  .  .  .  .  B1 B1 B0 B0",
        "r1: .  F0 F1 .  .  .  B1 B1 B0 B0 .  .",
        "r2: .  .  F0 F1 B1 B1 B0 B0 .  .  .  .",
    ]


def test_what_it_holds_is_counted(add_file) -> None:
    add_file("last_first", LAST_FIRST)
    assert peak_live("last-first", 3, 5) == (5, 5, 5)
    one, two = (
        price(make_model(), make_cluster(1, 2), Job(seq_length=32, global_batch_size=4), strategy)
        for strategy in (Strategy(pp=2, schedule=name, num_micro_batches=4) for name in ("last-first", "gpipe"))
    )
    assert one.memory == two.memory


def test_its_time_is_that_of_the_clock(add_file) -> None:
    """No other schedule's closed form stands in for the one that it doesn't declare."""
    add_file("last_first", LAST_FIRST)
    with pytest.raises(UnsupportedError, match="`last-first` has no closed form"):
        bubble_fraction("last-first", 2, 4)
    pricer = Pricer(make_model(), make_cluster(1, 2), Job(seq_length=32, global_batch_size=4))
    strategy = Strategy(pp=2, schedule="last-first", num_micro_batches=4)
    forecast = pricer.forecast(strategy)
    timeline = simulate(build_program(strategy), pricer.step_costs(strategy))
    assert forecast.step_time.pipeline_s == timeline.makespan_s
    assert forecast.simulated
    assert pricer.simulate(forecast) is forecast


def test_the_planner_offers_it(add_file) -> None:
    add_file("last_first", LAST_FIRST)
    add_file("looped", LOOPED)
    job = Job(seq_length=32, global_batch_size=8)
    offered = {s.schedule for s in strategies(make_model(), make_cluster(1, 2), job, {"pp": 2}).legal}
    assert offered == {"1f1b", "gpipe", "interleaved-1f1b", "last-first"}
    result = plan(make_model(), make_cluster(1, 2), job, parse_fix(["pp=2", "schedule=last-first"]))
    assert result.plan.strategy.schedule == "last-first"
    assert Plan.from_toml(result.plan.to_toml()) == result.plan


def test_the_fullest_stage_is_found_wherever_it_stands(add_file) -> None:
    """1F1B holds most on the first stage of a kind, this one on the last."""
    add_file("late", LAST_FIRST.replace("order=order", "order=order, num_live=lambda size, rank: 1 + rank"))
    pricer = Pricer(make_model(num_layers=4), make_cluster(1, 4), Job(seq_length=32, global_batch_size=4))
    found = {
        name: list(pricer.memory_by_rank(Strategy(pp=4, schedule=name, num_micro_batches=4)))
        for name in ("last-first", "1f1b")
    }
    assert found == {"last-first": [0, 2, 3], "1f1b": [0, 1, 3]}


def test_stages_of_several_chunks(add_file) -> None:
    """Two stages per rank: passes, verifier and drawing need no change."""
    add_file("looped", LOOPED)
    built = program("looped", 2, 2, num_chunks=2)
    verify(built)
    assert built.stage_ranks == (0, 1, 0, 1)
    assert text(built).splitlines() == [
        "r0: F0a F1a F0b F1b .   .   .   B0b B0b B1b B1b B0a B0a B1a B1a",
        "r1: .   F0a F1a F0b F1b B0b B0b B1b B1b B0a B0a B1a B1a .   .",
    ]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('"""Nothing."""', "declares no schedule; write SCHEDULE = Schedule"),
        ("SCHEDULE = 'gpipe'", "declares no schedule"),
        (LAST_FIRST.replace("last-first", "gpipe"), "the name `gpipe` is taken"),
    ],
)
def test_a_file_that_declares_nothing_new_is_refused(add_file, source: str, words: str) -> None:
    add_file("wrong", source)
    with pytest.raises(InputError, match=words) as caught:
        schedules()
    assert "\n" not in str(caught.value)


def test_an_unknown_name_is_refused_in_one_line_wherever_it_comes_from() -> None:
    names = choices()
    planned = Plan(
        model=make_model(),
        cluster=make_cluster(1, 2),
        job=Job(seq_length=32, global_batch_size=4),
        strategy=Strategy(dp=2, num_micro_batches=2),
    )
    edited = planned.to_toml().replace('schedule = "1f1b"', 'schedule = "zigzag"')
    for refuse in (lambda: Plan.from_toml(edited, "plan.toml"), lambda: parse_fix(["schedule=zigzag"])):
        with pytest.raises(InputError, match=f"no such schedule; {names}") as caught:
            refuse()
        assert "schedule" in str(caught.value)
        assert "zigzag" in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=f"`zigzag` is not known; {names}"):
        program("zigzag", 2, 2)


def test_rules_stay_rules_for_it(add_file) -> None:
    add_file("last_first", LAST_FIRST)
    with pytest.raises(RuleError, match="pp=3"):
        Plan(
            model=make_model(),
            cluster=make_cluster(1, 2),
            job=Job(seq_length=32, global_batch_size=4),
            strategy=Strategy(pp=3, schedule="last-first", num_micro_batches=4),
        )
