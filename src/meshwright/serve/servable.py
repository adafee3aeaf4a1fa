"""What can be served, and how it can be divided. Free of torch."""

from __future__ import annotations

from meshwright.core.errors import UnsupportedError
from meshwright.core.model import ModelSpec
from meshwright.core.serving import ServingPlan
from meshwright.core.strategy import Strategy


def check_plan(plan: ServingPlan) -> None:
    """Raises UnsupportedError where a replica of a plan for serving cannot be served."""
    if (ep := plan.layout.ep) > 1:
        raise UnsupportedError(f"ep={ep}: replicas that share experts can be planned, not served; plan with --fix ep=1")
    check_servable(plan.model, plan.strategy)


def check_servable(spec: ModelSpec, strategy: Strategy) -> None:
    """Raises UnsupportedError where a model, or a way to divide it, cannot be served."""
    s = strategy
    for what, is_set in (
        (f"expert.tensor={s.et} with tp={s.tp}", s.et != s.tp),
        (f"dp={s.dp}", s.dp > 1 and s.ep == 1),
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
                f"{what}: serving divides a model over tp and pp, and its experts over all ranks of dp "
                "(expert.degree=dp); take it out of the plan"
            )
    if spec.num_experts and spec.gate.capacity_factor is not None:
        raise UnsupportedError(
            f"`{spec.name}` has experts of limited capacity: which tokens they drop depends on all that run together, "
            "so that an answer would depend on its neighbours; serve a model without"
        )
