"""Garbage collection stands still where nothing needs it, and goes on as before."""

from __future__ import annotations

import gc

import pytest

from meshwright.core.collection import uncollected


@uncollected()
def _divided(by: int) -> bool:
    with uncollected():
        _ = 1 // by
    return gc.isenabled()


def test_collection_stands_still_and_goes_on_even_after_a_fault():
    assert gc.isenabled()
    assert not _divided(1)
    with pytest.raises(ZeroDivisionError):
        _divided(0)
    assert gc.isenabled()
