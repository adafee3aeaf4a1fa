"""What layers of experts send and hold besides what they compute."""

from __future__ import annotations

from meshwright.core.axes import CP, EP, ETP, PP, PP_MIRROR, TP
from meshwright.core.job import Job
from meshwright.core.measures import Traffic
from meshwright.core.model import ModelSpec
from meshwright.core.strategy import Strategy
from meshwright.cost.activations import choices_per_token, expert_tokens, fullest_rows, imbalance_of

COUNT_BYTES = 8
"""Rows for each expert are counted in int64."""
CHOICE_BYTES = 4
"""An expert's number, as tp ranks tell it each other."""
SHARE_BYTES = 8


def num_statistics(model: ModelSpec) -> int:
    """Numbers that a router counts in a step: choices, tokens and scores by expert, and four sums."""
    return 3 * model.num_experts + 4


def num_sparse(model: ModelSpec, strategy: Strategy, stage: int) -> int:
    """Layers of experts of a stage."""
    return model.count_layers(strategy.stage_layers(model.num_layers)[stage], True)


def _num_calls(model: ModelSpec, strategy: Strategy, stage: int) -> tuple[int, int]:
    """Layers of experts that a stage runs in a step, over all micro-batches: (forward, again in backward)."""
    m, own = strategy.micro_batches_per_stage, strategy.stage_layers(model.num_layers)[stage]
    again = sum(map(model.is_sparse, own[: strategy.num_recomputed(len(own))])) * (strategy.recompute == "full")
    return num_sparse(model, strategy, stage) * m, again * m


def add_tensor_traffic(total: Traffic, model: ModelSpec, job: Job, strategy: Strategy, stage: int, hidden: int) -> None:
    """What layers of experts add to two sums per layer and direction over tp: those of shared experts, and what is of
    each token's choices. Without sequence parallelism that is the gradient of their weights; with it weights and
    experts are gathered, and these gradients scattered. Where the experts' width is cut otherwise, their sums over tp
    are none; without sequence parallelism outputs are gathered over tp, and gradients of what went in.

    Args:
        hidden: bytes of a hidden state of all tp ranks' tokens.
    """
    layers, again = _num_calls(model, strategy, stage)
    tp, is_cut, is_apart = strategy.tp, strategy.sequence == "megatron", strategy.et != strategy.tp
    num_shared = model.shared_ffn_size is not None
    choices = strategy.micro_batch_size * (job.seq_length // strategy.cp) * choices_per_token(model)
    weights = choices * strategy.recipe.statistic_bytes
    for phase, times in (("forward", layers), ("recompute", again)):
        for primitive in ("all_gather", "reduce_scatter") if is_cut else ("all_reduce",):
            total.add(primitive, TP, phase, hidden, tp, times * (num_shared - is_apart))
        total.add("all_gather", TP, phase, hidden, tp, times * (is_apart and not is_cut))
    if is_cut:
        total.add("all_gather", TP, "backward", hidden, tp, layers * (2 * num_shared - is_apart))
        total.add("reduce_scatter", TP, "backward", hidden, tp, layers * (num_shared - is_apart))
    else:
        total.add("all_reduce", TP, "backward", hidden, tp, layers * (num_shared - is_apart))
        for each in (hidden, weights):
            total.add("all_gather", TP, "backward", each, tp, layers * is_apart)
        total.add("all_reduce", TP, "backward", weights, tp, layers * (not is_apart))
    if is_apart:
        _add_width_traffic(total, model, job, strategy, ETP, (layers, again))
    elif is_cut:
        _add_width_traffic(total, model, job, strategy, TP, (layers, again), has_hidden=False)


def _add_width_traffic(
    total: Traffic, model: ModelSpec, job: Job, strategy: Strategy, axis: str, calls: tuple[int, int], *,
    has_hidden: bool = True,
) -> None:  # fmt: skip
    """Tokens, weights and choices of the ranks that share an expert's width: gathered, and their outputs scattered.

    Args:
        calls: of layers, forward and again in backward.
        has_hidden: whether hidden states are not among those of `cost.traffic` already.
    """
    tokens, (layers, again) = expert_tokens(strategy, strategy.micro_batch_size, job.seq_length), calls
    hidden = tokens * model.hidden_size * strategy.recipe.parameter_bytes
    weights = tokens * choices_per_token(model) * strategy.recipe.statistic_bytes
    choices = tokens * choices_per_token(model) * CHOICE_BYTES
    for phase, times in (("forward", layers), ("recompute", again)):
        for each, count in ((weights, times), (choices, times), (hidden, times * has_hidden)):
            total.add("all_gather", axis, phase, each, strategy.et, count)
        total.add("reduce_scatter", axis, phase, hidden, strategy.et, times * has_hidden)
    total.add("reduce_scatter", axis, "backward", weights, strategy.et, layers)
    for primitive in ("all_gather", "reduce_scatter"):
        total.add(primitive, axis, "backward", hidden, strategy.et, layers * has_hidden)


def add_sequence_traffic(total: Traffic, model: ModelSpec, job: Job, strategy: Strategy, stage: int) -> None:
    """What routers that have a part of each sequence's tokens ask of the others: shares of choices for a balance loss
    of each sequence, and all logits for a capacity."""
    axes = [(TP, strategy.tp, strategy.cp)] if strategy.sequence == "megatron" else []
    axes += [(CP, strategy.cp, 1)]
    b, gate = strategy.micro_batch_size, model.gate
    logits = b * job.seq_length * model.num_experts * strategy.recipe.statistic_bytes
    for phase, times in zip(("forward", "recompute"), _num_calls(model, strategy, stage), strict=True):
        for axis, size, parts in axes:
            shares = b * model.num_experts * SHARE_BYTES
            total.add("all_reduce", axis, phase, shares, size, times * gate.balances_sequences)
            total.add("all_gather", axis, phase, logits // parts, size, times * gate.has_capacity)


def exchange_bytes(rows: int, hidden_size: int, element_bytes: int) -> int:
    """Of rows that travel: n·h."""
    return rows * hidden_size * element_bytes


def add_exchange_traffic(total: Traffic, model: ModelSpec, job: Job, strategy: Strategy, stage: int) -> None:
    """Per layer of experts and micro-batch: counts, rows to the experts and back, and backward both again; if loads are
    even over the ranks of ep. With other loads as many calls, and other bytes: with an imbalance, as many as the
    fullest rank gets on the way there, and sends on the way back."""
    layers, again = _num_calls(model, strategy, stage)
    if strategy.ep == 1 or not layers:
        return
    imbalance = imbalance_of(job, strategy, model)
    rows = fullest_rows(model, strategy, strategy.micro_batch_size, job.seq_length, imbalance)
    payload_bytes = exchange_bytes(rows, model.hidden_size, strategy.recipe.parameter_bytes)
    for phase, times, has_counts in (("forward", layers, 1), ("recompute", again, 1), ("backward", layers, 0)):
        total.add("all_to_all", EP, phase, COUNT_BYTES * model.num_experts, strategy.ep, times * has_counts)
        total.add("all_to_all", EP, phase, payload_bytes, strategy.ep, 2 * times)


def add_router_traffic(total: Traffic, model: ModelSpec, strategy: Strategy, rank: int) -> None:
    """Statistics of a pipeline rank's routers, and what all of them report, once per step."""
    if not model.num_experts or strategy.pipeline_schedule.is_asynchronous:
        return
    reported_bytes = model.num_sparse_layers * (2 * model.num_experts + 2) * 8
    total.add("all_reduce", PP, "router", reported_bytes, strategy.pp)
    layers = sum(num_sparse(model, strategy, stage) for stage in strategy.rank_stages(rank))
    payload_bytes, directions = layers * num_statistics(model) * 8, strategy.pipeline_schedule.num_directions
    if not layers:
        return
    total.add("all_reduce", strategy.data_axis, "router", payload_bytes, strategy.data_ranks)
    total.add("all_reduce", PP_MIRROR, "router", payload_bytes, directions)
    if strategy.sequence == "megatron":
        total.add("all_reduce", TP, "router", payload_bytes, strategy.tp)
