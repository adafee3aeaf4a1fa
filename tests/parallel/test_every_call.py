"""Each collective call of a step is needed: with any one of them left out, loss or gradients differ.

One step of one layer. The calls are found by counting, so that a call which is added later is tried too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright.core.axes import WORLD
from meshwright.core.model import ModelSpec
from meshwright.core.plan import Plan
from meshwright.models.build import build
from meshwright.run.engine import Engine, make_mesh
from tests.parallel.layouts import gpt2, llama, make_plan, qwen3
from tests.parallel.mutations import Calls
from tests.parallel.runs import SGD, dataset, own_batches

NOTICED = 1e-6
"""Least relative difference of a loss or a gradient; without a fault they are equal to 1e-10."""

SQUARE = {"tp": 4, "tensor": {"kind": "2d"}, "micro_batch_size": 2}
DEEP = {"tp": 8, "tensor": {"kind": "2.5d", "depth": 2}, "micro_batch_size": 4}
CUBE = {"tp": 8, "tensor": {"kind": "3d"}, "micro_batch_size": 4}
LAYOUTS: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "1d": (qwen3(num_layers=1), {"tp": 2}),
    "1d sp": (gpt2(num_layers=1), {"tp": 2, "sequence": "megatron"}),
    "2d": (gpt2(num_layers=1, num_kv_heads=1, qk_norm=True), SQUARE),
    "2.5d": (llama(num_layers=1, num_kv_heads=1), DEEP),
    "3d": (gpt2(num_layers=1, num_kv_heads=1), CUBE),
    "3d again": (llama(num_layers=1), {**CUBE, "recompute": "selective"}),
    "ulysses": (llama(num_layers=1), {"context": {"kind": "ulysses", "degree": 2}}),
    "ring self-attention": (llama(num_layers=1), {"context": {"kind": "ring-self-attention", "degree": 2}}),
}


Numbers = tuple[torch.Tensor, list[torch.Tensor]]
"""A step's loss over this rank's tokens, and what it holds of the summed gradients."""


def step(engine: Engine) -> Numbers:
    loss = engine.forward_backward(own_batches(engine, dataset(engine.plan), 0))
    own = [values.clone() for _, values, _ in engine.parallel.states.gradients()]
    engine.parallel.zero_gradients()
    return loss, own


def differs(ours: Numbers, theirs: Numbers) -> bool:
    pairs = [(ours[0], theirs[0]), *zip(ours[1], theirs[1], strict=True)]
    largest = max(float(x.abs().max()) for x in theirs[1])
    return any(not float((a - b).abs().max()) <= NOTICED * largest for a, b in pairs)


def tried(rank: int, world: int, text: str) -> tuple[list[tuple[str, bool]], bool]:
    """(each call of a step, and whether this rank's numbers differ without it; whether they are right in the end)."""
    plan = Plan.from_toml(text)
    mesh, calls = make_mesh(plan), Calls([])
    mesh.axes.update(
        (name, calls.of_axis(axis, mesh.ledger)) for name, axis in mesh.axes.items() if axis.size > 1 and name != WORLD
    )
    engine = Engine(build(plan.model), plan, mesh, SGD)
    engine.initialize(1)
    calls.made.clear()
    right = step(engine)
    found = []
    for number, call in enumerate(list(calls.made)):
        calls.made.clear()
        calls.left_out = number
        found.append((call, differs(step(engine), right)))
    calls.left_out = None
    return found, not differs(step(engine), right)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_without_one_of_its_calls_is_another(ranks: Callable[..., Any], name: str) -> None:
    model, strategy = LAYOUTS[name]
    plan = make_plan(model, **strategy)
    results = ranks(tried, plan.strategy.world_size, plan.to_toml(), timeout_s=120)
    assert all(is_right for _, is_right in results)
    by_call = list(zip(*(found for found, _ in results), strict=True))
    assert all(len({call for call, _ in of_ranks}) == 1 for of_ranks in by_call)  # all leave out the same one
    assert len(by_call) > 5
    assert [of_ranks[0][0] for of_ranks in by_call if not any(seen for _, seen in of_ranks)] == []
