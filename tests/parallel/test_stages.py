"""What a rank of several stages does between them, and what I and W compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshwright.core.batch import MicroBatch
from meshwright.core.errors import ProgramError
from meshwright.core.program import Action, Kind
from meshwright.cost.flops import stage_flops
from meshwright.models.build import build
from meshwright.run.engine import Engine, make_mesh, parallelize
from tests.parallel.layouts import gpt2, llama, make_plan, qwen3
from tests.parallel.runs import (
    SGD,
    assembled,
    assert_close,
    counted_batches,
    dataset,
    gradients,
    make_engine,
    plain_gradients,
    plain_model,
    run_plan,
    train,
)

COUNTS = (8, 1, 5)


def watched(engine: Engine, watch: Callable[[Action, Callable[[], None]], None]) -> None:
    """Let `watch` carry out every action of the engine's runner."""
    runner = engine.parallel.runner
    for kind, do in list(runner._do.items()):
        runner._do[kind] = lambda step, action, do=do: watch(action, lambda: do(step, action))


def _add_product(into: torch.Size, a: torch.Size, b: torch.Size, **kwargs: Any) -> int:
    """FLOPs of into += a · b, which the counter does not know."""
    return 2 * a[0] * a[1] * b[1]


@pytest.mark.parametrize("model", [llama(num_layers=3), gpt2(num_layers=3)], ids=lambda spec: spec.family)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_input_and_weight_gradients_are_computed_apart(model, recompute: str) -> None:
    """By PyTorch's count: W is the products with weights once more, F too, and I the rest of a whole backward."""
    plan = make_plan(model, schedule="zb-h1", num_micro_batches=2, recompute=recompute)
    engine, flops = make_engine(plan, SGD), Counter[str]()

    def count(action: Action, do: Callable[[], None]) -> None:
        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _add_product}) as counter:
            do()
        flops[action.kind] += counter.get_total_flops()

    watched(engine, count)
    engine.forward_backward(counted_batches(model, (8, 5)))
    work = stage_flops(model, plan.job, plan.strategy, 0, causal=False)
    weights = 2 * work.weight_gradients
    again = flops[Kind.F] - 2 * work.head if recompute == "full" else 0
    assert flops[Kind.W] == weights
    assert flops[Kind.F] - weights in (0, 2 * work.scores)  # as the counter knows the attention kernel, or doesn't
    assert flops[Kind.I] - again - weights in (0, 4 * work.scores)
    assert set(flops) == {Kind.F, Kind.I, Kind.W, Kind.ARM, Kind.REDUCE}


def test_stages_of_one_rank_have_graphs_of_their_own() -> None:
    """Backward of the second stage stops at what was handed over: of the first, nothing is written before its own."""
    plan = make_plan(llama(num_layers=2), schedule="bfs", num_chunks=2, num_micro_batches=2)
    engine = make_engine(plan, SGD)
    sinks = {layer: engine.parallel.states.sinks[f"layers.{layer}.mlp.up.weight"] for layer in range(2)}
    written: list[tuple[str, bool, bool]] = []

    def look(action: Action, do: Callable[[], None]) -> None:
        do()
        if action.kind is Kind.B:
            written.append((str(action), sinks[0].is_written, sinks[1].is_written))

    watched(engine, look)
    engine.forward_backward(counted_batches(plan.model, (8, 5)))
    assert written == [("B0@1", False, True), ("B1@1", False, True), ("B0@0", True, True), ("B1@0", True, True)]


def test_a_bucket_of_two_stages_waits_for_the_last_backward_of_both() -> None:
    """One bucket holds everything; it is reduced in the last action, and not before."""
    plan = make_plan(llama(num_layers=2), schedule="zb-v", num_micro_batches=3, bucket_bytes=25 * 2**20)
    engine, launched = make_engine(plan, SGD), list[int]()
    policy, order = engine.parallel.reducer._policy, list[str]()
    launch = policy.launch
    policy.launch = lambda index: launched.append(index) or launch(index)

    def look(action: Action, do: Callable[[], None]) -> None:
        before = len(launched)
        do()
        if len(launched) > before:
            order.append(str(action))

    watched(engine, look)
    engine.forward_backward(counted_batches(plan.model, COUNTS))
    assert (launched, order) == ([0], ["W2@0"])


def frozen_gradients(rank: int, world: int, plan: str) -> Any:
    """Gradients where the first stage trains nothing, and of the others only some."""
    from meshwright.core.plan import Plan

    planned = Plan.from_toml(plan)
    model = build(planned.model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (name.startswith(("embedding", "layers.0.", "layers.1.")) or "mlp" in name))
    engine = parallelize(model, planned, mesh=make_mesh(planned), options=SGD, seed=1)
    engine.forward_backward(counted_batches(planned.model, COUNTS))
    return gradients(engine)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_frozen_parameters_have_no_gradient_and_change_no_other(ranks, schedule: str) -> None:
    plan = make_plan(llama(num_layers=4), pp=2, schedule=schedule, num_micro_batches=3)
    _, expected = plain_gradients(plan.model, counted_batches(plan.model, COUNTS))
    found = assembled(ranks(frozen_gradients, 2, plan.to_toml(), timeout_s=60))
    for name, value in expected.items():
        if name.startswith(("embedding", "layers.0.", "layers.1.")) or "mlp" in name:
            value.zero_()
    assert_close(found, expected)


def evaluated(rank: int, world: int, plans: list[str]) -> list[float]:
    """Mean loss of rounds of one, three and four micro-batches, whatever the plan's own number."""
    found = []
    for plan in plans:
        engine = make_engine(plan)
        batches = counted_batches(engine.plan.model, (8, 1, 5, 2, 7, 3, 4, 6))
        found.append(engine.evaluate([batches[:1], batches[1:4], batches[4:]]))
    return found


def plain_loss(model, batches: list[MicroBatch]) -> float:
    from tests.parallel.runs import _loss_sum

    plain = plain_model(model)
    with torch.no_grad():
        total = sum(float(_loss_sum(plain, *batch)) for batch in batches)
    return total / 36


def test_any_number_of_micro_batches_is_evaluated(ranks) -> None:
    """Also where training needs an even number, or a multiple of the ranks."""
    split = ({"schedule": "interleaved-1f1b", "num_chunks": 2}, {"schedule": "zb-v"}, {"schedule": "dualpipe"})
    plans = [run_plan(qwen3(num_layers=4), batch=4, pp=2, **how) for how in split]
    expected = plain_loss(plans[0].model, counted_batches(plans[0].model, (8, 1, 5, 2, 7, 3, 4, 6)))
    for found in ranks(evaluated, 2, [plan.to_toml() for plan in plans], timeout_s=60):
        assert found == pytest.approx([expected] * len(plans), rel=1e-12)


def went_on(rank: int, world: int, plans: list[str], folder: str) -> list[tuple[float, float]]:
    """Loss and norm of steps that each plan takes from the checkpoint of the one before it."""
    found = []
    for step, plan in enumerate(plans):
        engine = make_engine(plan)
        if step:
            engine.load(folder)
        found += train(engine, dataset(engine.plan), [step])
        engine.save(folder, step)
    return found


def test_a_checkpoint_passes_from_any_order_to_any_other(ranks, tmp_path) -> None:
    """Stages that stand elsewhere, and twice, hold the same parameters and moments, each saved once."""
    split = (
        {"pp": 2, "schedule": "zb-v"},
        {"dp": 2, "zero": 1},
        {"pp": 2, "schedule": "dualpipe"},
        {"pp": 2, "schedule": "interleaved-1f1b", "num_chunks": 2},
        {"pp": 2, "schedule": "zb-h1"},
    )
    plans = [run_plan(qwen3(num_layers=4), batch=4, **how) for how in split]
    (expected,) = ranks(went_on_alone, 1, [run_plan(qwen3(num_layers=4), batch=4).to_toml()] * len(plans), timeout_s=60)
    for found in ranks(went_on, 2, [plan.to_toml() for plan in plans], str(tmp_path), timeout_s=120):
        assert found == [pytest.approx(numbers, rel=1e-10) for numbers in expected]


def went_on_alone(rank: int, world: int, plans: list[str]) -> list[tuple[float, float]]:
    engine = make_engine(plans[0])
    return train(engine, dataset(engine.plan), range(len(plans)))


def test_a_step_that_the_schedule_has_no_timetable_for_is_one_line() -> None:
    engine = make_engine(make_plan(llama(num_layers=4), schedule="interleaved-1f1b", num_chunks=2, num_micro_batches=1))
    engine.forward_backward(counted_batches(engine.plan.model, (8, 5)))  # one rank: any number will do
    engine.parallel.zero_gradients()
    split = make_plan(llama(num_layers=4), pp=2, schedule="dualpipe", num_micro_batches=2).strategy
    engine.parallel.strategy = split
    engine.parallel._rows.clear()
    with pytest.raises(ProgramError, match="no timetable of this size") as raised:
        engine.parallel._row(1, trains=True, reduce=True)
    assert "\n" not in str(raised.value)
