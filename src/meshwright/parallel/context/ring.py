"""Ring attention: keys and values go from rank to rank, and an online softmax takes them in.

    step             0        1        2        3            kv goes to the next rank at the start of a step,
    rank 0 meets   kv 0     kv 3     kv 2     kv 1           and is waited for at its end
    rank 1 meets   kv 1     kv 0     kv 3     kv 2
    backward       the same, and dk, dv go with their keys; one more hop brings them home

What it divides: the tokens, and with them all activations; no scores are kept, and no more than a kernel's tile of them
is ever there. Weights are whole on every rank: cp is a part of the data-parallel axis to them.
What it needs: rules `context-tokens`, `context-tensor`.
What it costs: per layer forward P − 1 messages of 2·b·(s/P)·g·d elements, backward as many and P of the gradients'
accumulators; axis cp in `cost.traffic`. With one rank the same code sends nothing.

Output and gradients are summed in at least fp32. No 1/P: gradients of weights are summed with those of the data.

Sources: Liu et al. 2023 (Ring Attention); Dao et al. 2022 (the merge); Zhu 2024 (dk, dv that travel).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from meshwright.comm.mesh import Axis
from meshwright.comm.p2p import recv_start, send_start
from meshwright.comm.work import Work
from meshwright.parallel.context import block, local
from meshwright.parallel.context.local import Table, View
from meshwright.parallel.dropout import Dropped

KEYS, GRADIENTS = 0, 1
"""Tags: what goes round."""


class Belt:
    """Tensors of one shape and kind that go round the ring, each rank's to the next one."""

    def __init__(self, axis: Axis, tag: int) -> None:
        self._axis, self._tag = axis, tag
        self._sends: deque[Work] = deque()

    def start(self, x: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Send x on. Returns room for that of the rank before, and what to wait for until it has come.

        x may be changed after :meth:`end`. Every other rank receives first: where messages of a pair run one by one, a
        ring of sends would wait for itself.
        """
        axis = self._axis
        to, source = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
        out = torch.empty_like(x)
        if axis.index % 2:
            arriving = recv_start(out, axis, source, self._tag)
            self._sends.append(send_start(x, axis, to, self._tag))
        else:
            self._sends.append(send_start(x, axis, to, self._tag))
            arriving = recv_start(out, axis, source, self._tag)
        return out, arriving

    def end(self) -> None:
        """Wait for what was sent."""
        while self._sends:
            self._sends.popleft().wait()


def round_the_ring(x: torch.Tensor, axis: Axis) -> Iterator[tuple[int, torch.Tensor]]:
    """(rank, its tensor), own first. The next one is on its way while the caller works."""
    belt = Belt(axis, KEYS)
    for step in range(axis.size):
        is_last = step == axis.size - 1
        following, arriving = (x, None) if is_last else belt.start(x)
        yield (axis.index - step) % axis.size, x
        if arriving is not None:
            arriving.wait()
        x = following
    belt.end()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axis: Axis, view: View) -> torch.Tensor:
        mask_of = view.masks(q.device)
        own = torch.stack((k, v))
        summed = local.empty_block(q, block.statistic_dtype(q.dtype))
        for source, kv in round_the_ring(own, axis):
            is_first = source == axis.index
            local.attend(summed, q, kv, view.spans(source), mask_of(source), first=is_first)
        out, lse = summed[0].to(q.dtype), summed[1]
        ctx.axis, ctx.view = axis, view
        ctx.save_for_backward(q, own, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        axis: Axis = ctx.axis
        view: View = ctx.view
        q, kv, *whole = ctx.saved_tensors
        mask_of = view.masks(q.device)
        wide = block.statistic_dtype(q.dtype)
        dq, dkv = torch.zeros_like(q, dtype=wide), torch.empty_like(kv, dtype=wide)
        keys, gradients = Belt(axis, KEYS), Belt(axis, GRADIENTS)
        coming: Work | None = None
        for step in range(axis.size):
            is_last = step == axis.size - 1
            following, arriving = (kv, None) if is_last else keys.start(kv)
            added = torch.zeros_like(dkv)
            source = (axis.index - step) % axis.size
            local.add_gradients((dq, added), grad, q, kv, (whole[0], whole[1]), view.spans(source), mask_of(source))
            if coming is not None:
                coming.wait()
                added += dkv
            if axis.size > 1:
                dkv, coming = gradients.start(added)
            else:
                dkv = added
            if arriving is not None:
                arriving.wait()
            kv = following
        if coming is not None:
            coming.wait()
        keys.end()
        gradients.end()
        dk, dv = dkv.to(kv.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axis: Axis, table: Table, dropped: Dropped | None = None
) -> torch.Tensor:
    """Causal attention of this rank's tokens to those of all ranks.

    Args:
        q: [b, a, n, d], of the n tokens here.
        k, v: [b, g, n, d]; g divides a.
        axis: the cp axis.
        table: which tokens are where.
        dropped: which probabilities are.

    Returns:
        [b, a, n, d].
    """
    out: torch.Tensor = _Ring.apply(q, k, v, axis, View(axis.index, table, dropped))
    return out
