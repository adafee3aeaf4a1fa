"""What layers of experts need of a strategy: the tests of `core.rules` on them. Each returns the numbers that break
it."""

from __future__ import annotations

from meshwright.core.errors import RuleError
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.strategy import Strategy


def experts(s: Strategy, model: ModelSpec) -> str | None:
    """What of a layout, or of a gate, layers of experts do not go with."""
    if not model.num_experts:
        return None
    gate = model.gate
    for name, is_set in (
        (f"tensor.kind={s.tensor.kind}", s.tensor.kind != "1d"),
        (
            f"schedule={s.schedule} and router losses, biases or noise",
            s.pipeline_schedule.is_asynchronous and (gate.has_losses or gate.bias or gate.noise != "none"),
        ),
    ):
        if is_set:
            return f"`{model.name}` has experts: {name}"
    return None


def expert_degree(s: Strategy, model: ModelSpec, job: Job) -> str | None:
    """Why the ranks of ep and etp cannot share the experts."""
    if not s.spreads_experts:
        return None
    own = f"expert.degree={s.ep}" if s.et == s.tp else f"expert.tensor={s.et}"
    if s.et != s.tp and (fault := _width(s, job)) is not None:
        return fault
    if model.num_experts % s.ep:
        return f"expert.degree={s.ep} does not divide the experts {model.num_experts}"
    if s.data_ranks * s.tp % (s.ep * s.et):
        ranks = s.data_ranks if s.et == s.tp else s.data_ranks * s.tp
        name, size = ("", s.ep) if s.et == s.tp else (f" × expert.tensor={s.et}", s.ep * s.et)
        of = "dp × context.degree" if s.et == s.tp else "dp × context.degree × tp"
        product = f" = {size}" if name else ""
        return f"expert.degree={s.ep}{name}{product} does not divide the ranks {of} {ranks}"
    for name, is_set in (
        (f"`{model.name}`, which has no experts", not model.num_experts),
        (f"shard_over={s.shard_over}", s.shard_over != "all"),
        (f"schedule={s.schedule}", s.pipeline_schedule.is_asynchronous),
    ):
        if is_set:
            return f"{own} with {name}"
    return None


def check_imbalance(model: ModelSpec, job: Job) -> None:
    """Raises RuleError where experts cannot be so unevenly loaded: a token goes to an expert once at most, so that the
    fullest rank gets num_experts / experts_per_token times the mean at most (a hundredth more passes, for rounding)."""
    if job.imbalance == 1:
        return
    said = f"imbalance={job.imbalance:g}"
    if not model.num_experts:
        raise RuleError(f"{said}: `{model.name}` has no experts, whose loads it is about; leave it out", "imbalance")
    most = model.num_experts / model.experts_per_token
    if job.imbalance > most + 0.01:
        raise RuleError(
            f"{said} is more than num_experts / experts_per_token = {model.num_experts}/{model.experts_per_token} = "
            f"{most:g} of `{model.name}`: a token goes to an expert once; nearest: {int(most * 100) / 100:g}",
            "imbalance",
        )


def _width(s: Strategy, job: Job) -> str | None:
    """Why each expert's width cannot be cut otherwise than over tp."""
    if s.et % s.tp and s.tp % s.et:
        return f"expert.tensor={s.et} and tp={s.tp}: neither divides the other"
    if s.tensor.kind != "1d":
        return f"expert.tensor={s.et} with tensor.kind={s.tensor.kind}"
    if job.seq_length % (s.cp * s.tp):
        whole = f"context.degree × tp = {s.cp * s.tp}" if s.cp > 1 else f"tp={s.tp}"
        return f"expert.tensor={s.et}, and {whole} does not divide the tokens of a sequence {job.seq_length}"
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
