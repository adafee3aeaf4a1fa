"""What four real ranks measure: values and ledger rows of collectives, of one tensor-parallel layer, of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright.comm import collectives
from meshwright.comm.mesh import Axis, Mesh
from meshwright.core.batch import IGNORE
from meshwright.core.job import Job
from meshwright.core.measures import Traffic
from meshwright.core.strategy import Strategy
from meshwright.models.build import build
from meshwright.models.init import initialize
from meshwright.parallel.apply import ParallelModel
from meshwright.run.engine import make_mesh, parallelize
from meshwright.run.parity import Reference, StepBatches
from meshwright.train.optimizer import OptimizerOptions
from tests.parallel.layouts import SEQ_LENGTH, llama, make_plan

NUM_RANKS = 4
_BLOCK = 6


def measure(rank: int, world: int) -> dict[str, Any]:
    """Everything, on this rank."""
    mesh = Mesh.create({"tp": world})
    return {**_collectives(mesh), **_layer(mesh), **_gradients(rank, world)}


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _collectives(mesh: Mesh) -> dict[str, Any]:
    axis = mesh["tp"]
    inputs = [_random(peer, axis.size * _BLOCK) for peer in range(axis.size)]
    own, summed = slice(axis.index * _BLOCK, (axis.index + 1) * _BLOCK), torch.stack(inputs).sum(0)
    reduced, sent_ar = _count(mesh, lambda: collectives.all_reduce(inputs[axis.index].clone(), axis))
    block, sent_rs = _count(
        mesh, lambda: collectives.reduce_scatter(torch.empty(_BLOCK).double(), inputs[axis.index], axis)
    )
    swapped, sent_a2a = _count(
        mesh, lambda: collectives.all_to_all(torch.empty_like(summed), inputs[axis.index].clone(), axis)
    )
    payload = summed.nbytes
    return {
        "all_reduce is the sum": torch.allclose(reduced, summed, rtol=1e-14),
        "reduce_scatter is the own block of all_reduce": torch.allclose(block, reduced[own], rtol=1e-14),
        "all_to_all brings each peer's own block": torch.equal(swapped, torch.cat([x[own] for x in inputs])),
        "all_reduce sent / S": sent_ar.wire_bytes / payload,
        "reduce_scatter sent / S": sent_rs.wire_bytes / payload,
        "all_to_all sent / S": sent_a2a.wire_bytes / payload,
    }


def _count(mesh: Mesh, call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Traffic]:
    """The result of a call, and what this rank sent in it."""
    mesh.ledger.take()
    return call(), mesh.ledger.take()


def _layer(mesh: Mesh) -> dict[str, Any]:
    """Parts of a layer beside the same layer on one process."""
    spec = llama(num_layers=1, num_kv_heads=NUM_RANKS)
    plain, split = (build(spec, "cpu", torch.float64) for _ in range(2))
    for model in (plain, split):
        initialize(model, spec, 0)
    ParallelModel(split, spec, Strategy(tp=NUM_RANKS, precision="fp64"), mesh, Job(seq_length=5, global_batch_size=1))
    whole, local, axis = plain.layers["0"], split.layers["0"], mesh["tp"]
    hidden, inner = _random(1, 1, 5, spec.hidden_size), _random(2, 1, 5, spec.ffn_size)
    columns = _own_columns(inner, axis)
    return {
        "column layer": _compare(mesh, local.mlp.up, hidden, _own_columns(whole.mlp.up(hidden), axis)),
        "row layer": _compare(mesh, local.mlp.down, columns, whole.mlp.down(inner)),
        "mlp": _compare(mesh, local.mlp, hidden, whole.mlp(hidden), _input_gradient(whole.mlp, hidden)),
        "attention": _compare(
            mesh, local.attention, hidden, whole.attention(hidden), _input_gradient(whole.attention, hidden)
        ),
    }


def _own_columns(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return x.chunk(axis.size, dim=-1)[axis.index].contiguous()


def _input_gradient(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    module(leaf).square().sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def _compare(
    mesh: Mesh, module: torch.nn.Module, x: torch.Tensor, expected: torch.Tensor, gradient: torch.Tensor | None = None
) -> tuple[bool, int, int]:
    """(output and, where given, input gradient are as expected; all-reduces in forward; in backward)."""
    leaf = x.clone().requires_grad_()
    with mesh.ledger.phase("forward"):
        y, forward = _count(mesh, lambda: module(leaf))
    with mesh.ledger.phase("backward"):
        y.square().sum().backward()
    backward = mesh.ledger.take()
    assert leaf.grad is not None
    agrees = torch.allclose(y, expected, rtol=1e-12, atol=1e-12)
    agrees &= gradient is None or torch.allclose(leaf.grad, gradient, rtol=1e-12, atol=1e-12)
    return agrees, *(sum(row.calls for row in sent.rows.values()) for sent in (forward, backward))


def _gradients(rank: int, world: int) -> dict[str, Any]:
    """Whether our gradient is the mean of the ranks' own mean gradients, with equal and with unequal token counts."""
    plan = make_plan(llama(num_layers=1), dp=world)
    engine = parallelize(build(plan.model), plan, mesh=make_mesh(plan))
    reference = Reference(plan, OptimizerOptions(), 0)
    found: dict[str, Any] = {}
    for name, counts in (("equal", [SEQ_LENGTH] * world), ("unequal", [SEQ_LENGTH, *[2] * (world - 1)])):
        batches = [_one_batch(plan.model.vocab_size, count, seed) for seed, count in enumerate(counts)]
        engine.forward_backward(batches[rank])
        held = engine.parallel.states.gradients()
        ours = {place.name: gradient.view(place.box.sizes).clone() for place, gradient, _ in held}
        engine.parallel.zero_gradients()
        means = [_reference_gradients(reference, [batch]) for batch in batches]
        averaged = {key: sum(mean[key] for mean in means) / world for key in ours}
        found[f"{name} tokens: mean of means"] = _same(ours, averaged)
        found[f"{name} tokens: one process"] = _same(ours, _reference_gradients(reference, batches))
    return found


def _one_batch(vocab_size: int, num_counted: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (1, SEQ_LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, num_counted:] = IGNORE
    return [(tokens[:, :-1].contiguous(), labels)]


def _reference_gradients(reference: Reference, batches: StepBatches) -> dict[str, torch.Tensor]:
    reference.gradients(batches)
    return {name: p.grad.clone() for name, p in reference.parameters().items() if p.grad is not None}


def _same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(ours[name], theirs[name], rtol=1e-10, atol=1e-12) for name in ours)
