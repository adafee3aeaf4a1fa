"""Run the command as a user would, and see what it leaves running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshwright.run.command import PARENT

TIMEOUT_S = 300.0
"""Of one command. Generous: cores may be shared."""
MESHWRIGHT = (sys.executable, "-m", "meshwright")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--master-port", "0", "--rdzv-backend",
            "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")  # fmt: skip
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "MESHWRIGHT_", "TORCHELASTIC_", "OMP_")


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """The lines in which the command says what is wrong."""
        return [line for line in self.err.splitlines() if "meshwright: error: " in line]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """As in a fresh shell."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return {**plain, "OMP_NUM_THREADS": "1", "COLUMNS": "140", **(more or {})}


@contextmanager
def started(command: Sequence[str], more: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process of its own session, as in a terminal; gone with all its ranks at the end."""
    process = subprocess.Popen(
        list(command), env=environment(more), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_all(process.pid)
            process.communicate()


def finish(process: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> Result:
    """Wait for a process."""
    out, err = process.communicate(timeout=timeout_s)
    return Result(process.returncode, out, err)


def run(command: Sequence[str], more: Mapping[str, str] | None = None) -> Result:
    """Run any command to its end."""
    with started(command, more) as process:
        return finish(process)


def meshwright(*argv: object, more: Mapping[str, str] | None = None) -> Result:
    """Run `meshwright ARGV...` to its end."""
    return run([*MESHWRIGHT, *map(str, argv)], more)


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank → process id, of the ranks that a launcher started and that still run."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = dict(item.split("=", 1) for item in (folder / "environ").read_text().split("\0") if "=" in item)
            is_dead = (folder / "stat").read_text().rsplit(")")[-1].split()[0] == "Z"
        except (OSError, ValueError, UnicodeDecodeError):
            continue
        if variables.get(PARENT) == str(launcher) and not is_dead:
            found[int(variables["RANK"])] = int(folder.name)
    return found


def kill_all(launcher: int) -> None:
    """SIGKILL a launcher and its ranks, as far as they still run."""
    for pid in (launcher, *ranks_of(launcher).values()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> None:
    """Until `condition` holds. Fails where the process ends before."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def num_lines(file: Path) -> int:
    """Lines in a file that may not be there yet."""
    return file.read_text().count("\n") if file.exists() else 0
