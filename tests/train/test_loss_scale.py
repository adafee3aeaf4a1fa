"""The state machine of the loss scale: golden traces of overflows."""

from __future__ import annotations

import pytest
import torch

from meshwright.core.errors import InputError
from meshwright.train.loss_scale import LossScale, LossScaleOptions


def trace(overflows: str, **options: float) -> list[float]:
    """Scales after each step; `x` is a step with an overflow."""
    scale = LossScale(
        LossScaleOptions(**{"initial": 16.0, "interval": 3, **options}), torch.device("cpu"), is_dynamic=True
    )
    found = []
    for step in overflows:
        scale.update(torch.tensor(step == "x"))
        found.append(float(scale.scale))
    return found


@pytest.mark.parametrize(
    ("overflows", "options", "scales"),
    [
        ("...", {}, [16, 16, 32]),
        ("......", {}, [16, 16, 32, 32, 32, 64]),
        ("x", {}, [8]),
        ("..x...", {}, [16, 16, 8, 8, 8, 16]),
        ("xxxxxx", {}, [8, 4, 2, 1, 1, 1]),
        ("xx...x", {"hysteresis": 2}, [16, 8, 8, 8, 16, 16]),
        ("x.x", {"hysteresis": 2}, [16, 16, 8]),
        ("....", {"interval": 1, "maximum": 64.0}, [32, 64, 64, 64]),
        ("xxx", {"minimum": 6.0}, [8, 6, 6]),
        ("x..", {"backoff": 0.25, "growth": 4.0, "interval": 2}, [4, 4, 16]),
    ],
)
def test_trace(overflows, options, scales):
    assert trace(overflows, **options) == scales


def test_a_scale_that_grew_for_long_still_falls():
    """A batch without a counted token has no gradient and never overflows; fp32 itself would, after 112 doublings."""
    scales = trace("." * 200 + "x", initial=1.0, interval=1)
    assert scales[-2] < float("inf")
    assert scales[-1] == scales[-2] / 2


def test_it_goes_on_where_it_was():
    options = LossScaleOptions(initial=16.0, interval=3, hysteresis=2)
    first, second = (LossScale(options, torch.device("cpu"), is_dynamic=True) for _ in range(2))
    for overflow in (True, False, False):
        first.update(torch.tensor(overflow))
    second.restore(first.state())
    for scale in (first, second):
        scale.update(torch.tensor(False))
    assert first.state() == second.state() == [32.0, 0.0, 2.0]


def test_other_precisions_keep_one():
    scale = LossScale(LossScaleOptions(), torch.device("cpu"), is_dynamic=False)
    scale.update(torch.tensor(True))
    assert float(scale.scale) == 1.0


@pytest.mark.parametrize(
    "wrong", [{"growth": 1.0}, {"backoff": 1.0}, {"interval": 0}, {"hysteresis": 0}, {"initial": 0.5}, {"minimum": 0.0}]
)
def test_settings_that_cannot_work(wrong):
    with pytest.raises(InputError, match="loss scale"):
        LossScaleOptions(**wrong)
