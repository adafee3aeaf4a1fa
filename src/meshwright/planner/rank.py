"""From a job to a plan: search best first, let the clock decide among the best, say why."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from meshwright.core.cluster import ClusterSpec
from meshwright.core.collection import uncollected
from meshwright.core.errors import RuleError
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.plan import Plan
from meshwright.core.strategy import Strategy
from meshwright.planner.advise import advise
from meshwright.planner.balance import Ends
from meshwright.planner.explain import explain
from meshwright.planner.fix import check_fix
from meshwright.planner.last_resort import in_words, offloading
from meshwright.planner.must import Must
from meshwright.planner.price import Forecast, is_long, num_cells
from meshwright.planner.reorder import faster_order, in_order_of
from meshwright.planner.search import Search, searched
from meshwright.planner.too_small import nothing_fits


@dataclass(frozen=True, slots=True)
class Options:
    """How many strategies to show, and how many the clock may replay."""

    num_ranked: int = 8
    num_reordered: int = 2
    """Of those shown, the first so many are tried under schedules that only the clock can time."""
    num_simulated: int = 3
    """Of those shown, the first so many are replayed too, where they have at most `max_cells`."""
    max_cells: int = 1024
    """Stages × micro-batches of a timetable that is replayed only to be shown."""
    max_simulated: int = 12
    """To find the first, where the clock overturns the closed form's order."""
    num_front: int = 8
    """Strategies of the front of time and memory."""
    must: tuple[Must, ...] = ()
    """What each strategy must keep."""
    ends: Ends | None = None
    """What a run has measured: pipelines are cut by it, instead of evenly or by forecast."""
    may_offload: bool = False
    """Whether offload to the host is tried where nothing fits otherwise (:mod:`meshwright.planner.last_resort`)."""


@dataclass(frozen=True, slots=True)
class RefusalSummary:
    """All refusals for one reason."""

    rule: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class PlanResult:
    """What planning found."""

    plan: Plan
    forecast: Forecast
    """Of the plan's strategy; the first of `ranked`."""
    ranked: tuple[Forecast, ...]
    """The best of each (dp, tp, pp), fastest first."""
    pareto: tuple[Forecast, ...]
    """No other strategy is both faster and smaller; fastest first."""
    refused: tuple[RefusalSummary, ...]
    advice: tuple[tuple[str, str], ...]
    """(id, words) of the rules of thumb that hold."""
    num_priced: int


@uncollected()
def plan(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: Job,
    fix: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> PlanResult:
    """The fastest strategy that fits, and why.

    Args:
        fix: Strategy fields that must have the given value.

    Raises:
        InputError: `fix` names no field, or a value that the field cannot have.
        RuleError: nothing legal agrees with `fix` (rule = the broken one), keeps what it must (rule `must`), or fits
            the memory (rule `memory`).
    """
    options = options or Options()
    wanted: Mapping[str, Any] = check_fix(fix or {})
    search, without = searched(model, cluster, job, wanted, options.must, options.ends), ""
    replayed = settle(search.fastest(), search.pricer.simulate, options.max_simulated)
    if not replayed:
        closest = next(search.smallest())
        wanted, search, replayed = _offloaded(model, cluster, job, wanted, options, closest)
        without = f" {in_words(replayed[0], closest, cluster)}"
    pricer = search.pricer
    best = distinct(replayed, search, options.num_ranked)
    ranked = replay_small(best, pricer.simulate, options)
    if is_reordered(cluster, wanted):
        ranked = replay_small(reordered(ranked, search, options), pricer.simulate, options)
    front = as_replayed(islice(search.front(), options.num_front), (*replayed, *ranked))
    advice = tuple(advise(model, cluster, job))
    why = explain(ranked[0], search, advice, is_reordered=is_reordered(cluster, wanted))
    return PlanResult(
        plan=Plan(model=model, cluster=cluster, job=job, strategy=ranked[0].strategy, why=why + without),
        forecast=ranked[0],
        ranked=tuple(ranked),
        pareto=tuple(smaller_and_smaller([*front, *ranked])[: options.num_front]),
        refused=tuple(summarise(search)),
        advice=advice,
        num_priced=len(search.priced),
    )


@uncollected()
def fits(model: ModelSpec, cluster: ClusterSpec, job: Job, fix: Mapping[str, Any], options: Options) -> bool:
    """Whether :func:`plan` finds a strategy, without looking for the fastest, or saying why."""
    wanted = check_fix(fix)
    try:
        search = searched(model, cluster, job, wanted, options.must, options.ends)
        if next(search.fastest(), None) is not None:
            return True
        tiers = offloading(model, cluster, job, wanted, options.must, options.ends) if options.may_offload else ()
        return any(next(on_tier.fastest(), None) is not None for _, on_tier in tiers)
    except RuleError:
        return False


def _offloaded(
    model: ModelSpec, cluster: ClusterSpec, job: Job, wanted: Mapping[str, Any], options: Options, closest: Forecast
) -> tuple[Mapping[str, Any], Search, list[Forecast]]:
    """(what is fixed, search, what of it was replayed) with as little offloaded as it takes. Raises RuleError."""
    if options.may_offload:
        for fix, search in offloading(model, cluster, job, wanted, options.must, options.ends):
            replayed = settle(search.fastest(), search.pricer.simulate, options.max_simulated)
            if replayed:
                return fix, search, replayed
    raise nothing_fits(model, cluster, job, wanted, closest)


def in_order(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Fastest first; of equally fast ones the smaller."""
    return sorted(forecasts, key=_order)


def smaller_and_smaller(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Fastest first, those alone that need less memory than every faster one."""
    found: list[Forecast] = []
    for forecast in in_order(forecasts):
        if not found or forecast.device_bytes < found[-1].device_bytes:
            found.append(forecast)
    return found


def as_replayed(forecasts: Iterable[Forecast], replayed: Iterable[Forecast]) -> list[Forecast]:
    """The same strategies, with the clock's seconds where it was asked before: one strategy has one time."""
    known = {id(forecast.strategy): forecast for forecast in replayed if forecast.simulated}
    return [known.get(id(forecast.strategy), forecast) for forecast in forecasts]


def _order(forecast: Forecast) -> tuple[float, int]:
    return forecast.step_time.total_s, forecast.memory.total_bytes


def degrees(strategy: Strategy) -> tuple[int, int, int]:
    """(dp, tp, pp)."""
    return strategy.dp, strategy.tp, strategy.pp


def settle(ordered: Iterable[Forecast], simulate: Callable[[Forecast], Forecast], budget: int) -> list[Forecast]:
    """Replay the first with the clock until the first has been replayed, or is too long for that.

    The closed form is a lower bound on the clock's time, so a replayed forecast that stays first is the fastest of
    all. Returns what was replayed, and what was too long for it, fastest first; nothing where there is nothing.

    Args:
        ordered: by the closed form, fastest first; no more of it is asked for than it takes.
        budget: replays at most.
    """
    replayed: list[Forecast] = []
    for forecast in ordered:
        if replayed and (len(replayed) >= budget or _order(replayed[0]) <= _order(forecast)):
            break
        if forecast.simulated or is_long(forecast.strategy):
            insort(replayed, forecast, key=_order)
            break
        insort(replayed, simulate(forecast), key=_order)
    return replayed


def distinct(replayed: Sequence[Forecast], search: Search, limit: int) -> list[Forecast]:
    """The first forecast of each (dp, tp, pp), as far as they were replayed, and of the others by the closed form."""
    found: dict[tuple[int, int, int], Forecast] = {}
    for forecast in replayed[:limit]:
        found.setdefault(degrees(forecast.strategy), forecast)
    known = {id(forecast.strategy) for forecast in replayed}
    others = (f for f in search.fastest(lambda s: degrees(s) not in found) if id(f.strategy) not in known)
    while len(found) < limit:
        following = next(others, None)
        if following is None:
            break
        found.setdefault(degrees(following.strategy), following)
    return [replayed[0], *in_order(f for f in found.values() if f is not replayed[0])]


def is_reordered(cluster: ClusterSpec, fix: Mapping[str, Any]) -> bool:
    """Whether schedules are tried that the clock alone can time. Idle slots of CPU ranks, which share cores, are not
    lost."""
    return cluster.backend != "gloo" and not fix.keys() & {"schedule", "num_chunks", "layers_per_stage", "tile"}


def reordered(ranked: Sequence[Forecast], search: Search, options: Options) -> list[Forecast]:
    """The first few under the schedule that makes them fastest and fits, and the others under that of the fastest."""
    few, rest = ranked[: options.num_reordered], ranked[options.num_reordered :]
    found = [faster_order(forecast, search.pricer, options.must) for forecast in few]
    tried = [other.forecast if other else forecast for forecast, other in zip(few, found, strict=True)]
    first = min((f for f in tried if f.simulated or is_long(f.strategy)), key=_order)
    others = [in_order_of(first.strategy, f, search.pricer, options.must) for f in (*tried, *rest) if f is not first]
    all_of_them = [first, *others]
    fastest = min((f for f in all_of_them if f is first or f.simulated), key=_order)
    return [fastest, *in_order(f for f in all_of_them if f is not fastest)]


def replay_small(
    ranked: Sequence[Forecast], simulate: Callable[[Forecast], Forecast], options: Options
) -> list[Forecast]:
    """Replay timetables that are not large, until the first few are replayed; the first strategy stays first."""
    first, rest = ranked[0], list(ranked[1:])
    if not first.simulated and num_cells(first.strategy) <= options.max_cells:
        first = simulate(first)
    for _ in range(2 * options.num_simulated):
        few = enumerate(rest[: options.num_simulated - 1])
        at = next((i for i, f in few if not f.simulated and num_cells(f.strategy) <= options.max_cells), None)
        if at is None:
            break
        rest[at] = simulate(rest[at])
        rest = in_order(rest)
    return [first, *rest]


def summarise(search: Search) -> list[RefusalSummary]:
    """Refusals by rule, in order of count; strategies that do not fit come under `memory`, the closest first."""
    reasons: dict[str, list[str]] = {}
    for refusal in search.refused:
        reasons.setdefault(refusal.rule, []).append(refusal.reason)
    room = search.pricer.room
    too_big = [(f.device_bytes, f.strategy, f.limit) for f in search.priced if not f.fits]
    too_big += [(num_bytes, strategy, room.least(num_bytes)) for strategy, num_bytes in search.too_large]
    if too_big:
        too_big.sort(key=lambda found: found[0])
        _, closest, limit = too_big[0]
        reasons["memory"] = [f"{closest.describe()} {limit}"] * len(too_big)
    summaries = (RefusalSummary(rule, len(texts), texts[0]) for rule, texts in reasons.items())
    return sorted(summaries, key=lambda s: -s.count)
