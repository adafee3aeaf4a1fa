"""One run that is really launched and trained, for all tests that look at a finished run (those of test_main_job, so
that one worker trains it). Commands in the test's own process, and on the pool's ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.run.command import run_command
from tests.end_to_end import shell
from tests.end_to_end.desk import Desk
from tests.end_to_end.on_ranks import Change, command_on_rank, free_port
from tests.end_to_end.shell import OURS, Result
from tests.end_to_end.tiny import BATCH, SEQ_LENGTH, TEXT_BYTES, write_config

STEPS = 12


@dataclass(frozen=True)
class Trained:
    """A plan, the run trained from it, and what the commands said."""

    plan: Path
    run: Path
    planned: Result
    trained: Result


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """`meshwright plan`, then `meshwright train` on two ranks."""
    folder = tmp_path_factory.mktemp("main-job")
    plan, run = folder / "plan.toml", folder / "run"
    planned = shell.meshwright(
        "plan", write_config(folder), "local:2", "--seq", SEQ_LENGTH, "--batch", BATCH, "--fix", "dp=2", "--zero", 1,
        "--precision", "fp32", "-o", plan,
    )  # fmt: skip
    assert planned.status == 0, planned.err
    done = shell.meshwright(
        "train", plan, "--stdlib", "--max-text-bytes", TEXT_BYTES, "--steps", STEPS, "--learning-rate", 0.01,
        "--save-every", 4, "--keep", 2, "--eval-every", 6, "--out", run,
    )  # fmt: skip
    assert done.status == 0, "\n".join([done.err, *(log.read_text() for log in sorted(run.glob("logs/*")))])
    return Trained(plan, run, planned, done)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`cli("verify", run)`: a command in this process, for those that start no ranks."""
    for name in [name for name in os.environ if name.startswith(OURS)]:
        monkeypatch.delenv(name)

    def call(*argv: object) -> Result:
        capsys.readouterr()
        status = run_command(lambda: main([str(word) for word in argv]))
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return call


@pytest.fixture
def on_ranks(ranks: Callable[..., list[Any]]) -> Callable[..., list[Result]]:
    """`on_ranks(2, "train", plan, ...)`: a command on as many ranks of the pool; what each of them says."""

    def call(world: int, *argv: object, change: Change | None = None) -> list[Result]:
        words = [str(word) for word in argv]
        return ranks(command_on_rank, world, free_port(), words, change, timeout_s=shell.TIMEOUT_S)

    return call


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.fixture
def refused(desk: Desk, cli: Callable[..., Result]) -> Callable[..., str]:
    """`refused(*argv)`: the one line of a command that must fail and leave the desk as it was."""

    def call(*argv: object) -> str:
        before = desk.files()
        done = cli(*argv)
        assert done.status in (1, 2)
        assert done.err.count("\n") == 1, done.err
        assert done.err.startswith("meshwright: error: ")
        assert desk.files() == before
        return done.err

    return call
