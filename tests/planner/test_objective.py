"""Objectives, constraints, and forecasts of devices that nobody has measured."""

from __future__ import annotations

import re

import pytest

from meshwright.cli.main import main
from meshwright.core.errors import InputError, RuleError
from meshwright.core.job import Job
from meshwright.core.sources import load_cluster
from meshwright.planner import objective
from meshwright.planner.enumerate import strategies
from meshwright.planner.interval import UNCALIBRATED, interval_s
from meshwright.planner.must import kept, limited, parse_must
from meshwright.planner.objective import CONTEXT_STEP, Price, Wanted, best, parts
from meshwright.planner.price import Pricer, price
from meshwright.planner.rank import Options, plan
from tests.planner.conftest import make_cluster
from tests.shapes import make_model

JOB = Job(seq_length=1024, global_batch_size=4)


def small(**changes):
    sizes = {"num_layers": 8, "hidden_size": 1024, "num_heads": 8, "num_kv_heads": 8, "head_dim": 128}
    return make_model(**{**sizes, "ffn_size": 4096, "vocab_size": 8192, "max_positions": 4096, **changes})


def wanted(model=None, memory_bytes=80 * 10**9, job=JOB, devices=4, **options) -> Wanted:
    return Wanted(model or small(), make_cluster(1, devices, memory_bytes), job, {}, Options(num_ranked=2, **options))


def fits(asked: Wanted) -> bool:
    """By trying every legal strategy."""
    pricer = Pricer(asked.model, asked.cluster, asked.job)
    try:
        return any(pricer.forecast(s).fits for s in strategies(asked.model, asked.cluster, asked.job, {}).legal)
    except RuleError:
        return False


def test_the_winner_is_what_brute_force_finds():
    """Every legal strategy timed by the clock: none is faster than the plan's."""
    asked = wanted(memory_bytes=3 * 10**9)
    result = plan(asked.model, asked.cluster, asked.job)
    timed = (
        price(asked.model, asked.cluster, asked.job, s) for s in strategies(asked.model, asked.cluster, JOB, {}).legal
    )
    fastest = min((f for f in timed if f.fits), key=lambda f: f.step_time.total_s)
    assert result.forecast.step_time.total_s <= fastest.step_time.total_s * (1 + 1e-9)


def test_fewest_devices_are_the_smallest_part_that_fits():
    asked = wanted(memory_bytes=10**9)
    found = best(asked, "fewest-gpus")
    devices = found.result.plan.cluster.num_devices
    assert 1 < devices <= 4
    fitting = [
        part.num_devices
        for part in parts(asked.cluster)
        if fits(Wanted(asked.model, part, asked.job, {}, asked.options))
    ]
    assert devices == min(fitting)
    assert "are enough" in found.words


def test_cheapest_costs_no_more_than_any_part():
    asked, cost = wanted(), Price(num_tokens=1e9, per_device_hour=2.0)
    found = best(asked, "cheapest", cost)
    on_parts = [plan(asked.model, part, asked.job, {}, asked.options) for part in parts(asked.cluster)]
    assert cost.of(found.result) == pytest.approx(min(map(cost.of, on_parts)))
    seconds, devices = found.result.forecast.step_time.total_s, found.result.plan.cluster.num_devices
    assert cost.of(found.result) == pytest.approx(1e9 / JOB.tokens_per_step * seconds / 3600 * devices * 2.0)
    with pytest.raises(InputError, match="--tokens"):
        best(asked, "cheapest")


def test_the_longest_context_fits_and_the_next_does_not():
    asked = wanted(memory_bytes=17 * 10**8, devices=2, job=Job(seq_length=1024, global_batch_size=2))
    found = best(asked, "longest-context")
    length = found.result.plan.job.seq_length
    longer = asked.job.model_copy(update={"seq_length": length + CONTEXT_STEP})
    model = asked.model.model_copy(update={"max_positions": 10**6})
    assert found.result.forecast.fits
    assert not fits(Wanted(model, asked.cluster, longer, {}, asked.options))
    learned = best(wanted(small(positions="learned"), devices=1), "longest-context")
    assert learned.result.plan.job.seq_length == 4096, "no more than there are positions"


def test_sizes_that_are_tried_are_not_planned_for(monkeypatch):
    planned = []
    monkeypatch.setattr(objective, "plan", lambda *asked: planned.append(asked) or plan(*asked))
    assert best(wanted(memory_bytes=6 * 10**8, devices=2), "largest-model").result.plan.model.num_layers > 1
    assert len(planned) == 1


def test_the_largest_model_fits_and_one_more_layer_does_not():
    asked = wanted(memory_bytes=6 * 10**8, devices=2)
    found = best(asked, "largest-model")
    layers = found.result.plan.model.num_layers
    more = asked.model.model_copy(update={"num_layers": layers + 1})
    assert not fits(Wanted(more, asked.cluster, asked.job, {}, asked.options))


def test_what_fits_nowhere_is_refused_with_the_numbers():
    with pytest.raises(RuleError, match="does not fit"):
        best(wanted(memory_bytes=10**6, devices=1), "fewest-gpus")
    with pytest.raises(InputError, match="fastest, fewest-gpus"):
        best(wanted(), "prettiest")


@pytest.mark.parametrize(
    ("musts", "holds"),
    [
        (["tp<=2"], lambda s: s.tp <= 2),
        (["pp>1", "zero=1"], lambda s: s.pp > 1 and s.zero == 1),
        (["tp != 1"], lambda s: s.tp != 1),
    ],
)
def test_every_strategy_that_is_left_keeps_what_it_must(musts, holds):
    asked = wanted()
    legal = strategies(asked.model, asked.cluster, asked.job, {}).legal
    left = kept(parse_must(musts), legal)
    assert set(left) == {s for s in legal if holds(s)}
    result = plan(asked.model, asked.cluster, asked.job, {}, Options(must=parse_must(musts)))
    assert holds(result.forecast.strategy)


def test_constraints_that_leave_nothing_say_what_would():
    asked = wanted()
    with pytest.raises(RuleError, match=r"none of .* has tp>=16; tp can be 1, 2, 4 here; tp=4 comes closest"):
        plan(asked.model, asked.cluster, asked.job, {}, Options(must=parse_must(["tp>=16"])))
    with pytest.raises(RuleError, match=r"none of .* with tp=2 has tp>2; tp can be 2 here"):
        plan(asked.model, asked.cluster, asked.job, {"tp": 2}, Options(must=parse_must(["tp>2"])))
    with pytest.raises(RuleError, match="not together"):
        plan(asked.model, asked.cluster, asked.job, {}, Options(must=parse_must(["tp>2", "dp>2", "pp>2"])))
    with pytest.raises(RuleError, match=r"keeps all of it; pp can be 1, 2 with tp>1; pp=2 comes closest"):
        plan(asked.model, asked.cluster, asked.job, {}, Options(must=parse_must(["tp>1", "pp>2"])))
    for text, words in (
        ("tp", "write FIELD"),
        ("colour=3", "cannot be compared"),
        ("tpp>4", "did you mean `tp`"),
        ("tp<=two", "write FIELD"),
    ):
        with pytest.raises(InputError, match=words):
            parse_must([text])


@pytest.mark.parametrize(
    ("musts", "words"),
    [
        (["tp>4", "dp>1", "tp<2"], "tp>4 and tp<2: they contradict each other"),
        (["pp<1"], "pp is 1 or more"),
        (["tp>=2", "tp<=3", "tp!=2", "tp!=3"], "tp>=2 and tp<=3 and tp!=2 and tp!=3"),
        (["zero<1", "tp>2", "tp<4", "pp!=1"], None),
    ],
)
def test_constraints_that_no_number_keeps_contradict_each_other(musts, words):
    if words is None:
        assert len(parse_must(musts)) == len(musts)
        return
    with pytest.raises(InputError, match=re.escape(words)):
        parse_must(musts)


def test_a_limit_that_is_too_low_is_answered_with_one_that_is_not():
    asked = wanted()
    low = limited(asked.cluster, "1MB")
    with pytest.raises(RuleError) as refused:
        plan(asked.model, low, asked.job)
    found = re.search(r"it fits with a memory limit of ([\d.]+GB)", str(refused.value))
    assert plan(asked.model, limited(asked.cluster, found[1]), asked.job).forecast.fits


def test_a_memory_limit_is_what_a_rank_may_fill():
    cluster = make_cluster(1, 8, 80 * 10**9)
    assert limited(cluster, "60GB").usable_memory_bytes == pytest.approx(60e9, abs=1)
    assert limited(cluster, "75%").usable_memory_bytes == pytest.approx(60e9, abs=1)
    assert limited(cluster, "1GiB").usable_memory_bytes == pytest.approx(2**30, abs=1)
    for text in ("60", "0GB", "90GB", "120%", "much"):
        with pytest.raises(InputError, match="--memory-limit"):
            limited(cluster, text)


def test_a_forecast_is_an_interval_where_nobody_has_measured_the_device():
    assert interval_s(2.0, load_cluster("8xa100")) == (2.0, 2.0)
    least, most = interval_s(2.0, load_cluster("8xl40s"))
    assert (least, most) == (2.0 * UNCALIBRATED[0], 2.0 * UNCALIBRATED[1])
    asked = wanted()
    assert "was never calibrated" in plan(asked.model, asked.cluster, asked.job).plan.why
    why = plan(asked.model, load_cluster("4xh100"), asked.job).plan.why
    assert "calibrated" not in why
    assert "the largest loss is" in why
    assert "the largest loss is products" not in why, "products are the work itself"


def test_the_command_takes_all_of_it(capsys):
    words = ["plan", "gpt2", "1x8xh100", "--seq", "1024", "--batch", "64", "--top", "2"]
    assert (
        main([*words, "--objective", "fewest-gpus", "--must", "tp<=2", "--memory-limit", "60GB", "--explain-rules"])
        == 0
    )
    shown = capsys.readouterr().out
    assert "fewest-gpus: 1 device of 8" in shown
    assert "yes S1: one device and the model fits" in shown
    assert "no  M2:" in shown
    assert "Time against memory" in shown
    with pytest.raises(InputError, match="belong together"):
        main([*words, "--objective", "cheapest", "--tokens", "1e9"])
