"""Runs with delayed updates: trained, evaluated, saved, resumed and verified."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.plan import Plan
from meshwright.core.record import RankRecord
from meshwright.rehearse.timeline import measured_timeline
from meshwright.rehearse.verify import differences
from meshwright.run.set_up import set_up
from meshwright.train.metrics import read_metrics
from tests.end_to_end.shell import Result
from tests.end_to_end.test_resume import losses, train
from tests.end_to_end.tiny import make_plan, make_run, options, tiny_model


def delayed(folder: Path, schedule: str, dp: int = 1) -> Plan:
    """Two stages, two micro-batches."""
    plain = make_plan(tiny_model(folder), dp=dp, pp=2)
    strategy = plain.strategy.model_copy(update={"schedule": schedule})
    return Plan(model=plain.model, cluster=plain.cluster, job=plain.job, strategy=strategy)


def test_a_run_is_as_forecast_and_goes_on_as_if_it_had_not_stopped(ranks, tmp_path: Path) -> None:
    """Where one step was measured, the pipeline was full; checkpoints and evaluations drain it, resumed or not."""
    plan, wanted = delayed(tmp_path, "pipedream", dp=2), options(8, save_every=4, eval_every=3)
    whole, halves = (make_run(plan, wanted, tmp_path / name) for name in ("whole", "halves"))
    train(ranks, plan, whole)
    train(ranks, plan, halves, stop_after=4)
    set_up(plan, wanted, halves, resume=True)
    train(ranks, plan, halves, resume=True)
    assert losses(halves) == losses(whole)
    evaluations = [[row.eval_loss for row in read_metrics(run.path)] for run in (whole, halves)]
    assert evaluations[0] == evaluations[1]
    assert sum(loss is not None for loss in evaluations[0]) == 3
    records = RankRecord.load_all(whole.measured)
    assert differences(plan, records) == []
    with pytest.raises(UnsupportedError, match="parts of a table without an end"):
        measured_timeline(plan, records)


def test_updates_are_delayed(ranks, tmp_path: Path) -> None:
    """2BW's first two losses are those of the same weights, which a flushed schedule updates in between."""
    found = {}
    for schedule in ("1f1b", "pipedream-2bw"):
        plan = delayed(tmp_path, schedule)
        run = make_run(plan, options(4, eval_every=4), tmp_path / schedule)
        train(ranks, plan, run)
        found[schedule] = losses(run)
    ours, flushed = found["pipedream-2bw"], found["1f1b"]
    assert ours[0] == pytest.approx(flushed[0], rel=1e-6)
    assert [a for a, b in zip(ours[1:], flushed[1:], strict=True) if abs(a - b) < 1e-4] == []


def test_what_it_cannot_do_is_one_line_before_any_rank_starts(
    cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("meshwright.run.launch._start_and_wait", lambda *_: pytest.fail("ranks are started"))
    plan = delayed(tmp_path, "pipedream")
    for changes, error, words in (
        ({"clip_norm": 0.5}, UnsupportedError, "clip_norm=0.5 with schedule=`pipedream`"),
        ({"save_every": 2}, InputError, "save_every=2 with schedule=pipedream: .* take 3 or more"),
        ({"eval_every": 1}, InputError, "eval_every=1 with schedule=pipedream: .* take 3 or more"),
    ):
        with pytest.raises(error, match=words) as raised:
            make_run(plan, options(8, **changes), tmp_path / "run")
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "run").exists()
    path = tmp_path / "plan.toml"
    plan.save(path)
    refused = cli("parity", path)
    assert refused.status == 1
    (line,) = refused.errors
    assert "one process whose updates are not delayed" in line
    shown = cli("show", path)
    assert "delayed: one after each micro-batch, while others are under way; versions kept: 2, 1" in shown.out
