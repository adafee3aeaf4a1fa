"""A dry run counts what the forecast says and what real ranks measure, whatever the layout and the cluster."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from meshwright.core.axes import DP, TP, WORLD, coordinates_of
from meshwright.core.errors import RuleError, UnsupportedError
from meshwright.core.job import Job
from meshwright.core.measures import Traffic
from meshwright.core.plan import Plan
from meshwright.core.record import RankRecord
from meshwright.core.rules import violations
from meshwright.core.sources import load_cluster, load_model
from meshwright.core.strategy import Strategy
from meshwright.cost.memory import memory
from meshwright.rehearse.roles import Role, roles
from meshwright.rehearse.trace import ACTIONS, MESSAGES, trace
from meshwright.rehearse.verify import rehearsed_differences
from meshwright.run.dryrun import Rehearsal, dry_run
from meshwright.schedule.build import build_program
from tests.parallel.cases import FACTORS, MAX_RANKS, MODELS, num_ranks, plan_of, strategy_of
from tests.parallel.layouts import gpt2, llama, make_job, make_plan, mixture, qwen3
from tests.parallel.runs import dataset, make_engine, own_batches, run_plan

SAMPLE_SIZE = 16
PEAK_TOLERANCE = 0.05


def assert_as_forecast(plan: Plan) -> tuple[Rehearsal, ...]:
    rehearsed = dry_run(plan)
    assert not rehearsed_differences(plan, [r.record for r in rehearsed]), plan.strategy
    for r in rehearsed:
        total = memory(plan.model, plan.job, plan.strategy, r.role.coordinates).total_bytes
        assert r.record.memory.total_bytes == pytest.approx(total, rel=PEAK_TOLERANCE)
    return rehearsed


def legal_sample(seed: int, size: int) -> list[Plan]:
    """Plans of random choices from the factors of `tests.parallel.cases`, those that no rule forbids."""
    choose, found = random.Random(seed), list[Plan]()
    while len(found) < size:
        case = {factor: choose.choice(values) for factor, values in FACTORS.items()}
        if num_ranks(case) <= MAX_RANKS and not violations(
            split := strategy_of(case), MODELS[case["model"]], *make_job(split)
        ):
            with contextlib.suppress(RuleError, ValueError):
                found.append(plan_of(case))
    return found


def test_a_sample_of_legal_layouts_is_as_forecast() -> None:
    sample = legal_sample(12, SAMPLE_SIZE)
    for plan in sample:
        assert_as_forecast(plan)
    assert len({plan.strategy.schedule for plan in sample}) > 3
    assert {plan.strategy.zero for plan in sample} == {0, 1, 2, 3}
    assert max(plan.strategy.pp for plan in sample) > 2


@pytest.mark.parametrize(
    "strategy",
    [
        {"dp": 2, "zero": 1, "precision": "bf16", "offload": {"optimizer": "cpu"}},
        {
            "dp": 3,
            "zero": 3,
            "offload": dict.fromkeys(("optimizer", "parameters", "gradients"), "disk") | {"path": "/no"},
        },
        {"dp": 2, "zero": 2, "offload": {"optimizer": "cpu", "delayed": True, "group_numel": 512}},
        {"pp": 2, "dp": 2, "schedule": "pipedream-2bw", "num_micro_batches": 4},
        {"pp": 3, "schedule": "pipedream", "num_micro_batches": 3, "offload": {"activations": "cpu"}},
        {"pp": 2, "dp": 2, "zero": 1, "offload": {"activations": "cpu", "optimizer": "cpu"}, "num_micro_batches": 3},
        {"tp": 2, "dp": 2, "precision": "fp16", "zero": 3, "tile": 2},
        {"dp": 2, "precision": "bf16-sr", "recompute": "full"},
        {"context": {"degree": 2, "kind": "ring", "balance": "zigzag"}, "zero": 1, "recompute": "selective"},
        {"context": {"degree": 2, "kind": "ulysses"}, "tp": 2, "sequence": "megatron", "precision": "bf16"},
    ],
    ids=lambda strategy: " ".join(map(str, strategy)),
)
def test_offload_precisions_and_tables_without_an_end_too(strategy: dict[str, Any]) -> None:
    assert_as_forecast(make_plan(llama(num_layers=4), **strategy))


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        (mixture({"noise": "gaussian"}), {"tp": 2, "precision": "bf16"}),
        (mixture({"noise": "jitter"}, shared_ffn_size=8), {"precision": "bf16"}),
        (mixture({"capacity_factor": 0.5}), {"num_micro_batches": 2}),
        (mixture({"chooses": "experts", "balance_loss": 0.0}), {"pp": 2, "schedule": "zb-h1", "num_micro_batches": 4}),
        (mixture(num_experts=6), {"dp": 2, "expert": {"degree": 2}}),
        (mixture(num_experts=6, experts_per_token=1), {"dp": 3, "expert": {"degree": 3}}),
        (mixture(), {"dp": 2, "zero": 3, "tile": 2}),
        (mixture({"capacity_factor": 0.5}), {"tp": 2, "dp": 2, "expert": {"degree": 4, "tensor": 1}}),
        (
            mixture(),
            {"dp": 2, "context": {"degree": 2}, "expert": {"tensor": 4}, "offload": {"optimizer": "cpu"}, "zero": 1},
        ),
        (mixture(), {"tp": 4, "sequence": "megatron", "expert": {"degree": 2, "tensor": 2}, "recompute": "full"}),
        (
            mixture({"capacity_factor": 0.0}, dense_layers=None, num_layers=2),
            {"tp": 2, "pp": 2, "schedule": "zb-h1", "num_micro_batches": 4, "precision": "bf16"},
        ),
    ],
    ids=[
        "gaussian",
        "jitter",
        "half full",
        "experts choose",
        "odd experts",
        "odd rows",
        "tiles",
        "whole experts",
        "cut over dp and cp",
        "half cut",
        "no room",
    ],
)
def test_what_a_rehearsal_cannot_see_is_as_even_or_full_as_in_the_forecast(model: Any, strategy: Any) -> None:
    assert_as_forecast(make_plan(model, **strategy))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("side", "layout", "vocab", "widest"),
    [
        # [tokens, in] and [out, in] of a rank's blocks in the product where they are most together: down; of a large
        # vocabulary [rows, hidden] and [tokens, rows] of the head; where tokens are few, gate and up
        (2, {"kind": "2d"}, 29, 18 * (48 + 12)),
        (2, {"kind": "2d"}, 101, 51 * (48 + 12)),
        (3, {"kind": "2d"}, 29, 12 * (32 + 8)),
        (2, {"kind": "2.5d", "depth": 2}, 29, 12 * (24 + 36)),
    ],
    ids=["2d", "2d, large head", "2d of nine", "2.5d"],
)
def test_panels_of_a_square_are_counted_once(
    side: int, layout: dict[str, Any], vocab: int, widest: int, recompute: str
) -> None:
    """Of both operands of the widest product one block of another rank, or two where there are as many."""
    tp = side**2 * layout.get("depth", 1)
    model = llama(hidden_size=24, num_heads=6, num_kv_heads=6, ffn_size=36, num_layers=2, vocab_size=vocab)
    plan = make_plan(model, tp=tp, tensor=layout, micro_batch_size=12, num_micro_batches=2, recompute=recompute)
    for rehearsed in assert_as_forecast(plan):
        assert rehearsed.record.memory.working_bytes == 8 * min(2, side - 1) * widest


def measured_on_rank(rank: int, world: int, text: str) -> RankRecord:
    """What a real rank counts in its first step."""
    engine = make_engine(text)
    with engine.parallel.census() as census:
        engine.step(own_batches(engine, dataset(engine.plan), 0), 0.0)
    return RankRecord(rank, engine.mesh.coordinates, engine.memory(census.peak_bytes), engine.last_traffic)


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        (qwen3(num_layers=3), {"tp": 2, "dp": 2, "zero": 3}),
        (gpt2(num_layers=2), {"pp": 2, "tp": 2, "recompute": "full", "precision": "fp32"}),
        (llama(num_layers=4), {"pp": 2, "schedule": "zb-v", "precision": "bf16"}),
        (llama(num_layers=2), {"tp": 4, "tensor": {"kind": "2d"}, "micro_batch_size": 2}),
    ],
    ids=["tp zero3", "pp tp recompute", "zb-v bf16", "square"],
)
def test_real_ranks_measure_the_same(ranks: Callable[..., list[RankRecord]], model: Any, strategy: Any) -> None:
    plan = run_plan(model, **strategy)
    rehearsed = {r.role.rank: r.record for r in dry_run(plan)}
    for record in ranks(measured_on_rank, plan.strategy.world_size, plan.to_toml(), timeout_s=120):
        like_it = [other for other in rehearsed.values() if is_same(record, other)]
        assert like_it, f"rank {record.rank}: {record.memory} in no role"
        assert rehearsed.get(record.rank) is None or is_same(record, rehearsed[record.rank])


def is_same(record: RankRecord, other: RankRecord) -> bool:
    return (record.memory, record.traffic.rows) == (other.memory, other.traffic.rows)


def test_a_wrong_byte_would_be_seen() -> None:
    plan = make_plan(llama(), dp=2)
    (rehearsed,) = dry_run(plan)
    held, sent = rehearsed.record.memory, rehearsed.record.traffic
    more = replace(held, parameters_bytes=held.parameters_bytes + 1)
    extra = Traffic(dict(sent.rows))
    extra.add("broadcast", WORLD, "other", 8, 2)
    for wrong in (replace(rehearsed.record, memory=more), replace(rehearsed.record, traffic=extra)):
        assert len(rehearsed_differences(plan, [wrong])) == 1
    kept = round(held.activations_bytes * 1.04)
    assert rehearsed_differences(plan, [replace(rehearsed.record, memory=replace(held, activations_bytes=kept))])


def test_a_plan_for_gpus_is_rehearsed_without_one() -> None:
    split = Strategy(dp=4, tp=2, pp=2, zero=1, precision="bf16", num_micro_batches=4)
    job = Job(seq_length=4096, global_batch_size=16)
    plan = Plan(model=load_model("llama-3-8b"), cluster=load_cluster("2x8xh100"), job=job, strategy=split)
    rehearsed = assert_as_forecast(plan)
    assert [r.role.num_ranks for r in rehearsed] == [8, 8]
    assert sum(r.record.memory.total_bytes for r in rehearsed) > 50e9  # far more than this process takes


@pytest.mark.parametrize(
    ("model", "strategy", "num_roles"),
    [
        (gpt2(vocab_size=97), {"tp": 2, "pp": 2, "dp": 2}, 4),  # the last tensor rank has fewer rows of the vocabulary
        (gpt2(vocab_size=96), {"tp": 2, "pp": 2, "dp": 2}, 2),
        (llama(), {"dp": 2, "context": {"degree": 4, "kind": "ring"}}, 1),
        (mixture(), {"dp": 4, "pp": 2, "zero": 1, "expert": {"degree": 2}}, 2),
        (mixture(vocab_size=30), {"dp": 2, "tp": 2, "zero": 1, "expert": {"degree": 2, "tensor": 1}}, 1),
    ],
    ids=["uneven vocabulary", "even", "ring", "experts over ranks", "whole experts"],
)
def test_every_rank_is_like_its_role(model: Any, strategy: dict[str, Any], num_roles: int) -> None:
    """Rehearse all ranks, one by one: as many of each kind are found as the roles say."""
    plan = make_plan(model, **strategy)
    found = roles(plan)
    assert len(found) == num_roles
    assert sum(role.num_ranks for role in found) == plan.strategy.world_size
    ranks = range(plan.strategy.world_size)
    everyone = [Role(rank, coordinates_of(rank, plan.strategy.sizes), 1) for rank in ranks]
    assert counts(dry_run(plan, only=everyone)) == counts(dry_run(plan))


def counts(rehearsed: Iterable[Rehearsal]) -> Counter[Any]:
    """What is held and sent → number of ranks."""
    found: Counter[Any] = Counter()
    for r in rehearsed:
        rows = r.record.traffic.rows
        found[r.record.memory, tuple(sorted((*name, rows[name].wire_bytes) for name in rows))] += r.role.num_ranks
    return found


def test_entries_are_the_program_and_their_calls_the_ledger() -> None:
    plan = make_plan(llama(num_layers=4), dp=2, tp=2, pp=2, num_micro_batches=3)
    for r in dry_run(plan):
        row = build_program(plan.strategy).rows[r.role.coordinates["pp"]]
        assert tuple(entry.action for entry in r.entries if entry.action is not None) == row
        counted = Traffic()
        for entry in r.entries:
            for call in entry.calls:
                counted.add(call.primitive, call.axis, call.phase, call.payload_bytes, call.size)
        assert counted.rows == r.record.traffic.rows
        assert max(entry.kept_bytes for entry in r.entries) <= r.record.memory.activations_bytes
        assert r.entries[-1].kept_bytes == 0


def test_the_trace_shows_every_action_and_call() -> None:
    plan = make_plan(llama(num_layers=4), dp=2, pp=2, num_micro_batches=3)
    rehearsed = dry_run(plan)
    events = trace(plan, ((r.role, r.entries) for r in rehearsed))["traceEvents"]
    for r in rehearsed:
        own = [event for event in events if event["pid"] == r.role.rank and event["ph"] == "X"]
        actions = [event["name"] for event in own if event["tid"] == ACTIONS]
        assert actions == [str(entry.action) for entry in r.entries if entry.action is not None]
        assert len(own) - len(actions) == sum(row.calls for row in r.record.traffic.rows.values())
        sent = [event["args"]["payload_bytes"] for event in own if event["tid"] == MESSAGES]
        assert len(sent) == 3
        assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in own)


def test_a_long_timetable_is_traced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.planner.price.MAX_CELLS", 1)
    plan = make_plan(llama(num_layers=4), pp=2, num_micro_batches=3)
    events = trace(plan, ((r.role, r.entries) for r in dry_run(plan)))["traceEvents"]
    starts = [event["ts"] for event in events if event["ph"] == "X" and event["pid"] == 0 and event["tid"] == ACTIONS]
    assert starts == sorted(starts)
    assert len(starts) == len(build_program(plan.strategy).rows[0])


def test_what_can_only_be_forecast_is_refused() -> None:
    plan = make_plan(llama(), dp=2, precision="bf16-20")
    with pytest.raises(UnsupportedError, match="bf16-20"):
        dry_run(plan)


def test_offloaded_shards_have_roles_by_their_groups() -> None:
    plan = make_plan(llama(), dp=3, zero=1, offload={"optimizer": "cpu", "group_numel": 64})
    found = roles(plan)
    assert sum(role.num_ranks for role in found) == 3
    assert {(at[DP], at[TP]) for at in (role.coordinates for role in found)} <= {(0, 0), (1, 0), (2, 0)}
    assert_as_forecast(plan)
