"""The engine over many steps and in the corners: equal replicas, equal runs, buckets, unused parameters, bf16."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch
from torch import nn

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.core.errors import InputError
from meshwright.core.plan import Plan
from meshwright.models import init
from meshwright.models.build import build
from meshwright.run.engine import make_mesh, parallelize
from tests.parallel.layouts import gpt2, llama, make_plan, qwen3
from tests.parallel.runs import (
    ADAMW,
    SEED,
    Boxes,
    assembled,
    assert_close,
    dataset,
    gradients,
    layouts_of,
    make_engine,
    own_batches,
    plain_gradients,
    plain_model,
    run_plan,
    train,
    weights,
)

TIED = qwen3(num_layers=2)


def trained(rank: int, world: int, plan: str, num_steps: int) -> tuple[list[tuple[float, float]], Boxes]:
    engine = make_engine(plan)
    return train(engine, dataset(engine.plan), range(num_steps)), weights(engine)


@pytest.mark.parametrize(
    "split",
    [
        {"dp": 2, "tp": 2, "pp": 2, "zero": 1},
        {"dp": 2, "pp": 2, "schedule": "gpipe"},
        {"dp": 4, "zero": 1, "precision": "bf16"},
        {"tp": 4, "precision": "fp32"},
    ],
    ids=str,
)
def test_replicas_are_equal_to_the_bit_after_fifty_steps(ranks, split):
    """Over dp, over tp where parameters are whole on every rank, and both copies of a tied embedding."""
    plan = run_plan(TIED, batch=4, **split)
    results = ranks(trained, plan.strategy.world_size, plan.to_toml(), 50, timeout_s=300)
    losses = [loss for loss, _ in results[0][0]]
    assert sum(losses[40:]) < sum(losses[:10])
    assert all(steps == results[0][0] for steps, _ in results)
    assembled([boxes for _, boxes in results])  # refuses replicas that differ


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
def test_no_schedule_escapes_the_reduction_over_dp(ranks, schedule):
    plan = run_plan(TIED, batch=4, dp=2, pp=2, schedule=schedule)
    results = ranks(reduced, 4, plan.to_toml())
    _, expected = plain_gradients(TIED, dataset(plan).micro_batches(0, 0, 1, 4, 1))
    assert_close(assembled(results), expected)


def reduced(rank: int, world: int, plan: str) -> Boxes:
    engine = make_engine(plan)
    engine.forward_backward(own_batches(engine, dataset(engine.plan), 0))
    return gradients(engine)


def test_two_runs_are_equal_to_the_bit(ranks):
    plan = run_plan(TIED, batch=4, dp=2, tp=2, pp=2, zero=1, precision="fp32").to_toml()
    first, second = (ranks(trained, 8, plan, 5, timeout_s=120) for _ in range(2))
    for (steps, boxes), (again, same) in zip(first, second, strict=True):
        assert steps == again
        assert all(torch.equal(a[-1], b[-1]) for a, b in zip(boxes, same, strict=True))


@pytest.mark.parametrize("zero", [0, 1])
def test_bucket_size_changes_nothing(ranks, zero):
    """One parameter a bucket, some, all in one; also where a shard ends within a parameter."""
    caps = (1, 300, 5000, 10**9)
    plans = [run_plan(TIED, batch=4, dp=2, pp=2, zero=zero, bucket_bytes=cap) for cap in caps]
    first, *others = [
        (results[0][0], assembled([boxes for _, boxes in results]))
        for _, results in layouts_of(ranks, trained, plans, 3)
    ]
    for steps, whole in others:
        assert steps == [pytest.approx(step, rel=1e-12) for step in first[0]]
        assert_close(whole, first[1], tolerance=1e-12)


class _Skipped(nn.Module):
    """A layer whose parameters exist and are not used."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._modules.update(layer._modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def with_unused_layer(
    rank: int, world: int, plan: str, on_ranks: tuple[int, ...]
) -> tuple[Boxes, list[tuple[float, float]]]:
    """Gradients where these ranks pass layer 1 over, then two whole steps."""
    parsed = Plan.from_toml(plan)
    model = build(parsed.model)
    if rank in on_ranks:
        model.layers["1"] = _Skipped(model.layers["1"])
    engine = parallelize(model, parsed, mesh=make_mesh(parsed), options=ADAMW, seed=SEED)
    data = dataset(parsed)
    engine.forward_backward(own_batches(engine, data, 0))
    found = gradients(engine)
    engine.parallel.zero_gradients()
    return found, train(engine, data, range(2))


@pytest.mark.parametrize("split", [{"dp": 2}, {"dp": 2, "pp": 2}, {"tp": 2}, {"pp": 3}], ids=str)
def test_unused_parameters_have_no_gradient_and_nobody_waits(ranks, split):
    """Clipping included; with pp=3 a whole stage has nothing to train."""
    plan = run_plan(llama(num_layers=3), batch=4, bucket_bytes=1, **split)
    for _, results in layouts_of(ranks, with_unused_layer, [plan], tuple(range(8))):
        whole = assembled([boxes for boxes, _ in results])
        assert {name for name in whole if not (whole[name] != 0).any()} == {n for n in whole if ".1." in n}
        assert all(steps == results[0][1] for _, steps in results)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("bucket_bytes", [1, 10**9])
def test_a_layer_that_one_rank_passes_over_keeps_ranks_together(ranks, zero, bucket_bytes):
    plan = run_plan(llama(num_layers=3), batch=4, dp=2, zero=zero, bucket_bytes=bucket_bytes)
    (_, first), (_, second) = ranks(with_unused_layer, 2, plan.to_toml(), (1,))
    assert first == second


def with_own_weights(rank: int, world: int, plan: str) -> Boxes:
    parsed = Plan.from_toml(plan)
    model = build(parsed.model, "cpu", torch.float64)
    init.initialize(model, parsed.model, seed=99)
    return weights(parallelize(model, parsed, mesh=make_mesh(parsed), seed=SEED))


@pytest.mark.parametrize("model", [TIED, gpt2(num_layers=2)], ids=lambda model: model.name)
def test_weights_that_a_model_brings_are_kept(ranks, model):
    own = build(model, "cpu", torch.float64)
    init.initialize(own, model, seed=99)
    expected = {name: p.detach() for name, p in own.named_parameters()}
    plan = make_plan(model, dp=2, tp=2, pp=2, zero=1)
    whole = assembled(ranks(with_own_weights, 8, plan.to_toml()))
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], expected[name]) for name in expected)


def test_a_second_reduction_in_a_step_is_refused():
    engine = make_engine(make_plan(TIED))
    batches = own_batches(engine, dataset(engine.plan), 0)
    engine.forward_backward(batches)
    with pytest.raises(InputError, match="already reduced"):
        engine.forward_backward(batches)


@pytest.mark.parametrize("precision", ["bf16", "bf16-16"])
def test_bf16_keeps_master_and_moments_in_fp32(precision):
    """Loaded weights included: moments never take over the dtype of the parameters."""
    model = plain_model(TIED, torch.bfloat16)
    engine = parallelize(model, make_plan(TIED, precision=precision))
    train(engine, dataset(engine.plan), range(2))
    for shard in engine.optimizer.shards:
        assert shard.bucket.parameters.dtype == torch.bfloat16
        assert {kind: memory.dtype for kind, memory in shard.states()} == dict.fromkeys(
            ("master", "moment1", "moment2"), torch.float32
        )


@pytest.mark.parametrize("precision", ["bf16", "bf16-16"])
def test_small_updates_move_a_bf16_weight(precision):
    """A thousand times 1e-4 on 1.0; each alone is less than half a step of bf16 there."""
    engine = make_engine(make_plan(TIED, precision=precision), options=ADAMW)
    norms = ("layers.0.attention_norm.weight", "final_norm.weight")
    for _ in range(1000):
        for bucket in engine.parallel.states.buckets:
            bucket.gradients.fill_(1.0)
        engine.optimizer.update(1e-4, torch.tensor(1.0))
    for name in norms:
        moved = engine.parallel.states.parameters[name].float()
        assert moved.sub(0.9).abs().max() < 0.005


def test_bf16_loss_is_close_to_that_of_fp32(ranks):
    plans = [run_plan(TIED, batch=4, dp=2, pp=2, zero=1, precision=name) for name in ("fp32", "bf16", "bf16-16")]
    fp32, *others = [[loss for loss, _ in results[0][0]] for _, results in layouts_of(ranks, trained, plans, 20)]
    for losses in others:
        assert losses == pytest.approx(fp32, rel=0.02)
        assert losses != fp32


def freed(rank: int, world: int, plan: str) -> bool:
    """Whether nothing is left of an engine that nobody holds any more."""
    engine = make_engine(plan)
    train(engine, dataset(engine.plan), range(1))
    mesh = weakref.ref(engine.mesh)
    engine.close()
    del engine
    gc.collect()
    return mesh() is None


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_engine_that_is_dropped_is_freed(ranks, zero):
    plan = run_plan(TIED, batch=4, dp=2, zero=zero, precision="bf16")
    assert ranks(freed, 2, plan.to_toml()) == [True, True]


def numbers_of_threads(rank: int, world: int) -> list[int]:
    counts = []
    for _ in range(3):
        mesh = Mesh.create({"dp": 2, "tp": 2})
        for axis in ("dp", "tp"):  # once all ranks of a group have talked, none of them still connects
            all_reduce(torch.ones(2), mesh[axis])
        mesh.close()
        del mesh
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_a_closed_mesh_leaves_no_threads(ranks):
    for first, *later in ranks(numbers_of_threads, 4):
        assert later == [first] * 2
