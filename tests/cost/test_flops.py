"""FLOPs: sums of terms against closed forms of the papers, a count of real matrix products, and the shares of ranks."""

from __future__ import annotations

import pytest

from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.sources import load_model, model_names
from meshwright.core.strategy import Strategy
from meshwright.cost.flops import (
    forward_flops_per_token,
    forward_terms,
    hardware_flops,
    layer_forward_terms,
    mfu,
    model_flops,
    stage_flops,
    total_flops,
    training_flops_per_token,
)
from meshwright.cost.params import matmul_parameters


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", model_names())
def test_terms_sum_to_the_closed_form(name: str, causal: bool) -> None:
    """2·N_mm + 4·L·a·d·s_eff per token, and three times that in training."""
    spec, s = load_model(name), 2048
    s_eff = s // 2 if causal else s
    widths = spec.heads_size + spec.values_size  # the same, but for latent attention
    expected = 2 * matmul_parameters(spec) + 2 * spec.num_layers * widths * s_eff
    assert forward_flops_per_token(spec, s, causal=causal) == expected
    assert training_flops_per_token(spec, s, causal=causal) == 3 * expected


def test_dense_gelu_layer_is_24hh_plus_4sh() -> None:
    spec, s = load_model("gpt2"), 1024
    h = spec.hidden_size
    assert total_flops(layer_forward_terms(spec, s)) == 24 * h * h + 4 * s * h


def test_every_term_has_a_name_and_a_source() -> None:
    terms = forward_terms(load_model("mixtral-8x7b"), 128)
    assert len({term.name for term in terms}) == len(terms)
    assert all(term.source and term.flops > 0 for term in terms)
    assert {"router", "head"} <= {term.name for term in terms}


def megatron_step_flops(
    num_layers: int, hidden_size: int, vocab_size: int, seq_length: int, batch_size: int, *, recompute: bool
) -> float:
    """FLOPs of one step of a GPT with an MLP of 4h, in closed form; a witness for sums of terms.

    With full recompute 96·B·s·L·h²·(1 + s/6h + V/16Lh), without it 72·B·s·L·h²·(1 + s/6h + V/12Lh).

    Source: Narayanan et al. 2021, §5.1, eq. 3; without recompute derived from it.
    """
    h, s, layers = hidden_size, seq_length, num_layers
    factor, head = (96, 16) if recompute else (72, 12)
    return factor * batch_size * s * layers * h**2 * (1 + s / (6 * h) + vocab_size / (head * layers * h))


def training_s(
    num_parameters: float, num_tokens: float, num_devices: int, flops_per_s: float, *, recompute: bool = True
) -> float:
    """Seconds to train on `num_tokens` at `flops_per_s` achieved by each device: 8·T·N/(n·X), 6 without recompute.

    Source: Narayanan et al. 2021, §5.1, eq. 4.
    """
    return (8 if recompute else 6) * num_tokens * num_parameters / (num_devices * flops_per_s)


def _gpt(num_layers: int, hidden_size: int, heads: int, vocab_size: int) -> ModelSpec:
    sizes = {"num_layers": num_layers, "hidden_size": hidden_size, "ffn_size": 4 * hidden_size}
    split = {"num_heads": heads, "num_kv_heads": heads, "head_dim": hidden_size // heads}
    return load_model("gpt2").model_copy(update={**sizes, **split, "vocab_size": vocab_size})


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shape", [(96, 12288, 96, 51200), (40, 6144, 48, 51200), (128, 25600, 160, 51200)])
def test_megatron_formula(shape: tuple[int, int, int, int], recompute: str) -> None:
    """Narayanan et al. 2021, eq. 3: GPT-3 and two more rows of their table 1."""
    layers, h, heads, vocab = shape
    spec, job = _gpt(layers, h, heads, vocab), Job(seq_length=2048, global_batch_size=1536)
    closed = megatron_step_flops(layers, h, vocab, 2048, 1536, recompute=recompute == "full")
    assert hardware_flops(spec, job, recompute) == pytest.approx(closed, rel=1e-12)


def test_gpt3_iteration() -> None:
    """4.511e18 FLOP per iteration with recomputation, 1.369 times 6·N per token."""
    flops = megatron_step_flops(96, 12288, 51200, 2048, 1536, recompute=True)
    assert flops == pytest.approx(4.511e18, rel=2e-4)
    six_n = 6 * (12 * 96 * 12288**2 + 51200 * 12288) * 2048 * 1536
    assert flops / six_n == pytest.approx(1.369, abs=5e-4)


def test_published_training_times() -> None:
    """Narayanan et al. 2021, §5.1: 34 days for GPT-3 on 1,024 GPUs, 84 days for 1T on 3,072."""
    day = 86400
    assert training_s(175e9, 300e9, 1024, 140e12) / day == pytest.approx(33.9, abs=0.05)
    assert training_s(1e12, 450e9, 3072, 163e12) / day == pytest.approx(83.2, abs=0.05)
    assert training_s(1e12, 450e9, 3072, 163e12, recompute=False) == pytest.approx(
        0.75 * training_s(1e12, 450e9, 3072, 163e12)
    )


def test_utilisation() -> None:
    spec, job = load_model("llama-3-8b"), Job(seq_length=4096, global_batch_size=64)
    ideal_s = model_flops(spec, job) / (16 * 989e12)
    assert mfu(spec, job, 2 * ideal_s, 16, 989e12) == pytest.approx(0.5)
    assert hardware_flops(spec, job, "none") == model_flops(spec, job)
    assert 1.3 < hardware_flops(spec, job, "full") / model_flops(spec, job) < 4 / 3


def _tiny(name: str = "qwen3-8b", **changes: object) -> ModelSpec:
    small = {"num_layers": 5, "hidden_size": 32, "num_heads": 8, "num_kv_heads": 8, "head_dim": 8, "ffn_size": 48}
    return load_model(name).model_copy(update={**small, "vocab_size": 64, **changes})


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("pp", [1, 2, 5])
def test_stages_share_the_work(tp: int, pp: int) -> None:
    """Where everything divides, tp · Σ stages = the model, in each of forward, training and recomputation."""
    spec, job = _tiny(), Job(seq_length=16, global_batch_size=6)
    strategy = Strategy(tp=tp, pp=pp, micro_batch_size=3, num_micro_batches=2)
    stages = [stage_flops(spec, job, strategy, stage, causal=False) for stage in range(pp)]
    forward = 48 * forward_flops_per_token(spec, 16)
    assert tp * sum(stage.forward for stage in stages) == forward
    for recompute in ("none", "full"):
        of_step = tp * strategy.num_micro_batches * sum(stage.training(recompute) for stage in stages)
        assert of_step == hardware_flops(spec, job, recompute)
    assert [stage.head > 0 for stage in stages] == [False] * (pp - 1) + [True]


def test_stage_is_causal_by_default() -> None:
    spec, job = _tiny(), Job(seq_length=16, global_batch_size=1)
    assert stage_flops(spec, job, Strategy(), 0).forward == 16 * forward_flops_per_token(spec, 16, causal=True)


def test_key_and_value_projections_are_repeated() -> None:
    """2 key/value heads over tp = 8: each rank computes one whole head's projections, not a quarter of one."""
    spec = _tiny(num_kv_heads=2)
    by_name = {term.name: term.flops for term in layer_forward_terms(spec, 16, tp=8)}
    assert by_name["key and value projections"] == 2 * 32 * 2 * 8
    assert by_name["query projection"] == 2 * 32 * 8


def test_uneven_pieces_are_priced_by_the_largest() -> None:
    spec = _tiny(ffn_size=50, vocab_size=10)
    by_name = {term.name: term.flops for term in layer_forward_terms(spec, 16, tp=4)}
    assert by_name["mlp"] == 2 * 32 * 13 * 3
    job = Job(seq_length=16, global_batch_size=1)
    assert stage_flops(spec, job, Strategy(tp=4), 0).head == 16 * 2 * 32 * 3


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "qwen3-8b"])
def test_count_of_real_matrix_products(name: str) -> None:
    """PyTorch's counter over the transformers model agrees to the FLOP (full mask, forward and training)."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    from meshwright.core.hf_config import to_hf_config

    spec = _tiny(name, num_kv_heads=8 if name == "gpt2" else 2, hidden_size=64)
    if name == "gpt2":
        spec = spec.model_copy(update={"max_positions": 16})
    config = transformers.AutoConfig.for_model(**to_hf_config(spec), attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tokens = torch.randint(0, spec.vocab_size, (3, 16))
    with FlopCounterMode(display=False) as forward:
        loss = model(tokens, use_cache=False).logits.sum()
    assert forward.get_total_flops() == 48 * forward_flops_per_token(spec, 16)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward.get_total_flops() + backward.get_total_flops() == 48 * training_flops_per_token(spec, 16)
