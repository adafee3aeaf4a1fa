"""Every page is run: README and docs/. `pytest tests/docs --regenerate` writes outputs and generated parts anew."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.comm import mesh
from tests.docs.generated import GENERATED
from tests.docs.page import Page
from tests.house.source import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WIDTH = 110


@pytest.fixture
def _away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In an empty folder, on a terminal of known width, alone; nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    yield
    mesh.stop()


@pytest.mark.usefixtures("_away")
@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_page_is_what_its_blocks_print(path: Path, request: pytest.FixtureRequest) -> None:
    targets = frozenset(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    rendered = Page(path, GENERATED, targets).render()
    if request.config.getoption("--regenerate"):
        path.write_text(rendered, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == rendered, "outputs have changed; if that is meant, run --regenerate"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", path.read_text(encoding="utf-8"))
    assert not [target for target in targets if not (path.parent / target).exists()]


def test_changelog_has_the_version_and_what_is_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version
    assert "## [Unreleased]" in text or f"## [{version[1]}]" in text


@pytest.mark.usefixtures("_away")
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\n1 / 0\n```\n", ZeroDivisionError),
        ("```console\n$ meshwright plan nonsense\n```\n", AssertionError),
        ("```sh\nmeshwright nonsense\n```\n", AssertionError),
        ("```sh\nmake nonsense\n```\n", AssertionError),
        ("```sh\nmeshwright plan gpt2 local:1 --nonsense\n```\n", Exception),
    ],
)
def test_a_wrong_page_is_caught(text: str, error: type[Exception], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(error):
        Page(page, GENERATED, frozenset({"test"})).render()


def test_outputs_are_put_in(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(6 * 7)\n```\n\n```text\n41\n```\n\nafter\n")
    assert "```text\n42\n```\n\nafter\n" in Page(page, GENERATED, frozenset()).render()
