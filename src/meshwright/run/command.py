"""Run one command: an error that is the user's to mend is one line and exit status 1, never a traceback.

alone, or the process that starts ranks         a rank that `launch` started
---------------------------------------         ----------------------------
MeshwrightError → `meshwright: error: ...`, 1   any error → record for the launcher, traceback to its log, 1
a file's error  → the same                      Ctrl-C    → 130
no room         → the same
reader is gone  → 1, silently (`| head`)
Ctrl-C          → 130
SIGTERM         → `meshwright: error: stopped by SIGTERM`, 143

A MeshwrightWarning is one line too: `meshwright: warning: ...`.
"""

from __future__ import annotations

import atexit
import errno
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from meshwright.core.errors import MeshwrightError, MeshwrightWarning
from meshwright.run.environment import is_rank
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

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Why something cannot be written, where the system names no file."""

INSIST_S = 0.5
"""After so long SIGTERM is obeyed once more where what it raised was caught on its way."""

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT."""

STOPPING = {128 + number: number for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
"""Exit status → the signal by which somebody else stopped this process."""


def run_command(main: Callable[[], int | None]) -> int:
    """Run `main` and return the exit status; errors are reported as the module's drawing says.

    Args:
        main: the command; it returns an exit status, or None for 0.
    """
    with _warnings_in_one_line():
        return _run_in_rank(main) if RECORD in os.environ else _run_alone(main)


def _run_alone(main: Callable[[], int | None]) -> int:
    try:
        with _ending_on_sigterm():
            status = main() or 0
        if sys.stdout is not None:  # None: closed by who started us
            sys.stdout.flush()
        return status
    except MeshwrightError as error:
        return _explain(", ".join([str(error), *getattr(error, "__notes__", ())]))
    except OSError as error:
        if error.filename is not None:
            return _explain(f"{os.fspath(error.filename)}: {error.strerror}")
        if isinstance(error, BrokenPipeError):
            _drop_output()
            return 1
        if error.errno in NO_ROOM:
            _drop_output()
            return _explain(f"the output, or a file, cannot be written: {error.strerror}")
        raise  # nothing that a user could mend
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as stop:
        if stop.code not in STOPPING:
            raise
        print_error(f"{_rank_prefix()}stopped by {STOPPING[stop.code].name}")
        return int(stop.code)


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM unwinds the command like Ctrl-C does, so that what it has begun is cleared away.

    Some libraries catch all that is raised while they are imported: what was caught so is raised again, until the
    command is left. Not in a rank of torchrun or Slurm: that must end at once, also while it waits for the network.
    """
    raised: list[SystemExit] = []
    left, leaving = threading.Event(), threading.Lock()

    def leave(number: int, frame: object) -> None:
        if any(stop in _being_handled() for stop in raised):
            return  # the command is being left
        raised.append(SystemExit(128 + number))
        if len(raised) == 1:
            threading.Thread(target=insist, name="insist", daemon=True).start()
        raise raised[-1]

    def insist() -> None:
        is_ours = True
        while is_ours and not left.wait(INSIST_S):
            with leaving:
                is_ours = not left.is_set() and signal.getsignal(signal.SIGTERM) is leave
                if not left.is_set():
                    signal.raise_signal(signal.SIGTERM)  # whose handler runs in the main thread

    if is_rank(os.environ) or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        left.set()
        with leaving:
            signal.signal(signal.SIGTERM, before)


def _being_handled() -> Iterator[BaseException]:
    """The exception that is being handled, and those during whose handling it was raised."""
    error = sys.exception()
    while error is not None:
        yield error
        error = error.__context__


def _drop_output() -> None:
    """What is still to be written has nowhere to go; the interpreter would try once more at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Our own warnings without Python's file names and source lines; others as always."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *more: Any, **named: Any) -> None:
            if issubclass(category, MeshwrightWarning):
                print(f"meshwright: warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
            else:
                usual(message, category, *more, **named)

        warnings.showwarning = show
        yield


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
    """One line on stderr, whatever the message holds; where that cannot be written either, the status must do."""
    with suppress(OSError):
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


def end_rank(status: int) -> NoReturn:
    """End a rank whose command has returned, without the interpreter's own teardown.

    Threads of the network library and our own watcher live to the last moment; one that asks for the interpreter
    while that is being taken down is ended by force, and now and then takes the process with it, by SIGABRT.
    After success, what was registered for the end still runs; after a failure its peers may be gone, and nothing waits.
    """
    if status == 0:
        atexit._run_exitfuncs()
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
