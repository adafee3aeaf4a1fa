"""Precision: overflows that all ranks see alike, scales that leave no trace, small updates that are not lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.core.batch import MicroBatch
from meshwright.core.plan import Plan
from meshwright.models.build import build
from meshwright.run.engine import make_mesh, parallelize
from meshwright.train import optimizer
from meshwright.train.loss_scale import LossScaleOptions
from meshwright.train.optimizer import OptimizerOptions
from tests.parallel.layouts import gpt2, llama, make_plan, qwen3
from tests.parallel.runs import (
    ADAMW,
    SEED,
    Boxes,
    assembled,
    counted_batches,
    dataset,
    make_engine,
    own_batches,
    train,
    weights,
)

LLAMA, TIED, LEARNED = llama(num_layers=2), qwen3(num_layers=2), gpt2(num_layers=2)
FAST = OptimizerOptions(eps=1e-4, loss_scale=LossScaleOptions(initial=256.0, interval=2))


def with_overflow(rank: int, world: int, text: str, bad_rank: int, bad: float) -> dict[str, Any]:
    """Four steps; before the update of step 1 a gradient of one rank is not finite."""
    engine = make_engine(Plan.from_toml(text), FAST)
    data, steps, held = dataset(engine.plan), [], []
    for step in range(4):
        loss = engine.forward_backward(own_batches(engine, data, step))
        if step == 1 and rank == bad_rank:
            counted = next(s for s in engine.optimizer.shards if s.norm_segments)
            counted.bucket.own_gradients[counted.norm_segments[0].start - counted.start] = bad
        held.append(_states(engine))
        stats = engine.update(loss, 1e-2)
        steps.append((bool(stats.skipped), float(stats.loss_scale)))
    return {"steps": steps, "held": held, "count": float(engine.optimizer.step_count), "weights": weights(engine)}


def _states(engine: Any) -> list[torch.Tensor]:
    shards = engine.optimizer.shards
    kept = [memory.clone() for shard in shards for _, memory in shard.states()]
    return [*kept, *(shard.bucket.own_parameters.clone() for shard in shards)]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("layout", "bad_rank"),
    [
        ({"dp": 2}, 1), ({"dp": 2, "zero": 1}, 0), ({"dp": 2, "zero": 3}, 1), ({"tp": 2}, 1),
        ({"pp": 2, "num_micro_batches": 2}, 0), ({"pp": 2, "num_micro_batches": 2}, 1),
    ],
)  # fmt: skip
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks, layout, bad_rank, bad):
    plan = make_plan(LLAMA, precision="fp16", **layout)
    found = ranks(with_overflow, 2, plan.to_toml(), bad_rank, bad)
    for result in found:
        assert result["steps"] == [(False, 256.0), (True, 256.0), (False, 128.0), (False, 128.0)]
        assert result["count"] == 3.0
        assert all(torch.equal(a, b) for a, b in zip(result["held"][1], result["held"][2], strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(result["held"][2], result["held"][3], strict=True))
    assembled([result["weights"] for result in found])  # replicas are equal to the bit


def uncounted_overflow(rank: int, world: int, text: str) -> tuple[bool, Boxes]:
    """A step in which the last rank's own copy of a whole parameter, which no norm counts, has a gradient of nan."""
    engine = make_engine(Plan.from_toml(text), FAST)
    loss = engine.forward_backward(own_batches(engine, dataset(engine.plan), 0))
    if rank == world - 1:
        replicas = ((b, s) for b, s in engine.parallel.states.slots() if not s.placement.owned)
        bucket, slot = next((b, s) for b, s in replicas if not b.layout.sum_over)
        bucket.own_gradients[bucket.overlap(slot, bucket.own)[1]] = float("nan")
    return bool(engine.update(loss, 1e-2).skipped), weights(engine)


@pytest.mark.parametrize("layout", [{}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}], ids=str)
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_replica_that_no_norm_counts_is_looked_at_too(ranks, layout, precision):
    """Norms over tp, whose gradients each rank computes: else that rank's copy alone would turn to nan."""
    plan = make_plan(TIED, precision=precision, tp=2, **layout)
    found = ranks(uncounted_overflow, plan.strategy.world_size, plan.to_toml())
    assert all(skipped for skipped, _ in found)
    assembled([boxes for _, boxes in found])


def scaled_gradients(rank: int, world: int, text: str, scale: float) -> list[torch.Tensor]:
    engine = make_engine(Plan.from_toml(text))
    batches = own_batches(engine, dataset(engine.plan), 0)
    engine.parallel.forward_backward(batches, loss_scale=torch.tensor(scale))
    return [gradient / scale for _, gradient, _ in engine.parallel.states.gradients()]


@pytest.mark.parametrize("layout", [{"dp": 2, "zero": 2}, {"pp": 2, "num_micro_batches": 3}, {"tp": 2}])
def test_a_power_of_two_leaves_no_trace(ranks, layout):
    text = make_plan(LLAMA, precision="fp32", **layout).to_toml()
    plain, scaled = (ranks(scaled_gradients, 2, text, scale) for scale in (1.0, 2.0**10))
    for ours, expected in zip(scaled, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def losses(rank: int, world: int, text: str, steps: int) -> list[float]:
    engine = make_engine(Plan.from_toml(text), ADAMW)
    return [loss for loss, _ in train(engine, dataset(engine.plan), range(steps))]


@pytest.mark.parametrize("model", [LLAMA, TIED, LEARNED], ids=lambda model: model.name)
@pytest.mark.parametrize("precision", ["fp16", "fp16-16", "bf16-sr"])
def test_the_loss_is_close_to_that_of_fp32(ranks, model, precision):
    fp32, other = (
        ranks(losses, 2, make_plan(model, dp=2, num_micro_batches=2, precision=name).to_toml(), 20)[0]
        for name in ("fp32", precision)
    )
    assert other == pytest.approx(fp32, rel=0.02 if precision == "bf16-sr" else 0.005)
    assert other != fp32


def test_fp16_under_a_pipeline(ranks):
    plans = [make_plan(TIED, pp=2, dp=2, zero=1, num_micro_batches=2, precision=name) for name in ("fp32", "fp16")]
    fp32, fp16 = (ranks(losses, 4, plan.to_toml(), 10)[0] for plan in plans)
    assert fp16 == pytest.approx(fp32, rel=0.005)


def test_norm_and_clipping_do_not_see_the_scale():
    """Clipping is of the unscaled gradient: with any scale the same step."""
    found = []
    for initial in (1.0, 2.0**12):
        options = OptimizerOptions(clip_norm=0.1, eps=1e-4, loss_scale=LossScaleOptions(initial=initial))
        engine = make_engine(make_plan(LLAMA, precision="fp16"), options)
        stats = engine.step(counted_batches(LLAMA, (8,)), 1e-2)
        found.append((float(stats.grad_norm), [shard.master.clone() for shard in engine.optimizer.shards]))
    (norm, masters), (scaled_norm, scaled_masters) = found
    assert scaled_norm == pytest.approx(norm, rel=1e-2)
    assert norm > 0.1
    for a, b in zip(masters, scaled_masters, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=2e-4)


def test_stochastic_rounding_moves_a_bf16_weight_without_masters():
    """A thousand times 1e-4 on 1.0; to the nearest bfloat16 it would never move."""
    engine = make_engine(make_plan(LLAMA, precision="bf16-sr"), ADAMW)
    for _ in range(1000):
        for bucket in engine.parallel.states.buckets:
            bucket.own_gradients.fill_(1.0)
        engine.optimizer.update(1e-4, torch.tensor(1.0))
    moved = engine.parallel.states.parameters["final_norm.weight"].detach().float()
    assert float(moved.mean()) == pytest.approx(0.9, abs=0.01)
    assert all(shard.master.dtype == torch.bfloat16 for shard in engine.optimizer.shards)
    assert all(moment.dtype == torch.float32 for shard in engine.optimizer.shards for moment in shard.moments)


def rounded(rank: int, world: int, text: str) -> Any:
    engine = make_engine(Plan.from_toml(text), ADAMW)
    for _ in range(3):
        for bucket in engine.parallel.states.buckets:
            bucket.own_gradients.fill_(1.0)
        engine.optimizer.update(1e-2, torch.tensor(1.0))
        engine.parallel.gather_parameters()
    return weights(engine)


def test_stochastic_rounding_is_the_same_for_every_layout(ranks):
    """Given the same gradients: replicated, sharded, and cut by tensor parallelism."""
    layouts = ({"dp": 2}, {"dp": 2, "zero": 3}, {"tp": 2})
    first, *others = (
        assembled(ranks(rounded, 2, make_plan(LLAMA, precision="bf16-sr", **layout).to_toml())) for layout in layouts
    )
    assert all(torch.equal(other[name], first[name]) for other in others for name in first)


def test_a_parameter_rounded_in_parts_is_the_same(monkeypatch):
    """The bits belong to elements, not to calls."""
    found = []
    for at_a_time in (10**6, 7):
        monkeypatch.setattr(optimizer, "_ROUNDED_AT_A_TIME", at_a_time)
        found.append(rounded(0, 1, make_plan(LLAMA, precision="bf16-sr").to_toml()))
    assert all(torch.equal(a[-1], b[-1]) for a, b in zip(*found, strict=True))


def test_a_gradient_that_is_not_finite_changes_nothing_in_fp32():
    engine = make_engine(make_plan(LLAMA, precision="fp32"))
    loss = engine.forward_backward(counted_batches(LLAMA, (8,)))
    engine.parallel.states.buckets[0].own_gradients[0] = float("nan")
    before = _states(engine)
    assert bool(engine.update(loss, 1e-2).skipped)
    assert all(torch.equal(a, b) for a, b in zip(before, _states(engine), strict=True))


def test_the_scale_is_saved_and_goes_on(tmp_path):
    plan = make_plan(LLAMA, precision="fp16")
    engine = parallelize(build(plan.model), plan, mesh=make_mesh(plan), options=FAST, seed=SEED)
    batches: list[MicroBatch] = counted_batches(LLAMA, (8,))
    for _ in range(3):
        engine.step(batches, 1e-3)
    engine.save(tmp_path, 3)
    other = parallelize(build(plan.model), plan, mesh=make_mesh(plan), options=FAST, seed=SEED + 1)
    other.load(tmp_path)
    assert other.optimizer.loss_scale.state() == engine.optimizer.loss_scale.state() == [512.0, 1.0, 1.0]


def test_a_scale_that_fell_to_one_is_saved_as_such(tmp_path):
    """A run whose scale is at its minimum does not start again from the initial one."""
    plan = make_plan(LLAMA, precision="fp16")
    low = OptimizerOptions(loss_scale=LossScaleOptions(initial=2.0, interval=100))
    engine = make_engine(plan, low)
    engine.optimizer.update(1e-3, torch.tensor(float("inf")))
    engine.save(tmp_path / "fp16", 1)
    other = make_engine(plan, low)
    other.load(tmp_path / "fp16")
    assert float(other.optimizer.loss_scale.scale) == 1.0
