"""Attention of some queries to some keys, with its log-sum-exp, so that parts can be put together.

    out = softmax(scores) · v      lse = log Σ exp(scores)      of the keys that are here
    dS  = P ∘ (dO·vᵀ − D)          P = exp(scores − lse)        of all keys, D = rowsum(dO ∘ out)

On the CPU it is PyTorch's flash kernel, which takes fewer key/value heads than heads as they are. Elsewhere, and where
probabilities are dropped, it is plain products over a few rows at a time, so that no more than `_MAX_SCORES` scores are
there at once. With dropout, M ∘ P in place of P (M: 0 or 1/(1 − rate)), the sums over keys stay those of P:

    out = (M ∘ P)·v      dS = P ∘ (M ∘ (dO·vᵀ) − D)      D as above, because rowsum(dO ∘ out) = rowsum(P ∘ M ∘ (dO·vᵀ))

Source: Dao et al. 2022 (FlashAttention), §3.1 and appendix B.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from meshwright.parallel.dropout import ScoreMask

Block = tuple[torch.Tensor, torch.Tensor]
"""out [b, a, n, d], lse [b, a, n] (fp32, or fp64 of fp64)."""
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""dq [b, a, n, d], dk and dv [b, g, m, d]."""

_MAX_SCORES = 2**22
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def statistic_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which sums over keys are kept: at least fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: ScoreMask | None = None) -> Block:
    """Attention of q [b, a, n, d] to k, v [b, g, m, d].

    Args:
        q, k, v: heads a are a multiple of g.
        causal: query i sees keys 0 to i; otherwise all.
        mask: of the probabilities, which are dropped; None: none.
    """
    if q.device.type == "cpu" and mask is None:
        out, lse = _FLASH(q, k, v, 0.0, causal)
        return out, lse
    return _plain_forward(q, k, v, causal, mask)


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    whole: Block,
    causal: bool,
    mask: ScoreMask | None = None,
) -> Gradients:
    """Gradients of what these keys add to the attention of the queries.

    Args:
        grad: of the whole output, [b, a, n, d].
        q, k, v, causal, mask: as for :func:`forward`.
        whole: output and log-sum-exp of the queries over all their keys.
    """
    if q.device.type == "cpu" and mask is None:
        dq, dk, dv = _FLASH_BACKWARD(grad, q, k, v, *whole, 0.0, causal)
        return dq, dk, dv
    return _plain_backward(grad, q, k, v, whole, causal, mask)


@torch.no_grad()
def merge_(into: Block, part: Block) -> None:
    """Take the part's keys into `into`, in place. Rows without any key have out 0 and lse −∞.

    The new output is a mean of the two, weighted by exp(lse); it is never a quotient of sums that may overflow.
    """
    out, lse = into
    merged = torch.logaddexp(lse, part[1])
    weight = (part[1] - merged).exp_().nan_to_num_(0.0).unsqueeze(-1)  # −∞ of both: nothing yet
    out.lerp_(part[0].to(out.dtype), weight)
    lse.copy_(merged)


def _chunks(q: torch.Tensor, k: torch.Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """(rows, keys that they see) so that there are few scores at a time."""
    num_keys = k.shape[2]
    rows = max(1, _MAX_SCORES // max(1, q.shape[0] * q.shape[1] * num_keys))
    for first in range(0, q.shape[2], rows):
        last = min(q.shape[2], first + rows)
        yield slice(first, last), slice(0, min(last, num_keys) if causal else num_keys)


def _scores(q: torch.Tensor, k: torch.Tensor, first: int, causal: bool) -> torch.Tensor:
    """[b, g, a/g, rows, m] in the dtype of statistics; `first` is the number of the first row."""
    wide = statistic_dtype(q.dtype)
    scores = q.to(wide) @ k.to(wide).unsqueeze(2).transpose(-1, -2)
    scores *= 1 / math.sqrt(q.shape[-1])
    if causal:
        rows = torch.arange(first, first + q.shape[-2], device=q.device)
        keys = torch.arange(k.shape[2], device=q.device)
        scores.masked_fill_(keys > rows.unsqueeze(1), -math.inf)
    return scores


def _grouped(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[b, a, n, ..] → [b, g, a/g, n, ..]."""
    return x.unflatten(1, (num_groups, -1))


def _plain_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: ScoreMask | None) -> Block:
    groups, outs, sums = _grouped(q, k.shape[1]), [], []
    for rows, keys in _chunks(q, k, causal):
        scores = _scores(groups[..., rows, :], k[..., keys, :], rows.start, causal)
        lse = scores.logsumexp(-1)
        p = scores.sub_(lse.unsqueeze(-1)).exp_()
        if mask is not None:
            mask.part(slice(None), rows, keys).apply_(p)
        outs.append((p @ v[..., keys, :].to(p.dtype).unsqueeze(2)).flatten(1, 2))
        sums.append(lse.flatten(1, 2))
    return torch.cat(outs, 2).to(q.dtype), torch.cat(sums, 2)


def _plain_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    whole: Block,
    causal: bool,
    mask: ScoreMask | None,
) -> Gradients:
    wide, num_groups = statistic_dtype(q.dtype), k.shape[1]
    groups, grads = _grouped(q, num_groups), _grouped(grad, num_groups).to(wide)
    sums = (grads * _grouped(whole[0], num_groups).to(wide)).sum(-1, keepdim=True)
    lse = _grouped(whole[1], num_groups).unsqueeze(-1)
    scale, values = 1 / math.sqrt(q.shape[-1]), v.to(wide).unsqueeze(2)
    dk, dv, dqs = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide), []
    for rows, keys in _chunks(q, k, causal):
        part = None if mask is None else mask.part(slice(None), rows, keys)
        own_keys = k[..., keys, :]
        p = _scores(groups[..., rows, :], own_keys, rows.start, causal).sub_(lse[..., rows, :]).exp_()
        kept = p if part is None else part.apply_(p.clone())
        dv[..., keys, :] += (kept.transpose(-1, -2) @ grads[..., rows, :]).sum(2)
        dp = grads[..., rows, :] @ values[..., keys, :].transpose(-1, -2)
        dp = dp if part is None else part.apply_(dp)
        ds = p.mul_(dp.sub_(sums[..., rows, :])).mul_(scale)
        dqs.append((ds @ own_keys.to(wide).unsqueeze(2)).flatten(1, 2))
        dk[..., keys, :] += (ds.transpose(-1, -2) @ groups[..., rows, :].to(wide)).sum(2)
    return torch.cat(dqs, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
