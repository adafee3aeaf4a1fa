"""An error that is the user's to mend is one line and exit status 1."""

import errno
import warnings

import pytest

from meshwright.core.errors import InputError, MeshwrightWarning
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
