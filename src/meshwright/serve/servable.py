"""What can be served, and how it can be divided. Free of torch."""

from __future__ import annotations

from meshwright.core.errors import UnsupportedError
from meshwright.core.model import ModelSpec
from meshwright.core.plan import Plan
from meshwright.core.serving import ServingPlan
from meshwright.core.strategy import Strategy


def check_plan(plan: ServingPlan) -> None:
    """Raises UnsupportedError where a replica of a plan for serving cannot be served."""
    if (ep := plan.layout.ep) > 1:
        raise UnsupportedError(f"ep={ep}: replicas that share experts can be planned, not served; plan with --fix ep=1")
    check_servable(plan.model, plan.strategy)


def served_strategy(plan: Plan | ServingPlan | None, precision: str, replicas: int | None) -> Strategy:
    """How a model is divided, and how often it is there.

    Args:
        plan: of either kind; None: one rank for each replica.
        precision: without a plan.
        replicas: behind one server; None: as many as the plan has, one without.

    Raises:
        UnsupportedError: replicas of a plan whose experts lie over all ranks of dp.
    """
    strategy = plan.strategy if plan else Strategy.model_validate({"precision": precision})
    if replicas is None:
        return strategy
    if strategy.ep > 1:
        raise UnsupportedError(
            f"--replicas {replicas}: the plan lays experts over dp={strategy.dp} ranks (expert.degree={strategy.ep}), "
            "which serve one replica; leave --replicas out, or plan with expert.degree=1"
        )
    return strategy.model_copy(update={"dp": replicas})


def check_servable(spec: ModelSpec, strategy: Strategy) -> None:
    """Raises UnsupportedError where a model, or a way to divide it, cannot be served."""
    s = strategy
    for what, is_set in (
        (f"expert.tensor={s.et} with tp={s.tp}", s.et != s.tp),
        (f"dp={s.dp} with expert.degree={s.ep}", s.ep > 1 and s.dp != s.ep),
        (f"context.degree={s.cp}", s.cp > 1),
        (f"tensor.kind={s.tensor.kind}", s.tensor.kind != "1d"),
        (f"sequence={s.sequence}", s.sequence != "none"),
        (f"zero={s.zero}", s.zero > 0),
        ("offload", s.offload.is_used),
        (f"tile={s.tile}", s.tile > 1),
        (f"{s.num_parts} parts on pp={s.pp} ranks", s.pp > 1 and s.num_parts != s.pp),
        (f"schedule={s.schedule}", s.pp > 1 and s.pipeline_schedule.num_directions > 1),
    ):
        if is_set:
            raise UnsupportedError(
                f"{what}: serving divides a model over tp and pp, for each of dp replicas, or the experts of one over "
                "all ranks of dp (expert.degree=dp); take it out of the plan"
            )
    if spec.num_experts and spec.gate.capacity_factor is not None:
        raise UnsupportedError(
            f"`{spec.name}` has experts of limited capacity: which tokens they drop depends on all that run together, "
            "so that an answer would depend on its neighbours; serve a model without"
        )
