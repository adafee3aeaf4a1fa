"""Hugging Face `config.json` ↔ ModelSpec, for the architectures that the decoder covers.

One row of `ARCHITECTURES` per `model_type`: how its keys are read, and how they are written. Both key
styles of rotary positions are understood: `rope_theta` + `rope_scaling` (transformers 4) and
`rope_parameters` (transformers 5); both are written, so that either version reads the same model.

Defaults of absent keys are those of the transformers configuration classes, except that the sizes of
a model must be spelt out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.hf_experts import EXPERT_ARCHITECTURES
from meshwright.core.hf_latent import LATENT_ARCHITECTURES
from meshwright.core.hf_llama import (
    read_llama,
    read_mistral,
    read_qwen2,
    read_qwen3,
    write_llama,
    write_mistral,
    write_qwen2,
    write_qwen3,
)
from meshwright.core.hf_reader import HF_ACTIVATIONS, Architecture, Fields, Reader, head_dim_of
from meshwright.core.model import ModelSpec
from meshwright.core.router import RouterSpec
from meshwright.core.units import counted


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
    reader = Reader(data, where)
    _refuse_other_heads(reader)
    _refuse_quantised(reader)
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
    for field, want, got in _fields(spec, again):
        if want != got:
            raise UnsupportedError(
                f"{spec.name}: a Hugging Face `{spec.family}` configuration cannot say {field} = {want!r} "
                f"(it would be read as {got!r})"
            )
    return data


def _fields(spec: ModelSpec, again: ModelSpec) -> Iterator[tuple[str, Any, Any]]:
    """(name, value, value read again) of what a configuration must say: of a router each field, but for those of
    training only."""
    for field in type(spec).model_fields:
        if field != "router":
            yield field, getattr(spec, field), getattr(again, field)
    want, got = spec.gate.in_use, again.gate.in_use
    for field in RouterSpec.model_fields:
        yield f"router.{field}", getattr(want, field), getattr(got, field)


def _refuse_other_heads(c: Reader) -> None:
    """A classifier or question answerer has another head, whose weights the decoder has not."""
    classes = c.data.get("architectures") or ()
    if not isinstance(classes, list | tuple) or not all(isinstance(cls, str) for cls in classes):
        raise InputError(f"{c.where}: `architectures` is {classes!r}; a list of class names was expected")
    for cls in classes:
        if "For" in cls and not cls.endswith("ForCausalLM"):
            raise UnsupportedError(f"{c.where}: `{cls}` is not a language model; only causal language models are built")


def _refuse_quantised(c: Reader) -> None:
    table = c.data.get("quantization_config")
    if table is None:
        return
    how = table.get("quant_method") if isinstance(table, Mapping) else table
    kind = "FP8 weights" if how == "fp8" else "quantised weights"
    raise UnsupportedError(
        f"{c.where}: `quantization_config` is of {how!r}: {kind} are not read; convert the checkpoint to BF16 first "
        "(its publisher has the tool) and take the key out, or plan with a preset"
    )


def _refuse_other_layers(c: Reader, spec: ModelSpec) -> None:
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


# --- the GPT line: LayerNorm, biases everywhere, plain MLP -------------------------------------------------


def _read_gpt_line(c: Reader, hidden: int) -> Fields:
    heads = c.size(("n_head", "num_attention_heads"))
    for key in ("rope_scaling", "rope_parameters", "sliding_window"):
        c.refuse(key, (None,), "this architecture has no rotary positions and no window")
    return {
        "vocab_size": c.size("vocab_size"),
        "hidden_size": hidden,
        "num_layers": c.size(("n_layer", "num_hidden_layers")),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": head_dim_of(c, hidden, heads),
        "norm": "layernorm",
        "norm_eps": c.positive("layer_norm_epsilon", 1e-5),
        "gated_mlp": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tied_embeddings": c.flag("tie_word_embeddings", True),
        "initializer_std": c.number("initializer_range", 0.02),
    }


def _read_gpt2(c: Reader) -> Fields:
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


def _read_bloom(c: Reader) -> Fields:
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
    "llama": Architecture("LlamaForCausalLM", read_llama, write_llama),
    "mistral": Architecture("MistralForCausalLM", read_mistral, write_mistral),
    "qwen2": Architecture("Qwen2ForCausalLM", read_qwen2, write_qwen2),
    "qwen3": Architecture("Qwen3ForCausalLM", read_qwen3, write_qwen3),
    "bloom": Architecture("BloomForCausalLM", _read_bloom, _write_bloom),
    **EXPERT_ARCHITECTURES,
    **LATENT_ARCHITECTURES,
}
"""`model_type` → architecture. BLOOM is there for planning; its decoder is not built."""
