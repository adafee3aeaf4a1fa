"""Vocabulary-parallel cross entropy: logits are never gathered (Megatron-LM; Shoeybi et al. 2019 §3).

What it divides: logits [T, V/t] stay where they are. Per token three numbers cross the tp axis: the
maximum, the sum of exponentials and the target's logit.
What it costs: an all-reduce (max) of T and one (sum) of 2·T accumulator elements per micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Axis
from meshwright.core.batch import IGNORE


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first: int, axis: Axis) -> torch.Tensor:
        # The head's output is saved by nobody, so its memory is reused: logits → exp → gradient.
        p = logits.detach().float() if logits.dtype.itemsize < 4 else logits.detach()
        top = all_reduce(p.amax(dim=-1), axis, op="max")
        valid = labels != IGNORE
        local = labels - first
        inside = valid & (local >= 0) & (local < p.shape[-1])
        target = local.masked_fill(~inside, 0).unsqueeze(-1)
        p.sub_(top.unsqueeze(-1))
        sums = torch.stack((torch.zeros_like(top), p.gather(-1, target).squeeze(-1).masked_fill(~inside, 0.0)))
        torch.sum(p.exp_(), dim=-1, out=sums[0])
        total, target_logit = all_reduce(sums, axis)
        ctx.save_for_backward(p, total, target, inside, valid)
        ctx.dtype = logits.dtype
        return (total.log() - target_logit).masked_fill(~valid, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        p, total, target, inside, valid = ctx.saved_tensors
        scale = grads[0] * valid
        p.mul_((scale / total).unsqueeze(-1))
        p.scatter_add_(-1, target, (-scale * inside).to(p.dtype).unsqueeze(-1))
        return p.to(ctx.dtype), None, None, None


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor, first: int, axis: Axis) -> torch.Tensor:
    """Sum of the losses of all counted tokens, identical on every rank of `axis`.

    The memory of `logits` is overwritten. 16-bit logits: all of it is computed in fp32.

    Args:
        logits: [.., V/t], this rank's slice of the vocabulary, starting at row `first`.
        labels: [..] token ids; `-100` does not count.
        first: global id of the slice's first row.
        axis: the tp axis.
    """
    return _VocabParallelCrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), first, axis)
