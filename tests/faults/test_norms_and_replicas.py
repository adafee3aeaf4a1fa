"""The gradient norm, parameters that are whole on several ranks, and degrees that heads or batches do not divide."""

from __future__ import annotations

from math import sqrt

import pytest
import torch

from meshwright.comm.differentiable import copy_to, reduce_from
from meshwright.comm.mesh import Mesh
from meshwright.core.errors import InputError, RuleError
from meshwright.core.job import Job
from meshwright.core.plan import Plan
from meshwright.core.strategy import Strategy
from tests.parallel.layouts import cluster, llama, make_plan, qwen3
from tests.parallel.runs import (
    Boxes,
    assembled,
    assert_close,
    dataset,
    gradients,
    layouts_of,
    make_engine,
    own_batches,
    plain_gradients,
    run_plan,
    train,
    weights,
)

MODEL = qwen3(num_layers=2)
"""Sharded, replicated, partly replicated and tied parameters, and norms whose gradients are partial."""


def norm_and_gradients(rank: int, world: int, plan: str) -> tuple[float, Boxes]:
    engine = make_engine(plan)
    loss = engine.forward_backward(own_batches(engine, dataset(engine.plan), 0))
    norm, _ = engine.optimizer.norm_and_loss(loss)
    return float(norm), gradients(engine)


@pytest.mark.parametrize("zero", [0, 1])
def test_the_norm_counts_each_element_once(ranks, zero):
    splits = [(1, 1, 1), (1, 2, 1), (1, 4, 1), (1, 1, 2), (2, 1, 1), (1, 2, 2), (2, 2, 2), (4, 1, 2)]
    plans = [run_plan(MODEL, dp=dp, tp=tp, pp=pp, zero=zero) for dp, tp, pp in splits]
    _, expected = plain_gradients(MODEL, dataset(plans[0]).micro_batches(0, 0, 1, 8, 1))
    norm = sqrt(sum(float(gradient.square().sum()) for gradient in expected.values()))
    for plan, results in layouts_of(ranks, norm_and_gradients, plans):
        assert [found for found, _ in results] == [pytest.approx(norm, rel=1e-12)] * len(results), plan.strategy


@pytest.mark.parametrize(("kv_heads", "tp"), [(1, 2), (1, 4), (2, 4)])
def test_key_and_value_gradients_are_summed_over_replicas(ranks, kv_heads, tp):
    """Fewer key/value heads than ranks: each replica has seen only the queries of its own rank."""
    plan = run_plan(llama(num_layers=2, num_kv_heads=kv_heads), batch=2, tp=tp)
    _, expected = plain_gradients(plan.model, dataset(plan).micro_batches(0, 0, 1, 2, 1))
    for _, results in layouts_of(ranks, norm_and_gradients, [plan]):
        assert_close(assembled([boxes for _, boxes in results]), expected)


def trained(rank: int, world: int, plan: str) -> Boxes:
    engine = make_engine(plan)
    train(engine, dataset(engine.plan), range(8))
    return weights(engine)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_whole_parameters_stay_equal_over_tp(ranks, precision):
    """Bit for bit, after eight steps of Adam, which would blow up the smallest difference."""
    plan = run_plan(MODEL, batch=2, tp=2, precision=precision)
    for _, (first, second) in layouts_of(ranks, trained, [plan]):
        replicated = [(a, b) for a, b in zip(first, second, strict=True) if a[1] == a[2].sizes]
        assert {"final_norm.weight", "layers.0.attention.q_norm.weight"} <= {name for (name, *_), _ in replicated}
        assert all(torch.equal(a[-1], b[-1]) for a, b in replicated)


GRIDS = {
    "2d": {"tp": 4, "tensor": {"kind": "2d"}, "micro_batch_size": 2},
    "2.5d": {"tp": 8, "tensor": {"kind": "2.5d", "depth": 2}, "micro_batch_size": 4},
    "3d": {"tp": 8, "tensor": {"kind": "3d"}, "micro_batch_size": 4},
}


@pytest.mark.parametrize("kind", ["sp", *GRIDS])
def test_replicas_stay_equal_in_every_kind(ranks, kind):
    """Likewise norms under sequence parallelism; on grids weights over depths, vectors, and key/value heads."""
    plan = run_plan(MODEL, batch=4, **GRIDS.get(kind, {"tp": 2, "sequence": "megatron"}))
    for _, results in layouts_of(ranks, trained, [plan]):
        assert assembled(results)
        results[-1] = [(*piece, values * (1 + 1e-15)) for *piece, values in results[-1]]
        with pytest.raises(AssertionError, match="replicas differ"):
            assembled(results)


def adjoints(rank: int, world: int) -> tuple[float, float]:
    """Gradient of Σ x through a sum over ranks, and through a copy that each rank uses."""
    axis = Mesh.create({"tp": world})["tp"]
    summed, copied = (torch.ones((), dtype=torch.float64, requires_grad=True) for _ in range(2))
    reduce_from(3.0 * summed, axis).backward()
    ((rank + 1.0) * copy_to(copied, axis)).backward()
    return float(summed.grad), float(copied.grad)


def test_the_gradient_of_a_sum_is_not_multiplied_by_the_ranks(ranks):
    assert ranks(adjoints, 4) == [(3.0, 10.0)] * 4


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"tp": 3}, "tp=3 does not divide the heads 4"),
        ({"tp": 8}, "tp=8 does not divide the heads 4"),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_the_number(split, message):
    with pytest.raises(RuleError, match=message):
        make_plan(llama(), **split)


def test_key_value_heads_that_neither_divide_nor_are_divided_are_refused():
    with pytest.raises(RuleError, match="tp=4 and 3 key/value heads"):
        make_plan(llama(num_heads=12, num_kv_heads=3), tp=4)


def _plan(global_batch_size: int, **strategy: int) -> Plan:
    split = Strategy(**strategy)
    job = Job(seq_length=8, global_batch_size=global_batch_size)
    return Plan(model=llama(), cluster=cluster(split.world_size), job=job, strategy=split)


def test_a_batch_that_does_not_divide_is_refused_with_the_numbers():
    with pytest.raises(RuleError, match=r"dp=4 × num_micro_batches=2 × micro_batch_size=1 = 8 .* global batch has 10"):
        _plan(10, dp=4, num_micro_batches=2)


def test_more_positions_than_the_model_has_are_refused_with_the_numbers():
    """By the rules where positions are learned; a sequence that comes all the same, by the model."""
    learned = llama(positions="learned", max_positions=6)
    with pytest.raises(RuleError, match="seq_length=8 is more than the 6 learned positions"):
        make_plan(learned)
    short = make_engine(make_plan(llama(positions="learned", max_positions=8)))
    with pytest.raises(InputError, match=r"9 tokens, but .* 8 learned positions"):
        short.forward_backward([(torch.zeros(1, 9, dtype=torch.int64), torch.zeros(1, 9, dtype=torch.int64))])
