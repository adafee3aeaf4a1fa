"""Attention of a rank's queries to the keys of one rank, piece by piece (`core.tokens.pieces`).

Nothing of the size of a mask is made: what is masked is left out, documents too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from meshwright.core.batch import Places
from meshwright.core.layouts import Balance
from meshwright.core.tokens import Piece, pieces, positions
from meshwright.parallel.context import block
from meshwright.parallel.context.block import Block
from meshwright.parallel.dropout import Dropped, ScoreMask

Span = tuple[slice, tuple[Piece, ...]]
"""Some of the sequences, and their pieces."""


@dataclass(frozen=True, slots=True)
class Table:
    """Who sees what, in the sequences of a micro-batch."""

    balance: Balance
    num_ranks: int
    places: Places

    def spans(self, rank: int, source: int) -> Iterator[Span]:
        """What queries of `rank` see of the keys of `source`. Sequences with the same documents go together."""
        length, by_sequence = self.places.length, self.places.ends
        if by_sequence is None or len(set(by_sequence)) == 1:
            ends = None if by_sequence is None else by_sequence[0]
            yield slice(None), pieces(self.balance, length, self.num_ranks, rank, source, ends)
            return
        for at, ends in enumerate(by_sequence):
            yield slice(at, at + 1), pieces(self.balance, length, self.num_ranks, rank, source, ends)


def empty_block(q: torch.Tensor, dtype: torch.dtype) -> Block:
    """Room for the output of q [b, a, n, d], laid out as [b, n, a, d], and for its log-sum-exp."""
    b, a, n, d = q.shape
    return q.new_empty((b, n, a, d), dtype=dtype).transpose(1, 2), q.new_empty((b, a, n), dtype=dtype)


@torch.no_grad()
def attend(
    into: Block,
    q: torch.Tensor,
    kv: Sequence[torch.Tensor] | torch.Tensor,
    spans: Iterator[Span],
    mask: ScoreMask | None,
    *,
    first: bool,
) -> None:
    """Take the keys and values kv [2, b, g, n, d] of one rank into the attention of q [b, a, n, d].

    Args:
        mask: of the probabilities of all of q with all of kv, which are dropped.
        first: these are the rank's own keys, of which every query sees one: `into` holds nothing yet.
    """
    k, v = kv[0], kv[1]
    for rows, found in spans:
        for piece in found:
            at, keys = slice(*piece.queries), slice(*piece.keys)
            own = None if mask is None else mask.part(rows, at, keys)
            part = block.forward(q[rows, :, at], k[rows, :, keys], v[rows, :, keys], piece.causal, own)
            here = into[0][rows, :, at], into[1][rows, :, at]
            if first:
                here[0].copy_(part[0])
                here[1].copy_(part[1])
            else:
                block.merge_(here, part)


@torch.no_grad()
def add_gradients(
    into: tuple[torch.Tensor, torch.Tensor],
    grad: torch.Tensor,
    q: torch.Tensor,
    kv: Sequence[torch.Tensor] | torch.Tensor,
    whole: Block,
    spans: Iterator[Span],
    mask: ScoreMask | None,
) -> None:
    """Add to into = (dq [b, a, n, d], dkv [2, b, g, n, d]) what these keys and values contribute.

    Args:
        grad: of the whole output.
        q, kv, spans, mask: as for :func:`attend`.
        whole: output and log-sum-exp over all keys of all ranks.
    """
    (dq, dkv), (k, v) = into, (kv[0], kv[1])
    for rows, found in spans:
        for piece in found:
            at, keys = slice(*piece.queries), slice(*piece.keys)
            here = whole[0][rows, :, at], whole[1][rows, :, at]
            dropped = None if mask is None else mask.part(rows, at, keys)
            own = block.backward(
                grad[rows, :, at], q[rows, :, at], k[rows, :, keys], v[rows, :, keys], here, piece.causal, dropped
            )
            dq[rows, :, at] += own[0]
            dkv[0, rows, :, keys] += own[1]
            dkv[1, rows, :, keys] += own[2]


@dataclass(frozen=True, slots=True)
class View:
    """What the queries of one rank see, and how much of it is dropped."""

    rank: int
    table: Table
    dropped: Dropped | None = None

    def spans(self, source: int) -> Iterator[Span]:
        """Of the keys of rank `source`."""
        return self.table.spans(self.rank, source)

    def masks(self, device: torch.device) -> Callable[[int], ScoreMask | None]:
        """Rank whose keys they are → the mask of what the queries make of them; None where none are dropped."""
        table, dropped = self.table, self.dropped
        if dropped is None:
            return lambda source: None

        def at(of: int) -> torch.Tensor:
            return torch.tensor(positions(table.balance, table.places.length, table.num_ranks, of), device=device)

        rows = dropped.rows(at(self.rank))
        return lambda source: dropped.between(rows, at(source))


class _Attention(torch.autograd.Function):
    """Of whole sequences with documents, or with dropout. Keeps what flash attention keeps: q, k, v, out,
    log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: View) -> torch.Tensor:
        out, lse = empty_block(q, q.dtype)[0], empty_block(q, block.statistic_dtype(q.dtype))[1]
        attend((out, lse), q, (k, v), view.spans(0), view.masks(q.device)(0), first=True)
        ctx.view = view
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, *whole = ctx.saved_tensors
        dq, dkv = torch.zeros_like(q), k.new_zeros((2, *k.shape))
        view: View = ctx.view
        mask = view.masks(q.device)(0)
        add_gradients((dq, dkv), grad, q, (k, v), (whole[0], whole[1]), view.spans(0), mask)
        return dq, dkv[0], dkv[1], None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None, dropped: Dropped | None = None
) -> torch.Tensor:
    """Causal attention within documents, of whole sequences: q [b, a, s, d], k and v [b, g, s, d] → [b, a, s, d].

    Args:
        documents: [b, s]; None: each sequence is one.
        dropped: which probabilities are.
    """
    view = View(0, Table("contiguous", 1, Places(q.shape[2], None, documents)), dropped)
    out: torch.Tensor = _Attention.apply(q, k, v, view)
    return out
