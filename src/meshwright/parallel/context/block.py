"""Attention of some queries to some keys, with its log-sum-exp, so that parts can be put together.

    out = softmax(scores) · v      lse = log Σ exp(scores)      of the keys that are here
    dS  = P ∘ (dO·vᵀ − D)          P = exp(scores − lse)        of all keys, D = rowsum(dO ∘ out)

On the CPU it is PyTorch's flash kernel, which takes fewer key/value heads than heads as they are. Elsewhere it is plain
products over a few rows at a time, so that no more than `_MAX_SCORES` scores are there at once.

Source: Dao et al. 2022 (FlashAttention), §3.1 and appendix B.
"""

from __future__ import annotations

import math

import torch

Block = tuple[torch.Tensor, torch.Tensor]
"""out [b, a, n, d], lse [b, a, n] (fp32, or fp64 of fp64)."""
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""dq [b, a, n, d], dk and dv [b, g, m, d]."""

_MAX_SCORES = 2**24
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def statistic_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which sums over keys are kept: at least fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Block:
    """Attention of q [b, a, n, d] to k, v [b, g, m, d].

    Args:
        q, k, v: heads a are a multiple of g.
        causal: query i sees keys 0 to i; otherwise all.
    """
    if q.device.type == "cpu":
        out, lse = _FLASH(q, k, v, 0.0, causal)
        return out, lse
    return _plain_forward(q, k, v, causal)


def backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, whole: Block, causal: bool
) -> Gradients:
    """Gradients of what these keys add to the attention of the queries.

    Args:
        grad: of the whole output, [b, a, n, d].
        q, k, v, causal: as for :func:`forward`.
        whole: output and log-sum-exp of the queries over all their keys.
    """
    if q.device.type == "cpu":
        dq, dk, dv = _FLASH_BACKWARD(grad, q, k, v, *whole, 0.0, causal)
        return dq, dk, dv
    return _plain_backward(grad, q, k, v, whole, causal)


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


def _rows_at_a_time(q: torch.Tensor, k: torch.Tensor) -> int:
    per_row = q.shape[0] * q.shape[1] * k.shape[2]
    return max(1, _MAX_SCORES // max(1, per_row))


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


def _plain_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Block:
    groups, rows = _grouped(q, k.shape[1]), _rows_at_a_time(q, k)
    outs, sums = [], []
    for first in range(0, q.shape[2], rows):
        scores = _scores(groups[..., first : first + rows, :], k, first, causal)
        lse = scores.logsumexp(-1)
        outs.append((scores.sub_(lse.unsqueeze(-1)).exp_() @ v.to(scores.dtype).unsqueeze(2)).flatten(1, 2))
        sums.append(lse.flatten(1, 2))
    return torch.cat(outs, 2).to(q.dtype), torch.cat(sums, 2)


def _plain_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, whole: Block, causal: bool
) -> Gradients:
    wide, num_groups, rows = statistic_dtype(q.dtype), k.shape[1], _rows_at_a_time(q, k)
    groups, grads = _grouped(q, num_groups), _grouped(grad, num_groups).to(wide)
    sums = (grads * _grouped(whole[0], num_groups).to(wide)).sum(-1, keepdim=True)
    lse = _grouped(whole[1], num_groups).unsqueeze(-1)
    scale, keys, values = 1 / math.sqrt(q.shape[-1]), k.to(wide).unsqueeze(2), v.to(wide).unsqueeze(2)
    dk, dv, dqs = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide), []
    for first in range(0, q.shape[2], rows):
        part = slice(first, first + rows)
        p = _scores(groups[..., part, :], k, first, causal).sub_(lse[..., part, :]).exp_()
        dv += (p.transpose(-1, -2) @ grads[..., part, :]).sum(2)
        ds = p.mul_((grads[..., part, :] @ values.transpose(-1, -2)).sub_(sums[..., part, :])).mul_(scale)
        dqs.append((ds @ keys).flatten(1, 2))
        dk += (ds.transpose(-1, -2) @ groups[..., part, :].to(wide)).sum(2)
    return torch.cat(dqs, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
