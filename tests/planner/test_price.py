"""Prices: what is remembered equals what is computed afresh, and the fullest rank is the fullest of all."""

from __future__ import annotations

from itertools import product

import pytest

from meshwright.core.axes import coordinates_of
from meshwright.core.job import Job
from meshwright.core.strategy import Strategy
from meshwright.cost.memory import memory
from meshwright.cost.traffic import traffic
from meshwright.planner.enumerate import strategies
from meshwright.planner.parts import first_alike, held_by_rank
from meshwright.planner.price import Pricer, price


def test_stages_of_one_kind():
    assert first_alike(held_by_rank(Strategy(pp=1), 8)) == (0,)
    assert first_alike(held_by_rank(Strategy(pp=4), 8)) == (0, 1, 1, 3)
    assert first_alike(held_by_rank(Strategy(pp=4), 10)) == (0, 1, 1, 3)
    assert first_alike(held_by_rank(Strategy(pp=4, layers_per_stage=(2, 3, 1, 4)), 10)) == (0, 1, 2, 3)
    assert first_alike(held_by_rank(Strategy(pp=5, layers_per_stage=(2, 2, 2, 1, 2)), 9)) == (0, 1, 1, 3, 4)
    assert first_alike(held_by_rank(Strategy(pp=6), 12, dense=(0, 3))) == (0, 1, 2, 2, 2, 5)


@pytest.mark.parametrize("shape", [{}, {"tied_embeddings": True, "vocab_size": 97}, {"num_layers": 7}])
def test_the_fullest_rank_is_the_fullest_of_all_ranks(model, cluster, job, shape):
    spec, machines = model(**shape), cluster(1, 8)
    pricer = Pricer(spec, machines, job)
    for strategy in strategies(spec, machines, job, {}).legal[::17]:
        forecast = pricer.forecast(strategy)
        held = [
            memory(spec, job, strategy, coordinates_of(rank, strategy.sizes)) for rank in range(strategy.world_size)
        ]
        assert forecast.memory.total_bytes == max(h.total_bytes for h in held)
        assert forecast.memory == held[forecast.rank]
        assert forecast.traffic == traffic(spec, job, strategy, coordinates_of(forecast.rank, strategy.sizes))


def test_what_candidates_share_is_priced_as_if_alone(model, cluster, job):
    spec, machines = model(), cluster(2, 4)
    shared = Pricer(spec, machines, job)
    legal = strategies(spec, machines, job, {}).legal
    split = [Strategy(dp=2, pp=4, num_micro_batches=8, layers_per_stage=n) for n in ((1, 3, 3, 1), (2, 1, 1, 4))]
    for strategy in (*legal[::7], *split, *legal[::5]):
        assert shared.forecast(strategy) == Pricer(spec, machines, job).forecast(strategy)


def test_the_clock_and_the_closed_form_agree_where_stages_are_equal(model, cluster):
    """No head worth mentioning, one node: the published bubble (p−1)/(m+p−1)."""
    spec = model(vocab_size=4, hidden_size=512, ffn_size=4096)
    for schedule, m in product(("gpipe", "1f1b"), (4, 16)):
        strategy = Strategy(pp=4, num_micro_batches=m, schedule=schedule, precision="bf16")
        forecast = price(spec, cluster(1, 4), Job(seq_length=64, global_batch_size=m), strategy)
        assert forecast.simulated
        assert forecast.step_time.bubble_fraction == pytest.approx(3 / (m + 3), abs=0.35)
        assert forecast.step_time.bubble_fraction >= 3 / (m + 3)


def test_a_simulated_forecast_keeps_memory_and_traffic(model, cluster, job):
    pricer = Pricer(model(), cluster(2, 4), job)
    quick = pricer.forecast(Strategy(dp=2, tp=2, pp=2, zero=1, num_micro_batches=8, precision="bf16"))
    exact = pricer.simulate(quick)
    assert (exact.memory, exact.traffic, exact.rank) == (quick.memory, quick.traffic, quick.rank)
    assert exact.step_time.total_s >= quick.step_time.total_s * (1 - 1e-9)
    assert pricer.num_simulations == 1


def test_fits_and_its_words(model, cluster, job):
    spec, strategy = model(), Strategy(dp=8, num_micro_batches=2, precision="bf16")
    needs = Pricer(spec, cluster(), job).forecast(strategy).memory.total_bytes
    for spare, fits in ((1, True), (-1, False)):
        machines = cluster(memory_bytes=needs + spare).model_copy(update={"usable_memory_fraction": 1.0})
        forecast = Pricer(spec, machines, job).forecast(strategy)
        assert forecast.fits is fits
        assert forecast.limit.startswith("needs ")
        assert "usable" in forecast.limit
