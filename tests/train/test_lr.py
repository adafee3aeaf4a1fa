"""The learning rate: shape, ends, refusals."""

from itertools import pairwise

import pytest

from meshwright.core.errors import InputError
from meshwright.train.lr import learning_rate


def rates(warmup, total, final=0.1, peak=2.0, steps=None):
    return [
        learning_rate(step, peak=peak, warmup_steps=warmup, total_steps=total, final_fraction=final)
        for step in range(steps or total)
    ]


def test_rises_evenly_then_falls_to_the_fraction():
    values = rates(4, 15)
    assert values[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert all(a > b for a, b in pairwise(values[4:]))
    assert values[9] == pytest.approx((2.0 + 0.2) / 2)
    assert values[-1] == pytest.approx(0.2)


def test_stays_at_the_end_after_the_last_step():
    assert rates(0, 5, steps=9)[5:] == pytest.approx([0.2] * 4)


def test_without_warmup_starts_at_the_peak():
    assert rates(0, 5)[0] == 2.0
    assert rates(0, 1) == [2.0]


def test_fraction_one_is_constant():
    assert rates(0, 5, final=1.0) == pytest.approx([2.0] * 5)


@pytest.mark.parametrize(("step", "warmup", "total"), [(-1, 0, 5), (0, -1, 5), (0, 0, 0), (0, 5, 5)])
def test_refuses_what_is_no_schedule(step, warmup, total):
    with pytest.raises(InputError, match="learning rate"):
        learning_rate(step, peak=1.0, warmup_steps=warmup, total_steps=total)
