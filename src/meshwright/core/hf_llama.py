"""Hugging Face configurations of the llama line: RMSNorm, rotary positions, gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.hf_reader import HF_ACTIVATIONS, Fields, Reader, head_dim_of
from meshwright.core.latent import RopeScaling, YarnScaling
from meshwright.core.model import ModelSpec


def _read_rope(c: Reader, default_theta: float) -> Fields:
    """Theta and scaling, from `rope_parameters` or from `rope_theta` + `rope_scaling`."""
    nested = _rope_table(c)
    if any(isinstance(value, Mapping) for value in nested.values()):
        raise UnsupportedError(f"{c.where}: rotary parameters that differ by kind of layer are not built")
    rope = Reader(nested, c.where)
    theta = rope.positive("rope_theta", c.positive("rope_theta", default_theta))
    for reader in (c, rope):
        reader.refuse("partial_rotary_factor", (None, 1, 1.0), "only rotation of the whole head is built")
    _, kind = rope.raw(("rope_type", "type"), "default")
    if kind not in ("default", "llama3", "yarn"):
        raise UnsupportedError(f"{c.where}: rotary scaling of kind {kind!r} is not built; known: default, llama3, yarn")
    if kind == "default" and rope.raw("factor", None)[1] not in (None, 1):
        raise InputError(
            f"{c.where}: the rotary scaling has a factor of {rope.raw('factor')[1]!r} but no `rope_type` that uses it; "
            "add `rope_type`, or leave the factor out"
        )
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind == "yarn":
        return {"rope_theta": theta, "rope_scaling": _read_yarn(c, rope)}
    return {
        "rope_theta": theta,
        "rope_scaling": {
            "factor": rope.positive("factor"),
            "low_freq_factor": rope.positive("low_freq_factor"),
            "high_freq_factor": rope.positive("high_freq_factor"),
            "original_max_positions": rope.size("original_max_position_embeddings", c.size("max_position_embeddings")),
        },
    }


def _read_yarn(c: Reader, rope: Reader) -> Fields:
    rope.refuse("truncate", (True,), "bounds of YaRN that are not rounded are not built")
    most, factor = c.size("max_position_embeddings"), rope.raw("factor", None)[1]
    original = rope.size("original_max_position_embeddings", *(() if factor is None else (most,)))
    numbers = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
    return {
        "kind": "yarn",
        "factor": most / original if factor is None else rope.positive("factor"),
        "original_max_positions": original,
        **{key: rope.positive(key) for key in numbers if rope.data.get(key)},
    }


def _rope_table(c: Reader) -> Mapping[str, Any]:
    """`rope_scaling` or `rope_parameters`; where both are there, they must agree."""
    tables = {key: c.data[key] for key in ("rope_scaling", "rope_parameters") if c.data.get(key)}
    for key, table in tables.items():
        if not isinstance(table, Mapping):
            raise InputError(f"{c.where}: `{key}` is {table!r}; a table was expected")
    plain = [{"rope_type" if k == "type" else k: v for k, v in t.items() if k != "rope_theta"} for t in tables.values()]
    if len(plain) == 2 and plain[0] != plain[1]:
        raise InputError(f"{c.where}: `rope_scaling` and `rope_parameters` contradict each other; keep one of them")
    return next(iter(tables.values()), {})


def _write_rope(theta: float, scaling: RopeScaling | YarnScaling | None) -> Fields:
    table: Fields = {"rope_type": "default"}
    if isinstance(scaling, YarnScaling):
        table = scaling.model_dump(exclude={"kind", "original_max_positions"}, exclude_none=True)
        table |= {"rope_type": "yarn", "original_max_position_embeddings": scaling.original_max_positions}
    elif scaling:
        table = {
            "rope_type": scaling.kind,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return {
        "rope_theta": theta,
        "rope_scaling": table if scaling else None,
        "rope_parameters": {**table, "rope_theta": theta},
    }


def read_llama_line(
    c: Reader, *, eps: float = 1e-6, theta: float = 10000.0, head_dim: int | None = None, plain_heads: bool = False
) -> Fields:
    """What all of them share.

    Args:
        c: the configuration.
        eps: the class's default of `rms_norm_eps`.
        theta: the class's default of `rope_theta`.
        head_dim: the class's default of `head_dim`; None means hidden size over heads.
        plain_heads: whether an absent `num_key_value_heads` means as many as query heads.
    """
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    if not plain_heads:
        c.raw("num_key_value_heads")
    per_head = c.optional_size("head_dim", head_dim) or head_dim_of(c, hidden, heads)
    if per_head % 2:
        raise InputError(f"{c.where}: head_dim {per_head} is odd; rotary positions rotate pairs")
    return {
        "vocab_size": c.size("vocab_size"),
        "hidden_size": hidden,
        "num_layers": c.size("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": c.optional_size("num_key_value_heads") or heads,
        "head_dim": per_head,
        "ffn_size": c.size("intermediate_size"),
        "max_positions": c.size("max_position_embeddings"),
        "norm": "rmsnorm",
        "norm_eps": c.positive("rms_norm_eps", eps),
        "positions": "rope",
        **_read_rope(c, theta),
        "activation": c.activation("hidden_act", "silu"),
        "gated_mlp": True,
        "tied_embeddings": c.flag("tie_word_embeddings", False),
        "initializer_std": c.number("initializer_range", 0.02),
    }


def write_llama_line(s: ModelSpec) -> Fields:
    """Inverse of :func:`read_llama_line`."""
    return {
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "num_hidden_layers": s.num_layers,
        "num_attention_heads": s.num_heads,
        "num_key_value_heads": s.num_kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.ffn_size,
        "max_position_embeddings": s.max_positions,
        "rms_norm_eps": s.norm_eps,
        **_write_rope(s.rope_theta, s.rope_scaling),
        "hidden_act": HF_ACTIVATIONS[s.activation],
        "tie_word_embeddings": s.tied_embeddings,
        "initializer_range": s.initializer_std,
        "attention_dropout": 0.0,
    }


def read_llama(c: Reader) -> Fields:
    """Llama 1 to 3."""
    bias = c.flag("attention_bias", False)
    own = {"qkv_bias": bias, "out_bias": bias, "mlp_bias": c.flag("mlp_bias", False)}
    return {**read_llama_line(c, plain_heads=True), **own}


def write_llama(s: ModelSpec) -> Fields:
    """Inverse of :func:`read_llama`."""
    return {**write_llama_line(s), "attention_bias": s.out_bias, "mlp_bias": s.mlp_bias}


def read_mistral(c: Reader) -> Fields:
    """Mistral."""
    return {**read_llama_line(c), "sliding_window": c.optional_size("sliding_window", 4096)}


def write_mistral(s: ModelSpec) -> Fields:
    """Inverse of :func:`read_mistral`."""
    return {**write_llama_line(s), "sliding_window": s.sliding_window}


def read_qwen_window(c: Reader, num_layers: int) -> int | None:
    """The window, where every layer has it; None where none has. A mixture is not built."""
    window = c.optional_size("sliding_window", 4096) if c.flag("use_sliding_window", False) else None
    if window is None:
        return None
    first = c.raw("max_window_layers", 28)[1]
    kinds = c.data.get("layer_types") or ["full_attention" if i < first else "sliding" for i in range(num_layers)]
    full = sum(kind == "full_attention" for kind in kinds)
    if 0 < full < num_layers:
        raise UnsupportedError(
            f"{c.where}: {full} of {num_layers} layers see everything, the others a window of {window}: "
            "a mixture is not built; set `use_sliding_window` to false"
        )
    return None if full else window


def write_qwen_window(s: ModelSpec) -> Fields:
    """Inverse of :func:`read_qwen_window`."""
    return {
        "use_sliding_window": s.sliding_window is not None,
        "sliding_window": s.sliding_window,
        "max_window_layers": 0 if s.sliding_window else s.num_layers,
    }


def read_qwen2(c: Reader) -> Fields:
    """Qwen2 and Qwen2.5."""
    fields = read_llama_line(c)
    return {**fields, "qkv_bias": True, "sliding_window": read_qwen_window(c, fields["num_layers"])}


def write_qwen2(s: ModelSpec) -> Fields:
    """Inverse of :func:`read_qwen2`."""
    return {**write_llama_line(s), **write_qwen_window(s)}


def read_qwen3(c: Reader) -> Fields:
    """Qwen3."""
    fields = read_llama_line(c, head_dim=128)
    bias = c.flag("attention_bias", False)
    own = {"qk_norm": True, "qkv_bias": bias, "out_bias": bias}
    return {**fields, **own, "sliding_window": read_qwen_window(c, fields["num_layers"])}


def write_qwen3(s: ModelSpec) -> Fields:
    """Inverse of :func:`read_qwen3`."""
    return {**write_llama_line(s), **write_qwen_window(s), "attention_bias": s.out_bias}
