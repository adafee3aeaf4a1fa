"""Options of the whole suite.

`--regenerate`  golden text, which a test compares whole and which is kept in a file beside it, is written anew
`--timed`       what a quiet machine takes is held against forecasts too
"""

from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="write golden files instead of comparing with them")
    parser.addoption("--timed", action="store_true", help="also run what needs a machine that does nothing else")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--timed"):
        items[:] = [item for item in items if item.get_closest_marker("timed") is None]
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)  # where several workers share files, a long one must not be last


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(file_name, text)`: the text must equal the file beside the test."""

    def check(name: str, text: str) -> None:
        path = Path(request.path).parent / name
        if request.config.getoption("--regenerate"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path.name} is missing; run pytest with --regenerate and read what it wrote"
        assert text == path.read_text(encoding="utf-8"), f"{path.name} differs; if that is meant, run --regenerate"

    return check
