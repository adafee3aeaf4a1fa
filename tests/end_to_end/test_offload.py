"""Offload through the command: planned, trained, verified; what is wrong with its disk is one line."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.checkpoint import latest
from meshwright.core.plan import Plan
from meshwright.core.strategy import Offload
from meshwright.run.folder import RunFolder
from meshwright.train.metrics import read_metrics
from tests.end_to_end.shell import MESHWRIGHT, Result, kill_all, num_lines, started, wait_for
from tests.end_to_end.tiny import BATCH, SEQ_LENGTH, TEXT_BYTES, make_plan, tiny_model, write_config

Cli, OnRanks = Callable[..., Result], Callable[..., list[Result]]


def _full(patch: pytest.MonkeyPatch) -> None:
    """No more room, for rank 1."""

    def posix_fallocate(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if os.environ["RANK"] == "1":
        patch.setattr(os, "posix_fallocate", posix_fallocate)


def write_plan(folder: Path, disk: Path, **kinds: str) -> Path:
    """A plan of two ranks whose optimizer, and `kinds`, lie in `disk`."""
    path, plain = folder / "plan.toml", make_plan(tiny_model(folder), 2, zero=3)
    offload = Offload(optimizer="disk", path=str(disk), group_numel=1000, **kinds)
    strategy = plain.strategy.model_copy(update={"offload": offload})
    Plan(model=plain.model, cluster=plain.cluster, job=plain.job, strategy=strategy).save(path)
    return path


def command(plan: Path, run: Path, steps: int, *more: str) -> list[str]:
    text = () if "--resume" in more else ("--stdlib", "--max-text-bytes", str(TEXT_BYTES))
    return ["train", str(plan), *text, "--steps", str(steps), "--out", str(run), *more]


def the_line(done: Result) -> str:
    assert done.status == 1, done.err
    (line,) = done.errors
    assert "Traceback" not in done.err
    return line


def test_planned_trained_and_verified(cli: Cli, on_ranks: OnRanks, tmp_path: Path) -> None:
    disk, plan, run = tmp_path / "disk", tmp_path / "plan.toml", tmp_path / "run"
    disk.mkdir()
    planned = cli(
        "plan", write_config(tmp_path), "local:2", "--seq", SEQ_LENGTH, "--batch", BATCH, "--fix", "dp=2",
        "--zero", 2, "--fix", f"offload=optimizer:disk,gradients:cpu,path:{disk}", "-o", plan,
    )  # fmt: skip
    assert planned.status == 0, planned.err
    assert "on disk" in planned.out
    assert Plan.load(plan).strategy.offload == Offload(optimizer="disk", gradients="cpu", path=str(disk))
    for done in on_ranks(2, *command(plan, run, 4)):
        assert done.status == 0, done.err
    assert list(disk.iterdir()) == []
    verified = cli("verify", run)
    assert verified.status == 0, verified.out
    assert "memory, on disk" in verified.out
    assert "memory, on host" in verified.out


def test_a_missing_folder(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Found before anything is made."""
    monkeypatch.setattr("meshwright.run.launch._start_and_wait", lambda *_: pytest.fail("ranks are started"))
    run = tmp_path / "run"
    done = cli(*command(write_plan(tmp_path, tmp_path / "scratc"), run, 2))
    assert "scratc: no such folder; offloading to disk makes none" in the_line(done)
    assert not run.exists()


def test_a_full_disk(on_ranks: OnRanks, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    argv = command(write_plan(tmp_path, tmp_path / "disk"), tmp_path / "run", 2)
    _, done = on_ranks(2, *argv, change=_full)
    assert "the disk is full: rank 1 needs" in the_line(done)


def test_killed_in_a_step_and_used_twice(on_ranks: OnRanks, tmp_path: Path) -> None:
    """Another run on the same folder is refused and harms nothing. The killed one goes on from its last checkpoint, as
    it does without offload."""
    disk = tmp_path / "disk"
    disk.mkdir()
    plan = write_plan(tmp_path, disk, gradients="disk", parameters="disk")
    killed, plain = RunFolder(tmp_path / "killed"), RunFolder(tmp_path / "plain")
    with started([*MESHWRIGHT, *command(plan, killed.path, 100_000, "--save-every", "2")]) as process:
        wait_for(lambda: (latest(killed.checkpoints) or 0) >= 2, process)
        for done in on_ranks(2, *command(plan, tmp_path / "other", 2)):
            assert "in use by process" in the_line(done)
        before = num_lines(killed.path / "metrics.jsonl")
        wait_for(lambda: num_lines(killed.path / "metrics.jsonl") > before, process)
        kill_all(process.pid)
    last = latest(killed.checkpoints)
    assert last
    assert len(list(disk.iterdir())) == 2, "what a killed run leaves"
    shutil.copytree(killed.path, plain.path)
    in_memory = tmp_path / "in-memory.toml"
    make_plan(tiny_model(tmp_path), 2, zero=3).save(in_memory)
    for run, by in ((killed, plan), (plain, in_memory)):
        for done in on_ranks(2, *command(by, run.path, last + 3, "--resume")):
            assert done.status == 0, done.err
    assert [row.step for row in read_metrics(killed.path)] == list(range(last + 3))
    assert [row.loss for row in read_metrics(killed.path)] == [row.loss for row in read_metrics(plain.path)]
    assert list(disk.iterdir()) == []


@pytest.mark.slow
def test_parity_of_an_offloaded_plan(on_ranks: OnRanks, tmp_path: Path) -> None:
    """Its own disk tier is not needed for it."""
    plan = write_plan(tmp_path, tmp_path / "elsewhere", gradients="cpu", parameters="disk")
    done, _ = on_ranks(2, "parity", plan)
    assert done.status == 0, done.err
    assert "pass" in done.out
