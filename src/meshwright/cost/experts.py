"""What layers of experts send and hold besides what they compute."""

from __future__ import annotations

from meshwright.core.axes import EP, PP_MIRROR, TP
from meshwright.core.job import Job
from meshwright.core.measures import Traffic
from meshwright.core.model import ModelSpec
from meshwright.core.strategy import Strategy
from meshwright.cost.activations import expert_rows

COUNT_BYTES = 8
"""Rows for each expert are counted in int64."""


def num_statistics(model: ModelSpec) -> int:
    """Numbers that a router counts in a step: choices, tokens and scores by expert, and four sums."""
    return 3 * model.num_experts + 4


def num_sparse(model: ModelSpec, strategy: Strategy, stage: int) -> int:
    """Layers of experts of a stage."""
    return model.count_layers(strategy.stage_layers(model.num_layers)[stage], True)


def add_tensor_traffic(total: Traffic, model: ModelSpec, job: Job, strategy: Strategy, stage: int, hidden: int) -> None:
    """What layers of experts add to two all-reduces per layer and direction over tp: those of shared experts, and the
    gradient of the weights of each token's choices.

    Args:
        hidden: bytes of a hidden state.
    """
    m, own = strategy.micro_batches_per_stage, strategy.stage_layers(model.num_layers)[stage]
    layers = num_sparse(model, strategy, stage) * m
    tokens = strategy.micro_batch_size * job.seq_length
    choices = tokens * (model.experts_per_token if model.gate.chooses == "tokens" else model.num_experts)
    shared = layers * (model.shared_ffn_size is not None)
    total.add("all_reduce", TP, "forward", hidden, strategy.tp, shared)
    if shared and strategy.recompute == "full":
        again = sum(map(model.is_sparse, own[: strategy.num_recomputed(len(own))]))
        total.add("all_reduce", TP, "recompute", hidden, strategy.tp, again * m)
    total.add("all_reduce", TP, "backward", hidden, strategy.tp, shared)
    total.add("all_reduce", TP, "backward", choices * strategy.recipe.statistic_bytes, strategy.tp, layers)


def exchange_bytes(rows: int, hidden_size: int, element_bytes: int) -> int:
    """Of rows that travel: n·h."""
    return rows * hidden_size * element_bytes


def add_exchange_traffic(total: Traffic, model: ModelSpec, job: Job, strategy: Strategy, stage: int) -> None:
    """Per layer of experts and micro-batch: counts, rows to the experts and back, and backward both again; if loads are
    even over the ranks of ep. With other loads as many calls, and other bytes."""
    layers, m = num_sparse(model, strategy, stage), strategy.micro_batches_per_stage
    if strategy.ep == 1 or not layers:
        return
    own = strategy.stage_layers(model.num_layers)[stage]
    again = sum(map(model.is_sparse, own[: strategy.num_recomputed(len(own))])) * (strategy.recompute == "full")
    rows = expert_rows(model, strategy.micro_batch_size, job.seq_length)
    payload_bytes = exchange_bytes(rows, model.hidden_size, strategy.recipe.parameter_bytes)
    for phase, times, has_counts in (("forward", layers, 1), ("recompute", again, 1), ("backward", layers, 0)):
        total.add("all_to_all", EP, phase, COUNT_BYTES * model.num_experts, strategy.ep, m * times * has_counts)
        total.add("all_to_all", EP, phase, payload_bytes, strategy.ep, 2 * m * times)


def add_router_traffic(total: Traffic, model: ModelSpec, strategy: Strategy, rank: int) -> None:
    """Statistics of a pipeline rank's routers, once per step."""
    layers = sum(num_sparse(model, strategy, stage) for stage in strategy.rank_stages(rank))
    payload_bytes, directions = layers * num_statistics(model) * 8, strategy.pipeline_schedule.num_directions
    if not layers or strategy.pipeline_schedule.is_asynchronous:
        return
    total.add("all_reduce", strategy.data_axis, "router", payload_bytes, strategy.data_ranks)
    total.add("all_reduce", PP_MIRROR, "router", payload_bytes, directions)
