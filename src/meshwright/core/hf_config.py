"""Hugging Face `config.json` ↔ ModelSpec, for the architectures that the decoder covers.

One row of `ARCHITECTURES` per `model_type`: how its keys are read, and how they are written. Both key
styles of rotary positions are understood: `rope_theta` + `rope_scaling` (transformers 4) and
`rope_parameters` (transformers 5); both are written, so that either version reads the same model.

Defaults of absent keys are those of the transformers configuration classes, except that the sizes of
a model must be spelt out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.model import ModelSpec, RopeScaling
from meshwright.core.units import counted

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
"""Hugging Face activation name → ours."""

HF_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}

_ABSENT = object()


class _Reader:
    """Typed access to a configuration; every error names the model and the key."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def raw(self, keys: str | tuple[str, ...], default: Any = _ABSENT) -> tuple[str, Any]:
        """(key, value) of the first key that is there; a key may have several spellings."""
        names = (keys,) if isinstance(keys, str) else keys
        for key in names:
            if key in self.data:
                return key, self.data[key]
        if default is _ABSENT:
            raise InputError(f"{self.where}: key `{names[0]}` is missing; it is needed to know the model's shape")
        return names[0], default

    def size(self, keys: str | tuple[str, ...], default: Any = _ABSENT) -> int:
        """A whole number above 0."""
        key, value = self.raw(keys, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{self.where}: `{key}` is {value!r}; a whole number above 0 was expected")
        return value

    def optional_size(self, keys: str | tuple[str, ...], default: int | None = None) -> int | None:
        """A size, or None where the key is null."""
        _, value = self.raw(keys, default)
        return None if value is None else self.size(keys, default)

    def number(self, keys: str | tuple[str, ...], default: Any = _ABSENT) -> float:
        key, value = self.raw(keys, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{self.where}: `{key}` is {value!r}; a number was expected")
        return float(value)

    def positive(self, keys: str | tuple[str, ...], default: Any = _ABSENT) -> float:
        """A number above 0, and finite."""
        value = self.number(keys, default)
        if not 0 < value < inf:
            raise InputError(
                f"{self.where}: `{self.raw(keys, default)[0]}` is {value:g}; a number above 0 was expected"
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        _, value = self.raw(key, default)
        if not isinstance(value, bool):
            raise InputError(f"{self.where}: `{key}` is {value!r}; true or false was expected")
        return value

    def activation(self, key: str, default: str) -> str:
        _, value = self.raw(key, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise UnsupportedError(f"{self.where}: activation `{key}` = {value!r} is not built; known: {known}")
        return ACTIVATIONS[value]

    def refuse(self, key: str, allowed: tuple[Any, ...], what: str) -> None:
        """Raise UnsupportedError where a key asks for something the decoder does not do."""
        value = self.data.get(key, allowed[0])
        if value not in allowed:
            raise UnsupportedError(f"{self.where}: `{key}` = {value!r}: {what}")


Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One `model_type`: reader and writer of what is not the same everywhere."""

    hf_class: str
    read: Callable[[_Reader], Fields]
    write: Callable[[ModelSpec], Fields]


def from_hf_config(data: Mapping[str, Any], name: str, where: str | None = None) -> ModelSpec:
    """The spec of a Hugging Face configuration.

    Args:
        data: the content of `config.json`, of transformers 4 or 5 style.
        name: the spec's name.
        where: what errors call the source, for instance a path; the name if None.

    Raises:
        InputError: a size is missing or is not a number, or sizes contradict each other.
        UnsupportedError: an unknown architecture, rotary scaling, activation or quantised weights.
    """
    where = where or name
    kind = data.get("model_type")
    if not isinstance(kind, str):
        raise InputError(f"{where}: key `model_type` is missing; this is not a Hugging Face model configuration")
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedError(f"{where}: architecture `{kind}` is not known; known: {known}")
    reader = _Reader(data, where)
    _refuse_other_heads(reader)
    reader.refuse("quantization_config", (None,), "quantised weights cannot be trained; take the unquantised model")
    spec = ModelSpec.parse({"name": name, "family": kind, **ARCHITECTURES[kind].read(reader)}, where)
    _refuse_other_layers(reader, spec)
    return spec


def to_hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The content of a `config.json` that transformers 4 and 5 read as this model.

    Raises:
        UnsupportedError: the architecture's configuration cannot say a field of the spec.
    """
    architecture = ARCHITECTURES[spec.family]
    data = {"architectures": [architecture.hf_class], "model_type": spec.family, **architecture.write(spec)}
    again = from_hf_config(data, spec.name)
    for field in type(spec).model_fields:
        want, got = getattr(spec, field), getattr(again, field)
        if want != got:
            raise UnsupportedError(
                f"{spec.name}: a Hugging Face `{spec.family}` configuration cannot say {field} = {want!r} "
                f"(it would be read as {got!r})"
            )
    return data


def _refuse_other_heads(c: _Reader) -> None:
    """A classifier or question answerer has another head, whose weights the decoder has not."""
    classes = c.data.get("architectures") or ()
    if not isinstance(classes, list | tuple) or not all(isinstance(cls, str) for cls in classes):
        raise InputError(f"{c.where}: `architectures` is {classes!r}; a list of class names was expected")
    for cls in classes:
        if "For" in cls and not cls.endswith("ForCausalLM"):
            raise UnsupportedError(f"{c.where}: `{cls}` is not a language model; only causal language models are built")


def _refuse_other_layers(c: _Reader, spec: ModelSpec) -> None:
    """What `layer_types` says must be what the other keys say; a mixture of kinds is not built."""
    kinds = c.data.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list | tuple) or len(kinds) != spec.num_layers:
        count = counted(len(kinds), "entry", "entries") if isinstance(kinds, list | tuple) else repr(kinds)
        raise InputError(
            f"{c.where}: `layer_types` has {count}; one for each of the {spec.num_layers} layers was expected"
        )
    built = "sliding_attention" if spec.sliding_window else "full_attention"
    other = next((kind for kind in kinds if kind != built), None)
    if other is not None:
        window = f"a window of {spec.sliding_window}" if spec.sliding_window else "no sliding window"
        raise UnsupportedError(
            f"{c.where}: `layer_types` has {other!r}, but the other keys say {window} in every layer: "
            "layers of several kinds are not built"
        )


def _head_dim(c: _Reader, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise InputError(f"{c.where}: {heads} attention heads do not divide the hidden size {hidden}")
    return hidden // heads


# --- the llama line: RMSNorm, rotary positions, gated MLP -------------------------------------------------


def _read_rope(c: _Reader, default_theta: float) -> Fields:
    """Theta and scaling, from `rope_parameters` or from `rope_theta` + `rope_scaling`."""
    nested = _rope_table(c)
    if any(isinstance(value, Mapping) for value in nested.values()):
        raise UnsupportedError(f"{c.where}: rotary parameters that differ by kind of layer are not built")
    rope = _Reader(nested, c.where)
    theta = rope.positive("rope_theta", c.positive("rope_theta", default_theta))
    for reader in (c, rope):
        reader.refuse("partial_rotary_factor", (None, 1, 1.0), "only rotation of the whole head is built")
    _, kind = rope.raw(("rope_type", "type"), "default")
    if kind not in ("default", "llama3"):
        raise UnsupportedError(f"{c.where}: rotary scaling of kind {kind!r} is not built; known: default, llama3")
    if kind == "default" and rope.raw("factor", None)[1] not in (None, 1):
        raise InputError(
            f"{c.where}: the rotary scaling has a factor of {rope.raw('factor')[1]!r} but no `rope_type` that uses it; "
            "add `rope_type`, or leave the factor out"
        )
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    return {
        "rope_theta": theta,
        "rope_scaling": {
            "factor": rope.positive("factor"),
            "low_freq_factor": rope.positive("low_freq_factor"),
            "high_freq_factor": rope.positive("high_freq_factor"),
            "original_max_positions": rope.size("original_max_position_embeddings", c.size("max_position_embeddings")),
        },
    }


def _rope_table(c: _Reader) -> Mapping[str, Any]:
    """`rope_scaling` or `rope_parameters`; where both are there, they must agree."""
    tables = {key: c.data[key] for key in ("rope_scaling", "rope_parameters") if c.data.get(key)}
    for key, table in tables.items():
        if not isinstance(table, Mapping):
            raise InputError(f"{c.where}: `{key}` is {table!r}; a table was expected")
    plain = [{"rope_type" if k == "type" else k: v for k, v in t.items() if k != "rope_theta"} for t in tables.values()]
    if len(plain) == 2 and plain[0] != plain[1]:
        raise InputError(f"{c.where}: `rope_scaling` and `rope_parameters` contradict each other; keep one of them")
    return next(iter(tables.values()), {})


def _write_rope(theta: float, scaling: RopeScaling | None) -> Fields:
    table: Fields = {"rope_type": "default"}
    if scaling:
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


def _read_llama_line(
    c: _Reader, *, eps: float = 1e-6, theta: float = 10000.0, head_dim: int | None = None, plain_heads: bool = False
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
    per_head = c.optional_size("head_dim", head_dim) or _head_dim(c, hidden, heads)
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


def _write_llama_line(s: ModelSpec) -> Fields:
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


def _read_llama(c: _Reader) -> Fields:
    bias = c.flag("attention_bias", False)
    own = {"qkv_bias": bias, "out_bias": bias, "mlp_bias": c.flag("mlp_bias", False)}
    return {**_read_llama_line(c, plain_heads=True), **own}


def _write_llama(s: ModelSpec) -> Fields:
    return {**_write_llama_line(s), "attention_bias": s.out_bias, "mlp_bias": s.mlp_bias}


def _read_mistral(c: _Reader) -> Fields:
    return {**_read_llama_line(c), "sliding_window": c.optional_size("sliding_window", 4096)}


def _write_mistral(s: ModelSpec) -> Fields:
    return {**_write_llama_line(s), "sliding_window": s.sliding_window}


def _read_qwen_window(c: _Reader, num_layers: int) -> int | None:
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


def _write_qwen_window(s: ModelSpec) -> Fields:
    return {
        "use_sliding_window": s.sliding_window is not None,
        "sliding_window": s.sliding_window,
        "max_window_layers": 0 if s.sliding_window else s.num_layers,
    }


def _read_qwen2(c: _Reader) -> Fields:
    fields = _read_llama_line(c)
    return {**fields, "qkv_bias": True, "sliding_window": _read_qwen_window(c, fields["num_layers"])}


def _write_qwen2(s: ModelSpec) -> Fields:
    return {**_write_llama_line(s), **_write_qwen_window(s)}


def _read_qwen3(c: _Reader) -> Fields:
    fields = _read_llama_line(c, head_dim=128)
    bias = c.flag("attention_bias", False)
    own = {"qk_norm": True, "qkv_bias": bias, "out_bias": bias}
    return {**fields, **own, "sliding_window": _read_qwen_window(c, fields["num_layers"])}


def _write_qwen3(s: ModelSpec) -> Fields:
    return {**_write_llama_line(s), **_write_qwen_window(s), "attention_bias": s.out_bias}


def _read_mixtral(c: _Reader) -> Fields:
    return {
        **_read_llama_line(c, eps=1e-5, theta=1e6),
        "sliding_window": c.optional_size("sliding_window", None),
        "num_experts": c.size("num_local_experts", 8),
        "experts_per_token": c.size("num_experts_per_tok", 2),
    }


def _write_mixtral(s: ModelSpec) -> Fields:
    own = {"num_local_experts": s.num_experts, "num_experts_per_tok": s.experts_per_token}
    return {**_write_llama_line(s), "sliding_window": s.sliding_window, **own}


# --- the GPT line: LayerNorm, biases everywhere, plain MLP -------------------------------------------------


def _read_gpt_line(c: _Reader, hidden: int) -> Fields:
    heads = c.size(("n_head", "num_attention_heads"))
    for key in ("rope_scaling", "rope_parameters", "sliding_window"):
        c.refuse(key, (None,), "this architecture has no rotary positions and no window")
    return {
        "vocab_size": c.size("vocab_size"),
        "hidden_size": hidden,
        "num_layers": c.size(("n_layer", "num_hidden_layers")),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": _head_dim(c, hidden, heads),
        "norm": "layernorm",
        "norm_eps": c.positive("layer_norm_epsilon", 1e-5),
        "gated_mlp": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tied_embeddings": c.flag("tie_word_embeddings", True),
        "initializer_std": c.number("initializer_range", 0.02),
    }


def _read_gpt2(c: _Reader) -> Fields:
    c.refuse("scale_attn_weights", (True,), "unscaled attention is not built")
    c.refuse("scale_attn_by_inverse_layer_idx", (False,), "attention scaled by the layer's index is not built")
    c.refuse("add_cross_attention", (False,), "cross attention is not built")
    hidden = c.size(("n_embd", "hidden_size"))
    return {
        **_read_gpt_line(c, hidden),
        "ffn_size": c.optional_size("n_inner", None) or 4 * hidden,
        "max_positions": c.size(("n_positions", "max_position_embeddings", "n_ctx")),
        "positions": "learned",
        "activation": c.activation("activation_function", "gelu_new"),
    }


def _write_gpt2(s: ModelSpec) -> Fields:
    return {
        "vocab_size": s.vocab_size,
        "n_positions": s.max_positions,
        "n_embd": s.hidden_size,
        "n_layer": s.num_layers,
        "n_head": s.num_heads,
        "n_inner": s.ffn_size,
        "activation_function": "gelu_new" if s.activation == "gelu_tanh" else HF_ACTIVATIONS[s.activation],
        "layer_norm_epsilon": s.norm_eps,
        "initializer_range": s.initializer_std,
        "tie_word_embeddings": s.tied_embeddings,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _read_bloom(c: _Reader) -> Fields:
    c.refuse("apply_residual_connection_post_layernorm", (False,), "a residual taken after the norm is not built")
    hidden = c.size(("hidden_size", "n_embed"))
    return {
        **_read_gpt_line(c, hidden),
        "ffn_size": 4 * hidden,
        "max_positions": c.size("seq_length", 2048),
        "positions": "alibi",
        "activation": "gelu_tanh",
        "embedding_norm": True,
    }


def _write_bloom(s: ModelSpec) -> Fields:
    return {
        "vocab_size": s.vocab_size,
        "seq_length": s.max_positions,
        "hidden_size": s.hidden_size,
        "n_layer": s.num_layers,
        "n_head": s.num_heads,
        "layer_norm_epsilon": s.norm_eps,
        "initializer_range": s.initializer_std,
        "tie_word_embeddings": s.tied_embeddings,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


ARCHITECTURES = {
    "gpt2": Architecture("GPT2LMHeadModel", _read_gpt2, _write_gpt2),
    "llama": Architecture("LlamaForCausalLM", _read_llama, _write_llama),
    "mistral": Architecture("MistralForCausalLM", _read_mistral, _write_mistral),
    "qwen2": Architecture("Qwen2ForCausalLM", _read_qwen2, _write_qwen2),
    "qwen3": Architecture("Qwen3ForCausalLM", _read_qwen3, _write_qwen3),
    "mixtral": Architecture("MixtralForCausalLM", _read_mixtral, _write_mixtral),
    "bloom": Architecture("BloomForCausalLM", _read_bloom, _write_bloom),
}
"""`model_type` → architecture. BLOOM is there for planning; its decoder is not built."""
