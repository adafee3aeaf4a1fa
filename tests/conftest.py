"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.pool import Pool

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when imported; tensors are tiny, and cores are shared


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The worker processes of this session."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def ranks(pool: Pool) -> Callable[..., list[Any]]:
    """`ranks(fn, world, *args)`: see tests/pool.py."""
    return pool.run_ranks
