"""A model small enough to enumerate by hand, for tests that need no torch."""

from __future__ import annotations

from meshwright.core.model import ModelSpec


def make_model(**change: object) -> ModelSpec:
    """A Llama of 8 layers, 64 wide, 4 heads, 2 key/value heads; fields by keyword."""
    shape = {
        "name": "tiny", "family": "llama", "vocab_size": 96, "hidden_size": 64, "num_layers": 8, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 16, "ffn_size": 128, "max_positions": 64, "norm": "rmsnorm",
        "positions": "rope", "activation": "silu", "gated_mlp": True,
    }  # fmt: skip
    return ModelSpec.model_validate({**shape, **change})
