"""A tiny clone of a plan: the same layout and the same kind of model, small enough for one machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from meshwright.core.axes import CP, DP, MESH_ORDER, PP, TP
from meshwright.core.cluster import ClusterSpec
from meshwright.core.layouts import Expert, Grid, Tensor, grid
from meshwright.core.model import ModelSpec
from meshwright.core.placement import kv_group
from meshwright.core.plan import Plan
from meshwright.core.sources import load_cluster
from meshwright.core.strategy import Strategy

MAX_RANKS = 8
SEQ_LENGTH = 16
HEAD_DIM = 4
ODD_VOCABULARY = 61
"""A prime: no tp degree divides it."""
MAX_EXPERTS, MAX_PER_TOKEN = 8, 2
BUCKET_BYTES = 4096
"""Small, so that there are several buckets."""
GROUP_NUMEL = 128
"""Likewise of groups of what is offloaded."""


def tiny_plan(plan: Plan) -> tuple[Plan, list[str]]:
    """The clone, and what had to be made smaller than in the plan, in words.

    Kept: schedule, ZeRO stage, recompute, every axis of more than one rank, and how the model is built
    (norms, biases, positions, tied embeddings, whether key/value heads are replicated over tp).
    """
    strategy = _strategy(plan.strategy)
    model = _model(plan.model, strategy, has_kv_replicas=kv_group(plan.model, plan.strategy) > 1)
    batch = strategy.dp * strategy.num_micro_batches * strategy.micro_batch_size
    parts = strategy.token_parts
    lengths = {"seq_length": -(-SEQ_LENGTH // parts) * parts, "global_batch_size": batch}
    job = plan.job.model_copy(update=lengths)
    clone = Plan(model=model, cluster=_cluster(plan.strategy, strategy), job=job, strategy=strategy)
    return clone, list(_differences(plan.strategy, strategy))


def _strategy(planned: Strategy) -> Strategy:
    """Degrees as planned where all ranks fit on one machine, else at most two ranks of every axis, and of a grid's."""
    degrees, tensor = _degrees(planned)
    change = {
        "tensor": tensor,
        **{axis: degree for axis, degree in degrees.items() if axis != CP},
        "expert": _shared_by(planned, degrees),
        "context": planned.context.model_copy(update={"degree": degrees[CP]}),
        "num_micro_batches": _num_micro_batches(planned, degrees[PP]),
        "micro_batch_size": _micro_batch_size(planned, grid(tensor, degrees[TP])),
        "precision": "fp64",
        "layers_per_stage": None,
        "bucket_bytes": BUCKET_BYTES,
        "tile": min(planned.tile, HEAD_DIM),
        **({} if planned.tensor.kind == "1d" else {"shard_over": "all", "ranks_per_node": None}),
        "offload": planned.offload.model_copy(update={"group_numel": GROUP_NUMEL}),
    }
    return planned.model_copy(update=change)


def _degrees(planned: Strategy) -> tuple[dict[str, int], Tensor]:
    """Axis → ranks; and the layout of those of tp."""
    most = max(planned.sizes.values()) if planned.world_size <= MAX_RANKS else 2
    degrees = {axis: min(degree, most) for axis, degree in planned.sizes.items()}
    if _is_in_two_levels(planned):
        degrees |= {DP: 4, CP: 1, PP: 1}  # two nodes of two
    if planned.tensor.kind == "1d" or planned.world_size <= MAX_RANKS or planned.tp == 1:
        return degrees, planned.tensor
    tensor = planned.tensor.model_copy(update={"depth": min(planned.tensor.depth, 2)})
    tp = 8 if tensor.kind == "3d" else 4 * tensor.depth
    other = next((axis for axis in (PP, DP) if tp < MAX_RANKS and degrees[axis] > 1), None)
    return {**dict.fromkeys(degrees, 1), TP: tp, **({other: 2} if other else {})}, tensor


def _is_in_two_levels(planned: Strategy) -> bool:
    """Whether collectives over dp are, and two nodes of two ranks can stand for it; beside a grid they are too few."""
    return 1 < planned.dp_local < planned.data_ranks and planned.tensor.kind == "1d"


def _micro_batch_size(planned: Strategy, small: Grid) -> int:
    """One sequence or two, of each part that a grid cuts a micro-batch into."""
    parts = planned.grid.parts(planned.grid.batch_axes)
    return min(planned.micro_batch_size // parts, 2) * small.parts(small.batch_axes)


def _shared_by(planned: Strategy, degrees: Mapping[str, int]) -> Expert:
    """Ranks that share experts: as planned, or as many as the clone has place for."""
    et, tp = min(planned.et, degrees[TP]) if planned.et >= planned.tp else 1, degrees[TP]
    if planned.world_size <= MAX_RANKS:
        et = planned.et
    ranks = degrees[DP] * degrees[CP] * tp // et
    degree = next(degree for degree in range(min(planned.ep, ranks), 0, -1) if ranks % degree == 0)
    return Expert(degree=degree, tensor=None if et == tp else et)


def _num_micro_batches(planned: Strategy, pp: int) -> int:
    """Two and a bit rounds of the pipeline, or as many below as the schedule has a timetable for."""
    most = min(planned.num_micro_batches, 2 * pp + 1)
    fault = planned.pipeline_schedule.fault
    numbers = (*range(most, 0, -1), planned.num_micro_batches)
    sizes = (planned.model_copy(update={"pp": pp, "num_micro_batches": m}).pipeline for m in numbers)
    return next((size.num_micro_batches for size in sizes if fault is None or fault(size) is None), most)


def offloaded_to(plan: Plan, folder: Path | str) -> Plan:
    """The same plan, with its disk tier in `folder`."""
    offload = plan.strategy.offload.model_copy(update={"path": str(folder)})
    return plan.model_copy(update={"strategy": plan.strategy.model_copy(update={"offload": offload})})


def _experts(model: ModelSpec, strategy: Strategy) -> dict[str, object]:
    """Few and narrow experts; dense layers and gate as planned."""
    if not model.num_experts:
        return {}
    gate, tp = model.gate, strategy.tp
    num_layers = strategy.num_parts + 1
    dense = tuple(layer for layer in model.dense_layers or () if layer < num_layers)
    per_token = min(model.experts_per_token, MAX_PER_TOKEN)
    groups = 2 if gate.num_groups > 1 else 1
    return {
        "num_experts": -(-MAX_EXPERTS // strategy.ep) * strategy.ep,
        "experts_per_token": per_token,
        "expert_ffn_size": 4 * max(tp, strategy.et) if model.expert_ffn_size else None,
        "shared_ffn_size": 2 * tp if model.shared_ffn_size else None,
        "dense_layers": dense[: num_layers - 1] or None,
        "router": gate.model_copy(update={"num_groups": groups, "groups_per_token": groups}),
    }


def _latent(model: ModelSpec) -> dict[str, object]:
    """Small latents, with values narrower than keys."""
    if model.latent is None:
        return {}
    sizes = {"kv_lora_rank": 2 * HEAD_DIM, "qk_nope_head_dim": HEAD_DIM, "qk_rope_head_dim": 2, "v_head_dim": HEAD_DIM}
    latent = model.latent.model_copy(update={"q_lora_rank": model.latent.q_lora_rank and 3 * HEAD_DIM, **sizes})
    return {"latent": latent, "head_dim": latent.head_dim}


def _cluster(planned: Strategy, strategy: Strategy) -> ClusterSpec:
    """This machine; where the plan's collectives over dp go in two levels, its ranks stand for those of two nodes."""
    cluster = load_cluster(f"local:{strategy.world_size}")
    if not _is_in_two_levels(planned):
        return cluster
    return cluster.model_copy(update={"num_nodes": 2, "devices_per_node": cluster.devices_per_node // 2})


def _differences(planned: Strategy, clone: Strategy) -> Iterator[str]:
    """What a user should know of the clone: `tp=2 for 8`."""
    if planned.tensor.depth != clone.tensor.depth:
        yield f"tensor.depth={clone.tensor.depth} for {planned.tensor.depth}"
    for name in (*MESH_ORDER, "num_micro_batches", "micro_batch_size", "precision", "tile"):
        old, new = getattr(planned, name), getattr(clone, name)
        if old != new:
            yield f"{name}={new} for {old}"


def _model(model: ModelSpec, strategy: Strategy, *, has_kv_replicas: bool) -> ModelSpec:
    tp, grouped = strategy.tp, model.num_kv_heads < model.num_heads
    kv_heads = max(1, strategy.grid.side // 2) if has_kv_replicas else tp
    num_heads = 2 * tp if grouped else kv_heads
    if strategy.cp > 1 and strategy.context.kind == "ulysses":  # which divides the heads of each tp rank
        num_heads *= strategy.cp
        kv_heads *= 1 if grouped else strategy.cp
    return model.model_copy(
        update={
            "name": f"{model.name}-tiny",
            "vocab_size": ODD_VOCABULARY,
            "hidden_size": 4 * HEAD_DIM,
            "num_layers": strategy.num_parts + 1,
            "num_heads": num_heads,
            "num_kv_heads": kv_heads,
            "head_dim": HEAD_DIM,
            **_latent(model),
            "ffn_size": 6 * max(tp, strategy.et),
            **_experts(model, strategy),
            "max_positions": 2 * SEQ_LENGTH,
            "sliding_window": None,
        }
    )
