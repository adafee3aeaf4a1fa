"""What can be served, and how it can be divided. Free of torch."""

from __future__ import annotations

from meshwright.core.errors import UnsupportedError
from meshwright.core.model import ModelSpec
from meshwright.core.plan import Plan
from meshwright.core.serving import ServingPlan
from meshwright.core.strategy import Strategy


def check_plan(plan: ServingPlan) -> None:
    """Raises UnsupportedError where a plan for serving cannot be served."""
    check_servable(plan.model, plan.strategy)


def served_strategy(plan: Plan | ServingPlan | None, precision: str, replicas: int | None) -> Strategy:
    """How a model is divided, and how often it is there.

    Args:
        plan: of either kind; None: one rank for each replica.
        precision: without a plan.
        replicas: behind one server; None: as many as the plan has, one without.

    Raises:
        UnsupportedError: a number of replicas that cannot share the plan's experts.
    """
    strategy = plan.strategy if plan else Strategy.model_validate({"precision": precision})
    if replicas is None:
        return strategy
    if replicas % strategy.ep:
        raise UnsupportedError(
            f"--replicas {replicas}: in the plan ep={strategy.ep} replicas share their experts; nearest: --replicas "
            f"{max(1, replicas // strategy.ep) * strategy.ep}"
        )
    return strategy.model_copy(update={"dp": replicas})


def check_servable(spec: ModelSpec, strategy: Strategy) -> None:
    """Raises UnsupportedError where a model, or a way to divide it, cannot be served."""
    s = strategy
    for what, is_set in (
        (f"expert.tensor={s.et} with tp={s.tp}", s.et != s.tp),
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
                f"{what}: serving divides a model over tp and pp, for each of dp replicas, and experts over "
                "neighbouring replicas (expert.degree); take it out of the plan"
            )
    if spec.num_experts and spec.gate.capacity_factor is not None:
        raise UnsupportedError(
            f"`{spec.name}` has experts of limited capacity: which tokens they drop depends on all that run together, "
            "so that an answer would depend on its neighbours; serve a model without"
        )
