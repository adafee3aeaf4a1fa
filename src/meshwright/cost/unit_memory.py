"""What a rank holds under fully sharded data parallelism by units, as PyTorch's first FSDP runs it: each layer, the
embedding and the head gathered whole for its forward and its backward, then freed.

    always       fp32 shards of parameters and moments
    kept         activations of all units whose backward is still to come; of a pipeline's stage also its input and,
                 twice, its output
    in a unit    its parameters in the compute dtype, and the gradients of hidden states on their way; behind its last
                 product its gradient, twice: each weight's, and all of them in one row, which may be in fp32; the
                 parameters of the unit before it, gathered ahead
    behind it    fp32 shards of its gradient

The peak is the largest of: the loss's backward, the end of the head's, each layer's middle and end, and the
embedding's. Between layers and head stands a norm, so nothing large is gathered ahead while the head runs.

Source: Zhao et al. 2023 (FSDP), §3.3 and §4; PyTorch, `torch.distributed.fsdp`; Galvatron, `core/parallel.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.core.job import Job
from meshwright.core.measures import MemoryBreakdown
from meshwright.core.model import ModelSpec
from meshwright.core.precision import NUM_MOMENTS
from meshwright.core.profile import Stack
from meshwright.core.strategy import Strategy
from meshwright.cost.activations import layer_input_terms, layer_terms, total_bytes
from meshwright.cost.in_flight import instants

SHARD_BYTES = 4
"""Of a parameter, a moment or a gradient between its uses: fp32."""
NUM_GRADIENTS = 2
"""Of a unit when its backward ends: by weight, and in one row."""
NUM_OUTPUTS = 2
"""That a pipeline's stage keeps: what it sends, and the copy that backward starts from."""
NUM_STREAM_GRADIENTS = 2
"""Tensors of hidden size, in a layer's backward: of its branch, and of the residual stream beside it."""
NUM_AGAIN = 3
"""Further ones where the layer was run again: its new output, the gradient of that, and of its input."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """Of one rank."""

    numel: int
    """Elements when gathered."""
    num_shards: int
    kept: int
    """Bytes that one micro-batch keeps from forward to backward."""
    whole: int
    """Likewise in the middle of its backward: with what is run again, for the loss, and gradients on their way."""
    rest: int
    """Likewise when the gradients of its weights are there."""
    half_gradient: int
    """Bytes of gradients of weights, in the middle of its backward."""
    gathers_ahead: bool
    """Whether the unit before it is gathered meanwhile."""

    @property
    def shard(self) -> int:
        return -(-self.numel // self.num_shards)


@dataclass(frozen=True, slots=True)
class _Peak:
    """Bytes at one instant."""

    activations: int
    gradients: int
    """Shards."""
    working: int
    """Gathered parameters, gradients that are not sharded yet."""

    @property
    def total(self) -> int:
        return self.activations + self.gradients + self.working


def unit_memory(model: ModelSpec, job: Job, strategy: Strategy, rank: int, stack: Stack) -> MemoryBreakdown:
    """Peak of one training step of a pipeline rank."""
    units = _units(model, job, strategy, rank, stack)
    live = max(sum(instant.live) for one in instants(strategy, [rank]) for instant in one)
    ends = _stage_ends(model, job, strategy, rank)
    others = (live - 1) * (sum(unit.kept for unit in units) + ends) + ends
    numel = sum(unit.shard for unit in units)
    element = strategy.recipe.parameter_bytes
    peak = max(_peaks(units, element, numel if live > 1 else 0), key=lambda one: one.total)
    return MemoryBreakdown(
        parameters_bytes=numel * SHARD_BYTES,
        gradients_bytes=peak.gradients,
        optimizer_bytes=numel * SHARD_BYTES * NUM_MOMENTS[job.optimizer],
        activations_bytes=others + peak.activations,
        buffers_bytes=_sequence_buffers(model, job, strategy, stack) + int(stack.context_bytes),
        working_bytes=peak.working,
    )


def _peaks(units: Sequence[_Unit], element_bytes: int, reduced: int) -> Iterator[_Peak]:
    """Candidates, from the last unit's backward to the first's; `reduced`: elements of gradients of earlier
    micro-batches."""
    kept, done = sum(unit.kept for unit in units), 0
    for before, unit in zip((*units[-2::-1], None), reversed(units), strict=True):
        ahead = before.numel if before and unit.gathers_ahead else 0
        kept -= unit.kept
        shards = SHARD_BYTES * max(done, reduced)
        gathered = (unit.numel + ahead) * element_bytes
        yield _Peak(kept + unit.whole, shards, gathered + unit.half_gradient)
        yield _Peak(kept + unit.rest, shards, gathered + NUM_GRADIENTS * unit.numel * element_bytes)
        done += unit.shard


def _units(model: ModelSpec, job: Job, strategy: Strategy, rank: int, stack: Stack) -> list[_Unit]:
    """Embedding, layers and head of a pipeline rank, as far as it has them."""
    numel: Counter[int | str] = Counter()
    for param in model.parameters():
        where = param.layer if param.layer is not None else "embedding" if param.part == "embedding" else "head"
        numel[where] += param.numel
    if model.tied_embeddings:
        numel["head"] += model.vocab_size * model.hidden_size
    vocabulary_parts = 1 if stack.vocabulary_apart else strategy.tp
    shards_of_vocabulary = strategy.data_ranks * strategy.tp // vocabulary_parts
    layer = _layer_bytes(model, job, strategy, stack)
    layers = strategy.stage_layers(model.num_layers)
    of_rank = [layer for stage in strategy.rank_stages(rank) for layer in layers[stage]]
    units = [
        _Unit(numel[i] // strategy.tp, strategy.data_ranks, *layer, i != of_rank[0] or stack.prefetches_embedding)
        for i in of_rank
    ]
    if rank == 0:
        masks = _apart_tokens(job, strategy) * model.hidden_size * stack.dropout
        embedding = numel["embedding"] // vocabulary_parts
        units.insert(0, _Unit(embedding, shards_of_vocabulary, masks, masks, 0, 0, False))
    if rank == strategy.pp - 1:
        head = _head_bytes(model, job, strategy, stack)
        units.append(_Unit(numel["head"] // vocabulary_parts, shards_of_vocabulary, *head, 0, False))
    return units


def _layer_bytes(model: ModelSpec, job: Job, strategy: Strategy, stack: Stack) -> tuple[int, int, int, int]:
    """Of one layer: what it keeps of one micro-batch, has in the middle of its backward and at its end, and the
    gradients of weights in the middle: there, of those behind a gated activation."""
    b, s, element = strategy.micro_batch_size, job.seq_length, strategy.recipe.parameter_bytes
    tokens = b * s // strategy.cp
    hidden = b * s // strategy.hidden_parts[1] * model.hidden_size
    inner, ffn = tokens * model.hidden_size // strategy.tp, tokens * model.ffn_size // strategy.tp
    whole = total_bytes(layer_terms(model, strategy, b, s)) + 2 * hidden * stack.dropout
    whole += (2 * stack.norm_copies * hidden + ffn * (model.gated_mlp and not stack.fused_gates)) * element
    whole += stack.transposes * (b > 1) * inner * element
    if stack.keeps_fused_outputs:
        whole += (inner + 2 * tokens * model.kv_size // strategy.tp + (1 + model.gated_mlp) * ffn) * element
    of_weight = model.ffn_size * model.hidden_size // strategy.tp * element
    of_stream, of_gate = NUM_STREAM_GRADIENTS * hidden * element, stack.gate_gradients * ffn * element
    again = NUM_AGAIN * hidden * element if strategy.recompute == "full" else 0
    kept = total_bytes(layer_input_terms(model, strategy, b, s)) if again else whole
    if stack.gate_gradients and of_gate + of_weight > of_stream:
        return kept, whole + again + of_gate, again, of_weight
    return kept, whole + again + of_stream, again, 0


def _head_bytes(model: ModelSpec, job: Job, strategy: Strategy, stack: Stack) -> tuple[int, int, int]:
    """Of the norm, the head and the loss, likewise but for the weight: each tp rank has a part of the tokens or a part
    of the vocabulary. What the norm keeps, and the gradient that goes into it, are there when the head's ends."""
    tokens = _apart_tokens(job, strategy)
    norm = (2 + stack.norm_copies) * tokens * model.hidden_size * strategy.recipe.parameter_bytes
    kept = norm + int(stack.logit_bytes * tokens * model.vocab_size)
    return kept, kept + int(stack.loss_backward_bytes * tokens * model.vocab_size), norm


def _apart_tokens(job: Job, strategy: Strategy) -> int:
    """Of a micro-batch, that each tp rank has outside of the layers."""
    return strategy.micro_batch_size * job.seq_length // (strategy.tp * strategy.cp)


def _stage_ends(model: ModelSpec, job: Job, strategy: Strategy, rank: int) -> int:
    """What a pipeline keeps of a micro-batch between a rank's stages and others'."""
    num = (rank > 0) + NUM_OUTPUTS * (rank < strategy.pp - 1)
    hidden = strategy.micro_batch_size * job.seq_length // strategy.hidden_parts[1] * model.hidden_size
    return num * hidden * strategy.recipe.parameter_bytes


def _sequence_buffers(model: ModelSpec, job: Job, strategy: Strategy, stack: Stack) -> int:
    """Sequence parallelism gathers into buffers that stay."""
    if strategy.sequence != "megatron" or strategy.tp == 1:
        return 0
    tokens = strategy.micro_batch_size * job.seq_length // strategy.cp
    return stack.num_sequence_buffers * tokens * model.hidden_size * strategy.recipe.parameter_bytes
