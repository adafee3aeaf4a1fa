"""Fixtures for tests that also run the engine in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshwright.comm import mesh


@pytest.fixture(autouse=True)
def leaves_no_group() -> Iterator[None]:
    """A run of one rank that a test has started ends with it."""
    yield
    mesh.stop()
