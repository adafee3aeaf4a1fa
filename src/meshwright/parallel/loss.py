"""Vocabulary-parallel cross entropy: logits are never gathered (Megatron-LM; Shoeybi et al. 2019 §3).

What it divides: logits [T, V/t] stay where they are. Of a token with logits x, maximum M, z = Σ exp(x − M) and
target y, over the whole vocabulary,

    loss = log z − (1 − ε)·(x_y − M) − ε/V·Σ (x − M) + ζ·(log z + M)²         ε label smoothing, ζ z-loss

so that few numbers cross the tp axis: M, z, x_y, and with smoothing Σ x.
What it costs: an all-reduce (max) of T and one (sum) of 2·T accumulator elements per micro-batch, 3·T with smoothing.

Sources: Szegedy et al. 2016 §7 (smoothing); Chowdhery et al. 2022 §5 (z-loss).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Axis
from meshwright.core.batch import IGNORE


@dataclass(frozen=True, slots=True)
class Slice:
    """Which part of the vocabulary a rank's logits are of, and what is added to the cross entropy."""

    axis: Axis
    """The tp axis."""
    first: int
    """Global id of the slice's first row."""
    vocab_size: int
    """Of the whole vocabulary."""
    smoothing: float = 0.0
    """ε."""
    z_loss: float = 0.0
    """ζ."""

    def plain(self) -> Slice:
        """Without what is added: what a model is evaluated by."""
        return Slice(self.axis, self.first, self.vocab_size)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, of: Slice) -> torch.Tensor:
        # The head's output is saved by nobody, so its memory is reused: logits → exp → gradient.
        p = logits.detach().float() if logits.dtype.itemsize < 4 else logits.detach()
        top = all_reduce(p.amax(dim=-1), of.axis, op="max")
        valid = labels != IGNORE
        local = labels - of.first
        inside = valid & (local >= 0) & (local < p.shape[-1])
        target = local.masked_fill(~inside, 0).unsqueeze(-1)
        p.sub_(top.unsqueeze(-1))
        sums = [torch.zeros_like(top), p.gather(-1, target).squeeze(-1).masked_fill(~inside, 0.0)]
        sums += [p.sum(-1)] if of.smoothing else []
        summed = torch.stack(sums)
        torch.sum(p.exp_(), dim=-1, out=summed[0])
        total, target_logit, *all_logits = all_reduce(summed, of.axis)
        ctx.save_for_backward(p, total, target, inside, valid, *((top,) if of.z_loss else ()))
        ctx.dtype, ctx.of = logits.dtype, of
        return _loss(of, total.log(), target_logit, all_logits, top).masked_fill(~valid, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        p, total, target, inside, valid, *top = ctx.saved_tensors
        of: Slice = ctx.of
        scale = grads[0] * valid
        share = scale / total
        if top:
            share = share * (1 + 2 * of.z_loss * (total.log() + top[0]))
        p.mul_(share.unsqueeze(-1))
        p.scatter_add_(-1, target, ((of.smoothing - 1) * scale * inside).to(p.dtype).unsqueeze(-1))
        if of.smoothing:
            p.sub_((scale * (of.smoothing / of.vocab_size)).unsqueeze(-1))
        return p.to(ctx.dtype), None, None


def _loss(
    of: Slice, log_total: torch.Tensor, target_logit: torch.Tensor, all_logits: list[torch.Tensor], top: torch.Tensor
) -> torch.Tensor:
    """Of each token, [T]. Logits are relative to `top`."""
    loss = log_total - (1 - of.smoothing) * target_logit if all_logits else log_total - target_logit
    if all_logits:
        loss = loss - of.smoothing / of.vocab_size * all_logits[0]
    return loss + of.z_loss * (log_total + top).square() if of.z_loss else loss


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor, of: Slice) -> torch.Tensor:
    """Sum of the losses of all counted tokens, identical on every rank of the tp axis.

    The memory of `logits` is overwritten. 16-bit logits: all of it is computed in fp32.

    Args:
        logits: [.., V/t], this rank's slice of the vocabulary.
        labels: [..] token ids; `-100` does not count.
        of: which slice, and what is added.
    """
    return _VocabParallelCrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), of)
