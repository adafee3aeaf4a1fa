"""From a job to a plan: enumerate, price, keep what fits, order by time, let the clock decide among the best."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.core.cluster import ClusterSpec
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.plan import Plan
from meshwright.core.strategy import Strategy
from meshwright.planner.advise import advise
from meshwright.planner.balance import Ends, balanced, balanced_by
from meshwright.planner.enumerate import Refusal, strategies
from meshwright.planner.explain import explain
from meshwright.planner.fix import check_fix
from meshwright.planner.must import Must, kept
from meshwright.planner.price import Forecast, Pricer, is_long, num_cells
from meshwright.planner.too_small import nothing_fits


@dataclass(frozen=True, slots=True)
class Options:
    """How many strategies to show, and how many the clock may replay."""

    num_ranked: int = 8
    num_simulated: int = 3
    """Of those shown, the first so many are replayed too, where they have at most `max_cells`."""
    max_cells: int = 1024
    """Stages × micro-batches of a timetable that is replayed only to be shown."""
    max_simulated: int = 12
    """To find the first, where the clock overturns the closed form's order."""
    must: tuple[Must, ...] = ()
    """What each strategy must keep."""
    ends: Ends | None = None
    """What a run has measured: pipelines are cut by it, instead of evenly or by forecast."""


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
    wanted = check_fix(fix or {})
    space = strategies(model, cluster, job, wanted)
    pricer = Pricer(model, cluster, job)
    legal = kept(options.must, space.legal)
    if options.ends is not None:
        legal = tuple(balanced_by(options.ends, strategy, model.num_layers) for strategy in legal)
    priced = [pricer.forecast(strategy) for strategy in legal]
    fitting = in_order(f for f in priced if f.fits)
    if not fitting:
        raise nothing_fits(model, cluster, job, wanted, priced)
    evener = [pricer.forecast(s) for s in balanced(best_of_each_kind(fitting), model, job) if options.ends is None]
    fitting = in_order([*fitting, *(f for f in evener if f.fits)])
    settled = settle(fitting, pricer.simulate, options.max_simulated)
    ranked = replay_small(distinct(settled)[: options.num_ranked], pricer.simulate, options)
    advice = tuple(advise(model, cluster, job))
    why = explain(ranked[0], [*priced, *evener], space.refused, pricer, advice)
    return PlanResult(
        plan=Plan(model=model, cluster=cluster, job=job, strategy=ranked[0].strategy, why=why),
        forecast=ranked[0],
        ranked=tuple(ranked),
        pareto=tuple(pareto_front(fitting)),
        refused=tuple(summarise(space.refused, priced)),
        advice=advice,
        num_priced=len(priced) + len(evener),
    )


def in_order(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Fastest first; of equally fast ones the smaller."""
    return sorted(forecasts, key=_order)


def _order(forecast: Forecast) -> tuple[float, int]:
    return forecast.step_time.total_s, forecast.memory.total_bytes


def degrees(strategy: Strategy) -> tuple[int, int, int]:
    """(dp, tp, pp)."""
    return strategy.dp, strategy.tp, strategy.pp


def distinct(ordered: Iterable[Forecast]) -> list[Forecast]:
    """The first forecast of each (dp, tp, pp)."""
    first: dict[tuple[int, int, int], Forecast] = {}
    for forecast in ordered:
        first.setdefault(degrees(forecast.strategy), forecast)
    return list(first.values())


def best_of_each_kind(ordered: Iterable[Forecast]) -> list[Strategy]:
    """The first strategy of each (dp, tp, pp, ZeRO stage, recompute)."""
    first: dict[tuple[object, ...], Strategy] = {}
    for forecast in ordered:
        strategy = forecast.strategy
        first.setdefault((*degrees(strategy), strategy.zero, strategy.recompute), strategy)
    return list(first.values())


def pareto_front(ordered: Iterable[Forecast]) -> list[Forecast]:
    """Of forecasts in order of time, those that need less memory than every faster one."""
    front: list[Forecast] = []
    for forecast in ordered:
        if not front or forecast.memory.total_bytes < front[-1].memory.total_bytes:
            front.append(forecast)
    return front


def settle(ordered: Iterable[Forecast], simulate: Callable[[Forecast], Forecast], budget: int) -> list[Forecast]:
    """Replay the first with the clock until the first has been replayed, or is too long for that.

    The closed form is a lower bound on the clock's time, so a replayed forecast that stays first is the fastest of
    all. Where `budget` replays do not settle it, replayed forecasts stand before the others.
    """
    ranked = list(ordered)
    for _ in range(budget):
        if ranked[0].simulated or is_long(ranked[0].strategy):
            return ranked
        insort(ranked, simulate(ranked.pop(0)), key=_order)
    return sorted(ranked, key=lambda f: (not f.simulated, _order(f)))


def replay_small(
    ranked: Sequence[Forecast], simulate: Callable[[Forecast], Forecast], options: Options
) -> list[Forecast]:
    """Replay the first few timetables that are not large; the first strategy stays first."""
    few = ranked[: options.num_simulated]
    small = (f.simulated or num_cells(f.strategy) > options.max_cells for f in few)
    replayed = [f if keep else simulate(f) for f, keep in zip(few, small, strict=True)]
    return [ranked[0], *in_order([*replayed[1:], *ranked[options.num_simulated :]])]


def summarise(refused: Sequence[Refusal], priced: Sequence[Forecast]) -> list[RefusalSummary]:
    """Refusals by rule, in order of count; strategies that do not fit come under `memory`."""
    reasons: dict[str, list[str]] = {}
    for refusal in refused:
        reasons.setdefault(refusal.rule, []).append(refusal.reason)
    too_big = sorted((f for f in priced if not f.fits), key=lambda f: f.memory.total_bytes)
    if too_big:
        reasons["memory"] = [f"{f.strategy.describe()} {f.limit}" for f in too_big]
    summaries = (RefusalSummary(rule, len(texts), texts[0]) for rule, texts in reasons.items())
    return sorted(summaries, key=lambda s: -s.count)
