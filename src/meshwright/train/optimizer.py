"""AdamW and SGD over flat shards.

The optimizer never sees a parameter, only runs of elements of a bucket (`core.flat.Segment`): those
of this rank's dp shard under ZeRO-1, the whole bucket otherwise. Gradients are already summed over
all ranks; the norm counts each logical element once (Narayanan et al. 2021).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch.optim.adamw import adamw

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.core.axes import WORLD
from meshwright.core.flat import Segment
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

    kind: Literal["adamw", "sgd"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    """Largest global gradient norm; None never clips."""
    loss_scale: LossScaleOptions = field(default_factory=LossScaleOptions)
    """Of fp16 training."""
    seed: int = 0
    """Of stochastic rounding."""


@dataclass(slots=True)
class Shard:
    """What this rank updates of one bucket, and the state it keeps for it."""

    bucket: FlatBucket
    start: int
    stop: int
    master: torch.Tensor
    """The values that are updated: a view of the parameters, or their fp32 copy."""
    moments: tuple[torch.Tensor, ...]
    segments: tuple[Segment, ...]
    """Relative to the bucket."""
    norm_segments: tuple[Segment, ...]
    """The dp-rank's part of the bucket that counts in the norm."""
    replica_segments: tuple[Segment, ...]
    """Its replicas of what another rank counts, where this rank has computed their gradient by itself."""
    has_master: bool

    def states(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(kind, memory) of what is kept besides the parameters, by the names of a checkpoint."""
        if self.has_master:
            yield "master", self.master
        yield from zip(("moment1", "moment2"), self.moments, strict=False)


class FlatOptimizer:
    """Updates the parameters of `states`: of every bucket the part that is this rank's own."""

    def __init__(self, states: FlatStates, mesh: Mesh, options: OptimizerOptions) -> None:
        self.options = options
        self._states = states
        self._mesh = mesh
        self.step_count = torch.zeros((), dtype=torch.float32, device=mesh.device)
        self.loss_scale = LossScale(options.loss_scale, mesh.device, is_dynamic=states.recipe.scales_loss)
        num_moments = 2 if options.kind == "adamw" else 0
        self.shards = [self._shard(bucket, num_moments) for bucket in states.buckets]

    def _shard(self, bucket: FlatBucket, num_moments: int) -> Shard:
        recipe = self._states.recipe
        start, stop, values = bucket.own.start, bucket.own.stop, bucket.own_parameters
        master = values.to(DTYPES[recipe.master], copy=True) if recipe.master else values
        moments = tuple(
            torch.zeros(stop - start, dtype=DTYPES[recipe.moment], device=values.device) for _ in range(num_moments)
        )
        looked_at = bucket.layout.segments(bucket.counted.start, bucket.counted.stop)
        counted = tuple(s for s in looked_at if s.owned)
        replicas = () if bucket.layout.sum_over else tuple(s for s in looked_at if not s.owned)
        segments = bucket.layout.segments(start, stop, self._states.frozen)
        return Shard(bucket, start, stop, master, moments, segments, counted, replicas, recipe.master is not None)

    @property
    def state_bytes(self) -> int:
        """Bytes of master copies and moments on this rank."""
        return sum(memory.numel() * memory.element_size() for s in self.shards for _, memory in s.states())

    @torch.no_grad()
    def sync_master(self) -> None:
        """Take the parameters' values over into the master copies (after initialisation or loading)."""
        for shard in self.shards:
            if shard.has_master:
                shard.master.copy_(shard.bucket.own_parameters)

    @torch.no_grad()
    def norm_and_loss(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Global gradient norm without the loss scale, and `loss` summed over all ranks, in one all-reduce of two
        float64.

        The norm is not finite where a gradient that some rank has computed isn't, of replicas too: these count zero
        times. Copies that come out of one reduction are looked at once.
        """
        squares = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        for shard in self.shards:
            for segments, times in ((shard.norm_segments, 1.0), (shard.replica_segments, 0.0)):
                for s in segments:
                    piece = shard.bucket.own_gradients[s.start - shard.start : s.stop - shard.start]
                    squares[0] += times * _sum_of_squares(piece)  # 0 · inf and 0 · nan are nan
        squares[1] = loss
        with self._mesh.ledger.phase("norm"):
            all_reduce(squares, self._mesh[WORLD])
        return squares[0].sqrt() / self.loss_scale.scale, squares[1]

    @torch.no_grad()
    def update(self, learning_rate: float, norm: torch.Tensor) -> torch.Tensor:
        """One step with gradients clipped to `clip_norm`; writes the shard's parameters.

        With a norm that is not finite nothing changes, on any rank: no parameter, no state, no count of steps.

        Returns whether the step was skipped (bool scalar on the device).
        """
        skipped = ~norm.isfinite()
        scaling = _Scaling(learning_rate, self._divisor(norm), skipped)
        self.step_count += (~skipped).to(self.step_count.dtype)
        for shard in self.shards:
            self._update_shard(shard, scaling)
        self.loss_scale.update(skipped)
        return skipped

    def _update_shard(self, shard: Shard, scaling: _Scaling) -> None:
        update = self._adamw if self.options.kind == "adamw" else self._sgd
        own = shard.bucket.own_parameters
        if self._states.recipe.rounding == "stochastic":
            wide = replace(shard, master=own.float())
            update(wide, shard.bucket.own_gradients.float(), scaling)
            self._round(shard.bucket, wide.master)
            return
        update(shard, shard.bucket.own_gradients.to(shard.master.dtype), scaling)
        if shard.has_master:
            own.copy_(shard.master)

    def _round(self, bucket: FlatBucket, values: torch.Tensor) -> None:
        """Write updated values [own] to parameters of fewer bits. What did not change is representable, and stays."""
        for slot in bucket.layout.slots:
            of_slot, of_own = bucket.overlap(slot, bucket.own)
            for start in range(of_slot.start, of_slot.stop, _ROUNDED_AT_A_TIME):
                run = slice(start, min(start + _ROUNDED_AT_A_TIME, of_slot.stop))
                bits = random_bits(slot.placement, run, self.step_count, self.options.seed)
                low = of_own.start + start - of_slot.start
                part = slice(low, low + run.stop - run.start)
                bucket.own_parameters[part] = round_to_bf16(values[part], bits)

    def _divisor(self, norm: torch.Tensor) -> torch.Tensor:
        """What gradients are divided by: loss scale · max(1, (norm + 1e-6) / clip_norm). Stays on the device."""
        limit = self.options.clip_norm
        clip = torch.ones_like(norm) if limit is None else ((norm + 1e-6) / limit).clamp(min=1.0)
        return clip * self.loss_scale.scale

    def _adamw(self, shard: Shard, gradients: torch.Tensor, scaling: _Scaling) -> None:
        options, divisor, grad_scale = self.options, scaling.divisor, scaling.divisor.float()
        if shard.master.dtype == torch.float64:  # the fused kernel takes its scale in fp32 only
            gradients, grad_scale = gradients / divisor, None
        for decay in (True, False):
            runs = [slice(s.start - shard.start, s.stop - shard.start) for s in shard.segments if s.decay == decay]
            if not runs:
                continue
            adamw(
                [shard.master[run] for run in runs],
                [gradients[run] for run in runs],
                *([moment[run] for run in runs] for moment in shard.moments),
                [],
                [self.step_count - 1 for _ in runs],
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

    def _sgd(self, shard: Shard, gradients: torch.Tensor, scaling: _Scaling) -> None:
        change = gradients / scaling.divisor.to(gradients.dtype)
        shard.master.sub_(change.masked_fill_(scaling.skipped, 0.0), alpha=scaling.learning_rate)


@dataclass(frozen=True, slots=True)
class _Scaling:
    """What all shards of one update share."""

    learning_rate: float
    divisor: torch.Tensor
    """Of gradients; float64 scalar."""
    skipped: torch.Tensor
    """Whether nothing may change; bool scalar."""


def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Of a flat tensor, as float64: rows in at least fp32, their sum in float64, so that length costs no accuracy."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    whole = x.numel() // _NORM_ROW * _NORM_ROW
    norms = torch.linalg.vector_norm(x[:whole].view(-1, _NORM_ROW), dim=-1, dtype=wide)
    rest = torch.linalg.vector_norm(x[whole:], dtype=wide)
    return torch.sum(norms.square_(), dtype=torch.float64) + rest.double().square()
