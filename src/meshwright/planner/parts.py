"""What strategies of one model, cluster and job share, each computed once.

    what a rank holds          tp, its layers, ends and neighbours, ranks that share experts   not dp, ZeRO, batches
    flat buckets               and dp, their sizes, whether they are cut by block
    sent once in a step        and pp, ZeRO, whether shards stay on a node
    seconds of a micro-batch   what a rank holds, micro-batches, recomputation
    bytes of a micro-batch     likewise, and when a rank is fullest, which is the schedule's
    timetable                  the schedule, ranks, micro-batches

Pipeline ranks that hold as much (for each stage first, last, number of layers) share all of it, in one pipeline, and in
pipelines that are cut otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from meshwright.core.axes import MESH_ORDER, PP
from meshwright.core.cluster import ClusterSpec
from meshwright.core.flat import Bucket, held_buckets, padded
from meshwright.core.job import Job
from meshwright.core.measures import MemoryBreakdown, Traffic
from meshwright.core.model import ModelSpec
from meshwright.core.placement import Placement, placements
from meshwright.core.profile import OWN, Stack
from meshwright.core.strategy import Strategy
from meshwright.cost.compute import Compute, stage_compute
from meshwright.cost.in_flight import Instant, fullest_ranks, instants
from meshwright.cost.latency import RankStates, Sent, in_layers, stage_costs
from meshwright.cost.memory import Activations, constant_memory, held_activations
from meshwright.cost.offload import offload_forecast
from meshwright.cost.sending import boundaries_s, seconds_by_phase
from meshwright.cost.setting import Setting
from meshwright.cost.stack_memory import with_stack
from meshwright.cost.step import StageCosts, StepCosts
from meshwright.cost.traffic import micro_batch_traffic, stages_traffic, step_traffic
from meshwright.cost.unit_memory import unit_memory
from meshwright.schedule.build import timed_program
from meshwright.sim.replay import Replay

Key = tuple[object, ...]
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds: its flat buckets, and the elements in them without padding."""

    buckets: tuple[Bucket, ...]
    num_parameters: int
    num_spread: int
    """Of them, of experts that only some data-parallel ranks hold."""


@dataclass(frozen=True, slots=True)
class Once:
    """What a rank sends once per step, or with ZeRO-2 and 3 per micro-batch, over dp."""

    traffic: Traffic
    sent: Sent


def first_of(rank: int) -> dict[str, int]:
    """Mesh coordinates of the first device of a pipeline rank."""
    return {**dict.fromkeys(MESH_ORDER, 0), PP: rank}


def held_by_rank(strategy: Strategy, num_layers: int, dense: tuple[int, ...] = ()) -> tuple[Key, ...]:
    """For each pipeline rank what it holds: for each stage its ends of the model, its number of layers, which of them
    have no experts, and whether its neighbours are on the rank itself.

    Args:
        dense: layers of a mixture that have no experts.
    """
    layers, ranks, parts = strategy.stage_layers(num_layers), strategy.stage_ranks, strategy.num_parts

    def of(stage: int, rank: int) -> Key:
        own = layers[stage]
        beside = (ranks[near : near + 1] == (rank,) for near in (max(0, stage - 1), stage + 1))
        without = tuple(layer - own.start for layer in dense if layer in own)
        return stage % parts == 0, stage % parts == parts - 1, len(own), without, *beside

    return tuple(tuple(of(stage, rank) for stage in own) for rank, own in enumerate(strategy.stages_by_rank))


def first_alike(held: Iterable[object]) -> tuple[int, ...]:
    """For each pipeline rank the first that holds as much (:func:`held_by_rank`)."""
    first: dict[object, int] = {}
    return tuple(first.setdefault(one, rank) for rank, one in enumerate(held))


@dataclass(frozen=True, slots=True)
class _Keys:
    """Equal where strategies share what is named so."""

    place: int
    """Where parameters lie, but for dp."""
    once: Key
    """What is sent over dp, and held besides activations."""
    again: Key
    """What is run again."""
    batch: Key
    """What is computed and sent for a micro-batch."""
    moved: Key
    """What is gathered ahead, and offloaded."""
    holds: tuple[int, ...]
    """What each pipeline rank holds, under the same number wherever it is the same."""
    kinds: tuple[int, ...]
    """For each pipeline rank the first of its kind."""


class Known(Generic[Found]):
    """Values of one kind, each found once, by what it depends on."""

    def __init__(self) -> None:
        self._found: dict[Key, Found] = {}

    def once(self, key: Key, find: Callable[[], Found]) -> Found:
        """What was found for `key`; found now, if it never was."""
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = find()
        return found


class Parts:
    """Remembers them for one model, cluster and job."""

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, job: Job, stack: Stack) -> None:
        self.model = model
        self.cluster = cluster
        self.job = job
        self.stack = stack
        self._places: dict[Key, int] = {}
        self._last: tuple[Strategy, _Keys] | None = None
        self._holds = Known[tuple[tuple[int, ...], tuple[int, ...]]]()
        self._placed = Known[tuple[Placement, ...]]()
        self._unpadded = Known[Held]()
        self._held = Known[Held]()
        self._sent = Known[Once]()
        self._replays = Known[Replay]()
        self._step_costs = Known[StepCosts]()
        self._rank_costs = Known[tuple[StageCosts, ...]]()
        self._stages = Known[tuple[dict[str, float], Compute]]()
        self._repeated = Known[Traffic]()
        self._activations = Known[Activations]()
        self._constant = Known[MemoryBreakdown]()

    def of(self, model: ModelSpec) -> Parts:
        """Likewise, of another model."""
        return Parts(model, self.cluster, self.job, self.stack)

    def keys(self, s: Strategy) -> _Keys:
        """What decides what a strategy shares with others; asked many times in a row for the same one."""
        if self._last is None or self._last[0] is not s:
            self._last = s, self._find_keys(s)
        return self._last[1]

    def _find_keys(self, s: Strategy) -> _Keys:
        cut = s.layers_per_stage, s.stage_ranks
        key = s.pp, s.num_parts, s.tp, s.expert, s.tensor, s.sequence, s.context, s.precision, s.tile, cut
        place = self._places.setdefault(key, len(self._places))
        layout = self._places.setdefault(key[2:-1], len(self._places))
        endless = (s.schedule, s.num_micro_batches) if s.pipeline_schedule.is_asynchronous else ()
        times = s.num_micro_batches if s.reduces_each else 1
        tiled_again = s.recompute == "full" and s.tile > 1 and s.zero == 3
        zero = s.zero, s.shard_over, s.ranks_per_node, s.keeps_gathered, s.reduces_each, s.bucket_bytes
        again = s.recompute, s.recompute_layers, s.recompute_group
        one_ring = self.stack.ring_share is not None and s.zero == 3
        holds, kinds = self._holds.once((place, endless), lambda: self._find_holds(s, layout))
        return _Keys(
            place=place,
            once=(s.pp, s.dp, zero, times, tiled_again, endless),
            again=again,
            batch=(
                layout, s.dp, s.micro_batch_size, s.num_micro_batches, again, one_ring,
                s.tensor.kind != "1d" and s.splits_backward,
            ),
            moved=(s.prefetch, s.offload),
            holds=holds,
            kinds=kinds,
        )  # fmt: skip

    def _find_holds(self, s: Strategy, layout: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What each rank holds, and the first that holds as much; which of the ranks that share a parameter counts it
        as its own, and how many versions an asynchronous schedule keeps, depends on the rank itself."""
        held = held_by_rank(s, self.model.num_layers, self.model.dense_layers or ())
        directions, is_tied_apart = s.pipeline_schedule.num_directions, s.end_ranks[0] != s.end_ranks[1]
        by_itself = s.pipeline_schedule.is_asynchronous or directions > 1 or self.stack.transfers != "beside"
        keys = [
            (layout, directions, is_tied_apart, one, (s.stage_ranks, rank) if by_itself else ())
            for rank, one in enumerate(held)
        ]
        return tuple(self._places.setdefault(key, len(self._places)) for key in keys), first_alike(held)

    def held(self, s: Strategy, rank: int) -> Held:
        """Buckets of the first device of a pipeline rank."""
        holds = self.keys(s).holds[rank]
        cut = s.bucket_bytes, s.zero >= 2

        def unpadded() -> Held:
            alone = s.model_copy(update={"dp": s.expert_dp})
            placed = self._placed.once((holds,), lambda: placements(self.model, s, first_of(rank)))
            buckets = held_buckets(placed, alone)
            sizes = [(bucket.slots[-1].stop, bucket.is_spread) for bucket in buckets]
            return Held(buckets, sum(n for n, _ in sizes), sum(n for n, is_spread in sizes if is_spread))

        def find() -> Held:
            whole = self._unpadded.once((holds, cut), unpadded)
            return replace(whole, buckets=padded(whole.buckets, s.bucket_multiple))

        return self._held.once((holds, s.dp, cut), find)

    def once(self, s: Strategy, rank: int) -> Once:
        """What it sends once per step: the same for all micro-batches and any recomputation."""

        def find() -> Once:
            sent = step_traffic(self.model, s, first_of(rank), self.held(s, rank).buckets)
            calls = sum(row.calls for (_, _, phase), row in sent.rows.items() if phase == "gradients")
            return Once(sent, Sent(seconds_by_phase(self.model, s, self.cluster, sent, self.stack), calls))

        keys = self.keys(s)
        return self._sent.once((keys.once, keys.holds[rank]), find)

    def replay(self, s: Strategy) -> Replay:
        """Its timetable, ready for the clock."""
        return self._replays.once((s.pipeline_schedule, s.pipeline), lambda: Replay(timed_program(s)))

    def step_costs(self, s: Strategy) -> StepCosts:
        """Prices of every stage and every stage boundary."""

        def find() -> StepCosts:
            kinds, ranks = self.keys(s).kinds, s.stage_ranks
            priced = {rank: self.rank_costs(s, rank) for rank in dict.fromkeys(kinds)}
            costs = [iter(priced[kind]) for kind in kinds]
            crossed_s = boundaries_s(self.model, self.job, s, self.cluster, self.stack)
            return StepCosts(
                tuple(next(costs[rank]) for rank in ranks), crossed_s, ranks, min(1.0, self.cluster.device.cores or 1.0)
            )

        keys = self.keys(s)
        return self._step_costs.once((keys.place, keys.once, keys.batch, keys.moved), find)

    def rank_costs(self, s: Strategy, rank: int) -> tuple[StageCosts, ...]:
        """Seconds of the stages of a pipeline rank: the same for every order."""

        def find() -> tuple[StageCosts, ...]:
            held, once = self.held(s, rank), self.once(s, rank).sent
            moved = offload_forecast(s, self.job.optimizer, held.buckets) if s.offload.is_used else None
            states, costs = RankStates(held.num_parameters, held.num_spread, moved), list[StageCosts]()
            setting = Setting(self.model, self.job, self.cluster, self.stack)
            for stage in s.rank_stages(rank):
                phases, compute = self.stage(s, stage)
                sent = Sent({**phases, **once.seconds}, once.num_reductions)
                costs.append(stage_costs(setting, s, stage, compute, sent, states))
            return tuple(costs)

        keys = self.keys(s)
        return self._rank_costs.once((keys.holds[rank], keys.once, keys.batch, keys.moved), find)

    def stage(self, s: Strategy, stage: int) -> tuple[dict[str, float], Compute]:
        """Seconds of a stage's collectives by phase, and what it computes for a micro-batch."""

        def find() -> tuple[dict[str, float], Compute]:
            sent = stages_traffic(self.model, self.job, s, [stage])
            phases = seconds_by_phase(self.model, s, self.cluster, sent, self.stack)
            in_stage = in_layers(s, phases)
            return phases, stage_compute(self.model, self.job, s, self.cluster, stage, in_stage, self.stack)

        layers, parts = s.stage_layers(self.model.num_layers)[stage], s.num_parts
        without = tuple(layer - layers.start for layer in self.model.dense_layers or () if layer in layers)
        kind = len(layers), without, stage % parts == 0, stage % parts == parts - 1
        return self._stages.once((self.keys(s).batch, s.pipeline_schedule.num_directions, kind), find)

    def traffic(self, s: Strategy, rank: int) -> Traffic:
        """What the first device of a pipeline rank sends in a step."""
        keys = self.keys(s)
        repeated = self._repeated.once(
            (keys.holds[rank], s.pp, keys.batch),
            lambda: micro_batch_traffic(self.model, self.job, s, rank),
        )
        return Traffic({**repeated.rows, **self.once(s, rank).traffic.rows})

    def memory_by_rank(self, s: Strategy) -> dict[int, MemoryBreakdown]:
        """Pipeline rank → memory of its fullest device, for the rank of each kind with the most activations.

        Index 0 of dp and tp has the larger part where a split is uneven.
        """
        fullest: dict[int, tuple[int, int, Activations]] = {}
        kinds = self.keys(s).kinds
        for rank, found in fullest_ranks(s, kinds).items():
            kept = self._kept(s, rank, found)
            kept_bytes = kept.device_bytes + kept.host_bytes
            if kinds[rank] not in fullest or kept_bytes > fullest[kinds[rank]][0]:
                fullest[kinds[rank]] = kept_bytes, rank, kept
        ranks = sorted(fullest.values(), key=lambda found: found[1])
        return {rank: self._memory(s, rank, kept) for _, rank, kept in ranks}

    def memory(self, s: Strategy, rank: int) -> MemoryBreakdown:
        """Of the fullest device of a pipeline rank."""
        (found,) = instants(s, [rank])
        return self._memory(s, rank, self._kept(s, rank, found))

    def _kept(self, s: Strategy, rank: int, instants: tuple[Instant, ...]) -> Activations:
        keys, is_moved = self.keys(s), s.offload.moves_activations
        return self._activations.once(
            (keys.holds[rank], s.micro_batch_size, keys.again, is_moved, instants),
            lambda: held_activations(self.model, self.job, s, rank, instants),
        )

    def _memory(self, s: Strategy, rank: int, kept: Activations) -> MemoryBreakdown:
        if self.stack.sharded_units and s.zero == 3:
            return unit_memory(self.model, self.job, s, rank, self.stack)
        keys = self.keys(s)
        constant = self._constant.once(
            (keys.holds[rank], keys.once, keys.moved),
            lambda: constant_memory(self.model, self.job, s, first_of(rank), self.held(s, rank).buckets),
        )
        own = kept.beside(constant)
        if self.stack == OWN:
            return own
        return with_stack(own, self.model, self.job, s, rank, self.held(s, rank).num_parameters, self.stack)
