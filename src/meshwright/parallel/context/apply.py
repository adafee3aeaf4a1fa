"""Puts the attention of a context-parallel rank in the place of the plain one.

    kind                   what is exchanged                    balance matters for      kept besides q, k, v, output
    ring-self-attention    keys, values                         who works how much       probabilities, s²/P
    ring                   keys and values                      who works how much       log-sum-exp
    ulysses                tokens for heads                     nothing                  log-sum-exp

Everything else in a layer works on each token by itself, and runs as it is. Rotary and learned positions are those of
the whole sequence, because the model is told where its tokens stand (`core.batch.Places`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from meshwright.comm.mesh import Axis
from meshwright.core.batch import Places
from meshwright.core.layouts import Context
from meshwright.parallel.context import local, ring, ring_self_attention, ulysses
from meshwright.parallel.context.local import Table
from meshwright.parallel.dropout import Masks, ScoreDropout
from meshwright.parallel.layers import layers_of, part_of

Own = Callable[[torch.Tensor], torch.Tensor]
RINGS = {"ring": ring.attention, "ring-self-attention": ring_self_attention.attention}


class WholeCore(nn.Module):
    """Attention of whole sequences: the plain one, and piece by piece where documents share a sequence, or where
    probabilities are dropped.

    Args:
        own: of the documents of a micro-batch's sequences [b, s], those of the ones that attention has here.

    Attributes:
        dropout: of its probabilities; :func:`drop` sets it.
    """

    def __init__(self, plain: nn.Module, own: Own = lambda documents: documents) -> None:
        super().__init__()
        self.plain, self.own = plain, own
        self.dropout: ScoreDropout | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: Places | None = None) -> torch.Tensor:
        dropped = self.dropout.now(q) if self.dropout is not None else None
        documents = None if places is None or places.documents is None else self.own(places.documents)
        if (documents is None and dropped is None) or q.device.type == "meta":
            return self.plain(q, k, v)
        return local.attention(q, k, v, documents, dropped)


class ContextCore(nn.Module):
    """Attention of a share of each sequence's tokens. q [b, a, n, d], k and v [b, g, n, d] → [b, a, n, d]."""

    def __init__(self, whole: nn.Module, context: Context, axis: Axis) -> None:
        super().__init__()
        self.whole, self.context, self.axis = whole, context, axis
        self.dropout: ScoreDropout | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: Places | None = None) -> torch.Tensor:
        assert places is not None
        table = Table(self.context.balance, self.axis.size, places)
        if self.context.kind == "ulysses":
            return ulysses.attention(q, k, v, self.axis, table, self.whole)
        dropped = self.dropout.now(q) if self.dropout is not None else None
        return RINGS[self.context.kind](q, k, v, self.axis, table, dropped)


def apply(model: nn.Module, context: Context, axis: Axis, own: Own) -> None:
    """Replace every layer's attention core, in place; `own` as of :class:`WholeCore`."""
    for layer in layers_of(model).values():
        attention = part_of(layer, "attention")
        whole = WholeCore(attention.core, own)
        attention.core = whole if axis.size == 1 else ContextCore(whole, context, axis)


def drop(model: nn.Module, masks: Masks) -> None:
    """Drop probabilities of every layer's attention, once cores and dropout were put there; nothing without a rate."""
    for name, layer in layers_of(model).items() if masks.attention_rate else ():
        core, index = part_of(layer, "attention.core"), masks.part.heads
        if isinstance(core, ContextCore) and core.context.kind == "ulysses":
            index, core = index * core.axis.size + core.axis.index, core.whole
        core.dropout = ScoreDropout(masks, int(name), index)
