"""Lower bounds on a strategy's seconds and bytes, in a few microseconds: what no choice that is still open can beat.

    seconds   what all ranks compute together, evenly divided; what a pipeline's last rank waits for before and after;
              what the mean rank reduces beyond what backward may hide, gathers and updates
    bytes     states of the first rank, and as many micro-batches as the schedule makes it hold, of its fewest layers;
              states of the mean rank

Both are read off the real prices of one layer and of one bucket that holds all of a rank, so that no formula is
written twice. Collectives cost no less in several calls than in one: their seconds are concave in their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshwright.core.cluster import ClusterSpec
from meshwright.core.flat import Bucket, Slot
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.placement import Box, Placement, placements
from meshwright.core.strategy import Offload, Strategy
from meshwright.cost.in_flight import is_declared
from meshwright.cost.latency import optimizer_s, seconds_by_phase
from meshwright.cost.memory import LeastKept, constant_memory, least_kept_bytes
from meshwright.cost.terms import TimeTerm, total_s
from meshwright.cost.traffic import step_traffic
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
FEWEST_LAYERS = 4
"""Of a model that has a layer of each kind between its ends."""


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one micro-batch through the whole model, on the ranks of one stage."""

    forward_s: float
    backward_s: float
    layer_forward_s: float
    """Of one layer, at least."""
    layer_backward_s: float
    """Likewise, without what is run again."""
    again_s: float
    """Of one layer that is run again, at least."""
    head_s: float
    """Forward and backward."""
    gradients_s: float
    """Backward of one layer, at most, without what the host adds."""
    host_s: float
    """What it adds to a backward of all layers."""
    kept: LeastKept


@dataclass(frozen=True, slots=True)
class _Size:
    """Elements of parameters that a rank of one stage holds: (whole, of its own experts)."""

    layer: tuple[int, int]
    """Of the smallest layer."""
    front: int
    """Of the embeddings."""
    all: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Split:
    """What the degrees, ZeRO and shards decide."""

    phases: dict[str, float]
    """Seconds of a mean rank's collectives in a step, in few calls."""
    first_s: float
    """Of the first rank's reduction of gradients."""
    update_s: float
    states_bytes: int
    """Of the first rank."""
    mean_bytes: int
    """Likewise, of the mean one: the fullest holds no less."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Of all strategies that a partly chosen one may become."""

    seconds: float
    num_bytes: int
    split: Split
    work: Work


@dataclass(frozen=True, slots=True)
class _Way:
    """Layers of a pipeline rank, and of the stages before its first one; of both those that are run again."""

    before: int
    before_again: int
    own: int
    own_again: int
    has_head: bool


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a pipeline cuts the model."""

    ways: tuple[_Way, ...]
    """Of ranks with equally many layers that which is furthest from the first stage."""
    first: int
    """Layers of the first stage."""
    fewest: int
    """Layers of the shortest stage of the first rank."""
    fewest_of_all: int


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
        self._works: dict[Key, Work] = {}
        self._cuts: dict[Key, _Cut] = {}
        profile = cluster.device.profile
        self._slowdown = profile.overlap_slowdown if profile else 1.0

    def sized(self, s: Strategy) -> Bound:
        """Of a strategy whose schedule, and cut into stages, are still open."""
        return self._bound(s, self._split(s), self._work(s), is_ordered=False)

    def ordered(self, s: Strategy, before: Bound) -> Bound:
        """Of a whole strategy. `before`: while its schedule, and its cut into stages, were open."""
        return before if s.pp == 1 else self._bound(s, before.split, before.work, is_ordered=True)

    def _bound(self, s: Strategy, split: Split, work: Work, *, is_ordered: bool) -> Bound:
        pipeline_s = self._alone_s(s, split, work) if s.pp == 1 else self._pipeline_s(s, split, work, is_ordered)
        after_s = sum(split.phases.get(phase, 0.0) for phase in ("count", "norm", "parameters"))
        mean_kept_bytes = self._mean_kept_bytes(s, work) if is_ordered and split.mean_bytes else 0
        first_bytes = split.states_bytes + self._kept_bytes(s, work, is_ordered)
        num_bytes = max(first_bytes, split.mean_bytes + mean_kept_bytes)
        return Bound(pipeline_s + after_s + split.update_s, num_bytes, split, work)

    def _alone_s(self, s: Strategy, split: Split, work: Work) -> float:
        """Without a pipeline: micro-batches one after the other, gathering and reducing beside them."""
        m, gathers_s = s.num_micro_batches, [0.0, 0.0]
        gather_s, num_blocks = split.phases.get("gather", 0.0) / (2 * m), self.model.num_layers + 1
        if gather_s and not s.keeps_gathered and s.offload.parameters == "none":
            for at, way_s in enumerate((work.forward_s, work.backward_s)):
                beside_s = min(gather_s, way_s) * (1 - 1 / num_blocks) if s.prefetch else 0.0
                first_s = gather_s / num_blocks if s.prefetch else gather_s
                gathers_s[at] = max(gather_s - beside_s, first_s + (self._slowdown - 1) * beside_s)
        times = m if s.reduces_each else 1
        window_s = work.backward_s + gathers_s[1]
        exposed_s = times * self._exposed_s(split.phases.get("gradients", 0.0) / times, window_s)
        return m * (work.forward_s + work.backward_s + sum(gathers_s)) + exposed_s

    def _exposed_s(self, reduction_s: float, window_s: float) -> float:
        """What a reduction adds to a backward of at most `window_s`: what is longer than that, and what slows it."""
        seen_s = max(0.0, reduction_s - window_s)
        return seen_s + (min(self._slowdown, 2.0) - 1) * (reduction_s - seen_s)

    def _pipeline_s(self, s: Strategy, split: Split, work: Work, is_ordered: bool) -> float:
        """The mean rank's work; or the first rank's with what it reduces; or the way there and back, and the last's."""
        m, each_s = s.num_micro_batches, work.layer_forward_s + work.layer_backward_s
        compute_s = m * (work.forward_s + work.backward_s) / s.pp
        if not is_ordered:
            window_s = 2 * self.model.num_layers / s.pp * work.gradients_s + work.host_s
            alone_s = m * self._least_layers(s) * each_s + self._exposed_s(split.first_s, window_s)
            return max(compute_s + self._least_before(s) * work.layer_forward_s, alone_s)
        if s.pipeline_schedule.num_directions > 1 or s.pipeline_schedule.is_asynchronous:
            return compute_s
        cut, tails = self._cut(s), not s.splits_backward
        ends_s = first_end_s = 0.0
        for way in cut.ways:
            own_s = way.own * each_s + way.own_again * work.again_s + way.has_head * work.head_s
            end_s = way.before * work.layer_forward_s + m * own_s
            tail_s = way.before * work.layer_backward_s + way.before_again * work.again_s
            ends_s = max(ends_s, end_s)
            first_end_s = max(first_end_s, end_s + tail_s if tails else end_s * (way.before == 0))
        exposed_s = self._exposed_s(split.first_s, (cut.first + 1) * work.gradients_s + work.host_s)
        return max(compute_s, ends_s, first_end_s + exposed_s)

    def _cut(self, s: Strategy) -> _Cut:
        key = s.stage_ranks, s.num_parts, s.layers_per_stage, s.recompute == "none", s.recompute_layers
        if key not in self._cuts:
            self._cuts[key] = self._find_cut(s)
        return self._cuts[key]

    def _find_cut(self, s: Strategy) -> _Cut:
        counts = [len(layers) for layers in s.stage_layers(self.model.num_layers)]
        again = [s.num_recomputed(count) for count in counts]
        ways = [
            _Way(
                before=sum(counts[: stages[0]]),
                before_again=sum(again[: stages[0]]),
                own=sum(counts[stage] for stage in stages),
                own_again=sum(again[stage] for stage in stages),
                has_head=rank == s.end_ranks[1],
            )
            for rank, stages in enumerate(s.stages_by_rank)
        ]
        longest = {(way.before == 0, way.own, way.own_again, way.has_head): way for way in ways}  # the last of each
        fewest = min(counts[stage] for stage in s.rank_stages(0))
        return _Cut(tuple(longest.values()), counts[0], fewest, min(counts))

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

    def _kept_bytes(self, s: Strategy, work: Work, is_ordered: bool) -> int:
        kept = work.kept
        if s.pp == 1:
            return self._of_layers(s, self.model.num_layers, kept.layer, kept.whole) + kept.ends
        if not is_ordered:
            return self._of_layers(s, self._least_layers(s), kept.layer, kept.whole)
        num_live = s.pipeline_schedule.num_live
        if num_live is None:
            return 0
        whole, again = kept.whole, kept.layer
        if not is_declared(s):
            whole, again = min(whole, kept.postponed), min(again, kept.postponed)
        return num_live(s.pipeline, 0) * self._of_layers(s, self._cut(s).fewest, again, whole)

    def _mean_kept_bytes(self, s: Strategy, work: Work) -> int:
        """Of the mean rank, where every rank has one stage and the schedule says how many micro-batches it holds."""
        num_live = s.pipeline_schedule.num_live
        if num_live is None or not is_declared(s):
            return 0
        held = sum(num_live(s.pipeline, rank) for rank in range(s.pp))
        return held * self._of_layers(s, self._cut(s).fewest_of_all, work.kept.layer, work.kept.whole) // s.pp

    def _of_layers(self, s: Strategy, num_layers: int, again: int, whole: int) -> int:
        """Bytes of layers of which some are run again."""
        run_again = s.num_recomputed(num_layers)
        return run_again * again + (num_layers - run_again) * whole

    def _work(self, s: Strategy) -> Work:
        kind = s.tp, s.ep, s.tensor, s.sequence, s.context, s.precision, s.micro_batch_size
        key: Key = *kind, s.recompute, s.recompute_group, s.recompute_layers and (s.recompute_layers, s.pp)
        if key not in self._works:
            self._works[key] = self._find_work(s)
        return self._works[key]

    def _find_work(self, s: Strategy) -> Work:
        alone = s.model_copy(update={**ALONE, "dp": s.ep})
        if s.recompute != "none":
            plain = self._work(
                s.model_copy(update={"recompute": "none", "recompute_layers": None, "recompute_group": 1})
            )
        if s.recompute_layers is not None:
            longest = max(map(len, s.stage_layers(self.model.num_layers)))
            whole = self._work(s.model_copy(update={"recompute_layers": None}))
            share = 0.0 if self.model.dense_layers else min(1.0, s.recompute_layers / longest)
            more_s = share * (whole.backward_s - plain.backward_s)
            return replace(whole, backward_s=plain.backward_s + more_s)
        _, compute = self._parts.stage(alone, 0)
        passes = [_pass_s(terms, self.model.num_layers) for terms in (compute.forward, compute.backward)]
        if self.model.dense_layers:
            cheapest = self._cheapest(alone)
            passes = [replace(each, layer_s=layer_s) for each, layer_s in zip(passes, cheapest, strict=True)]
        backward_s, is_again = total_s(compute.backward), s.recompute != "none"
        host_s = sum(term.seconds for term in compute.backward if term.name == "launches")
        mean_s = (backward_s - passes[1].head_s - host_s) / self.model.num_layers
        return Work(
            forward_s=total_s(compute.forward),
            backward_s=backward_s,
            layer_forward_s=passes[0].layer_s,
            layer_backward_s=plain.layer_backward_s if is_again else passes[1].layer_s,
            again_s=max(0.0, passes[1].layer_s - plain.layer_backward_s) if is_again else 0.0,
            head_s=passes[0].head_s + passes[1].head_s,
            gradients_s=backward_s if self.model.dense_layers else mean_s,
            host_s=host_s,
            kept=least_kept_bytes(self.model, self.job, s),
        )

    def _cheapest(self, s: Strategy) -> tuple[float, float]:
        """Forward and backward of a layer with experts or of one without, whichever is less, without the host's part.

        Of a model of the same layers, one to a stage, whose second is without and whose third is with them.
        """
        if self.model.num_layers < FEWEST_LAYERS:
            return 0.0, 0.0
        model = self.model.model_copy(update={"dense_layers": (1,)})
        parts, one_each = self._parts.of(model), s.model_copy(update={"pp": model.num_layers})
        kinds = [parts.stage(one_each, stage)[1] for stage in (1, 2)]
        forward_s, backward_s = zip(*((_device_s(k.forward), _device_s(k.backward)) for k in kinds), strict=True)
        return min(forward_s), min(backward_s)

    def _split(self, s: Strategy) -> Split:
        zero = s.zero, s.shard_over, s.ranks_per_node, s.keeps_gathered, s.reduces_each, s.bucket_bytes, s.offload
        times = s.num_micro_batches if s.reduces_each else 1
        key = s.dp, s.tp, s.pp, s.ep, s.tensor, s.sequence, s.context, s.precision, zero, times
        if key not in self._splits:
            self._splits[key] = self._find_split(s)
        return self._splits[key]

    def _find_split(self, s: Strategy) -> Split:
        size, fewest = self._size(s), self._least_layers(s)
        mean = size.all[0] // s.pp, size.all[1] // s.pp
        first = fewest * size.layer[0] + size.front, fewest * size.layer[1]
        blocks = self.model.num_layers if s.pp == 1 and s.zero >= 2 else 1
        phases = self._phases(s, _buckets(*(size.all if s.pp == 1 else mean), blocks))
        first_s = self._phases(s, _buckets(*first, 1)).get("gradients", 0.0) if s.pp > 1 else 0.0
        update_s = s.num_updates * optimizer_s(sum(mean), self.job, s, self.cluster) * (not s.offload.delayed)
        held = _buckets(*(size.all if s.pp == 1 else first), 1)
        has_mean = s.pp > 1 and not s.pipeline_schedule.is_asynchronous  # whose ranks keep unequally many versions
        return Split(
            phases, first_s, update_s, self._states(s, held), self._states(s, _buckets(*mean, 1)) if has_mean else 0
        )

    def _states(self, s: Strategy, buckets: tuple[Bucket, ...]) -> int:
        return constant_memory(self.model, self.job, s, first_of(0), buckets).states_bytes

    def _phases(self, s: Strategy, buckets: tuple[Bucket, ...]) -> dict[str, float]:
        sent = step_traffic(self.model, s, first_of(0), buckets)
        return seconds_by_phase(self.model, s, self.cluster, sent)

    def _size(self, s: Strategy) -> _Size:
        key = s.tp, s.ep, s.tensor, s.sequence, s.context
        if key not in self._sizes:
            held = placements(self.model, s.model_copy(update={**ALONE, "dp": s.ep}), first_of(0))
            by_layer: dict[int, list[int]] = {}
            total, front = [0, 0], 0
            for placement in held:
                total[placement.is_spread] += placement.box.numel
                if placement.part == "embedding":
                    front += placement.box.numel
                if placement.layer is not None:
                    by_layer.setdefault(placement.layer, [0, 0])[placement.is_spread] += placement.box.numel
            least = tuple(min(sizes[at] for sizes in by_layer.values()) for at in (0, 1))
            self._sizes[key] = _Size((least[0], least[1]), front, (total[0], total[1]))
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


def _buckets(whole: int, spread: int, num: int) -> tuple[Bucket, ...]:
    """So many equal buckets for all that a rank holds, and as many for experts of its own; at most a remainder less."""
    sizes = ((False, whole // num), (True, spread // num))
    return num * tuple(
        Bucket((Slot(_placement(is_spread), 0, numel),), numel, (), "layers.0", is_spread)
        for is_spread, numel in sizes
        if numel
    )


def _placement(is_spread: bool) -> Placement:
    return Placement("", (1,), Box((0,), (1,)), "mlp", 0, (), True, is_spread=is_spread)
