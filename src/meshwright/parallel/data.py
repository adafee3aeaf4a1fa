"""Data parallelism: gradients summed over dp in buckets, while backward still runs.

What it divides: the batch; with ZeRO (Rajbhandari et al. 2020, §5) also the optimizer, the gradients, the parameters.

    zero 0      gradients ──all_reduce──▶ whole sum on every rank
    zero 1      gradients ──reduce_scatter──▶ shard r ──optimizer──▶ shard r ──all_gather──▶ parameters
    zero 2, 3   a block's gradients ──reduce_scatter, each micro-batch──▶ added to shard r; the block's memory is free

On several nodes each arrow goes in two levels, or leaves a copy on every node (`core.sharding`).
What it needs: nothing of the model. What it costs: phases `gradients` and `parameters` in `cost.traffic`.
The loss is divided by the tokens of the whole step before backward, so every reduction is a plain sum.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Protocol
from weakref import WeakMethod

import torch

from meshwright.comm.collectives import all_reduce, all_reduce_start
from meshwright.comm.mesh import Mesh
from meshwright.core.errors import UnsupportedError
from meshwright.core.flat import Pool, Slot
from meshwright.parallel.offload.store import in_memory, on_tier
from meshwright.parallel.offload.tier import Handle
from meshwright.parallel.shards import Started, reduce_start, scatter_start
from meshwright.parallel.states import FlatBucket, FlatStates, GradientSink


class _Policy(Protocol):
    """What is kept of gradients, and so when and how a bucket is reduced."""

    every_backward: bool
    """Whether each backward reduces, or only the last of a step."""

    def start_step(self) -> None:
        """Nothing is summed yet."""

    def may_go(self, bucket: FlatBucket) -> bool:
        """Whether a complete bucket may be reduced while backward runs."""

    def launch(self, index: int) -> None:
        """Start reducing a bucket."""

    def finish(self) -> None:
        """Return when all gradients of the step are summed."""


def held_weakly(method: Callable[[int], None], index: int) -> Callable[[], None]:
    """`method(index)`, for hooks of parameters: autograd holds these where the garbage collector cannot look, so that
    an object which they held would never be freed, nor its mesh, nor the threads and sockets of that."""
    reference = WeakMethod(method)

    def call() -> None:
        if (found := reference()) is not None:
            found(index)

    return call


class GradientReducer:
    """Counts gradients as backward produces them; reduces each bucket once it is complete.

    Buckets are launched strictly in order, on every rank the same, whatever the order in which
    gradients become ready (Li et al. 2020, PyTorch Distributed, §3.2).
    """

    def __init__(self, states: FlatStates, mesh: Mesh) -> None:
        self._states = states
        self._policy: _Policy = _Whole(states, mesh)
        if states.gradient_pool is not None:
            is_kept = all(isinstance(bucket.own_gradients, torch.Tensor) for bucket in states.buckets)
            shards = _Shards if is_kept else _StoredShards
            self._policy = shards(states, mesh, states.gradient_pool, self._launch_through)
        self._stages = {s for b in states.buckets for slot in b.layout.slots for s in slot.placement.stages}
        self._stage = min(self._stages, default=0)
        """Whose backward runs."""
        self._armed: set[int] = set()
        self._finished: set[int] = set()
        self._index_of: dict[GradientSink, int] = {}
        self._missing: dict[int, dict[int, int]] = {}
        """Bucket → stage → gradients that its last backward has not written yet."""
        self._waiting: deque[int] = deque()
        for index, bucket in enumerate(states.buckets):
            for slot in bucket.layout.slots:
                self._bind(index, bucket, slot)

    def _bind(self, index: int, bucket: FlatBucket, slot: Slot) -> None:
        name = slot.placement.key
        parameter, view = self._states.parameters[name], bucket.view(bucket.gradients, slot)
        if slot.placement.name in self._states.frozen:
            return
        ready = held_weakly(self._ready, index)
        if (sink := self._states.sinks.get(name)) is not None:
            sink.on_written = ready
            self._index_of[sink] = index
            return
        accumulates = parameter.dtype == view.dtype
        if accumulates:
            parameter.grad = view  # by autograd, in place

        def collect(leaf: torch.Tensor) -> None:
            if not accumulates and leaf.grad is not None:
                view.add_(leaf.grad)
                leaf.grad = None
            ready()

        parameter.register_post_accumulate_grad_hook(collect)

    def start_step(self) -> None:
        """Gradients of the next backward are the first of a step."""
        self._policy.start_step()

    def arm(self, stage: int) -> None:
        """The next backward of `stage` is its last of the step: buckets may go as soon as all their stages have been
        through their last one."""
        if not self._armed:
            self._expect(self._stages)
        self._armed.add(stage)

    def _expect(self, stages: Set[int]) -> None:
        """Wait for the gradients of these stages, and for the buckets that hold them."""
        self._missing = {}
        for index, bucket in enumerate(self._states.buckets):
            for slot in bucket.layout.slots:
                for stage in stages & set(slot.placement.stages):
                    missing = self._missing.setdefault(index, dict.fromkeys(stages, 0))
                    missing[stage] += self._num_writes(slot)
        self._waiting = deque(self._missing)

    def _num_writes(self, slot: Slot) -> int:
        """How often one backward of a stage reports this gradient: autograd once, sinks for every layer that writes."""
        if slot.placement.name in self._states.frozen:
            return 0
        sink = self._states.sinks.get(slot.placement.key)
        return 1 if sink is None else sink.num_uses // len(slot.placement.stages)

    def _ready(self, index: int) -> None:
        if self._stage not in self._armed:
            return
        self._missing[index][self._stage] -= 1
        if self._missing[index][self._stage] < 0:
            name = self._states.buckets[index].layout.slots[0].placement.name
            raise UnsupportedError(
                f"gradients arrived in the bucket of `{name}` after it was reduced; a layer that is run several times "
                f"in one forward is not supported"
            )
        while self._waiting and self._may_go(self._waiting[0]):
            self._launch_next()

    def _may_go(self, index: int) -> bool:
        return not any(self._missing[index].values()) and self._policy.may_go(self._states.buckets[index])

    def start_backward(self, stage: int, sinks: Iterable[GradientSink] | None = None) -> None:
        """The backward of a micro-batch on `stage` begins.

        Args:
            sinks: where it writes, each as often as it does, if the rest of the stage's gradients was written before.
        """
        self._stage = stage
        if self._policy.every_backward:
            self._expect({stage})
            self._armed = {stage}
        elif sinks is not None and stage in self._armed:
            written = Counter(self._index_of[sink] for sink in sinks)
            for index, missing in self._missing.items():
                missing[stage] = written[index]

    def end_backward(self) -> None:
        """It has ended; gradients that it did not reach are zero."""
        if self._policy.every_backward:
            self._launch_through(len(self._states.buckets) - 1)
            self._armed.clear()

    def finish(self, stage: int) -> None:
        """With the last of the rank's stages: launch what backward left (unused parameters), and wait for all."""
        self._finished.add(stage)
        if self._finished != self._stages:
            return
        if not self._policy.every_backward:
            self._launch_through(len(self._states.buckets) - 1)
        self._policy.finish()
        self._armed.clear()
        self._finished.clear()

    def _launch_next(self) -> None:
        self._policy.launch(self._waiting.popleft())

    def _launch_through(self, last: int) -> None:
        """Launch, complete or not, what still waits of buckets 0 to `last`."""
        while self._waiting and self._waiting[0] <= last:
            self._launch_next()


class _Whole:
    """Whole gradients are kept: one reduction per step."""

    every_backward = False

    def __init__(self, states: FlatStates, mesh: Mesh) -> None:
        self._states, self._mesh = states, mesh
        self._running: list[Started] = []

    def start_step(self) -> None:
        return

    def may_go(self, bucket: FlatBucket) -> bool:
        """If summed over dp only: other stages may still wait for what this backward sends."""
        return not bucket.layout.sum_over

    @torch.no_grad()
    def launch(self, index: int) -> None:
        bucket = self._states.buckets[index]
        self._states.settle(bucket)
        with self._mesh.ledger.phase("gradients"):
            for axis in bucket.layout.sum_over:
                all_reduce(bucket.gradients, self._mesh[axis])
            self._running.append(reduce_start(bucket.gradients, bucket.way, self._mesh))

    def finish(self) -> None:
        for work in self._running:
            work.wait()
        self._running.clear()


class _Shards:
    """Shards of gradients are kept: every backward adds to them, block by block, and a block's memory is free again.

    Replicas of a shard, and axes over which it is partial, are summed over once, at the end of the step.
    """

    every_backward = True

    def __init__(self, states: FlatStates, mesh: Mesh, pool: Pool, launch_through: Callable[[int], None]) -> None:
        self._states, self._mesh, self._launch_through = states, mesh, launch_through
        self._buffers = [pool.buffer_of[bucket.layout.block] for bucket in states.buckets]
        self._holders: dict[int, str] = {}
        """Buffer → the block that it holds gradients of."""
        self._running: dict[int, Started] = {}
        self._is_first = [True] * len(states.buckets)
        """Whether the bucket's shard is still to be set in this step."""
        for index, bucket in enumerate(states.buckets):
            for slot in bucket.layout.slots:
                self._sink(bucket, slot).on_first = held_weakly(self._claim, index)

    def _sink(self, bucket: FlatBucket, slot: Slot) -> GradientSink:
        """How the gradient is written; those of autograd are moved out of its own memory."""
        sinks, name = self._states.sinks, slot.placement.key
        if name not in sinks:
            sinks[name] = GradientSink(bucket.view(bucket.gradients, slot), 1)
            if slot.placement.name not in self._states.frozen:
                self._states.parameters[name].register_post_accumulate_grad_hook(lambda leaf: _move(leaf, sinks[name]))
        return sinks[name]

    def start_step(self) -> None:
        self._is_first = [True] * len(self._is_first)

    def may_go(self, bucket: FlatBucket) -> bool:
        return True

    def _claim(self, index: int) -> None:
        """Before the first write of a backward: what held the memory before must be reduced."""
        block, buffer = self._states.buckets[index].layout.block, self._buffers[index]
        holder = self._holders.get(buffer)
        if holder is not None and holder != block:
            self._launch_through(self._last_before(index, holder))
            self._check_launched(index, holder)
        self._wait(i for i in list(self._running) if self._buffers[i] == buffer)
        self._holders[buffer] = block

    def _check_launched(self, index: int, holder: str) -> None:
        """The block that holds the memory must be on its way by now; else its gradients would be written over."""
        if self._is_written(holder):
            raise UnsupportedError(
                f"gradients of `{self._states.buckets[index].layout.block}` came after those of `{holder}`, which runs "
                f"before it; with zero=2 and 3 blocks must go backward in the reverse order of forward"
            )

    def _is_written(self, block: str) -> bool:
        """Whether the memory holds gradients of this backward that were not reduced."""
        return any(
            self._states.sinks[slot.placement.key].is_written
            for bucket in self._states.buckets
            if bucket.layout.block == block
            for slot in bucket.layout.slots
        )

    def _last_before(self, index: int, block: str) -> int:
        """The last bucket of `block` that comes before bucket `index`, or -1."""
        earlier = enumerate(self._states.buckets[:index])
        return max((i for i, bucket in earlier if bucket.layout.block == block), default=-1)

    @torch.no_grad()
    def launch(self, index: int) -> None:
        bucket = self._states.buckets[index]
        self._states.settle(bucket)
        with self._mesh.ledger.phase("gradients"):
            out = self._target(index)
            self._running[index] = scatter_start(out, bucket.gradients, bucket.way.scatter, self._mesh)
        self._states.start_step(bucket)

    @torch.no_grad()
    def _wait(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._running.pop(index).wait()
            self._add(index)
            self._is_first[index] = False

    def _target(self, index: int) -> torch.Tensor:
        """Where a reduction leaves this rank's shard."""
        bucket = self._states.buckets[index]
        return in_memory(bucket.own_gradients) if self._is_first[index] else bucket.gradients[bucket.own]

    def _add(self, index: int) -> None:
        """A reduction has ended: add its shard to the sum of the step."""
        bucket = self._states.buckets[index]
        if not self._is_first[index]:
            in_memory(bucket.own_gradients).add_(bucket.gradients[bucket.own])

    @torch.no_grad()
    def finish(self) -> None:
        self._wait(list(self._running))
        for index, bucket in enumerate(self._states.buckets):
            if self._is_first[index]:
                in_memory(bucket.own_gradients).zero_()
        self._sum((bucket, _replicas(bucket)) for bucket in self._states.buckets)
        self._sum((bucket, bucket.layout.sum_over) for bucket in self._states.buckets)

    def _sum(self, shards: Iterable[tuple[FlatBucket, tuple[str, ...]]]) -> None:
        """All buckets at once, each over its axes one after the other: a sum over the second is one of sums."""
        left = [(bucket, axes) for bucket, axes in shards if axes]
        with self._mesh.ledger.phase("gradients"):
            while left:
                works = [all_reduce_start(in_memory(b.own_gradients), self._mesh[axes[0]]) for b, axes in left]
                for work in works:
                    work.wait()
                left = [(bucket, axes[1:]) for bucket, axes in left if axes[1:]]


class _StoredShards(_Shards):
    """Likewise, with the sums of a step on a tier (`parallel.offload`). They pass through memory where something is
    added to them; then `Store.on_sum` sees them."""

    def __init__(self, states: FlatStates, mesh: Mesh, pool: Pool, launch_through: Callable[[int], None]) -> None:
        super().__init__(states, mesh, pool, launch_through)
        assert states.store is not None
        self._store = states.store
        self._writing: dict[int, list[Handle]] = defaultdict(list)
        """Buffer → sums that leave it."""

    def _claim(self, index: int) -> None:
        super()._claim(index)
        self._end_writes(self._buffers[index])

    def _end_writes(self, buffer: int) -> None:
        for handle in self._writing.pop(buffer, ()):
            handle.wait()

    def _target(self, index: int) -> torch.Tensor:
        bucket = self._states.buckets[index]
        return bucket.gradients[bucket.own]

    def _add(self, index: int) -> None:
        sums = self._target(index)
        if not self._is_first[index]:
            sums.add_(self._read(index))
        self._writing[self._buffers[index]].append(self._write_start(index, sums))

    def _read(self, index: int) -> torch.Tensor:
        """The sum so far, in the one buffer for it."""
        sums = self._store.staging(self._target(index))
        on_tier(self._states.buckets[index].own_gradients).read_start(sums).wait()
        return sums

    def _write_start(self, index: int, sums: torch.Tensor) -> Handle:
        self._store.settle()
        bucket = self._states.buckets[index]
        self._store.on_sum(bucket, sums)
        return on_tier(bucket.own_gradients).write_start(sums)

    @torch.no_grad()
    def finish(self) -> None:
        self._wait(list(self._running))
        for buffer in list(self._writing):
            self._end_writes(buffer)
        for index, bucket in enumerate(self._states.buckets):
            if self._is_first[index]:
                self._write_start(index, self._store.staging(self._target(index)).zero_()).wait()
            self._sum_over(index, (*_replicas(bucket), *bucket.layout.sum_over))

    def _sum_over(self, index: int, axes: Sequence[str]) -> None:
        if not axes:
            return
        sums = self._read(index)
        with self._mesh.ledger.phase("gradients"):
            for axis in axes:
                all_reduce(sums, self._mesh[axis])
        self._write_start(index, sums).wait()


def _move(leaf: torch.Tensor, sink: GradientSink) -> None:
    """A gradient that autograd has made, to where its bucket is."""
    grad, leaf.grad = leaf.grad, None
    assert grad is not None
    sink.add(grad)


def _replicas(bucket: FlatBucket) -> tuple[str, ...]:
    """Axes over which a scattered bucket has replicas."""
    return tuple(level.axis for level in bucket.way.replicate)
