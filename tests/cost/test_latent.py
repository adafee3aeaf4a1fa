"""What latent attention costs, beside published numbers and sums by hand."""

from __future__ import annotations

import pytest

from meshwright.core.job import Job
from meshwright.core.sources import load_model
from meshwright.core.strategy import Strategy
from meshwright.cost.activations import layer_terms, total_bytes
from meshwright.cost.flops import training_flops_per_token
from meshwright.cost.kv_cache import kv_token_bytes
from meshwright.cost.traffic import micro_batch_traffic


@pytest.mark.parametrize(
    ("name", "kilobytes"), [("deepseek-v3", 70.272), ("llama-3.1-405b", 516.096), ("deepseek-v2-lite", 31.104)]
)
def test_a_token_of_the_cache(name: str, kilobytes: float) -> None:
    """Zhao et al. 2025 (Insights into DeepSeek-V3), table 1; the last by hand: 27 · 576 · 2."""
    assert kv_token_bytes(load_model(name), Strategy(precision="bf16")) == 1000 * kilobytes
    by_tp = kv_token_bytes(load_model(name), Strategy(precision="bf16", tp=8))
    assert by_tp == 1000 * kilobytes / (8 if name.startswith("llama") else 1)


def test_flops_of_training_are_the_published_ones() -> None:
    """250 GFLOPs a token at 4,096 tokens: Zhao et al. 2025, table 2."""
    assert training_flops_per_token(load_model("deepseek-v3"), 4096, causal=True) == pytest.approx(250e9, rel=0.003)


def test_a_layer_keeps_little_before_its_heads() -> None:
    """By hand, of a token of V3 in bf16 and fp32 statistics, in the dense first layer."""
    spec, a, d, v = load_model("deepseek-v3"), 128, 192, 128
    latents = 2 * (1536 + 512) + 64
    heads = a * (3 * d + d + v)  # q, k, v, what attention makes, and what o takes of it
    kept = 2 * (4 * 7168 + latents + heads + 3 * 18432) + 4 * (a + 4)
    assert total_bytes(layer_terms(spec, Strategy(precision="bf16"), 1, 1, 0)) == kept


@pytest.mark.parametrize(("name", "width"), [("deepseek-v3", 1536 + 512 + 64), ("deepseek-v2-lite", 2048 + 512 + 64)])
def test_gradients_of_latents_are_summed_instead_of_the_hidden_state(name: str, width: int) -> None:
    spec = load_model(name).model_copy(update={"num_layers": 1, "dense_layers": None, "num_experts": 0})
    spec = spec.model_copy(update={"experts_per_token": 0, "router": None, "shared_ffn_size": None})
    job, strategy = Job(seq_length=64, global_batch_size=1), Strategy(tp=2, precision="bf16")
    rows = micro_batch_traffic(spec, job, strategy, 0).rows
    sent = rows["all_reduce", "tp", "backward"]
    assert sent.payload_bytes == 2 * 64 * (width + 2 * spec.hidden_size)  # those of the mlp and of the head
    assert sent.calls == 5
