"""Every claim is what the public API computes, and `docs/claims.md` shows it."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest

from tests.claims import exchange, layers, pipeline, states
from tests.claims.claim import Answer, Claim, page
from tests.claims.on_ranks import NUM_RANKS, measure
from tests.house.source import ROOT

CLAIMS = sorted((c for topic in (states, exchange, layers, pipeline) for c in topic.CLAIMS), key=lambda c: c.number)
NUMBERS = [*range(1, 32), 38, 39, *range(40, 50)]
PAGE = ROOT / "docs" / "claims.md"


@pytest.fixture(scope="session")
def measured(ranks) -> Answer:
    """What the ranks measured, once they agree on it."""
    first, *others = ranks(measure, NUM_RANKS, timeout_s=120.0)
    assert all(other == first for other in others)
    return first


def rounded(claim: Claim, value: object) -> object:
    if isinstance(value, tuple):
        return tuple(rounded(claim, part) for part in value)
    return pytest.approx(value, rel=claim.tolerance) if isinstance(value, float) else value


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: str(c.number))
def test_claim(claim: Claim, request: pytest.FixtureRequest):
    ours = claim.ours(request.getfixturevalue("measured") if claim.on_ranks else {})
    assert list(ours) == list(claim.expected)
    for name, value in claim.expected.items():
        assert ours[name] == rounded(claim, value), name


def test_all_claims_are_there():
    assert [claim.number for claim in CLAIMS] == NUMBERS
    assert all(claim.claim and claim.verdict for claim in CLAIMS)


@pytest.mark.parametrize("name", sorted({name for claim in CLAIMS for name in claim.by}))
def test_what_computes_it_exists(name: str):
    assert resolve_name(f"meshwright.{name}")


def test_page_is_current(measured: Answer, request: pytest.FixtureRequest):
    text = page(CLAIMS, {claim.number: claim.ours(measured) for claim in CLAIMS})
    if request.config.getoption("--regenerate"):
        PAGE.write_text(text, encoding="utf-8")
    assert text == PAGE.read_text(encoding="utf-8"), f"{PAGE.name} differs; if that is meant, run --regenerate"
