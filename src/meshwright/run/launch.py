"""Start the ranks of a run on this machine, through torchrun's own launcher, and name the one that fails.

    meshwright train ...            the launcher: waits, prints one line when a rank fails
    ├── rank 0                      keeps the terminal: the progress bar is drawn here
    ├── rank 1                      writes to LOGS/rank-1.log
    └── rank 2 ...

Several nodes are ordinary `torchrun` or Slurm jobs: there the ranks exist already, and
:func:`enter_ranks` only takes its place among them.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.core.errors import InputError, RankError
from meshwright.core.sources import core_warning, num_cores
from meshwright.run.command import LOG, PARENT, RECORD, is_launched
from meshwright.run.doing import doing_path, read_doing
from meshwright.run.environment import World, detect
from meshwright.run.failure import Failure, first_cause

ENTRY = "meshwright"
"""The module that a rank runs."""
MAX_QUOTED = 160
"""Characters of a log that an error repeats."""
DUMP = "Fatal Python error"
"""How the interpreter begins when it writes down where a crash happened."""


def enter_ranks(
    argv: Sequence[str], num_ranks: int, *, log_dir: Path | None = None, before: Callable[[], None] | None = None
) -> World | None:
    """Take this process's place among the ranks, or start the ranks and wait for them.

    Args:
        argv: arguments of the command, without the program's name; the ranks get the same.
        num_ranks: ranks that the plan needs.
        log_dir: as in :func:`launch`.
        before: what one process does before any rank goes on: the one that starts the ranks, or rank 0 of
            torchrun or Slurm. The other ranks meet rank 0 only when it is done.

    Returns:
        In a rank: its World, whose variables now stand in `os.environ`. In the process that started
        the ranks: None, after all of them have ended well.

    Raises:
        InputError: torchrun or Slurm started another number of ranks than the plan needs.
        RankError: a rank failed.
    """
    world = detect(os.environ)
    if world is not None:
        check_num_ranks(world, num_ranks)
    if before is not None and speaks_for_all(world):
        before()
    if world is None:
        launch(argv, num_ranks, log_dir=log_dir)
        return None
    os.environ.update(world.variables())
    return world


def speaks_for_all(world: World | None) -> bool:
    """Whether this process is the one that starts the ranks, or rank 0 of torchrun or Slurm."""
    return world is None or (world.rank == 0 and not is_launched())


def check_num_ranks(world: World, num_ranks: int) -> None:
    """Raise InputError where torchrun or Slurm started another number of ranks than the plan needs."""
    if world.world_size != num_ranks:
        raise InputError(
            f"{world.source} started a world of {world.world_size}, but the plan needs dp × tp × pp = {num_ranks}; "
            f"start as many ranks, or plan for a cluster of {world.world_size}"
        )


def launch(argv: Sequence[str], num_ranks: int, *, log_dir: Path | None = None, module: str = ENTRY) -> None:
    """Run `python -m MODULE ARGV...` as `num_ranks` ranks on this machine and wait for all of them.

    A rank that fails ends all others: they are told to stop at once and killed after half a minute.

    Args:
        argv: arguments of the command.
        num_ranks: number of processes.
        log_dir: folder for `rank-1.log`, ...; None: a temporary one, kept only after a failure.
        module: what each rank runs; must call :func:`meshwright.run.command.run_command`.

    Raises:
        RankError: names the rank that failed first, what happened and the log with its traceback.
        KeyboardInterrupt: after Ctrl-C, when all ranks have ended.
    """
    _warn_about_cores(num_ranks)
    logs = log_dir or Path(tempfile.mkdtemp(prefix="meshwright-logs-"))
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="meshwright-records-") as records:
        failures = _start_and_wait(module, argv, num_ranks, logs, Path(records))
    if failures:
        cause = first_cause(failures)
        raise RankError(f"{cause}{_log_hint(cause, log_path(logs, cause.rank))}")
    if log_dir is None:
        shutil.rmtree(logs, ignore_errors=True)


def rank_variables(rank: int, num_ranks: int, logs: Path, records: Path) -> dict[str, str]:
    """Environment variables of one rank besides torchrun's. What the user has set is left alone."""
    defaults = {"OMP_NUM_THREADS": str(max(1, num_cores() // num_ranks)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    own = {
        RECORD: str(_record_path(records, rank)),
        LOG: str(log_path(logs, rank)),
        PARENT: str(os.getpid()),
    }
    return {name: value for name, value in defaults.items() if name not in os.environ} | own


def log_path(logs: Path, rank: int) -> Path:
    """Where a rank's output (of rank 0: only its tracebacks) is written."""
    return logs / f"rank-{rank}.log"


def _record_path(records: Path, rank: int) -> Path:
    return records / f"rank-{rank}.json"


def _start_and_wait(module: str, argv: Sequence[str], num_ranks: int, logs: Path, records: Path) -> list[Failure]:
    from meshwright.run.torchrun import run_ranks  # torch takes seconds, and most commands start no ranks

    variables = [rank_variables(rank, num_ranks, logs, records) for rank in range(num_ranks)]
    try:
        ended = run_ranks(module, argv, [log_path(logs, rank) for rank in range(num_ranks)], variables)
    except (KeyboardInterrupt, SystemExit):
        _leave_progress_line()
        raise
    if ended:
        _leave_progress_line()
    return [_recorded(failure, records) for failure in ended]


def _recorded(failure: Failure, records: Path) -> Failure:
    """What the rank itself said, which is more than its exit status, and what it was doing."""
    path = _record_path(records, failure.rank)
    known = Failure.load(path) if path.exists() else failure
    doing = read_doing(doing_path(path))
    return replace(known, doing=doing.words) if doing else known


def _log_hint(cause: Failure, log: Path) -> str:
    """Where to read more; of a death that left no words of its own, also the last line that was written before it."""
    lines = [line.strip() for line in log.read_text(errors="replace").split("\n")] if log.exists() else []
    if not any(lines):
        return ""
    quoted = f'; its last line: "{_last_words(lines)[:MAX_QUOTED]}"' if cause.is_silent else ""
    return f"{quoted}; log: {log}"


def _last_words(lines: Sequence[str]) -> str:
    """What was written last before the interpreter's own dump of a crash; of a dump alone its title."""
    at = next((at for at, line in enumerate(lines) if line.startswith(DUMP)), len(lines))
    return next((line for line in reversed(lines[:at]) if line), lines[min(at, len(lines) - 1)])


def _warn_about_cores(num_ranks: int) -> None:
    warning = core_warning(num_ranks, num_cores())
    if warning:
        print(f"meshwright: warning: {warning}", file=sys.stderr)


def _leave_progress_line() -> None:
    """Rank 0 may have been killed while it drew: show the cursor again and begin a new line."""
    if sys.stderr.isatty():
        print("\x1b[?25h", file=sys.stderr, flush=True)
