"""The table of rules: each rule can be broken alone, and the error names it, the numbers and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.core.errors import RuleError
from meshwright.core.job import Job
from meshwright.core.latent import LatentAttention
from meshwright.core.legal import all_degrees, check, divisors, nearest_legal
from meshwright.core.plan import Plan
from meshwright.core.router import RouterSpec
from meshwright.core.rules import RULES, violations
from meshwright.core.sources import Machine, load_cluster, load_model, local_cluster
from meshwright.core.strategy import Strategy


def _case(num_ranks: int, strategy: dict[str, Any], model: dict[str, Any], job: dict[str, int]) -> Any:
    small = {"num_layers": 4, "num_heads": 12, "num_kv_heads": 4, "ffn_size": 48, "vocab_size": 64}
    spec = load_model("llama-3-8b").model_copy(update={**small, **model})
    cluster = local_cluster(num_ranks, Machine(num_cores=2, memory_bytes=2**34))
    if per_node := strategy.get("ranks_per_node"):
        cluster = cluster.model_copy(update={"num_nodes": num_ranks // per_node, "devices_per_node": per_node})
    return Strategy(**strategy), spec, cluster, Job(**{"seq_length": 16, "global_batch_size": 12, **job})


BROKEN = {
    "world": (8, {"dp": 2, "num_micro_batches": 6}, {}, {}, "= 2 ranks.*has 8"),
    "tensor-grid": (
        6,
        {"tp": 6, "micro_batch_size": 2, "num_micro_batches": 6, "tensor": {"kind": "2d"}},
        {},
        {},
        "tp=6 ranks with tensor.kind=2d are not a square; nearest: tp=4",
    ),
    "tensor-batch": (
        8,
        {"tp": 8, "micro_batch_size": 6, "num_micro_batches": 2, "tensor": {"kind": "3d"}},
        {},
        {},
        "micro_batch_size=6 with tensor.kind=3d on tp=8, which cuts it into 4; nearest: micro_batch_size=8",
    ),
    "tensor-sizes": (
        8,
        {"tp": 8, "micro_batch_size": 4, "num_micro_batches": 3, "tensor": {"kind": "3d"}},
        {"ffn_size": 50},
        {},
        "q²=4 of tensor.kind=3d does not divide the feed-forward width 50",
    ),
    "latent": (
        8,
        {"dp": 2, "tp": 4, "micro_batch_size": 2, "num_micro_batches": 3, "tensor": {"kind": "2d"}},
        {
            "num_kv_heads": 12,
            "head_dim": 6,
            "latent": LatentAttention(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4),
        },
        {},
        "has latent attention: tensor.kind=2d",
    ),
    "tensor-alone": (
        8,
        {
            "dp": 2,
            "tp": 4,
            "micro_batch_size": 2,
            "num_micro_batches": 3,
            "tensor": {"kind": "2d"},
            "zero": 3,
            "tile": 2,
        },
        {},
        {},
        "tile=2 with tensor.kind=2d",
    ),
    "tp-heads": (8, {"tp": 8, "num_micro_batches": 12}, {}, {}, "tp=8 does not divide the heads 12"),
    "tp-kv-heads": (6, {"tp": 6, "num_micro_batches": 12}, {}, {}, "tp=6 and 4 key/value heads"),
    "tp-ffn": (4, {"tp": 4, "num_micro_batches": 12}, {"ffn_size": 50}, {}, "tp=4 does not divide.*50"),
    "sequence-tokens": (
        4,
        {"tp": 4, "num_micro_batches": 12, "sequence": "megatron"},
        {},
        {"seq_length": 1022},
        "tp=4 does not divide the tokens of a sequence 1022",
    ),
    "dropout": (
        2,
        {"pp": 2, "num_micro_batches": 12, "schedule": "pipedream"},
        {},
        {"dropout": 0.1},
        "dropout=0.1 with schedule=pipedream",
    ),
    "recompute-choice": (
        2,
        {"dp": 2, "num_micro_batches": 6, "recompute_layers": 2},
        {},
        {},
        "recompute_layers=2 with recompute=none",
    ),
    "experts": (
        4,
        {"tp": 4, "num_micro_batches": 6, "micro_batch_size": 2, "tensor": {"kind": "2d"}},
        {"num_experts": 4, "experts_per_token": 2},
        {},
        "has experts: tensor.kind=2d",
    ),
    "expert-degree": (
        6,
        {"dp": 6, "num_micro_batches": 2, "expert": {"degree": 3}},
        {"num_experts": 4, "experts_per_token": 2},
        {},
        "expert.degree=3 does not divide the experts 4",
    ),
    "balance": (
        1,
        {"num_micro_batches": 12},
        {
            "num_experts": 4,
            "experts_per_token": 2,
            "router": RouterSpec(balance_loss=0.1, balance_over="batch"),
        },
        {},
        "balance_over=batch with schedule=1f1b and num_micro_batches=12",
    ),
    "context-tokens": (
        4,
        {"num_micro_batches": 12, "context": {"degree": 4, "balance": "zigzag"}},
        {},
        {"seq_length": 20},
        r"context.degree=4 × 2 \(zigzag\) does not divide seq_length=20.*nearest legal: .* C4 ring contiguous",
    ),
    "context-tensor": (
        8,
        {"tp": 4, "num_micro_batches": 12, "context": {"degree": 2}, "tensor": {"kind": "2d"}},
        {},
        {},
        "context.degree=2 with tensor.kind=2d",
    ),
    "ulysses-heads": (
        8,
        {"num_micro_batches": 12, "context": {"kind": "ulysses", "degree": 8}},
        {},
        {},
        "context.degree=8 does not divide 12 heads.*nearest legal: .* C8 ring contiguous",
    ),
    "ulysses-kv-heads": (
        6,
        {"num_micro_batches": 12, "context": {"kind": "ulysses", "degree": 6}},
        {},
        {"seq_length": 24},
        "context.degree=6 and 4 key/value heads: neither divides the other",
    ),
    "tp-vocab": (4, {"tp": 4, "num_micro_batches": 12}, {"vocab_size": 3}, {}, "tp=4.*3 rows"),
    "pp-layers": (6, {"pp": 6, "num_micro_batches": 12}, {}, {}, "pp=6.*4 layers"),
    "pp-layer-list": (
        2,
        {"pp": 2, "num_micro_batches": 12, "layers_per_stage": (3, 2)},
        {},
        {},
        r"\[3, 2\] for pp=2 and 4 layers",
    ),
    "pp-chunks": (
        2,
        {"pp": 2, "num_micro_batches": 12, "num_chunks": 2},
        {},
        {},
        "num_chunks=2 with schedule=1f1b, which puts 1 stage on a rank",
    ),
    "pp-timetable": (
        2,
        {"pp": 2, "num_micro_batches": 3, "micro_batch_size": 4, "schedule": "dualpipe"},
        {},
        {},
        "schedule=dualpipe: two directions need an even number of micro-batches, not 3; take 2 or 4",
    ),
    "asynchronous": (
        4,
        {"pp": 2, "dp": 2, "num_micro_batches": 6, "schedule": "pipedream", "zero": 1},
        {},
        {},
        "zero=1 with schedule=pipedream; take zero=0, or schedule=1f1b",
    ),
    "zero-schedule": (
        4,
        {"pp": 2, "dp": 2, "num_micro_batches": 6, "schedule": "zb-h1", "zero": 2, "reduce_each": True},
        {},
        {},
        "zero=2 and reduce_each with schedule=zb-h1, which splits backwards",
    ),
    "batch": (2, {"dp": 2, "num_micro_batches": 5}, {}, {}, "= 10 sequences.*12"),
    "zero-choice": (
        2,
        {"dp": 2, "num_micro_batches": 6, "zero": 2, "keep_gathered": True},
        {},
        {},
        "keep_gathered with zero=2, which needs zero=3",
    ),
    "tile-zero": (2, {"dp": 2, "num_micro_batches": 6, "zero": 2, "tile": 2}, {}, {}, "tile=2 with zero=2"),
    "tile-rows": (
        2,
        {"dp": 2, "num_micro_batches": 6, "zero": 3, "tile": 50},
        {"ffn_size": 48},
        {},
        "tile=50 is more than the 48 rows of `layers.0.mlp.*",
    ),
    "kept-offload": (
        2,
        {"dp": 2, "num_micro_batches": 6, "zero": 3, "keep_gathered": True, "offload": {"parameters": "cpu"}},
        {},
        {},
        "offload.parameters=cpu and keep_gathered",
    ),
    "offload-path": (
        2,
        {"dp": 2, "num_micro_batches": 6, "zero": 1, "offload": {"optimizer": "disk"}},
        {},
        {},
        "offload to disk without a path",
    ),
    "offload-delayed": (
        2,
        {"dp": 2, "num_micro_batches": 6, "zero": 2, "offload": {"gradients": "cpu", "delayed": True}},
        {},
        {},
        "offload.delayed with offload.optimizer=none",
    ),
    "shard-node": (
        4,
        {"dp": 4, "num_micro_batches": 3, "zero": 1, "shard_over": "node", "ranks_per_node": 1},
        {},
        {},
        "shard_over=node with dp=4 and tp=1 on nodes of 1 devices",
    ),
    "positions": (
        1,
        {"num_micro_batches": 12},
        {"positions": "learned", "max_positions": 8},
        {},
        "seq_length=16.*8 learned positions",
    ),
}


def test_every_rule_has_a_case() -> None:
    assert set(BROKEN) == {rule.id for rule in RULES}


@pytest.mark.parametrize("rule", BROKEN)
def test_rule_is_broken_and_named(rule: str) -> None:
    *case, message = BROKEN[rule]
    strategy, spec, cluster, job = _case(*case)
    assert rule in [violation.rule.id for violation in violations(strategy, spec, cluster, job)]
    with pytest.raises(RuleError, match=message) as raised:
        check(strategy, spec, cluster, job)
    text = str(raised.value)
    assert f"rule `{rule}`" in text
    assert "because" in text
    assert "legal" in text
    with pytest.raises(RuleError):
        Plan(model=spec, cluster=cluster, job=job, strategy=strategy)


@pytest.mark.parametrize("rule", [r for r in BROKEN if r not in ("positions",)])
def test_nearest_legal_is_legal(rule: str) -> None:
    *case, _ = BROKEN[rule]
    strategy, spec, cluster, job = _case(*case)
    near = nearest_legal(strategy, spec, cluster, job)
    assert near is not None
    assert violations(near, spec, cluster, job) == []
    assert near.world_size == cluster.num_devices


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"pp": 2, "schedule": "bfs", "num_chunks": 3}, "pp=2 × 3 stages per rank = 6 is more than the 4 layers"),
        ({"pp": 2, "schedule": "zb-v", "layers_per_stage": (2, 2)}, r"\[2, 2\] for pp=2 × 2 stages per rank = 4"),
        ({"pp": 2, "schedule": "dualpipe", "layers_per_stage": (1, 1, 1, 1)}, r"\[1, 1, 1, 1\] for pp=2 and 4 layers"),
        (
            {"pp": 2, "schedule": "dualpipe", "dp": 2, "zero": 2, "reduce_each": True, "num_micro_batches": 6},
            "and reduce_each with schedule=dualpipe, which has two directions",
        ),
        (
            {"pp": 1, "schedule": "zb-v", "dp": 2, "zero": 3, "num_micro_batches": 6},
            "and pp=1 with schedule=zb-v, which splits",
        ),
        ({"pp": 2, "schedule": "pipedream-2bw", "num_micro_batches": 1}, "as many micro-batches per step as ranks, 2"),
        ({"pp": 2, "reduce_each": True, "zero": 1}, "reduce_each with zero=1, which needs zero=2 or more"),
        ({"pp": 1, "reduce_each": True, "zero": 2}, "reduce_each with pp=1, where every micro-batch reduces in any"),
        ({"pp": 2, "zero": 2, "offload": {"gradients": "cpu"}}, "offload.gradients beside a pipeline, pp=2, without"),
        ({"pp": 2, "zero": 3, "offload": {"parameters": "cpu"}}, "offload.parameters=cpu beside a pipeline, pp=2"),
        ({"pp": 2, "zero": 3, "tile": 2}, "tile=2 with zero=3 beside a pipeline, pp=2, without reduce_each"),
        ({"pp": 2, "schedule": "interleaved-1f1b", "num_micro_batches": 5, "num_chunks": 2}, "5 micro-batches on 2"),
    ],
)
def test_rules_of_pipelines_count_parts_and_micro_batches(strategy: dict[str, Any], words: str) -> None:
    split = {"num_micro_batches": 12, **strategy}
    batch = split["num_micro_batches"] * split.get("dp", 1)
    given, spec, cluster, job = _case(split["pp"] * split.get("dp", 1), split, {}, {"global_batch_size": batch})
    with pytest.raises(RuleError, match=words) as raised:
        check(given, spec, cluster, job)
    assert "nearest legal" in str(raised.value)


@pytest.mark.parametrize(
    ("strategy", "model", "words"),
    [
        ({"tp": 6, "tensor": {"kind": "2.5d", "depth": 2}}, {}, "tp=6 ranks with .* are not 2 squares; nearest: tp=8"),
        ({"tp": 3, "tensor": {"kind": "2.5d", "depth": 3}}, {}, "tensor.depth=3 is more than the side 1"),
        ({"tp": 10, "tensor": {"kind": "3d"}}, {}, "tp=10 ranks with tensor.kind=3d are not a cube; nearest: tp=8"),
        ({"tp": 4, "tensor": {"kind": "2d", "depth": 2}}, {}, "tensor.depth=2 with tensor.kind=2d"),
        ({"tp": 4, "tensor": {"kind": "2d"}}, {"num_heads": 5, "num_kv_heads": 5}, "q=2 does not divide the heads 5"),
        ({"tp": 4, "tensor": {"kind": "2d"}}, {"num_kv_heads": 3}, "q=2 and 3 key/value heads: neither divides"),
        ({"tp": 4, "tensor": {"kind": "2d"}}, {"hidden_size": 33}, "q=2 of tensor.kind=2d .* the hidden size 33"),
        ({"tp": 4, "tensor": {"kind": "2d"}, "sequence": "megatron"}, {}, "sequence=megatron with tensor.kind=2d"),
        ({"tp": 4, "tensor": {"kind": "2d"}, "context": {"degree": 2}}, {}, "context.degree=2 with tensor.kind=2d"),
    ],
)
def test_rules_of_grids_name_the_numbers(strategy: dict[str, Any], model: dict[str, Any], words: str) -> None:
    split = {"micro_batch_size": 4, "num_micro_batches": 3, **strategy}
    given, spec, cluster, job = _case(Strategy(**split).world_size, split, model, {})
    with pytest.raises(RuleError, match=words):
        check(given, spec, cluster, job)


def test_when_no_split_is_legal_the_error_says_so() -> None:
    strategy, spec, cluster, job = _case(7, {"dp": 7}, {}, {})
    assert nearest_legal(strategy, spec, cluster, job) is None
    with pytest.raises(RuleError, match="no split of this job over this cluster is legal"):
        check(strategy, spec, cluster, job)


def test_plan_file_round_trip(tmp_path: Any) -> None:
    strategy, spec, cluster, job = _case(4, {"dp": 2, "tp": 2, "num_micro_batches": 6}, {}, {})
    plan = Plan(model=spec, cluster=cluster, job=job, strategy=strategy, why="it fits")
    plan.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == plan


def test_divisors_of_any_number_at_once() -> None:
    for n in (*range(1, 200), 4096, 720_720):
        assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]
    assert len(divisors(963_761_198_400)) == 6720


def test_the_nearest_legal_strategy_is_found_among_many() -> None:
    """A cluster that no rule allows to be split as asked, with thousands of degrees and of micro-batch sizes."""
    cluster = load_cluster("90090x8xh100")
    job = Job(seq_length=128, global_batch_size=720_720)
    wished = Strategy(dp=720_720 // 7, tp=7, num_micro_batches=7)
    near = nearest_legal(wished, load_model("gpt2"), cluster, job)
    assert near is not None
    assert not violations(near, load_model("gpt2"), cluster, job)
    assert near.world_size == 720_720


def test_all_degrees_multiply_out() -> None:
    found = [(d["dp"], d["tp"], d["pp"]) for d in all_degrees(12)]
    assert sorted(found) == [
        (d, t, 12 // d // t) for d in (1, 2, 3, 4, 6, 12) for t in range(1, 13) if 12 // d % t == 0
    ]
