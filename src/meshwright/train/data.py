"""Training data: text packed into one flat token array, cut into samples that no layout can change.

    documents     the cat sat <end> a dog <end> ...        joined by the end-of-text token
    samples       |  0  |  1  |  2  |  3  | ...             windows of seq_length + 1, one token shared
    positions     |  2  |  0  |  3  |  1  |  1  |  2  | ...  one permutation per epoch, from (seed, epoch)
    steps         |----- 0 ----|----- 1 ----|----- 2 ...     global_batch_size positions each
    dp rank 0     |--- 0 --|                                 its share, cut into micro-batches

The samples of a step depend on (seed, step) alone, and the only state is how many positions have
been consumed; so a run can resume under another layout or another global batch size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from meshwright.core.batch import IGNORE, MicroBatch, PackedBatch
from meshwright.core.errors import InputError
from meshwright.core.units import counted

TokenArray = npt.NDArray[np.integer[Any]]


class _Samples:
    """Windows of a flat token array. Sample i is tokens [i·s, i·s + s]: inputs and shifted labels."""

    def __init__(
        self, tokens: TokenArray, seq_length: int, mask: npt.NDArray[np.bool_] | None, end_of_text: int | None
    ) -> None:
        if mask is not None and mask.shape != tokens.shape:
            raise InputError(f"mask of {mask.size:,} entries for {tokens.size:,} tokens; one entry per token is needed")
        self.tokens = tokens
        self.seq_length = seq_length
        self.mask = mask
        self.end_of_text = end_of_text
        self.num_samples = max(0, tokens.size - 1) // seq_length

    def micro_batch(self, samples: npt.NDArray[np.int64]) -> MicroBatch:
        """tokens and labels [len(samples), s]; a negative index gives a row that counts for nothing."""
        shape = (len(samples), self.seq_length + 1)
        rows, targets = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
        for row, sample in enumerate(samples):
            if sample >= 0:
                window = slice(sample * self.seq_length, (sample + 1) * self.seq_length + 1)
                rows[row] = self.tokens[window]
                targets[row] = True if self.mask is None else self.mask[window]
        is_end = rows[:, :-1] == self.end_of_text if self.end_of_text is not None else np.zeros((), np.bool_)
        labels = torch.from_numpy(np.where(targets[:, 1:] & ~is_end, rows[:, 1:], IGNORE))
        inputs = torch.from_numpy(np.ascontiguousarray(rows[:, :-1]))
        if self.end_of_text is None:
            return inputs, labels
        documents = np.zeros(inputs.shape, np.int64)
        documents[:, 1:] = is_end[:, :-1].cumsum(axis=1)
        return PackedBatch(inputs, labels, torch.from_numpy(documents))


class PackedDataset:
    """Endless training samples in an order that depends on the seed alone.

    Args:
        tokens: [num_tokens] integers, usually memory-mapped.
        seq_length: tokens per sample, s.
        global_batch_size: samples per step, over all ranks.
        seed: of the order.
        mask: [num_tokens] bool, False where a token is no target (its label is IGNORE).
        end_of_text: the token that ends a document. Where it is given, micro-batches say which document each token is
            of, so that none sees another; and a document's first token is no target. None: a sequence is one document.

    Raises:
        InputError: fewer tokens than one global batch needs.
    """

    def __init__(
        self,
        tokens: TokenArray,
        seq_length: int,
        global_batch_size: int,
        seed: int,
        mask: npt.NDArray[np.bool_] | None = None,
        end_of_text: int | None = None,
    ) -> None:
        check_enough_tokens(tokens.size, seq_length, global_batch_size)
        self._samples = _Samples(tokens, seq_length, mask, end_of_text)
        self.seq_length = seq_length
        self.global_batch_size = global_batch_size
        self.seed = seed
        self._start_step = 0
        self._start_samples = 0
        self._orders: dict[int, npt.NDArray[np.int64]] = {}

    @property
    def num_samples(self) -> int:
        """Samples in one epoch."""
        return self._samples.num_samples

    def consumed_samples(self, step: int) -> int:
        """Samples that the steps before `step` have used, since the start of training."""
        return self._start_samples + (step - self._start_step) * self.global_batch_size

    def batch(self, step: int) -> npt.NDArray[np.int64]:
        """Global sample indices [global_batch_size] of step `step` (from 0), the same on every rank."""
        if step < self._start_step:
            raise InputError(f"step {step} lies before step {self._start_step}, from which this run was resumed")
        first = self.consumed_samples(step)
        positions = range(first, first + self.global_batch_size)
        epochs = range(positions[0] // self.num_samples, positions[-1] // self.num_samples + 1)
        self._orders = {epoch: self._order(epoch) for epoch in epochs}
        chosen = [self._orders[p // self.num_samples][p % self.num_samples] for p in positions]
        return np.array(chosen, dtype=np.int64)

    def micro_batches(
        self, step: int, dp_index: int, dp: int, num_micro_batches: int, micro_batch_size: int
    ) -> list[MicroBatch]:
        """What data-parallel rank `dp_index` of `dp` trains on in step `step`.

        Returns:
            `num_micro_batches` pairs (tokens, labels), each [micro_batch_size, seq_length] int64; with `end_of_text`
            as :class:`~meshwright.core.batch.PackedBatch`.

        Raises:
            InputError: dp × num_micro_batches × micro_batch_size is not the global batch size.
        """
        check_layout(self.global_batch_size, dp, num_micro_batches, micro_batch_size)
        mine = self.batch(step).reshape(dp, num_micro_batches, micro_batch_size)[dp_index]
        return [self._samples.micro_batch(samples) for samples in mine]

    def state_dict(self, step: int) -> dict[str, int]:
        """What a checkpoint taken before step `step` needs in order to go on with the next sample."""
        own = _identity(int(self._samples.tokens.size), self.seq_length, self.seed)
        return {"step": step, "consumed_samples": self.consumed_samples(step), **own}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after :meth:`state_dict`, under any layout and any global batch size.

        Raises:
            InputError: the state belongs to other tokens, another sequence length or another seed,
                so that samples would be lost or seen twice.
        """
        check_same_samples(state, int(self._samples.tokens.size), self.seq_length, self.seed)
        self._start_step = state["step"]
        self._start_samples = state["consumed_samples"]

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Permutation of an epoch. Raw generator output, which no numpy version may change (NEP 19)."""
        if epoch in self._orders:
            return self._orders[epoch]
        keys = np.random.PCG64([self.seed, epoch]).random_raw(self.num_samples)
        return np.argsort(keys, kind="stable")


class EvaluationSet:
    """Every sample of a token array once, in order, in rounds of a global batch.

    The last round is filled with rows that count for nothing, so the loss over all unmasked tokens
    is the same for every layout.

    Args:
        tokens, seq_length, mask, end_of_text: as for :class:`PackedDataset`.
        max_samples: use only the first samples.

    Raises:
        InputError: fewer tokens than one sample needs.
    """

    def __init__(
        self,
        tokens: TokenArray,
        seq_length: int,
        max_samples: int | None = None,
        mask: npt.NDArray[np.bool_] | None = None,
        end_of_text: int | None = None,
    ) -> None:
        check_enough_tokens(tokens.size, seq_length, 1, "evaluation")
        self._samples = _Samples(tokens, seq_length, mask, end_of_text)
        self.num_samples = min(self._samples.num_samples, max_samples or self._samples.num_samples)

    def num_rounds(self, global_batch_size: int) -> int:
        """Rounds that cover all samples."""
        return -(-self.num_samples // global_batch_size)

    def micro_batches(
        self, round_index: int, dp_index: int, dp: int, num_micro_batches: int, micro_batch_size: int
    ) -> list[MicroBatch]:
        """Share of one rank of one round; shapes as :meth:`PackedDataset.micro_batches`."""
        size = dp * num_micro_batches * micro_batch_size
        indices = np.arange(round_index * size, (round_index + 1) * size)
        indices = np.where(indices < self.num_samples, indices, -1)
        mine = indices.reshape(dp, num_micro_batches, micro_batch_size)[dp_index]
        return [self._samples.micro_batch(samples) for samples in mine]


def check_layout(global_batch_size: int, dp: int, num_micro_batches: int, micro_batch_size: int) -> None:
    """Raises InputError unless the layout covers the global batch exactly."""
    size = dp * num_micro_batches * micro_batch_size
    if size != global_batch_size:
        raise InputError(
            f"{dp} data-parallel ranks × {num_micro_batches} micro-batches × {micro_batch_size} samples = {size}, "
            f"but the global batch has {global_batch_size}"
        )


def check_same_samples(state: Mapping[str, int], num_tokens: int, seq_length: int, seed: int) -> None:
    """Raises InputError where `state` (as of :meth:`PackedDataset.state_dict`) belongs to other samples or another
    order."""
    for name, mine in _identity(num_tokens, seq_length, seed).items():
        if state[name] != mine:
            raise InputError(
                f"cannot resume the data: `{name}` is {mine}, it was {state[name]}; samples would be lost or seen twice"
            )


def _identity(num_tokens: int, seq_length: int, seed: int) -> dict[str, int]:
    return {"num_tokens": num_tokens, "seq_length": seq_length, "seed": seed}


def check_enough_tokens(
    num_tokens: int, seq_length: int, num_samples: int, use: str = "training", reserved: int = 0
) -> None:
    """Raises InputError where `num_tokens`, less the `reserved` ones, hold fewer than `num_samples` samples."""
    needed = num_samples * seq_length + 1
    if num_tokens - reserved < needed:
        kept = f" besides {reserved:,} kept for evaluation" if reserved else ""
        raise InputError(
            f"the text is too short: {counted(num_tokens, 'token')}, but {counted(num_samples, 'sequence')} of "
            f"{seq_length} for {use} need {needed:,}{kept}; give more text, or shorter or fewer sequences"
        )
