"""Hugging Face configurations of mixtures of experts, and a configuration of our own for those that have none there.

Coefficients of losses are read as they stand, for losses as `core.router` defines them. Where a configuration class
has none, it is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.core.errors import InputError
from meshwright.core.hf_llama import (
    read_llama,
    read_llama_line,
    read_qwen3,
    read_qwen_window,
    write_llama,
    write_llama_line,
    write_qwen3,
    write_qwen_window,
)
from meshwright.core.hf_reader import Architecture, Fields, Reader
from meshwright.core.model import ModelSpec


def _read_mixtral(c: Reader) -> Fields:
    c.refuse("router_jitter_noise", (0, 0.0, None), "set `router.noise` of the spec instead")
    return {
        **read_llama_line(c, eps=1e-5, theta=1e6),
        "sliding_window": c.optional_size("sliding_window", None),
        "num_experts": c.size("num_local_experts", 8),
        "experts_per_token": c.size("num_experts_per_tok", 2),
        "router": {"renormalise": "before_drop", "balance_loss": c.number("router_aux_loss_coef", 0.001)},
    }


def _write_mixtral(s: ModelSpec) -> Fields:
    own = {"num_local_experts": s.num_experts, "num_experts_per_tok": s.experts_per_token}
    window = {"sliding_window": s.sliding_window, "router_aux_loss_coef": s.gate.balance_loss}
    return {**write_llama_line(s), **window, **own}


def _indices(c: Reader, key: str) -> list[int]:
    _, value = c.raw(key, None)
    if value is None:
        return []
    if not isinstance(value, Sequence) or not all(isinstance(index, int) for index in value):
        raise InputError(f"{c.where}: `{key}` is {value!r}; a list of layers was expected")
    return list(value)


def _read_qwen_experts(c: Reader, num_layers: int, num_experts: int, experts_per_token: int, ffn_size: int) -> Fields:
    """What Qwen2-MoE and Qwen3-MoE share; the last three are the class's defaults."""
    step, named = c.size("decoder_sparse_step", 1), _indices(c, "mlp_only_layers")
    dense = [layer for layer in range(num_layers) if layer in named or (layer + 1) % step]
    renormalise = "before_drop" if c.flag("norm_topk_prob", False) else "none"
    return {
        "num_experts": c.size(("num_experts", "num_local_experts"), num_experts),
        "experts_per_token": c.size("num_experts_per_tok", experts_per_token),
        "expert_ffn_size": c.size("moe_intermediate_size", ffn_size),
        "dense_layers": dense or None,
        "router": {"renormalise": renormalise, "balance_loss": c.number("router_aux_loss_coef", 0.001)},
    }


def _write_qwen_experts(s: ModelSpec) -> Fields:
    return {
        "num_experts": s.num_experts,
        "num_experts_per_tok": s.experts_per_token,
        "moe_intermediate_size": s.expert_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(s.dense_layers or ()),
        "norm_topk_prob": s.gate.renormalise == "before_drop",
        "router_aux_loss_coef": s.gate.balance_loss,
    }


def _read_qwen2_moe(c: Reader) -> Fields:
    fields = read_llama_line(c)
    return {
        **fields,
        "qkv_bias": c.flag("qkv_bias", True),
        "sliding_window": read_qwen_window(c, fields["num_layers"]),
        **_read_qwen_experts(c, fields["num_layers"], 60, 4, 1408),
        "shared_ffn_size": c.size("shared_expert_intermediate_size", 5632),
        "shared_gate": True,
    }


def _write_qwen2_moe(s: ModelSpec) -> Fields:
    own = {"shared_expert_intermediate_size": s.shared_ffn_size, "qkv_bias": s.qkv_bias}
    return {**write_llama_line(s), **write_qwen_window(s), **_write_qwen_experts(s), **own}


def _read_qwen3_moe(c: Reader) -> Fields:
    fields = read_qwen3(c)
    return {**fields, **_read_qwen_experts(c, fields["num_layers"], 128, 8, 768)}


def _write_qwen3_moe(s: ModelSpec) -> Fields:
    return {**write_qwen3(s), **_write_qwen_experts(s)}


def read_deepseek_experts(c: Reader, num_layers: int, first_dense: int = 0, num_shared: int | None = None) -> Fields:
    """Shared and fine-grained experts behind a first part of dense layers (Dai et al. 2024).

    Args:
        c: the configuration.
        num_layers: of the model.
        first_dense, num_shared: the class's defaults of `first_k_dense_replace` and `n_shared_experts`.
    """
    first, every = c.raw("first_k_dense_replace", first_dense)[1] or 0, c.size("moe_layer_freq", 1)
    dense = [layer for layer in range(num_layers) if layer < first or layer % every]
    width, num_shared = c.size("moe_intermediate_size"), c.raw("n_shared_experts", num_shared)[1] or 0
    return {
        "num_experts": c.size("n_routed_experts"),
        "experts_per_token": c.size("num_experts_per_tok"),
        "expert_ffn_size": width,
        "shared_ffn_size": num_shared * width or None,
        "dense_layers": dense or None,
    }


def write_deepseek_experts(s: ModelSpec) -> Fields:
    """Inverse of :func:`read_deepseek_experts`."""
    first = next(layer for layer in range(s.num_layers) if s.is_sparse(layer))
    return {
        "n_routed_experts": s.num_experts,
        "num_experts_per_tok": s.experts_per_token,
        "moe_intermediate_size": s.expert_size,
        "n_shared_experts": (s.shared_ffn_size or 0) // s.expert_size or None,
        "first_k_dense_replace": first,
        "norm_topk_prob": s.gate.renormalise == "before_drop",
    }


def _read_deepseek(c: Reader) -> Fields:
    c.refuse("scoring_func", ("softmax", None), "the first DeepSeek-MoE scores by softmax; take `dots1` for a sigmoid")
    fields = read_llama(c)
    renormalise = "before_drop" if c.flag("norm_topk_prob", False) else "none"
    router = {"renormalise": renormalise, "balance_loss": c.number("aux_loss_alpha", 0.001)}
    return {**fields, **read_deepseek_experts(c, fields["num_layers"]), "router": router}


def _write_deepseek(s: ModelSpec) -> Fields:
    own = {"aux_loss_alpha": s.gate.balance_loss, "scoring_func": "softmax", "moe_layer_freq": 1}
    return {**write_llama(s), **write_deepseek_experts(s), **own}


def _read_dots1(c: Reader) -> Fields:
    fields = read_llama_line(c, plain_heads=True)
    bias, layers = c.flag("attention_bias", False), fields["num_layers"]
    window, first = c.optional_size("sliding_window", 4096), c.raw("max_window_layers", 62)[1]
    router = {
        "score": "sigmoid",
        "bias": True,
        "renormalise": "before_drop" if c.flag("norm_topk_prob", False) else "none",
        "scale": c.positive("routed_scaling_factor", 1.0),
        "num_groups": c.size("n_group", 1),
        "groups_per_token": c.size("topk_group", 1),
    }
    own = {"qk_norm": True, "qkv_bias": bias, "out_bias": bias, "router": router}
    own["sliding_window"] = window if first == 0 else None
    return {**fields, **read_deepseek_experts(c, layers), **own}


def _write_dots1(s: ModelSpec) -> Fields:
    gate, window = s.gate, s.sliding_window
    return {
        **write_llama_line(s),
        **write_deepseek_experts(s),
        "attention_bias": s.out_bias,
        "routed_scaling_factor": gate.scale,
        "n_group": gate.num_groups,
        "topk_group": gate.groups_per_token,
        "sliding_window": window,
        "max_window_layers": 0 if window else s.num_layers,
    }


_NOT_OF_THE_MIXTURE = ("name", "family")


def _read_mixture(c: Reader) -> Fields:
    return {
        key: value for key, value in c.data.items() if key in ModelSpec.model_fields and key not in _NOT_OF_THE_MIXTURE
    }


def _write_mixture(s: ModelSpec) -> Fields:
    dumped: dict[str, Any] = s.model_dump(mode="json", exclude_none=True)
    return {key: value for key, value in dumped.items() if key not in _NOT_OF_THE_MIXTURE}


EXPERT_ARCHITECTURES = {
    "mixtral": Architecture("MixtralForCausalLM", _read_mixtral, _write_mixtral),
    "qwen2_moe": Architecture("Qwen2MoeForCausalLM", _read_qwen2_moe, _write_qwen2_moe),
    "qwen3_moe": Architecture("Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe),
    "deepseek": Architecture("DeepseekForCausalLM", _read_deepseek, _write_deepseek),
    "dots1": Architecture("Dots1ForCausalLM", _read_dots1, _write_dots1),
    "mixture": Architecture("MeshwrightMixtureForCausalLM", _read_mixture, _write_mixture),
}
"""`model_type` → architecture. `deepseek` is the first DeepSeek-MoE, whose class is not a part of transformers;
`mixture` is our own: it says any spec, under the names of the spec's fields."""
