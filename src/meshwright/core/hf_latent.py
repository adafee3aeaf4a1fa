"""Hugging Face configurations with multi-head latent attention: DeepSeek-V2 and V3.

The modules that predict further tokens (`num_nextn_predict_layers`) are no part of the model: it has the layers that
answer, and a checkpoint's further layers are left out.
"""

from __future__ import annotations

from meshwright.core.hf_experts import read_deepseek_experts, write_deepseek_experts
from meshwright.core.hf_llama import read_llama_line, write_llama_line
from meshwright.core.hf_reader import Architecture, Fields, Reader
from meshwright.core.latent import LatentAttention
from meshwright.core.model import ModelSpec

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DEFAULTS = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
             "v_head_dim": 128}  # fmt: skip
"""Of both configuration classes."""


def _read_latent_line(c: Reader) -> Fields:
    """What both share."""
    for key in ("attention_bias", "mlp_bias"):
        c.refuse(key, (False, None), "biases of latent attention and its experts are not built")
    c.refuse("rope_interleave", (True, None), "rotary dims of latent attention lie in pairs; others are not built")
    fields = read_llama_line(c, head_dim=c.size("qk_rope_head_dim", 64), plain_heads=True)
    c.refuse("num_key_value_heads", (None, fields["num_heads"]), "latent attention has as many of them as heads")
    sizes: Fields = {key: c.size(key, _DEFAULTS[key]) for key in _SIZES}
    rank = c.raw("q_lora_rank", _DEFAULTS["q_lora_rank"])[1]
    latent = LatentAttention.parse({"q_lora_rank": c.size("q_lora_rank", rank) if rank else None, **sizes}, c.where)
    return {**fields, "num_kv_heads": fields["num_heads"], "head_dim": latent.head_dim, "latent": latent}


def _write_latent_line(s: ModelSpec) -> Fields:
    latent = s.latent or LatentAttention(**{key: _DEFAULTS[key] for key in _SIZES})
    own = {key: getattr(latent, key) for key in ("q_lora_rank", *_SIZES)}
    line = {key: value for key, value in write_llama_line(s).items() if key != "head_dim"}
    return {**line, **own, "attention_bias": False, **write_deepseek_experts(s), "moe_layer_freq": 1}


def _balance(c: Reader) -> Fields:
    over = "sequence" if c.flag("seq_aux", True) else "batch"
    return {"balance_loss": c.number("aux_loss_alpha", 0.0), "balance_over": over}


def _read_deepseek_v2(c: Reader) -> Fields:
    """Scores by softmax; of the groups with the best experts where the method says so; no renormalisation."""
    fields = _read_latent_line(c)
    c.refuse("scoring_func", ("softmax", None), "DeepSeek-V2 scores by softmax; take `deepseek_v3` for a sigmoid")
    c.refuse("norm_topk_prob", (False, None), "DeepSeek-V2 does not renormalise the weights of a token's experts")
    c.refuse("topk_method", ("greedy", "group_limited_greedy"), "known: greedy, group_limited_greedy")
    is_limited = c.raw("topk_method", "greedy")[1] == "group_limited_greedy"
    groups = {"num_groups": c.size("n_group"), "groups_per_token": c.size("topk_group")} if is_limited else {}
    router = {"scale": c.positive("routed_scaling_factor", 1.0), **groups, **_balance(c)}
    return {**fields, **read_deepseek_experts(c, fields["num_layers"], num_shared=2), "router": router}


def _write_deepseek_v2(s: ModelSpec) -> Fields:
    gate = s.gate
    return {
        **_write_latent_line(s),
        "routed_scaling_factor": gate.scale,
        "topk_method": "group_limited_greedy" if gate.num_groups > 1 else "greedy",
        "n_group": gate.num_groups,
        "topk_group": gate.groups_per_token,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "aux_loss_alpha": gate.balance_loss,
        "seq_aux": gate.balance_over == "sequence",
    }


def _read_deepseek_v3(c: Reader) -> Fields:
    """Sigmoid scores with a bias that keeps loads even; of the groups whose best two add up to most."""
    fields = _read_latent_line(c)
    c.refuse("scoring_func", ("sigmoid", None), "DeepSeek-V3 scores by a sigmoid; take `deepseek_v2` for softmax")
    c.refuse("topk_method", ("noaux_tc", None), "known: noaux_tc")
    router = {
        "score": "sigmoid",
        "bias": True,
        "renormalise": "before_drop" if c.flag("norm_topk_prob", True) else "none",
        "scale": c.positive("routed_scaling_factor", 2.5),
        "num_groups": c.optional_size("n_group", 8) or 1,
        "groups_per_token": c.optional_size("topk_group", 4) or 1,
        **_balance(c),
    }
    experts = read_deepseek_experts(c, fields["num_layers"], first_dense=3, num_shared=1)
    return {**fields, **experts, "router": router}


def _write_deepseek_v3(s: ModelSpec) -> Fields:
    gate = s.gate
    return {
        **_write_latent_line(s),
        "routed_scaling_factor": gate.scale,
        "topk_method": "noaux_tc",
        "n_group": gate.num_groups,
        "topk_group": gate.groups_per_token,
        "scoring_func": "sigmoid",
        "aux_loss_alpha": gate.balance_loss,
        "seq_aux": gate.balance_over == "sequence",
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
    }


LATENT_ARCHITECTURES = {
    "deepseek_v2": Architecture("DeepseekV2ForCausalLM", _read_deepseek_v2, _write_deepseek_v2),
    "deepseek_v3": Architecture("DeepseekV3ForCausalLM", _read_deepseek_v3, _write_deepseek_v3),
}
"""`model_type` → architecture."""
