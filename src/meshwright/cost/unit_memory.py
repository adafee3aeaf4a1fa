"""What a rank holds under fully sharded data parallelism by units, as PyTorch's first FSDP runs it: each layer, the
embedding and the head gathered whole for its forward and its backward, then freed.

    always       fp32 shards of parameters and moments
    kept         activations of all units whose backward is still to come
    in a unit    its parameters in the compute dtype; behind its last product also its gradient, twice: each weight's,
                 and all of them in one row; the parameters of the unit before it, gathered ahead
    behind it    fp32 shards of its gradient

The peak is the largest of: the loss's backward, the end of the head's, each layer's middle and end, and the
embedding's. Between layers and head stands a norm, so nothing large is gathered ahead while the head runs.

Source: Zhao et al. 2023 (FSDP), §3.3 and §4; PyTorch, `torch.distributed.fsdp`.
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
NORM_COPIES = 4
"""Further tensors of hidden size, in the compute dtype, that a norm written operation by operation keeps: its input and
what is normalised in fp32, the latter rounded, less the input that a fused one keeps."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """Of one rank."""

    numel: int
    """Elements when gathered."""
    num_shards: int
    kept: int
    """Bytes that one micro-batch keeps from forward to backward."""
    whole: int
    """Likewise in the middle of its backward: with what is run again, or for the loss."""
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
    others = (live - 1) * sum(unit.kept for unit in units)
    numel = sum(unit.shard for unit in units)
    peak = max(_peaks(units, strategy.recipe.parameter_bytes, numel if live > 1 else 0), key=lambda one: one.total)
    return MemoryBreakdown(
        parameters_bytes=numel * SHARD_BYTES,
        gradients_bytes=peak.gradients,
        optimizer_bytes=numel * SHARD_BYTES * NUM_MOMENTS[job.optimizer],
        activations_bytes=others + peak.activations,
        buffers_bytes=_sequence_buffer(model, job, strategy) + int(stack.context_bytes),
        working_bytes=peak.working,
    )


def _peaks(units: Sequence[_Unit], element_bytes: int, reduced: int) -> Iterator[_Peak]:
    """Candidates, from the last unit's backward to the first's; `reduced`: elements of gradients of earlier
    micro-batches."""
    kept, done = sum(unit.kept for unit in units), 0
    for before, unit in zip((*units[-2::-1], None), reversed(units), strict=True):
        ahead = before.numel if before and unit.gathers_ahead else 0
        kept -= unit.kept
        gradients = SHARD_BYTES * max(done, reduced)
        yield _Peak(kept + unit.whole, gradients, (unit.numel + ahead) * element_bytes)
        yield _Peak(kept, gradients, ((1 + NUM_GRADIENTS) * unit.numel + ahead) * element_bytes)
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
    kept, whole = _layer_bytes(model, job, strategy, stack)
    layers = strategy.stage_layers(model.num_layers)
    of_rank = [layer for stage in strategy.rank_stages(rank) for layer in layers[stage]]
    units = [_Unit(numel[layer] // strategy.tp, strategy.data_ranks, kept, whole, True) for layer in of_rank]
    if rank == 0:
        units.insert(0, _Unit(numel["embedding"] // vocabulary_parts, shards_of_vocabulary, 0, 0, False))
    if rank == strategy.pp - 1:
        head = _head_bytes(model, job, strategy, stack)
        units.append(_Unit(numel["head"] // vocabulary_parts, shards_of_vocabulary, *head, False))
    return units


def _layer_bytes(model: ModelSpec, job: Job, strategy: Strategy, stack: Stack) -> tuple[int, int]:
    """What one layer keeps of one micro-batch, and has in the middle of its backward."""
    b, s, element = strategy.micro_batch_size, job.seq_length, strategy.recipe.parameter_bytes
    whole = total_bytes(layer_terms(model, strategy, b, s))
    if not stack.fused_streams:
        norms = 2 * NORM_COPIES * (b * s // strategy.hidden_parts[1]) * model.hidden_size
        whole += (norms + b * s // strategy.cp * model.ffn_size // strategy.tp * model.gated_mlp) * element
    if strategy.recompute == "full":
        return total_bytes(layer_input_terms(model, strategy, b, s)), whole
    return whole, whole


def _head_bytes(model: ModelSpec, job: Job, strategy: Strategy, stack: Stack) -> tuple[int, int]:
    """Likewise the norm, the head and the loss: each tp rank has a part of the tokens or a part of the vocabulary."""
    tokens = strategy.micro_batch_size * job.seq_length // (strategy.tp * strategy.cp)
    copies = 2 + NORM_COPIES * (not stack.fused_streams)
    kept = copies * tokens * model.hidden_size * strategy.recipe.parameter_bytes
    kept += int(stack.logit_bytes * tokens * model.vocab_size)
    return kept, kept + int(stack.loss_backward_bytes * tokens * model.vocab_size)


def _sequence_buffer(model: ModelSpec, job: Job, strategy: Strategy) -> int:
    """Sequence parallelism gathers into one buffer that stays."""
    if strategy.sequence != "megatron" or strategy.tp == 1:
        return 0
    tokens = strategy.micro_batch_size * job.seq_length // strategy.cp
    return tokens * model.hidden_size * strategy.recipe.parameter_bytes
