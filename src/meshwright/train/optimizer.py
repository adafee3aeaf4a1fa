"""AdamW and SGD over flat shards.

The optimizer never sees a parameter, only runs of elements of a bucket (`core.flat.Segment`): those
of this rank's dp shard under ZeRO-1, the whole bucket otherwise. Gradients are already summed over
all ranks; the norm counts each logical element once (Narayanan et al. 2021).

What is offloaded (`parallel.offload`) comes back group by group for its update, which is the same to the bit; a delayed
update runs beside the next step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch.optim.adamw import adamw

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.core.axes import WORLD
from meshwright.core.flat import Segment
from meshwright.core.job import OptimizerKind
from meshwright.core.offload import NUM_SYNCHRONOUS_STEPS, TierTraffic
from meshwright.core.precision import NUM_MOMENTS
from meshwright.core.sharding import Range
from meshwright.parallel.offload.delayed import DelayedUpdate
from meshwright.parallel.offload.store import Flat, Store, copy, in_memory, read
from meshwright.parallel.offload.stream import StoredState, Tensors
from meshwright.parallel.states import DTYPES, FlatBucket, FlatStates
from meshwright.train.loss_scale import LossScale, LossScaleOptions
from meshwright.train.rounding import random_bits, round_to_bf16

_NORM_ROW = 4096
"""Elements whose squares are summed in fp32."""
_ROUNDED_AT_A_TIME = 1 << 20
"""Elements for which random bits are made together: 32 MiB of integers, however large a parameter is."""


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """Settings of the update. Weight decay is decoupled (Loshchilov & Hutter 2019) and for matrices only."""

    kind: OptimizerKind = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    """Largest global gradient norm; None never clips."""
    loss_scale: LossScaleOptions = field(default_factory=LossScaleOptions)
    """Of fp16 training."""
    seed: int = 0
    """Of stochastic rounding."""
    synchronous_steps: int = NUM_SYNCHRONOUS_STEPS
    """Steps at first whose update is not delayed, where the others are."""


@dataclass(slots=True)
class Shard:
    """What this rank updates of one bucket, and the state it keeps for it."""

    bucket: FlatBucket
    start: int
    stop: int
    master: Flat
    """The values that are updated: a view of the parameters, or their fp32 copy."""
    moments: tuple[Flat, ...]
    segments: tuple[Segment, ...]
    """Relative to the bucket."""
    norm_segments: tuple[Segment, ...]
    """The dp-rank's part of the bucket that counts in the norm."""
    replica_segments: tuple[Segment, ...]
    """Its replicas of what another rank counts, where this rank has computed their gradient by itself."""
    has_master: bool

    def states(self) -> Iterator[tuple[str, Flat]]:
        """(kind, where it is) of what is kept besides the parameters, by the names of a checkpoint."""
        if self.has_master:
            yield "master", self.master
        yield from zip(("moment1", "moment2"), self.moments, strict=False)


@dataclass(frozen=True, slots=True)
class Part:
    """What is updated at once, all of it in memory: a shard, or a group of one that lies on a tier."""

    bucket: FlatBucket
    start: int
    stop: int
    gradients: torch.Tensor
    parameters: torch.Tensor
    """Where updated values go."""
    master: torch.Tensor
    """The values that are updated: the parameters, or their fp32 copy."""
    moments: tuple[torch.Tensor, ...]
    segments: tuple[Segment, ...]
    """Relative to the bucket."""


class FlatOptimizer:
    """Updates the parameters of `states`: of every bucket the part that is this rank's own."""

    def __init__(self, states: FlatStates, mesh: Mesh, options: OptimizerOptions) -> None:
        self.options = options
        self._states = states
        self._mesh = mesh
        self.step_count = torch.zeros((), dtype=torch.float32, device=mesh.device)
        self.loss_scale = LossScale(options.loss_scale, mesh.device, is_dynamic=states.recipe.scales_loss)
        self.shards = [self._shard(bucket, NUM_MOMENTS[options.kind]) for bucket in states.buckets]
        self._shard_of = {shard.bucket: shard for shard in self.shards}
        self._squares: dict[FlatBucket, list[torch.Tensor]] = {}
        """Of gradients that lie on a tier: what each segment adds to the norm, found when they were last in memory."""
        self.delayed: DelayedUpdate[_Scaling] | None = None
        """Where updates run one step late."""
        self.tier_traffic: dict[str, TierTraffic] = {}
        """Tier → what passed in the last step; of a delayed update, that which ran beside it."""
        if states.store is not None:
            self._bind(states.store)

    def _bind(self, store: Store) -> None:
        if self._states.is_delayed:
            self.delayed = DelayedUpdate(self._stream, self.adopt, self.options.synchronous_steps)
            store.settle = self.delayed.settle

        def on_sum(bucket: FlatBucket, sums: torch.Tensor) -> None:
            self._squares[bucket] = self._squares_of(self._shard_of[bucket], sums)

        store.on_sum = on_sum
        self.sync_master()

    def _shard(self, bucket: FlatBucket, num_moments: int) -> Shard:
        recipe = self._states.recipe
        start, stop, device = bucket.own.start, bucket.own.stop, self._mesh.device
        master: Flat | None = bucket.stored("master")
        has_master = master is not None or recipe.master is not None
        if master is None:
            values = bucket.own_parameters
            master = read(values).to(device, DTYPES[recipe.master], copy=True) if recipe.master else values
        moments = tuple(
            bucket.stored(f"moment{i + 1}") or torch.zeros(stop - start, dtype=DTYPES[recipe.moment], device=device)
            for i in range(num_moments)
        )
        looked_at = bucket.layout.segments(bucket.counted.start, bucket.counted.stop)
        counted = tuple(s for s in looked_at if s.owned)
        replicas = () if bucket.layout.sum_over else tuple(s for s in looked_at if not s.owned)
        segments = bucket.layout.segments(start, stop, self._states.frozen)
        return Shard(bucket, start, stop, master, moments, segments, counted, replicas, has_master)

    @property
    def state_bytes(self) -> int:
        """Bytes of master copies and moments in this rank's memory."""
        held = (memory for shard in self.shards for _, memory in shard.states())
        return sum(memory.nbytes for memory in held if isinstance(memory, torch.Tensor))

    @torch.no_grad()
    def sync_master(self) -> None:
        """Take the parameters' values over into the master copies (after initialisation or loading)."""
        for shard in self.shards:
            if shard.has_master:
                copy(shard.master, shard.bucket.own_parameters)

    @torch.no_grad()
    def norm_and_loss(
        self, loss: torch.Tensor, square: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Global gradient norm without the loss scale, and `loss` (one number or several) summed over all ranks, in one
        all-reduce of float64. `square` is this rank's part of the squared norm, where it was found before
        (:meth:`square`).

        The norm is not finite where a gradient that some rank has computed isn't, of replicas too: these count zero
        times. Copies that come out of one reduction are looked at once.
        """
        squares = torch.zeros(1 + loss.numel(), dtype=torch.float64, device=self._mesh.device)
        squares[0] = self.square() if square is None else square
        squares[1:] = loss
        with self._mesh.ledger.phase("norm"):
            all_reduce(squares, self._mesh[WORLD])
        return squares[0].sqrt() / self.loss_scale.scale, squares[1:].view(loss.shape)

    @torch.no_grad()
    def square(self) -> torch.Tensor:
        """This rank's part of the squared gradient norm (float64 scalar)."""
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for shard in self.shards:
            bucket = shard.bucket
            found = self._squares[bucket] if bucket in self._squares else self._squares_of(shard, bucket.own_gradients)
            for square in found:
                total += square
        self._squares.clear()
        return total

    def _squares_of(self, shard: Shard, gradients: Flat) -> list[torch.Tensor]:
        """What each segment adds to the squared norm, of gradients [own]."""
        return [
            times * _sum_of_squares(read(gradients[s.start - shard.start : s.stop - shard.start]))
            for segments, times in ((shard.norm_segments, 1.0), (shard.replica_segments, 0.0))
            for s in segments
        ]  # 0 · inf and 0 · nan are nan

    @torch.no_grad()
    def update(self, learning_rate: float, norm: torch.Tensor) -> torch.Tensor:
        """One step with gradients clipped to `clip_norm`; writes the shard's parameters.

        With a norm that is not finite nothing changes, on any rank: no parameter, no state, no count of steps.
        Delayed, the update of the step before is taken over, and this one's begins.

        Returns whether the step was skipped (bool scalar on the device).
        """
        skipped = ~norm.isfinite()
        self.step_count += (~skipped).to(self.step_count.dtype)
        scaling = _Scaling(learning_rate, self._divisor(norm), skipped, self.step_count.clone())
        store = self._states.store
        if self.delayed is not None:
            self.delayed.step(lambda: self._hand_over(scaling))
        elif store is not None:
            self._stream(scaling)
            self.tier_traffic = store.take()
        else:
            for shard in self.shards:
                self._update_part(_whole(shard), scaling)
        self.loss_scale.update(skipped)
        return skipped

    @torch.no_grad()
    def update_by_itself(self, learning_rate: float) -> None:
        """One step of this rank alone, with the gradients as they are: no rank waits for a norm of all, so that nothing
        is clipped, and nothing skipped. The parameters may lie elsewhere than at the last update."""
        one = torch.ones((), dtype=torch.float64, device=self._mesh.device)
        self.step_count += 1
        scaling = _Scaling(learning_rate, one, one == 0, self.step_count.clone())
        for shard in self.shards:
            if not shard.has_master:
                shard.master = shard.bucket.own_parameters
            self._update_part(_whole(shard), scaling)

    def finish(self) -> None:
        """Of delayed updates: take over the one that is still to be."""
        if self.delayed is not None:
            self.delayed.finish()

    def _hand_over(self, scaling: _Scaling) -> _Scaling:
        """What a delayed update needs, which runs when the next step has its own gradients."""
        assert self._states.store is not None
        for shard in self.shards:
            kept = shard.bucket.stored("gradients")
            if kept is not None and isinstance(shard.bucket.own_gradients, torch.Tensor):
                copy(kept, shard.bucket.own_gradients)
        self.tier_traffic = self._states.store.take()
        return scaling

    @torch.no_grad()
    def adopt(self) -> None:
        """Parameters ← masters, where there are any: after a delayed update."""
        for shard in self.shards:
            if shard.has_master:
                copy(shard.bucket.own_parameters, shard.master)

    def forget_traffic(self) -> None:
        """Parameters that were read for no step count for none."""
        if self._states.store is not None:
            self._states.store.forget_reads("parameters")

    def close(self) -> None:
        """End what runs beside the steps."""
        if self.delayed is not None:
            self.delayed.close()

    def _stream(self, scaling: _Scaling) -> None:
        """Update all shards group by group."""
        assert self._states.store is not None
        shard_of = {shard.bucket.state: shard for shard in self.shards}

        def update(state: StoredState, group: Range, run: Tensors) -> None:
            self._update_part(self._part(shard_of[state], group, run), scaling)

        self._states.store.stream(update)

    def _part(self, shard: Shard, group: Range, run: Tensors) -> Part:
        """One group of a shard: from `run` what came from a tier, else from memory. A delayed update leaves the
        parameters alone: they are the masters then."""
        start, stop = group
        here, bucket = slice(start - shard.start, stop - shard.start), shard.bucket

        def at(kind: str, kept: Flat) -> torch.Tensor:
            return run[kind] if kind in run else in_memory(kept)[here]

        parameters = run["master"] if self.delayed is not None else at("parameters", bucket.own_parameters)
        return Part(
            bucket,
            start,
            stop,
            at("gradients", bucket.own_gradients),
            parameters,
            at("master", shard.master) if shard.has_master else parameters,
            tuple(at(f"moment{i + 1}", moment) for i, moment in enumerate(shard.moments)),
            bucket.layout.segments(start, stop, self._states.frozen),
        )

    def _update_part(self, part: Part, scaling: _Scaling) -> None:
        update = self._adamw if self.options.kind == "adamw" else self._sgd
        if self._states.recipe.rounding == "stochastic":
            wide = replace(part, master=part.master.float())
            update(wide, part.gradients.float(), scaling)
            self._round(part, wide.master, scaling)
            return
        update(part, part.gradients.to(part.master.dtype), scaling)
        if part.parameters is not part.master:
            part.parameters.copy_(part.master)

    def _round(self, part: Part, values: torch.Tensor, scaling: _Scaling) -> None:
        """Write updated values to masters of fewer bits. What did not change is representable, and stays."""
        for slot in part.bucket.layout.slots:
            of_slot, of_part = part.bucket.overlap(slot, slice(part.start, part.stop))
            for start in range(of_slot.start, of_slot.stop, _ROUNDED_AT_A_TIME):
                run = slice(start, min(start + _ROUNDED_AT_A_TIME, of_slot.stop))
                bits = random_bits(slot.placement, run, scaling.step, self.options.seed)
                low = of_part.start + start - of_slot.start
                here = slice(low, low + run.stop - run.start)
                part.master[here] = round_to_bf16(values[here], bits)

    def _divisor(self, norm: torch.Tensor) -> torch.Tensor:
        """What gradients are divided by: loss scale · max(1, (norm + 1e-6) / clip_norm). Stays on the device."""
        limit = self.options.clip_norm
        clip = torch.ones_like(norm) if limit is None else ((norm + 1e-6) / limit).clamp(min=1.0)
        return clip * self.loss_scale.scale

    def _adamw(self, part: Part, gradients: torch.Tensor, scaling: _Scaling) -> None:
        options, first, second = self.options, *part.moments
        grad_scale: torch.Tensor | None = scaling.divisor.float()
        if part.master.dtype == torch.float64:  # the fused kernel takes its scale in fp32 only
            gradients, grad_scale = gradients / scaling.divisor, None
        for decay in (True, False):
            runs = [slice(s.start - part.start, s.stop - part.start) for s in part.segments if s.decay == decay]
            if not runs:
                continue
            adamw(
                [part.master[run] for run in runs],
                [gradients[run] for run in runs],
                [first[run] for run in runs],
                [second[run] for run in runs],
                [],
                [scaling.step - 1 for _ in runs],
                fused=True,
                grad_scale=grad_scale,
                found_inf=scaling.skipped.float(),
                amsgrad=False,
                beta1=options.betas[0],
                beta2=options.betas[1],
                lr=scaling.learning_rate,
                weight_decay=options.weight_decay if decay else 0.0,
                eps=options.eps,
                maximize=False,
            )

    def _sgd(self, part: Part, gradients: torch.Tensor, scaling: _Scaling) -> None:
        change = (gradients / scaling.divisor.to(gradients.dtype)).masked_fill_(scaling.skipped, 0.0)
        for s in part.segments:
            run = slice(s.start - part.start, s.stop - part.start)
            part.master[run].sub_(change[run], alpha=scaling.learning_rate)


@dataclass(frozen=True, slots=True)
class _Scaling:
    """What all shards of one update share."""

    learning_rate: float
    divisor: torch.Tensor
    """Of gradients; float64 scalar."""
    skipped: torch.Tensor
    """Whether nothing may change; bool scalar."""
    step: torch.Tensor
    """Number of this update, from 1; float32 scalar."""


def _whole(shard: Shard) -> Part:
    """All of a shard that lies on no tier."""
    return Part(
        shard.bucket,
        shard.start,
        shard.stop,
        in_memory(shard.bucket.own_gradients),
        in_memory(shard.bucket.own_parameters),
        in_memory(shard.master),
        tuple(map(in_memory, shard.moments)),
        shard.segments,
    )


def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Of a flat tensor, as float64: rows in at least fp32, their sum in float64, so that length costs no accuracy."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    whole = x.numel() // _NORM_ROW * _NORM_ROW
    norms = torch.linalg.vector_norm(x[:whole].view(-1, _NORM_ROW), dim=-1, dtype=wide)
    rest = torch.linalg.vector_norm(x[whole:], dtype=wide)
    total: torch.Tensor = torch.sum(norms.square_(), dtype=torch.float64) + rest.double().square()
    return total
