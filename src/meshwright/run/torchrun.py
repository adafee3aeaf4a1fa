"""torchrun's own launcher, for one machine: the only file of this room that needs torch."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright.run.failure import Failure, from_exit

TERMINAL = ""
"""The launcher's word for "not redirected"."""

SHUTDOWN_S = 5
"""How long ranks may take to stop after Ctrl-C before they are killed."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What the launcher handles by stopping all ranks."""


class RankFiles(LogsSpecs):
    """Rank 0 keeps the terminal; every other rank writes to one log file.

    A rank's stdout is joined to its stderr by the rank itself (two open files would overwrite each
    other); until then only the interpreter could print, and it prints to stderr.
    """

    def __init__(self, logs: Sequence[Path], variables: Sequence[Mapping[str, str]]) -> None:
        super().__init__(log_dir=str(logs[0].parent))
        self._logs = logs
        self._variables = variables

    @property
    def root_log_dir(self) -> str:
        """Folder of the log files."""
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Destinations of each local rank; adds our variables to its environment."""
        for rank, env in envs.items():
            env.update(self._variables[rank])
        others = [rank for rank in envs if rank > 0]
        return LogsDest(
            stdouts={0: TERMINAL} | dict.fromkeys(others, os.devnull),
            stderrs={0: TERMINAL} | {rank: str(self._logs[rank]) for rank in others},
            error_files=dict.fromkeys(envs, os.devnull),
        )


def run_ranks(
    module: str, argv: Sequence[str], logs: Sequence[Path], variables: Sequence[Mapping[str, str]]
) -> list[Failure]:
    """Run one process per entry of `logs` and wait. When one fails, the others are stopped.

    Args:
        module: each rank runs `python -m MODULE ARGV...`.
        argv: its arguments.
        logs: log file of each rank.
        variables: environment variables of each rank, besides torchrun's.

    Returns:
        How the ranks that failed ended; empty when all ended well.

    Raises:
        KeyboardInterrupt: Ctrl-C; SystemExit: another signal asked this process to end. All ranks have ended.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=len(logs),
        run_id=f"meshwright-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=SHUTDOWN_S,
        logs_specs=RankFiles(logs, variables),
    )
    with _quiet_launcher(), _signals_restored():
        try:
            elastic_launch(config, sys.executable)("-m", module, *argv)
        except ChildFailedError as error:
            return [from_exit(rank, ended.exitcode, ended.timestamp) for rank, ended in error.failures.items()]
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
    return []


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """torchrun's launcher logs each failure in its own words; we say it in one line instead."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler, propagate = logging.NullHandler(), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)


@contextmanager
def _signals_restored() -> Iterator[None]:
    """torchrun's launcher installs handlers and leaves them in place."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
