"""Ulysses: for attention alone, every rank gives up most heads, and gets the other ranks' tokens of the rest.

    outside    rank r   tokens of r [n],  all heads                      n = s/P
               all-to-all  ▼  q, k, v together             ▲  all-to-all of the output
    attention  rank r   all tokens [s],   heads r·a/P to (r+1)·a/P

What it divides: the tokens; within attention the heads. Any attention kernel will do.
What it needs: rules `context-tokens`, `context-tensor`, `ulysses-heads`, `ulysses-kv-heads`. Where ranks exceed the
key/value heads, each of these is repeated before it is sent; its gradient is then summed over the copies.
What it costs: per layer and direction 2 all-to-alls, together b·n·d·(2a + 2·max(g, P)) elements; axis cp in
`cost.traffic`. Less than a ring where P is large, but it can't be hidden under attention, and P is at most the heads.

Source: Jacobs et al. 2023 (DeepSpeed-Ulysses).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from meshwright.comm.collectives import all_to_all
from meshwright.comm.mesh import Axis
from meshwright.core.batch import Places
from meshwright.core.tokens import positions
from meshwright.parallel.context.local import Table


def _order(axis: Axis, table: Table, device: torch.device) -> torch.Tensor | None:
    """[s]: where in the tokens of all ranks, one rank after the other, each position of the sequence stands; None where
    they are in order."""
    if table.balance == "contiguous":
        return None
    at = [at for rank in range(axis.size) for at in positions(table.balance, table.places.length, axis.size, rank)]
    return torch.tensor(at, device=device).argsort()


def to_heads(x: torch.Tensor, axis: Axis, order: torch.Tensor | None) -> torch.Tensor:
    """[b, A, n, d] of all heads → [b, A/P, s, d] of all tokens, in order. Inverse and adjoint: :func:`to_tokens`."""
    b, a, n, d = x.shape
    sent = x.reshape(b, axis.size, a // axis.size, n, d).movedim(1, 0).contiguous()
    whole = all_to_all(torch.empty_like(sent), sent, axis).movedim(0, 2).reshape(b, a // axis.size, axis.size * n, d)
    return whole if order is None else whole[:, :, order]


def to_tokens(x: torch.Tensor, axis: Axis, order: torch.Tensor | None) -> torch.Tensor:
    """[b, A/P, s, d] → [b, A, n, d], laid out as [b, n, A, d]."""
    b, a, s, d = x.shape
    if order is not None:
        x = torch.empty_like(x).index_copy_(2, order, x)
    sent = x.reshape(b, a, axis.size, s // axis.size, d).permute(2, 0, 3, 1, 4).contiguous()
    came = all_to_all(torch.empty_like(sent), sent, axis)
    return came.permute(1, 2, 0, 3, 4).reshape(b, s // axis.size, axis.size * a, d).transpose(1, 2)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, order: torch.Tensor | None, forth: bool) -> torch.Tensor:
        ctx.axis, ctx.order, ctx.forth = axis, order, forth
        return (to_heads if forth else to_tokens)(x, axis, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return (to_tokens if ctx.forth else to_heads)(grad, ctx.axis, ctx.order), None, None, None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axis: Axis, table: Table, core: torch.nn.Module
) -> torch.Tensor:
    """Causal attention of this rank's tokens to those of all ranks.

    Args:
        q, k, v, axis, table: as of `ring.attention`; P divides a, and g, or is a multiple of g.
        core: attention of whole sequences, (q, k, v, places) → out.
    """
    copies = max(1, axis.size // k.shape[1])
    if copies > 1:
        k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
    order = _order(axis, table, q.device)
    parts = [x.unflatten(1, (axis.size, -1)) for x in (q, k, v)]
    heads = [part.shape[2] for part in parts]
    whole = _Exchange.apply(torch.cat(parts, dim=2).flatten(1, 2), axis, order, True)
    documents = table.places.documents
    out = core(*whole.split(heads, dim=1), None if documents is None else Places(table.places.length, None, documents))
    back: torch.Tensor = _Exchange.apply(out, axis, order, False)
    return back
