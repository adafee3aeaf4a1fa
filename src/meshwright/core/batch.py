"""What a rank trains on: the unit of work, the label that does not count, and documents that share a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100
"""Label of a position that counts for nothing, as in `torch.nn.functional.cross_entropy`."""

MicroBatch: TypeAlias = "tuple[Tensor, Tensor]"
"""tokens [b, s] and labels [b, s], int64; labels[i, t] is the token after tokens[i, t], or IGNORE."""


class PackedBatch(tuple["Tensor", "Tensor"]):
    """A micro-batch whose sequences hold several documents: (tokens, labels), and which document each token is of.

    A token attends to its own document alone, and learned positions begin again with each.

    Attributes:
        documents: [b, s] int64, never less than the one before: equal numbers are one document.
    """

    documents: Tensor

    def __new__(cls, tokens: Tensor, labels: Tensor, documents: Tensor) -> PackedBatch:
        """A pair, for whoever needs no more."""
        batch = super().__new__(cls, (tokens, labels))
        batch.documents = documents
        return batch


def documents_of(micro_batch: MicroBatch) -> Tensor | None:
    """[b, s], or None where each sequence is one document."""
    return micro_batch.documents if isinstance(micro_batch, PackedBatch) else None


@dataclass(frozen=True, eq=False)
class Places:
    """Where tokens stand: what a model must know beside them, unless it has whole sequences of one document each."""

    length: int
    """Tokens of a whole sequence, s."""
    positions: Tensor | None = None
    """[n] int64, ascending: those of the sequence's tokens that are here; None: all."""
    documents: Tensor | None = None
    """[b, s] of the whole sequences, as in :class:`PackedBatch`."""

    @cached_property
    def ends(self) -> tuple[tuple[int, ...], ...] | None:
        """For each sequence where its documents end, the last at `length`; None without documents."""
        if self.documents is None:
            return None
        return tuple(document_ends(row) for row in self.documents.tolist())


def document_ends(documents: list[int]) -> tuple[int, ...]:
    """`[0, 0, 0, 1, 1]` → `(3, 5)`."""
    changes = (at for at, (one, other) in enumerate(pairwise(documents), 1) if one != other)
    return (*changes, len(documents))
