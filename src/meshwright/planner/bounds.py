"""Lower bounds on a strategy's seconds and bytes, in a few microseconds: what no choice that is still open can beat.

    seconds   what all ranks compute together, evenly divided; what a pipeline's last rank waits for before and after;
              what the mean rank reduces beyond what backward may hide, gathers and updates
    bytes     states and one micro-batch of the mean rank; of a whole strategy those of each rank, and as many
              micro-batches as the schedule makes it hold

Both are read off the real prices of one layer and of one bucket that holds all of a rank, so that no formula is
written twice. Collectives cost no less in several calls than in one: their seconds are concave in their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from meshwright.core.cluster import ClusterSpec
from meshwright.core.flat import BACK, FRONT, HEAD_WEIGHT, Bucket, Slot, part_of
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.placement import Box, Placement, placements
from meshwright.core.schedule import folded, looped
from meshwright.core.strategy import Offload, Strategy
from meshwright.cost.in_flight import is_declared
from meshwright.cost.latency import optimizer_s
from meshwright.cost.memory import LeastKept, constant_memory, least_kept_bytes
from meshwright.cost.sending import seconds_by_phase
from meshwright.cost.terms import TimeTerm, total_s
from meshwright.cost.traffic import step_traffic
from meshwright.planner.cuts import Cut, Layers, Pair, Rank, dot, least
from meshwright.planner.enumerate import MAX_CHUNKS
from meshwright.planner.parts import Key, Parts, first_of

ALONE = {
    "pp": 1, "schedule": Strategy().schedule, "num_chunks": 1, "layers_per_stage": None, "zero": 0, "prefetch": 1,
    "num_micro_batches": 1, "keep_gathered": False, "reduce_each": False, "shard_over": "all", "offload": Offload(),
    "recompute_layers": None, "tile": 1,
}  # fmt: skip
"""What one micro-batch on one stage does not depend on."""
LESS = 1 - 1e-9
"""A bound stays one where sums round otherwise."""
MORE = 1 + 1e-9
"""Likewise, of what is at most so much."""
NUM_OF_KINDS = 4
"""Layers of a model that has one of each kind between its ends."""


OfKinds = tuple[float, float]
"""Seconds of a layer with an MLP, and of one with experts; the same twice where a model has one kind."""


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one micro-batch through the whole model, on the ranks of one stage."""

    forward_s: float
    backward_s: float
    plain_s: float
    """Backward without what is run again."""
    layer_forward_s: OfKinds
    """Of one layer, at least."""
    layer_backward_s: OfKinds
    """Likewise, without what is run again."""
    again_s: OfKinds
    """Of one layer that is run again, at least."""
    head_s: float
    """Forward and backward."""
    gradients_s: float
    """Backward of one layer, at most, without what the host adds."""
    host_s: float
    """What it adds to a backward of all layers."""

    @property
    def layer_s(self) -> OfKinds:
        """Of one layer, forward and backward, without what is run again."""
        (dense, sparse), (dense_back, sparse_back) = self.layer_forward_s, self.layer_backward_s
        return dense + dense_back, sparse + sparse_back


@dataclass(frozen=True, slots=True)
class _Size:
    """Elements of parameters that a rank of one stage holds: (whole, of its own experts)."""

    layers: tuple[Pair, Pair]
    """Of the smallest layer of each kind."""
    front: Pair
    """Of the embeddings."""
    back: Pair
    """Of final norm and head."""
    all: Pair

    def mean(self, num_ranks: int) -> Pair:
        """Of the mean of so many pipeline ranks."""
        return self.all[0] // num_ranks, self.all[1] // num_ranks

    def of(self, counts: Pair) -> Pair:
        """Of so many layers of each kind."""
        (dense, own_dense), (sparse, own_sparse) = self.layers
        return counts[0] * dense + counts[1] * sparse, counts[0] * own_dense + counts[1] * own_sparse


@dataclass(slots=True)
class Split:
    """What the degrees, ZeRO and shards decide."""

    mean_bytes: int
    """States of the mean rank: the fullest holds no less."""
    sent: Sent | None = None
    """Found where something fits."""
    states: dict[Key, int] = field(default_factory=dict)
    """Of ranks by what they hold, as far as they were asked for."""
    by_cut: dict[Key, tuple[int, ...]] = field(default_factory=dict)
    """Likewise of the ranks of cuts."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What such ranks do once a step."""

    phases: dict[str, float]
    """Seconds of a mean rank's collectives in a step, in few calls."""
    first_s: float
    """Of the first rank's reduction of gradients."""
    update_s: float


@dataclass(frozen=True, slots=True)
class Bound:
    """Of all strategies that a partly chosen one may become."""

    seconds: float
    """0 of what does not fit in any case."""
    num_bytes: int
    split: Split
    kind: int
    """Of a micro-batch's work: degrees and layouts."""
    kept: LeastKept | None = None
    work: Work | None = None


class Bounds:
    """For one model, cluster and job. `is_cut`: stages may hold any number of layers."""

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, job: Job, parts: Parts, *, is_cut: bool = False) -> None:
        self.model = model
        self.cluster = cluster
        self.job = job
        self._parts = parts
        self._is_cut = is_cut
        self._sizes: dict[Key, _Size] = {}
        self._splits: dict[Key, Split] = {}
        self._plains: dict[Key, float] = {}
        self._works: dict[Key, Work] = {}
        self._kepts: dict[Key, LeastKept] = {}
        self._cuts: dict[Key, Cut] = {}
        self._kinds: dict[Key, int] = {}
        self._layers = Layers(model)
        self._of_kinds: Parts | None = None
        profile = cluster.device.profile
        self._usable = cluster.usable_memory_bytes
        self._slowdown = profile.overlap_slowdown if profile else 1.0

    def divided(self, s: Strategy, sizes: Sequence[int]) -> Bound:
        """Of a strategy whose micro-batches and recomputation are still open too.

        Args:
            sizes: of the micro-batches that may become of it.
        """
        split, kind = self._split(s), self._kind(s)
        if split.mean_bytes > self._usable or not sizes:
            return Bound(0.0, split.mean_bytes, split, kind)
        per_rank = self.job.global_batch_size // s.dp
        compute_s = min(per_rank // size * self._plain(s, kind, size) for size in sizes) / s.pp
        once_s = 0.0 if s.reduces_each else self._once_s(s, split)
        return Bound(compute_s + once_s, split.mean_bytes, split, kind)

    def sized(self, s: Strategy, before: Bound) -> Bound:
        """Of a strategy whose schedule, and cut into stages, are still open: what all ranks compute together, without
        what is run again. `before`: while more was."""
        kept = self._kept(s, before.kind)
        num_bytes = before.num_bytes + self._mean_kept_bytes(s, kept)
        if num_bytes > self._usable:
            return Bound(0.0, num_bytes, before.split, before.kind, kept)
        split = self._split(s) if s.reduces_each else before.split
        compute_s = s.num_micro_batches * self._plain(s, before.kind, s.micro_batch_size) / s.pp
        return Bound(compute_s + self._once_s(s, split), num_bytes, split, before.kind, kept)

    def waited(self, s: Strategy, before: Bound) -> Bound:
        """Likewise, with what is run again, and what ranks wait for."""
        if before.num_bytes > self._usable:
            return before
        work = self._work(s, before.kind)
        return replace(before, seconds=self._seconds(s, before.split, work), work=work)

    def ordered(self, s: Strategy, before: Bound) -> Bound:
        """Of a whole strategy. `before`: while its schedule, and its cut into stages, were open."""
        if s.pp == 1 or before.kept is None:
            return before
        cut = self._cut(s)
        num_bytes = max(before.num_bytes, self._cut_bytes(s, before.split, before.kept, cut))
        if before.work is None or num_bytes > self._usable:
            return replace(before, seconds=0.0, num_bytes=num_bytes)
        return replace(before, seconds=self._seconds(s, before.split, before.work, cut), num_bytes=num_bytes)

    def _seconds(self, s: Strategy, split: Split, work: Work, cut: Cut | None = None) -> float:
        sent = self._sent(s, split)
        pipeline_s = self._alone_s(s, sent, work) if s.pp == 1 else self._pipeline_s(s, sent, work, cut)
        return pipeline_s + self._once_s(s, split)

    def _once_s(self, s: Strategy, split: Split) -> float:
        """What follows the pipeline."""
        sent = self._sent(s, split)
        return sum(sent.phases.get(phase, 0.0) for phase in ("count", "norm", "parameters")) + sent.update_s

    def _sent(self, s: Strategy, split: Split) -> Sent:
        if split.sent is None:
            split.sent = self._find_sent(s)
        return split.sent

    def _alone_s(self, s: Strategy, sent: Sent, work: Work) -> float:
        """Without a pipeline: micro-batches one after the other, gathering and reducing beside them."""
        m, gathers_s = s.num_micro_batches, [0.0, 0.0]
        gather_s, num_blocks = sent.phases.get("gather", 0.0) / (2 * m), self.model.num_layers + 1
        if gather_s and not s.keeps_gathered and s.offload.parameters == "none":
            for at, way_s in enumerate((work.forward_s, work.backward_s)):
                beside_s = min(gather_s, way_s) * (1 - 1 / num_blocks) if s.prefetch else 0.0
                first_s = gather_s / num_blocks if s.prefetch else gather_s
                gathers_s[at] = max(gather_s - beside_s, first_s + (self._slowdown - 1) * beside_s)
        times = m if s.reduces_each else 1
        window_s = work.backward_s + gathers_s[1]
        exposed_s = times * self._exposed_s(sent.phases.get("gradients", 0.0) / times, window_s)
        return m * (work.forward_s + work.backward_s + sum(gathers_s)) + exposed_s

    def _exposed_s(self, reduction_s: float, window_s: float) -> float:
        """What a reduction adds to a backward of at most `window_s`: what is longer than that, and what slows it."""
        seen_s = max(0.0, reduction_s - window_s)
        return seen_s + (min(self._slowdown, 2.0) - 1) * (reduction_s - seen_s)

    def _pipeline_s(self, s: Strategy, sent: Sent, work: Work, cut: Cut | None) -> float:
        """The mean rank's work; or the first rank's with what it reduces; or the way there and back, and the last's."""
        m, each_s = s.num_micro_batches, work.layer_s
        if cut is None:
            compute_s = m * (work.forward_s + work.backward_s) / s.pp
            window_s = 2 * self.model.num_layers / s.pp * work.gradients_s + work.host_s
            alone_s = m * self._least_layers(s) * min(each_s) + self._exposed_s(sent.first_s, window_s)
            return max(compute_s + self._least_before(s) * min(work.layer_forward_s), alone_s)
        tails = not s.splits_backward
        backward_s = work.backward_s if s.recompute_layers is None else work.plain_s + dot(cut.again, work.again_s)
        compute_s = m * (work.forward_s + backward_s) / s.pp
        if s.pipeline_schedule.num_directions > 1 or s.pipeline_schedule.is_asynchronous:
            return compute_s
        ends_s = first_end_s = 0.0
        for way in cut.ways:
            own_s = dot(way.own, each_s) + dot(way.own_again, work.again_s) + way.has_head * work.head_s
            end_s = dot(way.before, work.layer_forward_s) + m * own_s
            tail_s = dot(way.before, work.layer_backward_s) + dot(way.before_again, work.again_s)
            ends_s = max(ends_s, end_s)
            first_end_s = max(first_end_s, end_s + tail_s if tails else end_s * way.is_first)
        exposed_s = self._exposed_s(sent.first_s, (cut.first + 1) * work.gradients_s + work.host_s)
        return max(compute_s, ends_s, first_end_s + exposed_s)

    def _cut(self, s: Strategy) -> Cut:
        schedule, again = s.pipeline_schedule, s.recompute_layers if s.recompute != "none" else 0
        placed = () if schedule.stage_ranks in (looped, folded) else (s.num_micro_batches,)
        layout = schedule.stage_ranks, schedule.num_directions, s.pp, s.stages_per_rank
        key = *layout, *placed, s.layers_per_stage, again
        if key not in self._cuts:
            self._cuts[key] = self._layers.cut(s)
        return self._cuts[key]

    def _least_before(self, s: Strategy) -> float:
        """Layers that a micro-batch passes before it comes to a rank, on the mean."""
        if self._is_cut or s.layers_per_stage is not None:
            return 0.0
        most = min(MAX_CHUNKS, self.model.num_layers // s.pp) if s.num_chunks == 1 else s.num_chunks
        return (s.pp - 1) / 2 * (self.model.num_layers // (s.pp * max(1, most)))

    def _least_layers(self, s: Strategy) -> int:
        """Of the first rank, whatever the schedule."""
        if s.pp == 1:
            return self.model.num_layers
        if self._is_cut or s.layers_per_stage is not None:
            return 0
        chunks = range(1, MAX_CHUNKS + 1)
        return min(v * (self.model.num_layers // (s.pp * v)) for v in chunks if s.pp * v <= self.model.num_layers)

    def _mean_kept_bytes(self, s: Strategy, kept: LeastKept) -> int:
        """Of the mean rank: one micro-batch of each of its stages, which are all behind when the last one's backward
        begins."""
        if s.pipeline_schedule.is_asynchronous:
            return 0
        num = self.model.num_layers
        run_again = s.num_recomputed(num)
        if s.pp == 1:
            again = self._layers.pair(0, run_again)
            rest = self._layers.pair(run_again, num)
            return int(dot(again, kept.again) + dot(rest, kept.whole)) + kept.front + kept.back
        if s.recompute_layers is not None:  # of each stage, of which there may be several on a rank
            run_again = min(num, s.recompute_layers * s.pp * max(MAX_CHUNKS, s.stages_per_rank))
            return (run_again * min(kept.again) + (num - run_again) * min(kept.whole)) // s.pp
        return int(dot(self._layers.all, kept.again if run_again else kept.whole)) // s.pp

    def _cut_bytes(self, s: Strategy, split: Split, kept: LeastKept, cut: Cut) -> int:
        """Of the fullest rank: states, and what micro-batches keep while most of them are on their way."""
        schedule, size, most = s.pipeline_schedule, s.pipeline, 0
        states = self._states_by_rank(s, split, cut)
        if schedule.num_live is None:
            return max(states)
        declared, again, whole = is_declared(s), kept.again, kept.whole
        if not declared:
            again, whole = _less_of(again, kept.postponed), _less_of(whole, kept.postponed)
        for rank, states_bytes in zip(cut.ranks, states, strict=True):
            live = max(schedule.num_live(size, rank.first), schedule.num_live(size, rank.last))
            of_one = least(rank.stages, again, whole)
            if declared:
                of_one += kept.front * rank.has_front + kept.back * rank.has_back
            most = max(most, states_bytes + live * of_one)
        return most

    def _states_by_rank(self, s: Strategy, split: Split, cut: Cut) -> tuple[int, ...]:
        """Of each kind of ranks of a cut."""
        endless = s.schedule if s.pipeline_schedule.is_asynchronous else ""
        key = id(cut), endless
        if key not in split.by_cut:
            split.by_cut[key] = tuple(self._rank_states(s, split, rank, endless) for rank in cut.ranks)
        return split.by_cut[key]

    def _rank_states(self, s: Strategy, split: Split, rank: Rank, endless: str) -> int:
        key = rank.own, rank.has_front, rank.has_back, endless and (endless, rank.last)
        if key not in split.states:
            size = self._size(s)
            held = [size.of(rank.own)]
            held += [end for end, has in ((size.front, rank.has_front), (size.back, rank.has_back)) if has]
            whole, spread = sum(of[0] for of in held), sum(of[1] for of in held)
            split.states[key] = self._states(s, _buckets(whole, spread, 1), rank.last)
        return split.states[key]

    def _kind(self, s: Strategy) -> int:
        """What a micro-batch's work depends on, besides its size and what is run again."""
        key = s.tp, s.expert, s.tensor, s.sequence, s.context, s.precision, s.offload
        return self._kinds.setdefault(key, len(self._kinds))

    def _kept(self, s: Strategy, kind: int) -> LeastKept:
        key = kind, s.micro_batch_size, s.recompute, s.recompute_group
        if key not in self._kepts:
            self._kepts[key] = least_kept_bytes(self.model, self.job, s)
        return self._kepts[key]

    def _plain(self, s: Strategy, kind: int, size: int) -> float:
        """Seconds of one micro-batch of `size` through the whole model, without what is run again."""
        key = kind, size
        if key not in self._plains:
            changes = {**ALONE, "recompute": "none", "recompute_group": 1, "dp": s.expert_dp, "micro_batch_size": size}
            _, compute = self._parts.stage(s.model_copy(update=changes), 0)
            self._plains[key] = (total_s(compute.forward) + total_s(compute.backward)) * LESS
        return self._plains[key]

    def _work(self, s: Strategy, kind: int) -> Work:
        key: Key = (
            kind,
            s.micro_batch_size,
            s.recompute,
            s.recompute_group,
            s.recompute_layers and (s.recompute_layers, s.pp),
        )
        if key not in self._works:
            self._works[key] = self._find_work(s, kind)
        return self._works[key]

    def _find_work(self, s: Strategy, kind: int) -> Work:
        alone = s.model_copy(update={**ALONE, "dp": s.expert_dp})
        if s.recompute != "none":
            changes = {"recompute": "none", "recompute_layers": None, "recompute_group": 1}
            plain = self._work(s.model_copy(update=changes), kind)
        if s.recompute_layers is not None:
            longest = max(map(len, s.stage_layers(self.model.num_layers)))
            whole = self._work(s.model_copy(update={"recompute_layers": None}), kind)
            more_s = min(1.0, s.recompute_layers / longest) * (whole.backward_s - plain.backward_s)
            if self.model.dense_layers:  # of a pipeline, its cut says it
                more_s = dot(self._layers.priced_again(0, self.model.num_layers, s), whole.again_s) * (s.pp == 1)
            return replace(whole, backward_s=plain.backward_s + more_s)
        _, compute = self._parts.stage(alone, 0)
        passes = [_pass_s(terms, self.model.num_layers) for terms in (compute.forward, compute.backward)]
        layers_s = [(each.layer_s, each.layer_s) for each in passes]
        if self.model.dense_layers:
            layers_s = list(self._by_kind(alone))
        backward_s, is_again = total_s(compute.backward), s.recompute != "none"
        host_s = sum(term.seconds for term in compute.backward if term.name == "launches")
        mean_s = (backward_s - passes[1].head_s - host_s) / self.model.num_layers
        plain_layer_s = plain.layer_backward_s if is_again else layers_s[1]
        again_s = [max(0.0, both - once) for both, once in zip(layers_s[1], plain_layer_s, strict=True)]
        return Work(
            forward_s=total_s(compute.forward),
            backward_s=backward_s,
            plain_s=plain.backward_s if is_again else backward_s,
            layer_forward_s=layers_s[0],
            layer_backward_s=plain_layer_s,
            again_s=(again_s[0], again_s[1]),
            head_s=passes[0].head_s + passes[1].head_s,
            gradients_s=max(layers_s[1]) * MORE if self.model.dense_layers else mean_s,
            host_s=host_s,
        )

    def _by_kind(self, s: Strategy) -> tuple[OfKinds, OfKinds]:
        """Forward, and backward, of a layer without experts and of one with them, without the host's part.

        Of a small model, one layer to a stage, whose second is without and whose third is with them.
        """
        if self._of_kinds is None:
            small = {"num_layers": NUM_OF_KINDS, "dense_layers": (1,)}
            self._of_kinds = self._parts.of(self.model.model_copy(update=small))
        one_each = s.model_copy(update={"pp": NUM_OF_KINDS})
        dense, sparse = (self._of_kinds.stage(one_each, stage)[1] for stage in (1, 2))
        return (
            (_device_s(dense.forward), _device_s(sparse.forward)),
            (_device_s(dense.backward), _device_s(sparse.backward)),
        )

    def _split(self, s: Strategy) -> Split:
        zero = s.zero, s.shard_over, s.ranks_per_node, s.keeps_gathered, s.reduces_each, s.bucket_bytes, s.offload
        times = s.num_micro_batches if s.reduces_each else 1
        key = s.dp, s.tp, s.pp, s.expert, s.tensor, s.sequence, s.context, s.precision, zero, times
        if key not in self._splits:
            self._splits[key] = self._find_split(s)
        return self._splits[key]

    def _find_split(self, s: Strategy) -> Split:
        size = self._size(s)
        has_mean = s.pp == 1 or not s.pipeline_schedule.is_asynchronous  # whose ranks keep unequally many versions
        is_by_block = s.pp == 1 and s.zero >= 2 and s.tile == 1
        held = self._by_block(size) if is_by_block else _buckets(*size.mean(s.pp), 1)
        return Split(self._states(s, held, 0) if has_mean else 0)

    def _find_sent(self, s: Strategy) -> Sent:
        size, fewest = self._size(s), self._least_layers(s)
        mean = size.mean(s.pp)
        least_of = [min(sizes[at] for sizes in size.layers) for at in (0, 1)]
        first = fewest * least_of[0] + size.front[0], fewest * least_of[1]
        blocks = self.model.num_layers if s.pp == 1 and s.zero >= 2 else 1
        phases = self._phases(s, _buckets(*mean, blocks))
        first_s = self._phases(s, _buckets(*first, 1)).get("gradients", 0.0) if s.pp > 1 else 0.0
        update_s = s.num_updates * optimizer_s(sum(mean), self.job, s, self.cluster) * (not s.offload.delayed)
        return Sent(phases, first_s, update_s)

    def _by_block(self, size: _Size) -> tuple[Bucket, ...]:
        """Of a rank that holds all layers."""
        layers = [(f"layers.{layer}", size.layers[self.model.is_sparse(layer)]) for layer in range(self._layers.num)]
        blocks = [(FRONT, size.front), *layers, (BACK, size.back)]
        head = "" if self.model.tied_embeddings else HEAD_WEIGHT
        return tuple(
            bucket
            for block, held in reversed(blocks)
            for bucket in _buckets(*held, 1, block, head if block == BACK else "")
        )

    def _states(self, s: Strategy, buckets: tuple[Bucket, ...], rank: int) -> int:
        """And the working buffers of blocks that are gathered and reduced, where the buckets are blocks."""
        held = constant_memory(self.model, self.job, s, first_of(rank), buckets)
        is_exact = s.pp == 1 and s.tile == 1 and not s.offload.is_used
        return held.states_bytes + (held.buffers_bytes + held.working_bytes if is_exact else 0)

    def _phases(self, s: Strategy, buckets: tuple[Bucket, ...]) -> dict[str, float]:
        sent = step_traffic(self.model, s, first_of(0), buckets)
        return seconds_by_phase(self.model, s, self.cluster, sent)

    def _size(self, s: Strategy) -> _Size:
        key = s.tp, s.expert, s.tensor, s.sequence, s.context
        if key not in self._sizes:
            placed = placements(self.model, s.model_copy(update={**ALONE, "dp": s.expert_dp}), first_of(0))
            found: dict[str | int, list[int]] = {FRONT: [0, 0], BACK: [0, 0]}
            for placement in placed:
                part = placement.layer if placement.layer is not None else part_of(placement)
                found.setdefault(part, [0, 0])[placement.is_spread] += placement.box.numel
            ends = [(found[end][0], found[end][1]) for end in (FRONT, BACK)]
            layers = [
                [held for part, held in found.items() if isinstance(part, int) and self.model.is_sparse(part) == kind]
                for kind in (False, True)
            ]
            dense, sparse = (_least_of(one or other) for one, other in (layers, layers[::-1]))
            total = sum(of[0] for of in found.values()), sum(of[1] for of in found.values())
            self._sizes[key] = _Size((dense, sparse), ends[0], ends[1], total)
        return self._sizes[key]


@dataclass(frozen=True, slots=True)
class _Pass:
    """Seconds of a forward, or a backward: of one layer, at least, and of the head."""

    layer_s: float
    head_s: float


def _pass_s(terms: Iterable[TimeTerm], num_layers: int) -> _Pass:
    """Of all layers' calls of collectives, as many as two layers make are the ends'."""
    seconds = {term.name: term.seconds for term in terms}
    head_s, sent_s = seconds.pop("head", 0.0), seconds.pop("tensor-parallel reductions", 0.0)
    layer_s = sum(seconds.values()) / num_layers + sent_s / (num_layers + 2)
    return _Pass(layer_s * LESS, head_s)


def _device_s(terms: Iterable[TimeTerm]) -> float:
    return sum(term.seconds for term in terms if term.name != "launches") * LESS


def _least_of(sizes: Sequence[Sequence[int]]) -> Pair:
    return min(size[0] for size in sizes), min(size[1] for size in sizes)


def _less_of(a: Pair, b: Pair) -> Pair:
    return min(a[0], b[0]), min(a[1], b[1])


def _buckets(whole: int, spread: int, num: int, block: str = "layers.0", name: str = "") -> tuple[Bucket, ...]:
    """So many equal buckets for all that a rank holds, and as many for experts of its own; at most a remainder less."""
    sizes = ((False, whole // num), (True, spread // num))
    return num * tuple(
        Bucket((Slot(_placement(is_spread, name), 0, numel),), numel, (), block, is_spread)
        for is_spread, numel in sizes
        if numel
    )


def _placement(is_spread: bool, name: str) -> Placement:
    return Placement(name, (1,), Box((0,), (1,)), "mlp", 0, (), True, is_spread=is_spread)
