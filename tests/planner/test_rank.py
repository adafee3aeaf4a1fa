"""The plan is the fastest that fits, says what it left out, and is found without simulating everything."""

from __future__ import annotations

import gc
import re
from dataclasses import replace

import pytest

from meshwright.core.collection import uncollected
from meshwright.core.errors import RuleError
from meshwright.core.job import Job
from meshwright.core.plan import Plan
from meshwright.planner.balance import Ends, balance
from meshwright.planner.enumerate import strategies
from meshwright.planner.fix import parse_fix
from meshwright.planner.price import Pricer
from meshwright.planner.rank import Options, degrees, plan, settle
from meshwright.planner.search import searched


@pytest.fixture(scope="module")
def job() -> Job:
    return Job(seq_length=64, global_batch_size=32)


@pytest.fixture(scope="module")
def spec(model):
    return model(hidden_size=512, ffn_size=2048, num_heads=8, num_kv_heads=2, head_dim=64, vocab_size=2048)


@pytest.mark.parametrize(("num_nodes", "per_node"), [(2, 2), (4, 1)])
def test_the_winner_is_what_simulating_everything_finds(spec, cluster, job, num_nodes, per_node):
    machines = cluster(num_nodes, per_node)
    result = plan(spec, machines, job)
    pricer = Pricer(spec, machines, job)
    all_simulated = [pricer.simulate(pricer.forecast(s)) for s in strategies(spec, machines, job, {}).legal]
    best_s = min(f.step_time.total_s for f in all_simulated if f.fits)
    assert result.forecast.step_time.total_s <= best_s * (1 + 1e-9)
    assert result.forecast.simulated
    assert result.forecast == pricer.simulate(pricer.forecast(result.plan.strategy))


def test_the_ranking(spec, cluster, job):
    result = plan(spec, cluster(2, 4), job, options=Options(num_ranked=6))
    seconds = [f.step_time.total_s for f in result.ranked]
    assert seconds == sorted(seconds)
    assert all(f.fits for f in result.ranked)
    assert len({degrees(f.strategy) for f in result.ranked}) == len(result.ranked) == 6
    assert result.ranked[0] == result.forecast
    assert all(f.simulated for f in result.ranked[:3])


def test_the_pareto_front_is_faster_or_smaller_and_nothing_beats_it(spec, cluster, job):
    machines = cluster(1, 4)
    front = [(f.step_time.total_s, f.memory.total_bytes) for f in searched(spec, machines, job, {}).front()]
    assert front == sorted(front)
    assert [m for _, m in front] == sorted({m for _, m in front}, reverse=True)
    pricer = Pricer(spec, machines, job)
    for strategy in strategies(spec, machines, job, {}).legal:
        f = pricer.forecast(strategy)
        point = (f.step_time.total_s, f.memory.total_bytes)
        assert any(t <= point[0] * (1 + 1e-9) and m <= point[1] for t, m in front)


def test_a_strategy_has_one_time_wherever_it_is_shown(spec, cluster, job):
    result = plan(spec, cluster(2, 4), job, {"pp": 4, "schedule": "1f1b"}, Options(num_front=1000))
    ranked = {forecast.strategy.describe(): forecast for forecast in result.ranked}
    both = [forecast for forecast in result.pareto if forecast.strategy.describe() in ranked]
    assert result.forecast in both
    assert all(forecast.step_time == ranked[forecast.strategy.describe()].step_time for forecast in both)
    seconds = [(f.step_time.total_s, f.memory.total_bytes) for f in result.pareto]
    assert seconds == sorted(seconds)


def test_a_timetable_too_long_to_replay_is_taken_at_its_closed_form(model, cluster):
    job = Job(seq_length=8, global_batch_size=10**8)
    found = plan(model(num_layers=8), cluster(1, 4), job, {"pp": 4, "micro_batch_size": 1})
    assert not found.forecast.simulated
    assert found.forecast.strategy.num_micro_batches == 10**8


def test_the_clock_may_overturn_the_order(spec, cluster, job):
    pricer = Pricer(spec, cluster(1, 4), job)
    quick = [pricer.forecast(s) for s in strategies(spec, cluster(1, 4), job, {}).legal[:4]]
    quick = [replace(f, step_time=replace(f.step_time, pipeline_s=1.0 + i)) for i, f in enumerate(quick)]
    clock = iter((9.0, 2.5, 3.5, 7.0))

    def simulate(f):
        return replace(f, simulated=True, step_time=replace(f.step_time, pipeline_s=next(clock)))

    ranked = settle(quick, simulate, 12)
    assert all(f.simulated for f in ranked)
    assert [f.step_time.pipeline_s for f in ranked] == [2.5, 9.0]


def test_an_unsettled_order_is_headed_by_what_the_clock_has_seen(spec, cluster, job):
    pricer = Pricer(spec, cluster(1, 4), job)
    quick = [pricer.forecast(s) for s in strategies(spec, cluster(1, 4), job, {}).legal[:4]]
    quick = [replace(f, step_time=replace(f.step_time, pipeline_s=1.0 + i)) for i, f in enumerate(quick)]
    ranked = settle(
        quick,
        lambda f: replace(f, simulated=True, step_time=replace(f.step_time, pipeline_s=9.0 - f.step_time.pipeline_s)),
        budget=2,
    )
    assert [f.step_time.pipeline_s for f in ranked] == [7.0, 8.0]


def test_what_was_looked_at_and_not_offered_is_accounted_for(llama_70b, cluster):
    result = plan(llama_70b, cluster(4, 8), Job(seq_length=4096, global_batch_size=64))
    by_rule = {r.rule: r for r in result.refused}
    assert {"N4", "memory"} <= set(by_rule)
    assert by_rule["memory"].count > result.num_priced
    assert " per rank of 73.6 GB usable" in by_rule["memory"].example
    assert all(r.example for r in result.refused)


def test_what_is_fixed_stays_fixed(spec, cluster, job):
    fix = parse_fix(["tp=2", "zero=0", "schedule=gpipe", "micro_batch_size=2"])
    chosen = plan(spec, cluster(), job, fix).plan.strategy
    assert {name: getattr(chosen, name) for name in fix} == fix


def test_a_plan_is_a_file_with_its_reason(spec, cluster, job, tmp_path):
    result = plan(spec, cluster(), job)
    result.plan.save(tmp_path / "plan.toml")
    again = Plan.load(tmp_path / "plan.toml")
    assert again == result.plan
    assert again.why == result.plan.why != ""


def test_one_device_is_not_a_special_case(spec, cluster, job):
    result = plan(spec, cluster(1, 1), job)
    assert degrees(result.plan.strategy) == (1, 1, 1)
    assert result.forecast.step_time.bubble_fraction == pytest.approx(0)
    assert result.forecast.traffic.wire_bytes == 0


# --- balance -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "head", "counts"),
    [(8, 4, 0.0, (2, 2, 2, 2)), (5, 2, 2.5, (4, 1)), (4, 4, 9.0, (1, 1, 1, 1)), (126, 16, 1.0, (8, *[8] * 13, 8, 6)),
     (7, 1, 3.0, (7,)), (10, 4, 0.0, (2, 3, 3, 2))],
)  # fmt: skip
def test_stages_balanced_for_the_head(num_layers, num_stages, head, counts):
    found = balance(num_layers, num_stages, Ends(0.0, head))
    assert sum(found) == num_layers
    assert max([*found[:-1], found[-1] + head]) == max([*counts[:-1], counts[-1] + head])


def test_no_split_into_stages_is_faster_than_the_balanced_one():
    def splits(layers: int, stages: int):
        if stages == 1:
            yield (layers,)
            return
        for first in range(1, layers - stages + 2):
            yield from ((first, *rest) for rest in splits(layers - first, stages - 1))

    for layers, stages, head in ((6, 3, 0.4), (9, 4, 1.7), (8, 2, 3.2), (7, 5, 0.9)):
        slowest = min(max([*s[:-1], s[-1] + head]) for s in splits(layers, stages))
        found = balance(layers, stages, Ends(0.0, head))
        assert max([*found[:-1], found[-1] + head]) == slowest


def test_a_heavy_head_gets_fewer_layers(model, cluster):
    spec = model(vocab_size=65536, hidden_size=512, ffn_size=2048, num_layers=16)
    chosen = plan(spec, cluster(1, 2), Job(seq_length=1024, global_batch_size=64), {"pp": 2}).plan.strategy
    counts = [len(layers) for layers in chosen.stage_layers(16)]
    assert sum(counts) == 16
    assert counts[0] > counts[1]


# --- memory --------------------------------------------------------------------------------------------------


def test_nothing_fits_says_what_is_missing_and_what_would_help(llama_70b, cluster):
    job = Job(seq_length=4096, global_batch_size=64)
    with pytest.raises(RuleError) as caught:
        plan(llama_70b, cluster(1, 8), job)
    message = str(caught.value)
    assert caught.value.rule == "memory"
    assert "\n" not in message
    needs, has = map(float, re.search(r"needs ([\d.]+) GB per rank of ([\d.]+) GB usable", message).groups())
    assert needs > has == pytest.approx(73.6)
    more = int(re.search(r"fits on (\d+) devices instead of 8", message).group(1))
    assert plan(llama_70b, cluster(more // 8, 8), job).forecast.fits


def test_a_fixed_field_that_stands_in_the_way_is_named(llama_70b, cluster):
    job = Job(seq_length=4096, global_batch_size=64)
    with pytest.raises(RuleError, match="it fits with zero=1 instead of 0"):
        plan(llama_70b, cluster(8, 8), job, {"zero": 0, "dp": 8, "tp": 4})


def test_fixed_micro_batches_do_not_hide_what_would_help(llama_70b, cluster):
    job = Job(seq_length=4096, global_batch_size=64)
    with pytest.raises(RuleError, match=r"it fits on \d+ devices instead of 8"):
        plan(llama_70b, cluster(1, 8), job, {"num_micro_batches": 16})


# --- how much work planning is -------------------------------------------------------------------------------


def test_planning_for_a_thousand_devices_simulates_little_and_places_each_stage_once(llama_70b, cluster, monkeypatch):
    from meshwright.planner import parts, price

    counts = {"simulate": 0, "step_traffic": 0, "forecast": 0}

    def count(name, target):
        original = getattr(target, name)

        def counted(*args, **kwargs):
            counts[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(target, name, counted)

    count("simulate", price)
    count("step_traffic", parts)
    count("forecast", price.Pricer)
    result = plan(llama_70b, cluster(128, 8), Job(seq_length=8192, global_batch_size=1024))
    assert result.forecast.fits
    assert counts["forecast"] < 300
    assert counts["simulate"] <= 24
    assert counts["step_traffic"] < 300


def test_a_plan_leaves_nothing_that_holds_itself(spec, cluster, job):
    """So that nothing piles up while garbage collection stands still."""
    gc.collect()
    with uncollected():
        result = plan(spec, cluster(2, 2), job)
        assert gc.collect() == 0
    assert result.num_priced
