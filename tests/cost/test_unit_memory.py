"""Memory of FSDP by units, counted by hand on a model whose numbers are round."""

from __future__ import annotations

import pytest

from meshwright.core.job import Job
from meshwright.core.model import ModelSpec
from meshwright.core.profile import Stack
from meshwright.core.strategy import Strategy
from meshwright.cost.unit_memory import unit_memory

H, F, V, S = 512, 2048, 32768, 256
MODEL = ModelSpec(
    name="round", family="llama", vocab_size=V, hidden_size=H, num_layers=2, num_heads=8, num_kv_heads=8,
    head_dim=64, ffn_size=F, max_positions=S, norm="rmsnorm", positions="rope", activation="silu", gated_mlp=True,
)  # fmt: skip
LAYER = 4 * H * H + 3 * H * F + 2 * H
EMBEDDING, HEAD = V * H, V * H + H
FSDP = Stack(sharded_units=True, logit_bytes=2, loss_backward_bytes=2)


def held(stack=FSDP, s=S, b=1, rank=0, **choices):
    values = {"dp": 4, "zero": 3, "precision": "bf16-16", "micro_batch_size": b, **choices}
    strategy = Strategy.model_validate(values)
    return unit_memory(MODEL, Job(seq_length=s, global_batch_size=4 * b), strategy, rank, stack)


def test_shards_are_fp32_over_all_ranks():
    found = held()
    numel = 2 * LAYER + EMBEDDING + HEAD
    assert found.parameters_bytes == numel
    assert found.optimizer_bytes == 2 * numel


def test_with_few_tokens_the_peak_is_the_embeddings_backward():
    found = held(s=8)
    assert found.working_bytes == 3 * 2 * EMBEDDING, "parameters, and the gradient twice"
    assert found.gradients_bytes == 2 * LAYER + HEAD, "fp32 shards of a quarter: one byte an element"


def test_with_many_tokens_the_peak_is_the_loss():
    found = held(b=64)
    assert found.working_bytes == 2 * HEAD
    assert found.gradients_bytes == 0


def test_a_vocabulary_that_is_not_tensor_parallel_is_gathered_whole():
    apart, parts = (held(FSDP.model_copy(update={"vocabulary_apart": a}), s=8, dp=2, tp=2) for a in (True, False))
    assert (apart.working_bytes, parts.working_bytes) == (6 * EMBEDDING, 3 * EMBEDDING)
    assert apart.states_bytes == pytest.approx(parts.states_bytes, rel=0.15), "shards are as large"


def test_what_is_run_again_and_what_is_not_fused_count():
    usual, unfused = held(b=64), held(FSDP.model_copy(update={"fused_streams": False}), b=64)
    again = held(b=64, recompute="full")
    tokens = 64 * S
    assert unfused.activations_bytes - usual.activations_bytes == 2 * tokens * (2 * (8 * H + F) + 4 * H)
    assert again.activations_bytes < usual.activations_bytes
