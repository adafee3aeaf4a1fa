"""The sum of what several ranks sent, taken in the order of the ranks: the same bits everywhere and in every run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.comm.transports.base import ReduceOp

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Summed in fp32 and rounded once, not at every partial sum."""


def reduce_in_order(parts: Sequence[Tensor], out: Tensor, op: ReduceOp, scratch: Tensor | None = None) -> None:
    """out ← parts reduced in order.

    Args:
        parts: of two ranks or more, each of the shape of `out`; only read. One of them may be `out`.
        out: written last, when all parts have been read.
        scratch: for partial results, allocated where it is None. It may be one of the first two parts, which is then
            overwritten.
    """
    if op == "sum" and out.dtype in LOW_PRECISION:
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        out.copy_(total)
        return
    apply = torch.add if op == "sum" else torch.maximum
    total = parts[0]
    if scratch is None and len(parts) > 2:
        scratch = torch.empty_like(out)
    for part in parts[1:-1]:
        total = apply(total, part, out=scratch)
    apply(total, parts[-1], out=out)
