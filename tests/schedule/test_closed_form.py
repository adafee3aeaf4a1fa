"""Closed forms: the published numbers."""

from __future__ import annotations

from fractions import Fraction

import pytest

from meshwright.core.errors import InputError
from meshwright.core.schedule import choices
from meshwright.schedule.closed_form import bubble_fraction, bubble_of_ideal, makespan_s, peak_live


@pytest.mark.parametrize(("num_micro_batches", "bubble"), [(1, "3/4"), (4, "3/7"), (8, "3/11"), (16, "3/19")])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_four_stages(name: str, num_micro_batches: int, bubble: str) -> None:
    assert bubble_fraction(name, 4, num_micro_batches) == pytest.approx(float(Fraction(bubble)), abs=1e-15)
    assert bubble_of_ideal(name, 4, num_micro_batches) == 3 / num_micro_batches


def test_naive_never_gets_better() -> None:
    assert {bubble_fraction("naive", 4, m) for m in (1, 8, 64)} == {3 / 4}
    assert makespan_s("naive", 4, 8, 1.0, 2.0) == 4 * 8 * 3


def test_one_stage_has_no_bubble() -> None:
    for name in ("naive", "gpipe", "1f1b"):
        assert bubble_fraction(name, 1, 5) == 0
        assert makespan_s(name, 1, 5, 1.0, 2.0) == 15


def test_peak_live() -> None:
    assert peak_live("1f1b", 4, 2) == (2, 2, 2, 1)
    assert peak_live("gpipe", 2, 5) == (5, 5)


def test_a_schedule_that_is_not_there_is_not_guessed() -> None:
    with pytest.raises(InputError, match=f"`looped` is not known; {choices()}"):
        peak_live("looped", 4, 8)
