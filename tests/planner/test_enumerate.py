"""Enumeration: complete, legal, refused with reasons, obedient to what is fixed."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from meshwright.core.errors import InputError, RuleError
from meshwright.core.job import Job
from meshwright.core.layouts import Tensor
from meshwright.core.rules import violations
from meshwright.core.sources import load_cluster
from meshwright.core.strategy import Strategy
from meshwright.planner.enumerate import strategies
from meshwright.planner.fix import check_fix, parse_fix


def brute_force(model, cluster, job, max_tp):
    """Every strategy that the rules allow, found without the enumerator."""
    world, batch = cluster.num_devices, job.global_batch_size
    sizes = range(1, max(world, batch) + 1)
    found = set()
    for dp, tp, pp, b in product(sizes, sizes, sizes, sizes):
        if dp * tp * pp != world or batch % (dp * b) or tp > max_tp:
            continue
        longest = -(-model.num_layers // pp)
        some = {longest * n // 4 for n in (1, 2, 3)} - {0, longest}
        again = [("none", None), ("full", None), ("selective", None), *(("full", layers) for layers in some)]
        orders = [("gpipe", 1), ("1f1b", 1), *(("interleaved-1f1b", v) for v in (2, 3, 4))]
        grids = [Tensor(kind="2d"), Tensor(kind="3d"), *(Tensor(kind="2.5d", depth=d) for d in range(2, tp + 1))]
        kinds = [("none", Tensor()), *([("megatron", Tensor()), *(("none", grid) for grid in grids)] if tp > 1 else [])]
        choices = product(orders, range(4), ("all", "node"), again, kinds)
        for (schedule, chunks), zero, over, (recompute, layers), (sequence, tensor) in choices:
            if (pp == 1 and schedule != "1f1b") or (dp == 1 and zero > 0) or (pp > 1 and zero > 1):
                continue
            if chunks > 1 and (pp * chunks > model.num_layers or (chunks > 2 and model.num_layers % (pp * chunks))):
                continue
            local = cluster.devices_per_node // tp
            if over == "node" and (zero < 2 or not 1 < local < dp or dp % local):
                continue
            strategy = Strategy(
                dp=dp, tp=tp, pp=pp, micro_batch_size=b, num_micro_batches=batch // dp // b, schedule=schedule,
                zero=zero, shard_over=over, recompute=recompute, recompute_layers=layers, num_chunks=chunks,
                sequence=sequence, tensor=tensor, precision="bf16",
            ).on(cluster)  # fmt: skip
            if not violations(strategy, model, cluster, job):
                found.add(strategy)
    return found


@pytest.mark.parametrize(("num_nodes", "per_node"), [(1, 1), (1, 8), (2, 4), (1, 6)])
def test_enumeration_is_what_brute_force_finds(model, cluster, num_nodes, per_node):
    job = Job(seq_length=32, global_batch_size=12)
    spec, machines = model(num_layers=24), cluster(num_nodes, per_node)
    space = strategies(spec, machines, job, {})
    assert len(space.legal) == len(set(space.legal))
    assert set(space.legal) == brute_force(spec, machines, job, max_tp=per_node)


@pytest.mark.parametrize("fix", [{"zero": "³"}, {"dp": "9" * 5000}, {"tile": "x" * 5000}])
def test_a_wrong_value_is_one_short_line(fix):
    with pytest.raises(InputError) as raised:
        check_fix(fix)
    assert len(str(raised.value)) < 250


def test_a_batch_of_many_divisors_is_not_tried_at_each(model, cluster):
    """All sizes up to 8, and at most a factor of two between the larger ones."""
    space = strategies(model(num_layers=24), cluster(), Job(seq_length=32, global_batch_size=720_720), {})
    sizes = sorted({s.micro_batch_size for s in space.legal if s.dp == 8})
    per_rank = 720_720 // 8
    assert sizes[:6] == [1, 2, 3, 5, 6, 7]
    assert len(sizes) < 25
    assert sizes[-1] == per_rank
    assert max(b / a for a, b in pairwise(sizes)) < 4
    assert len(space.legal) < 10_000
    fixed = strategies(
        model(num_layers=24), cluster(), Job(seq_length=32, global_batch_size=720_720), {"micro_batch_size": 55}
    )
    assert {s.micro_batch_size for s in fixed.legal} == {55}


@pytest.mark.parametrize(
    ("name", "job", "words"),
    [
        ("99999999999xh100", {}, "less than or equal to 1000000000"),
        ("1000000x8xh100", {}, "1,000,000 nodes of 8 devices are 8,000,000; at most 1,000,000"),
        ("8xh100", {"global_batch_size": 999_999_999_999}, "global_batch_size"),
        ("8xh100", {"seq_length": 10**100}, "seq_length"),
    ],
)
def test_numbers_too_large_to_enumerate_are_refused(name, job, words):
    with pytest.raises(InputError, match=words):
        Job(**{"seq_length": 8, "global_batch_size": 8, **job}) if job else load_cluster(name)


def test_every_degree_is_either_offered_or_refused(model, cluster, job):
    space = strategies(model(), cluster(2, 8), job, {})
    degrees = {(dp, tp, pp) for dp, tp, pp in product(range(1, 17), repeat=3) if dp * tp * pp == 16}
    offered = {(s.dp, s.tp, s.pp) for s in space.legal if s.tensor.kind == "1d"}
    refused = {(r.strategy.dp, r.strategy.tp, r.strategy.pp) for r in space.refused if r.whole_degree}
    assert offered | refused == degrees
    assert not offered & refused


def test_a_refusal_names_the_rule_and_the_numbers(model, cluster, job):
    space = strategies(model(), cluster(1, 8), job, {})
    reasons = {(r.strategy.tp, r.rule): r.reason for r in space.refused}
    assert "tp=8 does not divide the heads 4" in reasons[8, "tp-heads"]


def test_tensor_parallel_across_nodes_only_when_asked(model, cluster, job):
    spec, machines = model(), cluster(4, 2)
    offered = strategies(spec, machines, job, {})
    assert max(s.tp for s in offered.legal) == 2
    assert any(r.rule == "N4" and "tp=4" in r.reason and "2 devices" in r.reason for r in offered.refused)
    assert {s.tp for s in strategies(spec, machines, job, {"tp": 4}).legal} == {4}


def test_what_only_advice_speaks_against_is_offered_where_nothing_else_agrees(model, cluster, job):
    space = strategies(model(), cluster(4, 2), job, {"dp": 1, "pp": 2})
    assert {(s.dp, s.tp, s.pp) for s in space.legal} == {(1, 4, 2)}


def test_experts_are_shared_by_ranks_of_a_node_or_by_all_of_dp(model, cluster, job):
    """Eight experts, dp=8 on nodes of four: two or four ranks of a node, or all eight; one degree where it is fixed."""
    spec, machines = model(num_experts=8, experts_per_token=2), cluster(2, 4)
    pure = {"tp": 1, "pp": 1}
    assert {s.ep for s in strategies(spec, machines, job, pure).legal} == {1, 2, 4, 8}
    assert {s.ep for s in strategies(spec, machines, job, pure | parse_fix(["expert=degree:2"])).legal} == {2}
    assert {s.ep for s in strategies(spec, cluster(4, 2), job, pure).legal} == {1, 2, 8}
    assert {s.ep for s in strategies(model(), machines, job, pure).legal} == {1}


def test_whole_experts_are_shared_by_whole_tp_groups(model, cluster, job):
    space = strategies(model(num_experts=8, experts_per_token=2), cluster(2, 4), job, {"tp": 2, "pp": 1, "zero": 0})
    assert {(s.ep, s.et) for s in space.legal} == {(1, 2), (2, 2), (4, 2), (2, 1), (4, 1), (8, 1)}


def test_unbalanced_pipelines_only_when_asked(model, cluster, job):
    spec, machines = model(num_layers=5, num_heads=1, num_kv_heads=1), cluster(1, 4)
    assert 4 not in {s.pp for s in strategies(spec, machines, job, {}).legal}
    assert {s.pp for s in strategies(spec, machines, job, {"pp": 4}).legal} == {4}


def test_defaults_of_precision_and_schedule(model, cluster, job):
    assert {s.precision for s in strategies(model(), cluster(), job, {}).legal} == {"bf16"}
    assert {s.precision for s in strategies(model(), cluster(backend="gloo"), job, {}).legal} == {"fp32"}
    assert {s.precision for s in strategies(model(), cluster(), job, {"precision": "fp32"}).legal} == {"fp32"}
    assert "naive" not in {s.schedule for s in strategies(model(), cluster(), job, {}).legal}
    assert {s.schedule for s in strategies(model(), cluster(), job, {"schedule": "naive"}).legal} == {"naive"}


@pytest.mark.parametrize(
    "text",
    ["dp=2", "tp=4", "pp=2", "zero=1", "schedule=gpipe", "micro_batch_size=2", "num_micro_batches=4", "recompute=full",
     "precision=bf16-16", "bucket_bytes=1000", "layers_per_stage=3,5"],
)  # fmt: skip
def test_every_field_can_be_fixed_from_text(model, cluster, job, text):
    fix = parse_fix([text, *(["pp=2"] if text.startswith("layers") else [])])
    space = strategies(model(), cluster(), job, fix)
    assert space.legal
    for name, value in fix.items():
        assert {getattr(s, name) for s in space.legal} == {value}


def test_all_of_a_strategy_can_be_fixed(model, cluster, job):
    whole = Strategy(dp=2, tp=2, pp=2, zero=1, schedule="gpipe", micro_batch_size=2, num_micro_batches=4,
                     recompute="full", precision="fp32", layers_per_stage=(3, 5))  # fmt: skip
    assert strategies(model(), cluster(), job, check_fix(whole.model_dump())).legal == (whole,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dp", "FIELD=VALUE"), ("dp=", "FIELD=VALUE"), ("dp=two", "integer"), ("dp=0", "greater than 0"),
        ("zero=4", "0, 1, 2 or 3"), ("shcedule=1f1b", "did you mean `schedule`"),
        ("recompute=some", "'none', 'full' or 'selective'"),
        ("layers_per_stage=3,x", "integer"), ("precision=int4", "fp32"),
    ],
)  # fmt: skip
def test_a_bad_fix_is_one_clear_line(text, words):
    with pytest.raises(InputError) as caught:
        parse_fix([text])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_may_be_left_empty_is_fixed_to_nothing():
    assert parse_fix(["layers_per_stage=none", "recompute_layers=none"]) == {
        "layers_per_stage": None,
        "recompute_layers": None,
    }
    assert parse_fix(["expert=tensor:none,degree:2"])["expert"].tensor is None


def test_a_field_is_fixed_once():
    with pytest.raises(InputError, match="--fix dp=4: `dp` is already 2"):
        parse_fix(["dp=2", "dp=4"])


@pytest.mark.parametrize(
    ("fix", "rule", "words"),
    [
        ({"tp": 8}, "tp-heads", "tp=8 does not divide the heads 4"),
        ({"dp": 3}, "world", "cluster `1x8xround` has 8"),
        ({"dp": 2, "tp": 8}, "world", "dp=2 × tp=8"),
        ({"micro_batch_size": 3}, "batch", "micro_batch_size=3"),
        (parse_fix(["tensor=kind:2d", "tp=2"]), "tensor-grid", "nothing legal with tensor=kind:2d, tp=2: tp=2 ranks"),
        ({"pp": 2, "layers_per_stage": (3, 3)}, "pp-layer-list", "[3, 3]"),
    ],
)
def test_a_fix_that_nothing_satisfies_says_why_and_what_is_near(model, cluster, job, fix, rule, words):
    with pytest.raises(RuleError) as caught:
        strategies(model(), cluster(), job, fix)
    message = str(caught.value)
    assert caught.value.rule == rule
    assert words in message
    assert "nearest legal" in message or rule == "pp-layer-list"
    assert "\n" not in message


@pytest.mark.parametrize("text", ["keep_gathered=true", "prefetch=2", "tile=2"])
def test_what_needs_gathered_parameters_is_looked_for_there(model, cluster, job, text):
    found = strategies(model(), cluster(1, 4), job, parse_fix([text])).legal
    assert found
    assert {strategy.zero for strategy in found} == {3}
    with pytest.raises(RuleError, match="zero"):
        strategies(model(), cluster(1, 4), job, parse_fix([text, "zero=1"]))


def test_cpu_ranks_gather_two_blocks_ahead(model, cluster, job):
    def ahead(*fix: str, size: int = 4, backend: str = "gloo") -> set[int]:
        found = strategies(model(), cluster(1, size, backend=backend), job, parse_fix(["zero=3", "tp=1", "pp=1", *fix]))
        return {strategy.prefetch for strategy in found.legal}

    assert ahead() == {2}
    assert ahead("keep_gathered=true") == {2}
    for others in (ahead(size=2), ahead(backend="nccl"), ahead("prefetch=1"), ahead("tile=2")):
        assert others == {1}


def test_what_a_plan_takes_from_its_cluster_cannot_be_fixed():
    with pytest.raises(InputError, match=r"a plan takes it from its cluster; name one .* 2x4xh100"):
        parse_fix(["ranks_per_node=2"])


@pytest.mark.parametrize("text", ["num_chunks=1", "num_chunks=3"])
def test_stages_per_rank_are_not_fixed_beside_a_schedule_that_has_its_own(model, cluster, job, text):
    with pytest.raises(RuleError, match="schedule `zb-v` puts 2 stages on a rank, always; leave num_chunks out"):
        parse_fix(["schedule=zb-v", text])
    one_each = strategies(model(), cluster(1, 4), job, parse_fix(["num_chunks=1", "pp=2"])).legal
    assert {strategy.stages_per_rank for strategy in one_each} == {1}


def test_a_cluster_that_no_split_can_use(model, cluster):
    with pytest.raises(RuleError, match="batch"):
        strategies(
            model(num_layers=1, num_heads=1, num_kv_heads=1), cluster(1, 8), Job(seq_length=8, global_batch_size=3), {}
        )
