"""Fixtures for tests that also run the engine in the test's own process."""

from tests.parallel.conftest import leaves_no_group

__all__ = ["leaves_no_group"]
