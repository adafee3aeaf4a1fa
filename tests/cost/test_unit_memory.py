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


def with_stack(**facts):
    return FSDP.model_copy(update=facts)


def test_what_is_run_again_and_what_is_not_fused_count():
    usual, unfused = held(b=64), held(with_stack(norm_copies=4, fused_gates=False), b=64)
    again = held(b=64, recompute="full")
    tokens = 64 * S
    assert unfused.activations_bytes - usual.activations_bytes == 2 * tokens * (2 * (8 * H + F) + 4 * H)
    assert again.activations_bytes < usual.activations_bytes


@pytest.mark.parametrize(
    ("facts", "elements"),
    [
        pytest.param({"transposes": 2}, 2 * H, id="copies in another order"),
        pytest.param({"keeps_fused_outputs": True}, 3 * H + 2 * F, id="q, k and v, gate and up, whole too"),
    ],
)
def test_what_each_layer_keeps_more(facts, elements):
    more = held(with_stack(**facts), b=64).activations_bytes - held(b=64).activations_bytes
    assert more == 2 * 2 * 64 * S * elements, "two layers of bf16"


def test_one_sequence_is_not_copied_in_another_order():
    assert held(with_stack(transposes=2, logit_bytes=64)) == held(with_stack(logit_bytes=64))


def test_masks_of_dropout_take_a_byte_each():
    more = held(with_stack(dropout=True), b=64).activations_bytes - held(b=64).activations_bytes
    assert more == 64 * S * H * (2 * 2 + 1), "two in each layer, one behind the embedding"


def test_when_the_heads_gradient_is_there_its_norm_is_not_gone():
    """Beside it stand what the layers keep and the norm's two tensors; of its logits nothing is left."""
    found = held(with_stack(loss_backward_bytes=0, logit_bytes=0), b=4)
    assert found.working_bytes == 3 * 2 * HEAD
    other = held(with_stack(loss_backward_bytes=0, logit_bytes=0, norm_copies=1), b=4)
    assert other.activations_bytes - found.activations_bytes == 2 * 4 * S * H * (2 * 2 + 1)


def test_gradients_of_a_gated_mlp_stand_beside_what_its_layer_keeps():
    """On a stage without a head: five tensors of its width, and the gradient of the weight behind them."""
    layout = {"dp": 2, "pp": 2, "b": 32}
    usual, more = held(**layout), held(with_stack(gate_gradients=5), **layout)
    tokens = 32 * S
    assert more.total_bytes - usual.total_bytes == 2 * (5 * tokens * F - 2 * tokens * H + F * H)


def test_a_stage_keeps_its_input_and_its_output_twice():
    first, last = held(dp=2, pp=2, b=32), held(dp=2, pp=2, b=32, rank=1)
    alone = held(with_stack(logit_bytes=0, loss_backward_bytes=0), dp=2, pp=2, b=32, rank=1)
    hidden = 2 * 32 * S * H
    layer = first.activations_bytes - (2 + 2) * hidden
    assert last.activations_bytes == layer + (1 + 2) * hidden + (2 + 2) * 32 * S * V
    assert alone.activations_bytes == layer + (1 + 2) * hidden


def test_the_embedding_is_gathered_ahead_of_the_first_layers_end_or_not():
    layout = {"dp": 2, "pp": 2, "b": 32}
    ahead, not_ahead = held(**layout), held(with_stack(prefetches_embedding=False), **layout)
    assert ahead.working_bytes - not_ahead.working_bytes == 2 * EMBEDDING


def test_what_runs_again_has_three_more_tensors_beside_it():
    layout = {"dp": 2, "pp": 2, "b": 64}
    hidden = 2 * 64 * S * H
    again, once = held(recompute="full", **layout), held(**layout)
    assert again.activations_bytes - once.activations_bytes == 3 * hidden


def test_buffers_of_sequence_parallelism_stay():
    layout = {"dp": 2, "tp": 2, "sequence": "megatron"}
    one, three = held(**layout), held(with_stack(num_sequence_buffers=3), **layout)
    assert three.buffers_bytes - one.buffers_bytes == 2 * 2 * S * H
