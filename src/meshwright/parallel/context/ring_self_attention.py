"""Ring self-attention: keys go round until a rank has whole rows of scores, then values do.

    scores of rank r  [s/P, s]   = its queries · the keys of rank 0 │ rank 1 │ ... │ rank P−1     (first ring)
    softmax over whole rows, here
    output            [s/P, d]   = Σ over ranks: block of probabilities · values of that rank      (second ring)

What it divides: the tokens. The probabilities, b·a·s²/P of them on each rank, are kept: longer sequences fit, but not
without end, as with ring attention. No limit by heads: P may exceed their number.
What it needs: rules `context-tokens`, `context-tensor`.
What it costs: per layer forward 2 rings of P − 1 messages, backward as many, and 2 reduce-scatters of dk and dv; axis
cp in `cost.traffic`.

Backward is the sum over ranks: nothing is divided by P. Scores are scaled by √(head dim), not by √(hidden size).

Source: Li et al. 2021 (Sequence Parallelism: Long Sequence Training from System Perspective), §3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from meshwright.comm.collectives import reduce_scatter_start
from meshwright.comm.mesh import Axis
from meshwright.core.tokens import positions
from meshwright.parallel.context.block import statistic_dtype
from meshwright.parallel.context.local import Table, View
from meshwright.parallel.context.ring import round_the_ring
from meshwright.parallel.dropout import Dropped, ScoreMask


def _hidden(axis: Axis, table: Table, device: torch.device) -> torch.Tensor:
    """bool [b or 1, 1, 1, n, P, n]: which scores of this rank's rows are masked."""
    places, size = table.places, axis.size
    of_rank = [positions(table.balance, places.length, size, rank) for rank in range(size)]
    keys = torch.tensor(of_rank, device=device)
    queries = keys[axis.index]
    hidden = (keys > queries[:, None, None]).unsqueeze(0)
    if places.documents is not None:
        of_keys, of_queries = places.documents[:, keys], places.documents[:, queries]
        hidden = hidden | (of_keys.unsqueeze(1) != of_queries[:, :, None, None])
    return hidden[:, None, None]


def _grouped(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[b, a, n, d] → [b, g, a/g, n, d]."""
    return x.unflatten(1, (num_groups, -1))


def _probabilities(q: torch.Tensor, k: torch.Tensor, axis: Axis, table: Table) -> torch.Tensor:
    """[b, g, a/g, n, P, n] of grouped queries, over the keys of all ranks. q's dtype."""
    scores = q.new_empty((*q.shape[:-1], axis.size, k.shape[2]), dtype=statistic_dtype(q.dtype))
    for rank, keys in round_the_ring(k, axis):
        scores[..., rank, :] = q @ keys.unsqueeze(2).transpose(-1, -2)
    scores *= 1 / math.sqrt(q.shape[-1])
    scores.masked_fill_(_hidden(axis, table, q.device), -math.inf)
    return scores.flatten(-2).softmax(-1).to(q.dtype).view_as(scores)


class _RingSelfAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axis: Axis, view: View) -> torch.Tensor:
        mask_of = view.masks(q.device)
        k, v, groups = k.contiguous(), v.contiguous(), _grouped(q, k.shape[1])
        p = _probabilities(groups, k, axis, view.table)
        out = torch.zeros_like(groups, dtype=statistic_dtype(q.dtype))
        for rank, values in round_the_ring(v, axis):
            out += _kept(p[..., rank, :], mask_of(rank)) @ values.unsqueeze(2)
        ctx.axis, ctx.view = axis, view
        ctx.save_for_backward(q, k, v, p)
        b, a, n, d = q.shape
        return q.new_empty((b, n, a, d)).transpose(1, 2).copy_(out.flatten(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        axis: Axis = ctx.axis
        view: View = ctx.view
        q, k, v, p = ctx.saved_tensors
        mask_of = view.masks(q.device)
        groups, grads = _grouped(q, k.shape[1]), _grouped(grad, k.shape[1])
        kept = p
        if view.dropped is not None:
            kept = torch.stack([_kept(p[..., rank, :], mask_of(rank)) for rank in range(axis.size)], -2)
        dv, summing_v = _summed(kept, grads, axis)
        ds = torch.empty_like(p, dtype=statistic_dtype(q.dtype))
        for rank, values in round_the_ring(v, axis):
            ds[..., rank, :] = _kept(grads @ values.unsqueeze(2).transpose(-1, -2), mask_of(rank))
        ds -= (ds * p).sum((-1, -2), keepdim=True)
        ds = ds.mul_(p).mul_(1 / math.sqrt(q.shape[-1])).to(q.dtype)
        dk, summing_k = _summed(ds, groups, axis)
        dq = torch.zeros_like(groups, dtype=statistic_dtype(q.dtype))
        for rank, keys in round_the_ring(k, axis):
            dq += ds[..., rank, :] @ keys.unsqueeze(2)
        summing_v.wait()
        summing_k.wait()
        return dq.flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _kept(x: torch.Tensor, mask: ScoreMask | None) -> torch.Tensor:
    """Of x [b, g, a/g, n, n] what is not dropped."""
    return x if mask is None else mask.apply_(x.clone())


def _summed(weights: torch.Tensor, rows: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, Any]:
    """Σ over ranks of weightsᵀ · rows [b, g, n, d], of this rank's keys; and what to wait for until it is there.

    Args:
        weights: [b, g, a/g, n, P, n].
        rows: [b, g, a/g, n, d].
    """
    by_rank = torch.einsum("bghipj,bghid->pbgjd", weights, rows).to(statistic_dtype(rows.dtype)).contiguous()
    out = torch.empty_like(by_rank[0])
    return out, reduce_scatter_start(out, by_rank, axis)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axis: Axis, table: Table, dropped: Dropped | None = None
) -> torch.Tensor:
    """Causal attention of this rank's tokens to those of all ranks; arguments as of `ring.attention`."""
    out: torch.Tensor = _RingSelfAttention.apply(q, k, v, axis, View(axis.index, table, dropped))
    return out
