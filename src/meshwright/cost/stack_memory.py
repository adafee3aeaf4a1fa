"""What another training stack holds on a rank beyond this library's own engine, each part named.

    copies of gradients and parameters    wider or second ones, whole or of this rank's shard
    stage outputs                         kept by a pipeline for each micro-batch under way, beside the inputs
    scores and masks                      of attention that is not fused, of dropout: all live layers, or one recomputed
    context                               of the device's runtime, and of buckets
    communicators                         buffers of the channels of each kind of group: tp, pp, dp, cp, ep
    allocator reserve                     what a caching allocator holds and does not use, as a share of the above

Sources: Korthikanti et al. 2022 §4.1 (scores, masks); Rajbhandari et al. 2020 §3.2 and §6 (buffers, fragmentation).
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.job import Job
from meshwright.core.measures import MemoryBreakdown
from meshwright.core.model import ModelSpec
from meshwright.core.placement import largest_part
from meshwright.core.profile import Stack
from meshwright.core.strategy import Strategy
from meshwright.cost.activations import ByteTerm, total_bytes
from meshwright.cost.in_flight import instants
from meshwright.cost.traffic import hidden_bytes


def with_stack(
    held: MemoryBreakdown, model: ModelSpec, job: Job, strategy: Strategy, rank: int, num_parameters: int, stack: Stack
) -> MemoryBreakdown:
    """The memory of a pipeline rank under a stack; what is added counts as working bytes."""
    terms = stack_terms(held, model, job, strategy, rank, num_parameters, stack)
    return replace(held, working_bytes=held.working_bytes + total_bytes(terms))


def stack_terms(
    held: MemoryBreakdown, model: ModelSpec, job: Job, strategy: Strategy, rank: int, num_parameters: int, stack: Stack
) -> tuple[ByteTerm, ...]:
    """What comes on top of `held`, the engine's own; nothing for the engine itself."""
    name = strategy.recipe.parameter
    shard = num_parameters // (strategy.data_ranks if strategy.zero else 1)
    copies = stack.copy_bytes.get(name, 0.0) * num_parameters + stack.shard_copy_bytes.get(name, 0.0) * shard
    if not strategy.zero:
        copies += stack.unsharded_copy_bytes.get(name, 0.0) * num_parameters
    live = _live_layers(model, strategy, rank)
    outputs = _live(strategy, rank) * hidden_bytes(model, job, strategy) * stack.keeps_outputs * (strategy.pp > 1)
    scores = _scores_and_masks(model, job, strategy, stack, live)
    allocated = held.total_bytes + copies + outputs + scores
    return (
        ByteTerm("copies of gradients and parameters", int(copies)),
        ByteTerm("stage outputs", outputs),
        ByteTerm("scores and masks", scores),
        ByteTerm("context", int(stack.context_bytes)),
        ByteTerm("communicators", int(stack.communicator_bytes) * _num_kinds_of_groups(strategy)),
        ByteTerm("allocator reserve", int((stack.allocator_reserve - 1) * allocated)),
    )


def _num_kinds_of_groups(strategy: Strategy) -> int:
    """Axes along which a rank has others to talk to."""
    return sum(size > 1 for size in (strategy.tp, strategy.pp, strategy.dp, strategy.cp, strategy.ep))


def _live(strategy: Strategy, rank: int) -> int:
    """Most micro-batches under way on a rank, on all its stages."""
    return max(sum(instant.live) for one in instants(strategy, [rank]) for instant in one)


def _live_layers(model: ModelSpec, strategy: Strategy, rank: int) -> int:
    """Most layers whose activations are under way, of all micro-batches."""
    layers = strategy.stage_layers(model.num_layers)
    sizes = [len(layers[stage]) for stage in strategy.rank_stages(rank)]
    return max(
        sum(count * size for count, size in zip(instant.live, sizes, strict=True))
        for one in instants(strategy, [rank])
        for instant in one
    )


def _scores_and_masks(model: ModelSpec, job: Job, strategy: Strategy, stack: Stack, live: int) -> int:
    """Of all live layers, or of one where they are recomputed: softmax (with dropout also its mask and result), and two
    masks of hidden size."""
    b, s = strategy.micro_batch_size, job.seq_length
    element = strategy.recipe.parameter_bytes
    heads = largest_part(model, "heads", model.heads_size, strategy.tp) // model.head_dim
    passes = (element + (1 + element) * stack.dropout) * (not stack.fused_attention)
    masks = 2 * b * s * model.hidden_size // strategy.hidden_parts[1] * stack.dropout
    scores = passes * heads * b * (s // strategy.cp) * s
    kept = {"none": (live, live), "full": (1, 1), "selective": (1, live)}[strategy.recompute]
    return kept[0] * scores + kept[1] * masks
