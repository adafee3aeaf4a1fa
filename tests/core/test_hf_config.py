"""Hugging Face configurations: exact parameter tables against transformers, both key styles, round trips, refusals."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from meshwright.core.errors import InputError, UnsupportedError
from meshwright.core.hf_config import ARCHITECTURES, from_hf_config, to_hf_config
from meshwright.core.model import ModelSpec
from meshwright.core.sources import load_model, model_names

from .published import PUBLISHED

# --- against transformers, on the meta device ----------------------------------------------------------------

WITHOUT_CLASS = ("deepseek", "mixture")
"""Architectures that transformers has no class for."""
NAMES = (
    (r"^(transformer|model)\.", ""),
    (r"^(wte|embed_tokens|word_embeddings)\b", "embedding"),
    (r"^wpe\b", "positions"),
    (r"^word_embeddings_layernorm\b", "embedding_norm"),
    (r"^(ln_f|norm)\b", "final_norm"),
    (r"^lm_head\b", "head"),
    (r"^h\.", "layers."),
    (r"\b(ln_1|input_layernorm)\b", "attention_norm"),
    (r"\b(ln_2|post_attention_layernorm)\b", "mlp_norm"),
    (r"\b(self_attn|self_attention|attn)\b", "attention"),
    (r"\b([qkvo])_proj\b", r"\1"),
    (r"\b(attention\.c_proj|attention\.dense)\b", "attention.o"),
    (r"\b(c_fc|dense_h_to_4h|up_proj)\b", "up"),
    (r"\b(mlp\.c_proj|dense_4h_to_h|down_proj)\b", "mlp.down"),
    (r"\bmlp\.mlp\.", "mlp."),
    (r"\bgate_proj\b", "gate"),
    (r"\b(q|kv)_a_proj(_with_mqa)?\b", r"latents.\1"),
    (r"\b(q|kv)_a_layernorm\b", r"latents.\1_norm"),
    (r"\b(q|kv)_b_proj\b", r"\1"),
)
"""Hugging Face parameter name → ours, by regular expressions in order."""


def _renamed(name: str) -> str:
    for pattern, ours in NAMES:
        name = re.sub(pattern, ours, name)
    return name


def _split(name: str, shape: tuple[int, ...], spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """One Hugging Face parameter as ours: fused ones taken apart, GPT-2's [in, out] matrices turned."""
    ours = _renamed(name)
    if spec.family == "gpt2" and len(shape) == 2 and ours.startswith("layers."):
        shape = shape[::-1]
    if re.search(r"attention\.(c_attn|query_key_value)", ours):
        third = (shape[0] // 3, *shape[1:])
        return {re.sub(r"c_attn|query_key_value", part, ours): third for part in "qkv"}
    if ours.endswith("mlp.experts.gate_up_proj"):
        at = ours.removesuffix(".gate_up_proj")
        half = (shape[0], shape[1] // 2, shape[2])
        return {f"{at}.{part}.weight": half for part in ("gate", "up")}
    if ours.endswith("mlp.experts.mlp.down") or ours.endswith("mlp.experts.down"):
        return {ours.rsplit(".experts", 1)[0] + ".experts.down.weight": shape}
    if len(shape) == 2 and shape[0] == spec.num_experts:
        ours = ours.replace("mlp.gate.weight", "mlp.router.weight")
    ours = re.sub(r"mlp\.shared_experts?\.(mlp\.)?", "mlp.shared.", ours).replace("shared_expert_gate", "shared_gate")
    return {ours: shape}


def _transformers_table(config: dict[str, Any], spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name → shape of the model that transformers builds from `config`, in our names, tied parameters once."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    options = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(config["model_type"], **options)
        )
    table: dict[str, tuple[int, ...]] = {}
    for name, parameter in made.named_parameters():
        table |= _split(name, tuple(parameter.shape), spec)
    return table


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_parameter_is_that_of_transformers(name: str) -> None:
    config, total = PUBLISHED[name]
    spec = from_hf_config(config, name)
    theirs = _transformers_table(config, spec)
    ours = {param.name: param.shape for param in spec.parameters()}
    assert ours == theirs
    assert spec.num_parameters == total


def test_table_of_transformers_sees_a_wrong_shape() -> None:
    config, _ = PUBLISHED["qwen3-0.6b"]
    spec = from_hf_config({**config, "head_dim": 64}, "wrong")
    assert {p.name: p.shape for p in spec.parameters()} != _transformers_table(config, spec)


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_is_the_published_configuration(name: str) -> None:
    assert load_model(name) == from_hf_config(PUBLISHED[name][0], name)


def test_bloom_formula() -> None:
    h, layers, vocab = 14336, 70, 250880
    assert load_model("bloom-176b").num_parameters == layers * (12 * h**2 + 13 * h) + vocab * h + 4 * h
    assert load_model("bloom-176b").num_parameters == 176_247_271_424


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("qwen1.5-moe-a2.7b", 14.3, 2.7),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("deepseek-moe-16b", 16.4, 2.8),
        ("deepseek-v2", 236, 21),
        ("deepseek-v3", 671, 37),
        ("dots.llm1", 142, 14),
        ("glam-64b-64e", 1162, 96.6),
        ("gshard-600b", 600, 1.3),
    ],
)
def test_published_numbers_of_parameters(name: str, total: float, active: float) -> None:
    """In billions, as the papers and model cards say; GShard's is the number in its name."""
    spec = load_model(name)
    assert spec.num_parameters / 1e9 == pytest.approx(total, rel=0.035 if name == "gshard-600b" else 0.006)
    assert spec.num_active_parameters / 1e9 == pytest.approx(active, rel=0.02)


# --- what transformers reads back ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", model_names())
def test_round_trip_through_hugging_face_keys(name: str) -> None:
    spec = load_model(name)
    assert from_hf_config(to_hf_config(spec), name) == spec


@pytest.mark.parametrize("name", [name for name in model_names() if load_model(name).family not in WITHOUT_CLASS])
def test_transformers_keeps_what_we_write(name: str) -> None:
    """spec → our keys → transformers' object → its keys → spec."""
    transformers = pytest.importorskip("transformers")
    spec = load_model(name)
    written = to_hf_config(spec)
    theirs = transformers.AutoConfig.for_model(**written).to_dict()
    if spec.family == "bloom":
        theirs["seq_length"] = written["seq_length"]
    assert from_hf_config(theirs, name) == spec


@pytest.mark.parametrize("family", [f for f in ARCHITECTURES if f not in ("bloom", *WITHOUT_CLASS)])
def test_defaults_of_absent_keys_are_those_of_transformers(family: str) -> None:
    """Only the sizes are given; everything else must be read as the configuration class fills it in."""
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32,
    }  # fmt: skip
    if family == "gpt2":
        sizes = {"vocab_size": 64, "n_embd": 256, "n_layer": 2, "n_head": 2, "n_positions": 32}
    if family in ("dots1", "deepseek_v2", "deepseek_v3"):
        sizes |= {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        sizes["num_hidden_layers"] = 4
    full = transformers.AutoConfig.for_model(family, **sizes).to_dict()
    assert from_hf_config({"model_type": family, **sizes}, "tiny") == from_hf_config(full, "tiny")


def _tiny(**changes: Any) -> dict[str, Any]:
    config, _ = PUBLISHED["llama-3-8b"]
    return {k: v for k, v in {**config, **changes}.items() if v != "absent"}


def _latent(**changes: Any) -> dict[str, Any]:
    return {**PUBLISHED["deepseek-v3"][0], **changes}


def test_rope_of_both_styles_reads_alike() -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    old = _tiny(rope_parameters="absent", rope_theta=5e5, rope_scaling=scaling)
    new = _tiny(rope_parameters={**scaling, "rope_theta": 5e5})
    assert from_hf_config(old, "m") == from_hf_config(new, "m")
    assert from_hf_config(new, "m").rope_scaling is not None
    plain = _tiny(rope_parameters="absent", rope_theta=5e5, rope_scaling=None)
    assert from_hf_config(plain, "m") == from_hf_config(_tiny(), "m")
    assert from_hf_config(_tiny(rope_parameters="absent"), "m").rope_theta == 10000.0


def test_biases_and_windows() -> None:
    llama = from_hf_config(_tiny(attention_bias=True, mlp_bias=True), "m")
    assert (llama.qkv_bias, llama.out_bias, llama.mlp_bias) == (True, True, True)
    qwen = from_hf_config(PUBLISHED["qwen2-7b"][0], "m")
    assert (qwen.qkv_bias, qwen.out_bias, qwen.sliding_window) == (True, False, None)
    windowed = {**PUBLISHED["qwen2-7b"][0], "use_sliding_window": True, "max_window_layers": 0}
    assert from_hf_config(windowed, "m").sliding_window == 131072
    assert from_hf_config({**windowed, "max_window_layers": 28}, "m").sliding_window is None
    qwen3 = from_hf_config({**PUBLISHED["qwen3-8b"][0], "attention_bias": True}, "m")
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.out_bias) == (True, True, True)
    mistral = from_hf_config({**PUBLISHED["mistral-7b"][0], "sliding_window": None}, "m")
    assert mistral.sliding_window is None


def test_head_dim_absent_and_explicit() -> None:
    assert from_hf_config(_tiny(), "m").head_dim == 128
    assert from_hf_config(_tiny(head_dim=None), "m").head_dim == 128
    wide = from_hf_config(_tiny(head_dim=160), "m")
    assert (wide.head_dim, wide.heads_size) == (160, 32 * 160)
    assert from_hf_config(_tiny(num_key_value_heads="absent"), "m").num_kv_heads == 32


# --- refusals ------------------------------------------------------------------------------------------------

REFUSED = {
    "unknown architecture": (_tiny(model_type="mamba"), UnsupportedError, r"`mamba`.*gpt2, llama, mistral"),
    "no model type": (_tiny(model_type="absent"), InputError, "`model_type`"),
    "linear scaling": (_tiny(rope_parameters={"rope_type": "linear", "factor": 2.0}), UnsupportedError, "'linear'"),
    "old style": (_tiny(rope_parameters="absent", rope_scaling={"type": "dynamic"}), UnsupportedError, "'dynamic'"),
    "yarn of no size": (_tiny(rope_parameters={"rope_type": "yarn"}), InputError, "original_max_position_embeddings"),
    "yarn not rounded": (
        _tiny(rope_parameters={"rope_type": "yarn", "factor": 2, "truncate": False}),
        UnsupportedError,
        "truncate",
    ),
    "latent biases": (_latent(attention_bias=True), UnsupportedError, "`attention_bias` = True"),
    "latent halves": (_latent(rope_interleave=False), UnsupportedError, "lie in pairs"),
    "latent few heads": (_latent(num_key_value_heads=8), UnsupportedError, "as many of them as heads"),
    "wide values": (_latent(v_head_dim=200), InputError, "v_head_dim 200 is more than"),
    "softmax v3": (_latent(scoring_func="softmax"), UnsupportedError, "take `deepseek_v2`"),
    "fp8": (_latent(quantization_config={"quant_method": "fp8"}), UnsupportedError, "FP8 weights are not read"),
    "by layer": (_tiny(rope_parameters={"full_attention": {"rope_theta": 1e4}}), UnsupportedError, "kind of layer"),
    "partial": (_tiny(partial_rotary_factor=0.5), UnsupportedError, "partial_rotary_factor"),
    "activation": (_tiny(hidden_act="relu"), UnsupportedError, "'relu'"),
    "quantised": (_tiny(quantization_config={"bits": 4}), UnsupportedError, "quantised"),
    "classifier": (_tiny(architectures=["LlamaForSequenceClassification"]), UnsupportedError, "causal"),
    "missing vocabulary": (_tiny(vocab_size="absent"), InputError, "`vocab_size` is missing"),
    "missing layers": (_tiny(num_hidden_layers="absent"), InputError, "`num_hidden_layers` is missing"),
    "text for a size": (_tiny(hidden_size="4096"), InputError, "`hidden_size` is '4096'"),
    "zero heads": (_tiny(num_attention_heads=0), InputError, "`num_attention_heads` is 0"),
    "heads": (_tiny(num_attention_heads=24), InputError, "24 attention heads do not divide"),
    "key/value heads": (_tiny(num_key_value_heads=5), InputError, "num_kv_heads 5"),
    "odd head": (_tiny(head_dim=65), InputError, "odd"),
    "number for the classes": (_tiny(architectures=7), InputError, "`architectures` is 7"),
    "numbers for the classes": (_tiny(architectures=[7]), InputError, "list of class names"),
    "negative epsilon": (_tiny(rms_norm_eps=-1), InputError, "`rms_norm_eps` is -1"),
    "infinite epsilon": (_tiny(rms_norm_eps=1e999), InputError, "`rms_norm_eps` is inf"),
    "no theta": (_tiny(rope_theta=0, rope_parameters="absent"), InputError, "`rope_theta` is 0"),
    "negative spread": (_tiny(initializer_range=-1), InputError, "initializer_std"),
    "a factor nobody uses": (_tiny(rope_parameters={"factor": 8.0}), InputError, "factor of 8.0 but no `rope_type`"),
    "two scalings": (
        _tiny(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default"}),
        InputError,
        "contradict",
    ),
    "rotary number": (_tiny(rope_parameters=7), InputError, "`rope_parameters` is 7"),
    "a window in some layers": (
        _tiny(layer_types=["sliding_attention"] + ["full_attention"] * 31),
        UnsupportedError,
        "`layer_types` has 'sliding_attention'.*no sliding window",
    ),
    "few layer types": (
        _tiny(layer_types=["full_attention"]),
        InputError,
        "has 1 entry; one for each of the 32 layers",
    ),
    "gpt2 with rotary scaling": (
        {**PUBLISHED["gpt2"][0], "rope_scaling": {"type": "linear", "factor": 2.0}},
        UnsupportedError,
        "no rotary positions",
    ),
    "more layers than a table holds": (_tiny(num_hidden_layers=10**9), InputError, "`num_layers`.*100000"),
    "mixed windows": (
        {**PUBLISHED["qwen2-7b"][0], "use_sliding_window": True, "max_window_layers": 20},
        UnsupportedError,
        "20 of 28 layers",
    ),
    "mistral without kv heads": (
        {k: v for k, v in PUBLISHED["mistral-7b"][0].items() if k != "num_key_value_heads"},
        InputError,
        "`num_key_value_heads` is missing",
    ),
    "gpt2 scaling": (
        {**PUBLISHED["gpt2"][0], "scale_attn_by_inverse_layer_idx": True},
        UnsupportedError,
        "scale_attn_by_inverse_layer_idx",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str) -> None:
    config, error, message = REFUSED[case]
    with pytest.raises(error, match=message) as raised:
        from_hf_config(config, "here.json")
    assert str(raised.value).startswith("here.json: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "change", "field"),
    [
        ("llama-3-8b", {"qkv_bias": True}, "out_bias|qkv_bias"),
        ("llama-3-8b", {"qk_norm": True}, "qk_norm"),
        ("gpt2", {"num_kv_heads": 4}, "num_kv_heads"),
        ("mistral-7b", {"mlp_bias": True}, "mlp_bias"),
        ("mixtral-8x7b", {"router": None}, r"router\.renormalise = 'none' \(it would be read as 'before_drop'\)"),
    ],
)
def test_what_a_configuration_cannot_say_is_refused(name: str, change: dict[str, Any], field: str) -> None:
    spec = load_model(name).model_copy(update=change)
    with pytest.raises(UnsupportedError, match=f"cannot say ({field})"):
        to_hf_config(spec)


def test_names_are_unique() -> None:
    for name in model_names():
        counts = Counter(param.name for param in load_model(name).parameters())
        assert max(counts.values()) == 1
