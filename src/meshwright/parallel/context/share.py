"""A rank's share of a micro-batch: tokens, labels and places, all cut by one table of positions.

Labels are those of whole sequences, shifted before they come here: at the edge of a share the label is a token that
another rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshwright.comm.mesh import Axis
from meshwright.core.batch import MicroBatch, Places, documents_of
from meshwright.core.layouts import Balance
from meshwright.core.tokens import positions


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What a rank works on of a micro-batch."""

    tokens: torch.Tensor
    """[b, n] int64."""
    labels: torch.Tensor
    """[b, n]."""
    places: Places | None
    """None where whole sequences of one document each are here."""

    @property
    def positions(self) -> torch.Tensor:
        """[n], of its tokens in their sequence."""
        if self.places is None or self.places.positions is None:
            return torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return self.places.positions

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that it brings."""
        places = (self.places.positions, self.places.documents) if self.places else ()
        return [self.tokens, self.labels, *(x for x in places if x is not None)]

    @property
    def further(self) -> tuple[Places, ...]:
        """What a model is given beside the tokens."""
        return () if self.places is None else (self.places,)


class Cutter:
    """Cuts micro-batches for the rank at its position on the cp axis."""

    def __init__(self, axis: Axis, balance: Balance) -> None:
        self._axis, self._balance = axis, balance
        self._tables: dict[tuple[int, torch.device], torch.Tensor] = {}

    def cut(self, micro_batches: Sequence[MicroBatch]) -> list[Share]:
        """The shares of micro-batches of whole sequences."""
        return [self._share(micro_batch) for micro_batch in micro_batches]

    def _share(self, micro_batch: MicroBatch) -> Share:
        tokens, labels = micro_batch
        documents, length = documents_of(micro_batch), tokens.shape[1]
        if self._axis.size == 1:
            return Share(tokens, labels, None if documents is None else Places(length, None, documents))
        table = self._table(length, tokens.device)
        return Share(tokens[:, table], labels[:, table], Places(length, table, documents))

    def _table(self, length: int, device: torch.device) -> torch.Tensor:
        """[n]; one tensor for each length, so that rotary tables are made once."""
        if (length, device) not in self._tables:
            found = positions(self._balance, length, self._axis.size, self._axis.index)
            self._tables[length, device] = torch.tensor(found, device=device)
        return self._tables[length, device]
