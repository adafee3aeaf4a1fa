"""`meshwright dryrun` and `verify` of a plan file: tables, JSON, a trace, and an exit status that can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.core.errors import InputError
from meshwright.run import dryrun
from meshwright.run.dryrun import Rehearsal, dry_run
from tests.parallel.layouts import llama, make_plan


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "plan.toml"
    make_plan(llama(num_layers=4), dp=2, tp=2, pp=2, zero=1, num_micro_batches=2).save(path)
    return str(path)


def test_tables_for_every_role(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", plan_file]) == 0
    shown = capsys.readouterr().out
    for words in ("8 ranks, 4 roles", "rank 0, ×2", "rank 5, ×2", "send", "reduce_scatter", "fits", "as forecast"):
        assert words in shown


def test_json_is_all_that_is_printed(plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "step.json"
    assert main(["dryrun", plan_file, "--json", "--trace", str(trace)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(role["rank"], role["num_ranks"]) for role in data["roles"]] == [(0, 2), (1, 2), (4, 2), (5, 2)]
    assert data["differs_from_forecast"] == []
    assert {row["primitive"] for row in data["roles"][0]["traffic"]} >= {"send", "all_reduce", "all_gather"}
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == {0, 1, 4, 5}


def test_a_trace_that_cannot_be_written_is_refused_before_the_work(
    plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        main(["dryrun", plan_file, "--trace", str(tmp_path)])
    assert capsys.readouterr().out == ""


def test_verify_of_a_plan_has_three_columns(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", plan_file]) == 0
    shown = capsys.readouterr().out
    assert "forecast" in shown
    assert "dry run" in shown
    assert "nothing was measured" in shown


def test_what_is_not_as_forecast_is_said(
    plan_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one_byte_more(*args: object) -> tuple[Rehearsal, ...]:
        first, *others = dry_run(*args)
        held = replace(first.record.memory, gradients_bytes=first.record.memory.gradients_bytes + 1)
        return replace(first, record=replace(first.record, memory=held)), *others

    monkeypatch.setattr(dryrun, "dry_run", one_byte_more)
    assert main(["verify", plan_file]) == 1
    assert "dry run differs: rank 0: gradients:" in capsys.readouterr().out
    assert main(["dryrun", plan_file]) == 0
    assert "differs from the forecast: rank 0: gradients:" in capsys.readouterr().out
