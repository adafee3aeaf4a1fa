"""The forecast of kept activations against what autograd really keeps, by unique storage."""

import pytest
import torch

from meshwright.core.job import Job
from meshwright.core.strategy import Strategy
from meshwright.cost.activations import (
    embedding_terms,
    head_terms,
    layer_input_terms,
    layer_terms,
    loss_terms,
    recomputed_core_terms,
    total_bytes,
)
from meshwright.cost.memory import activations_bytes
from tests.models.tiny import SPECS, random_model, random_tokens
from tests.parallel.layouts import latent

EXACT = {name: spec for name, spec in SPECS.items() if spec.gate.capacity_factor is None}
"""Where experts have a capacity, what they keep depends on what is dropped."""
ALL = pytest.mark.parametrize("spec", EXACT.values(), ids=EXACT.keys())
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
B, S = 3, 43


def kept_bytes(model, run):
    """Bytes of the storages that autograd keeps during `run`, parameters and constant tables left out."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = run()  # held, so that no storage is freed and its address used again
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    assert out.requires_grad
    return sum(size for address, size in storages.items() if address not in own)


@ALL
@pytest.mark.parametrize("precision", DTYPES)
def test_a_layer_keeps_what_is_forecast(spec, precision):
    model = random_model(spec, DTYPES[precision])
    model(random_tokens(spec, B, S))  # makes the rotary tables
    x = torch.randn(B, S, spec.hidden_size, dtype=DTYPES[precision], requires_grad=True)
    measured = kept_bytes(model, lambda: model.layers["1"](x))
    assert total_bytes(layer_terms(spec, Strategy(precision=precision), B, S, 1)) == measured


@ALL
@pytest.mark.parametrize("precision", DTYPES)
def test_a_model_keeps_what_is_forecast(spec, precision):
    """A plain embedding keeps no flags of ids that lie elsewhere; all else is the same."""
    model, strategy = random_model(spec, DTYPES[precision]), Strategy(precision=precision)
    model(random_tokens(spec, B, S))
    terms = [
        *embedding_terms(spec, strategy, B, S),
        *(term for layer in range(spec.num_layers) for term in layer_terms(spec, strategy, B, S, layer)),
        *head_terms(spec, strategy, B, S),
    ]
    tokens = random_tokens(spec, B, S)
    measured = kept_bytes(model, lambda: model(tokens))
    assert total_bytes(terms) - B * S == measured


@pytest.mark.parametrize("num_heads", [1, 2])
def test_narrow_values_of_one_head_are_not_copied(num_heads):
    """What o takes of them is a view of what attention has made."""
    spec = latent(num_heads=num_heads, num_kv_heads=num_heads)
    model = random_model(spec, torch.float64)
    model(random_tokens(spec, B, S))
    x = torch.randn(B, S, spec.hidden_size, dtype=torch.float64, requires_grad=True)
    expected = total_bytes(layer_terms(spec, Strategy(precision="fp64"), B, S))
    assert kept_bytes(model, lambda: model.layers["1"](x)) == expected


def test_with_a_capacity_the_forecast_is_what_full_experts_keep():
    spec = SPECS["switch"]
    model = random_model(spec)
    model(random_tokens(spec, B, S))
    x = torch.randn(B, S, spec.hidden_size, generator=torch.Generator().manual_seed(1)).requires_grad_()
    forecast = total_bytes(layer_terms(spec, Strategy(), B, S, 1))
    assert kept_bytes(model, lambda: model.layers["1"](x)) < forecast
    with torch.no_grad():
        model.layers["1"].mlp.router.weight.zero_()  # all to the first, which takes its capacity
    room = spec.gate.capacity(S, spec.num_experts, 1)
    per_row = 8 + 4 * (2 * spec.hidden_size + 2 * spec.ffn_size)
    measured = kept_bytes(model, lambda: model.layers["1"](x))
    assert forecast - measured == B * (S - room) * per_row


def test_other_activations_keep_what_is_forecast():
    for change in ({"activation": "gelu"}, {"gated_mlp": False}):
        spec = SPECS["llama"].model_copy(update=change)
        model = random_model(spec)
        model(random_tokens(spec, B, S))
        x = torch.randn(B, S, spec.hidden_size, requires_grad=True)
        measured = kept_bytes(model, lambda model=model, x=x: model.layers["1"](x))
        assert total_bytes(layer_terms(spec, Strategy(), B, S)) == measured


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_divides_heads_and_ffn_only(tp):
    spec = SPECS["qwen3-wide-heads"]  # 4 heads, 2 key/value heads: at tp 4 each is held twice
    whole = {term.name: term.bytes for term in layer_terms(spec, Strategy(), B, S)}
    part = {term.name: term.bytes for term in layer_terms(spec, Strategy(tp=tp), B, S)}
    token = B * S * 4
    by_tp = {name for name in whole if part[name] * tp == whole[name]}
    assert by_tp >= {"q", "attention output", "log-sum-exp", "gate", "up", "product"}
    assert part["k"] == part["v"] == token * 16 * max(1, 2 // tp)
    assert part["q and k before their norms"] == token * 16 * (4 // tp + max(1, 2 // tp))
    same = {name for name in whole if part[name] == whole[name]}
    assert same == {name for name in whole if "norm" in name and "q and k" not in name} | {
        "attention input",
        "mlp input",
    }


@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallel_divides_everything(tp):
    """Korthikanti et al. 2022, §4.2: all of 34·s·b·h over t. Here: every term of a layer, of the head, of norms."""
    spec = SPECS["llama"].model_copy(update={"num_heads": 4, "num_kv_heads": 4})
    split = Strategy(tp=tp, sequence="megatron")
    for terms in (layer_terms, layer_input_terms, recomputed_core_terms, head_terms):
        whole, part = (total_bytes(terms(spec, strategy, B, 64)) for strategy in (Strategy(), split))
        assert part * tp == whole
    in_tp_only = total_bytes(layer_terms(spec, Strategy(tp=tp), B, 64))
    assert in_tp_only > total_bytes(layer_terms(spec, split, B, 64))


def test_llama_70b_layer_is_as_published_by_hand():
    """8h + 4ad + 4gd + 6f + 4a bytes per token in bf16, and 8 of statistics (h=8192, a=64, g=8, d=128, f=28672)."""
    change = {"hidden_size": 8192, "num_heads": 64, "num_kv_heads": 8, "head_dim": 128, "ffn_size": 28672}
    spec = SPECS["llama"].model_copy(update=change)
    assert total_bytes(layer_terms(spec, Strategy(precision="bf16"), 1, 1)) == 274_688 + 8


def test_recompute_keeps_one_hidden_state():
    spec = SPECS["llama"]
    (term,) = layer_input_terms(spec, Strategy(recompute="full", precision="bf16"), B, S)
    assert term.bytes == 2 * B * S * spec.hidden_size


def test_selective_recompute_drops_what_the_core_makes():
    spec = SPECS["llama"]
    whole = layer_terms(spec, Strategy(tp=2), B, S)
    dropped = recomputed_core_terms(spec, Strategy(tp=2), B, S)
    assert {term.name for term in dropped} == {"attention output", "log-sum-exp"}
    assert all(term in whole for term in dropped)


def test_ends_stand_on_the_end_stages():
    spec, job = SPECS["gpt2"].model_copy(update={"num_layers": 3}), Job(seq_length=S, global_batch_size=B)
    strategy = Strategy(pp=3, micro_batch_size=B)
    layer, front = (total_bytes(terms(spec, strategy, B, S)) for terms in (layer_terms, embedding_terms))
    back = total_bytes(head_terms(spec, strategy, B, S)) + total_bytes(loss_terms(spec, strategy, B, S))
    stages = [activations_bytes(spec, job, strategy, stage) for stage in range(3)]
    assert stages == [front + layer, layer, layer + back]
    alone = activations_bytes(spec, job, Strategy(micro_batch_size=B), 0)
    assert alone == front + 3 * layer + back


def test_a_rank_of_cp_looks_up_its_own_tokens():
    spec = SPECS["gpt2"]
    whole = embedding_terms(spec, Strategy(), B, 40)
    part = embedding_terms(spec, Strategy(context={"degree": 4}), B, 40)
    assert [4 * term.bytes for term in part] == [term.bytes for term in whole]


def test_statistics_are_at_least_fp32():
    spec = SPECS["gpt2"]
    exponentials = loss_terms(spec, Strategy(tp=2, precision="bf16"), B, S)[0]
    assert exponentials.bytes == B * S * 31 * 4  # 61 rows: the first rank has 31; always at least fp32
