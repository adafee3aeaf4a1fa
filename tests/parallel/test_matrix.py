"""Every legal small layout beside one process: losses, gradients, norms, weights, bytes sent and bytes held.

`covering` tests run a few layouts in which every pair of choices meets; `sample` tests a fixed random part of all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import combinations

import pytest

from meshwright.core.plan import Plan
from meshwright.run.engine import make_mesh
from meshwright.run.parity import NUM_STEPS, find_mismatch
from tests.parallel.cases import (
    FACTORS,
    MAX_RANKS,
    Case,
    all_pairs,
    covering,
    jobs,
    legal_cases,
    num_ranks,
    pairs_of,
    plan_of,
)
from tests.parallel.runs import SHORT_PARITY

SAMPLE_SIZE = 5
PER_JOB = 6
SECONDS_PER_CASE = 60.0
"""Until a case is given up as hanging: a multiple of what it takes on a busy machine."""

Ranks = Callable[..., list[list[str | None]]]


def parity_on_rank(rank: int, world: int, plans: Sequence[str], num_steps: Mapping[str, int]) -> list[str | None]:
    """The first mismatch that this rank sees in each plan, as text."""
    found = []
    for plan in map(Plan.from_toml, plans):
        with closing(make_mesh(plan)) as mesh:
            mismatch = find_mismatch(plan, mesh, num_steps=num_steps)
        found.append(None if mismatch is None else str(mismatch))
    return found


def assert_parity(ranks: Ranks, plans: Sequence[Plan], num_steps: Mapping[str, int] = SHORT_PARITY) -> None:
    """No rank of any plan sees a mismatch."""
    seen = []
    for world, members in jobs(plans, PER_JOB):
        texts = [plan.to_toml() for plan in members]
        by_rank = ranks(parity_on_rank, world, texts, num_steps, timeout_s=SECONDS_PER_CASE * len(texts))
        for plan, found in zip(members, zip(*by_rank, strict=True), strict=True):
            for rank, text in enumerate(found):
                if text is not None:
                    seen.append(f"{plan.model.name} {plan.strategy!r} rank {rank}: {text}")
    assert not seen, "\n".join(seen)


@pytest.fixture(scope="module")
def legal() -> list[Case]:
    return legal_cases()


@pytest.fixture(scope="module")
def chosen(legal: list[Case]) -> list[Case]:
    return covering(legal)


def of_world(cases: Sequence[Case], world: int) -> list[Case]:
    return [case for case in cases if num_ranks(case) == world]


def test_the_matrix_holds_every_degree_that_can_be_legal(legal: list[Case]) -> None:
    seen = {factor: {case[factor] for case in legal} for factor in FACTORS}
    assert seen["dp"] == seen["pp"] == set(range(1, MAX_RANKS + 1))
    assert seen["tp"] == {1, 2, 3, 4, 6, 8}  # no model has 5 or 7 times as many heads
    assert all(seen[factor] == set(FACTORS[factor]) for factor in ("model", "zero", "schedule", "num_micro_batches"))


def test_chosen_layouts_cover_every_pair(legal: list[Case], chosen: list[Case]) -> None:
    assert {pair for case in chosen for pair in pairs_of(case)} == all_pairs(legal)
    assert {pair for case in legal[::997] for pair in pairs_of(case)} == all_pairs(legal[::997])
    assert len(chosen) < len(legal) / 500
    met = {(a, b) for case in chosen for a, b in combinations(case, 2)}
    assert len(met) == len(FACTORS) * (len(FACTORS) - 1) / 2


@pytest.mark.parametrize("world", range(1, MAX_RANKS + 1))
def test_covering_layouts(ranks: Ranks, chosen: list[Case], world: int) -> None:
    assert_parity(ranks, [plan_of(case) for case in of_world(chosen, world)])


def test_single_precision(ranks: Ranks, legal: list[Case]) -> None:
    """With both optimizers."""
    assert_parity(ranks, [plan_of(case, "fp32") for case in random.Random(32).sample(legal, 4)], NUM_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("world", range(1, MAX_RANKS + 1))
def test_sample_of_all_layouts(ranks: Ranks, legal: list[Case], world: int) -> None:
    sample = random.Random(8).sample(legal, SAMPLE_SIZE)
    assert_parity(ranks, [plan_of(case) for case in of_world(sample, world)])
