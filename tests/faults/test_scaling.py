"""Constant factors: losses and gradients that depend on how a batch is cut. Plain gradients and SGD show them."""

from __future__ import annotations

import pytest
import torch

from meshwright.core.axes import DP
from tests.parallel.layouts import llama, make_plan, qwen3
from tests.parallel.runs import (
    SGD,
    Boxes,
    assembled,
    assert_close,
    counted_batches,
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

MODEL = llama(num_layers=3)
UNEVEN = (3, 5, 8, 1)
"""Counted tokens of each micro-batch."""


def accumulate(rank: int, world: int, plan: str, counts: tuple[int, ...]) -> tuple[float, float, Boxes]:
    """Loss, norm and gradients of micro-batches with so many counted tokens, shared out over dp."""
    engine = make_engine(plan)
    dp = engine.mesh[DP]
    batches = counted_batches(engine.plan.model, counts)
    per_rank = len(batches) // dp.size
    loss = engine.forward_backward(batches[dp.index * per_rank :][:per_rank])
    norm, total = engine.optimizer.norm_and_loss(engine.parallel.own_loss(loss))
    return float(total), float(norm), gradients(engine)


@pytest.mark.parametrize("split", [{}, {"pp": 2}, {"pp": 3}, {"tp": 2}, {"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_loss_is_divided_by_all_counted_tokens(ranks, split):
    plan = make_plan(MODEL, num_micro_batches=4 // split.get("dp", 1), **split)
    expected_loss, expected = plain_gradients(MODEL, counted_batches(MODEL, UNEVEN))
    expected_norm = float(torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt())
    for _, results in layouts_of(ranks, accumulate, [plan], UNEVEN):
        assert [loss for loss, _, _ in results] == pytest.approx([expected_loss] * len(results), rel=1e-12)
        assert [norm for _, norm, _ in results] == pytest.approx([expected_norm] * len(results), rel=1e-10)
        assert_close(assembled([boxes for _, _, boxes in results]), expected)


@pytest.mark.parametrize("split", [{}, {"pp": 2}, {"dp": 2}], ids=str)
def test_one_and_seven_tokens_weigh_as_one_batch_of_eight(ranks, split):
    """Not the mean of two means."""
    (tokens_1, labels_1), (tokens_7, labels_7) = counted_batches(MODEL, (1, 7))
    together = [(torch.cat((tokens_1, tokens_7)), torch.cat((labels_1, labels_7)))]
    _, expected = plain_gradients(MODEL, together)
    plan = make_plan(MODEL, num_micro_batches=2 // split.get("dp", 1), **split)
    for _, results in layouts_of(ranks, accumulate, [plan], (1, 7)):
        assert_close(assembled([boxes for _, _, boxes in results]), expected)


def call_twice(rank: int, world: int, plan: str, num_calls: int) -> Boxes:
    """Gradients after so many calls on the same micro-batches, reduced once."""
    engine = make_engine(plan)
    batches = counted_batches(engine.plan.model, (4, 8, 2, 5))
    for call in range(num_calls):
        engine.forward_backward(batches, reduce=call == num_calls - 1)
    return gradients(engine)


@pytest.mark.parametrize("split", [{"pp": 2}, {"pp": 2, "schedule": "gpipe"}, {"dp": 2}, {"tp": 2}], ids=str)
def test_two_calls_accumulate_exactly_twice_one(ranks, split):
    """No call averages what an earlier one has left (1.25 times instead of 2)."""
    plan = make_plan(MODEL, num_micro_batches=4, **split).to_toml()
    once, twice = (assembled(ranks(call_twice, 2, plan, num_calls)) for num_calls in (1, 2))
    assert_close(twice, once, factor=2.0, tolerance=1e-14)


def move(rank: int, world: int, plan: str) -> Boxes:
    """How far one step of SGD at rate 1 moves each weight."""
    engine = make_engine(plan, SGD)
    before = weights(engine)
    engine.step(own_batches(engine, dataset(engine.plan), 0), 1.0)
    return [(*key, old - new) for (*key, old), (*_, new) in zip(before, weights(engine), strict=True)]


@pytest.mark.parametrize("num_micro_batches", [2, 8])
def test_every_stage_moves_by_its_gradient_whatever_the_accumulation(ranks, num_micro_batches):
    """Not by 1/m of it, nor 1/m² on early stages."""
    plan = run_plan(MODEL, batch=8, pp=3, num_micro_batches=num_micro_batches, micro_batch_size=8 // num_micro_batches)
    batches = dataset(plan).micro_batches(0, 0, 1, num_micro_batches, 8 // num_micro_batches)
    _, expected = plain_gradients(MODEL, batches)
    for _, moved in layouts_of(ranks, move, [plan]):
        assert_close(assembled(moved), expected)


def two_lengths(rank: int, world: int, plan: str) -> Boxes:
    engine = make_engine(plan)
    short, long = (counted_batches(engine.plan.model, (4, 5), length) for length in (6, 8))
    engine.forward_backward(short, reduce=False)
    engine.forward_backward(long)
    return gradients(engine)


@pytest.mark.parametrize("split", [{"pp": 2}, {"dp": 2}, {"pp": 2, "recompute": "full"}], ids=str)
def test_a_new_sequence_length_keeps_what_was_accumulated(ranks, split):
    short, long = (plain_gradients(MODEL, counted_batches(MODEL, (4, 5), length))[1] for length in (6, 8))
    plan = make_plan(MODEL, num_micro_batches=2, **split)
    for _, results in layouts_of(ranks, two_lengths, [plan]):
        assert_close(assembled(results), {name: short[name] + long[name] for name in short})


def token_weighted(rank: int, world: int, plan: str) -> Boxes:
    engine = make_engine(plan)
    first, second = (counted_batches(engine.plan.model, counts, 8) for counts in ((1, 2), (7, 8)))
    num_tokens = engine.count_tokens([*first, *second])
    engine.forward_backward(first, num_tokens=num_tokens, reduce=False)
    engine.forward_backward(second, num_tokens=num_tokens)
    return gradients(engine)


@pytest.mark.parametrize("split", [{"pp": 2}, {"dp": 2, "zero": 0}], ids=str)
def test_a_step_of_several_calls_is_the_mean_over_all_its_tokens(ranks, split):
    """Not the mean of the calls' means."""
    batches = [*counted_batches(MODEL, (1, 2), 8), *counted_batches(MODEL, (7, 8), 8)]
    _, expected = plain_gradients(MODEL, batches)
    for _, results in layouts_of(ranks, token_weighted, [make_plan(MODEL, num_micro_batches=2, **split)]):
        assert_close(assembled(results), expected)


def through_entry_points(rank: int, world: int, plan: str) -> dict[str, float]:
    """The loss of one batch, through everything that gives a loss. No step changes a weight."""
    engine = make_engine(plan)
    batches = own_batches(engine, dataset(engine.plan), 0)
    step = float(engine.step(batches, 0.0).loss)
    parts = float(engine.update(engine.forward_backward(batches), 0.0).loss)
    return {"step": step, "forward_backward and update": parts, "evaluate": engine.evaluate([batches])}


def test_every_entry_point_gives_the_same_loss(ranks):
    plans = [run_plan(MODEL, **split) for split in ({"pp": 2}, {"dp": 2, "zero": 1}, {"tp": 2, "pp": 2})]
    expected, _ = plain_gradients(MODEL, dataset(plans[0]).micro_batches(0, 0, 1, 8, 1))
    for _, results in layouts_of(ranks, through_entry_points, plans):
        for losses in results:
            assert losses == pytest.approx(dict.fromkeys(losses, expected), rel=1e-12)


def losses_and_weights(rank: int, world: int, plan: str) -> tuple[list[tuple[float, float]], Boxes]:
    engine = make_engine(plan, SGD)
    return train(engine, dataset(engine.plan), range(2), 0.5), weights(engine)


def test_sgd_does_not_see_how_the_batch_is_cut(ranks):
    """1, 2, 4, 8 micro-batches, over one or two data-parallel ranks."""
    model = qwen3(num_layers=2)
    plans = [run_plan(model, micro_batch_size=size, dp=dp) for size, dp in ((8, 1), (4, 1), (2, 1), (1, 1), (2, 2))]
    first, *others = [
        (results[0][0], assembled([boxes for _, boxes in results]))
        for _, results in layouts_of(ranks, losses_and_weights, plans)
    ]
    for steps, whole in others:
        assert steps == [pytest.approx(step, rel=1e-10) for step in first[0]]
        assert_close(whole, first[1])
