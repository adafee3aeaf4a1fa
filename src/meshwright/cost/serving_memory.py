"""Bytes of a served model on one rank: weights, the key/value cache, and what a step works with.

    weights   a rank's boxes of the parameters, in the layout's dtype
    working   the widest moment of a step: in the MLP [T, 2h + 2f] (gated: 3f), or the logits of all running sequences
              as the rank computes them, and joined in fp32
    cache     num_blocks × block_size × the bytes of a token (`cost.kv_cache`)

Working memory is an estimate; weights and cache are exact. Source: techniques, §11.1; Kwon et al. 2023, §3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.core.axes import CP, DP, PP, TP
from meshwright.core.cluster import ClusterSpec
from meshwright.core.model import ModelSpec
from meshwright.core.placement import largest_part
from meshwright.core.serving import Layout
from meshwright.cost.kv_cache import largest_kv_token_bytes
from meshwright.cost.params import local_parameters
from meshwright.cost.serving import LOGITS_BYTES


@dataclass(frozen=True, slots=True)
class Weights:
    """What follows from a layout's degrees alone."""

    rank: int
    """The pipeline rank that holds most."""
    weights_bytes: int
    token_bytes: int
    """Of one token in the cache, on the rank with the most layers."""


@dataclass(frozen=True, slots=True)
class ServingMemory(Weights):
    """What is there before the first request."""

    working_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """All but the cache."""
        return self.weights_bytes + self.working_bytes


def largest_weights(model: ModelSpec, layout: Layout) -> Weights:
    """Of the pipeline rank that holds most."""
    held = {rank: weights_bytes(model, layout, rank) for rank in _kinds(model, layout)}
    rank = max(held, key=held.__getitem__)
    return Weights(rank, held[rank], largest_kv_token_bytes(model, layout.replica))


def serving_memory(model: ModelSpec, layout: Layout, weights: Weights | None = None) -> ServingMemory:
    """Of the pipeline rank that holds most. `weights` are those of the layout's degrees, where they are known."""
    w = weights or largest_weights(model, layout)
    return ServingMemory(w.rank, w.weights_bytes, w.token_bytes, working_bytes(model, layout))


def weights_bytes(model: ModelSpec, layout: Layout, rank: int) -> int:
    """On the first tp rank of pipeline rank `rank`."""
    at = {PP: rank, DP: 0, CP: 0, TP: 0}
    return local_parameters(model, layout.strategy, at) * layout.replica.recipe.parameter_bytes


def _kinds(model: ModelSpec, layout: Layout) -> Iterator[int]:
    """One pipeline rank of each kind: those between the ends differ by their layers alone."""
    seen = set()
    last = layout.pp - 1
    for rank, layers in enumerate(layout.replica.stage_layers(model.num_layers)):
        num_sparse = sum(map(model.is_sparse, layers))
        kind = (rank == 0, rank == last, len(layers), num_sparse)
        if kind not in seen:
            seen.add(kind)
            yield rank


def working_bytes(model: ModelSpec, layout: Layout) -> int:
    """Of a step as large as the layout allows."""
    element_bytes, tp = layout.replica.recipe.parameter_bytes, layout.tp
    width = max(model.ffn_size, model.expert_size * model.experts_per_token)
    ffn = largest_part(model, "ffn", width, tp)
    inner = layout.step_tokens * (2 * model.hidden_size + (3 if model.gated_mlp else 2) * ffn) * element_bytes
    part = largest_part(model, "vocab", model.vocab_size, tp)
    return inner + layout.max_running * (part * element_bytes + model.vocab_size * LOGITS_BYTES)


def most_blocks(memory: ServingMemory, layout: Layout, cluster: ClusterSpec) -> int:
    """Blocks of the cache that find room beside weights and working memory; less than 0 where these do not fit."""
    return (cluster.usable_memory_bytes - memory.fixed_bytes) // (layout.block_size * memory.token_bytes)
