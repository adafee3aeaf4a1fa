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


@pytest.mark.slow  # compares as many layouts as it takes for every pair
@pytest.mark.parametrize("world", [1, 2, 4])
def test_covering_mixtures(ranks: Ranks, chosen: list[Case], world: int) -> None:
    """Of up to 4 ranks, which is where every pair is met with the least work; `test_experts` has layouts of 8."""
    plans = [plan_of(case) for case in chosen]
    assert {plan.strategy.world_size for plan in plans} == {1, 2, 4}
    assert_parity(ranks, [plan for plan in plans if plan.strategy.world_size == world])
