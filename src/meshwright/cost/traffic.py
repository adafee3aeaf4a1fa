"""Bytes that one rank sends in one step, by primitive, axis and phase: what the ledger will count.

Sources: Shoeybi et al. 2019 §3 (tensor), Huang et al. 2019 (pipeline), Rajbhandari et al. 2020 §7 (ZeRO).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from meshwright.core.axes import DP_ACROSS, DP_CP, DP_NODE, EDP, EP, ETP, PP, PP_ENDS, PP_MIRROR, TP, TP_KV, WORLD
from meshwright.core.flat import Bucket, rank_buckets
from meshwright.core.job import Job
from meshwright.core.measures import Traffic
from meshwright.core.model import ModelSpec
from meshwright.core.placement import kv_group
from meshwright.core.sharding import Level, sharding
from meshwright.core.strategy import Strategy
from meshwright.cost import context
from meshwright.cost.experts import (
    add_exchange_traffic,
    add_router_traffic,
    add_sequence_traffic,
    add_tensor_traffic,
    num_sparse,
)
from meshwright.cost.grids import grid_sizes, grid_traffic

SCALAR_BYTES = 8
"""Counts, norms and losses cross the ranks in float64."""


def group_sizes(model: ModelSpec, strategy: Strategy) -> dict[str, int]:
    """Axis → ranks in each of its groups; of `pp_ends` the group of the first and the last stage's ranks."""
    return {
        **strategy.sizes,
        **strategy.grid.sizes,
        DP_CP: strategy.data_ranks,
        EP: strategy.ep,
        ETP: strategy.et,
        EDP: strategy.expert_replicas,
        DP_NODE: strategy.dp_local,
        DP_ACROSS: strategy.data_ranks // strategy.dp_local,
        TP_KV: kv_group(model, strategy),
        PP_ENDS: len(set(strategy.end_ranks)),
        PP_MIRROR: strategy.pipeline_schedule.num_directions,
        WORLD: strategy.world_size,
    }


def traffic(model: ModelSpec, job: Job, strategy: Strategy, at: Mapping[str, int]) -> Traffic:
    """One training step of the rank at mesh coordinates `at`."""
    repeated = micro_batch_traffic(model, job, strategy, at[PP], at.get(TP, 0))
    return Traffic({**repeated.rows, **step_traffic(model, strategy, at).rows})


def micro_batch_traffic(model: ModelSpec, job: Job, strategy: Strategy, rank: int, index: int = 0) -> Traffic:
    """The part that every micro-batch sends: within layers and between the stages of pipeline ranks.

    `index` is the position on tp: on a cube a rank's share of an uneven vocabulary depends on it.
    """
    return stages_traffic(model, job, strategy, strategy.rank_stages(rank), index)


def stages_traffic(model: ModelSpec, job: Job, strategy: Strategy, stages: Iterable[int], index: int = 0) -> Traffic:
    """Likewise of some stages of a rank."""
    total = Traffic()
    for stage in stages:
        if strategy.tensor.kind == "1d":
            _tensor(total, model, job, strategy, stage)
        else:
            grid_traffic(total, grid_sizes(model, job, strategy, index), strategy, stage)
        add_exchange_traffic(total, model, job, strategy, stage)
        add_sequence_traffic(total, model, job, strategy, stage)
        _pipeline(total, model, job, strategy, stage)
        num_layers = len(strategy.stage_layers(model.num_layers)[stage])
        context.add_attention(total, model, job, strategy, num_layers)
    return total


def step_traffic(
    model: ModelSpec, strategy: Strategy, at: Mapping[str, int], buckets: Sequence[Bucket] | None = None
) -> Traffic:
    """The part that is sent once per step, whatever the micro-batches, the schedule and the recomputation.

    `buckets` are those of the rank, where the caller has them already.
    """
    total = Traffic()
    is_endless = strategy.pipeline_schedule.is_asynchronous
    num_counts = strategy.num_updates if is_endless else 4 if model.num_experts else 2
    total.add("all_reduce", strategy.data_axis, "count", num_counts * SCALAR_BYTES, strategy.data_ranks)
    _data(total, model, strategy, rank_buckets(model, strategy, at) if buckets is None else buckets)
    num_sums = 3 if model.num_experts and not is_endless else 2
    total.add("all_reduce", WORLD, "norm", num_sums * SCALAR_BYTES, strategy.world_size)
    add_router_traffic(total, model, strategy, at[PP])
    return total


def hidden_bytes(model: ModelSpec, job: Job, strategy: Strategy) -> int:
    """A rank's part of one hidden state of one micro-batch: β·b·s·h, over all that it is cut into."""
    tokens = strategy.micro_batch_size * job.seq_length
    return tokens * model.hidden_size * strategy.recipe.parameter_bytes // prod(strategy.hidden_parts)


def region_bytes(model: ModelSpec, job: Job, strategy: Strategy) -> int:
    """A hidden state as the tp ranks together hold it: what a column-parallel region takes in."""
    parts = strategy.tp if strategy.sequence == "megatron" else 1
    return hidden_bytes(model, job, strategy) * parts


def _tensor(total: Traffic, model: ModelSpec, job: Job, strategy: Strategy, stage: int) -> None:
    """Two sums per layer and direction, one for the embedding, one for the head's input; two numbers for the loss.

    A sum is an all-reduce. With sequence parallelism it is a reduce-scatter and an all-gather, of which the embedding
    needs the one and the head's input the other; inputs of column-parallel layers are gathered once more in backward.
    Latents are smaller than the hidden state that they stand for (:func:`_attention_inputs`).
    """
    m, whole = strategy.micro_batches_per_stage, region_bytes(model, job, strategy)
    num_layers = len(strategy.stage_layers(model.num_layers)[stage])
    is_first, is_last = strategy.stage_ends(stage)
    sparse = m * num_sparse(model, strategy, stage)  # whose rows are kept, and not gathered again
    first, last, layers = m * is_first, m * is_last, m * num_layers
    again = m * strategy.num_recomputed(num_layers) * (strategy.recompute == "full")
    multiplied, passing = _attention_inputs(model)

    def add(primitive: str, phase: str, hidden: int, of_layers: int, widths: Sequence[int]) -> None:
        """So many hidden states, and of `of_layers` layers what has these widths."""
        total.add(primitive, TP, phase, whole, strategy.tp, hidden)
        for width in widths:
            total.add(primitive, TP, phase, whole // model.hidden_size * width, strategy.tp, of_layers)

    inputs = (*multiplied, *passing)
    if strategy.sequence == "megatron":
        add("all_gather", "forward", layers + last, layers, inputs)
        add("reduce_scatter", "forward", 2 * layers + first, 0, ())
        add("all_gather", "recompute", again, again, inputs)
        add("reduce_scatter", "recompute", 2 * again, 0, ())
        add("all_gather", "backward", 3 * layers - sparse + last + first, layers, multiplied)
        add("reduce_scatter", "backward", layers + last, layers, inputs)
    else:
        add("all_reduce", "forward", 2 * layers + first, 0, ())
        add("all_reduce", "recompute", 2 * again, 0, ())
        add("all_reduce", "backward", layers + last, layers, inputs)
    add_tensor_traffic(total, model, job, strategy, stage, whole)
    if is_last:
        tokens = strategy.micro_batch_size * (job.seq_length // strategy.cp) * strategy.recipe.statistic_bytes
        total.add("all_reduce", TP, "forward", tokens, strategy.tp, m)
        total.add("all_reduce", TP, "forward", job.num_loss_sums * tokens, strategy.tp, m)


def _attention_inputs(model: ModelSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Widths of what enters the heads of a layer by a product with weights, and of what enters without."""
    latent = model.latent
    if latent is None:
        return (model.hidden_size,), ()
    return (latent.q_lora_rank or model.hidden_size, latent.kv_lora_rank), (latent.qk_rope_head_dim,)


def _pipeline(total: Traffic, model: ModelSpec, job: Job, strategy: Strategy, stage: int) -> None:
    """One hidden state over each boundary to another rank, and its gradient back."""
    m, hidden, ranks = strategy.micro_batches_per_stage, hidden_bytes(model, job, strategy), strategy.stage_ranks
    is_first, is_last = strategy.stage_ends(stage)
    total.add("send", PP, "forward", hidden, strategy.pp, m * (not is_last and ranks[stage + 1] != ranks[stage]))
    total.add("send", PP, "backward", hidden, strategy.pp, m * (not is_first and ranks[stage - 1] != ranks[stage]))


def _data(total: Traffic, model: ModelSpec, strategy: Strategy, buckets: Sequence[Bucket]) -> None:
    """Gradients once per update whatever the accumulation, unless only shards of them are kept (ZeRO-2 and 3): then
    each micro-batch's are scattered. Parameters once per step, or each time a block needs them (ZeRO-3)."""
    sizes, num_updates = group_sizes(model, strategy), strategy.num_updates
    alike: dict[tuple[object, ...], tuple[Bucket, int]] = {}
    for bucket in buckets:
        kind = bucket.numel, bucket.sum_over, bucket.is_spread, *_gathering(strategy, bucket)
        alike[kind] = bucket, alike[kind][1] + 1 if kind in alike else 1
    for bucket, count in alike.values():
        _gradients(total, sizes, strategy, bucket, count * num_updates)
        _parameters(total, strategy, bucket, count)


def _gathering(strategy: Strategy, bucket: Bucket) -> tuple[int, ...]:
    """How often a bucket's gradients are reduced and its parameters gathered, where it is not once per step."""
    if not strategy.reduces_each:
        return ()
    return _num_passes(strategy, bucket), num_gathers(strategy, bucket)


def _gradients(total: Traffic, sizes: Mapping[str, int], strategy: Strategy, bucket: Bucket, count: int) -> None:
    """Of so many equal buckets."""
    way = sharding(strategy, bucket.is_spread)
    is_each = strategy.reduces_each
    remaining = bucket.numel * strategy.recipe.sent_gradient_bytes
    if not is_each:
        _sum_over(total, sizes, bucket, remaining, count)
    for level in way.scatter:
        times = count * (_num_passes(strategy, bucket) if is_each else 1)
        total.add("reduce_scatter", level.axis, "gradients", remaining, level.size, times)
        remaining //= level.size
    for level in way.replicate:
        total.add("all_reduce", level.axis, "gradients", remaining, level.size, count)
    if is_each:
        _sum_over(total, sizes, bucket, remaining, count)
    if not way.stays_scattered:
        _gather(total, "gradients", way.scatter, bucket.numel * strategy.recipe.sent_gradient_bytes, count)


def _sum_over(total: Traffic, sizes: Mapping[str, int], bucket: Bucket, payload_bytes: int, count: int) -> None:
    for axis in bucket.sum_over:
        total.add("all_reduce", axis, "gradients", payload_bytes, sizes[axis], count)


def _parameters(total: Traffic, strategy: Strategy, bucket: Bucket, count: int) -> None:
    way, payload_bytes = sharding(strategy, bucket.is_spread), bucket.numel * strategy.recipe.parameter_bytes
    if strategy.zero in (1, 2):
        _gather(total, "parameters", way.scatter, payload_bytes, count)
    if strategy.zero == 3:
        _gather(total, "gather", way.scatter, payload_bytes, count * num_gathers(strategy, bucket))


def num_gathers(strategy: Strategy, bucket: Bucket) -> int:
    """How often a bucket's parameters are gathered in a step, with ZeRO-3.

    Once per step if kept; else for forward and for backward of each micro-batch. Recomputation finds the layer's block
    gathered, its tiles not.
    """
    if strategy.keeps_gathered:
        return 1
    first = bucket.slots[0].placement
    is_repeated = first.tile is not None and first.layer is not None and strategy.recompute == "full"
    return (2 + is_repeated) * _num_passes(strategy, bucket)


def _num_passes(strategy: Strategy, bucket: Bucket) -> int:
    """Forwards, or backwards, of a step that use a bucket: one per micro-batch and stage."""
    stages = {stage for slot in bucket.slots for stage in slot.placement.stages}
    return strategy.micro_batches_per_stage * len(stages)


def _gather(total: Traffic, phase: str, levels: Sequence[Level], payload_bytes: int, times: int = 1) -> None:
    """A bucket from its shards: the levels of scattering, backwards."""
    for level in levels:
        total.add("all_gather", level.axis, phase, payload_bytes, level.size, times)
        payload_bytes //= level.size
