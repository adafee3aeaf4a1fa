"""Bytes of a key/value cache on one rank.

    2 · L · g · d · bytes   per token: keys and values of L layers, of the g key/value heads of d that the rank holds

With fewer key/value heads than ranks of tp, ranks hold the same ones. A pipeline rank holds those of its own layers.
Source: techniques, §10.5; Kwon et al. 2023, §4.
"""

from __future__ import annotations

from meshwright.core.model import ModelSpec
from meshwright.core.placement import largest_part
from meshwright.core.precision import DTYPE_BYTES
from meshwright.core.strategy import Strategy


def kv_token_bytes(spec: ModelSpec, strategy: Strategy, rank: int = 0) -> int:
    """Bytes that one token takes in the cache of pipeline rank `rank`."""
    layers = strategy.stage_layers(spec.num_layers)
    num_layers = sum(len(layers[stage]) for stage in strategy.rank_stages(rank))
    width = largest_part(spec, "kv_heads", spec.kv_size, strategy.tp)
    return 2 * num_layers * width * DTYPE_BYTES[strategy.recipe.parameter]


def largest_kv_token_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    """Of the pipeline rank with the most layers: all ranks have equally many blocks."""
    return max(kv_token_bytes(spec, strategy, rank) for rank in range(strategy.pp))
