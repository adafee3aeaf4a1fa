"""Python's search for values that hold each other, while there are none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Around work that piles up values of which none holds another that holds it.

    They go when nobody holds them any more, as ever; what is saved is looking through all of them again and again for
    such as hold each other, a fifth of a planner's time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
