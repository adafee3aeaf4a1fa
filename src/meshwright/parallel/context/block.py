"""Attention of some queries to some keys, with its log-sum-exp, so that parts can be put together.

    out = softmax(scores) · v      lse = log Σ exp(scores)      of the keys that are here
    dS  = P ∘ (dO·vᵀ − D)          P = exp(scores − lse)        of all keys, D = rowsum(dO ∘ out)

On the CPU it is PyTorch's flash kernel, which takes fewer key/value heads than heads as they are. Elsewhere, and where
probabilities are dropped, it is plain products over a few rows at a time, so that no more than `MAX_SCORES` scores are
there at once, which on the CPU stay in a core's cache; nothing is computed for keys that none of the rows sees.
With dropout, M ∘ P in place of P (M: 0 or 1/(1 − rate)), the sums over keys stay those of P:

    out = (M ∘ P)·v      dS = P ∘ (M ∘ (dO·vᵀ) − D)      D as above, because rowsum(dO ∘ out) = rowsum(P ∘ M ∘ (dO·vᵀ))

Source: Dao et al. 2022 (FlashAttention), §3.1 and appendix B.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from meshwright.parallel.dropout import ScoreMask, keep_

Block = tuple[torch.Tensor, torch.Tensor]
"""out [b, a, n, d], lse [b, a, n] (fp32, or fp64 of fp64)."""
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""dq [b, a, n, d], dk and dv [b, g, m, d]."""

MAX_SCORES = {"cpu": 2**18}
"""By kind of device; of others `_MANY`."""
_MANY = 2**22
_LEAST = -80.0
"""Of an exponent: below, its power is nothing beside a row's sum, and takes a processor ten times as long."""
_ROWS = 64
"""At most, at a time: more of them compute more that is masked. On accelerators as many as fit."""
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


Tile = tuple[slice, slice, slice]
"""Pairs of a sequence and a key/value head; rows; the keys that these see."""


def _tiles(num_pairs: int, shape: tuple[int, int, int], causal: bool, device: str) -> Iterator[Tile]:
    """All of shape = (heads per key/value head, rows, keys), with few scores at a time."""
    heads, num_rows, num_keys = shape
    most = MAX_SCORES.get(device, _MANY)
    height = max(1, min(num_rows if device != "cpu" else _ROWS, most // (heads * num_keys)))
    depth = max(1, most // (heads * min(height, num_rows) * num_keys))
    for pair in range(0, num_pairs, depth):
        for first in range(0, num_rows, height):
            last = min(num_rows, first + height)
            keys = slice(0, min(last, num_keys) if causal else num_keys)
            yield slice(pair, min(num_pairs, pair + depth)), slice(first, last), keys


class _Grouped:
    """A block in the dtype of statistics, one key/value head with its queries after the other.

    Attributes:
        q: [b·g, a/g, n, d], divided by √d.
        k, v: [b·g, m, d].
        mask: of rows [b·g, a/g, n]; None where nothing is dropped.
        later, seen: of as many rows and keys as a tile has rows: −∞ and 0, 0 and 1.
    """

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: ScoreMask | None) -> None:
        self.shape, self.num_groups, self.causal = q.shape, k.shape[1], causal
        self.wide = statistic_dtype(q.dtype)
        self.scale = 1 / math.sqrt(q.shape[-1])
        self.q = self.rows(q) * self.scale
        self.k, self.v = (x.to(self.wide).flatten(0, 1) for x in (k, v))
        self.mask = None if mask is None else mask.grouped(self.num_groups)
        self.kept_scale = 1.0 if mask is None else 1 / (1 - mask.rate)
        if causal:
            height = max(rows.stop - rows.start for _, rows, _ in self.tiles())
            self.later = self.q.new_full((height, height), -math.inf).triu_(1)
            self.seen = self.q.new_ones((height, height)).tril_()

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """[b, a, n, ..] → [b·g, a/g, n, ..]."""
        return x.to(self.wide).unflatten(1, (self.num_groups, -1)).flatten(0, 1)

    def ungrouped(self, x: torch.Tensor) -> torch.Tensor:
        """[b·g, .., n, d] → [b, .., n, d] in which heads are one dim."""
        return x.view(self.shape[0], -1, *x.shape[-2:])

    def tiles(self) -> Iterator[Tile]:
        heads, rows = self.q.shape[1:3]
        return _tiles(len(self.q), (heads, rows, self.k.shape[1]), self.causal, self.q.device.type)

    def scores(self, tile: Tile) -> torch.Tensor:
        """[pairs, a/g, rows, keys]; −∞ where the causal mask is."""
        pairs, rows, keys = tile
        scores = self.by_row(self.q[pairs, :, rows], self.k[pairs, keys].transpose(1, 2))
        if self.causal:
            corner = scores[..., rows.start :]
            corner += self.later[: corner.shape[-2], : corner.shape[-1]]
        return scores

    def exp_(self, scores: torch.Tensor, tile: Tile) -> torch.Tensor:
        """Of scores less their row's maximum or log-sum-exp, in place: 0 where the causal mask is."""
        p = scores.clamp_(min=_LEAST).exp_()
        if self.causal:
            corner = p[..., tile[1].start :]
            corner *= self.seen[: corner.shape[-2], : corner.shape[-1]]
        return p

    def by_row(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """rows [pairs, a/g, n, i] · keys [pairs, i, j] → [pairs, a/g, n, j]."""
        return torch.bmm(rows.flatten(1, 2), keys).unflatten(1, rows.shape[1:3])

    def kept(self, tile: Tile) -> torch.Tensor | None:
        """What is kept of the probabilities of a tile; None: all."""
        return None if self.mask is None else self.mask.part(*tile).kept(self.wide)


def _keep_(x: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    return x if kept is None else keep_(x, kept)


def _plain_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: ScoreMask | None) -> Block:
    of = _Grouped(q, k, v, causal, mask)
    out, lse = torch.empty_like(of.q), of.q.new_empty(of.q.shape[:-1])
    for tile in of.tiles():
        pairs, rows, keys = tile
        p = of.scores(tile)
        top = p.amax(-1, keepdim=True)
        total = of.exp_(p.sub_(top), tile).sum(-1, keepdim=True)
        products = of.by_row(_keep_(p, of.kept(tile)), of.v[pairs, keys])
        torch.mul(products, of.kept_scale / total, out=out[pairs, :, rows])
        lse[pairs, :, rows] = total.log_().add_(top).squeeze(-1)
    return of.ungrouped(out).to(q.dtype), lse.view(q.shape[:-1])


def _plain_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    whole: Block,
    causal: bool,
    mask: ScoreMask | None,
) -> Gradients:
    of = _Grouped(q, k, v, causal, mask)
    grads, lse = of.rows(grad), of.rows(whole[1]).unsqueeze(-1)
    sums = (grads * of.rows(whole[0])).sum(-1, keepdim=True)
    grads = grads * of.kept_scale
    dq, dk, dv = torch.empty_like(of.q), torch.zeros_like(of.k), torch.zeros_like(of.v)
    for tile in of.tiles():
        pairs, rows, keys = tile
        own_q, own_grads, kept = of.q[pairs, :, rows], grads[pairs, :, rows], of.kept(tile)
        p = of.exp_(of.scores(tile).sub_(lse[pairs, :, rows]), tile)
        ds = _keep_(of.by_row(own_grads, of.v[pairs, keys].transpose(1, 2)), kept)
        ds.sub_(sums[pairs, :, rows]).mul_(p)
        dq[pairs, :, rows] = of.by_row(ds, of.k[pairs, keys])
        dk[pairs, keys].baddbmm_(ds.flatten(1, 2).transpose(1, 2), own_q.flatten(1, 2))
        dv[pairs, keys].baddbmm_(_keep_(p, kept).flatten(1, 2).transpose(1, 2), own_grads.flatten(1, 2))
    of_q = of.ungrouped(dq.mul_(of.scale)).to(q.dtype)
    return of_q, of.ungrouped(dk).to(k.dtype), of.ungrouped(dv).to(v.dtype)
