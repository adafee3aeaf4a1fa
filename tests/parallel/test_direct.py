"""Weight gradients that layers write into the buckets themselves: which, when they count, and that no stale one stays.

That their values are right is shown by every case of `test_matrix`.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.comm.mesh import Mesh
from meshwright.core.batch import MicroBatch
from meshwright.core.model import ModelSpec
from meshwright.models.build import build
from meshwright.parallel.states import GradientSink
from meshwright.run.engine import Engine, parallelize
from tests.parallel.layouts import SEQ_LENGTH, gpt2, llama, make_plan, qwen3


@pytest.fixture
def sink() -> GradientSink:
    """Its view holds what a former step has left."""
    return GradientSink(torch.full((3, 2), float("nan"), dtype=torch.float64), num_uses=1)


def engine_of(model: ModelSpec, **strategy: object) -> Engine:
    plan = make_plan(model, **strategy)
    return parallelize(build(plan.model), plan, mesh=Mesh.create({}))


def micro_batches(model: ModelSpec, count: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(model.vocab_size, (1, SEQ_LENGTH + 1), generator=generator) for _ in range(count)]
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


def test_first_product_replaces_later_ones_add(sink: GradientSink) -> None:
    grads, inputs = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    sink.add_product(grads, inputs)
    torch.testing.assert_close(sink.view, grads.T @ inputs)
    sink.add_product(grads, inputs)
    torch.testing.assert_close(sink.view, 2 * grads.T @ inputs)
    sink.start_step()
    sink.add_product(grads, inputs)
    torch.testing.assert_close(sink.view, grads.T @ inputs)


def test_rows_add_up_where_an_id_comes_twice(sink: GradientSink) -> None:
    rows = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]], dtype=torch.float64)
    sink.add_rows(torch.tensor([2, 0, 2]), rows)
    assert sink.view.tolist() == [[10.0, 20.0], [0.0, 0.0], [101.0, 202.0]]


def test_wider_gradient_than_weight() -> None:
    sink = GradientSink(torch.full((3, 2), float("nan")), num_uses=1)
    grads, inputs = torch.randn(4, 3).bfloat16(), torch.randn(4, 2).bfloat16()
    sink.add_product(grads, inputs)
    sink.add_product(grads, inputs)
    assert torch.equal(sink.view, 2 * (grads.T @ inputs).float())


def test_gradient_that_nobody_wrote_is_zero(sink: GradientSink) -> None:
    sink.settle()
    assert not sink.view.any()


@pytest.mark.parametrize("model", [llama(), qwen3(), gpt2()], ids=lambda model: model.name)
def test_every_matrix_but_learned_positions_has_a_sink(model: ModelSpec) -> None:
    states = engine_of(model).parallel.states
    matrices = {placement.name for placement in states.placements if len(placement.box.sizes) == 2}
    assert matrices - states.sinks.keys() == ({"positions.weight"} if model.positions == "learned" else set())
    assert states.sinks.keys() <= matrices
    assert states.sinks["embedding.weight"].num_uses == (2 if model.tied_embeddings else 1)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", [llama(), qwen3()], ids=lambda model: model.name)
def test_bucket_goes_only_after_its_last_write(
    model: ModelSpec, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, num_micro_batches=3, recompute=recompute)
    states = engine.parallel.states
    writes: Counter[str] = Counter()
    expected: Counter[str] = Counter()
    at_launch: Counter[str] = Counter()
    during_backward = []

    def count(name: str, sink: GradientSink) -> None:
        report = sink.on_written

        def written() -> None:
            writes[name] += 1
            report()

        sink.on_written = written

    def launch(index: int) -> None:
        bucket = states.buckets[index]
        names = [slot.placement.name for slot in bucket.layout.slots if slot.placement.name in states.sinks]
        at_launch.update({name: writes[name] for name in names})
        during_backward.append(bool(engine.parallel.reducer._waiting))

    for name, sink in states.sinks.items():
        count(name, sink)
        expected[name] = 3 * sink.num_uses
    monkeypatch.setattr(engine.parallel.reducer._policy, "launch", launch)
    engine.forward_backward(micro_batches(model, 3))
    assert at_launch == expected
    assert any(during_backward)


class Products(TorchDispatchMode):
    """Names the matrix products that run inside it."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            self._found.append("into its bucket" if func is torch.ops.aten.addmm_.default else "of the input")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["head.weight", "layers.0.mlp.down.weight"])
def test_weight_gradient_comes_before_that_of_the_input(name: str) -> None:
    states = engine_of(llama()).parallel.states
    ((layer, _),), sink, weight = states.owners[name], states.sinks[name], states.parameters[name]
    out = layer(torch.randn(1, SEQ_LENGTH, weight.shape[1], dtype=weight.dtype, requires_grad=True))
    order: list[str] = []
    sink.on_written = lambda: order.append("reported")
    with Products(order):
        out.sum().backward()
    assert order == ["into its bucket", "reported", "of the input"]


def test_step_without_counted_tokens_leaves_no_old_gradient() -> None:
    model = llama()
    engine = engine_of(model, num_micro_batches=2)
    batches = micro_batches(model, 2)
    engine.step(batches, 0.0)
    engine.forward_backward([(tokens, torch.full_like(labels, -100)) for tokens, labels in batches])
    assert all(not gradient.any() for _, gradient, _ in engine.parallel.states.gradients())
