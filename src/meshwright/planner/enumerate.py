"""Every strategy for a job on a cluster: legal, or refused with the reason.

    degrees (dp, tp, pp) with dp × tp × pp = devices
      └─ refused as a whole where a rule of core/rules.py or an advice below is broken
      └─ ZeRO stage × ranks that share experts × ranks that share a sequence
           └─ micro-batch size × recomputation
                └─ schedule, with stages per rank; refused one by one

A fixed field has one value, and an advice (unlike a rule) yields to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, isqrt
from typing import Any

from meshwright.core.axes import DP, PP, TP
from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import RuleError
from meshwright.core.job import Job
from meshwright.core.layouts import Context, ContextKind, Expert, Tensor
from meshwright.core.legal import all_degrees, check, divisors, nearest_legal
from meshwright.core.model import ModelSpec
from meshwright.core.rules import MICRO_BATCH_RULES, Case, violations
from meshwright.core.schedule import PipelineSize, Schedule, find_schedule, schedules
from meshwright.core.strategy import Offload, Precision, Strategy
from meshwright.core.units import counted
from meshwright.cost.zero import STAGES
from meshwright.planner.fix import in_words

MAX_STAGE_EXCESS = 1.25
"""Layers of the longest stage over the mean, above which a pipeline is not offered unasked."""


SMALL_BUCKET_BYTES = 2 * 2**20
"""Of gradients that cross a slow link while backward runs: the first leaves early, the last is short."""

MANY_SIZES = 16
"""So many sizes of micro-batches are all tried. Of more, not all above `SMALL_SIZE`: a step's time is flat there."""
SMALL_SIZE = 8


FURTHER_AHEAD = 2
"""Blocks that CPU ranks gather ahead, with zero=3."""


LONG_SEQUENCE = 16_384
"""Tokens from which on the tokens of a sequence are divided unasked."""
MAX_CONTEXT = 32
"""Ranks that share a sequence unasked."""
CONTEXT_KINDS: tuple[ContextKind, ...] = ("ring", "ulysses")

MAX_FILLED_CELLS = 2**12
"""Stages × micro-batches up to which schedules with smaller bubbles are looked at: longer ones have a short bubble."""


OF_CHOICES = (*MICRO_BATCH_RULES, "pp-chunks")
"""Rules that other choices at the same degrees may keep."""

MAX_CHUNKS = 4
"""Stages per rank that are tried unasked. Each further one saves less of the bubble and sends as much more."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A strategy, or all strategies of its degrees, that is not offered."""

    strategy: Strategy
    rule: str
    reason: str
    whole_degree: bool
    """True where the reason holds for every choice at these degrees."""


@dataclass(frozen=True, slots=True)
class Space:
    """What enumeration found."""

    legal: tuple[Strategy, ...]
    refused: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class Advice:
    """Legal, but not offered unless one of `yields_to` is fixed by the user."""

    id: str
    yields_to: tuple[str, ...]
    against: Callable[[Case], str | None]


def _tp_in_node(c: Case) -> str | None:
    tp, per_node = c.strategy.tp, c.cluster.devices_per_node
    if tp <= per_node:
        return None
    devices = counted(per_node, "device")
    return f"tp={tp} is more than the {devices} of a node; its all-reduces would cross nodes (advice N4)"


def _balance(c: Case) -> str | None:
    pp, num_layers, parts = c.strategy.pp, c.model.num_layers, c.strategy.num_parts
    longest = max(len(layers) for layers in c.strategy.stage_layers(num_layers))
    if longest * parts <= MAX_STAGE_EXCESS * num_layers:
        return None
    mean = num_layers / parts
    return f"pp={pp} splits {num_layers} layers so that the longest stage has {longest}, the mean {mean:.2f}"


ADVICE = (Advice("N4", ("tp",), _tp_in_node), Advice("pp-balance", ("pp", "layers_per_stage"), _balance))


def default_precision(cluster: ClusterSpec) -> Precision:
    """bf16 on accelerators that have it (advice P1), fp32 elsewhere and on CPU ranks."""
    return "bf16" if cluster.backend != "gloo" and "bf16" in cluster.device.peak_flops_per_s else "fp32"


def strategies(model: ModelSpec, cluster: ClusterSpec, job: Job, fix: Mapping[str, Any]) -> Space:
    """All candidates that agree with `fix` (values as from :func:`meshwright.planner.fix.check_fix`).

    Advice also yields where nothing else is legal. Raises RuleError where nothing legal agrees with `fix`: the reason
    that comes closest, and the nearest legal strategy.
    """
    for advice in (open_advice(fix), ()):
        space = _search(model, cluster, job, fix, advice)
        if space.legal:
            return space
    raise nothing_legal(model, cluster, job, fix, space.refused)


def open_advice(fix: Mapping[str, Any]) -> tuple[Advice, ...]:
    """What does not yield to anything that is fixed."""
    return tuple(a for a in ADVICE if not any(field in fix for field in a.yields_to))


def _search(
    model: ModelSpec, cluster: ClusterSpec, job: Job, fix: Mapping[str, Any], advice: Sequence[Advice]
) -> Space:
    choices = Choices(model, cluster, job, fix, advice)
    legal: list[Strategy] = []
    for split in choices.splits():
        for sized in choices.sizes(split):
            for strategy in choices.orders(sized):
                if choices.is_legal(strategy):
                    legal.append(strategy)
    return Space(tuple(legal), tuple(choices.refused))


class Choices:
    """All strategies as a tree: degrees and what is divided, then micro-batches and recomputation, then schedules.

    `refused` grows while it is walked.
    """

    def __init__(
        self, model: ModelSpec, cluster: ClusterSpec, job: Job, fix: Mapping[str, Any], advice: Sequence[Advice] = ()
    ) -> None:
        self.model = model
        self.cluster = cluster
        self.job = job
        self.fix = fix
        self.advice = advice
        self.refused: list[Refusal] = []

    def splits(self) -> Iterator[Strategy]:
        """Degrees, sequence and context parallelism, ZeRO, ranks that share experts."""
        for degrees in _degrees(self.cluster.num_devices, self.fix):
            first = _first_choice(degrees, self.job, self.cluster, self.fix)
            reason = _reason(self._case(first), self.advice, whole_degree=True)
            if reason:
                self.refused.append(Refusal(first, *reason, whole_degree=True))
                continue
            yield from self._divided(first)
        for first in self._layouts():
            if not _reason(self._case(first), self.advice, whole_degree=True):
                yield from self._divided(first)

    def _case(self, strategy: Strategy) -> Case:
        return Case(strategy, self.model, self.cluster, self.job)

    def _layouts(self) -> Iterator[Strategy]:
        """Sequences that are divided too, where nothing is fixed about that: within the layers' ranks, or over further
        ones where they are long; and layers on grids of ranks, unless somebody said how many share them."""
        fix, cluster = self.fix, self.cluster
        if cluster.backend == "gloo" or any(name in fix for name in ("tensor", "sequence", "context", "tile")):
            return
        contexts = [Context()]
        if self.job.seq_length >= LONG_SEQUENCE:
            sizes = [size for size in divisors(cluster.num_devices) if 1 < size <= MAX_CONTEXT]
            contexts += [Context(kind=kind, degree=d, balance="zigzag") for d in sizes for kind in CONTEXT_KINDS]
        for context in contexts:
            for degrees in _degrees(cluster.num_devices, {**fix, "context": context}):
                first = _first_choice(degrees, self.job, cluster, {**fix, "context": context})
                if context.degree > 1:
                    yield first
                if first.tp > 1:
                    yield first.model_copy(update={"sequence": "megatron"})
        for degrees in () if TP in fix else _degrees(cluster.num_devices, fix):
            for tensor in grids(degrees[TP]):
                yield _first_choice(degrees, self.job, cluster, {**fix, "tensor": tensor})

    def _divided(self, first: Strategy) -> Iterator[Strategy]:
        """ZeRO, shards and experts. At dp=1 ZeRO 0 and 1 are one."""
        options: dict[str, Sequence[Any]] = {
            "zero": _offered_stages(first, self.fix),
            "keep_gathered": (False, True) if self.fix.get("zero") == 3 and first.pp == 1 else (False,),
            "expert": _experts(first, self.model, self.cluster, self.job),
            "shard_over": ("all", "node") if 1 < _ranks_on_node(first, self.cluster) < first.data_ranks else ("all",),
        }
        for change in _products(options, self.fix):
            if change["zero"] == 3 and _gathers_further_ahead(first, self.cluster, self.fix):
                change["prefetch"] = FURTHER_AHEAD
            if change["shard_over"] == "node" and change["zero"] < 2 and "shard_over" not in self.fix:
                continue
            yield first.model_copy(update=change).on(self.cluster)

    def sizes(self, split: Strategy) -> Iterator[Strategy]:
        """Micro-batches and recomputation."""
        per_rank = self.job.global_batch_size // split.dp
        for size, again in product(self.micro_batch_sizes(split), self.recomputations(split)):
            yield split.model_copy(update={**again, "micro_batch_size": size, "num_micro_batches": per_rank // size})

    def micro_batch_sizes(self, split: Strategy) -> list[int]:
        """Those of :meth:`sizes`. A grid that nobody asked for is offered what its ranks can share out."""
        fix, per_rank = self.fix, self.job.global_batch_size // split.dp
        sizes = [fix["micro_batch_size"]] if "micro_batch_size" in fix else _micro_batch_sizes(per_rank)
        parts = 1 if "tensor" in fix else split.grid.parts(split.grid.batch_axes)
        return [
            size
            for size in sizes
            if fix.get("num_micro_batches", per_rank // size) == per_rank // size and size % parts == 0
        ]

    def recomputations(self, split: Strategy) -> Iterator[dict[str, Any]]:
        """None, all layers; on accelerators attention alone, and the first layers of each stage."""
        if "recompute" in self.fix:
            yield {"recompute": self.fix["recompute"]}
            return
        yield from ({"recompute": how} for how in ("none", "full"))
        if self.cluster.backend == "gloo" or any(
            n in self.fix for n in ("recompute_layers", "recompute_group", "tile")
        ):
            return
        yield {"recompute": "selective"}
        longest = -(-self.model.num_layers // split.pp)
        some = {longest * quarter // 4 for quarter in (1, 2, 3)} - {0, longest}
        yield from ({"recompute": "full", "recompute_layers": number} for number in sorted(some))

    def orders(self, sized: Strategy) -> Iterator[Strategy]:
        """Schedules, with stages per rank. Without a pipeline all are one."""
        for name, chunks in _orders(sized, self.model.num_layers, self.fix, self.cluster):
            yield sized.model_copy(update={"schedule": name, "num_chunks": chunks})

    def is_allowed(self, strategy: Strategy) -> bool:
        """Whether no rule speaks against it."""
        return _reason(self._case(strategy), ()) is None

    def is_legal(self, strategy: Strategy) -> bool:
        """Likewise; if one does, it is among the refused."""
        reason = _reason(self._case(strategy), ())
        if reason:
            self.refused.append(Refusal(strategy, *reason, whole_degree=False))
        return reason is None


def grids(tp: int) -> Iterator[Tensor]:
    """Of more than one rank along each side, that `tp` ranks fill."""
    if isqrt(tp) ** 2 == tp > 1:
        yield Tensor(kind="2d")
    for depth in range(2, tp):
        side = isqrt(tp // depth)
        if depth <= side and depth * side**2 == tp:
            yield Tensor(kind="2.5d", depth=depth)
    if round(tp ** (1 / 3)) ** 3 == tp > 1:
        yield Tensor(kind="3d")


def _products(options: Mapping[str, Sequence[Any]], fix: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One choice of each, those that are fixed as they are."""
    values = [(fix[name],) if name in fix else of for name, of in options.items()]
    return (dict(zip(options, chosen, strict=True)) for chosen in product(*values))


def _degrees(num_devices: int, fix: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    for degrees in all_degrees(num_devices, fix.get("context", Context()).degree):
        if all(fix.get(axis, size) == size for axis, size in degrees.items()):
            yield degrees


def _first_choice(degrees: Mapping[str, int], job: Job, cluster: ClusterSpec, fix: Mapping[str, Any]) -> Strategy:
    """One strategy at these degrees; if it breaks a rule, each of them does."""
    per_rank = max(1, job.global_batch_size // degrees[DP])
    size = fix.get("micro_batch_size") or max(1, per_rank // fix.get("num_micro_batches", per_rank))
    values = {
        **degrees,
        "precision": default_precision(cluster),
        "zero": _least_stage(fix),
        "micro_batch_size": size,
        "num_micro_batches": max(1, per_rank // size),
    }
    first = Strategy.model_validate({**values, **fix}).on(cluster)
    goes_in_two_levels = cluster.backend == "gloo" and 1 < first.dp_local < first.data_ranks
    if goes_in_two_levels and "bucket_bytes" not in fix:
        return first.model_copy(update={"bucket_bytes": SMALL_BUCKET_BYTES})
    return first


def _reason(case: Case, advice: Sequence[Advice], *, whole_degree: bool = False) -> tuple[str, str] | None:
    """(id, numbers and why) of the first rule, then of the first advice, that speaks against a case, or against all
    cases of its degrees."""
    found = violations(case.strategy, case.model, case.cluster, case.job)
    broken = [v for v in found if not (whole_degree and v.rule.id in OF_CHOICES)]
    if broken:
        return broken[0].rule.id, "; ".join(str(v) for v in broken)
    against = ((a.id, a.against(case)) for a in advice)
    return next(((id, reason) for id, reason in against if reason is not None), None)


def _gathers_further_ahead(first: Strategy, cluster: ClusterSpec, fix: Mapping[str, Any]) -> bool:
    """Where several CPU ranks meet at each block, one that is late holds up all: a second block ahead evens that out
    (docs/performance.md). NCCL gathers beside the computation by itself; tiles and offload are there to save memory."""
    is_free = not any(name in fix for name in ("prefetch", "tile", "offload"))
    return is_free and cluster.backend == "gloo" and first.data_ranks > 2


def _experts(first: Strategy, model: ModelSpec, cluster: ClusterSpec, job: Job) -> tuple[Expert, ...]:
    """Ranks that may share the experts of a layer, each cut over tp as all else, or whole on the ranks of whole tp
    groups: those that fit a node, and as many as there are."""
    shared = gcd(first.dp, model.num_experts) if model.num_experts else 1
    found = [Expert(degree=degree) for degree in _degrees_within(shared, cluster.devices_per_node // first.tp)]
    if model.num_experts and first.tp > 1 and job.seq_length % (first.cp * first.tp) == 0:
        whole = _degrees_within(gcd(first.dp * first.tp, model.num_experts), cluster.devices_per_node)
        found += [Expert(degree=degree, tensor=1) for degree in whole if degree % first.tp == 0]
    return tuple(found)


def _degrees_within(shared: int, within: int) -> list[int]:
    """Divisors that fit a node, and all."""
    return [degree for degree in divisors(shared) if degree <= max(1, within) or degree == shared]


def _micro_batch_sizes(per_rank: int) -> list[int]:
    """Divisors of a rank's sequences; of a great many all small ones, and of the others one for each factor of two."""
    sizes = divisors(per_rank)
    if len(sizes) <= MANY_SIZES:
        return sizes
    by_factor = {size.bit_length(): size for size in sizes if size > SMALL_SIZE}
    return [*(size for size in sizes if size <= SMALL_SIZE), *by_factor.values()]


def _offered_stages(first: Strategy, fix: Mapping[str, Any]) -> tuple[int, ...]:
    """ZeRO stages. Beside a pipeline 2 and 3 hold no less than 1, or communicate more often: only if asked for."""
    least = _least_stage(fix)
    if first.data_ranks == 1:
        return (least,)
    if least:
        return tuple(stage for stage in STAGES if stage >= least)
    return (
        (0, 1)
        if first.pp > 1 and not any(name in fix for name in ("shard_over", "keep_gathered", "reduce_each"))
        else STAGES
    )


def _least_stage(fix: Mapping[str, Any]) -> int:
    """The ZeRO stage that what is fixed needs."""
    offload: Offload = fix.get("offload", Offload())
    usual = Strategy()
    if any(
        fix.get(name, getattr(usual, name)) != getattr(usual, name) for name in ("keep_gathered", "prefetch", "tile")
    ):
        return 3
    return 3 if offload.parameters != "none" else 2 if offload.gradients != "none" else 0


def _ranks_on_node(first: Strategy, cluster: ClusterSpec) -> int:
    return first.model_copy(update={"shard_over": "node"}).on(cluster).dp_local


def _orders(
    first: Strategy, num_layers: int, fix: Mapping[str, Any], cluster: ClusterSpec
) -> Iterator[tuple[str, int]]:
    """(schedule, num_chunks). Stages per rank are two, or up to `MAX_CHUNKS` that split the layers evenly."""
    offered = {name: schedule for name, schedule in schedules().items() if schedule.is_offered}
    usual = Strategy().schedule
    if "schedule" in fix:
        offered = {fix["schedule"]: find_schedule(fix["schedule"])}
    elif first.pp == 1:
        offered = {usual: find_schedule(usual)}
    elif fix.get("num_chunks", 1) > 1:
        offered = {name: schedule for name, schedule in schedules().items() if schedule.chunks is None}
    elif "num_chunks" in fix:
        offered = {name: schedule for name, schedule in offered.items() if schedule.chunks in (None, 1)}
    elif cluster.backend != "gloo" and not fix.keys() & {"layers_per_stage", "tile"}:
        offered |= {name: schedule for name, schedule in schedules().items() if schedule.fills_bubbles}
    for name, schedule in offered.items():
        if "num_chunks" in fix:
            yield name, fix["num_chunks"]
            continue
        for v in chunk_choices(schedule, first.pp, num_layers) or [1] * ("schedule" in fix):
            if "schedule" in fix or schedule.is_offered or _fills(schedule, first, v):
                yield name, v


def _fills(schedule: Schedule, first: Strategy, chunks: int) -> bool:
    """Whether a schedule is worth a look for its smaller bubble: the timetable has one, is not long, and exists."""
    stages = schedule.chunks or chunks
    size = PipelineSize(first.pp, first.num_micro_batches, stages)
    if first.zero >= 2 or first.pp * stages * first.num_micro_batches > MAX_FILLED_CELLS:
        return False
    return schedule.fault is None or schedule.fault(size) is None


def chunk_choices(schedule: Schedule, pp: int, num_layers: int) -> list[int]:
    """Values of `num_chunks` worth a look: two, and up to `MAX_CHUNKS` that split the layers evenly; 1 where the
    schedule does not ask."""
    if schedule.chunks is not None:
        return [1]
    return [v for v in range(2, MAX_CHUNKS + 1) if pp * v <= num_layers and (v == 2 or num_layers % (pp * v) == 0)]


def nothing_legal(
    model: ModelSpec, cluster: ClusterSpec, job: Job, fix: Mapping[str, Any], refused: Sequence[Refusal]
) -> RuleError:
    """The error to raise: the refusal that breaks the fewest rules, or, where degrees do not even multiply out, the
    fixed point itself."""
    if refused:
        tightest = min(refused, key=lambda r: len(violations(r.strategy, model, cluster, job)))
        near = nearest_legal(tightest.strategy, model, cluster, job)
        hint = f"; nearest legal: {near.describe()}" if near else "; no split of this job over this cluster is legal"
        return RuleError(f"{_wish(fix)}: {tightest.reason}{hint}", tightest.rule)
    degrees = {axis: fix.get(axis, 1) for axis in (DP, TP, PP)}
    try:
        check(_first_choice(degrees, job, cluster, fix), model, cluster, job)
    except RuleError as error:
        return RuleError(f"{_wish(fix)}: {error}", error.rule)
    return RuleError(f"{_wish(fix)}: no strategy agrees with all of it", "fix")


def _wish(fix: Mapping[str, Any]) -> str:
    return f"nothing legal with {in_words(fix)}" if fix else "no legal strategy"
