"""`meshwright timeline`: the picture, the numbers beside it, the files, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.core.job import Job
from meshwright.core.plan import Plan
from meshwright.core.program import Program
from meshwright.core.sources import load_cluster, load_model
from meshwright.core.strategy import Strategy
from meshwright.planner.price import Pricer
from meshwright.run.command import run_command
from meshwright.schedule.build import build_program, program
from meshwright.schedule.draw import text
from meshwright.sim.clock import simulate


@pytest.fixture
def timeline(capsys: pytest.CaptureFixture[str]):
    """`timeline(*arguments)`: what it prints."""

    def run(*arguments: object) -> str:
        status = main(["timeline", *map(str, arguments)])
        printed = capsys.readouterr()
        assert status == 0, printed.err
        return printed.out

    return run


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    job = Job(seq_length=16, global_batch_size=6)
    strategy = Strategy(pp=2, schedule="gpipe", num_micro_batches=6)
    Plan(model=load_model("demo-s"), cluster=load_cluster("local:2"), job=job, strategy=strategy).save(path)
    return path


def test_the_timetable_and_its_numbers(timeline) -> None:
    shown = timeline("zb-h1", "-p", 4, "-m", 8)
    assert "zb-h1: 4 ranks × 8 micro-batches (F forward, I input gradient, W weight gradient, . idle" in shown
    assert text(program("zb-h1", 4, 8)) in shown
    rows = [line.split() for line in shown.splitlines() if line.split()[1:2] == ["24"]]
    assert rows == [[str(rank), "24", "11.1%", "4", str(4 - rank)] for rank in range(4)]
    assert "makespan 27 slots (F 1, I 1, W 1, B 2; transfers free), bubble 11.1%" in shown


def test_chunks_and_defaults(timeline) -> None:
    shown = timeline("interleaved-1f1b", "-v", 2)
    assert shown.startswith("interleaved-1f1b: 4 ranks, 2 stages each × 8 micro-batches")
    assert "makespan 57 slots" in shown
    assert "bubble 15.8%" in shown
    live = [line.split()[-1] for line in shown.splitlines() if line.split()[1:2] == ["48"]]
    assert live == ["11", "9", "7", "5"]
    assert max(map(len, shown.splitlines())) <= 120


def test_steps_of_an_asynchronous_schedule(timeline) -> None:
    shown = timeline("pipedream", "-p", 3, "-m", 2, "--steps", 3)
    assert "3 ranks × 2 micro-batches, 3 steps" in shown
    assert "versions of weights" in shown
    assert [line.split()[-1] for line in shown.splitlines() if line.split()[1:2] == ["18"]] == ["3", "2", "1"]


def test_a_table_of_ones_own_and_the_files(timeline, tmp_path: Path) -> None:
    names = ("own.csv", "again.csv", "own.svg", "own.png", "own.json")
    own, again, picture, dots, trace = (tmp_path / name for name in names)
    own.write_text("F0@0,F1@0,,,B0@0,B1@0\n,F0@1,B0@1,F1@1,B1@1\n")
    shown = timeline(own, "--csv", again, "--svg", picture, "--png", dots, "--trace", trace)
    assert "2 ranks × 2 micro-batches" in shown
    assert Program.from_csv(again.read_text(), "1f1b") == program("1f1b", 2, 2)
    assert picture.read_text().startswith("<svg ")
    assert dots.read_bytes().startswith(b"\x89PNG")
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == {0, 1}
    assert f"picture written to {picture}" in shown


def test_costs_of_a_plan(timeline, plan: Path) -> None:
    """Another schedule than the plan's, with what its stages take."""
    shown = timeline("1f1b", "--cost", plan)
    assert "1f1b: 2 ranks × 6 micro-batches" in shown
    found = Plan.load(plan)
    costs = Pricer(found.model, found.cluster, found.job).step_costs(found.strategy)
    bubble = simulate(build_program(found.strategy.model_copy(update={"schedule": "1f1b"})), costs).bubble_fraction
    assert f"bubble {bubble:.1%}" in shown
    assert "slots" not in shown


def test_the_folders_of_a_picture_are_made(timeline, tmp_path: Path) -> None:
    timeline("gpipe", "--svg", tmp_path / "of" / "today" / "a.svg")
    assert (tmp_path / "of" / "today" / "a.svg").exists()


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe", "interleaved-1f1b", "pipedream"])
def test_costs_of_a_plan_cut_as_the_schedule_wants(name: str, timeline, plan: Path) -> None:
    """All ranks together do the same work, whatever the order and wherever the stages stand."""
    shown = timeline(name, "--cost", plan, *(["-v", 2] if name == "interleaved-1f1b" else []))
    found = Plan.load(plan)
    costs = Pricer(found.model, found.cluster, found.job).step_costs(found.strategy)
    work_s = 6 * sum(stage.forward_s + stage.backward_s for stage in costs.stages)
    rows = [line.split() for line in shown.splitlines() if line.split()[:1] in (["0"], ["1"])]
    in_ms = {"s": 1000.0, "ms": 1.0, "µs": 0.001}
    busy_s = [float(row[1]) * in_ms[row[2]] / 1000 for row in rows]
    assert sum(busy_s) == pytest.approx(work_s, rel=0.02), "as printed, to three digits"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope"], "schedule `nope` is not known; choose one of 1f1b, bfs"),
        (["nope.csv"], "nope.csv: no such file"),
        (["dualpipe", "-p", "3"], "two directions need an even number of ranks, not 3; take 2 or 4 ranks"),
        (["gpipe", "-v", "2"], "puts one stage on a rank, but 2 chunks are asked for"),
        (["gpipe", "--steps", "2"], "ends with a flush, so there are no 2 steps in one table"),
        (["gpipe", "--svg", "FOLDER/a", "--trace", "FOLDER/b/../a"], "--svg and --trace both name"),
        (["gpipe", "--png", "FOLDER"], "cannot be written: Is a directory"),
        (["gpipe", "--csv", "PLAN/own.csv"], "cannot be written: "),
        (["gpipe", "-p", "0"], "a pipeline of 0 ranks: at least 1 is needed"),
        (["gpipe", "-m", "0"], "a pipeline of 0 micro-batches: at least 1 is needed"),
        (
            ["gpipe", "-p", "1000", "-m", "1000"],
            "1,000 stages × 1,000 micro-batches are too many to draw; take at most",
        ),
        (["1f1b", "-p", "4", "--cost", "PLAN"], "the costs of this plan: dp=1 × tp=1 × pp=4"),
        (["interleaved-1f1b", "-v", "3", "--cost", "PLAN"], "pp=2 × 3 stages per rank = 6 is more than the 4 layers"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, plan: Path, capsys) -> None:
    given = (word.replace("PLAN", str(plan)).replace("FOLDER", str(plan.parent)) for word in arguments)
    words_given = ["timeline", *given]
    assert run_command(lambda: main(words_given)) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert printed.err.count("\n") == 1
