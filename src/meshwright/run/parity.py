"""Parity: a plan's layout on a tiny model beside one process, number by number.

Rank 0 runs the reference (the model is tiny), the others hear what it found, and each rank compares the boxes
that it holds: gradients before clipping, gradient norm, loss, and weights after SGD and after clipped AdamW. SGD
shows constant factors that Adam hides. Inputs differ on every rank, and so do the numbers of counted tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F

from meshwright.comm.collectives import broadcast
from meshwright.comm.mesh import Mesh
from meshwright.core.axes import DP, WORLD
from meshwright.core.batch import IGNORE, MicroBatch
from meshwright.core.job import Job, OptimizerKind
from meshwright.core.model import ModelSpec
from meshwright.core.placement import Placement
from meshwright.core.plan import Plan
from meshwright.core.record import RankRecord
from meshwright.models import init
from meshwright.models.build import build
from meshwright.models.decoder import Decoder
from meshwright.parallel import dropout
from meshwright.parallel.dropout import Masks
from meshwright.parallel.layers import layers_of, part_of
from meshwright.parallel.routers import Routers
from meshwright.parallel.states import DTYPES
from meshwright.rehearse.verify import rank_differences
from meshwright.run.engine import Engine
from meshwright.train.optimizer import OptimizerOptions

NUM_STEPS: Mapping[OptimizerKind, int] = {"sgd": 2, "adamw": 3}
"""SGD keeps nothing but the weights from a step to the next; AdamW's moments have been used twice after three."""
LEARNING_RATE = {"sgd": 0.1, "adamw": 1e-2}
CLIP_NORM = {"sgd": None, "adamw": 0.5}
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
"""Largest difference, relative to the largest element of the reference."""
SMALL = 1e-2
"""A tensor whose elements are all smaller than this share of the largest gradient is judged by that share:
some gradients, like that of a key bias, are zero but for rounding."""
LATER_GRADIENTS = {"fp64": 1.0, "fp32": 10.0}
"""So many tolerances may gradients after the first step differ: in fp32 rounding has moved the weights apart.
The first step's gradients, and all losses, norms and weights, may not."""
EPSILON = 1e-3
"""Of AdamW here: large enough that rounding in vanishing gradients isn't blown up to a full step."""

NUM_SCALARS = 3
"""Of a step: loss, norm and the routers' loss."""

StepBatches = list[list[MicroBatch]]
"""[dp rank][micro-batch]."""
Tensors = Mapping[str, torch.Tensor]
"""By logical name."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first number that differs."""

    what: str
    """gradient, norm, loss, router-loss, weight, traffic or memory."""
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
        rates = plan.job.dropout, plan.job.attention_dropout
        self.masks = Masks(rates[0], seed, attention_rate=rates[1], has_noise=plan.model.has_noise)
        dropout.apply_dense(self.model, self.masks)
        self.options, self.job = options, plan.job
        self.routers = _plain_routers(self.model, plan.model) if plan.model.num_experts else None
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
        with self._routed(tokens), self.masks.active([(len(tokens), torch.arange(tokens.shape[1]))], 0):
            logits = self.model(tokens).flatten(0, -2)
            loss = _plain_loss(logits, labels.flatten(), self.job)
            mean = loss / (labels != IGNORE).sum().clamp(min=1)
            mean.backward()
        return float(mean.detach())

    def _routed(self, tokens: torch.Tensor) -> AbstractContextManager[None]:
        """Around forward and backward of a step: losses of the routers count."""
        if self.routers is None:
            return nullcontext()
        self.routers.start_step()
        totals = torch.tensor([tokens.numel(), len(tokens)], dtype=torch.float64)
        return self.routers.training(totals, 1.0)

    def update(self) -> float:
        """Clip and step. Returns the norm before clipping."""
        limit = self.options.clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        if self.routers is not None:
            self.routers.update_biases(torch.zeros((), dtype=torch.bool))
        self.masks.step += 1
        return float(norm)

    def router_loss(self) -> float:
        """Of the routers in the last step; 0 for a dense model."""
        return 0.0 if self.routers is None else float(self.routers.loss())

    def parameters(self) -> dict[str, torch.Tensor]:
        """Logical name → parameter."""
        return dict(self.model.named_parameters())


def _plain_loss(logits: torch.Tensor, labels: torch.Tensor, job: Job) -> torch.Tensor:
    """Sum over counted tokens, of logits [T, V]."""
    smoothing = job.smoothing(logits.shape[-1])
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
    if job.z_loss:
        loss = loss + job.z_loss * logits[labels != IGNORE].logsumexp(-1).square().sum()
    return loss


def _plain_routers(model: Decoder, spec: ModelSpec) -> Routers:
    layers = {
        int(number): part_of(layer, "mlp.router")
        for number, layer in layers_of(model).items()
        if spec.is_sparse(int(number))
    }
    return Routers(layers, spec, torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """What one process found in a step."""

    loss: float
    norm: float
    """Before clipping."""
    router_loss: float
    gradients: Tensors
    weights: Tensors
    """After the update."""


def reference_steps(
    plan: Plan, options: OptimizerOptions, mesh: Mesh, seed: int, num_steps: int
) -> list[ReferenceStep]:
    """The steps of :class:`Reference`, run on rank 0 and sent to all. Collective; the ledger is empty afterwards."""
    shapes = {param.name: param.shape for param in plan.model.parameters()}
    dtype = DTYPES[plan.strategy.recipe.parameter]
    rows = torch.empty(num_steps, NUM_SCALARS + 2 * sum(map(prod, shapes.values())), dtype=dtype, device=mesh.device)
    if mesh.rank == 0:
        reference = Reference(plan, options, seed)
        for step in range(num_steps):
            rows[step] = _run_reference(reference, make_batches(plan.job, plan, seed, step), shapes)
    broadcast(rows, mesh[WORLD], 0)
    mesh.ledger.take()
    return [_read_row(row, shapes) for row in rows]


def _run_reference(reference: Reference, batches: StepBatches, names: Iterable[str]) -> torch.Tensor:
    """One step as a row of numbers: loss, norm, gradients, weights."""
    loss = reference.gradients(batches)
    parameters = reference.parameters()
    grads = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    gradients = torch.cat([grads[name].flatten() for name in names])  # a copy: clipping is in place
    norm = reference.update()
    weights = torch.cat([parameters[name].detach().flatten() for name in names])
    return torch.cat([weights.new_tensor([loss, norm, reference.router_loss()]), gradients, weights])


def _read_row(row: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> ReferenceStep:
    sizes = [prod(shape) for shape in shapes.values()]
    numbers, *halves = row[:NUM_SCALARS].tolist(), *row[NUM_SCALARS:].chunk(2)
    gradients, weights = (
        {name: piece.view(shapes[name]) for name, piece in zip(shapes, torch.split(half, sizes), strict=True)}
        for half in halves
    )
    loss, norm, router_loss = numbers
    return ReferenceStep(loss, norm, router_loss, gradients, weights)


def find_mismatch(
    plan: Plan, mesh: Mesh, seed: int = 0, num_steps: Mapping[OptimizerKind, int] = NUM_STEPS
) -> Mismatch | None:
    """Run the plan's layout and the reference side by side. Collective; returns this rank's first mismatch.

    Args:
        plan: a layout of a model that one process can train too.
        mesh: this rank's place in it.
        seed: of weights and batches.
        num_steps: optimizer → steps from fresh weights with it; what is left out is not run.
    """
    found: list[Mismatch] = []
    for kind, steps in num_steps.items():
        options = OptimizerOptions(kind=kind, clip_norm=CLIP_NORM[kind], eps=EPSILON)
        engine = Engine(build(plan.model), plan, mesh, options)
        engine.initialize(seed)
        expected = reference_steps(plan, options, mesh, seed, steps)
        found += _compare_run(engine, expected, seed)  # to the end: no rank leaves others waiting
        engine.close()
    return found[0] if found else None


def _compare_run(engine: Engine, expected: Iterable[ReferenceStep], seed: int) -> Iterator[Mismatch]:
    plan, kind = engine.plan, engine.optimizer.options.kind
    tight = TOLERANCE[plan.strategy.precision]
    loose = tight * LATER_GRADIENTS[plan.strategy.precision]
    for step, reference in enumerate(expected):
        at, allowed = f"{kind} step {step}", loose if step else tight
        batches = make_batches(plan.job, plan, seed, step)
        with engine.parallel.census() as census:
            loss = engine.forward_backward(batches[engine.mesh.coordinates[DP]])
        gradients = _compare_boxes(engine, engine.parallel.states.gradients(), reference.gradients, allowed)
        yield from (Mismatch("gradient", f"{name} ({at})", error, ratio) for name, error, ratio in gradients)
        stats = engine.update(loss, LEARNING_RATE[kind])
        pairs = [("loss", stats.loss, reference.loss), ("norm", stats.grad_norm, reference.norm)]
        pairs += [("router-loss", stats.router_loss, reference.router_loss)] if stats.router_loss is not None else []
        for what, ours, theirs in pairs:
            error = abs(float(ours) - theirs) / max(abs(theirs), 1e-30)
            if not error <= tight:
                yield Mismatch(what, at, error, float(ours) / theirs if theirs else None)
        weights = _compare_boxes(engine, engine.parallel.states.weights(), reference.weights, tight)
        yield from (Mismatch("weight", f"{name} ({at})", error, ratio) for name, error, ratio in weights)
        yield from _compare_with_forecast(engine, census.peak_bytes, at)


def _compare_boxes(
    engine: Engine,
    runs: Iterator[tuple[Placement, torch.Tensor, slice]],
    reference: Tensors,
    tolerance: float,
) -> Iterator[tuple[str, float, float | None]]:
    """(parameter, relative error, ratio) of every box that differs, in forward order."""
    largest = max(float(whole.abs().max()) for whole in reference.values())
    order = {param.name: i for i, param in enumerate(engine.plan.model.parameters())}
    for placement, ours, run in sorted(runs, key=lambda item: order[item[0].name]):
        whole = reference[placement.name]
        expected = whole[placement.box.slices].flatten()[run]
        scale = max(float(whole.abs().max()), SMALL * largest, 1e-30)
        error = float((ours - expected).abs().max()) / scale if expected.numel() else 0.0
        if not error <= tolerance:
            yield f"`{placement.name}`", error, _ratio(ours, expected)


def _ratio(ours: torch.Tensor, expected: torch.Tensor) -> float | None:
    """ours / expected where all large elements agree on it."""
    large = expected.abs() > 0.1 * expected.abs().max()
    ratios = ours[large] / expected[large]
    if not ratios.numel() or float(ratios.max() - ratios.min()) > 1e-3 * float(ratios.abs().max()):
        return None
    return float(ratios.median())


def _compare_with_forecast(engine: Engine, activations_bytes: int, at: str) -> Iterator[Mismatch]:
    job = engine.plan.job.model_copy(update={"optimizer": engine.optimizer.options.kind})
    plan = engine.plan.model_copy(update={"job": job})
    memory = engine.memory(activations_bytes)
    record = RankRecord(engine.mesh.rank, engine.mesh.coordinates, memory, engine.last_traffic)
    for difference in rank_differences(plan, record):
        ours, forecast = difference.measured, difference.forecast
        where = f"{difference.what} ({at}): {ours:,} {difference.unit} measured, {forecast:,} forecast"
        ratio = ours / forecast if forecast else None
        yield Mismatch(difference.witness, where, abs(ours - forecast) / max(forecast, 1), ratio)
