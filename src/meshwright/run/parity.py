"""Parity: a plan's layout on a tiny model beside one process, number by number.

Every rank runs the reference itself (the model is tiny) and compares the boxes that it holds: gradients
before clipping, gradient norm, loss, and weights after SGD and after clipped AdamW. SGD shows constant factors
that Adam hides. Inputs differ on every rank, and so do the numbers of counted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from meshwright.comm.mesh import Mesh
from meshwright.core.axes import DP, coordinates_of
from meshwright.core.job import Job
from meshwright.core.placement import Placement
from meshwright.core.plan import Plan
from meshwright.cost.memory import memory
from meshwright.cost.traffic import traffic
from meshwright.models import init
from meshwright.models.build import build
from meshwright.parallel.loss import IGNORE
from meshwright.parallel.pipeline import MicroBatch
from meshwright.parallel.states import DTYPES
from meshwright.run.engine import Engine
from meshwright.train.optimizer import OptimizerOptions

NUM_STEPS = 3
ACTIVATION_TOLERANCE = 0.05
"""Activations are counted by what autograd keeps; all other categories must be equal to the byte."""
LEARNING_RATE = {"sgd": 0.1, "adamw": 1e-2}
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
"""Largest difference, relative to the largest element of the reference."""
SMALL = 1e-2
"""A tensor whose elements are all smaller than this share of the largest gradient is judged by that share:
some gradients, like that of a key bias, are zero but for rounding."""
LATER_GRADIENTS = 10.0
"""Gradients after the first step may differ by so many tolerances: rounding has moved the weights apart."""
EPSILON = 1e-3
"""Of AdamW here: large enough that rounding in vanishing gradients isn't blown up to a full step."""

StepBatches = list[list[MicroBatch]]
"""[dp rank][micro-batch]."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first number that differs."""

    what: str
    """gradient, norm, loss, weight, traffic or memory."""
    where: str
    """The parameter, or what else it is, with optimizer and step."""
    error: float
    """Relative to the largest element of the reference."""
    ratio: float | None
    """ours / reference where that is one number for all elements; 2 or 1/4 point at a reduction."""

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f", ours / one process = {self.ratio:.6g}"
        return f"{self.what} of {self.where} differs: relative error {self.error:.3g}{ratio}"


def make_batches(job: Job, plan: Plan, seed: int, step: int) -> StepBatches:
    """Random tokens with uneven masks. The last dp rank has one micro-batch without a counted token; in step 1, all."""
    strategy = plan.strategy
    generator = torch.Generator().manual_seed(1000 * seed + step)
    shape = (strategy.micro_batch_size, job.seq_length + 1)
    batches: StepBatches = []
    for dp in range(strategy.dp):
        row = []
        for micro in range(strategy.num_micro_batches):
            tokens = torch.randint(plan.model.vocab_size, shape, generator=generator)
            labels = tokens[:, 1:].clone()
            keep = 0.4 + 0.5 * ((3 * dp + 5 * micro) % 7) / 7
            labels[torch.rand(labels.shape, generator=generator) > keep] = IGNORE
            if strategy.dp > 1 and dp == strategy.dp - 1 and (micro == 0 or step == 1):
                labels.fill_(IGNORE)
            row.append((tokens[:, :-1].contiguous(), labels))
        batches.append(row)
    return batches


class Reference:
    """The same model, batch and optimizer on one process, in plain PyTorch."""

    def __init__(self, plan: Plan, options: OptimizerOptions, seed: int) -> None:
        self.model = build(plan.model, "cpu", DTYPES[plan.strategy.recipe.parameter])
        init.initialize(self.model, plan.model, seed)
        self.options = options
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        lr = LEARNING_RATE[options.kind]
        self.optimizer: torch.optim.Optimizer
        if options.kind == "sgd":
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        else:
            self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=options.betas, eps=options.eps)

    def gradients(self, batches: StepBatches) -> float:
        """Gradients of the mean over all counted tokens, in one forward and backward. Returns that mean."""
        self.optimizer.zero_grad(set_to_none=False)
        everything = [micro for row in batches for micro in row]
        tokens, labels = (torch.cat(tensors) for tensors in zip(*everything, strict=True))
        logits = self.model(tokens).flatten(0, -2)
        loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")
        mean = loss / (labels != IGNORE).sum().clamp(min=1)
        mean.backward()
        return float(mean.detach())

    def update(self) -> float:
        """Clip and step. Returns the norm before clipping."""
        limit = self.options.clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        return float(norm)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Logical name → parameter."""
        return dict(self.model.named_parameters())


def find_mismatch(plan: Plan, mesh: Mesh, seed: int = 0) -> Mismatch | None:
    """Run the plan's layout and the reference side by side. Collective; returns this rank's first mismatch."""
    found: list[Mismatch] = []
    for kind, clip in (("sgd", None), ("adamw", 0.5)):
        options = OptimizerOptions(kind=kind, clip_norm=clip, eps=EPSILON)
        engine = Engine(build(plan.model), plan, mesh, options)
        engine.initialize(seed)
        found += _compare_run(engine, Reference(plan, options, seed), seed)  # to the end: no rank leaves others waiting
    return found[0] if found else None


def _compare_run(engine: Engine, reference: Reference, seed: int) -> Iterator[Mismatch]:
    plan, kind = engine.plan, reference.options.kind
    tight = TOLERANCE[plan.strategy.precision]
    for step in range(NUM_STEPS):
        at, loose = f"{kind} step {step}", tight * (LATER_GRADIENTS if step else 1.0)
        batches = make_batches(plan.job, plan, seed, step)
        with engine.parallel.census() as census:
            loss = engine.forward_backward(batches[engine.mesh.coordinates[DP]])
        expected_loss = reference.gradients(batches)
        yield from _compare_boxes(engine, _gradient_runs(engine), lambda p: p.grad, reference, f"gradient|{at}", loose)
        stats = engine.update(loss, LEARNING_RATE[kind])
        expected_norm = reference.update()
        yield from _compare_number(engine, float(stats.loss), expected_loss, f"loss|{at}")
        yield from _compare_number(engine, float(stats.grad_norm), expected_norm, f"norm|{at}")
        yield from _compare_boxes(engine, _weights(engine), lambda p: p.detach(), reference, f"weight|{at}", tight)
        yield from _compare_traffic(engine, at)
        yield from _compare_memory(engine, census.peak_bytes, at)


def _gradient_runs(engine: Engine) -> Iterator[tuple[Placement, torch.Tensor, slice]]:
    """(placement, flat gradient, elements of it that are final on this rank)."""
    dp, zero = engine.mesh[DP], engine.plan.strategy.zero
    for bucket, slot in engine.parallel.states.slots():
        low, high = bucket.layout.shard(dp.size, dp.index) if zero else (0, bucket.layout.numel)
        run = slice(max(low - slot.start, 0), max(min(high, slot.stop) - slot.start, 0))
        yield slot.placement, bucket.gradients[slot.start : slot.stop], run


def _weights(engine: Engine) -> Iterator[tuple[Placement, torch.Tensor, slice]]:
    for bucket, slot in engine.parallel.states.slots():
        yield slot.placement, bucket.parameters[slot.start : slot.stop], slice(None)


def _compare_boxes(
    engine: Engine,
    runs: Iterator[tuple[Placement, torch.Tensor, slice]],
    read: Callable[[torch.nn.Parameter], torch.Tensor],
    reference: Reference,
    label: str,
    tolerance: float,
) -> Iterator[Mismatch]:
    what, at = label.split("|")
    parameters = reference.parameters()
    largest = max(float(read(p).abs().max()) for p in parameters.values())
    order = {param.name: i for i, param in enumerate(engine.plan.model.parameters())}
    for placement, ours, run in sorted(runs, key=lambda item: order[item[0].name]):
        whole = read(parameters[placement.name])
        expected = whole[placement.box.slices].flatten()[run]
        scale = max(float(whole.abs().max()), SMALL * largest, 1e-30)
        error = float((ours[run] - expected).abs().max()) / scale if expected.numel() else 0.0
        if not error <= tolerance:
            yield Mismatch(what, f"`{placement.name}` ({at})", error, _ratio(ours[run], expected))


def _ratio(ours: torch.Tensor, expected: torch.Tensor) -> float | None:
    """ours / expected where all large elements agree on it."""
    large = expected.abs() > 0.1 * expected.abs().max()
    ratios = ours[large] / expected[large]
    if not ratios.numel() or float(ratios.max() - ratios.min()) > 1e-3 * float(ratios.abs().max()):
        return None
    return float(ratios.median())


def _compare_number(engine: Engine, ours: float, expected: float, label: str) -> Iterator[Mismatch]:
    what, at = label.split("|")
    error = abs(ours - expected) / max(abs(expected), 1e-30)
    if not error <= TOLERANCE[engine.plan.strategy.precision]:
        yield Mismatch(what, at, error, ours / expected if expected else None)


def _compare_traffic(engine: Engine, at: str) -> Iterator[Mismatch]:
    plan, mesh = engine.plan, engine.mesh
    expected = traffic(plan.model, plan.job, plan.strategy, coordinates_of(mesh.rank, plan.strategy.sizes))
    for key in sorted({*expected.rows, *engine.last_traffic.rows}):
        ours, theirs = engine.last_traffic.rows.get(key), expected.rows.get(key)
        if ours != theirs:
            sent = ours.wire_bytes if ours else 0
            forecast = theirs.wire_bytes if theirs else 0
            where = f"{' '.join(key)} ({at}): {sent} bytes sent, {forecast} forecast"
            yield Mismatch(
                "traffic", where, abs(sent - forecast) / max(forecast, 1), sent / forecast if forecast else None
            )


def _compare_memory(engine: Engine, activations_bytes: int, at: str) -> Iterator[Mismatch]:
    plan = engine.plan
    job = plan.job.model_copy(update={"optimizer": engine.optimizer.options.kind})
    forecast = memory(plan.model, job, plan.strategy, engine.mesh.coordinates).to_dict()
    counted = engine.memory(activations_bytes).to_dict()
    for category, expected in forecast.items():
        allowed = ACTIVATION_TOLERANCE if category == "activations_bytes" else 0.0
        error = abs(counted[category] - expected) / max(expected, 1)
        if error > allowed:
            where = f"{category} ({at}): {counted[category]} counted, {expected} forecast"
            yield Mismatch("memory", where, error, counted[category] / expected if expected else None)
