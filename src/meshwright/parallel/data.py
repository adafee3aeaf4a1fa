"""Data parallelism: gradients summed over dp in buckets, while backward still runs.

What it divides: the batch. With ZeRO-1 (Rajbhandari et al. 2020, P_os) also the optimizer: each dp rank
receives the sum of its own shard only.

    zero 0:  gradients ──all_reduce──▶ whole sum on every rank
    zero 1:  gradients ──reduce_scatter──▶ shard r ──optimizer──▶ shard r ──all_gather──▶ parameters

What it needs: nothing of the model. What it costs: phases `gradients` and `parameters` in `cost.traffic`.
The loss is divided by the tokens of the whole step before backward, so every reduction is a plain sum.
"""

from __future__ import annotations

from collections import deque

import torch

from meshwright.comm.collectives import Work, all_reduce, all_reduce_start, reduce_scatter_start
from meshwright.comm.mesh import Mesh
from meshwright.core.axes import DP
from meshwright.core.flat import Slot
from meshwright.parallel.states import FlatBucket, FlatStates


class GradientReducer:
    """Counts gradients as backward produces them; reduces each bucket once it is complete.

    Buckets are launched strictly in order, on every rank the same, whatever the order in which
    gradients become ready (Li et al. 2020, PyTorch Distributed, §3.2).
    """

    def __init__(self, states: FlatStates, mesh: Mesh, zero: int) -> None:
        self._states = states
        self._mesh = mesh
        self._zero = zero
        self._armed = False
        self._missing: dict[int, int] = {}
        self._waiting: deque[tuple[int, FlatBucket]] = deque()
        self._running: list[Work] = []
        for index, bucket in enumerate(states.buckets):
            for slot in bucket.layout.slots:
                self._bind(index, bucket, slot)

    def _bind(self, index: int, bucket: FlatBucket, slot: Slot) -> None:
        if (sink := self._states.sinks.get(slot.placement.name)) is not None:
            sink.on_written = lambda: self._ready(index)
            return
        parameter = self._states.parameters[slot.placement.name]
        view = bucket.view(bucket.gradients, slot)
        if parameter.dtype == view.dtype:
            parameter.grad = view  # autograd accumulates in place

            def collect(_: torch.Tensor) -> None:
                self._ready(index)
        else:

            def collect(leaf: torch.Tensor) -> None:
                view.add_(leaf.grad)
                leaf.grad = None
                self._ready(index)

        parameter.register_post_accumulate_grad_hook(collect)

    def arm(self) -> None:
        """The next backward is the last of the step: buckets may go as soon as they are complete."""
        self._armed = True
        self._waiting = deque(enumerate(self._states.buckets))
        self._missing = {i: sum(map(self._num_writes, b.layout.slots)) for i, b in self._waiting}

    def _num_writes(self, slot: Slot) -> int:
        """How often one backward reports this gradient: autograd once, sinks for every layer that writes."""
        sink = self._states.sinks.get(slot.placement.name)
        return 1 if sink is None else sink.num_uses

    def _ready(self, index: int) -> None:
        if not self._armed:
            return
        self._missing[index] -= 1
        while self._waiting and self._may_go(*self._waiting[0]):
            self._launch(self._waiting.popleft()[1])

    def _may_go(self, index: int, bucket: FlatBucket) -> bool:
        """Complete, and summed over dp only: other stages may still wait for what this backward sends."""
        return self._missing[index] <= 0 and not bucket.layout.sum_over

    def finish(self) -> None:
        """Launch what backward left (unused parameters), and wait for all reductions."""
        while self._waiting:
            self._launch(self._waiting.popleft()[1])
        for work in self._running:
            work.wait()
        self._running.clear()
        self._armed = False

    @torch.no_grad()
    def _launch(self, bucket: FlatBucket) -> None:
        dp = self._mesh[DP]
        self._states.settle(bucket)
        with self._mesh.ledger.phase("gradients"):
            for axis in bucket.layout.sum_over:
                all_reduce(bucket.gradients, self._mesh[axis])
            if self._zero:
                start, stop = bucket.layout.shard(dp.size, dp.index)
                work = reduce_scatter_start(bucket.gradients[start:stop], bucket.gradients, dp)
            else:
                work = all_reduce_start(bucket.gradients, dp)
        self._running.append(work)
