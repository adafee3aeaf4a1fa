"""From a job to a plan: enumerate, price, keep what fits, order by time, let the clock decide among the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.core.cluster import ClusterSpec
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.plan import Plan
from meshwright.core.strategy import Strategy
from meshwright.planner.advise import advise
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
    max_simulated: int = 12
    """Where the clock overturns the closed form's order, it goes on until the first has been replayed."""


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
    ranked = settle(distinct(fitting)[: options.num_ranked], pricer.simulate, options)
    advice = tuple(advise(model, cluster, job))
    why = explain(ranked[0], priced, space.refused, pricer, advice)
    return PlanResult(
        plan=Plan(model=model, cluster=cluster, job=job, strategy=ranked[0].strategy, why=why),
        forecast=ranked[0],
        ranked=tuple(ranked),
        pareto=tuple(pareto_front(fitting)),
        refused=tuple(summarise(space.refused, priced)),
        advice=advice,
        num_priced=len(priced),
    )


def in_order(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Fastest first; of equally fast ones the smaller."""
    return sorted(forecasts, key=lambda f: (f.step_time.total_s, f.memory.total_bytes))


def degrees(strategy: Strategy) -> tuple[int, int, int]:
    """(dp, tp, pp)."""
    return strategy.dp, strategy.tp, strategy.pp


def distinct(ordered: Iterable[Forecast]) -> list[Forecast]:
    """The first forecast of each (dp, tp, pp)."""
    first: dict[tuple[int, int, int], Forecast] = {}
    for forecast in ordered:
        first.setdefault(degrees(forecast.strategy), forecast)
    return list(first.values())


def pareto_front(ordered: Iterable[Forecast]) -> list[Forecast]:
    """Of forecasts in order of time, those that need less memory than every faster one."""
    front: list[Forecast] = []
    for forecast in ordered:
        if not front or forecast.memory.total_bytes < front[-1].memory.total_bytes:
            front.append(forecast)
    return front


def settle(ordered: Sequence[Forecast], simulate: Callable[[Forecast], Forecast], options: Options) -> list[Forecast]:
    """Replay the best with the clock, best first, until the first `num_simulated` have been replayed.

    The closed form is a lower bound on the clock's time, so a replayed forecast that stays first is the fastest of all.
    """
    ranked = list(ordered)
    for _ in range(options.max_simulated):
        open_places = [i for i, f in enumerate(ranked[: options.num_simulated]) if not f.simulated]
        if not open_places:
            break
        ranked[open_places[0]] = simulate(ranked[open_places[0]])
        ranked = in_order(ranked)
    return ranked


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
