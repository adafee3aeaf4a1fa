"""Where ranks come from: torchrun, Slurm, a user's own loop; and more of them than cores."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from meshwright.comm import mesh
from meshwright.run.environment import FIRST_PORT, NUM_PORTS
from meshwright.run.folder import RunFolder
from meshwright.run.launch import launch
from meshwright.train.metrics import read_metrics
from tests.end_to_end import shell
from tests.end_to_end.shell import Result
from tests.end_to_end.tiny import TEXT_BYTES, make_plan, tiny_model

OWN_LOOP = """
import os
import sys

import torch

import meshwright

num_ranks, out = int(os.environ.get("WORLD_SIZE", "1")), sys.argv[1]
job = meshwright.Job(seq_length=32, global_batch_size=4)
cluster = meshwright.load_cluster(f"local:{num_ranks}")
plan = meshwright.plan(meshwright.load_model(sys.argv[2]), cluster, job, {"dp": num_ranks, "precision": "fp32"}).plan
engine = meshwright.parallelize(meshwright.build(plan.model), plan)

strategy = plan.strategy
tokens = torch.randint(plan.model.vocab_size, (4, 33), generator=torch.Generator().manual_seed(0))
mine = tokens.chunk(strategy.dp)[engine.mesh["dp"].index]
batches = mine.reshape(strategy.num_micro_batches, strategy.micro_batch_size, 33)
micro_batches = [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in batches]

losses = [float(engine.step(micro_batches, learning_rate=1e-2).loss) for _ in range(3)]
engine.save(out, step=3)
after = float(engine.step(micro_batches, learning_rate=1e-2).loss)
assert engine.load(out)["step"] == 3
assert float(engine.step(micro_batches, learning_rate=1e-2).loss) == after
if engine.mesh.rank == 0:
    print(*losses)
"""


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is a run of one rank."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    mesh.stop()


def train_argv(folder: Path, **strategy: int) -> list[str]:
    """`train ...` for a plan and a run in `folder`."""
    plan = folder / "plan.toml"
    make_plan(tiny_model(folder), **strategy).save(plan)
    return ["train", str(plan), "--stdlib", "--max-text-bytes", str(TEXT_BYTES), "--steps", "3",
            "--out", str(folder / "run")]  # fmt: skip


def check_run(folder: Path, num_ranks: int) -> None:
    """Three steps, one record per rank."""
    run = RunFolder(folder / "run")
    assert [row.step for row in read_metrics(run.path)] == [0, 1, 2]
    assert len(list(run.measured.iterdir())) == num_ranks
    assert (run.path / "loss.html").exists()


def test_under_torchrun(tmp_path: Path) -> None:
    argv = train_argv(tmp_path, tp=2)
    torchrun = [*shell.TORCHRUN, "--nproc-per-node", "2", "-m", "meshwright"]
    done = shell.run([*torchrun, *argv])
    assert done.status == 0, done.err
    assert done.out.count("step 3/3") == 1
    check_run(tmp_path, 2)


def test_torchrun_with_another_number_of_ranks(on_ranks: Callable[..., list[Result]], tmp_path: Path) -> None:
    (done,) = on_ranks(1, *train_argv(tmp_path, tp=2))
    assert done.status == 1
    (line,) = done.errors
    assert "rank 0: torchrun started a world of 1, but the plan needs dp × tp × pp = 2" in line
    assert not (tmp_path / "run").exists()


def free_job_id() -> int:
    """A Slurm job whose meeting port is free here."""
    for job in range(os.getpid(), os.getpid() + 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", FIRST_PORT + job * 13 % NUM_PORTS))
            except OSError:
                continue
            return job
    raise AssertionError("no free port")


@pytest.mark.slow
def test_under_slurm(tmp_path: Path) -> None:
    argv = train_argv(tmp_path, pp=2)
    step = {"SLURM_JOB_ID": str(free_job_id()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": "localhost"}  # fmt: skip
    with ExitStack() as stack:
        tasks: list[subprocess.Popen[str]] = [
            stack.enter_context(
                shell.started([*shell.MESHWRIGHT, *argv], {**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
            )
            for rank in ("0", "1")
        ]
        results = [shell.finish(task) for task in tasks]
    assert [done.status for done in results] == [0, 0], results
    assert "step 3/3" in results[0].out
    assert results[1].out == ""
    check_run(tmp_path, 2)


@pytest.mark.usefixtures("_alone")
def test_a_users_own_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model.toml"
    model.write_text(tiny_model(tmp_path).to_toml())
    loop = tmp_path / "loop.py"
    loop.write_text(OWN_LOOP)
    monkeypatch.setattr(sys, "argv", [str(loop), str(tmp_path / "alone"), str(model)])
    with redirect_stdout(StringIO()) as alone:
        runpy.run_path(str(loop), run_name="__main__")
    torchrun = [*shell.TORCHRUN, "--nproc-per-node", "2", str(loop)]
    two = shell.run([*torchrun, str(tmp_path / "two"), str(model)])
    assert two.status == 0, two.err
    losses = [float(word) for word in alone.getvalue().split()]
    assert losses[2] < losses[0]
    assert [float(word) for word in two.out.split()] == pytest.approx(losses, rel=1e-5)


def test_more_ranks_than_cores_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshwright.run.launch.num_cores", lambda: 2)
    monkeypatch.setattr("meshwright.run.launch._start_and_wait", lambda *_: [])
    launch(["train"], 2, log_dir=tmp_path)
    assert capsys.readouterr().err == ""
    launch(["train"], 3, log_dir=tmp_path)
    assert "meshwright: warning: 3 ranks share 2 cores" in capsys.readouterr().err
