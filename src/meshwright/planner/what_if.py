"""What if: a plan with some of its choices changed, and what that does to memory, traffic and time.

What was not named follows, so that the job stays the same: dp from the other degrees, the number of micro-batches from
dp; a list of layers per stage is given up where the number of stages changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import InputError
from meshwright.core.job import Job
from meshwright.core.layouts import Tensor
from meshwright.core.plan import Plan
from meshwright.core.strategy import Strategy
from meshwright.core.values import Value
from meshwright.cost.terms import TimeTerm
from meshwright.planner.fix import CLOSED, check_named
from meshwright.planner.named import NamedFields, types_of
from meshwright.planner.price import Forecast, Pricer

JOB_FIELDS = tuple(Job.model_fields)
CHANGED = NamedFields("--set", types_of(Strategy, Job), "a strategy or a job", "dp=2", CLOSED)


@dataclass(frozen=True, slots=True)
class Priced:
    """A plan and what it costs."""

    plan: Plan
    forecast: Forecast
    terms: tuple[TimeTerm, ...]
    """The step's seconds by cause, as the mean over the pipeline's ranks."""


def parse_changes(texts: Iterable[str]) -> dict[str, Any]:
    """`tp=4`, `zero=3`, `seq_length=8192`, ... to values: fields of a strategy or of a job.

    Raises InputError naming the text.
    """
    named = CHANGED.read(texts)
    of_job = {name: value for name, value in named.items() if name in JOB_FIELDS}
    of_strategy = {name: value for name, value in named.items() if name not in JOB_FIELDS}
    return {**of_job, **check_named(of_strategy, CHANGED.option)}


def changed(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    """The plan with these fields of its strategy or job, and with what follows from them.

    Raises:
        InputError: nothing is changed, or a value that a job cannot have.
        RuleError: the result is illegal; the rule, and the nearest legal strategy.
    """
    of_job = {name: value for name, value in changes.items() if name in JOB_FIELDS}
    job = Job.parse({**plan.job.model_dump(), **of_job}, CHANGED.option)
    named = {name: _merged(plan.strategy, name, value) for name, value in changes.items() if name not in JOB_FIELDS}
    strategy = Strategy(**{**plan.strategy.model_dump(), **named})
    strategy = strategy.model_copy(update=_following(strategy, set(named), plan.cluster, job))
    if "layers_per_stage" not in named and strategy.num_parts != plan.strategy.num_parts:
        strategy = strategy.model_copy(update={"layers_per_stage": None})
    if (job, strategy) == (plan.job, plan.strategy):
        raise InputError("nothing is changed; give --set FIELD=VALUE with another value than the plan's")
    return Plan(model=plan.model, cluster=plan.cluster, job=job, strategy=strategy)


def _merged(strategy: Strategy, name: str, value: Any) -> Any:
    """Of a field of several parts those that were named, the others as they are; another kind of grid has its own."""
    before = getattr(strategy, name)
    if not isinstance(before, Value) or (isinstance(before, Tensor) and value.kind != before.kind):
        return value
    return before.model_copy(update={part: getattr(value, part) for part in value.model_fields_set})


def _following(strategy: Strategy, named: set[str], cluster: ClusterSpec, job: Job) -> dict[str, int]:
    """dp and num_micro_batches as the rest of the strategy wants them, where they were not named; as they are where
    nothing whole comes out: the rules then say what does not divide what."""
    found, dp = {}, strategy.dp
    others = strategy.world_size // dp
    if "dp" not in named and cluster.num_devices % others == 0:
        found["dp"] = dp = cluster.num_devices // others
    together = dp * strategy.micro_batch_size
    if "num_micro_batches" not in named and job.global_batch_size % together == 0:
        found["num_micro_batches"] = job.global_batch_size // together
    return found


def priced(plan: Plan) -> Priced:
    """A plan's forecast, simulated, with its terms."""
    pricer = Pricer(plan.model, plan.cluster, plan.job)
    forecast = pricer.simulate(pricer.forecast(plan.strategy))
    return Priced(plan, forecast, pricer.terms(forecast))
