"""Short training runs on ranks, and what is needed to compare them: whole tensors, and one plain process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from meshwright.checkpoint.pieces import flat_pieces
from meshwright.core.axes import DP
from meshwright.core.batch import IGNORE, MicroBatch
from meshwright.core.model import ModelSpec
from meshwright.core.placement import Box, Placement
from meshwright.core.plan import Plan
from meshwright.models import init
from meshwright.models.build import build
from meshwright.run.engine import Engine, make_mesh, parallelize
from meshwright.train.data import PackedDataset
from meshwright.train.optimizer import OptimizerOptions
from tests.parallel.layouts import make_plan

SEED = 1
SHORT_PARITY = {"adamw": 2}
"""Steps of parity for layouts in numbers: each mutation of test_negative_controls shows within them. The second step
starts from updated weights and kept moments. `meshwright parity` runs more, and descends plainly first."""
SGD = OptimizerOptions(kind="sgd", clip_norm=None)
ADAMW = OptimizerOptions(clip_norm=0.5, eps=1e-4)

Boxes = list[tuple[str, tuple[int, ...], Box, torch.Tensor]]
"""(name, global shape, box, values) of what a rank holds."""


def run_plan(model: ModelSpec, batch: int = 8, **strategy: Any) -> Plan:
    """A plan whose global batch is `batch` sequences, whatever its degrees."""
    dp, micro = strategy.get("dp", 1), strategy.get("micro_batch_size", 1)
    return make_plan(model, **{"num_micro_batches": batch // dp // micro, **strategy})


def make_engine(plan: Plan | str, options: OptimizerOptions = ADAMW) -> Engine:
    """This rank's engine, freshly initialised."""
    plan = Plan.from_toml(plan) if isinstance(plan, str) else plan
    return parallelize(build(plan.model), plan, mesh=make_mesh(plan), options=options, seed=SEED)


def dataset(plan: Plan) -> PackedDataset:
    """Random tokens with uneven masks; the same samples for every layout of the same global batch."""
    generator = np.random.default_rng(5)
    tokens = generator.integers(plan.model.vocab_size, size=600)
    length, batch = plan.job.seq_length, plan.job.global_batch_size
    return PackedDataset(tokens, length, batch, seed=3, mask=generator.random(600) < np.linspace(0.2, 0.9, 600))


def own_batches(engine: Engine, data: PackedDataset, step: int) -> list[MicroBatch]:
    """This dp rank's micro-batches of a step."""
    split = engine.plan.strategy
    index = engine.mesh.coordinates[DP]
    return data.micro_batches(step, index, split.dp, split.num_micro_batches, split.micro_batch_size)


def train(engine: Engine, data: PackedDataset, steps: Iterable[int], rate: float = 1e-2) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    stats = [engine.step(own_batches(engine, data, step), rate) for step in steps]
    return [(float(s.loss), float(s.grad_norm)) for s in stats]


def weights(engine: Engine) -> Boxes:
    """What this rank holds of the parameters."""
    return _boxes(engine.parallel.states.weights())


def gradients(engine: Engine) -> Boxes:
    """What this rank holds of the summed gradients."""
    return _boxes(engine.parallel.states.gradients())


def _boxes(held: Iterable[tuple[Placement, torch.Tensor, slice]]) -> Boxes:
    return [
        (place.name, piece.shape, piece.box, piece.tensor.clone())
        for place, values, run in held
        for piece in flat_pieces(place.name, place.shape, place.box, run.start, values)
    ]


def assembled(by_rank: Sequence[Boxes]) -> dict[str, torch.Tensor]:
    """Name → whole tensor. Raises AssertionError where two ranks hold different values of an element."""
    by_name: dict[str, list[tuple[tuple[int, ...], Box, torch.Tensor]]] = defaultdict(list)
    for name, shape, box, values in (entry for boxes in by_rank for entry in boxes):
        by_name[name].append((shape, box, values))
    return {name: _join(name, pieces) for name, pieces in by_name.items()}


def _join(name: str, pieces: list[tuple[tuple[int, ...], Box, torch.Tensor]]) -> torch.Tensor:
    shape, _, values = pieces[0]
    whole = torch.full(shape, float("nan"), dtype=values.dtype)
    for _, box, values in pieces:
        whole[box.slices] = values
    assert not whole.isnan().any(), f"{name}: no rank holds a part of it"
    assert all(torch.equal(whole[box.slices], values) for _, box, values in pieces), f"{name}: replicas differ"
    return whole


def plain_model(model: ModelSpec, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """The same model on one process, with the weights that :func:`make_engine` starts from."""
    plain = build(model, "cpu", dtype)
    init.initialize(plain, model, SEED)
    return plain


def plain_gradients(model: ModelSpec, micro_batches: Iterable[MicroBatch]) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over all counted tokens, and its gradients, in plain PyTorch; each micro-batch by itself."""
    plain = plain_model(model)
    micro_batches = list(micro_batches)
    counted = sum(int((labels != IGNORE).sum()) for _, labels in micro_batches)
    total = sum(_loss_sum(plain, *micro_batch) for micro_batch in micro_batches) / counted
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in plain.named_parameters()}


def _loss_sum(plain: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(plain(tokens).flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def counted_batches(model: ModelSpec, counts: Sequence[int], length: int = 8) -> list[MicroBatch]:
    """One micro-batch of one sequence for each number of counted tokens."""
    generator = torch.Generator().manual_seed(7)
    batches = []
    for count in counts:
        tokens = torch.randint(model.vocab_size, (1, length + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[:, torch.randperm(length, generator=generator)[count:]] = IGNORE
        batches.append((tokens[:, :-1].contiguous(), labels))
    return batches


def assert_close(
    ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], factor: float = 1.0, tolerance: float = 1e-10
) -> None:
    """ours = factor · expected, by name, relative to the largest element of all."""
    assert ours.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values()) * factor
    errors = {name: float((ours[name] - factor * expected[name]).abs().max()) / largest for name in expected}
    wrong = {name: f"{error:.2g}, ×{_ratio(ours[name], expected[name])}" for name, error in errors.items()
             if not error <= tolerance}  # fmt: skip
    assert wrong == {}


def _ratio(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the largest element."""
    at = expected.abs().argmax()
    return float(ours.flatten()[at] / expected.flatten()[at])


def layouts_of(ranks: Callable[..., list[Any]], fn: Callable[..., Any], plans: Iterable[Plan], *args: Any) -> Iterator:
    """(plan, results by rank) of `fn(rank, world, plan as text, *args)` for each plan."""
    for plan in plans:
        yield plan, ranks(fn, plan.strategy.world_size, plan.to_toml(), *args, timeout_s=120)
