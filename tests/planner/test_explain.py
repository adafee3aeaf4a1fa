"""The paragraph: its numbers are those of the forecast, and the alternatives that it names are real."""

from __future__ import annotations

import re

import pytest

from meshwright.core.job import Job
from meshwright.core.layouts import Expert
from meshwright.core.strategy import Strategy
from meshwright.core.units import format_bytes, format_time
from meshwright.cost.activations import imbalance_of
from meshwright.planner.price import Pricer
from meshwright.planner.rank import plan


@pytest.fixture(scope="module")
def large(llama_70b, cluster):
    return plan(llama_70b, cluster(16, 8), Job(seq_length=4096, global_batch_size=256))


def test_it_opens_with_the_winner_and_its_numbers(large):
    why, winner = large.plan.why, large.forecast
    assert why.startswith(winner.strategy.describe())
    assert f"{format_time(winner.step_time.total_s)} per step" in why
    assert format_bytes(winner.memory.total_bytes) in why
    assert f"{256 * 4096 / winner.step_time.total_s:,.0f} tokens/s" in why
    assert f"({large.num_priced} strategies priced" in why
    assert "\n" not in why


def test_shares_of_the_step_add_up(large):
    shares = re.search(r"The step is (.*?);", large.plan.why).group(1)
    assert sum(int(share) for share in re.findall(r"(\d+)%", shares)) == pytest.approx(100, abs=4)


def test_it_says_why_data_parallel_alone_is_not_taken(large):
    assert re.search(r"Data parallel alone, D128 T1 P1 zero3 .*? is [\d.]+% slower, mostly for", large.plan.why)


def test_it_says_why_replicas_are_out(llama_70b, cluster):
    why = plan(llama_70b, cluster(16, 8), Job(seq_length=4096, global_batch_size=256), {"tp": 4, "pp": 2}).plan.why
    assert re.search(r"Without ZeRO, nothing fits: the closest, D16 T4 (sp )?P2 .*? needs [\d.]+ GB", why)


def test_it_cites_the_rules_that_hold(large):
    cited = large.plan.why.split("Rules of thumb that hold: ")[1]
    for id, words in large.advice:
        assert f"{id} {words}" in cited
    assert {"N4", "M1", "G3", "G6", "P1"} <= {id for id, _ in large.advice}


def test_a_slower_alternative_is_named_with_its_price(model, cluster):
    spec = model(hidden_size=512, ffn_size=2048, num_heads=8, num_kv_heads=8, head_dim=64)
    result = plan(spec, cluster(1, 4), Job(seq_length=64, global_batch_size=32))
    assert result.plan.strategy.recompute == "none"
    found = re.search(r"With recomputation, (.*?) is ([\d.]+)% slower, mostly for (.*?) \(\+", result.plan.why)
    assert float(found.group(2)) > 0
    assert "recompute" in found.group(1)


def test_the_cause_is_what_the_alternative_adds(model, cluster):
    """A head that makes the last stage the slowest: recomputation of the layers makes another one so."""
    spec = model(num_layers=8, vocab_size=60_000)
    job, machines = Job(seq_length=64, global_batch_size=64), cluster(1, 4)
    pricer = Pricer(spec, machines, job)
    plain = Strategy(dp=1, pp=4, num_micro_batches=64, precision="bf16")
    fastest = pricer.simulate(pricer.forecast(plain))
    causes = {}
    for change in ({"recompute": "full"}, {"dp": 4, "pp": 1, "num_micro_batches": 16}):
        other = pricer.simulate(pricer.forecast(plain.model_copy(update=change)))
        terms = {t.name: t for t in pricer.terms(other)}
        assert sum(t.seconds for t in terms.values()) == pytest.approx(other.step_time.total_s)
        base = pricer.terms(fastest)
        causes[tuple(change)] = {t.name: terms[t.name].seconds - t.seconds for t in base if t.name in terms}
    for added in causes.values():
        assert added["layers"] == pytest.approx(0, abs=1e-9)
        assert added["head"] == pytest.approx(0, abs=1e-9)
    assert causes["recompute",]["recomputation"] > 0


def test_a_refused_alternative_gives_the_rule(model, cluster):
    spec = model(num_heads=1, num_kv_heads=1)
    why = plan(spec, cluster(1, 4), Job(seq_length=32, global_batch_size=16)).plan.why
    assert "With tensor parallel is refused: tp=2 does not divide the heads 1" in why


def test_one_device_has_nothing_to_compare_but_recomputation(model, cluster, job):
    why = plan(model(), cluster(1, 1), job).plan.why
    assert "S1 one device and the model fits" in why
    assert "Data parallel alone" not in why
    assert "N4" not in why


def test_sharded_gradients_beside_a_pipeline_are_called_what_they_cost(llama_70b, cluster):
    """One reduction in each micro-batch instead of one in a step."""
    job = Job(seq_length=4096, global_batch_size=256)
    fixed = {"tp": 4, "pp": 4, "zero": 3, "reduce_each": True, "shard_over": "all"}
    split = plan(llama_70b, cluster(16, 8), job, fixed).plan
    found = re.search(
        r"reduce_each is rarely .*? each of the (\d+) micro-batches, ([\d.]+ .B) .* zero=1 sends ([\d.]+ .B)\.",
        split.why,
    )
    assert int(found.group(1)) == split.strategy.num_micro_batches > 1
    often, once = (float(text.split()[0]) * {"G": 1, "T": 1000}[text.split()[1][0]] for text in found.groups()[1:])
    assert often / once == pytest.approx(split.strategy.num_micro_batches, rel=0.02)
    for other in ({"pp": 1, "zero": 3}, {"pp": 4, "tp": 4, "zero": 3}):
        assert "rarely a good idea" not in plan(llama_70b, cluster(16, 8), job, other).plan.why


def test_delayed_updates_are_said_and_never_offered_unasked(model, cluster):
    """They compute something else; who fixes them is told so."""
    split = {"pp": 2, "dp": 1, "tp": 1}
    job = Job(seq_length=128, global_batch_size=8)
    free = plan(model(num_layers=4), cluster(1, 2), job, split)
    assert not any(f.strategy.pipeline_schedule.is_asynchronous for f in free.ranked)
    asked = plan(model(num_layers=4), cluster(1, 2), job, {**split, "schedule": "pipedream-2bw"})
    assert asked.plan.strategy.zero == 0
    assert "Its updates are delayed (`pipedream-2bw`)" in asked.plan.why
    assert "delayed" not in free.plan.why


def test_an_imbalance_costs_time_and_memory_and_is_said(model, cluster):
    """Of the ranks that share experts the fullest has more rows; where each has all of them, none has."""
    spec = model(num_experts=8, experts_per_token=2, expert_ffn_size=2048)
    fix = {"tp": 1, "pp": 1, "expert": Expert(degree=4), "zero": 1, "recompute": "none"}
    found = {}
    for imbalance in (1.0, 1.5):
        job = Job(seq_length=2048, global_batch_size=64, imbalance=imbalance)
        found[imbalance] = plan(spec, cluster(), job, fix)
    even, uneven = found[1.0], found[1.5]
    assert "imbalance" not in even.plan.why
    assert "times the mean" not in even.plan.why
    pricer = Pricer(spec, cluster(), Job(seq_length=2048, global_batch_size=64))
    same = pricer.forecast(uneven.forecast.strategy)
    assert uneven.forecast.step_time.total_s > 1.02 * same.step_time.total_s
    assert uneven.forecast.memory.activations_bytes > 1.1 * same.memory.activations_bytes
    assert f"with even loads a step takes {format_time(same.step_time.total_s)}" in uneven.plan.why
    sent = [each.traffic.rows["all_to_all", "ep", "backward"] for each in (uneven.forecast, same)]
    assert sent[0].calls == sent[1].calls
    assert sent[0].payload_bytes == 1.5 * sent[1].payload_bytes
    strategy = uneven.forecast.strategy
    for ep, most in ((1, 1), (2, 2), (4, 4), (8, 4)):
        shared = strategy.model_copy(update={"expert": Expert(degree=ep)})
        assert imbalance_of(uneven.plan.job.model_copy(update={"imbalance": 9.0}), shared, spec) == most
    alone = plan(spec, cluster(), uneven.plan.job, {**fix, "expert": Expert()})
    assert "costs nothing" in alone.plan.why
    assert alone.forecast.memory == pricer.forecast(alone.forecast.strategy).memory
