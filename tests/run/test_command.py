"""An error that is the user's to mend is one line and exit status 1."""

import errno
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress

import pytest

from meshwright.core.errors import InputError, MeshwrightWarning
from meshwright.run import command
from meshwright.run.command import run_command


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def fail(error: BaseException) -> None:
    raise error


def test_status_of_a_command_that_ends_well() -> None:
    assert run_command(lambda: None) == 0
    assert run_command(lambda: 2) == 2


def test_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: fail(InputError("a.toml: no\n such file"))) == 1
    assert capsys.readouterr().err == "meshwright: error: a.toml: no such file\n"


def test_a_rank_of_torchrun_says_which_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    assert run_command(lambda: fail(InputError("no"))) == 1
    assert capsys.readouterr().err == "meshwright: error: rank 3: no\n"


def test_traceback_on_request(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_TRACEBACK", "1")
    assert run_command(lambda: fail(InputError("no"))) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("meshwright: error: no\n")


def test_interrupted() -> None:
    assert run_command(lambda: fail(KeyboardInterrupt())) == 130


def test_sigterm_is_one_line_and_what_was_begun_is_cleared_away(capsys: pytest.CaptureFixture[str]) -> None:
    cleared, before = [], signal.getsignal(signal.SIGTERM)

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            cleared.append(True)

    assert run_command(work) == 143
    assert capsys.readouterr().err == "meshwright: error: stopped by SIGTERM\n"
    assert cleared
    assert signal.getsignal(signal.SIGTERM) is before
    assert run_command(lambda: fail(SystemExit(143))) == 143, "as the launcher of ranks says it"
    with pytest.raises(SystemExit):
        run_command(lambda: fail(SystemExit(3)))


def test_sigterm_is_obeyed_where_a_library_catches_what_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once only: what is cleared away on the way out takes the time that it takes."""
    monkeypatch.setattr(command, "INSIST_S", 0.02)
    cleared = []

    def work() -> None:
        with suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
        try:
            time.sleep(5)
            fail(AssertionError("the command went on"))
        finally:
            time.sleep(0.2)
            cleared.append(True)

    assert run_command(work) == 143
    assert cleared


def test_a_rank_ends_by_sigterm_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    handlers = []
    assert run_command(lambda: handlers.append(signal.getsignal(signal.SIGTERM))) == 0
    assert handlers == [signal.SIG_DFL]


def test_notes_of_an_error_are_part_of_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = InputError("a hole in the disk")
    error.add_note("in the forward of micro-batch 3 on stage 1 (F3@1)")
    assert run_command(lambda: fail(error)) == 1
    assert capsys.readouterr().err.endswith("a hole in the disk, in the forward of micro-batch 3 on stage 1 (F3@1)\n")


def test_no_room_for_what_no_file_is_named_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: fail(OSError(errno.ENOSPC, "No space left on device"))) == 1
    err = capsys.readouterr().err
    assert err == "meshwright: error: the output, or a file, cannot be written: No space left on device\n"


def test_a_reader_that_is_gone_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: fail(BrokenPipeError(errno.EPIPE, "Broken pipe"))) == 1
    assert capsys.readouterr().err == ""


def test_our_warnings_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: warnings.warn("a\n b", MeshwrightWarning, stacklevel=1)) == 0
    assert capsys.readouterr().err == "meshwright: warning: a b\n"


def test_our_own_faults_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


ENDING = """
import atexit, sys, threading, time
from meshwright.run.command import end_rank
atexit.register(print, "registered")
threading.Thread(target=time.sleep, args=(60,)).start()
print("said", end="")
end_rank(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_a_rank_ends_without_waiting_for_threads(status: int) -> None:
    """An interpreter of its own would join the thread, for a minute. What is registered for the end runs on success."""
    ended = subprocess.run([sys.executable, "-c", ENDING, str(status)], capture_output=True, text=True, timeout=30)
    assert ended.returncode == status, ended.stderr
    assert ended.stdout == ("saidregistered\n" if status == 0 else "said")
