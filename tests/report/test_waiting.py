"""What takes long is told on a terminal, and there alone; what does not, nowhere."""

from __future__ import annotations

import threading
import time
from io import StringIO

import pytest
from rich.console import Console

from meshwright.report.waiting import told_if_slow


def _console(is_terminal: bool) -> tuple[StringIO, Console]:
    written = StringIO()
    return written, Console(file=written, force_terminal=is_terminal, width=80)


def _waits() -> bool:
    return any(isinstance(thread, threading.Timer) for thread in threading.enumerate())


def test_a_terminal_is_told_while_it_takes_long_and_left_as_it_was():
    written, console = _console(is_terminal=True)
    deadline_s = time.monotonic() + 30
    with told_if_slow("searching [70B]", console, after_s=0.01):
        while "searching [70B]" not in written.getvalue() and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert "searching [70B]" in written.getvalue()
    assert written.getvalue().endswith("\x1b[2K"), "the line is cleared"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_nothing_is_told_of_what_is_quick_nor_to_a_file(is_terminal: bool):
    written, console = _console(is_terminal)
    with told_if_slow("searching", console, after_s=60):
        assert _waits() is is_terminal
    assert not _waits()
    assert written.getvalue() == ""
