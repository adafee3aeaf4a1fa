"""The composition, in one visible order:

cut → share tokens → shard → drop → bind → write gradients directly → tile → recompute → keep elsewhere → split →
reduce → gather → run.

plain model ─▶ pipeline.cut ─▶ context.apply ─▶ tensor.apply ─▶ dropout.apply ─▶ states (placements) ─▶ direct.apply ─▶
tiling.apply ─▶ recompute.apply ─▶ activations.apply ─▶ pipeline.split (stages) ─▶ data ─▶ gather ─▶ StageRunner
(─▶ EndlessPipeline)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.core.axes import CP, DP, EP, ETP, PP, PP_MIRROR, TP, WORLD
from meshwright.core.batch import IGNORE, MicroBatch
from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.job import Job
from meshwright.core.layouts import Grid
from meshwright.core.model import ModelSpec
from meshwright.core.placement import even_split
from meshwright.core.program import Action
from meshwright.core.strategy import Strategy
from meshwright.parallel import direct, dropout, experts, pipeline, recompute, tensor, tiling
from meshwright.parallel.asynchronous import EndlessPipeline, Update
from meshwright.parallel.census import ActivationCensus, Keeper
from meshwright.parallel.context import apply as context
from meshwright.parallel.context.share import Cutter, Share
from meshwright.parallel.data import GradientReducer
from meshwright.parallel.dropout import Masks, Part
from meshwright.parallel.gather import Gatherer
from meshwright.parallel.grids import apply as grids
from meshwright.parallel.grids.apply import own_sequences
from meshwright.parallel.grids.summa import Panels
from meshwright.parallel.layers import layers_of, part_of
from meshwright.parallel.loss import Slice, cross_entropy_sum
from meshwright.parallel.offload import activations
from meshwright.parallel.offload.activations import KeptActivations
from meshwright.parallel.offload.tier import HostTier
from meshwright.parallel.offload.unseen import UnseenTier
from meshwright.parallel.pipeline import StageRunner
from meshwright.parallel.routers import CutSequences, Routers
from meshwright.parallel.shards import gather_start
from meshwright.parallel.states import DTYPES, FlatStates
from meshwright.schedule.build import program
from meshwright.schedule.evaluation import evaluation_program


class _StageLoss(nn.Module):
    """Cross entropy of this rank's sequences over its slice of the vocabulary."""

    def __init__(self, spec: ModelSpec, grid: Grid, mesh: Mesh, job: Job) -> None:
        super().__init__()
        axis, size = mesh[grid.vocab_axis], spec.vocab_size
        self._mesh, self._sequence_axes = mesh, grid.logit_axes
        first, _ = even_split(size, axis.size, axis.index)
        self.trained = Slice(axis, first, size, job.smoothing(size), job.z_loss)
        self.evaluated = self.trained.plain()
        self.keep: Callable[[torch.Tensor], None] | None = None
        """Takes the logits, whose loss is then not computed."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.keep is not None:
            self.keep(logits)
            return logits.new_zeros(())
        own = own_sequences(labels, self._mesh, self._sequence_axes)
        return cross_entropy_sum(logits, own, self.trained if torch.is_grad_enabled() else self.evaluated)


class ParallelModel:
    """One rank's part of a model under a strategy: states, and a way to run micro-batches through them.

    Args:
        model: a plain model built from `spec` (on the meta device, or with weights, which are then taken over).
        spec: its shape.
        strategy: how it is split; legal for the model.
        mesh: this rank's mesh, with the strategy's sizes.
        job: what it is trained for: read for the optimizer's states, of which some may be offloaded, and for the loss.

    Raises:
        UnsupportedError: a precision that is for forecasts only, or a model that is not divided.
        InputError: the model does not fit its spec, or what is offloaded a tier.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec, strategy: Strategy, mesh: Mesh, job: Job) -> None:
        strategy.recipe.check_runnable()
        self.spec = spec
        self.strategy = strategy
        self.mesh = mesh
        frozen = frozenset(name for name, p in model.named_parameters() if not p.requires_grad)
        weights = None if _is_meta(model) else _plain_weights(model, spec)
        pipeline.cut(model, spec, strategy, mesh[PP].index)
        part = _part(strategy, mesh)
        context.apply(model, strategy.context, mesh[CP], part.inner)
        self.routers = _routers(model, spec, strategy, mesh)
        """Of a mixture of experts."""
        self._panels = Panels()
        if strategy.tensor.kind == "1d":
            tensor.apply(model, spec, mesh[TP], strategy.sequence, _width(strategy, mesh))
        else:
            grids.apply(model, spec, strategy.grid, mesh, self._panels, strategy.keeps_operands)
        self.masks = Masks(job.dropout, 0, part, job.attention_dropout, has_noise=spec.has_noise)
        dropout.apply(model, self.masks)
        context.drop(model, self.masks)
        self.exchanges = experts.spread(layers_of(model), spec, mesh[EP]) if strategy.ep > 1 else {}
        """Layer → what exchanges the rows of its experts, where ranks share them."""
        self.states = FlatStates(model, spec, strategy, mesh.coordinates, mesh.device, frozen, job.optimizer)
        if weights is not None:
            self.states.fill(lambda placement: weights[placement.name][placement.box.slices])
        self.products = direct.apply(self.states)
        self.tiles = tiling.apply(self.states, mesh, strategy)
        again = self.routers.again if self.routers else nullcontext
        recompute.apply(layers_of(model), spec, strategy, mesh, again)
        self.activations = self._keep_elsewhere(model)
        """Where layers leave what they keep for backward; None: it stays on the device."""
        stages = pipeline.split(model, spec, strategy, mesh[PP].index)
        self.reducer = GradientReducer(self.states, mesh)
        self.gatherer = Gatherer(model, stages, self.states, mesh, strategy)
        self._loss = _StageLoss(spec, strategy.grid, mesh, job)
        self.runner = StageRunner(
            stages,
            self._loss,
            mesh,
            strategy,
            self.reducer,
            self.gatherer,
            self.products,
            self.activations,
            _hidden_shape(spec, strategy),
            DTYPES[strategy.recipe.parameter],
        )
        if self.routers is not None:
            self.runner.before_backward = self.routers.before_backward
        self.endless: EndlessPipeline | None = None
        """What runs the steps of an asynchronous schedule."""
        if strategy.pipeline_schedule.is_asynchronous:
            self.endless = EndlessPipeline(self.runner, self.states, self.reducer, strategy, mesh[PP].index)
        self._model = model
        self._cutter = Cutter(mesh[CP], strategy.context.balance)
        self._num_sequences = 0
        """Of this step, over all ranks, that were trained on."""
        self.runner.on_micro_batch = self.masks.enter
        self._pending_reduction = False
        self._rows: dict[tuple[int, bool, bool], tuple[Action, ...]] = {}

    def _keep_elsewhere(self, model: nn.Module) -> KeptActivations | None:
        if not self.strategy.offload.moves_activations:
            return None
        device = self.mesh.device
        tier = UnseenTier.like("cpu") if device.type == "meta" else HostTier(device)
        kept = KeptActivations(tier, device, self._lasting)
        activations.apply(layers_of(model), kept)
        return kept

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        num_tokens: torch.Tensor | None = None,
        reduce: bool = True,
        loss_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Accumulate the gradient of (sum of token losses of these micro-batches) / `num_tokens`.

        One call per step needs neither option. A step of several calls counts its tokens first, so that it is the mean
        over all of them and not a mean of means:

            num_tokens = model.count_tokens([*first, *second])
            loss = model.forward_backward(first, num_tokens=num_tokens, reduce=False)
            loss += model.forward_backward(second, num_tokens=num_tokens)

        Args:
            micro_batches: this dp rank's (tokens [b, s], labels [b, s]), of whole sequences; the same on all its cp, tp
                and pp ranks.
            num_tokens: counted tokens of the whole step over all ranks; None: those of this call.
            reduce: sum the accumulated gradients over the ranks at the end; False on all but the last
                call of a step.
            loss_scale: scalar that backward starts with; every gradient is so many times larger.

        Returns:
            the sum of losses over this rank's tokens (float64; non-zero where the last stage is) over `num_tokens`.

        Raises:
            InputError: gradients were reduced and not used yet.
            UnsupportedError: an asynchronous schedule, which updates while micro-batches are under way.
        """
        if self.endless is not None:
            raise UnsupportedError(
                f"schedule `{self.strategy.schedule}` updates weights while micro-batches are under way, so that there "
                "is no forward and backward of a step by themselves; use the engine's step and finish"
            )
        if self._pending_reduction:
            raise InputError(
                "gradients were already reduced; call the optimizer's step before the next forward_backward"
            )
        row, shares = self._row(len(micro_batches), trains=True, reduce=reduce), self._cutter.cut(micro_batches)
        totals = self.count_step(shares)
        counted = totals[0] if num_tokens is None else num_tokens
        scale = 1.0 / counted.clamp(min=1)
        loss_gradient = scale if loss_scale is None else scale * loss_scale
        with self._dropping(shares):
            if self.routers is None:
                loss = self.runner.run(row, shares, loss_gradient)
            else:
                self._check_routed(shares, is_whole=num_tokens is None and reduce)
                with self.routers.training(totals[2:], 1.0 if loss_scale is None else loss_scale):
                    loss = self.runner.run(row, shares, loss_gradient)
                self.routers.sum_statistics()
        self._pending_reduction = reduce
        return loss * scale

    def _dropping(self, shares: Sequence[Share]) -> AbstractContextManager[None]:
        """Around forward and backward of these: dropout, by their numbers in the step's global batch."""
        own = sum(len(share.tokens) for share in shares)
        first, self._num_sequences = self._num_sequences, self._num_sequences + own * self.strategy.dp
        places = [(len(share.tokens), share.positions) for share in shares]
        return self.masks.active(places, first + own * self.mesh[DP].index)

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float, update: Update) -> torch.Tensor:
        """One step of an asynchronous schedule; what it leaves under way ends in later steps, or in `finish`.

        Args:
            micro_batches: this dp rank's; the same on all its cp, tp and pp ranks.
            learning_rate: of their updates, whenever these are.
            update: changes the rank's weights by its summed gradients.

        Returns:
            the sum of losses over this rank's tokens (float64; non-zero where the last stage is) over the step's
            counted tokens.
        """
        assert self.endless is not None
        shares = self._cutter.cut(micro_batches)
        counted = self._count_by_update(shares)
        together = len(shares) // len(counted)
        scales = 1.0 / counted.clamp(min=1)
        loss = self.endless.step(shares, list(scales.repeat_interleave(together)), learning_rate, update)
        return loss / counted.sum().clamp(min=1)

    def _count_by_update(self, shares: Sequence[Share]) -> torch.Tensor:
        """Counted tokens over all dp and cp ranks of the micro-batches of each update, float64 [updates of a step]."""
        num_updates = self.strategy.num_updates
        counted = torch.stack([(share.labels != IGNORE).sum() for share in shares])
        total = counted.view(num_updates, -1).sum(1).to(self.mesh.device, torch.float64)
        with self.mesh.ledger.phase("count"):
            all_reduce(total, self.mesh[self.strategy.data_axis])
        return total

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of losses, counted tokens) over these micro-batches of all ranks; every rank returns them."""
        row = self._row(len(micro_batches), trains=False, reduce=False)
        shares = self._cutter.cut(micro_batches)
        tokens = self.count_step(shares)[0]
        loss = self.runner.run(row, shares, torch.ones_like(tokens))
        with self.mesh.ledger.phase("evaluate"):
            return all_reduce(self.own_loss(loss).clone(), self.mesh[WORLD]), tokens

    @torch.no_grad()
    def next_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the model gives behind the last token of sequences: [n, V] of [n, s]; every rank returns all of it.

        Sequences are repeated until the ranks of a grid can divide them. Without context parallelism, and with the same
        tokens on every rank.
        """
        grid, mesh = self.strategy.grid, self.mesh
        parts, num_rows = grid.parts(grid.batch_axes), self.spec.vocab_size
        rows = torch.arange(-(-len(tokens) // parts) * parts, device=mesh.device) % len(tokens)
        found: list[torch.Tensor] = []
        self._loss.keep = lambda logits: found.append(logits[:, -1])
        shares = self._cutter.cut([(tokens[rows], torch.full_like(tokens[rows], IGNORE))])
        self.runner.run(self._row(1, trains=False, reduce=False), shares, torch.ones((), device=mesh.device))
        self._loss.keep = None
        together = torch.zeros(len(rows), num_rows, dtype=DTYPES[self.strategy.recipe.parameter], device=mesh.device)
        if found:
            own, axis = own_sequences(torch.arange(len(rows)), mesh, grid.logit_axes), mesh[grid.vocab_axis]
            first, count = even_split(num_rows, axis.size, axis.index)
            together[own[0] : own[-1] + 1, first : first + count] = found[0]
        with mesh.ledger.phase("evaluate"):
            return all_reduce(together, mesh[WORLD])[: len(tokens)]

    def _row(self, num_micro_batches: int, *, trains: bool, reduce: bool) -> tuple[Action, ...]:
        """This rank's row of a program, built once."""
        key = num_micro_batches, trains, reduce
        if key not in self._rows:
            s, pp = self.strategy, self.mesh[PP]
            built = (
                program(s.schedule, pp.size, num_micro_batches, reduce, num_chunks=s.stages_per_rank)
                if trains
                else evaluation_program(s, num_micro_batches)
            )
            self._rows[key] = built.rows[pp.index]
        return self._rows[key]

    def constants(self) -> list[torch.Tensor]:
        """What the model keeps besides its parameters: rotary positions, biases and statistics of routers."""
        statistics = [] if self.routers is None else [self.routers.statistics]
        return [*(buffer for buffer in self._model.buffers() if buffer is not None), *statistics]

    def router_biases(self) -> dict[str, torch.Tensor]:
        """Name → values [E] of the biases of this rank's routers, which a checkpoint holds like parameters."""
        return {} if self.routers is None else self.routers.biases

    @property
    def owns_biases(self) -> bool:
        """Whether this rank is the one that saves them."""
        return self.routers is not None and self.routers.counts_once and self.mesh[TP].index == 0

    @property
    def version_bytes(self) -> int:
        """Of older versions of the weights, which an asynchronous schedule keeps."""
        return self.endless.versions.further_bytes if self.endless else 0

    @property
    def working_bytes(self) -> int:
        """Of what states work in, and of the panels of a grid's products so far."""
        return self.states.working_bytes + self._panels.num_bytes

    def census(self) -> ActivationCensus:
        """A context that counts what autograd keeps of this model's activations."""
        keepers: list[Keeper] = [self.products, *([self.activations] if self.activations else [])]
        return ActivationCensus(self._lasting(), keepers)

    def _lasting(self) -> list[torch.Tensor]:
        """Memory that is there as long as the model."""
        kept = self.endless.versions.memory if self.endless else [bucket.parameters for bucket in self.states.buckets]
        return [*kept, *self.constants()]

    def own_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` on one of the tp ranks that have the same tokens, zero on the others."""
        return loss if self.mesh[self.strategy.grid.vocab_axis].index == 0 else torch.zeros_like(loss)

    def count_tokens(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Counted tokens over all dp ranks, float64 scalar. Before the first backward, so that it is exact.

        Raises InputError where ranks bring different numbers of micro-batches and ZeRO-2 or 3 reduces after each.
        """
        return self.count_step(self._cutter.cut(micro_batches))[0]

    def count_step(self, shares: Sequence[Share]) -> torch.Tensor:
        """(counted tokens, micro-batches) over all dp and cp ranks; of a mixture (.., all tokens, sequences) too."""
        counted = sum((share.labels != IGNORE).sum() for share in shares)
        total = torch.zeros(2 if self.routers is None else 4, dtype=torch.float64, device=self.mesh.device)
        total[0], total[1] = counted, len(shares)
        if self.routers is not None:
            total[2] = sum(share.tokens.numel() for share in shares)
            total[3] = sum(len(share.tokens) for share in shares) / self.strategy.cp
        with self.mesh.ledger.phase("count"):
            all_reduce(total, self.mesh[self.strategy.data_axis])
        needs_equal = self.strategy.reduces_each or self.strategy.ep > 1
        if needs_equal and total.is_cpu:  # elsewhere the host would wait; a rank that is late is named
            self._check_micro_batches(len(shares), int(total[1]))
        return total

    def _check_routed(self, shares: Sequence[Share], *, is_whole: bool) -> None:
        """A loss of routers is of a whole step, whose size and, over the batch, whose loads it must know."""
        gate, schedule = self.spec.gate, self.strategy.schedule
        if gate.has_losses and not is_whole:
            raise InputError(
                f"`{self.spec.name}` has losses of its routers, which are taken over a whole step: give all its "
                "micro-batches in one call of forward_backward"
            )
        over_batch = gate.balance_loss > 0 and gate.balance_over == "batch"
        if over_batch and len(shares) > 1 and not self.strategy.forwards_first:
            raise InputError(
                f"{len(shares)} micro-batches with schedule=`{schedule}` and a balance loss over the batch, "
                "which needs every forward before the first backward; take one, gpipe, or balance_over=sequence"
            )

    def _check_micro_batches(self, own: int, together: int) -> None:
        dp, ep = self.strategy.data_ranks, self.strategy.ep
        if own * dp != together:
            why = f"zero={self.strategy.zero} every rank needs equally many, because gradients are reduced after each"
            if ep > 1:
                why = f"expert.degree={ep} every rank needs equally many, because each exchanges tokens with the others"
            raise InputError(
                f"rank {self.mesh.rank} has {own} micro-batches in this step, its {dp} dp ranks together {together}; "
                f"with {why}: give a rank that has no more data one whose labels are all {IGNORE}"
            )

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """After an update: every dp rank sends its shard of each bucket to all; with ZeRO-3 not before it is needed."""
        self.gatherer.release()
        if self.states.way.stays_scattered and self.states.keeps_whole_parameters:
            with self.mesh.ledger.phase("parameters"):
                works = [gather_start(b.parameters, b.shard, b.way.scatter, self.mesh) for b in self.states.buckets]
                for work in works:
                    work.wait()

    def zero_gradients(self) -> None:
        """Start a new step."""
        self.states.zero_gradients()
        self.reducer.start_step()
        if self.routers is not None:
            self.routers.start_step()
        self._num_sequences = 0
        self._pending_reduction = False


def _part(strategy: Strategy, mesh: Mesh) -> Part:
    """What this rank holds of hidden states and heads."""
    tp, grid = mesh[TP], strategy.grid
    return Part(
        tokens=(tp.index, tp.size) if strategy.sequence == "megatron" else (0, 1),
        sequences=lambda numbers: own_sequences(numbers, mesh, grid.batch_axes),
        inner=lambda numbers: own_sequences(numbers, mesh, grid.logit_axes),
        features=mesh[grid.hidden_axes[0]].index if grid.hidden_axes else 0,
        heads=mesh[grid.vocab_axis].index,
    )


def _width(strategy: Strategy, mesh: Mesh) -> experts.Width | None:
    """Of experts that are cut otherwise than over tp."""
    if strategy.et == strategy.tp:
        return None
    return experts.Width(mesh[ETP], strategy.sequences_together)


def _hidden_shape(spec: ModelSpec, strategy: Strategy) -> Callable[[torch.Size], tuple[int, int, int]]:
    """This rank's tokens [b, s/cp] of a micro-batch → its part of the hidden state."""
    in_b, in_s, in_h = strategy.hidden_parts
    in_s //= strategy.cp
    return lambda tokens: (tokens[0] // in_b, tokens[1] // in_s, spec.hidden_size // in_h)


def _routers(model: nn.Module, spec: ModelSpec, strategy: Strategy, mesh: Mesh) -> Routers | None:
    """Those of a model that was cut for its pipeline rank."""
    if not spec.num_experts:
        return None
    axes = [strategy.data_axis]
    is_mirrored = strategy.pipeline_schedule.num_directions > 1
    axes += [PP_MIRROR] if is_mirrored else []
    cuts_over_tp = strategy.sequence == "megatron"
    axes += [TP] if cuts_over_tp else []

    def sum_up(x: torch.Tensor) -> None:
        with mesh.ledger.phase("router"):
            for axis in axes:
                all_reduce(x, mesh[axis])

    def sum_stages(x: torch.Tensor) -> None:
        with mesh.ledger.phase("router"):
            all_reduce(x, mesh[PP])

    data_index = strategy.data_index(mesh.coordinates)
    is_twin = is_mirrored and mesh[PP].index >= strategy.pp / 2
    return Routers(
        {
            int(number): part_of(layer, "mlp.router")
            for number, layer in layers_of(model).items()
            if spec.is_sparse(int(number))
        },
        spec,
        mesh.device,
        sum_up,
        counts_once=data_index == 0 and not is_twin,
        sequences=CutSequences(mesh[CP], strategy.context.balance, mesh[TP] if cuts_over_tp else None),
        sum_stages=sum_stages if strategy.pp > 1 and not strategy.pipeline_schedule.is_asynchronous else None,
        is_twin=is_twin,
    )


def _is_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def _plain_weights(model: nn.Module, spec: ModelSpec) -> dict[str, torch.Tensor]:
    weights = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    missing = [p.name for p in spec.parameters() if p.name not in weights]
    if missing:
        raise InputError(f"the model does not fit its spec: no parameter `{missing[0]}`")
    return weights
