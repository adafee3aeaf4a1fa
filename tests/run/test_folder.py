"""A run keeps the table that it was started with, and a plan finds its table beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.core.errors import InputError
from meshwright.core.job import Job
from meshwright.core.plan import Plan
from meshwright.core.sources import load_cluster
from meshwright.core.strategy import Strategy
from meshwright.run.folder import RunFolder
from meshwright.run.options import TrainOptions
from tests.shapes import make_model

TABLE = "F0@0,F1@0,,,B0@0,B1@0\n,F0@1,B0@1,F1@1,B1@1\n"
OTHER = "F0@0,,,B0@0,F1@0,,,B1@0\n,F0@1,B0@1,,,F1@1,B1@1\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a table in `tables`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "own.csv").write_text(TABLE)
    return tmp_path


def plan(schedule: str) -> Plan:
    job, strategy = Job(seq_length=32, global_batch_size=2), Strategy(pp=2, num_micro_batches=2, schedule=schedule)
    return Plan(model=make_model(), cluster=load_cluster("local:2"), job=job, strategy=strategy)


def rows(of: Plan) -> object:
    return of.strategy.pipeline_schedule.order(of.strategy.pipeline)


def test_a_plan_finds_its_table_from_anywhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "plans").mkdir()
    made, expected = plan("tables/own.csv"), rows(plan("tables/own.csv"))
    made.save("plans/plan.toml")
    assert 'schedule = "../tables/own.csv"' in (home / "plans" / "plan.toml").read_text()
    assert rows(Plan.load("plans/plan.toml")) == expected
    monkeypatch.chdir(home / "tables")
    assert rows(Plan.load("../plans/plan.toml")) == expected


def test_an_absolute_path_stays_as_it_is(home: Path) -> None:
    made = plan(str(home / "tables" / "own.csv"))
    made.save("plan.toml")
    assert Plan.load("plan.toml") == made


def test_a_table_that_is_gone_is_one_line_with_its_place(home: Path) -> None:
    plan("tables/own.csv").save("plan.toml")
    os.rename("tables", "elsewhere")
    with pytest.raises(InputError, match=r"plan\.toml: `strategy\.schedule`: tables/own\.csv: no such file"):
        Plan.load("plan.toml")


def test_a_run_is_not_changed_by_what_becomes_of_the_table(home: Path) -> None:
    run, made = RunFolder(Path("run")), plan("tables/own.csv")
    before = rows(made)
    run.write(made, TrainOptions())
    (home / "tables" / "own.csv").write_text(OTHER)
    assert rows(run.plan()) == before != rows(plan("tables/own.csv"))
    os.rename("run", "moved")
    assert rows(RunFolder(Path("moved")).plan()) == before


def test_ranks_read_the_copy_if_it_is_that_of_their_table(home: Path) -> None:
    run, made = RunFolder(Path("run")), plan("tables/own.csv")
    assert run.on_copy(made) == made, "nothing is kept yet"
    run.write(made, TrainOptions())
    assert run.on_copy(made).strategy.schedule == "run/schedule.csv"
    (home / "tables" / "own.csv").write_text(OTHER)
    made = plan("tables/own.csv")
    assert run.on_copy(made) == made, "resumed with another table"
    run.write(made, TrainOptions())
    assert rows(run.plan()) == rows(made)


def test_a_run_with_a_schedule_of_ours_keeps_none(home: Path) -> None:
    run = RunFolder(Path("run"))
    run.write(plan("1f1b"), TrainOptions())
    assert not run.schedule_path.exists()
    assert run.plan() == plan("1f1b")
