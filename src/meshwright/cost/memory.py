"""Bytes on one rank at the peak of a step, by category: what a rank will count of itself.

Sources: Rajbhandari et al. 2020 §3 (states), Korthikanti et al. 2022 §4 (activations),
Huang et al. 2019 and Narayanan et al. 2021 §2.2 (micro-batches in flight).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, groupby

from meshwright.core.axes import PP
from meshwright.core.flat import Bucket, gradient_pool, parameter_pool, rank_buckets
from meshwright.core.job import Job
from meshwright.core.layouts import Context, Expert, SequenceKind, Tensor
from meshwright.core.measures import MemoryBreakdown
from meshwright.core.model import ModelSpec
from meshwright.core.offload import TierTraffic
from meshwright.core.precision import NUM_MOMENTS
from meshwright.core.program import Kind
from meshwright.core.sharding import sharding
from meshwright.core.strategy import Precision, Recompute, Strategy
from meshwright.cost.activations import (
    embedding_terms,
    head_terms,
    imbalance_of,
    layer_input_terms,
    layer_terms,
    loss_terms,
    mlp_half_terms,
    output_gradient_bytes,
    postponed_head_terms,
    postponed_layer_terms,
    postponed_mlp_half_terms,
    recomputed_core_terms,
    router_gradient_terms,
    router_input_bytes,
    total_bytes,
)
from meshwright.cost.experts import num_statistics
from meshwright.cost.grids import grid_sizes, panels_bytes
from meshwright.cost.in_flight import Instant, instants
from meshwright.cost.offload import offload_forecast


def memory(
    model: ModelSpec, job: Job, strategy: Strategy, at: Mapping[str, int], buckets: Sequence[Bucket] | None = None
) -> MemoryBreakdown:
    """Peak of one training step of the rank at mesh coordinates `at` (pp, dp, tp).

    `buckets` are those of the rank, where the caller has them already. Each is padded to a multiple of dp. Of an
    asynchronous schedule the parameters count as often as it keeps versions of them (Narayanan et al. 2019, §3.3).
    """
    buckets = rank_buckets(model, strategy, at) if buckets is None else buckets
    kept = next(activations_by_rank(model, job, strategy, [at[PP]]))
    return kept.beside(constant_memory(model, job, strategy, at, buckets))


def constant_memory(
    model: ModelSpec, job: Job, strategy: Strategy, at: Mapping[str, int], buckets: Sequence[Bucket]
) -> MemoryBreakdown:
    """What a rank holds all through a step: everything but activations."""
    recipe = strategy.recipe
    whole = sum(b.numel for b in buckets)
    num_shards = {is_spread: sharding(strategy, is_spread).num_shards for is_spread in (False, True)}
    shard = sum(b.numel // num_shards[b.is_spread] for b in buckets)

    def held(from_stage: int) -> int:
        return shard if strategy.zero >= from_stage else whole

    state_bytes = recipe.master_bytes + NUM_MOMENTS[job.optimizer] * recipe.moment_bytes
    num_versions = strategy.pipeline_schedule.num_versions(strategy.pipeline, at[PP])
    moved, offload = offload_forecast(strategy, job.optimizer, buckets, at), strategy.offload
    return MemoryBreakdown(
        parameters_bytes=held(3) * recipe.parameter_bytes * (offload.parameters == "none") * num_versions,
        gradients_bytes=(shard if strategy.reduces_each else whole)
        * recipe.gradient_bytes
        * (offload.gradients == "none"),
        optimizer_bytes=held(1) * state_bytes * (offload.optimizer == "none"),
        activations_bytes=0,
        buffers_bytes=tables_bytes(model, job, strategy) + router_bytes(model, _own_layers(model, strategy, at[PP])),
        working_bytes=working_bytes(buckets, strategy) + moved.working_set_bytes,
        host_bytes=moved.tier_bytes.get("cpu", 0),
        disk_bytes=moved.tier_bytes.get("disk", 0),
    )


def _own_layers(model: ModelSpec, strategy: Strategy, rank: int) -> Iterator[int]:
    layers = strategy.stage_layers(model.num_layers)
    return chain.from_iterable(layers[stage] for stage in strategy.rank_stages(rank))


def router_bytes(model: ModelSpec, layers: Iterable[int]) -> int:
    """Statistics of the routers of these layers in training (float64), and their biases."""
    if not model.num_experts:
        return 0
    bias_bytes = 4 * model.num_experts * model.gate.bias
    return sum(map(model.is_sparse, layers)) * (num_statistics(model) * 8 + bias_bytes)


def working_bytes(buckets: Sequence[Bucket], strategy: Strategy) -> int:
    """Pools of gathered blocks and of gradients on their way (`core.flat.Pool`): what ZeRO-2 and 3 hold on top of
    shards, whatever the number of layers."""
    recipe = strategy.recipe
    gathered, gradients = parameter_pool(buckets, strategy), gradient_pool(buckets, strategy)
    gathered_bytes = gathered.numel * recipe.parameter_bytes if gathered else 0
    return gathered_bytes + (gradients.numel * recipe.sent_gradient_bytes if gradients else 0)


def activations_bytes(model: ModelSpec, job: Job, strategy: Strategy, rank: int) -> int:
    """What autograd keeps, and what is postponed, at the worst instant of a step on one pipeline rank.

    Without recompute that is the end of a forward: all live micro-batches, each with everything. With it there are
    other candidates, the backward of layers that run again: the head's share of that micro-batch is gone, and whole
    layers have come back. Where backward is split, what I frees is no more than what it keeps for W, and while it is in
    a layer, gradients that its products keep come on top.
    """
    return next(activations_by_rank(model, job, strategy, [rank])).device_bytes


@dataclass(frozen=True, slots=True)
class Activations:
    """Of one pipeline rank, at most."""

    device_bytes: int
    host_bytes: int
    """What layers keep, where it is offloaded."""
    panels_bytes: int = 0
    """Of a grid's products, which all micro-batches share."""

    def beside(self, constant: MemoryBreakdown) -> MemoryBreakdown:
        """All that the rank holds."""
        return replace(
            constant,
            activations_bytes=self.device_bytes,
            working_bytes=constant.working_bytes + self.panels_bytes,
            host_bytes=constant.host_bytes + self.host_bytes,
        )


def activations_by_rank(model: ModelSpec, job: Job, strategy: Strategy, ranks: Iterable[int]) -> Iterator[Activations]:
    """:func:`activations_bytes` of several pipeline ranks, and what they keep on the host."""
    asked = list(ranks)
    for rank, fullest in zip(asked, instants(strategy, asked), strict=True):
        yield held_activations(model, job, strategy, rank, fullest)


def held_activations(
    model: ModelSpec, job: Job, strategy: Strategy, rank: int, fullest: Iterable[Instant]
) -> Activations:
    """Of a pipeline rank at the worst of these instants."""
    part, layers, parts = _part(model, job, strategy), strategy.stage_layers(model.num_layers), strategy.num_parts
    is_moved = strategy.offload.moves_activations
    kind = _MovedStageBytes if is_moved else _StageBytes
    stages = [
        kind(part, _units(model, part, strategy, layers[s]), s % parts == 0, s % parts == parts - 1)
        for s in strategy.rank_stages(rank)
    ]
    moved = (sum(live * stage.moved for live, stage in zip(at.live, stages, strict=True)) for at in fullest)
    return Activations(
        device_bytes=max(_held(instant, stages) for instant in fullest),
        host_bytes=max(moved) if is_moved else 0,
        panels_bytes=panels_bytes(grid_sizes(model, job, strategy, 0), any(stage.is_last for stage in stages)),
    )


def moved_units(model: ModelSpec, job: Job, strategy: Strategy, stage: int) -> tuple[int, int]:
    """(units, bytes) that one micro-batch moves to the host on a stage, and back; none where nothing is moved."""
    if not strategy.offload.moves_activations:
        return 0, 0
    part = _part(model, job, strategy)
    units = _units(model, part, strategy, strategy.stage_layers(model.num_layers)[stage])
    return sum(count for _, count in units), sum(unit.kept * count for unit, count in units)


def moved_traffic(model: ModelSpec, job: Job, strategy: Strategy, rank: int) -> TierTraffic:
    """What a pipeline rank's layers write to the host in a step, and read from it: each unit once, both ways."""
    total, m = TierTraffic(), strategy.micro_batches_per_stage
    for stage in strategy.rank_stages(rank):
        count, num_bytes = moved_units(model, job, strategy, stage)
        total.add_writes("activations", m * num_bytes, m * count)
        total.add_reads("activations", m * num_bytes, m * count)
    return total


def _part(model: ModelSpec, job: Job, strategy: Strategy) -> _Parts:
    s, imbalance = strategy, imbalance_of(job, strategy, model)
    expert = Expert(degree=s.ep if imbalance > 1 else 1, tensor=s.et)
    kinds = expert, imbalance, s.tensor, s.context, s.precision, s.sequence, s.keeps_operands
    return _one_micro_batch(model, strategy.tp, *kinds, strategy.micro_batch_size, job.seq_length, _loss_numbers(job))


OfKinds = tuple[int, int]
"""Bytes of a layer with an MLP, and of one with experts; the same twice where a model has one kind."""


@dataclass(frozen=True, slots=True)
class LeastKept:
    """Bytes that one micro-batch keeps on a device, at least."""

    again: OfKinds
    """By each layer that is run again, from forward to backward; or by each, where nothing is."""
    whole: OfKinds
    """By each other layer."""
    postponed: OfKinds
    """By each layer, from I to W."""
    front: int
    """By the embedding."""
    back: int
    """By head and loss."""


def least_kept_bytes(model: ModelSpec, job: Job, strategy: Strategy) -> LeastKept:
    """By the layers of each kind, and by the ends; by the ends alone where layers keep it on the host."""
    part, none = _part(model, job, strategy), (0, 0)
    if strategy.offload.moves_activations:
        return LeastKept(none, none, none, part.front, part.back)
    dense, sparse = (part.unit((is_sparse,), strategy.recompute) for is_sparse in (False, True))
    group = strategy.recompute_group
    return LeastKept(
        again=(dense.kept // group, sparse.kept // group),
        whole=(part.dense.kept, part.sparse.kept),
        postponed=(dense.postponed, sparse.postponed),
        front=part.front,
        back=part.back,
    )


def _units(model: ModelSpec, part: _Parts, strategy: Strategy, layers: range) -> tuple[tuple[_Unit, int], ...]:
    """Runs of equal units in a row, in forward order: of what is kept, and goes back, together."""
    if not model.dense_layers and strategy.recompute_group == 1:
        again = strategy.num_recomputed(len(layers))
        is_sparse = (model.num_experts > 0,)
        cut: tuple[tuple[Recompute, int], ...] = ((strategy.recompute, again), ("none", len(layers) - again))
        return tuple((part.unit(is_sparse, how), count) for how, count in cut if count)
    groups = strategy.recompute_groups(layers)
    kinds = [tuple(map(model.is_sparse, group)) for group in groups]
    units = {kind: part.unit(kind, strategy.recompute) for kind in dict.fromkeys(kinds)}
    found = [(units[kind], len(list(run))) for kind, run in groupby(kinds)]
    rest = layers[strategy.num_recomputed(len(layers)) :]
    if not model.num_experts or not model.dense_layers:
        runs = [(bool(model.num_experts), len(rest))] if rest else []
    else:
        runs = [(is_sparse, len(list(run))) for is_sparse, run in groupby(map(model.is_sparse, rest))]
    return (*found, *((part.unit((is_sparse,), "none"), count) for is_sparse, count in runs))


def _held(instant: Instant, stages: Sequence[_StageBytes]) -> int:
    counts = zip(instant.live, instant.postponed, stages, strict=True)
    held = sum(live * stage.kept + postponed * stage.postponed for live, postponed, stage in counts)
    return held + stages[instant.stage].more(instant.runs)


@dataclass(frozen=True)
class _StageBytes:
    """What one micro-batch keeps on one stage."""

    part: _Parts
    units: tuple[tuple[_Unit, int], ...]
    is_first: bool
    is_last: bool

    @property
    def kept(self) -> int:
        """From forward to backward."""
        return self.in_units + self.ends

    @property
    def in_units(self) -> int:
        """Of it, by layers."""
        return sum(unit.kept * count for unit, count in self.units)

    @property
    def ends(self) -> int:
        """Of it, by embedding and head."""
        return self.part.front * self.is_first + self.part.back * self.is_last

    @property
    def moved(self) -> int:
        """On the host meanwhile."""
        return 0

    @property
    def postponed(self) -> int:
        """From I to W."""
        return sum(unit.postponed * count for unit, count in self.units) + self.part.postponed_back * self.is_last

    def more(self, runs: Kind) -> int:
        """At most beyond `kept`, while its backward runs: in one of its units, when those behind it are done."""
        part = self.part
        if runs is Kind.F:
            return 0
        if runs is Kind.B:
            return max(self._within(0)) - part.back * self.is_last
        return max(self._within(1)) + (part.postponed_back - part.back) * self.is_last

    def _within(self, is_split: int) -> Iterator[int]:
        """Beyond `kept` in the last unit of each run, and in the first: those behind it have freed what they kept,
        and, where backward is split, keep for W what is postponed."""
        behind = 0
        for unit, count in reversed(self.units):
            of_one = is_split * unit.postponed - unit.kept
            most = (unit.most_split if is_split else unit.most) - unit.kept
            yield behind + most
            yield behind + (count - 1) * of_one + most
            behind += count * of_one


@dataclass(frozen=True)
class _MovedStageBytes(_StageBytes):
    """Likewise, if layers keep it on the host: on the device are two units at a time, one that runs, and one on its way
    (`parallel.offload.activations`)."""

    @property
    def kept(self) -> int:
        return self.ends

    @property
    def moved(self) -> int:
        return self.in_units

    def more(self, runs: Kind) -> int:
        """While its forward runs, or its backward: its last unit is there before head and loss are gone, the others
        with the one that comes next."""
        units = [unit for unit, count in self.units for _ in range(count)]
        if not units:
            return 0
        back, postponed_back = self.part.back * self.is_last, self.part.postponed_back * self.is_last
        pairs = list(zip(units, [0, *(unit.kept for unit in units[:-1])], strict=True))
        if runs is Kind.F:
            inside = max(unit.kept + before for unit, before in pairs) - back
        elif runs is Kind.B:
            inside = max(unit.most + before for unit, before in pairs) - back
        else:
            behind = accumulate((unit.postponed for unit in reversed(units)), initial=0)
            inside = max(unit.most_split + before + of_w for (unit, before), of_w in zip(reversed(pairs), behind))
            inside += postponed_back - back
        return max(units[-1].kept, inside)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Bytes that one micro-batch keeps of a layer, or of layers that are run again together."""

    kept: int
    """From forward to backward."""
    most: int
    """While its backward runs."""
    postponed: int
    """From I to W."""
    most_split: int
    """While its I runs."""


@dataclass(frozen=True, slots=True)
class _LayerBytes:
    """Bytes of one layer of one micro-batch, if nothing is run again."""

    kept: int
    """From forward to backward."""
    core: int
    """Of it, what attention's core makes."""
    mlp_half: int
    """Of it, what is free when backward comes to attention."""
    postponed: int
    """From I to W."""
    postponed_mlp_half: int
    """Of it, when I comes to attention, with the gradient that goes into it."""
    gradient: int
    """Of what o puts out: as large as the layer's output."""
    last_gradient: int
    """Of the layer's output, which its last product keeps for W while all that forward kept is there; 0 where experts
    alone come last: gradients of their rows take the place of the rows."""
    at_router: int
    """In the place of `mlp_half`, when backward comes to a router; 0 of a layer without one."""
    router_input: int
    """Of that, what shared experts keep for W too."""

    def unit(self, recompute: Recompute) -> _Unit:
        """By itself; kept but for attention's core with `selective`."""
        again = self.core if recompute == "selective" else 0
        kept, at_attention = self.kept - again, self.kept - self.mlp_half
        at_router = at_attention - again + self.at_router if self.at_router else 0
        most = max(kept, at_router) if not again else max(kept, at_router, at_attention)
        behind = at_router and at_router + self.postponed_mlp_half - self.router_input - self.gradient
        most_split = max(kept + self.last_gradient, at_attention + self.postponed_mlp_half, behind)
        return _Unit(kept, most, self.postponed, most_split)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Bytes that one micro-batch keeps on one rank."""

    front: int
    """By the embedding."""
    dense: _LayerBytes
    """By each layer with an MLP; of a mixture without such layers, the same as `sparse`."""
    sparse: _LayerBytes
    """By each layer with experts; where there are none, the same as `dense`."""
    back: int
    """By head and loss, from forward to backward."""
    postponed_back: int
    """By the head, from I to W."""
    layer_input: int
    """By layers that are run again, of which the first one's input is kept."""

    def unit(self, are_sparse: tuple[bool, ...], recompute: Recompute) -> _Unit:
        """Of layers in a row, of which these are sparse."""
        units = [(self.sparse if is_sparse else self.dense).unit(recompute) for is_sparse in are_sparse]
        if recompute != "full":
            return units[0]
        kept, postponed = sum(unit.kept for unit in units), sum(unit.postponed for unit in units)
        most, split, before, behind = kept, 0, kept, 0
        for unit in reversed(units):
            before -= unit.kept
            most = max(most, before + unit.most)
            split = max(split, before + unit.most_split + behind)
            behind += unit.postponed
        return _Unit(self.layer_input, most, postponed, split)


def _loss_numbers(job: Job) -> int:
    return job.num_loss_sums + (job.z_loss > 0)


@lru_cache(maxsize=4096)
def _one_micro_batch(
    model: ModelSpec,
    tp: int,
    expert: Expert,
    imbalance: float,
    tensor: Tensor,
    context: Context,
    precision: Precision,
    sequence: SequenceKind,
    keeps_operands: bool,
    b: int,
    s: int,
    loss_numbers: int,
) -> _Parts:
    """What all stages, schedules and data-parallel degrees share; a planner asks for it thousands of times."""
    recompute: Recompute = "none" if keeps_operands or tensor.kind != "3d" else "selective"
    layout = {"tp": tp, "tensor": tensor, "context": context, "precision": precision, "sequence": sequence}
    layout |= {"expert": expert}
    alone = Strategy.model_validate({**layout, "recompute": recompute})

    def of_layer(layer: int) -> _LayerBytes:
        gradient = output_gradient_bytes(model, alone, b, s)
        ends_in_experts = model.is_sparse(layer) and not model.shared_ffn_size
        return _LayerBytes(
            kept=total_bytes(layer_terms(model, alone, b, s, layer, imbalance)),
            core=total_bytes(recomputed_core_terms(model, alone, b, s)),
            mlp_half=total_bytes(mlp_half_terms(model, alone, b, s, layer, imbalance)),
            postponed=total_bytes(postponed_layer_terms(model, alone, b, s, layer, imbalance)),
            postponed_mlp_half=total_bytes(postponed_mlp_half_terms(model, alone, b, s, layer, imbalance)),
            gradient=gradient,
            last_gradient=0 if ends_in_experts else gradient,
            at_router=total_bytes(router_gradient_terms(model, alone, b, s)) if model.is_sparse(layer) else 0,
            router_input=router_input_bytes(model, alone, b, s),
        )

    dense = of_layer(model.dense_layers[0] if model.dense_layers else 0)
    has_both = model.num_experts and model.dense_layers
    return _Parts(
        front=total_bytes(embedding_terms(model, alone, b, s)),
        dense=dense,
        sparse=of_layer(next(filter(model.is_sparse, range(model.num_layers)))) if has_both else dense,
        back=total_bytes([*head_terms(model, alone, b, s), *loss_terms(model, alone, b, s, loss_numbers)]),
        postponed_back=total_bytes(postponed_head_terms(model, alone, b, s)),
        layer_input=total_bytes(layer_input_terms(model, alone, b, s)),
    )


def tables_bytes(model: ModelSpec, job: Job, strategy: Strategy) -> int:
    """Rotary tables: cosines of every dim that turns, sines of half of them, per position."""
    if model.positions != "rope":
        return 0
    return job.seq_length // strategy.cp * (model.rotary_dim + model.rotary_dim // 2) * strategy.recipe.parameter_bytes
