"""Look-ups in a table that lies in blocks of vocabulary and of hidden size.

Every rank has the ids of the whole micro-batch, and looks up those that lie in its block of the vocabulary; the others
give zeros. The sum over the blocks leaves each rank its own sequences:

    2D, 2.5D    table [V/q, h/q]     ids [b/δ, s] ─▶ [b/δ, s, h/q] ──reduce_scatter, tp_col──▶ [b/δq, s, h/q]
    3D          table [V/q, h/q²]    ids [b, s] ─▶ [b, s, h/q²] ──reduce_scatter, tp_input──▶ [b/q, s, h/q²]
                                     ──all_to_all, tp_weight──▶ [b/q², s, h/q]

In the cube a hidden state is cut into q parts and the table into q²: what looked up for other sequences goes to them,
and their parts come back. So no table is ever gathered, and its gradient is local.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.comm.differentiable import all_to_all_first, reduce_scatter_first
from meshwright.comm.mesh import Axis
from meshwright.core.placement import even_split
from meshwright.parallel.tensor import LookUp


class GridEmbedding(nn.Module):
    """The part that all grids share: rows of this rank's block of the vocabulary.

    Attributes:
        look_up: (ids, weight) → rows; `parallel.direct` puts another one here.
    """

    def __init__(self, plain: nn.Embedding, axis: Axis, num_embeddings: int) -> None:
        super().__init__()
        self.weight = plain.weight
        self.axis = axis
        self.first, self.num_rows = even_split(num_embeddings, axis.size, axis.index)
        self.look_up: LookUp = F.embedding

    def own_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[..] ids → [.., h'] rows, zero where they lie on another rank."""
        local = ids - self.first
        outside = (local < 0) | (local >= self.num_rows)
        return self.look_up(local.masked_fill(outside, 0), self.weight).masked_fill(outside.unsqueeze(-1), 0.0)


class SquareEmbedding(GridEmbedding):
    """On `depth` grids: [b, s] → [b/δq, s, h/q]."""

    def __init__(self, plain: nn.Embedding, col: Axis, depth: Axis | None, num_embeddings: int) -> None:
        super().__init__(plain, col, num_embeddings)
        self.depth = depth

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.depth is not None:
            ids = ids.tensor_split(self.depth.size)[self.depth.index]
        return reduce_scatter_first(self.own_rows(ids), self.axis)


class CubeEmbedding(GridEmbedding):
    """On a cube: [b, s] → [b/q², s, h/q]."""

    def __init__(self, plain: nn.Embedding, into: Axis, weight: Axis, num_embeddings: int) -> None:
        super().__init__(plain, into, num_embeddings)
        self.exchange = weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # Sequences lie in q blocks by tp_weight, each in q by tp_input; the sum is cut by the latter first.
        inner_first = ids.unflatten(0, (self.exchange.size, self.axis.size, -1)).transpose(0, 1)
        summed = reduce_scatter_first(self.own_rows(inner_first), self.axis)[0]
        parts = all_to_all_first(summed, self.exchange)
        return parts.movedim(0, -2).flatten(-2)
