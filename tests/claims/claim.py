"""One claim: what is said, the value to reproduce, our answer through the public API, and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Answer = Mapping[str, Any]
"""Name → bool, number, text or tuple. Names carry units."""

EXACT = 1e-12
"""Relative tolerance where the expected value is written out in full."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of the table."""

    number: int
    claim: str
    by: tuple[str, ...]
    """What computes our answer, below `meshwright`."""
    ours: Callable[[Answer], Answer]
    """From what real ranks measured (:func:`tests.claims.on_ranks.measure`); most claims leave that aside."""
    expected: Answer
    verdict: str
    tolerance: float = EXACT
    """Relative, of numbers with a fraction; everything else is compared exactly."""
    on_ranks: bool = False
    """True where `ours` reads what real ranks measured."""


def gigabytes(num_bytes: float) -> float:
    """Decimal."""
    return num_bytes / 1e9


def show(answer: Answer) -> str:
    """One entry a line, at most six significant digits."""
    return "<br>".join(f"{name}: {_text(value)}" for name, value in answer.items())


def _text(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.6g}"
        case tuple():
            return ", ".join(_text(part) for part in value)
    return str(value)


HEADER = """# Claims

What introductions to large-model training say, the value that a reader should get, and what this project computes
through the functions named. Every row is a test, and this page is written by it (`make docs`).

70B is 70·10⁹ parameters; 1 GB is 10⁹ bytes. S is the size of a whole buffer, p (or t, D) the number of ranks, m
the number of micro-batches. Numbers that are missing here are not checked yet: those of sequence and context
parallelism, of mixtures of experts, and of advice.

| # | what is said | value | computed | by | verdict |
| --- | --- | --- | --- | --- | --- |
"""


def page(claims: list[Claim], answers: Mapping[int, Answer]) -> str:
    """The table as Markdown."""
    return HEADER + "".join(_row(claim, answers[claim.number]) for claim in claims)


def _row(claim: Claim, ours: Answer) -> str:
    value, computed = show(claim.expected), show(ours)
    by = "<br>".join(f"`{name}`" for name in claim.by)
    same = "the same" if computed == value else computed
    return f"| {claim.number} | {claim.claim} | {value} | {same} | {by} | {claim.verdict} |\n"
