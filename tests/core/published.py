"""Published configurations, written out in the keys of transformers 5, and the published parameter counts.

Independent of the catalogue: the tests compare both with models that transformers builds.
"""

from __future__ import annotations

from typing import Any


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 1024, "vocab_size": 50257}
    return {"model_type": "gpt2", "n_inner": None, "activation_function": "gelu_new", **sizes}


def _llama(
    width: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int, positions: int, **other: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        **other,
    }


def _other(kind: str, like: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {**like, "model_type": kind, **other}


def _deepseek(
    kind: str, shape: tuple[int, ...], experts: tuple[int, ...], mscale: float, **other: Any
) -> dict[str, Any]:
    """`shape` as for :func:`_llama` without key/value heads; `experts`: routed, shared, per token, width, dense layers
    in front."""
    width, ffn, layers, heads, vocab = shape
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": mscale, "mscale_all_dim": mscale, "original_max_position_embeddings": 4096}  # fmt: skip
    keys = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
            "first_k_dense_replace")  # fmt: skip
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    base = _llama(width, ffn, layers, heads, heads, vocab, 163840, rope_parameters=yarn)
    return _other(kind, base, rms_norm_eps=1e-6, **sizes, **dict(zip(keys, experts, strict=True)), **other)


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "gpt2": (_gpt2(768, 12, 12), 124_439_808),
    "gpt2-medium": (_gpt2(1024, 24, 16), 354_823_168),
    "gpt2-large": (_gpt2(1280, 36, 20), 774_030_080),
    "gpt2-xl": (_gpt2(1600, 48, 25), 1_557_611_200),
    "llama-2-7b": (_llama(4096, 11008, 32, 32, 32, 32000, 4096, rope_parameters=_rope(1e4)), 6_738_415_616),
    "llama-2-13b": (_llama(5120, 13824, 40, 40, 40, 32000, 4096, rope_parameters=_rope(1e4)), 13_015_864_320),
    "llama-2-70b": (_llama(8192, 28672, 80, 64, 8, 32000, 4096, rope_parameters=_rope(1e4)), 68_976_648_192),
    "llama-3-8b": (_llama(4096, 14336, 32, 32, 8, 128256, 8192, rope_parameters=_rope(5e5)), 8_030_261_248),
    "llama-3-70b": (_llama(8192, 28672, 80, 64, 8, 128256, 8192, rope_parameters=_rope(5e5)), 70_553_706_496),
    "llama-3-405b": (
        _llama(16384, 53248, 126, 128, 8, 128256, 131072, rope_parameters=_llama3_rope(8.0)),
        405_853_388_800,
    ),
    "llama-3.2-1b": (
        _llama(
            2048, 8192, 16, 32, 8, 128256, 131072,
            head_dim=64, tie_word_embeddings=True, rope_parameters=_llama3_rope(32.0),
        ),
        1_235_814_400,
    ),
    "llama-3.2-3b": (
        _llama(
            3072, 8192, 28, 24, 8, 128256, 131072,
            head_dim=128, tie_word_embeddings=True, rope_parameters=_llama3_rope(32.0),
        ),
        3_212_749_824,
    ),
    "mistral-7b": (
        _other(
            "mistral",
            _llama(4096, 14336, 32, 32, 8, 32000, 32768, rope_parameters=_rope(1e4)),
            sliding_window=4096,
        ),
        7_241_732_096,
    ),
    "qwen2-7b": (
        _other(
            "qwen2",
            _llama(3584, 18944, 28, 28, 4, 152064, 131072, rope_parameters=_rope(1e6)),
            rms_norm_eps=1e-6,
            use_sliding_window=False,
            sliding_window=131072,
        ),
        7_615_616_512,
    ),
    "qwen2.5-0.5b": (
        _other(
            "qwen2",
            _llama(896, 4864, 24, 14, 2, 151936, 32768, rope_parameters=_rope(1e6)),
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
        ),
        494_032_768,
    ),
    "qwen3-8b": (
        _other(
            "qwen3",
            _llama(4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128, rope_parameters=_rope(1e6)),
            rms_norm_eps=1e-6,
        ),
        8_190_735_360,
    ),
    "qwen3-0.6b": (
        _other(
            "qwen3",
            _llama(1024, 3072, 28, 16, 8, 151936, 40960, head_dim=128, rope_parameters=_rope(1e6)),
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
        ),
        596_049_920,
    ),
    "mixtral-8x7b": (
        _other(
            "mixtral",
            _llama(4096, 14336, 32, 32, 8, 32000, 32768, rope_parameters=_rope(1e6)),
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=None,
        ),
        46_702_792_704,
    ),
    "qwen1.5-moe-a2.7b": (
        _other(
            "qwen2_moe",
            _llama(2048, 5632, 24, 16, 16, 151936, 8192, rope_parameters=_rope(1e6)),
            rms_norm_eps=1e-6,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
        ),
        14_315_784_192,
    ),
    "qwen3-30b-a3b": (
        _other(
            "qwen3_moe",
            _llama(2048, 6144, 48, 32, 4, 151936, 40960, head_dim=128, rope_parameters=_rope(1e6)),
            rms_norm_eps=1e-6,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
        ),
        30_532_122_624,
    ),
    "dots.llm1": (
        _other(
            "dots1",
            _llama(4096, 10944, 62, 32, 32, 152064, 32768, rope_parameters=_rope(1e7)),
            n_routed_experts=128,
            n_shared_experts=2,
            num_experts_per_tok=6,
            moe_intermediate_size=1408,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            sliding_window=4096,
            max_window_layers=62,
        ),
        142_774_373_888,
    ),
    "deepseek-v2-lite": (
        _deepseek(
            "deepseek_v2", (2048, 10944, 27, 16, 102400), (64, 2, 6, 1408, 1), 0.707, q_lora_rank=None,
            aux_loss_alpha=0.001,
        ),
        15_706_484_224,
    ),
    "deepseek-v2": (
        _deepseek(
            "deepseek_v2", (5120, 12288, 60, 128, 102400), (160, 2, 6, 1536, 1), 0.707, q_lora_rank=1536,
            topk_method="group_limited_greedy", n_group=8, topk_group=3, routed_scaling_factor=16.0,
            aux_loss_alpha=0.003,
        ),
        235_741_434_880,
    ),
    "deepseek-v3": (
        _deepseek(
            "deepseek_v3", (7168, 18432, 61, 128, 129280), (256, 1, 8, 2048, 3), 1.0, q_lora_rank=1536, n_group=8,
            topk_group=4, routed_scaling_factor=2.5, norm_topk_prob=True, aux_loss_alpha=0.0001,
        ),
        671_026_404_352,
    ),
    "bloom-176b": (
        {
            "model_type": "bloom",
            "vocab_size": 250880,
            "hidden_size": 14336,
            "n_layer": 70,
            "n_head": 112,
            "seq_length": 2048,
        },
        176_247_271_424,
    ),
}  # fmt: skip
"""Name → (configuration, total number of parameters)."""
