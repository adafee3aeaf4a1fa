"""Tied embeddings, layers that do not divide, vocabularies that are not padded, initial weights."""

from __future__ import annotations

from math import log

import pytest
import torch

from meshwright.core.errors import RuleError
from meshwright.core.flat import rank_buckets
from meshwright.core.placement import placements
from meshwright.core.strategy import Strategy
from meshwright.models.build import build
from meshwright.run.engine import parallelize
from tests.parallel.layouts import gpt2, llama, make_plan, qwen3
from tests.parallel.runs import (
    SEED,
    SGD,
    Boxes,
    assembled,
    assert_close,
    counted_batches,
    dataset,
    layouts_of,
    make_engine,
    own_batches,
    plain_gradients,
    plain_model,
    run_plan,
    weights,
)

TIED = gpt2(num_layers=2)


def after_one_step(rank: int, world: int, plan: str) -> Boxes:
    engine = make_engine(plan, SGD)
    engine.step(own_batches(engine, dataset(engine.plan), 0), 1.0)
    return weights(engine)


@pytest.mark.parametrize(
    "split", [{"pp": 2}, {"tp": 2}, {"tp": 2, "pp": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "pp": 2, "zero": 1}], ids=str
)
def test_every_copy_of_a_tied_embedding_takes_the_whole_gradient(ranks, split):
    """Lookup and head, on one stage or on two, under tp and ZeRO."""
    plan = run_plan(TIED, batch=4, **split)
    _, gradient = plain_gradients(TIED, dataset(plan).micro_batches(0, 0, 1, 4, 1))
    before = dict(plain_model(TIED).named_parameters())
    for _, results in layouts_of(ranks, after_one_step, [plan]):
        whole = assembled(results)  # refuses copies that differ
        assert_close({name: before[name].detach() - whole[name] for name in whole}, gradient)
    holders = [rank for rank, boxes in enumerate(results) if any(name == "embedding.weight" for name, *_ in boxes)]
    assert len(holders) == plan.strategy.world_size  # of two stages, both


def test_a_model_built_without_storage_stays_tied():
    plan = make_plan(TIED)
    model = build(TIED, "meta")
    engine = parallelize(model, plan, seed=SEED)
    assert model.head.weight is model.embedding.weight
    assert not model.head.weight.is_meta
    batches = counted_batches(TIED, (8,))
    engine.forward_backward(batches)
    _, expected = plain_gradients(TIED, batches)
    ours = {p.name: gradient.view(p.box.sizes) for p, gradient, _ in engine.parallel.states.gradients()}
    assert_close(ours, expected)


def test_a_tied_embedding_lies_in_one_bucket():
    """However small the buckets: its two uses are never reduced apart."""
    for pp in (1, 2):
        split = Strategy(pp=pp, bucket_bytes=1)
        for stage in range(pp):
            buckets = rank_buckets(TIED, split, {"pp": stage, "dp": 0, "tp": 0})
            names = [slot.placement.name for bucket in buckets for slot in bucket.slots]
            assert names.count("embedding.weight") == 1
            assert "head.weight" not in names


@pytest.mark.parametrize(("num_layers", "pp"), [(30, 4), (5, 4), (7, 3), (8, 8), (13, 5), (2, 2)])
def test_stages_together_hold_every_layer_once(num_layers, pp):
    stages = Strategy(pp=pp).stage_layers(num_layers)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1
    model = llama(num_layers=num_layers)
    held = [p.name for s in range(pp) for p in placements(model, Strategy(pp=pp), {"pp": s, "dp": 0, "tp": 0})]
    assert sorted(held) == sorted(param.name for param in model.parameters())


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"pp": 4}, "pp=4 is more than the 3 layers"),
        ({"pp": 2, "layers_per_stage": (0, 3)}, r"layers_per_stage=\[0, 3\] for pp=2 and 3 layers"),
        ({"pp": 2, "layers_per_stage": (1, 1)}, r"layers_per_stage=\[1, 1\] for pp=2 and 3 layers"),
    ],
)
def test_a_stage_without_layers_is_refused(split, message):
    """Before any rank starts, so that none waits for it."""
    with pytest.raises(RuleError, match=message):
        make_plan(llama(num_layers=3), **split)


def loss_of_zeros(rank: int, world: int, plan: str) -> float:
    """The loss where every logit is zero."""
    engine = make_engine(plan)
    engine.parallel.states.fill(lambda at: torch.zeros(at.box.sizes))
    return engine.evaluate([counted_batches(engine.plan.model, (8,))])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("vocab_size", [10, 13])
def test_no_padding_takes_part_in_the_loss(ranks, tp, vocab_size):
    """Ten equal logits give ln 10, whether four ranks divide ten or not."""
    plan = make_plan(llama(vocab_size=vocab_size, num_layers=1), tp=tp)
    assert ranks(loss_of_zeros, tp, plan.to_toml()) == [pytest.approx(log(vocab_size), rel=1e-12)] * tp


def initial(rank: int, world: int, plan: str) -> Boxes:
    return weights(make_engine(plan))


def test_initial_weights_are_the_same_for_every_layout(ranks):
    model = qwen3(num_layers=4)
    expected = dict(plain_model(model).named_parameters())
    splits = ({}, {"tp": 2}, {"tp": 4}, {"pp": 4}, {"dp": 2, "tp": 2, "pp": 2, "zero": 1})
    for plan, results in layouts_of(ranks, initial, [make_plan(model, **split) for split in splits]):
        whole = assembled(results)
        assert whole.keys() == expected.keys()
        assert all(torch.equal(whole[name], expected[name]) for name in expected), plan.strategy
