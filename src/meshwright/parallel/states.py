"""A rank's parameters and gradients as views into a few flat buffers.

What it divides: nothing by itself; it lays out what the placements leave on this rank (`core.flat`).
What it costs: `cost.memory`, parameters and gradients.

    bucket.parameters  | q.weight | k.weight | norm | pad |    every nn.Parameter is a view
    bucket.gradients   | q.weight | k.weight | norm | pad |    every gradient is accumulated in place

With ZeRO-3 the parameters, with ZeRO-2 and 3 the gradients of a bucket are working memory that blocks take in turn
(`core.flat.Pool`); this rank keeps its shard of them. A parameter is always a view of the same memory, so what autograd
saved of it is right again once the block is gathered again.

Autograd adds to a gradient that was zeroed. Layers that write their own (`parallel.direct`) do it through a
GradientSink, whose first write of a step replaces what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from meshwright.core.axes import rank_of
from meshwright.core.errors import InputError
from meshwright.core.flat import Bucket, Pool, Slot, gradient_pool, held_buckets, parameter_pool
from meshwright.core.model import ModelSpec
from meshwright.core.placement import Placement, placements
from meshwright.core.precision import Recipe
from meshwright.core.sharding import Sharding, sharding
from meshwright.core.strategy import Strategy
from meshwright.parallel.offload.store import Flat, Store, copy, read
from meshwright.parallel.offload.stream import StoredRun, StoredState
from meshwright.parallel.offload.tier import Done, Handle

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class GradientSink:
    """A weight's gradient as its layers write it: the first write of a step replaces, later ones add.

    Attributes:
        view: the gradient, in the weight's local shape and the recipe's gradient dtype.
        num_uses: layers that write it, each once per micro-batch; 2 where embedding and head are tied.
        on_first: called before the first write of a step.
        on_written: called after every write.
    """

    __slots__ = ("_is_fresh", "num_uses", "on_first", "on_written", "view")

    def __init__(self, view: torch.Tensor, num_uses: int) -> None:
        self.view = view
        self.num_uses = num_uses
        self.on_first: Callable[[], None] = lambda: None
        self.on_written: Callable[[], None] = lambda: None
        self._is_fresh = True

    def start_step(self) -> None:
        """What the view holds does not count any more."""
        self._is_fresh = True

    def _is_first(self) -> bool:
        """Whether what the view holds does not count; from now on it does."""
        was_fresh, self._is_fresh = self._is_fresh, False
        if was_fresh:
            self.on_first()
        return was_fresh

    @property
    def is_written(self) -> bool:
        """Whether what the view holds counts."""
        return not self._is_fresh

    def settle(self) -> None:
        """A gradient that nobody wrote is zero."""
        if self._is_first():
            self.view.zero_()

    def add_product(self, grads: torch.Tensor, inputs: torch.Tensor, counts: Sequence[int] | None = None) -> None:
        """view [out, in] += gradsᵀ · inputs, of grads [T, out] and inputs [T, in].

        Of experts, view [E, out, in]: run i of the rows, `counts[i]` of them, belongs to expert i mod E.
        """
        if counts is not None:
            take = self.take_runs(grads, inputs, counts)
            for index in range(len(counts)):
                take(index)
        elif grads.dtype != self.view.dtype:
            self.add(grads.t() @ inputs)
        else:
            self.view.addmm_(grads.t(), inputs, beta=0 if self._is_first() else 1)
            self.on_written()

    def take_runs(self, grads: torch.Tensor, inputs: torch.Tensor, counts: Sequence[int]) -> Callable[[int], None]:
        """:meth:`add_product` of experts, run by run.

        Returns:
            What takes the product of a run, called with each index once: with those of empty runs first, and of the
            runs of an expert in order.
        """
        is_first, num, left = self._is_first(), len(self.view), len(counts)
        starts = list(accumulate(counts, initial=0))

        def take(index: int) -> None:
            nonlocal left
            expert, run = self.view[index % num], slice(starts[index], starts[index + 1])
            replaces, left = is_first and index < num, left - 1
            if grads.dtype == expert.dtype:
                expert.addmm_(grads[run].t(), inputs[run], beta=0 if replaces else 1)
            elif replaces:
                expert.copy_(grads[run].t() @ inputs[run])
            else:
                expert.add_(grads[run].t() @ inputs[run])
            if left == 0:
                self.on_written()

        return take

    def add(self, grad: torch.Tensor) -> None:
        """view += grad, of the view's shape; any dtype."""
        if self._is_first():
            self.view.copy_(grad)
        else:
            self.view.add_(grad)
        self.on_written()

    def add_rows(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """view [n, h]: row ids[t] += rows[t], of ids [T] and rows [T, h]."""
        self.settle()
        self.view.index_add_(0, ids, rows.to(self.view.dtype))
        self.on_written()


@dataclass(slots=True, eq=False)
class FlatBucket:
    """One bucket's layout and its memory on this rank."""

    layout: Bucket
    way: Sharding
    own: slice
    """Elements that this rank updates: its shard, or all."""
    counted: slice
    """Elements within `own` that this rank alone counts in norms and saves in checkpoints."""
    parameters: torch.Tensor
    """[numel]; of a sharded bucket valid only while its block is gathered."""
    gradients: torch.Tensor
    """[numel]; of a sharded bucket valid only while its block's backward runs."""
    own_parameters: Flat
    """[own]; what stays on this rank: a part of `parameters`, or a shard by itself, in memory or on a tier."""
    own_gradients: Flat
    """[own]; the sums over all ranks once they were reduced, in memory or on a tier."""
    state: StoredState | None = None
    """What of `own` lies on tiers."""

    def stored(self, kind: str) -> StoredRun | None:
        """[own] of a kind that lies on a tier; None where it doesn't."""
        return self.state.run(kind) if self.state is not None and kind in self.state.dtypes else None

    def read_start(self) -> Handle:
        """Start to have this rank's part of the parameters where `shard` is, and gathering takes it from."""
        if isinstance(self.own_parameters, torch.Tensor):
            return Done()
        return self.own_parameters.read_start(self.shard)

    @property
    def shard(self) -> torch.Tensor:
        """[own] in memory: `own_parameters`, or, where they lie on a tier, their place within `parameters`."""
        own = self.own_parameters
        return own if isinstance(own, torch.Tensor) else self.parameters[self.own]

    def view(self, buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
        """A slot of `buffer` [numel] in its parameter's local shape."""
        return buffer[slot.start : slot.stop].view(slot.placement.box.sizes)

    def overlap(self, slot: Slot, part: slice) -> tuple[slice, slice]:
        """Where a slot and a part of the bucket meet: (elements of the slot, elements of the part)."""
        low, high = max(slot.start, part.start), min(slot.stop, part.stop)
        if low >= high:
            return slice(0, 0), slice(0, 0)
        return slice(low - slot.start, high - slot.start), slice(low - part.start, high - part.start)


class FlatStates:
    """All buckets of a rank, bound to the parameters of its (already cut) model.

    Attributes:
        buckets: in the order in which backward completes them.
        parameters: logical name, of a tile with its number (`Placement.key`) → the nn.Parameter, a view of a bucket.
        owners: logical name → the (module, attribute) places that use it.
        sinks: likewise → how its layers write its gradient; the others are left to autograd.
        recipe: dtypes of each copy.
        frozen: logical names of parameters that are not trained: their gradient is zero, no update changes them.
        way: how buckets are divided over the dp ranks; `spread_way`: those of a rank's own experts, over edp.
        parameter_pool: where blocks are gathered; None where parameters are kept whole.
        gradient_pool: where gradients of sharded buckets are summed up; None where they are kept whole.
        store: what is offloaded; None where nothing is.
        is_delayed: whether parameters are updated one step late.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        strategy: Strategy,
        at: dict[str, int],
        device: torch.device,
        frozen: frozenset[str] = frozenset(),
        optimizer: str = "adamw",
    ) -> None:
        self.recipe: Recipe = strategy.recipe
        self.frozen = frozen
        self.way, self.spread_way = sharding(strategy), sharding(strategy, is_spread=True)
        self.placements = placements(spec, strategy, at)
        layouts = held_buckets(self.placements, strategy)
        self.parameter_pool = parameter_pool(layouts, strategy)
        self.gradient_pool = gradient_pool(layouts, strategy)
        store = Store(strategy, optimizer, rank_of(at, strategy.sizes), device, DTYPES)
        self.store = store if store.stored else None
        self.is_delayed = strategy.offload.delayed
        self._working: list[torch.Tensor] = []
        whole_parameters = self._memory(layouts, self.parameter_pool, DTYPES[self.recipe.parameter], device)
        whole_gradients = self._memory(layouts, self.gradient_pool, DTYPES[self.recipe.gradient], device)
        self.buckets = [
            self._bucket(layout, strategy.shard_index(at, layout.is_spread), parameters, gradients)
            for layout, parameters, gradients in zip(layouts, whole_parameters, whole_gradients, strict=True)
        ]
        if self.store is not None:
            self.store.make_buffers()
        self.parameters: dict[str, nn.Parameter] = {}
        self.sinks: dict[str, GradientSink] = {}
        self.owners = _owners(model, spec)
        for bucket, slot in self.slots():
            view = bucket.view(alias(bucket.parameters), slot)
            parameter = nn.Parameter(view, requires_grad=slot.placement.name not in frozen)
            self.parameters[slot.placement.key] = parameter
            for module, attribute in self.owners.get(slot.placement.key, ()):
                module._parameters[attribute] = parameter
        unknown = self.owners.keys() - {placement.name for placement in self.placements}
        if unknown:
            raise InputError(
                f"the model has parameters that its spec does not place here: {', '.join(sorted(unknown))}"
            )

    def _memory(
        self, layouts: Sequence[Bucket], pool: Pool | None, dtype: torch.dtype, device: torch.device
    ) -> list[torch.Tensor]:
        """Memory of each whole bucket: its own, or its place in the pool."""
        if pool is None:
            return [torch.zeros(layout.numel, dtype=dtype, device=device) for layout in layouts]
        buffers = [torch.zeros(numel, dtype=dtype, device=device) for numel in pool.numels]
        self._working += buffers
        at: dict[str, int] = {}
        taken = []
        for layout in layouts:
            start = at.get(layout.block, 0)
            at[layout.block] = start + layout.numel
            taken.append(buffers[pool.buffer_of[layout.block]][start : start + layout.numel])
        return taken

    def _bucket(self, layout: Bucket, index: int, parameters: torch.Tensor, gradients: torch.Tensor) -> FlatBucket:
        way = self.spread_way if layout.is_spread else self.way
        own = slice(*way.own(layout.numel, index))
        counted = slice(*way.counted(layout.numel, index))
        state = None if self.store is None else self.store.add(layout, own.start, own.stop, self.frozen)
        return FlatBucket(
            layout,
            way,
            own,
            counted,
            parameters,
            gradients,
            _kept(parameters[own], self.parameter_pool, state, "parameters"),
            _kept(gradients[own], self.gradient_pool, state, "gradients"),
            state,
        )

    @property
    def keeps_whole_parameters(self) -> bool:
        """Whether parameters are there between their uses, or only this rank's shards of them."""
        return self.parameter_pool is None

    def slots(self) -> Iterator[tuple[FlatBucket, Slot]]:
        """Every (bucket, slot)."""
        return ((bucket, slot) for bucket in self.buckets for slot in bucket.layout.slots)

    @torch.no_grad()
    def fill(self, read: Callable[[Placement], torch.Tensor]) -> None:
        """Set every parameter from `read(placement)`, a tensor of the placement's box; of a shard, its part of it."""
        for bucket, slot in self.slots():
            values = read(slot.placement)
            if self.keeps_whole_parameters:
                bucket.view(bucket.parameters, slot).copy_(values)
            else:
                of_slot, of_own = bucket.overlap(slot, bucket.own)
                copy(bucket.own_parameters[of_own], values.reshape(-1)[of_slot])

    def gradients(self) -> Iterator[tuple[Placement, torch.Tensor, slice]]:
        """Each placement with what this rank holds of its summed gradient: (placement, [k] values, the k elements of
        its flattened box that they are)."""
        return self._held(lambda bucket: bucket.own_gradients)

    def weights(self) -> Iterator[tuple[Placement, torch.Tensor, slice]]:
        """Likewise its values: all of them where parameters are kept whole, else this rank's shard of them. What lies
        on a tier is a copy."""
        if self.keeps_whole_parameters:
            return ((s.placement, b.parameters[s.start : s.stop], slice(0, s.stop - s.start)) for b, s in self.slots())
        return self._held(lambda bucket: bucket.own_parameters)

    def _held(self, memory: Callable[[FlatBucket], Flat]) -> Iterator[tuple[Placement, torch.Tensor, slice]]:
        for bucket, slot in self.slots():
            of_slot, of_own = bucket.overlap(slot, bucket.own)
            yield slot.placement, read(memory(bucket)[of_own]), of_slot

    @torch.no_grad()
    def zero_gradients(self) -> None:
        """Start a new step. What a sink will replace is not zeroed."""
        for bucket, slot in self.slots():
            if slot.placement.key not in self.sinks:
                bucket.gradients[slot.start : slot.stop].zero_()
        for bucket in self.buckets:
            self.start_step(bucket)

    def start_step(self, bucket: FlatBucket) -> None:
        """What `bucket.gradients` holds does not count any more, where sinks write it."""
        for slot in bucket.layout.slots:
            if (sink := self.sinks.get(slot.placement.key)) is not None:
                sink.start_step()

    @torch.no_grad()
    def settle(self, bucket: FlatBucket) -> None:
        """Make `bucket.gradients` valid as a whole, also where no micro-batch has written."""
        for slot in bucket.layout.slots:
            if (sink := self.sinks.get(slot.placement.key)) is not None:
                sink.settle()

    @property
    def parameter_bytes(self) -> int:
        """Of what stays between uses."""
        kept = (b.parameters if self.keeps_whole_parameters else b.own_parameters for b in self.buckets)
        return sum(map(_bytes, kept))

    @property
    def gradient_bytes(self) -> int:
        """Of what stays between uses."""
        return sum(_bytes(b.gradients if self.gradient_pool is None else b.own_gradients) for b in self.buckets)

    @property
    def working_bytes(self) -> int:
        """Of the pools, and of what an offloaded update works in."""
        return sum(map(_bytes, self._working)) + (self.store.working_bytes if self.store else 0)

    def tier_bytes(self, tier: str) -> int:
        """Kept on a tier, `cpu` or `disk`."""
        return self.store.held_bytes(tier) if self.store else 0


def _bytes(x: Flat) -> int:
    """In memory."""
    return x.nbytes if isinstance(x, torch.Tensor) else 0


def _kept(part: torch.Tensor, pool: Pool | None, state: StoredState | None, kind: str) -> Flat:
    """What stays of a bucket between its uses: `part` of the whole where there is no pool, else a shard by itself."""
    if pool is None:
        return part
    if state is not None and any(each.kind == kind and not each.is_copy for each in state.stored):
        return state.run(kind)
    return torch.zeros_like(part)


def alias(x: torch.Tensor) -> torch.Tensor:
    """The same memory under a version counter of its own: gathering a block is no change to what autograd saved."""
    return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), tuple(x.shape), x.stride())


def _owners(model: nn.Module, spec: ModelSpec) -> dict[str, list[tuple[nn.Module, str]]]:
    """Logical name → the (module, attribute) places that use it. A tied head uses the embedding's."""
    owners: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for attribute in module._parameters:
            if module._parameters[attribute] is None:
                continue
            name = f"{path}.{attribute}" if path else attribute
            if spec.tied_embeddings and name == "head.weight":
                name = "embedding.weight"
            owners.setdefault(name, []).append((module, attribute))
    return owners
