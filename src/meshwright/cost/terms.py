"""One named part of a duration, and sums of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeTerm:
    """One named part of a duration."""

    name: str
    seconds: float


def total_s(terms: Iterable[TimeTerm]) -> float:
    """Sum of terms."""
    return sum(term.seconds for term in terms)
