"""A tiny clone of a plan: the same layout and the same kind of model, small enough for one machine."""

from __future__ import annotations

from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import UnsupportedError
from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.placement import kv_replicas
from meshwright.core.plan import Plan
from meshwright.core.sources import load_cluster
from meshwright.core.strategy import Strategy

MAX_RANKS = 8
SEQ_LENGTH = 16
HEAD_DIM = 4
ODD_VOCABULARY = 61
"""A prime: no tp degree divides it."""


def tiny_plan(plan: Plan) -> tuple[Plan, list[str]]:
    """The clone, and what had to be made smaller than in the plan, in words.

    Kept: schedule, ZeRO stage, recompute, every axis of more than one rank, and how the model is built
    (norms, biases, positions, tied embeddings, whether key/value heads are replicated over tp).
    """
    if plan.model.num_experts:
        raise UnsupportedError(f"`{plan.model.name}` has experts: it can be planned, not yet run")
    strategy, notes = _degrees(plan.strategy)
    model = _model(plan.model, strategy, kv_replicas(plan.model, plan.strategy.tp) > 1)
    batch = strategy.dp * strategy.num_micro_batches * strategy.micro_batch_size
    cluster: ClusterSpec = load_cluster(f"local:{strategy.world_size}")
    job = Job(seq_length=SEQ_LENGTH, global_batch_size=batch, optimizer=plan.job.optimizer)
    return Plan(model=model, cluster=cluster, job=job, strategy=strategy), notes


def _degrees(strategy: Strategy) -> tuple[Strategy, list[str]]:
    """Degrees as planned where all fit on one machine, else two ranks of every split axis."""
    change: dict[str, object] = {"layers_per_stage": None, "precision": "fp64", "bucket_bytes": 4096}
    notes = ["precision fp64" if strategy.precision != "fp64" else ""]
    if strategy.world_size > MAX_RANKS:
        for axis in ("dp", "tp", "pp"):
            degree = getattr(strategy, axis)
            change[axis] = min(degree, 2)
            notes.append(f"{axis}={change[axis]} for {degree}" if degree > 2 else "")
    pp = int(change.get("pp", strategy.pp))  # type: ignore[call-overload]
    wanted = {"num_micro_batches": min(strategy.num_micro_batches, 2 * pp + 1),
              "micro_batch_size": min(strategy.micro_batch_size, 2)}  # fmt: skip
    for name, value in wanted.items():
        planned = getattr(strategy, name)
        notes.append(f"{name}={value} for {planned}" if value != planned else "")
    return strategy.model_copy(update={**change, **wanted}), [note for note in notes if note]


def _model(model: ModelSpec, strategy: Strategy, has_kv_replicas: bool) -> ModelSpec:
    tp, grouped = strategy.tp, model.num_kv_heads < model.num_heads
    kv_heads = max(1, tp // 2) if has_kv_replicas else tp
    num_heads = 2 * tp if grouped else kv_heads
    return model.model_copy(
        update={
            "name": f"{model.name}-tiny",
            "vocab_size": ODD_VOCABULARY,
            "hidden_size": 4 * HEAD_DIM,
            "num_layers": strategy.pp + 1,
            "num_heads": num_heads,
            "num_kv_heads": kv_heads,
            "head_dim": HEAD_DIM,
            "ffn_size": 6 * tp,
            "max_positions": 2 * SEQ_LENGTH,
            "sliding_window": None,
        }
    )
