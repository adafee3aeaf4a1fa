"""What layers of experts need of a strategy: the tests of `core.rules` on them. Each returns the numbers that break
it."""

from __future__ import annotations

from meshwright.core.model import ModelSpec
from meshwright.core.strategy import Strategy


def experts(s: Strategy, model: ModelSpec) -> str | None:
    """What of a layout, or of a gate, layers of experts do not go with."""
    if not model.num_experts:
        return None
    gate = model.gate
    for name, is_set in (
        (f"tensor.kind={s.tensor.kind}", s.tensor.kind != "1d"),
        (f"recompute={s.recompute} and router.noise={gate.noise}", s.recompute != "none" and gate.noise != "none"),
        (
            f"schedule={s.schedule} and router losses or biases",
            s.pipeline_schedule.is_asynchronous and (gate.has_losses or gate.bias),
        ),
    ):
        if is_set:
            return f"`{model.name}` has experts: {name}"
    return None


def expert_degree(s: Strategy, model: ModelSpec) -> str | None:
    """Why the ranks of ep cannot share the experts."""
    if s.expert.tensor not in (None, s.tp):
        return f"expert.tensor={s.expert.tensor} with tp={s.tp}"
    if s.ep == 1:
        return None
    for what, total in (("the experts", model.num_experts), ("the ranks dp × context.degree", s.data_ranks)):
        if total % s.ep:
            return f"expert.degree={s.ep} does not divide {what} {total}"
    for name, is_set in (
        (f"`{model.name}`, which has no experts", not model.num_experts),
        ("offload of states", s.offload.moves_states),
        (f"shard_over={s.shard_over}", s.shard_over != "all"),
        (f"schedule={s.schedule}", s.pipeline_schedule.is_asynchronous),
    ):
        if is_set:
            return f"expert.degree={s.ep} with {name}"
    return None


def balance(s: Strategy, model: ModelSpec) -> str | None:
    """Why the loads of a whole step are not known before its first backward."""
    gate = model.gate
    if not (model.num_experts and gate.balance_loss and gate.balance_over == "batch"):
        return None
    fault = s.pipeline_schedule.fault
    if (fault is not None and fault(s.pipeline) is not None) or s.forwards_first:
        return None
    return f"router.balance_over=batch with schedule={s.schedule} and num_micro_batches={s.num_micro_batches}"
