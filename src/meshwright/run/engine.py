"""Engine: what a user's own loop is written on. `parallelize` a plain model, then step, evaluate, save, load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.checkpoint import store
from meshwright.checkpoint.pieces import Piece, bucket_pieces
from meshwright.comm.ledger import Ledger
from meshwright.comm.mesh import Mesh, start
from meshwright.core.batch import MicroBatch
from meshwright.core.errors import InputError
from meshwright.core.measures import MemoryBreakdown, Traffic
from meshwright.core.placement import kv_replicas
from meshwright.core.plan import Plan
from meshwright.models import init
from meshwright.models.hf import HFCheckpoint
from meshwright.parallel.apply import ParallelModel
from meshwright.train.optimizer import FlatOptimizer, OptimizerOptions


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step, the same on every rank. Tensors stay on the device; read them when you need them."""

    loss: torch.Tensor
    """Mean loss per counted token of the whole global batch."""
    grad_norm: torch.Tensor
    """Global norm of the gradient before clipping, without the loss scale."""
    skipped: torch.Tensor
    """Whether a gradient was not finite, so that no rank changed anything (bool)."""
    loss_scale: torch.Tensor
    """What the loss of this step was multiplied by; 1 but for fp16."""


class Engine:
    """A model under a plan, with its optimizer.

    Built by :func:`parallelize`. All methods are collective: every rank calls them in the same order.
    """

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, options: OptimizerOptions) -> None:
        self.plan = plan
        self.mesh = mesh
        self.parallel = ParallelModel(model, plan.model, plan.strategy, mesh)
        self.optimizer = FlatOptimizer(self.parallel.states, mesh, options)
        self.last_traffic = Traffic()
        """What this rank sent in the last step."""
        self.last_waits_s: dict[str, float] = {}
        """Phase → seconds of the last step that this rank stood still for communication."""

    def initialize(self, seed: int) -> None:
        """Fresh weights, the same whatever the layout."""
        params = {p.name: p for p in self.plan.model.parameters()}
        self.parallel.states.fill(lambda at: init.initial_box(params[at.name], self.plan.model, at.box, seed))
        self.optimizer.sync_master()

    def load_pretrained(self, folder: Path | str) -> None:
        """Weights of a Hugging Face checkpoint; each rank reads its own boxes only. Raises CheckpointError."""
        params = {p.name: p for p in self.plan.model.parameters()}
        with HFCheckpoint(folder, self.plan.model) as checkpoint:
            self.parallel.states.fill(lambda at: checkpoint.read(params[at.name], at.box))
        self.optimizer.sync_master()

    def count_tokens(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Counted tokens of these micro-batches over all dp ranks."""
        return self.parallel.count_tokens(micro_batches)

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        num_tokens: torch.Tensor | None = None,
        reduce: bool = True,
    ) -> torch.Tensor:
        """See :meth:`ParallelModel.forward_backward`."""
        scale = self.optimizer.loss_scale.scale
        return self.parallel.forward_backward(micro_batches, num_tokens=num_tokens, reduce=reduce, loss_scale=scale)

    def update(self, loss: torch.Tensor, learning_rate: float) -> StepStats:
        """Norm, clip, optimizer step, parameters gathered, gradients cleared.

        Args:
            loss: what :meth:`forward_backward` returned (summed, if it was called several times).
        """
        norm, total = self.optimizer.norm_and_loss(self.parallel.own_loss(loss))
        scale = self.optimizer.loss_scale.scale.clone()
        skipped = self.optimizer.update(learning_rate, norm)
        self.parallel.gather_parameters()
        self.parallel.zero_gradients()
        self.last_traffic, self.last_waits_s = self.mesh.ledger.take(), self.mesh.ledger.take_waits()
        return StepStats(total, norm, skipped, scale)

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepStats:
        """One whole training step on this dp rank's micro-batches (the same on all its tp and pp ranks)."""
        return self.update(self.forward_backward(micro_batches), learning_rate)

    def evaluate(self, rounds: Iterable[Sequence[MicroBatch]]) -> float:
        """Mean loss per counted token over all rounds, without gradients; every rank returns it.

        Raises:
            InputError: no round at all.
        """
        sums = [self.parallel.evaluate(micro_batches) for micro_batches in rounds]
        if not sums:
            raise InputError("evaluate was given no micro-batches; give at least one round")
        self.mesh.ledger.take()
        self.mesh.ledger.take_waits()
        return float(sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums).clamp(min=1))

    def memory(self, activations_bytes: int) -> MemoryBreakdown:
        """What this rank holds, counted; activations as a census found them."""
        states = self.parallel.states
        return MemoryBreakdown(
            parameters_bytes=states.parameter_bytes,
            gradients_bytes=states.gradient_bytes,
            optimizer_bytes=self.optimizer.state_bytes,
            activations_bytes=activations_bytes,
            buffers_bytes=sum(t.numel() * t.element_size() for t in self.parallel.constants()),
            working_bytes=states.working_bytes,
        )

    def save(
        self, folder: Path | str, step: int, extra: dict[str, Any] | None = None, *, keep: int | None = None
    ) -> None:
        """Write a checkpoint that any other layout of the same model can load."""
        scale = self.optimizer.loss_scale
        content = {"optimizer_step": int(self.optimizer.step_count), **(extra or {})}
        if scale.is_dynamic:
            content["loss_scale"] = scale.state()
        store.save(folder, step, self._pieces(whole=False), content, keep=keep)

    def load(self, folder: Path | str, step: int | None = None) -> dict[str, Any]:
        """Read the newest (or the given) checkpoint, saved under any layout. Returns its extra values."""
        extra = store.load(folder, self._pieces(whole=True), step)
        self.optimizer.step_count.fill_(extra["optimizer_step"])
        if self.optimizer.loss_scale.is_dynamic and "loss_scale" in extra:
            self.optimizer.loss_scale.restore(extra["loss_scale"])
        self.parallel.zero_gradients()
        return extra

    def _pieces(self, *, whole: bool) -> list[Piece]:
        """This rank's boxes. Not `whole`: each logical element on exactly one rank, for saving; `whole`: all that it
        keeps, for loading."""
        pieces: list[Piece] = []
        for shard in self.optimizer.shards:
            bucket = shard.bucket
            held = [("parameters", bucket.own_parameters), *shard.states()]
            run = bucket.own if whole else bucket.counted
            if whole and self.parallel.states.keeps_whole_parameters:
                pieces += bucket_pieces("parameters", bucket.layout, 0, bucket.parameters, owned=False)
                held = held[1:]
            for kind, memory in held:
                part = memory[run.start - bucket.own.start : run.stop - bucket.own.start]
                pieces += bucket_pieces(kind, bucket.layout, run.start, part, owned=not whole)
        return pieces


def make_mesh(plan: Plan) -> Mesh:
    """This rank's mesh under `plan`, on the process group that torchrun's environment describes."""
    start("cpu" if plan.cluster.backend == "gloo" else "cuda")
    strategy = plan.strategy
    replicas = kv_replicas(plan.model, strategy.tp)
    return Mesh.create(strategy.sizes, kv_replicas=replicas, dp_local=strategy.dp_local, ledger=Ledger())


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    mesh: Mesh | None = None,
    options: OptimizerOptions | None = None,
    seed: int = 0,
) -> Engine:
    """Split a plain model over the ranks of `plan`.

    Args:
        model: built by `meshwright.build(plan.model)`. With weights on every rank they are taken over; on the meta
            device (the default) fresh ones are drawn from `seed`, the same whatever the layout.
        plan: what to run.
        mesh: this rank's mesh; made from the environment if None.
        options: the optimizer's settings.

    Raises:
        InputError: the number of ranks is not the plan's, or the model does not fit its spec.
    """
    fresh = any(p.is_meta for p in model.parameters())
    options = options or OptimizerOptions(kind=plan.job.optimizer)
    engine = Engine(model, plan, mesh or make_mesh(plan), options)
    if fresh:
        engine.initialize(seed)
    return engine
