"""Dropout whose masks do not depend on the layout.

What it divides: nothing. Whether an element of a hidden state is dropped is a function of

    (seed, step, sequence of the global batch, token, feature, layer, site)        site: embedding, attention, mlp

computed where the element is, so that any rank, any micro-batch and any run again in backward finds the same, and the
result is that of one process. No mask is kept for backward: it is computed again. Likewise a probability of attention,
by (seed, step, sequence, query, key, head, layer); and the noise of a gate by (.., token, feature or expert, layer).
What it needs: rule `dropout`. What it costs: eleven integer passes over each hidden state, forward and backward; of
probabilities, over those of a few rows at a time, and attention that is not a fused kernel (`parallel.context.block`).
A mask is a whole number of an element's width, all ones where it is kept, and is put on by `and`: choosing between two
values costs PyTorch on the CPU thirty times such a pass.

    row    64-bit hash of seed, step, sequence, token; then of layer and site     one per token
    drop   a 32-bit mix of row + hash(feature) is below rate·2³²                  of probabilities: hash(key)

Sources: Srivastava et al. 2014 (dropout); Salmon et al. 2011 (counters instead of streams); the mixes are those of
SplitMix64 (Steele et al. 2014) and MurmurHash3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from meshwright.parallel.layers import layers_of, part_of

SITES = {"embedding_dropout": 1, "attention_dropout": 2, "mlp_dropout": 3}
"""Name of a module whose place is taken → number in the hash."""
PROBABILITIES = 4
"""The number of those of attention."""
NOISE = 5
"""Of what a router draws."""
ROUTER = "router"
"""Name of the module that does."""
_MASK = 2**64 - 1
_ODD = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes."""
_ODD_32 = (0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32)


def _all(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank holds of the hidden states and of the heads of a micro-batch's tokens.

    Attributes:
        tokens: (index, number) of equal parts of a sequence's tokens, between the layers.
        sequences: of the numbers of all [b] those of its sequences, between the layers; `inner`: within attention.
        features: position among the ranks that cut the hidden dim.
        heads: likewise the heads.
    """

    tokens: tuple[int, int] = (0, 1)
    sequences: Callable[[torch.Tensor], torch.Tensor] = _all
    inner: Callable[[torch.Tensor], torch.Tensor] = _all
    features: int = 0
    heads: int = 0


class Masks:
    """What the masks of a step are made of.

    Args:
        rate: share of elements of hidden states that are dropped.
        part: what of them this rank holds.
        attention_rate: share of the probabilities of attention that are.
        has_noise: whether routers draw.

    Attributes:
        seed: of the run.
        step: of the run; the caller counts.
    """

    def __init__(
        self,
        rate: float,
        seed: int = 0,
        part: Part | None = None,
        attention_rate: float = 0.0,
        *,
        has_noise: bool = False,
    ) -> None:
        self.rate, self.attention_rate, self.seed, self.step = rate, attention_rate, seed, 0
        self.has_noise = has_noise
        self.part = part or Part()
        self._is_active = False
        self._rows: dict[int, torch.Tensor] = {}
        self._sequences: dict[int, torch.Tensor] = {}
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
        if self.rate or self.attention_rate or self.has_noise:
            for number, (num_sequences, positions) in enumerate(shares):
                self._sequences[number] = self._of_sequences(num_sequences, positions.device, first)
                self._rows[number] = self._of_tokens(self._sequences[number], positions)
                first += num_sequences
            self._is_active = True
        try:
            yield
        finally:
            self._is_active = False
            self._rows.clear()
            self._sequences.clear()

    def _of_sequences(self, count: int, device: torch.device, first: int) -> torch.Tensor:
        """int64 [b]."""
        return _mix(torch.arange(first, first + count, device=device) + _signed(_hash(self.seed, self.step)))

    def _of_tokens(self, sequences: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [b', n/parts]."""
        return _mix(self.part.sequences(sequences).unsqueeze(1) + self._own(positions))

    def _own(self, positions: torch.Tensor) -> torch.Tensor:
        """Of this rank's tokens."""
        index, number = self.part.tokens
        return positions.chunk(number)[index]

    def drop(self, x: torch.Tensor, place: int, micro_batch: int) -> torch.Tensor:
        """x [b', s, h'] without what is dropped, the rest divided by 1 − rate."""
        rows = _low(_mix(self._rows[micro_batch] + _signed(place)))
        if self._features is None or len(self._features) != x.shape[-1] or self._features.device != x.device:
            first = self.part.features * x.shape[-1]
            self._features = _of_columns(torch.arange(first, first + x.shape[-1], device=x.device))
        kept = _kept(rows, self._features, self.rate, x.dtype)
        return (x.view(kept.dtype) & kept).view(x.dtype).mul_(1 / (1 - self.rate))

    def uniform(self, x: torch.Tensor, place: int) -> torch.Tensor | None:
        """A number between 0 and 1, neither of them, for each element of x [b', s, n], float64; None where nothing is
        trained on. Columns are whole on every rank."""
        if not self._is_active:
            return None
        rows = _low(_mix(self._rows[self.micro_batch] + _signed(place)))
        bits = _mixed(rows, _of_columns(torch.arange(x.shape[-1], device=x.device)))
        return bits.double().add_(2**31 + 0.5).mul_(2**-32)

    def of_attention(self, place: int, num_heads: int, index: int) -> Dropped | None:
        """Of the probabilities of the micro-batch that runs; None where none are dropped.

        Args:
            num_heads: of this rank.
            index: its position among the ranks that have as many others each.
        """
        if not (self._is_active and self.attention_rate):
            return None
        first = index * num_heads
        heads = [_signed(_hash(place, head)) for head in range(first, first + num_heads)]
        sequences = self.part.inner(self._sequences[self.micro_batch])
        return Dropped(sequences, torch.tensor(heads, device=sequences.device), self.attention_rate)

    def __call__(self, x: torch.Tensor, place: int) -> torch.Tensor:
        """Dropout of a hidden state [b, s, h] at a place, where it is trained on."""
        return _Dropout.apply(x, self, place, self.micro_batch) if self._is_active and self.rate else x


@dataclass(frozen=True, slots=True)
class Dropped:
    """Which probabilities of a micro-batch's attention are dropped in a layer.

    Attributes:
        sequences: int64 [b], hashed with seed and step.
        heads: int64 [a], hashed with the layer.
    """

    sequences: torch.Tensor
    heads: torch.Tensor
    rate: float

    def rows(self, queries: torch.Tensor) -> torch.Tensor:
        """int32 [b, a, n] of queries at these positions [n] of their sequence."""
        tokens = _mix(self.sequences.unsqueeze(1) + queries).unsqueeze(1)
        return _low(_mix(tokens + self.heads.unsqueeze(1)))

    def between(self, rows: torch.Tensor, keys: torch.Tensor) -> ScoreMask:
        """Of such rows and keys at these positions [m]."""
        return ScoreMask(rows, _of_columns(keys), self.rate)


@dataclass(frozen=True, slots=True)
class ScoreMask:
    """Which of the probabilities of rows [b, a, n] and columns [m] are dropped: computed where they are, for as many at
    a time as are needed."""

    rows: torch.Tensor
    columns: torch.Tensor
    rate: float

    def part(self, sequences: slice, queries: slice, keys: slice) -> ScoreMask:
        """Of some of them."""
        return ScoreMask(self.rows[sequences, :, queries], self.columns[keys], self.rate)

    def grouped(self, num_groups: int) -> ScoreMask:
        """The same of rows [b·g, a/g, n]: `part` then takes some pairs of a sequence and a group."""
        return ScoreMask(self.rows.unflatten(1, (num_groups, -1)).flatten(0, 1), self.columns, self.rate)

    def kept(self, dtype: torch.dtype) -> torch.Tensor:
        """[.., n, m], whole numbers as wide as this dtype: all bits where a probability is kept, none where not."""
        return _kept(self.rows, self.columns, self.rate, dtype)

    def apply_(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Of probabilities [b, g, a/g, n, m], in place: what is dropped is 0, the rest divided by 1 − rate."""
        kept = self.kept(probabilities.dtype).unflatten(1, probabilities.shape[1:3])
        return keep_(probabilities, kept).mul_(1 / (1 - self.rate))


def keep_(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """x, in place, 0 where nothing is kept (:meth:`ScoreMask.kept` of its dtype)."""
    x.view(kept.dtype).bitwise_and_(kept)
    return x


def _of_columns(numbers: torch.Tensor) -> torch.Tensor:
    """int32 [m] of features, or of positions of keys."""
    return _low(_mix(numbers + _signed(_ODD[0])))


def _kept(rows: torch.Tensor, columns: torch.Tensor, rate: float, dtype: torch.dtype) -> torch.Tensor:
    """[.., n, m] of rows [.., n] and columns [m]: −1 where an element of this dtype is kept, 0 where it is dropped."""
    bits = _mixed(rows, columns)
    most = torch.tensor(((round(rate * 2**32) - 2**31) >> 1) - 1, dtype=torch.int32)  # halved: differences don't wrap
    kept = torch.sub(most, bits.bitwise_right_shift_(1), out=bits).bitwise_right_shift_(31)
    return kept.to(_WHOLE[dtype.itemsize])


def _mixed(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """int32 [.., n, m] of rows [.., n] and columns [m]: 32 bits of each pair."""
    bits = rows.unsqueeze(-1) + columns
    shifted = bits >> 16
    bits.bitwise_xor_(shifted).mul_(_ODD_32[0])
    torch.bitwise_right_shift(bits, 13, out=shifted)
    return bits.bitwise_xor_(shifted).mul_(_ODD_32[1])


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


class Noise:
    """What the router of one layer draws."""

    def __init__(self, masks: Masks, layer: int) -> None:
        self._masks, self._place = masks, _hash(layer + 1, NOISE)

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """A number between 0 and 1 for each element of x [b, s, n]; None where nothing is trained on."""
        return self._masks.uniform(x, self._place)


class ScoreDropout:
    """At the attention of one layer.

    Args:
        index: position among the ranks that have as many other heads each.
    """

    def __init__(self, masks: Masks, layer: int, index: int) -> None:
        self._masks, self._place, self._index = masks, _hash(layer + 1, PROBABILITIES), index

    def now(self, q: torch.Tensor) -> Dropped | None:
        """Of q [b, a, n, d]; None where none are dropped."""
        return self._masks.of_attention(self._place, q.shape[1], self._index)


class DenseCore(nn.Module):
    """Attention with all probabilities at once: what every other way of dropping them is compared with."""

    def __init__(self, plain: nn.Module, dropout: ScoreDropout) -> None:
        super().__init__()
        self.plain, self.dropout = plain, dropout

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        dropped = self.dropout.now(q)
        if dropped is None:
            return self.plain(q, k, v)
        at = torch.arange(q.shape[2], device=q.device)
        scores = q.unflatten(1, (k.shape[1], -1)) @ k.unsqueeze(2).transpose(-1, -2) / math.sqrt(q.shape[-1])
        p = scores.masked_fill(at > at.unsqueeze(1), -math.inf).softmax(-1)
        kept = dropped.between(dropped.rows(at), at).apply_(torch.ones_like(p))
        return (p * kept @ v.unsqueeze(2)).flatten(1, 2)


def apply(model: nn.Module, masks: Masks) -> None:
    """Take the places that a model has for hidden states, in place, and let routers draw; nothing without a rate, or
    noise."""
    for path, module in list(model.named_modules()):
        parent, _, child = path.rpartition(".")
        if child == ROUTER and masks.has_noise:
            module.uniform = Noise(masks, int(parent.split(".")[-2]))
        if child in SITES and masks.rate:
            layer = int(parent.rpartition(".")[2]) if parent else -1
            setattr(model.get_submodule(parent), child, Dropout(masks, layer, SITES[child]))


def apply_dense(model: nn.Module, masks: Masks) -> None:
    """Likewise, and that of attention, on one process."""
    apply(model, masks)
    for name, layer in layers_of(model).items() if masks.attention_rate else ():
        attention = part_of(layer, "attention")
        attention.core = DenseCore(attention.core, ScoreDropout(masks, int(name), 0))


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
