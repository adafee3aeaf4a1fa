"""PipeDream and PipeDream-2BW beside one process that delays its updates in the same way, to the bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.comm import mesh
from meshwright.core.axes import DP
from meshwright.core.batch import MicroBatch
from meshwright.core.errors import InputError, RuleError, UnsupportedError
from meshwright.core.plan import Plan
from meshwright.core.record import RankRecord
from meshwright.rehearse.verify import rank_differences
from meshwright.run.engine import Engine
from meshwright.schedule.build import first_steady
from meshwright.train.optimizer import OptimizerOptions
from tests.parallel.delayed import DelayedUpdates, version
from tests.parallel.layouts import gpt2, llama, make_plan, qwen3
from tests.parallel.runs import ADAMW, SGD, assembled, assert_close, counted_batches, make_engine, weights

NAMES = ("pipedream", "pipedream-vertical-sync", "pipedream-2bw")
OPTIONS = {"sgd": SGD, "adamw": replace(ADAMW, clip_norm=None)}
PARTS = (3, 1)
"""Steps between two drains: the first ones into the steady state, the others never."""
LAYERS = {1: None, 2: (1, 4), 3: (1, 3, 1), 4: (1, 1, 2, 1)}
LLAMA = llama(num_layers=5)

Steps = list[list[list[MicroBatch]]]
"""[step][micro-batch][dp rank]."""


def batches(plan: Plan, num_steps: int = sum(PARTS)) -> Steps:
    """Unequal numbers of counted tokens; of one micro-batch none."""
    m, dp = plan.strategy.num_micro_batches, plan.strategy.dp
    found = counted_batches(plan.model, [(3 * k + k // 4) % 9 for k in range(num_steps * m * dp)])
    return [[found[(t * m + k) * dp : (t * m + k + 1) * dp] for k in range(m)] for t in range(num_steps)]


def rate(step: int) -> float:
    return 0.1 / (1 + step)


def parts(steps: Steps) -> Iterable[tuple[Steps, list[float]]]:
    """The steps between two drains, with their rates."""
    first = 0
    for num in PARTS:
        yield steps[first : first + num], [rate(step) for step in range(first, first + num)]
        first += num


def run_parts(engine: Engine) -> tuple[list[float], list[Any]]:
    """(losses, differences between what the first steady step sent and its forecast)."""
    own, losses, differences = engine.mesh.coordinates[DP], [], []
    for steps, rates in parts(batches(engine.plan)):
        with engine.parallel.census() as census:
            for at, (micro_batches, learning_rate) in enumerate(zip(steps, rates, strict=True)):
                losses.append(float(engine.step([each[own] for each in micro_batches], learning_rate).loss))
                if at == first_steady(engine.plan.strategy.pipeline):
                    differences += measured_differences(engine, census.peak_bytes)
        engine.finish()
    return losses, differences


def measured_differences(engine: Engine, activations_bytes: int) -> list[Any]:
    job = engine.plan.job.model_copy(update={"optimizer": engine.optimizer.options.kind})
    record = RankRecord(
        engine.mesh.rank, engine.mesh.coordinates, engine.memory(activations_bytes), engine.last_traffic
    )
    return [str(each) for each in rank_differences(engine.plan.model_copy(update={"job": job}), record)]


def trained(rank: int, world: int, cases: Sequence[tuple[str, OptimizerOptions]]) -> list[Any]:
    """(losses, weights, versions kept, differences from the forecast) of each case."""
    found = []
    for plan, options in cases:
        engine = make_engine(plan, options)
        losses, differences = run_parts(engine)
        assert engine.parallel.endless is not None
        found.append((losses, weights(engine), engine.parallel.endless.versions.most_kept, differences))
    return found


def simulated(plan: Plan, options: OptimizerOptions, **changes: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    one_process = DelayedUpdates(plan, options, **changes)
    losses = [loss for steps, rates in parts(batches(plan)) for loss in one_process.run(steps, rates)]
    return losses, {name: p.detach() for name, p in one_process.latest.items()}


def planned(name: str, pp: int, **strategy: Any) -> Plan:
    m = pp + 1 if name == "pipedream-2bw" else max(2, pp)
    split = {"layers_per_stage": LAYERS[pp], "num_micro_batches": m, **strategy}
    return make_plan(LLAMA, pp=pp, schedule=name, **split)


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_equal_to_the_bit_to_one_process_that_delays_its_updates(ranks, pp: int) -> None:
    """Of both optimizers, each in one precision; so many versions, and bytes, as the forecast says."""
    cases = [
        (planned(name, pp, precision=precision), options)
        for name in NAMES
        for precision, kind in (("fp64", "sgd"), ("fp32", "adamw"))
        for options in [OPTIONS[kind]]
    ]
    by_rank = ranks(trained, pp, [(plan.to_toml(), options) for plan, options in cases], timeout_s=120)
    for (plan, options), *found in zip(cases, *by_rank, strict=True):
        losses, expected = simulated(plan, options)
        what = plan.strategy.schedule, plan.strategy.precision, options.kind
        ours = assembled([held for _, held, _, _ in found])
        assert [name for name, value in expected.items() if not torch.equal(ours[name], value)] == [], what
        assert found[0][0] == pytest.approx(losses, rel=1e-6), what
        kept = tuple(kept for _, _, kept, _ in found)
        assert kept == expected_versions(plan.strategy.schedule, pp), what
        assert [differences for *_, differences in found] == [[]] * pp, what


def expected_versions(name: str, pp: int) -> tuple[int, ...]:
    if name == "pipedream":
        return tuple(pp - rank for rank in range(pp))
    return (2 if name == "pipedream-2bw" else pp,) * pp


@pytest.mark.parametrize(
    "changes",
    [
        {"version": lambda *args: max(0, version(*args) - 1)},
        {"version": lambda name, k, stage, p, m: version(name, k, 0, p, m)},
        {"version": lambda name, k, stage, p, m: k},
        {"leaves_out": 2},
    ],
    ids=["one older", "of another schedule", "none delayed", "an update left out"],
)
def test_another_update_would_be_seen(ranks, changes: dict[str, Any]) -> None:
    plan = planned("pipedream", 2)
    ours = assembled([found[0][1] for found in ranks(trained, 2, [(plan.to_toml(), SGD)], timeout_s=60)])
    _, expected = simulated(plan, SGD, **changes)
    with pytest.raises(AssertionError):
        assert_close(ours, expected, tolerance=1e-6)


def test_beside_data_and_tensor_parallelism_and_recomputation(ranks) -> None:
    """Sums over ranks round otherwise, so not to the bit. Every update's tokens are counted over all dp ranks."""
    splits = ({"dp": 2}, {"dp": 2, "recompute": "full"}, {"tp": 2, "recompute": "full"})
    plans = [planned(name, 2, **split) for name, split in zip((*NAMES[::2], NAMES[0]), splits, strict=True)]
    cases = [(plan.to_toml(), OPTIONS["adamw"]) for plan in plans]
    by_rank = ranks(trained, 4, cases, timeout_s=60)
    for plan, *found in zip(plans, *by_rank, strict=True):
        losses, expected = simulated(plan, OPTIONS["adamw"])
        assert_close(assembled([held for _, held, _, _ in found]), expected)
        assert found[0][0] == pytest.approx(losses, rel=1e-10)
        assert [differences for *_, differences in found] == [[]] * 4


@pytest.mark.parametrize("precision", ["fp64", "bf16", "bf16-sr"])
def test_one_rank_that_updates_after_each_micro_batch_delays_nothing(precision: str) -> None:
    """PipeDream on one rank is the plain optimizer, also where masters are kept or updates are rounded."""
    found = []
    for schedule in ("1f1b", "pipedream"):
        plan = make_plan(LLAMA, schedule=schedule, num_micro_batches=1, precision=precision)
        engine = make_engine(plan, OPTIONS["adamw"])
        for step, ((micro_batch,),) in enumerate(batches(plan)):
            engine.step([micro_batch], rate(step))
        engine.finish()
        found.append(assembled([weights(engine)]))
        mesh.stop()
    flushed, ours = found
    assert [name for name, value in flushed.items() if not torch.equal(ours[name], value)] == []


def test_what_is_under_way_must_be_finished_first(tmp_path) -> None:
    engine = make_engine(planned("pipedream", 1), SGD)
    micro_batches = [each[0] for each in batches(engine.plan, 1)[0]]
    engine.step(micro_batches, 0.1)
    for call in (
        lambda: engine.save(tmp_path, 1),
        lambda: engine.load(tmp_path),
        lambda: engine.evaluate([micro_batches]),
        lambda: engine.initialize(0),
    ):
        with pytest.raises(InputError, match=r"micro-batches are under way, .* call finish\(\) first"):
            call()
    engine.finish()
    engine.finish()
    engine.save(tmp_path, 1)
    before = engine.evaluate([micro_batches])
    engine.step(micro_batches, 0.1)
    engine.finish()
    assert engine.evaluate([micro_batches]) != before
    engine.load(tmp_path)
    assert engine.evaluate([micro_batches]) == before


def test_a_gradient_that_is_not_finite_is_seen_when_what_is_under_way_ends() -> None:
    engine = make_engine(planned("pipedream-2bw", 1), SGD)
    micro_batches = [each[0] for each in batches(engine.plan, 1)[0]]
    with torch.no_grad():
        engine.parallel.states.buckets[0].parameters.fill_(float("inf"))
    engine.step(micro_batches, 0.1)
    with pytest.raises(InputError, match="gradient norm nan in what was under way: weights were changed by it"):
        engine.finish()


@pytest.mark.parametrize(
    ("model", "strategy", "fault"),
    [
        (LLAMA, {"zero": 1, "dp": 2}, "zero=1 with schedule=pipedream; take zero=0, or schedule=1f1b"),
        (LLAMA, {"precision": "fp16"}, "precision=fp16 with schedule=pipedream; take bf16"),
        (qwen3(), {"pp": 2}, "tied embeddings of `tiny-qwen3` over pp=2 with schedule=pipedream; take pp=1"),
        (LLAMA, {"offload": {"optimizer": "cpu"}}, "offload.optimizer=cpu with schedule=pipedream; take no offload"),
        (LLAMA, {"num_chunks": 2}, "num_chunks=2 with schedule=pipedream, which puts 1 stage on a rank"),
    ],
)
def test_what_cannot_be_right_is_refused(model, strategy: dict[str, Any], fault: str) -> None:
    with pytest.raises(RuleError) as raised:
        make_plan(model, schedule="pipedream", num_micro_batches=2, **strategy)
    assert fault in str(raised.value)
    assert "nearest legal" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_2bw_with_too_few_micro_batches_is_refused() -> None:
    with pytest.raises(RuleError, match="as many micro-batches per step as ranks, 2, not 1; take 2 or more"):
        make_plan(gpt2(tied_embeddings=False), pp=2, schedule="pipedream-2bw", num_micro_batches=1)


def test_a_tied_embedding_on_one_rank_is_not_refused() -> None:
    engine = make_engine(make_plan(qwen3(num_layers=1), schedule="pipedream-2bw", num_micro_batches=2), SGD)
    engine.step([each[0] for each in batches(engine.plan, 1)[0]], 0.1)
    engine.finish()


def test_clipping_needs_what_no_stage_waits_for() -> None:
    plan = planned("pipedream", 1)
    with pytest.raises(UnsupportedError, match=r"clip_norm=0.5 with schedule=`pipedream`: .* take clip_norm=None"):
        make_engine(plan, ADAMW)
    engine = make_engine(plan, SGD)
    with pytest.raises(UnsupportedError, match="use the engine's step and finish"):
        engine.forward_backward([each[0] for each in batches(plan, 1)[0]])
