"""Tiny models of every supported family, and every feature at least once."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.core.latent import LatentAttention, RopeScaling, YarnScaling
from meshwright.core.model import ModelSpec
from meshwright.core.router import RouterSpec
from meshwright.models.build import build
from meshwright.models.decoder import Decoder
from meshwright.models.init import initialize

_LLAMA: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_size": 40,
    "max_positions": 64,
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "positions": "rope",
    "activation": "silu",
    "gated_mlp": True,
    "initializer_std": 0.2,
}
_GPT2: dict[str, Any] = _LLAMA | {
    "num_kv_heads": 4,
    "ffn_size": 128,
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "positions": "learned",
    "activation": "gelu_tanh",
    "gated_mlp": False,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "tied_embeddings": True,
}
_SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32)
_YARN = YarnScaling(factor=8.0, original_max_positions=16, beta_fast=4.0)
_LATENT = LatentAttention(kv_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
_EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_size": 24}
_SIGMOID = RouterSpec(
    score="sigmoid", renormalise="before_drop", bias=True, scale=2.5, num_groups=4, groups_per_token=2
)  # fmt: skip
_LATENT_LINE = _LLAMA | _EXPERTS | {"num_kv_heads": 4, "head_dim": 12, "dense_layers": (0,), "shared_ffn_size": 24}
_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}

SPECS = {
    spec.name: spec
    for spec in (
        ModelSpec(name="gpt2", family="gpt2", **_GPT2),
        ModelSpec(name="gpt2-untied", family="gpt2", **_GPT2 | {"tied_embeddings": False}),
        ModelSpec(name="llama", family="llama", **_LLAMA),
        ModelSpec(name="llama-biases", family="llama", **_LLAMA | _BIASES, rope_scaling=_YARN),
        ModelSpec(name="llama-tied-scaled", family="llama", **_LLAMA, tied_embeddings=True, rope_scaling=_SCALING),
        ModelSpec(name="mistral", family="mistral", **_LLAMA, sliding_window=48),
        ModelSpec(name="qwen2", family="qwen2", **_LLAMA, qkv_bias=True, tied_embeddings=True),
        ModelSpec(name="qwen3-wide-heads", family="qwen3", **_LLAMA | {"head_dim": 16}, qk_norm=True),
        ModelSpec(
            name="mixtral", family="mixtral", **_LLAMA, num_experts=4, experts_per_token=2,
            router=RouterSpec(renormalise="before_drop"),
        ),
        ModelSpec(
            name="qwen2-moe", family="qwen2_moe", **_LLAMA, **_EXPERTS, qkv_bias=True, shared_ffn_size=20,
            shared_gate=True, router=RouterSpec(),
        ),
        ModelSpec(
            name="qwen3-moe", family="qwen3_moe", **_LLAMA, **_EXPERTS, qk_norm=True, dense_layers=(1,),
            router=RouterSpec(renormalise="before_drop"),
        ),
        ModelSpec(
            name="dots", family="dots1", **_LLAMA, **_EXPERTS, qk_norm=True, dense_layers=(0,), shared_ffn_size=48,
            router=_SIGMOID,
        ),
        ModelSpec(name="deepseek", family="deepseek", **_LLAMA, **_EXPERTS, shared_ffn_size=24, router=RouterSpec()),
        ModelSpec(
            name="deepseek-v2", family="deepseek_v2", **_LATENT_LINE, latent=_LATENT, rope_scaling=_YARN,
            router=RouterSpec(scale=1.5, num_groups=4, groups_per_token=2),
        ),
        ModelSpec(
            name="deepseek-v3", family="deepseek_v3", **_LATENT_LINE, router=_SIGMOID,
            latent=_LATENT.model_copy(update={"q_lora_rank": 28}),
            rope_scaling=_YARN.model_copy(update={"mscale": 0.7, "mscale_all_dim": 1.2}),
        ),
        ModelSpec(
            name="switch", family="mixture", **_LLAMA | {"activation": "gelu", "gated_mlp": False}, num_experts=4,
            experts_per_token=1, dense_layers=(0,), router=RouterSpec(capacity_factor=1.25),
        ),
    )
}  # fmt: skip


def random_model(spec: ModelSpec, dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    """Weights drawn, norms and biases moved off 1 and 0 so that a swap or an omission shows."""
    model = build(spec, "cpu", dtype)
    initialize(model, spec, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        for name, values in model.stored():
            if name.endswith("router.bias"):
                values += 0.2 * torch.randn(values.shape, generator=generator)
    return model


def random_tokens(spec: ModelSpec, batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(spec.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))
