"""Mixtures in generated layouts beside one process: losses, gradients, norms, weights, bytes sent and bytes held."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parallel.mixtures import FACTORS, Case, covering, legal_cases, pairs_of, plan_of
from tests.parallel.test_matrix import assert_parity

Ranks = Callable[..., list[list[str | None]]]


@pytest.fixture(scope="module")
def legal() -> list[Case]:
    return legal_cases(seed=0, tries=12_000)


@pytest.fixture(scope="module")
def chosen(legal: list[Case]) -> list[Case]:
    return covering(legal)


def test_every_choice_about_experts_meets_every_other(legal: list[Case], chosen: list[Case]) -> None:
    """But for those that rules forbid."""
    assert {factor: {case[factor] for case in legal} for factor in FACTORS} == {
        factor: set(values) for factor, values in FACTORS.items()
    }
    met = {pair for case in chosen for pair in pairs_of(case)}
    assert met == {pair for case in legal for pair in pairs_of(case)}


def is_forecast_wrong(case: Case) -> bool:
    """Layouts whose activations (20 kB and less) are forecast 7 to 22 % off: the last stage of experts without capacity
    under full recomputation; experts that choose, recomputed in part while what is kept moves to the host."""
    is_bare = case["gate"] == "empty" and case["recompute"] == "full" and case["pp"] > 1
    return is_bare or (
        case["gate"] == "choice" and case["recompute"] == "selective" and case["offload"] == "activations"
    )


@pytest.mark.slow  # compares as many layouts as it takes for every pair
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_covering_mixtures(ranks: Ranks, chosen: list[Case], world: int) -> None:
    plans = [plan_of(case) for case in chosen if not is_forecast_wrong(case)]
    assert_parity(ranks, [plan for plan in plans if plan.strategy.world_size == world])


@pytest.mark.xfail(strict=True, reason="the forecast of these activations is wrong")
def test_mixtures_that_are_forecast_wrong(ranks: Ranks, chosen: list[Case]) -> None:
    wrong = [plan_of(case) for case in chosen if is_forecast_wrong(case)]
    assert len(wrong) > 1
    for plan in wrong:
        with pytest.raises(AssertionError, match="memory of activations"):
            assert_parity(ranks, [plan])
    pytest.fail("as expected")
