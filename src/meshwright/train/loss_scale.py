"""Dynamic loss scaling: fp16 gradients below 6e-8 vanish, so backward starts with a loss times S.

    step with a non-finite gradient    skipped on every rank; S ← max(S · backoff, minimum)
    `interval` good steps in a row     S ← S · growth

The decision is one for all ranks: the global norm sees every gradient that a rank computed, also of the replicas that
it does not count, and is not finite where one of them isn't. (Squares are summed in fp32 by rows, then in float64: only
finite gradients beyond 1e17 would be taken for an overflow, and fp16 has none.) It stays on the device.

A skipped step leaves parameters, master copies, moments and the optimizer's step count as they were. Its batch is used
up, and the learning rate, a function of the batch's number, moves on.

A sum over ranks needs no division of its own, in fp16 either: the loss is divided by all counted tokens before
backward, so the sum is the gradient itself times S, and where that leaves fp16's range a smaller S mends it.

Source: Micikevicius et al. 2018 (Mixed Precision Training), §3.2; hysteresis as in Megatron-LM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from meshwright.core.errors import InputError


@dataclass(frozen=True, slots=True)
class LossScaleOptions:
    """Settings of the scale. Raises InputError for values that could not work."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 1000
    """Good steps in a row after which the scale grows."""
    hysteresis: int = 1
    """Overflows since the last growth before the scale falls: 1 lets it fall at once."""
    minimum: float = 1.0
    maximum: float = 2.0**32
    """Where growth ends: batches without gradients never overflow, and an infinite scale would never fall again."""

    def __post_init__(self) -> None:
        if not (self.growth > 1 > self.backoff > 0 and self.interval > 0 and self.hysteresis > 0):
            raise InputError(
                f"loss scale: growth {self.growth} must be above 1, backoff {self.backoff} between 0 and 1, interval "
                f"{self.interval} and hysteresis {self.hysteresis} at least 1"
            )
        if not 0 < self.minimum <= self.initial <= self.maximum < float("inf"):
            raise InputError(
                f"loss scale: initial {self.initial} must lie between minimum {self.minimum}, above 0, and maximum "
                f"{self.maximum}, which is finite"
            )


class LossScale:
    """The scale of one run, the same on every rank. Constantly 1 where `is_dynamic` is False.

    Attributes:
        scale: float32 scalar on the device.
    """

    def __init__(self, options: LossScaleOptions, device: torch.device, *, is_dynamic: bool) -> None:
        self.options, self.is_dynamic = options, is_dynamic
        self.scale = torch.full((), options.initial if is_dynamic else 1.0, device=device)
        self._num_good = torch.zeros((), dtype=torch.int64, device=device)
        self._num_allowed = torch.full((), options.hysteresis, dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, overflow: torch.Tensor) -> None:
        """After a step; `overflow` is a bool scalar on the device."""
        if not self.is_dynamic:
            return
        options = self.options
        allowed = self._num_allowed - overflow.to(torch.int64)
        falls = overflow & (allowed <= 0)
        good = torch.where(overflow, 0, self._num_good + 1)
        grows = good >= options.interval
        fallen = (self.scale * options.backoff).clamp(min=options.minimum)
        grown = (self.scale * options.growth).clamp(max=options.maximum)
        self.scale.copy_(torch.where(falls, fallen, torch.where(grows, grown, self.scale)))
        self._num_good.copy_(torch.where(grows, 0, good))
        self._num_allowed.copy_(torch.where(grows, options.hysteresis, allowed))

    def state(self) -> list[float]:
        """What a checkpoint keeps."""
        return [float(self.scale), float(self._num_good), float(self._num_allowed)]

    def restore(self, state: list[float]) -> None:
        """Inverse of :meth:`state`."""
        for value, memory in zip(state, (self.scale, self._num_good, self._num_allowed), strict=True):
            memory.fill_(value)
