"""What becomes of a command whose output cannot be read, written or encoded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.core.job import Job
from meshwright.core.plan import Plan
from meshwright.core.sources import load_cluster, load_model
from meshwright.core.strategy import Strategy

MESHWRIGHT = (sys.executable, "-m", "meshwright")
FULL = Path("/dev/full")


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "[b]plan.toml"
    job = Job(seq_length=8, global_batch_size=1)
    Plan(
        model=load_model("demo-s"), cluster=load_cluster("local:1"), job=job, strategy=Strategy(), why="[red]x[/blue]"
    ).save(path)
    return path


def run(*argv: object, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MESHWRIGHT, *map(str, argv)], **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | more
    )


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
def test_a_full_disk_behind_the_output(plan: Path) -> None:
    for argv in (["show", plan], ["--help"]):
        with FULL.open("w") as full:
            done = run(*argv, stdout=full)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1, done.stderr
        assert "cannot be written: No space left on device" in done.stderr


def test_a_terminal_without_our_characters(plan: Path) -> None:
    done = run("show", plan, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 layers ? 256" in done.stdout
    assert "[red]x[/blue]" in done.stdout


def test_a_reader_that_stops_reading_gets_its_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    argv = ["plan", "demo-s", "local:1", "--seq", "8", "--batch", "1", "-o", str(path)]
    with subprocess.Popen([*MESHWRIGHT, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert Plan.load(path).strategy.world_size == 1
