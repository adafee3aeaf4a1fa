"""Another order of the winner's work: named where it is faster, with what it gains and holds; never where it is not."""

from __future__ import annotations

import re

import pytest

from meshwright.core.job import Job
from meshwright.core.strategy import Strategy
from meshwright.core.units import format_bytes
from meshwright.planner.price import Pricer, price
from meshwright.planner.rank import plan
from meshwright.planner.reorder import faster_order, in_order_of

JOB = Job(seq_length=512, global_batch_size=32)


@pytest.fixture
def spec(model):
    return model(num_layers=8, hidden_size=1024, ffn_size=4096, num_heads=8, num_kv_heads=8, head_dim=128)


def test_a_plan_for_accelerators_takes_the_fastest_order(spec, cluster):
    machines, fix = cluster(1, 4), {"pp": 4, "micro_batch_size": 4}
    taken = plan(spec, machines, JOB, fix)
    usual = plan(spec, machines, JOB, {**fix, "schedule": "1f1b"})
    assert taken.plan.strategy.pipeline_schedule.name not in ("1f1b", "gpipe")
    assert taken.forecast.simulated
    assert taken.forecast.step_time.total_s < usual.forecast.step_time.total_s
    assert re.search(r"With 1f1b, .*? is [\d.]+% slower", taken.plan.why)
    assert "Fixing schedule" not in taken.plan.why
    assert any(each is taken.forecast for each in taken.pareto), "no other is as fast: it is on the front"


def test_alternatives_go_in_the_order_of_the_winner(spec, cluster):
    """What recomputation costs is not what another schedule would."""
    machines, fix = cluster(1, 4), {"pp": 4, "micro_batch_size": 4}
    winner, pricer = plan(spec, machines, JOB, fix).plan, Pricer(spec, machines, JOB)
    again = pricer.forecast(winner.strategy.model_copy(update={"schedule": "1f1b", "recompute": "full"}))
    other = in_order_of(winner.strategy, again, pricer)
    assert (other.strategy.schedule, other.strategy.recompute) == (winner.strategy.schedule, "full")
    assert other.step_time.total_s < pricer.simulate(again).step_time.total_s
    assert in_order_of(again.strategy, again, pricer) is again, "1f1b was searched"
    words = re.search(r"With recomputation, (.*?) is", winner.why)
    assert words
    assert winner.strategy.schedule in words[1]


def test_the_plan_names_the_fastest_order_with_its_price(spec, cluster):
    machines = cluster(1, 4, backend="gloo")
    found = plan(spec, machines, JOB, {"pp": 4, "micro_batch_size": 4})
    words = re.search(
        r"Fixing schedule=([\w-]+)(?:, num_chunks=(\d))? makes it ([\d.]+)% faster and holds ([\d.]+ \w+) (more|less)",
        found.plan.why,
    )
    assert words is not None
    name, chunks, gain, held, how = words.groups()
    fix = {"pp": 4, "micro_batch_size": 4, "schedule": name, "num_chunks": int(chunks or 1)}
    again = plan(spec, machines, JOB, fix)
    assert again.plan.strategy.schedule == name
    best = faster_order(found.forecast, Pricer(spec, machines, JOB))
    assert best is not None
    assert best.forecast.step_time == price(spec, machines, JOB, best.forecast.strategy).step_time
    assert float(gain) == pytest.approx(100 * best.gain, abs=0.05)
    assert held == format_bytes(abs(best.more_bytes))
    assert (how == "more") == (best.more_bytes > 0)
    assert again.forecast.step_time.total_s <= best.forecast.step_time.total_s * (1 + 1e-9)


def test_what_does_not_fit_is_not_named(spec, cluster):
    strategy = Strategy(pp=4, micro_batch_size=4, num_micro_batches=8, precision="bf16")
    roomy = price(spec, cluster(1, 4), JOB, strategy)
    tight = cluster(1, 4, memory_bytes=roomy.memory.total_bytes).model_copy(update={"usable_memory_fraction": 1.0})
    assert faster_order(roomy, Pricer(spec, cluster(1, 4), JOB)) is not None
    found = faster_order(roomy, Pricer(spec, tight, JOB))
    assert found is None or found.more_bytes <= 0


def test_there_is_no_order_without_a_pipeline(spec, cluster):
    alone = price(spec, cluster(1, 4), JOB, Strategy(dp=4, num_micro_batches=8, precision="bf16"))
    assert faster_order(alone, Pricer(spec, cluster(1, 4), JOB)) is None


@pytest.mark.parametrize(
    ("fix", "orders"),
    [
        ({"schedule": "interleaved-1f1b"}, {("interleaved-1f1b", 2)}),
        ({"schedule": "bfs", "num_chunks": 1}, {("bfs", 1)}),
        ({"schedule": "zb-v"}, {("zb-v", 1)}),
        ({"num_chunks": 2}, {("bfs", 2), ("interleaved-1f1b", 2)}),
    ],
)
def test_what_is_fixed_decides_the_stages_per_rank(spec, cluster, fix, orders):
    from meshwright.planner.enumerate import strategies

    legal = strategies(spec, cluster(1, 4), JOB, {"pp": 4, **fix}).legal
    assert {(s.schedule, s.num_chunks) for s in legal} == orders
