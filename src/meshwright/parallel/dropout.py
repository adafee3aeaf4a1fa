"""Dropout whose masks do not depend on the layout.

What it divides: nothing. Whether an element of a hidden state is dropped is a function of

    (seed, step, sequence of the global batch, token, feature, layer, site)        site: embedding, attention, mlp

computed where the element is, so that any rank, any micro-batch and any run again in backward finds the same, and the
result is that of one process. No mask is kept for backward: it is computed again.
What it needs: rule `dropout`. What it costs: seven integer passes over each hidden state, forward and backward.

    row    64-bit hash of seed, step, sequence, token; then of layer and site     one per token
    drop   a 32-bit mix of row + hash(feature) is below rate·2³²

Sources: Srivastava et al. 2014 (dropout); Salmon et al. 2011 (counters instead of streams); the mixes are those of
SplitMix64 (Steele et al. 2014) and MurmurHash3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

SITES = {"embedding_dropout": 1, "attention_dropout": 2, "mlp_dropout": 3}
"""Name of a module whose place is taken → number in the hash."""
_MASK = 2**64 - 1
_ODD = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_ODD_32 = (0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32)


class Masks:
    """What the masks of a step are made of.

    Attributes:
        rate: share of elements that are dropped.
        seed: of the run.
        step: of the run; the caller counts.
    """

    def __init__(self, rate: float, seed: int = 0, part: int = 0, num_parts: int = 1) -> None:
        """`part` of `num_parts` equal parts is what this rank holds of the tokens that its tp ranks have."""
        self.rate, self.seed, self.step = rate, seed, 0
        self._part, self._num_parts = part, num_parts
        self._is_active = False
        self._rows: dict[int, torch.Tensor] = {}
        self._features: torch.Tensor | None = None
        self.micro_batch = 0
        """The one that runs."""

    def enter(self, micro_batch: int) -> None:
        """Forward or backward of a micro-batch begins."""
        self.micro_batch = micro_batch

    @contextmanager
    def active(self, shares: Sequence[tuple[int, torch.Tensor]], first: int) -> Iterator[None]:
        """Elements are dropped inside.

        Args:
            shares: of each micro-batch its sequences, and where in them the tokens stand that the tp ranks together
                have, [n].
            first: number in the global batch of the first of these sequences.
        """
        if self.rate:
            for number, (num_sequences, positions) in enumerate(shares):
                self._rows[number] = self._of_tokens(num_sequences, positions, first)
                first += num_sequences
            self._is_active = True
        try:
            yield
        finally:
            self._is_active = False
            self._rows.clear()

    def _of_tokens(self, num_sequences: int, positions: torch.Tensor, first: int) -> torch.Tensor:
        """int64 [b, n/parts]."""
        sequences = torch.arange(first, first + num_sequences, device=positions.device).unsqueeze(1)
        return _mix(_mix(sequences + _signed(_hash(self.seed, self.step))) + self._own(positions))

    def _own(self, positions: torch.Tensor) -> torch.Tensor:
        """Of this rank's tokens."""
        return positions.chunk(self._num_parts)[self._part]

    def drop(self, x: torch.Tensor, place: int, micro_batch: int) -> torch.Tensor:
        """x [b, s, h] without what is dropped, the rest divided by 1 − rate."""
        rows = _low(_mix(self._rows[micro_batch] + _signed(place)))
        if self._features is None or len(self._features) != x.shape[-1] or self._features.device != x.device:
            self._features = _low(_mix(torch.arange(x.shape[-1], device=x.device) + _signed(_ODD[0])))
        bits = rows.unsqueeze(-1) + self._features
        bits.bitwise_xor_(bits >> 16).mul_(_ODD_32[0])
        bits.bitwise_xor_(bits >> 13).mul_(_ODD_32[1])
        return x.masked_fill(bits < round(self.rate * 2**32) - 2**31, 0.0).mul_(1 / (1 - self.rate))

    def __call__(self, x: torch.Tensor, place: int) -> torch.Tensor:
        """Dropout of a hidden state [b, s, h] at a place, where it is trained on."""
        return _Dropout.apply(x, self, place, self.micro_batch) if self._is_active else x


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, masks: Masks, place: int, micro_batch: int) -> torch.Tensor:
        ctx.of = masks, place, micro_batch
        return masks.drop(x, place, micro_batch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        masks, place, micro_batch = ctx.of
        return masks.drop(grad, place, micro_batch), None, None, None


class Dropout(nn.Module):
    """At one place of the model."""

    def __init__(self, masks: Masks, layer: int, site: int) -> None:
        super().__init__()
        self.masks, self.place = masks, _hash(layer + 1, site)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.masks(x, self.place)


def apply(model: nn.Module, masks: Masks) -> None:
    """Take the places that a model has for it, in place; nothing without a rate."""
    if not masks.rate:
        return
    for path, _ in list(model.named_modules()):
        parent, _, child = path.rpartition(".")
        if child in SITES:
            layer = int(parent.rpartition(".")[2]) if parent else -1
            setattr(model.get_submodule(parent), child, Dropout(masks, layer, SITES[child]))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """64-bit hash of each element, int64. Products wrap."""
    x = x * _signed(_ODD[0])
    x = (x ^ (x >> 32)).mul_(_signed(_ODD[1]))
    x = (x ^ (x >> 29)).mul_(_signed(_ODD[2]))
    return x ^ (x >> 32)


def _low(x: torch.Tensor) -> torch.Tensor:
    """Every second 32 bits of int64 [.., n]: int32 [.., n]."""
    return x.contiguous().view(torch.int32)[..., ::2]


def _hash(*numbers: int) -> int:
    """64 bits of whole numbers, in order."""
    value = len(numbers)
    for number in numbers:
        value = (value ^ (number & _MASK)) * _ODD[0] & _MASK
        value = (value ^ value >> 30) * _ODD[1] & _MASK
        value = (value ^ value >> 27) * _ODD[2] & _MASK
        value ^= value >> 31
    return value


def _signed(number: int) -> int:
    """The same 64 bits as an int64."""
    return (number & _MASK) - ((number & _MASK) >> 63 << 64)
