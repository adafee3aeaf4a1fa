"""Ranks that die while they train: all end, one line says who and why, and the run can go on."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.checkpoint import latest
from meshwright.parallel.pipeline import StageRunner
from meshwright.run.folder import RunFolder
from meshwright.train.metrics import read_metrics
from tests.end_to_end import shell
from tests.end_to_end.shell import MESHWRIGHT, kill_all, num_lines, ranks_of, started, wait_for
from tests.end_to_end.tiny import TEXT_BYTES, make_plan, tiny_model
from tests.pool import RanksFailed

OnRanks = Callable[..., list[shell.Result]]

END_S = 60.0
"""All ranks have ended within a minute."""
FAIL = """
import os
if os.environ.get("RANK") == "1":
    from meshwright.parallel.pipeline import StageRunner
    backward, seen = StageRunner._backward, []
    def fail(self, step, action):
        seen.append(action)
        if action.micro_batch == 1 and len(seen) > 4:
            {how}
        return backward(self, step, action)
    StageRunner._backward = fail
"""
WAYS = {
    'raise ValueError("the disk has a hole")': "rank 1: ValueError: the disk has a hole",
    "os.kill(os.getpid(), 9)": "rank 1 was killed by signal 9 (SIGKILL, often by the system when memory runs out)",
}


def command(folder: Path, steps: int, *more: str, **strategy: int) -> list[str]:
    """`meshwright train` of a plan and a run in `folder`."""
    plan = folder / "plan.toml"
    if not plan.exists():
        make_plan(tiny_model(folder), **(strategy or {"dp": 2, "zero": 1})).save(plan)
    text = () if "--resume" in more else ("--stdlib", "--max-text-bytes", str(TEXT_BYTES))
    return [*MESHWRIGHT, "train", str(plan), *text, "--steps", str(steps), "--out", str(folder / "run"), *more]


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    with started(command(tmp_path, 100_000, tp=2)) as process:
        wait_for(lambda: num_lines(tmp_path / "run" / "metrics.jsonl") > 2, process)
        ranks = ranks_of(process.pid)
        assert sorted(ranks) == [0, 1]
        os.kill(ranks[1], signal.SIGKILL)
        began_s = time.monotonic()
        done = shell.finish(process)
        assert time.monotonic() - began_s < END_S
        assert not ranks_of(process.pid)
    assert done.status == 1
    (line,) = done.errors
    assert "rank 1 was killed by signal 9 (SIGKILL" in line
    assert "Traceback" not in done.err


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_a_rank_that_fails_within_a_step(tmp_path: Path, how: str) -> None:
    """What it was doing is named, also where it could not say so itself."""
    (tmp_path / "sitecustomize.py").write_text(FAIL.format(how=how))
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    with started(command(tmp_path, 100_000, pp=2), {"PYTHONPATH": path}) as process:
        done = shell.finish(process, END_S)
        assert not ranks_of(process.pid)
    assert done.status == 1
    (line,) = done.errors
    assert f"{WAYS[how]}, in the backward of micro-batch 1 on stage 1 (B1@1)" in line
    if how.startswith("raise"):
        assert "Traceback" in Path(line.split("log: ")[1]).read_text()
    assert "Traceback" not in done.err


def test_ctrl_c(tmp_path: Path) -> None:
    with started(command(tmp_path, 100_000)) as process:
        wait_for(lambda: num_lines(tmp_path / "run" / "metrics.jsonl") > 2, process)
        os.killpg(process.pid, signal.SIGINT)
        done = shell.finish(process, END_S)
        assert not ranks_of(process.pid)
    assert done.status == 130
    assert done.err == ""


def test_sigterm(tmp_path: Path) -> None:
    with started(command(tmp_path, 100_000, dp=1)) as process:
        wait_for(lambda: num_lines(tmp_path / "run" / "metrics.jsonl") > 2, process)
        process.send_signal(signal.SIGTERM)
        done = shell.finish(process, END_S)
        assert not ranks_of(process.pid)
    assert done.status == 143
    assert done.err == "meshwright: error: stopped by SIGTERM\n"


def _fails(patch: pytest.MonkeyPatch) -> None:
    """As FAIL, and gone with the command."""
    patch.setattr(StageRunner, "_backward", StageRunner._backward)
    exec(FAIL.format(how='raise ValueError("the disk has a hole")'), {})


def test_a_rank_of_torchrun_that_fails_within_a_step(on_ranks: OnRanks, tmp_path: Path) -> None:
    """It names its action itself: there is no launcher of ours."""
    with pytest.raises(RanksFailed) as failed:
        on_ranks(2, *command(tmp_path, 100_000, pp=2)[len(MESHWRIGHT) :], change=_fails)
    said = failed.value.errors[1]
    assert "ValueError: the disk has a hole" in said
    assert "in the backward of micro-batch 1 on stage 1 (B1@1)" in said


@pytest.mark.slow
def test_killed_while_saving(on_ranks: OnRanks, tmp_path: Path) -> None:
    """Every step saves, so that most moments are in the middle of a save."""
    run, moment = RunFolder(tmp_path / "run"), random.Random(7)
    resume: tuple[str, ...] = ()
    for _ in range(2):
        before = latest(run.checkpoints) or 0
        with started(command(tmp_path, 1000, "--save-every", "1", *resume)) as process:
            wait_for(lambda before=before: (latest(run.checkpoints) or 0) > before + 1, process)
            time.sleep(moment.random() / 4)
            kill_all(process.pid)
        resume = ("--resume",)
    last = latest(run.checkpoints)
    assert last
    for done in on_ranks(2, *command(tmp_path, last + 2, "--save-every", "1", "--resume")[len(MESHWRIGHT) :]):
        assert done.status == 0, done.err
    assert [row.step for row in read_metrics(run.path)] == list(range(last + 2))
    assert latest(run.checkpoints) == last + 2
    assert {path.suffix for path in run.checkpoints.iterdir()} == {""}
