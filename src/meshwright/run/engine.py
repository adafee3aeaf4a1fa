"""Engine: what a user's own loop is written on. `parallelize` a plain model, then step, evaluate, save, load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.checkpoint import store
from meshwright.checkpoint.pieces import Piece, bucket_pieces
from meshwright.comm.ledger import Ledger
from meshwright.comm.mesh import Mesh, SubAxes, start
from meshwright.core.axes import EP
from meshwright.core.batch import MicroBatch
from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.measures import MemoryBreakdown, Traffic
from meshwright.core.model import ModelSpec
from meshwright.core.offload import TierTraffic
from meshwright.core.placement import Box, kv_group
from meshwright.core.plan import Plan
from meshwright.models import init
from meshwright.models.hf import HFCheckpoint
from meshwright.parallel.apply import ParallelModel
from meshwright.parallel.asynchronous import EndlessPipeline
from meshwright.parallel.routers import RouterReport
from meshwright.run.batches import check_micro_batches, check_planned
from meshwright.train.optimizer import FlatOptimizer, OptimizerOptions


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step, the same on every rank. Tensors stay on the device; read them when you need them."""

    loss: torch.Tensor
    """Mean loss per counted token of the whole global batch, without losses of routers."""
    grad_norm: torch.Tensor
    """Global norm of the gradient before clipping, without the loss scale. Under an asynchronous schedule, of what each
    stage has last updated with by the end of the step; 0 before that."""
    skipped: torch.Tensor
    """Whether a gradient was not finite, so that no rank changed anything (bool). Never under an asynchronous schedule,
    whose stages update before they could know of each other."""
    loss_scale: torch.Tensor
    """What the loss of this step was multiplied by; 1 but for fp16."""
    router_loss: torch.Tensor | None = None
    """Of a mixture of experts: the sum of all layers' losses, with their coefficients."""


class Engine:
    """A model under a plan, with its optimizer.

    Built by :func:`parallelize`. All methods are collective: every rank calls them in the same order.
    """

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, options: OptimizerOptions) -> None:
        _check_model(model, plan.model)
        check_options(plan, options)
        self.plan = plan
        self.mesh = mesh
        job = plan.job.model_copy(update={"optimizer": options.kind})
        self.parallel = ParallelModel(model, plan.model, plan.strategy, mesh, job)
        self.optimizer = FlatOptimizer(self.parallel.states, mesh, options)
        self.last_traffic = Traffic()
        """What this rank sent in the last step."""
        self._last_kept: TierTraffic | None = None
        """What activations passed to the host and back in it, where they are offloaded."""
        self.last_waits_s: dict[str, float] = {}
        """Phase → seconds of the last step that this rank stood still for communication."""
        self.last_exchange_s = 0.0
        """Seconds of the last step that this rank stood still for rows of experts on other ranks."""
        self.last_routing: RouterReport | None = None
        """What the routers of all layers did in the last step, over all ranks; None of a dense model."""
        self._last_square = torch.zeros((), dtype=torch.float64, device=mesh.device)
        """Of an asynchronous schedule: this rank's part of the squared norm at its last update in the step."""

    @property
    def last_tier_traffic(self) -> dict[str, TierTraffic]:
        """Tier → what this rank read from it and wrote to it in the last step, where anything is offloaded."""
        found = dict(self.optimizer.tier_traffic)
        if (kept := self._last_kept) is not None:
            found["cpu"] = TierTraffic({**found.get("cpu", kept).rows, **kept.rows})
        return found

    def initialize(self, seed: int) -> None:
        """Fresh weights, the same whatever the layout."""
        self._check_empty("initialize")
        params = {p.name: p for p in self.plan.model.parameters()}
        self.parallel.masks.seed = seed
        self.parallel.states.fill(lambda at: init.initial_box(params[at.name], self.plan.model, at.box, seed))
        for bias in self.parallel.router_biases().values():
            bias.zero_()
        self.optimizer.sync_master()

    def load_pretrained(self, folder: Path | str) -> None:
        """Weights of a Hugging Face checkpoint; each rank reads its own boxes only. Raises CheckpointError."""
        self._check_empty("load_pretrained")
        params = {p.name: p for p in self.plan.model.parameters()}
        with HFCheckpoint(folder, self.plan.model) as checkpoint:
            self.parallel.states.fill(lambda at: checkpoint.read(params[at.name], at.box))
            biases = {param.name: param for param in self.plan.model.router_biases()}
            for name, bias in self.parallel.router_biases().items():
                bias.copy_(checkpoint.read(biases[name], Box.whole(bias.shape)))
        self.optimizer.sync_master()

    def _check(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor | None:
        return check_micro_batches(micro_batches, self.plan.model, self.plan.strategy.token_parts)

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
        """See :meth:`ParallelModel.forward_backward`.

        Any number of micro-batches of any size and length will do, not only the plan's: the loss is the mean over all
        counted tokens, and every layout computes it exactly. Forecasts hold for the plan's alone.

        Raises:
            InputError: tokens, labels or shapes that the model cannot be trained on.
        """
        wrong = self._check(micro_batches)
        scale = self.optimizer.loss_scale.scale
        loss = self.parallel.forward_backward(micro_batches, num_tokens=num_tokens, reduce=reduce, loss_scale=scale)
        return loss if wrong is None else loss.masked_fill(wrong, nan)

    def update(self, loss: torch.Tensor, learning_rate: float) -> StepStats:
        """Norm, clip, optimizer step, parameters gathered, gradients cleared.

        Args:
            loss: what :meth:`forward_backward` returned (summed, if it was called several times).
            learning_rate: at least 0.

        A step whose loss or gradient norm is not finite changes nothing.

        Raises:
            InputError: a learning rate that is none.
        """
        _check_rate(learning_rate)
        routers, router_loss = self.parallel.routers, None
        if routers is None:
            norm, total = self.optimizer.norm_and_loss(self.parallel.own_loss(loss))
        else:
            both = self.parallel.own_loss(torch.stack([loss, routers.loss()]))
            norm, (total, router_loss) = self.optimizer.norm_and_loss(both)
        norm = norm + 0 * total
        scale = self.optimizer.loss_scale.scale.clone()
        skipped = self.optimizer.update(learning_rate, norm)
        if routers is not None:
            routers.update_biases(skipped)
            self.last_routing = routers.whole_report()
        self.parallel.gather_parameters()
        self.parallel.zero_gradients()
        self.parallel.masks.step += 1
        self._count()
        return StepStats(total, norm, skipped, scale, router_loss)

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepStats:
        """One whole training step, exactly as planned, on this dp rank's micro-batches.

        Under an asynchronous schedule it leaves some of them under way, for the next step or :meth:`finish`.

        Args:
            micro_batches: the plan's `num_micro_batches`, each (tokens, labels) [micro_batch_size, seq_length]; the
                same on all tp and pp ranks of a dp rank.
            learning_rate: at least 0.

        Raises:
            InputError: other micro-batches than the plan's, or values that cannot be trained on.
        """
        check_planned(micro_batches, self.plan)
        if self.parallel.endless is not None:
            return self._step_on(micro_batches, learning_rate)
        return self.update(self.forward_backward(micro_batches), learning_rate)

    def _step_on(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepStats:
        """A step of an asynchronous schedule."""
        _check_rate(learning_rate)
        wrong = self._check(micro_batches)
        loss = self.parallel.step(micro_batches, learning_rate, self._update_by_itself)
        loss = loss if wrong is None else loss.masked_fill(wrong, nan)
        norm, total = self.optimizer.norm_and_loss(self.parallel.own_loss(loss), self._last_square)
        self._count()
        return StepStats(total, norm, torch.zeros_like(norm, dtype=torch.bool), torch.ones_like(norm))

    def _count(self) -> None:
        """What passed in the step that has ended."""
        self.last_exchange_s = self.mesh.ledger.waited_on_s.get(EP, 0.0)
        self.last_traffic, self.last_waits_s = self.mesh.ledger.take(), self.mesh.ledger.take_waits()
        if (kept := self.parallel.activations) is not None:
            self._last_kept = kept.take()

    def _update_by_itself(self, learning_rate: float, is_last: bool) -> None:
        if is_last:
            self._last_square = self.optimizer.square()
        self.optimizer.update_by_itself(learning_rate)

    def finish(self) -> None:
        """After the last step: take over an update that is still to be. Only where updates are delayed there is any.

        Of an asynchronous schedule: run what is under way to its end. :meth:`evaluate`, :meth:`save` and :meth:`load`
        need it; the next step then begins with an empty pipeline.

        Raises:
            InputError: what was under way had gradients that are not finite.
        """
        if (endless := self.parallel.endless) is not None:
            if not endless.is_empty:
                self._drain(endless)
            return
        self.optimizer.finish()
        if self.plan.strategy.offload.delayed:
            self.parallel.gather_parameters()

    def _drain(self, endless: EndlessPipeline) -> None:
        endless.finish(self._update_by_itself)
        norm, _ = self.optimizer.norm_and_loss(torch.zeros_like(self._last_square), self._last_square)
        self._last_square.zero_()
        self.mesh.ledger.take()
        self.mesh.ledger.take_waits()
        if not bool(norm.isfinite()):
            raise InputError(
                f"gradient norm {float(norm):g} in what was under way: weights were changed by it; lower the learning "
                "rate, or look at the data, then go on from the last checkpoint"
            )

    def _check_empty(self, what: str) -> None:
        """Raises InputError while micro-batches are under way, whose updates are still to be."""
        if self.parallel.endless is not None and not self.parallel.endless.is_empty:
            raise InputError(f"{what}: micro-batches are under way, whose updates are still to be; call finish() first")

    def close(self) -> None:
        """Give up what is offloaded, and with it the engine; a process that ends needs not call it."""
        self.optimizer.close()
        for kept in (self.parallel.states.store, self.parallel.activations):
            if kept is not None:
                kept.close()

    def evaluate(self, rounds: Iterable[Sequence[MicroBatch]]) -> float:
        """Mean loss per counted token over all rounds, without gradients; every rank returns it.

        Raises:
            InputError: no round at all, or tokens, labels or shapes that the model cannot take.
        """
        self._check_empty("evaluate")
        sums = [self._evaluate(micro_batches) for micro_batches in rounds]
        if not sums:
            raise InputError("evaluate was given no micro-batches; give at least one round")
        self.mesh.ledger.take()
        self.mesh.ledger.take_waits()
        self.optimizer.forget_traffic()
        loss, tokens = (torch.stack(each).sum() for each in zip(*sums, strict=True))
        return float(loss / tokens.clamp(min=1))

    def _evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[torch.Tensor, torch.Tensor]:
        wrong = self._check(micro_batches)
        loss, tokens = self.parallel.evaluate(micro_batches)
        return (loss if wrong is None else loss.masked_fill(wrong, nan)), tokens

    def memory(self, activations_bytes: int) -> MemoryBreakdown:
        """What this rank holds, counted; activations as a census found them."""
        states, kept = self.parallel.states, self.parallel.activations
        return MemoryBreakdown(
            parameters_bytes=states.parameter_bytes + self.parallel.version_bytes,
            gradients_bytes=states.gradient_bytes,
            optimizer_bytes=self.optimizer.state_bytes,
            activations_bytes=activations_bytes,
            buffers_bytes=sum(t.numel() * t.element_size() for t in self.parallel.constants()),
            working_bytes=self.parallel.working_bytes,
            host_bytes=states.tier_bytes("cpu") + (kept.held_bytes if kept else 0),
            disk_bytes=states.tier_bytes("disk"),
        )

    def save(
        self, folder: Path | str, step: int, extra: dict[str, Any] | None = None, *, keep: int | None = None
    ) -> None:
        """Write a checkpoint that any other layout of the same model can load.

        Raises:
            InputError: a step below 0; CheckpointError: it cannot be written.
        """
        self._check_empty("save")
        if step < 0:
            raise InputError(f"step {step} cannot be saved; steps are counted from 0")
        scale = self.optimizer.loss_scale
        content = {"optimizer_step": int(self.optimizer.step_count), **(extra or {})}
        if scale.is_dynamic:
            content["loss_scale"] = scale.state()
        if self.plan.job.dropout or self.plan.job.attention_dropout:
            content["dropout_step"] = self.parallel.masks.step
        is_ahead = False
        if (delayed := self.optimizer.delayed) is not None:
            delayed.settle()
            is_ahead = delayed.is_pending
            content["delayed"] = {"num_steps": delayed.num_steps, "is_pending": is_ahead}
        store.save(folder, step, self._pieces(whole=False, with_master=is_ahead), content, keep=keep)

    def load(self, folder: Path | str, step: int | None = None) -> dict[str, Any]:
        """Read the newest (or the given) checkpoint, saved under any layout. Returns its extra values.

        One that was saved between a delayed update and its adoption goes on in the same way, if this engine delays
        too; else the update is adopted now.
        """
        self._check_empty("load")
        is_ahead = store.peek(folder, step).get("delayed", {}).get("is_pending", False)
        if (delayed := self.optimizer.delayed) is not None:
            delayed.settle()
        adopts = is_ahead and delayed is None
        extra = store.load(folder, self._pieces(whole=True, with_master=is_ahead, adopts=adopts), step)
        if delayed is not None:
            if not is_ahead and self.plan.strategy.recipe.master is None:
                self.optimizer.sync_master()
            delayed.restore(extra.get("delayed", {}).get("num_steps", extra["optimizer_step"]), is_ahead)
        elif is_ahead:
            self.optimizer.adopt()
            self.parallel.gather_parameters()
        self.optimizer.step_count.fill_(extra["optimizer_step"])
        self.parallel.masks.step = extra.get("dropout_step", extra["optimizer_step"])
        if self.optimizer.loss_scale.is_dynamic and "loss_scale" in extra:
            self.optimizer.loss_scale.restore(extra["loss_scale"])
        self.parallel.zero_gradients()
        return extra

    def _pieces(self, *, whole: bool, with_master: bool = False, adopts: bool = False) -> list[Piece]:
        """This rank's boxes.

        Args:
            whole: all that it keeps, for loading; else each logical element on exactly one rank, for saving.
            with_master: also the copies that only a delayed update has, where the recipe has none.
            adopts: without masters of its own it loads those of a delayed update as its parameters.
        """
        pieces: list[Piece] = []
        has_masters = self.plan.strategy.recipe.master is not None
        parameters = "master" if adopts and not has_masters else "parameters"
        for shard in self.optimizer.shards:
            bucket = shard.bucket
            states = [state for state in shard.states() if state[0] != "master" or has_masters or with_master]
            held = [(parameters, bucket.own_parameters), *states]
            run = bucket.own if whole else bucket.counted
            if whole and self.parallel.states.keeps_whole_parameters:
                pieces += bucket_pieces(parameters, bucket.layout, 0, bucket.parameters, owned=False)
                held = held[1:]
            for kind, memory in held:
                part = memory[run.start - bucket.own.start : run.stop - bucket.own.start]
                pieces += bucket_pieces(kind, bucket.layout, run.start, part, owned=not whole)
        if whole or self.parallel.owns_biases:
            biases = self.parallel.router_biases().items()
            pieces += [Piece(f"parameters/{name}", b.shape, Box.whole(b.shape), b) for name, b in biases]
        return pieces


def _check_model(model: nn.Module, spec: ModelSpec) -> None:
    """Raises InputError for a model that was split before, or that has not the spec's parameters."""
    if getattr(model, "is_split", False):
        raise InputError("this model was split by parallelize already; build another one for another engine")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}  # what is tied counts once, in both
    more = sorted(shapes.keys() - {param.name for param in spec.parameters()})
    if more:
        raise InputError(f"the model does not fit its spec: `{spec.name}` has no parameter `{more[0]}`")
    for param in spec.parameters():
        if shapes.get(param.name) != param.shape:
            found = f"is {list(shapes[param.name])}" if param.name in shapes else "is not there"
            raise InputError(
                f"the model does not fit its spec: parameter `{param.name}` {found}, `{spec.name}` has "
                f"{list(param.shape)}; build it from the plan's model"
            )
    object.__setattr__(model, "is_split", True)


def check_options(plan: Plan, options: OptimizerOptions) -> None:
    """Raises UnsupportedError for options that the plan's schedule cannot keep."""
    schedule = plan.strategy.pipeline_schedule
    if schedule.is_asynchronous and options.clip_norm is not None:
        raise UnsupportedError(
            f"clip_norm={options.clip_norm:g} with schedule=`{schedule.name}`: stages update by themselves, and none "
            "waits for the norm of all gradients; take clip_norm=None, or schedule=`1f1b`"
        )


def default_options(plan: Plan) -> OptimizerOptions:
    """The plan's optimizer; its gradients are clipped where the schedule can."""
    clip_norm = None if plan.strategy.pipeline_schedule.is_asynchronous else OptimizerOptions().clip_norm
    return OptimizerOptions(kind=plan.job.optimizer, clip_norm=clip_norm)


def _check_rate(learning_rate: float) -> None:
    if not 0 <= learning_rate < inf:
        raise InputError(f"learning_rate {learning_rate}: a finite number of at least 0 was expected")


def make_mesh(plan: Plan) -> Mesh:
    """This rank's mesh under `plan`, on the process group that torchrun's environment describes."""
    start("cpu" if plan.cluster.backend == "gloo" else "cuda")
    return Mesh.create(plan.strategy.sizes, **sub_axes(plan), ledger=Ledger())


def sub_axes(plan: Plan) -> SubAxes:
    """How the axes of `plan` are cut into parts: arguments of `Mesh.create` and of `comm.mesh.axis_groups`."""
    strategy = plan.strategy
    return SubAxes(
        kv_replicas=kv_group(plan.model, strategy),
        dp_local=strategy.dp_local,
        tensor=strategy.grid.axes,
        ep=strategy.ep,
        etp=strategy.et,
        pp_ends=strategy.end_ranks,
        pp_mirrored=strategy.pipeline_schedule.num_directions > 1,
    )


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
        options: the optimizer's settings; by default the plan's optimizer, with clipping unless the schedule is
            asynchronous.
        seed: of fresh weights, and of dropout.

    Raises:
        InputError: the number of ranks is not the plan's, the model does not fit its spec, or was split before.
    """
    fresh = any(p.is_meta for p in model.parameters())
    options = options or default_options(plan)
    engine = Engine(model, plan, mesh or make_mesh(plan), options)
    engine.parallel.masks.seed = seed
    if fresh:
        engine.initialize(seed)
    return engine
