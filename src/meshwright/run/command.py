"""Run one command: an error that is the user's to mend is one line and exit status 1, never a traceback.

alone, or the process that starts ranks         a rank that `launch` started
---------------------------------------         ----------------------------
MeshwrightError → `meshwright: error: ...`, 1   any error → record for the launcher, traceback to its log, 1
a file's error  → the same                      Ctrl-C    → 130
Ctrl-C          → 130
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from meshwright.core.errors import MeshwrightError
from meshwright.run.failure import from_exception

RECORD = "MESHWRIGHT_RANK_RECORD"
"""Environment variable: where a launched rank records its failure."""
LOG = "MESHWRIGHT_RANK_LOG"
"""Environment variable: a launched rank's log file."""
PARENT = "MESHWRIGHT_RANK_PARENT"
"""Environment variable: process id of the launcher; a rank ends when its launcher is gone."""
TRACEBACK = "MESHWRIGHT_TRACEBACK"
"""Environment variable: set to 1 to see the traceback of every error."""

GRACE_S = 2.0
"""How long a rank whose peer is gone waits before it ends, so that the peer can say why."""

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT."""


def run_command(main: Callable[[], int | None]) -> int:
    """Run `main` and return the exit status; errors are reported as the module's drawing says.

    Args:
        main: the command; it returns an exit status, or None for 0.
    """
    if RECORD in os.environ:
        return _run_in_rank(main)
    try:
        return main() or 0
    except MeshwrightError as error:
        return _explain(str(error))
    except OSError as error:
        if error.filename is None:
            raise  # not about a file: nothing that a user could mend
        return _explain(f"{os.fspath(error.filename)}: {error.strerror}")
    except KeyboardInterrupt:
        return INTERRUPTED


def _explain(message: str) -> int:
    """Print the error that is being handled; the exit status."""
    if os.environ.get(TRACEBACK) == "1":
        traceback.print_exc()
    print_error(f"{_rank_prefix()}{message}")
    return 1


def is_launched() -> bool:
    """Whether this process is a rank that `launch` started."""
    return RECORD in os.environ


def _rank_prefix() -> str:
    """Among ranks that torchrun or Slurm started, each speaks for itself."""
    return f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""


def print_error(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    print(f"meshwright: error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _run_in_rank(main: Callable[[], int | None]) -> int:
    rank, record, log = int(os.environ["RANK"]), Path(os.environ[RECORD]), Path(os.environ[LOG])
    _end_with_launcher(int(os.environ[PARENT]))
    if rank > 0:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the log file; rank 0 keeps the terminal
    with log.open("a", buffering=1, encoding="utf-8") as stream:
        faulthandler.enable(stream)
        try:
            return main() or 0
        except KeyboardInterrupt:
            status = INTERRUPTED
        except Exception as error:
            traceback.print_exc(file=stream)
            failure = from_exception(rank, error)
            failure.save(record)
            status = 1
            if failure.is_consequence:
                time.sleep(GRACE_S)
        finally:
            faulthandler.disable()
    _leave(status)


def _leave(status: int) -> NoReturn:
    """End this process at once: with peers gone, tearing down the network may wait for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_with_launcher(launcher: int) -> None:
    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-launcher", daemon=True).start()
