"""Kernels of a layer from a measured profile: what must hold whatever the figures are."""

from __future__ import annotations

import pytest

from meshwright.core.job import Job
from meshwright.core.profile import Stack
from meshwright.core.sources import load_cluster, network_reach, stack_of
from meshwright.core.strategy import Strategy
from meshwright.cost.compute import Collectives, Passes, stage_compute
from meshwright.cost.flops import layer_forward_terms, total_flops
from meshwright.cost.kernels import layer_kernels, rates
from meshwright.cost.sending import transfers_s
from meshwright.cost.terms import total_s
from meshwright.planner.price import Pricer
from tests.shapes import make_model

A100 = load_cluster("8xa100")
UNFUSED = Stack(fused_attention=False)
NOTHING = Collectives(Passes())


def speed(matmul_efficiency: float = 0.75):
    profile = A100.device.profile.model_copy(update={"matmul_efficiency": matmul_efficiency})
    return rates(A100.device, profile, "bf16", 2)


def big(head_dim: int = 128, layers: int = 8):
    return make_model(
        num_layers=layers, hidden_size=8192, num_heads=64, num_kv_heads=64, head_dim=head_dim, ffn_size=32768
    )


@pytest.mark.parametrize("m", [1, 127, 2048, 16384])
def test_a_product_is_never_faster_than_peak_or_memory(m):
    seconds = speed().product_s(m, 4096, 4096)
    assert seconds >= 2 * m * 4096 * 4096 / (0.75 * 312e12)
    assert seconds >= 2 * (m * 4096 + 4096 * 4096 + m * 4096) / 2039e9


def test_small_products_reach_less_and_large_ones_what_the_profile_says():
    def reached(m: int) -> float:
        return 2 * m * 8192 * 8192 / speed().product_s(m, 8192, 8192) / 312e12

    assert reached(128) < reached(1024) < reached(16384)
    assert reached(16384) == pytest.approx(0.75, rel=0.03)


def test_rows_that_tensor_cores_cannot_take_whole_are_slow():
    aligned, not_aligned = speed().product_s(2048, 2048, 104, 32), speed().product_s(2048, 2048, 108, 32)
    assert not_aligned > 4 * aligned


def test_products_of_a_layer_agree_with_its_flops():
    """At an efficiency of 1 and large sizes the seconds are FLOPs over peak: no product is forgotten, none twice."""
    model, job = big(), Job(seq_length=8192, global_batch_size=8)
    strategy = Strategy(micro_batch_size=4, num_micro_batches=2, precision="bf16")
    kernels = layer_kernels(model, job, strategy, speed(1.0), Stack())
    flops = total_flops(t for t in layer_forward_terms(model, 8192) if not t.name.startswith("attention"))
    assert kernels.products.forward == pytest.approx(4 * 8192 * flops / 312e12, rel=0.02)
    assert kernels.products.backward == pytest.approx(2 * kernels.products.forward, rel=0.02)


def test_unfused_attention_pays_for_every_score():
    job, strategy = Job(seq_length=4096, global_batch_size=1), Strategy(precision="bf16")
    fused, unfused = (layer_kernels(big(), job, strategy, speed(), stack).attention for stack in (Stack(), UNFUSED))
    assert unfused.forward > 2 * fused.forward
    dropped = layer_kernels(big(), job, strategy, speed(), UNFUSED.model_copy(update={"dropout": True})).attention
    assert dropped.forward > unfused.forward


def test_dropped_probabilities_are_priced_as_passes_over_scores():
    model, split = big(), Strategy(tp=8, precision="bf16")
    job = Job(seq_length=2048, global_batch_size=1)
    dropped = job.model_copy(update={"attention_dropout": 0.1})
    fused, unfused, slow = (
        layer_kernels(model, j, split, speed(), stack)
        for j, stack in ((job, Stack()), (job, UNFUSED), (dropped, Stack()))
    )
    assert fused.attention.forward < unfused.attention.forward < slow.attention.forward
    assert fused.products == slow.products
    assert unfused.streams == slow.streams


def test_the_host_is_a_floor_and_no_more():
    job = Job(seq_length=128, global_batch_size=1)
    model, strategy = make_model(num_layers=8), Strategy(precision="bf16", recompute="full")
    bare = stage_compute(model, job, strategy, A100, 0, NOTHING, Stack())
    stack = Stack(layer_forward_s=1e-3, layer_backward_s=1.5e-3)
    held = stage_compute(model, job, strategy, A100, 0, NOTHING, stack)
    assert total_s(held.forward) == pytest.approx(8e-3)
    assert total_s(held.backward) == pytest.approx(8 * 2.5e-3)
    assert total_s(bare.forward) < 8e-3
    large = Job(seq_length=8192, global_batch_size=1)
    assert stage_compute(big(), large, strategy, A100, 0, NOTHING, stack) == stage_compute(
        big(), large, strategy, A100, 0, NOTHING, Stack()
    )


def test_stacks_and_networks_are_found_by_their_words():
    assert stack_of("vtrain_single | vTrain validation ground truth").name == "megatron-deepspeed-vtrain"
    assert stack_of("megatron_ptdp_sc21 | Megatron-LM (SC21) | DeepSpeed ZeRO-3").name == "deepspeed-zero3"
    assert stack_of("nobody knows").name == "meshwright"
    assert network_reach("4x Omni-Path 100 Gb/s per node").collective_share < 0.5
    assert network_reach("carrier pigeons").reached == 1.0


def test_what_a_stack_hides_is_not_seen():
    """Reductions that chunks hide, tensor-parallel sums under products: less of both, and never less than nothing."""
    model, job = big(), Job(seq_length=4096, global_batch_size=16)
    strategy = Strategy(dp=4, tp=2, zero=1, micro_batch_size=1, num_micro_batches=4, precision="bf16")
    usual = Pricer(model, A100, job, Stack()).forecast(strategy).step_time
    hidden = Pricer(model, A100, job, Stack(exposed_gradient_share=0.0)).forecast(strategy).step_time
    blocking = Pricer(model, A100, job, Stack(overlaps_gradients=False)).forecast(strategy).step_time
    assert hidden.data_comm_exposed_s < usual.data_comm_exposed_s < blocking.data_comm_exposed_s
    under = Pricer(model, A100, job, Stack(hidden_tensor_share=1.0)).forecast(strategy).step_time
    assert under.pipeline_s < usual.pipeline_s


def test_a_pipeline_that_blocks_pays_for_its_transfers_on_every_rank():
    model, job = big(), Job(seq_length=4096, global_batch_size=16)
    strategy = Strategy(dp=1, tp=4, pp=2, micro_batch_size=1, num_micro_batches=16, precision="bf16")
    beside, blocking, scattered = (
        Pricer(model, A100, job, Stack(transfers=kind)).forecast(strategy).step_time.pipeline_s
        for kind in ("beside", "blocking", "blocking-scattered")
    )
    assert beside < scattered
    assert beside < blocking
    slow = Pricer(model, A100, job, Stack(transfers="blocking", transfer_s=1e-3)).forecast(strategy).step_time
    assert slow.pipeline_s == pytest.approx(blocking + 2e-3 * 17), "each way, of each micro-batch and the way in"


def test_what_a_stack_holds_is_named_and_added():
    model, job = big(), Job(seq_length=2048, global_batch_size=8)
    strategy = Strategy(dp=2, pp=4, num_micro_batches=4, zero=1, precision="bf16", recompute="full")
    own = Pricer(model, A100, job).forecast(strategy).memory
    stack = Stack(name="made", copy_bytes={"bf16": 2}, keeps_outputs=True, context_bytes=1e9, allocator_reserve=1.1)
    more = Pricer(model, A100, job, stack).forecast(strategy).memory.total_bytes - own.total_bytes
    outputs = 4 * 2048 * 8192 * 2
    parameters = own.parameters_bytes // 2
    expected = 1e9 + (2 * parameters + outputs) + 0.1 * (own.total_bytes + 2 * parameters + outputs)
    assert more == pytest.approx(expected, rel=0.01)


def test_gradients_in_one_row_take_room_where_nothing_is_sharded():
    model, job = big(), Job(seq_length=2048, global_batch_size=8)
    plain, rows = Stack(name="made"), Stack(name="made", unsharded_copy_bytes={"fp16": 2})

    def held(zero: int, stack: Stack) -> int:
        strategy = Strategy(dp=8, zero=zero, precision="fp16", recompute="full")
        return Pricer(model, A100, job, stack).memory(strategy, 0).total_bytes

    assert held(0, rows) - held(0, plain) == 2 * model.num_parameters
    assert held(1, rows) == held(1, plain)


def test_deepspeeds_pipeline_divides_over_tp_what_a_stage_sends():
    """Eight ranks of a node that each sent all would share its network."""
    model = make_model(num_layers=8, hidden_size=4096, num_heads=32, num_kv_heads=32, ffn_size=16384)
    job, cluster = Job(seq_length=2048, global_batch_size=8), load_cluster("2x8xa100")
    strategy = Strategy(tp=8, pp=2, num_micro_batches=4, micro_batch_size=2, precision="fp16")
    stack = stack_of("bloom_prequel")
    blocked = stack.model_copy(update={"transfers": "blocking"})
    (divided_s,), (whole_s,) = (transfers_s(model, job, strategy, cluster, which) for which in (stack, blocked))
    assert divided_s < 0.5 * whole_s


def test_the_stack_with_most_words_is_meant():
    gpt = "galvatron_memory | Galvatron profiled memory galvatron/models/gpt/configs/memory_profiling_bf16_hidden1600"
    assert stack_of(gpt).name == "galvatron-gpt"
    assert not stack_of(f"{gpt} | config 1_2_4_vtp_sp; rank 0").vocabulary_apart
    assert stack_of("galvatron_memory | Galvatron profiled memory").name == "galvatron"
    later = "galvatron_memory | galvatron/models/gpt/configs/memory_profiling_bf16_llama2-7b_all.json | config 1_2_4"
    assert stack_of(f"{later}_sp; rank 0").name == "galvatron-llama"
    assert stack_of(f"{later}_vtp_sp; rank 0").name == "galvatron-llama-vocabulary-parallel"


def test_ranks_that_share_experts_multiply_the_rows_of_all():
    """Of 64 experts each of 8 ranks reads 8, and multiplies as many rows: as long, less 56 experts' bytes."""
    model = make_model(num_layers=2, hidden_size=2048, num_heads=16, num_kv_heads=16, ffn_size=8192, num_experts=64,
                       experts_per_token=8, expert_ffn_size=768)  # fmt: skip
    job = Job(seq_length=256, global_batch_size=8)
    alone = layer_kernels(model, job, Strategy(dp=8, precision="bf16"), speed(), Stack())
    shared = layer_kernels(model, job, Strategy(dp=8, precision="bf16", expert={"degree": 8}), speed(), Stack())
    assert shared.products.forward < 0.5 * alone.products.forward
    assert shared.streams.forward > alone.streams.forward, "rows that travel are sorted once more"
    narrow = model.model_copy(update={"ffn_size": 768})
    same = layer_kernels(narrow, job, Strategy(dp=8, precision="bf16"), speed(), Stack())
    assert same.streams == alone.streams, "a layer of experts has no feed-forward width of dense ones"


def test_gradients_of_weights_may_sum_over_any_number_of_rows():
    assert speed().product(1003, 4096, 4096).backward < 1.2 * speed().product(1008, 4096, 4096).backward


def test_gradients_of_micro_batches_are_added_where_the_stack_does_so():
    model, job, cluster = big(), Job(seq_length=1024, global_batch_size=8), load_cluster("8xa100")
    strategy = Strategy(tp=8, num_micro_batches=8, precision="fp16")
    none = Collectives(Passes())
    seconds = {}
    for num_bytes in (0, 8, 16):
        stack = Stack(gradient_sum_bytes={"fp16": num_bytes, "bf16": 99})
        backward = stage_compute(model, job, strategy, cluster, 0, none, stack).backward
        seconds[num_bytes] = sum(term.seconds for term in backward if term.name == "gradient sums")
    assert seconds[0] == 0
    assert seconds[16] == pytest.approx(2 * seconds[8])
    least = sum(p.numel for p in model.parameters() if len(p.shape) == 2) / 8 * 8 / speed().bytes_per_s
    assert seconds[8] == pytest.approx(least, rel=0.1)


def test_each_kind_of_group_takes_buffers():
    stack, job = Stack(communicator_bytes=10**9), Job(seq_length=1024, global_batch_size=8)
    cluster, held = load_cluster("8xa100"), []
    for sizes in ({"tp": 8}, {"tp": 4, "pp": 2}):
        strategy = Strategy(num_micro_batches=8, **sizes)
        own, under = (Pricer(big(), cluster, job, s).forecast(strategy).memory.total_bytes for s in (Stack(), stack))
        held.append(under - own)
    assert held[1] - held[0] == pytest.approx(10**9, rel=0.1)
    assert held[0] >= 10**9
