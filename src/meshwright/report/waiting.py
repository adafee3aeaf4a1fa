"""A line on the terminal while something takes long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Timer

from rich.console import Console
from rich.text import Text

AFTER_S = 1.0
"""What is there sooner needs no word."""


@contextmanager
def told_if_slow(words: str, console: Console | None = None, after_s: float = AFTER_S) -> Iterator[None]:
    """Around work: `words` stand on the terminal from `after_s` seconds on, until it is done.

    Args:
        console: standard error by default; one that is no terminal gets nothing.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with ExitStack() as shown:
        timer = Timer(after_s, lambda: shown.enter_context(console.status(Text(words))))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
