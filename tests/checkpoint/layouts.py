"""Training state as real strategies lay it out, filled from one set of global tensors."""

from __future__ import annotations

import torch

from meshwright.checkpoint import Piece, bucket_pieces
from meshwright.core.axes import coordinates_of
from meshwright.core.flat import Bucket, make_buckets
from meshwright.core.layouts import Tensor
from meshwright.core.model import ModelSpec
from meshwright.core.placement import placements
from meshwright.core.strategy import Strategy

STATE = ("master", "moment1")
"""Kinds that ZeRO-1 shards; parameters stay whole on each dp rank."""


def spec_of(num_layers: int = 3, **changes) -> ModelSpec:
    """Tied embeddings, one kv head for two query heads, sizes that divide unevenly."""
    values = {
        "name": "tiny",
        "family": "qwen3",
        "vocab_size": 13,
        "hidden_size": 6,
        "num_layers": num_layers,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 2,
        "ffn_size": 10,
        "max_positions": 8,
        "norm": "rmsnorm",
        "positions": "rope",
        "activation": "silu",
        "gated_mlp": True,
        "qk_norm": True,
        "qkv_bias": True,
        "tied_embeddings": True,
    }
    return ModelSpec(**{**values, **changes})


def reference(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """The global tensor of every key; parameters in bfloat16, the rest in float32."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for param in spec.parameters():
        for kind in ("parameters", *STATE):
            value = torch.randn(param.shape, generator=generator)
            tensors[f"{kind}/{param.name}"] = value.bfloat16() if kind == "parameters" else value
    return tensors


class RankState:
    """What one rank of a strategy holds: flat buckets, of which the optimizer's are sharded under ZeRO-1."""

    def __init__(self, spec: ModelSpec, strategy: Strategy, rank: int) -> None:
        at = coordinates_of(rank, strategy.sizes)
        held = placements(spec, strategy, at)
        self.memory: list[tuple[str, Bucket, int, torch.Tensor]] = []
        for bucket in make_buckets(held, strategy.dp, cap_bytes=800, gradient_bytes=4):
            shard = bucket.shard(strategy.dp, at["dp"]) if strategy.zero else (0, bucket.numel)
            for kind, (start, stop), dtype in [
                ("parameters", (0, bucket.numel), torch.bfloat16),
                *((kind, shard, torch.float32) for kind in STATE),
            ]:
                self.memory.append((kind, bucket, start, torch.full((stop - start,), float("nan"), dtype=dtype)))

    def pieces(self, *, owned: bool) -> list[Piece]:
        return [piece for kind, *place in self.memory for piece in bucket_pieces(kind, *place, owned=owned)]

    def fill(self, tensors: dict[str, torch.Tensor]) -> None:
        for piece in self.pieces(owned=False):
            piece.tensor.copy_(tensors[piece.key][piece.box.slices])

    def differing(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        """Keys of pieces that are not, bit for bit, what the global tensors say."""
        return [p.key for p in self.pieces(owned=False) if not torch.equal(p.tensor, tensors[p.key][p.box.slices])]


LAYOUTS = {
    "D1": Strategy(),
    "D2z": Strategy(dp=2, zero=1),
    "T2": Strategy(tp=2),
    "P2": Strategy(pp=2),
    "D2T2z": Strategy(dp=2, tp=2, zero=1),
    "D2P2z": Strategy(dp=2, pp=2, zero=1),
    "T4": Strategy(tp=4),
    "D4": Strategy(dp=4),
    "T2P2": Strategy(tp=2, pp=2),
    "P3": Strategy(pp=3),
    "D4z": Strategy(dp=4, zero=1),
    "Q4": Strategy(tp=4, tensor=Tensor(kind="2d")),
    "Q8": Strategy(tp=8, tensor=Tensor(kind="2.5d", depth=2)),
    "C8": Strategy(tp=8, tensor=Tensor(kind="3d")),
}
