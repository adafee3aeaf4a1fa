"""Bytes of a key/value cache on one rank.

    2 · L · g · d · bytes   per token: keys and values of L layers, of the g key/value heads of d that the rank holds

    L · (r_kv + r) · bytes  likewise of latent attention: a latent of rank r_kv, and the rotary dims of all heads' keys

A latent is whole on every rank of tp. With fewer key/value heads than ranks of tp, ranks hold the same ones. A pipeline
rank holds those of its own layers.
Sources: Kwon et al. 2023, §4; DeepSeek-AI 2024 (V2), table 1.
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
    width = 2 * largest_part(spec, "kv_heads", spec.kv_size, strategy.tp)
    if spec.latent is not None:
        width = spec.latent.kv_down_size
    return num_layers * width * DTYPE_BYTES[strategy.recipe.parameter]


def largest_kv_token_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    """Of the pipeline rank with the most layers: all ranks have equally many blocks."""
    return max(kv_token_bytes(spec, strategy, rank) for rank in range(strategy.pp))
