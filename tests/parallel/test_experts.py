"""Mixtures of experts over ranks, beside one process: losses of routers, gradients, norms, weights, bytes."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from meshwright.core.errors import RuleError
from meshwright.core.plan import Plan
from tests.parallel.layouts import make_plan, mixture
from tests.parallel.runs import dataset, make_engine, run_plan, train
from tests.parallel.test_matrix import assert_parity

Ranks = Callable[..., list[list[str | None]]]


MIXTURES = {
    "mixture": mixture(),
    "batch": mixture({"balance_over": "batch"}),
    "shared": mixture(shared_ffn_size=16, shared_gate=True, dense_layers=None),
    "sigmoid": mixture(
        {"score": "sigmoid", "bias": True, "bias_rate": 0.01, "scale": 2.5, "num_groups": 4, "groups_per_token": 2},
        shared_ffn_size=8, qk_norm=True,
    ),
    "capacity": mixture({"capacity_factor": 0.75, "renormalise": "after_drop"}, gated_mlp=False, activation="gelu"),
    "switch": mixture({"renormalise": "none", "capacity_factor": 1.0}, experts_per_token=1, tied_embeddings=True),
    "choice": mixture({"chooses": "experts", "balance_loss": 0.0}),
}  # fmt: skip

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("mixture", {"num_micro_batches": 2}),
    ("batch", {"num_micro_batches": 3, "schedule": "gpipe"}),
    ("capacity", {"num_micro_batches": 2, "recompute": "full"}),
    ("mixture", {"dp": 2, "num_micro_batches": 2}),
    ("shared", {"tp": 2, "num_micro_batches": 2}),
    ("switch", {"pp": 2, "num_micro_batches": 2}),
    ("choice", {"dp": 2, "zero": 3, "micro_batch_size": 2, "recompute": "full"}),
    ("sigmoid", {"dp": 2, "tp": 2, "zero": 1, "num_micro_batches": 2}),
    ("batch", {"dp": 2, "pp": 2, "schedule": "gpipe", "num_micro_batches": 3}),
    ("capacity", {"dp": 2, "pp": 2, "zero": 2, "num_micro_batches": 2}),
    ("shared", {"pp": 2, "tp": 2, "schedule": "zb-h1", "num_micro_batches": 3}),
    ("sigmoid", {"pp": 4, "schedule": "dualpipe", "num_micro_batches": 8}),
    ("mixture", {"dp": 2, "expert": {"degree": 2}, "num_micro_batches": 2}),
    ("capacity", {"dp": 2, "expert": {"degree": 2}, "zero": 1, "micro_batch_size": 2, "recompute": "full"}),
    ("shared", {"dp": 4, "expert": {"degree": 2}, "zero": 3, "num_micro_batches": 2}),
    ("sigmoid", {"dp": 4, "expert": {"degree": 4}, "zero": 1, "micro_batch_size": 2}),
    ("choice", {"dp": 4, "expert": {"degree": 2}, "zero": 2}),
    ("batch", {"dp": 2, "tp": 2, "expert": {"degree": 2}, "num_micro_batches": 2, "schedule": "gpipe"}),
    ("switch", {"dp": 2, "pp": 2, "expert": {"degree": 2}, "schedule": "zb-h1", "num_micro_batches": 3}),
]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_layout_is_one_process(ranks: Ranks, world: int) -> None:
    plans = [make_plan(MIXTURES[name], **layout) for name, layout in LAYOUTS]
    assert_parity(ranks, [plan for plan in plans if plan.strategy.world_size == world])


def test_a_loss_over_the_batch_needs_all_forwards_first() -> None:
    with pytest.raises(RuleError, match=r"rule `balance`"):
        make_plan(MIXTURES["batch"], num_micro_batches=2)
    assert isinstance(make_plan(MIXTURES["batch"], num_micro_batches=1), Plan)
    assert isinstance(make_plan(MIXTURES["batch"], num_micro_batches=2, schedule="gpipe"), Plan)


def saved_on_rank(rank: int, world: int, plan: str, folder: str) -> None:
    engine = make_engine(plan)
    data = dataset(engine.plan)
    train(engine, data, range(2))
    engine.save(folder, 2)


def loaded_on_rank(rank: int, world: int, plan: str, folder: str) -> tuple[float, float, list[list[float]]]:
    engine = make_engine(plan)
    data = dataset(engine.plan)
    engine.load(folder)
    biases = [bias.tolist() for bias in engine.parallel.router_biases().values()]
    (losses,) = train(engine, data, range(2, 3))
    return *losses, biases


def test_experts_and_biases_are_saved_and_loaded_under_other_layouts(ranks: Ranks, tmp_path: Path) -> None:
    model, found = MIXTURES["sigmoid"], []
    saved = run_plan(model, 4, dp=2, tp=2, zero=1)
    ranks(saved_on_rank, 4, saved.to_toml(), str(tmp_path))
    for layout in ({}, {"dp": 2, "zero": 3}, {"pp": 2}):
        plan = run_plan(model, 4, **layout)
        by_rank = ranks(loaded_on_rank, plan.strategy.world_size, plan.to_toml(), str(tmp_path))
        biases = [bias for *_, held in (by_rank if plan.strategy.pp > 1 else by_rank[:1]) for bias in held]
        found.append((*by_rank[0][:2], biases))
    for loss, norm, biases in found:
        assert loss == pytest.approx(found[0][0], rel=1e-10)
        assert norm == pytest.approx(found[0][1], rel=1e-10)
        assert biases == found[0][2]
    assert any(value != 0 for bias in found[0][2] for value in bias)


def test_all_tokens_to_one_expert(ranks: Ranks) -> None:
    """A router of zeros: the lowest index wins, the others get nothing."""
    for loss, report in ranks(collapsed_on_rank, 2, run_plan(mixture(), 4, dp=2).to_toml()):
        assert isfinite(loss)
        assert report == [4 * 8] * 3


def collapsed_on_rank(rank: int, world: int, plan: str) -> tuple[float, list[int]]:
    engine = make_engine(plan)
    for name, values in engine.parallel.states.parameters.items():
        if name.endswith("router.weight"):
            values.data.zero_()
    (losses,) = train(engine, dataset(engine.plan), range(1))
    report = engine.last_routing
    assert report is not None
    assert report.taken[:, 2:].abs().max() == 0
    assert float(report.imbalance.max()) == 4
    return losses[0], report.taken[:, 0].long().tolist()
