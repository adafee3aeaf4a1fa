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
from meshwright.planner.balance import balanced
from meshwright.planner.enumerate import Refusal, strategies
from meshwright.planner.explain import explain
from meshwright.planner.fix import check_fix
from meshwright.planner.price import Forecast, Pricer
from meshwright.planner.too_small import nothing_fits


@dataclass(frozen=True, slots=True)
class Options:
    """How many strategies to show, and how many the clock may replay."""

    num_ranked: int = 8
    num_simulated: int = 3
    """The first so many of the shown ones."""
    max_simulated: int = 12
    """To find the first, where the clock overturns the closed form's order."""


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
        RuleError: nothing legal agrees with `fix` (rule = the broken one), or nothing fits the memory (rule `memory`).
    """
    options = options or Options()
    wanted = check_fix(fix or {})
    space = strategies(model, cluster, job, wanted)
    pricer = Pricer(model, cluster, job)
    priced = [pricer.forecast(strategy) for strategy in space.legal]
    fitting = in_order(f for f in priced if f.fits)
    if not fitting:
        raise nothing_fits(model, cluster, job, wanted, priced)
    evener = [pricer.forecast(s) for s in balanced(best_of_each_kind(fitting), model, job)]
    fitting = in_order([*fitting, *(f for f in evener if f.fits)])
    settled = settle(fitting, pricer.simulate, 1, options.max_simulated)
    ranked = settle(distinct(settled)[: options.num_ranked], pricer.simulate, options.num_simulated)
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


def settle(
    ordered: Iterable[Forecast], simulate: Callable[[Forecast], Forecast], count: int, budget: int = 100
) -> list[Forecast]:
    """Replay the best with the clock, best first, until the first `count` have been replayed.

    The closed form is a lower bound on the clock's time, so a replayed forecast that stays first is the fastest of
    all. Where `budget` replays do not settle it, replayed forecasts stand before the others.
    """
    ranked = list(ordered)
    for _ in range(budget):
        waiting = next((i for i, f in enumerate(ranked[:count]) if not f.simulated), None)
        if waiting is None:
            return ranked
        replayed = simulate(ranked.pop(waiting))
        insort(ranked, replayed, key=_order)
    return sorted(ranked, key=lambda f: (not f.simulated, _order(f)))


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
