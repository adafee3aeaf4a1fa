"""Real processes that fail in the ways that happen: one line names the rank, and nothing is left running."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshwright.core.errors import InputError
from meshwright.core.sources import num_cores
from meshwright.run.launch import enter_ranks, rank_variables

ROOT = Path(__file__).parents[2]
LAUNCH = """
import sys
from pathlib import Path
from meshwright.run.command import run_command
from meshwright.run.launch import launch
how, where, num_ranks = sys.argv[1:]
logs = Path(where) / "logs"
raise SystemExit(run_command(
    lambda: launch([how, where], int(num_ranks), log_dir=logs, module="tests.run.rank_program")))
"""


@contextmanager
def started(how: str, where: Path, num_ranks: int = 3) -> Iterator[subprocess.Popen[str]]:
    """A process that launches ranks which end as `how` says."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "OMP_", "SLURM"))}
    command = [sys.executable, "-c", LAUNCH, how, str(where), str(num_ranks)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=variables | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finish(how: str, where: Path, num_ranks: int = 3) -> tuple[int, str, str]:
    """(exit status, stdout, stderr without the warning about cores)."""
    with started(how, where, num_ranks) as process:
        out, err = process.communicate(timeout=60)
    lines = [line for line in err.splitlines() if "warning:" not in line]
    assert not any(is_running(pid) for pid in pids(where))
    return process.returncode, out, "\n".join(lines)


def pids(where: Path) -> list[int]:
    return [int(path.read_text()) for path in where.glob("pid-*")]


def is_running(pid: int) -> bool:
    """Whether a process lives; one that only waits to be collected does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rsplit(")")[-1].split()[0] == "Z")


def wait_for(condition, timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def test_ranks_that_end_well(tmp_path: Path) -> None:
    status, out, err = finish("well", tmp_path, num_ranks=2)
    assert (status, out, err) == (0, "stdout of rank 0\n", "stderr of rank 0")
    assert set((tmp_path / "logs" / "rank-1.log").read_text().splitlines()) == {"stdout of rank 1", "stderr of rank 1"}
    assert (tmp_path / "omp-1").read_text() == str(max(1, num_cores() // 2))


LAST_WORDS = {"killed": 'its last line: "stderr of rank 1"', "aborted": 'its last line: "free(): invalid size"'}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("error", "rank 1: ValueError: seven is not prime"),
        ("killed", "rank 1 was killed by signal 9 (SIGKILL"),
        ("aborted", "rank 1 was killed by signal 6 (SIGABRT)"),
        ("consequence", "rank 1: ValueError: the cause"),
    ],
)
def test_one_line_names_the_rank_that_failed(how: str, words: str, tmp_path: Path) -> None:
    status, _, err = finish(how, tmp_path)
    own = [line for line in err.splitlines() if line != "stderr of rank 0"]
    assert status == 1
    assert len(own) == 1, err
    assert own[0].startswith(f"meshwright: error: {words}")
    log = tmp_path / "logs" / "rank-1.log"
    assert f"log: {log}" in own[0]
    assert ("Traceback" in log.read_text()) == (how not in LAST_WORDS)
    assert ("its last line" in own[0]) == (how in LAST_WORDS), "of a death without words"
    assert LAST_WORDS.get(how, "") in own[0]


def test_ctrl_c_stops_all_ranks(tmp_path: Path) -> None:
    with started("sleep", tmp_path) as process:
        wait_for(lambda: len(pids(tmp_path)) == 3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not any(is_running(pid) for pid in pids(tmp_path))


def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    with started("sleep", tmp_path) as process:
        wait_for(lambda: len(pids(tmp_path)) == 3 and all(pids(tmp_path)))
        process.kill()
        wait_for(lambda: not any(is_running(pid) for pid in pids(tmp_path)), timeout_s=20)


def test_rank_0_keeps_the_terminal(tmp_path: Path) -> None:
    """The progress bar is drawn by rank 0, so it must see a terminal where there is one."""
    ours, terminal = os.openpty()
    command = [sys.executable, "-c", LAUNCH, "well", str(tmp_path), "2"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        stdout=terminal,
        stderr=terminal,
        timeout=60,
    )
    os.close(terminal)
    os.close(ours)
    assert done.returncode == 0
    assert [(tmp_path / f"terminal-{rank}").read_text() for rank in range(2)] == ["True", "False"]


def test_under_slurm_the_ranks_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "4"}
    monkeypatch.setattr(os, "environ", dict(step))
    world = enter_ranks(["train"], 4)
    assert world is not None
    assert world.rank == 1
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]) == ("1", "4", "n1")


def test_threads_that_the_user_chose_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert rank_variables(0, 1, tmp_path, tmp_path)["OMP_NUM_THREADS"] == str(num_cores())
    assert rank_variables(0, 10_000, tmp_path, tmp_path)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "OMP_NUM_THREADS" not in rank_variables(0, 1, tmp_path, tmp_path)


def test_another_number_of_ranks_than_the_plan_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=r"started a world of 4, but the plan needs .* 8"):
        enter_ranks(["train"], 8)
