"""ZeRO 2 and 3: shards of gradients and parameters, blocks in working memory, sharding over nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.core.errors import InputError
from meshwright.core.model import ModelSpec
from meshwright.core.plan import Plan
from meshwright.models.build import build
from meshwright.run.engine import make_mesh, parallelize
from meshwright.run.parity import find_mismatch
from tests.parallel.layouts import gpt2, llama, make_plan, qwen3
from tests.parallel.mutations import without
from tests.parallel.runs import (
    SEED,
    SGD,
    SHORT_PARITY,
    assembled,
    counted_batches,
    dataset,
    make_engine,
    own_batches,
    plain_model,
    train,
    weights,
)

LLAMA, TIED, LEARNED = llama(num_layers=3), qwen3(), gpt2(num_layers=2)
KEPT = {"zero": 3, "keep_gathered": True}


def mismatches(rank: int, world: int, plans: list[str]) -> list[str]:
    """What differs from one process, plan by plan."""
    found = []
    for text in plans:
        plan = Plan.from_toml(text)
        found.append(str(find_mismatch(plan, make_mesh(plan), num_steps=SHORT_PARITY)))
    return found


def _layouts() -> dict[str, list[Plan]]:
    stages = ({"zero": 2}, {"zero": 3}, KEPT)
    return {
        "one rank": [make_plan(LLAMA, num_micro_batches=2, **stage) for stage in stages],
        "three ranks": [make_plan(TIED, dp=3, num_micro_batches=2, zero=3, prefetch=ahead) for ahead in (0, 1, 2, 9)],
        "models": [make_plan(model, dp=2, **stage) for model in (TIED, LEARNED) for stage in stages],
        "accumulation": [make_plan(LLAMA, dp=2, num_micro_batches=3, recompute="full", **stage) for stage in stages],
        "tensor": [make_plan(TIED, dp=2, tp=2, num_micro_batches=2, **stage) for stage in stages],
        "pipeline": [make_plan(TIED, dp=2, pp=2, num_micro_batches=3, **stage) for stage in stages],
        "pipeline, in each micro-batch": [
            make_plan(TIED, dp=2, pp=2, num_micro_batches=3, reduce_each=True, **stage) for stage in stages
        ],
    }


TILED = (1, 2, 3, 7)
"""Of 16, 8 and 24 rows, and a head of 29: some divide, some do not."""


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", [LLAMA, TIED, LEARNED], ids=lambda model: model.name)
def test_tiles_equal_one_process(ranks, model, recompute):
    plans = [
        make_plan(model, dp=2, zero=3, tile=tile, prefetch=ahead, num_micro_batches=2, recompute=recompute)
        for tile, ahead in zip(TILED, (1, 0, 1, 2), strict=True)
        if tile <= min(model.kv_size, 7)
    ]
    found = ranks(mismatches, 2, [plan.to_toml() for plan in plans], timeout_s=120)
    assert {text for by_rank in found for text in by_rank} == {"None"}


def test_tiles_of_tensor_and_pipeline_ranks(ranks):
    plans = [
        make_plan(LLAMA, dp=2, tp=2, zero=3, tile=3),
        make_plan(LLAMA, dp=2, pp=2, zero=3, reduce_each=True, tile=2),
    ]
    found = ranks(mismatches, 4, [plan.to_toml() for plan in plans], timeout_s=120)
    assert {text for by_rank in found for text in by_rank} == {"None"}


def tiles_at_once(rank: int, world: int, text: str) -> tuple[int, int]:
    engine = make_engine(Plan.from_toml(text))
    train(engine, dataset(engine.plan), range(1))
    return engine.parallel.tiles.most_gathered, engine.parallel.states.working_bytes


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_no_more_tiles_are_gathered_than_promised(ranks, prefetch):
    """Working memory: tiles of parameters and of gradients, norms, and the ends."""
    plans = [make_plan(LLAMA, dp=2, zero=3, tile=tile, prefetch=prefetch) for tile in (1, 4)]
    (most_whole, whole), (most, tiled) = [ranks(tiles_at_once, 2, plan.to_toml())[0] for plan in plans]
    assert most_whole == 0
    assert most == 1 + prefetch
    largest = -(-29 // 4) * 16  # rows of the head's largest tile, padded to the ranks already
    ends = 29 * 16  # the embedding is not tiled
    norms = 2 * 16
    assert tiled <= 8 * ((1 + prefetch + 2) * (largest + norms) + 2 * ends) < whole


@pytest.mark.parametrize("kind", _layouts())
def test_equal_to_one_process(ranks, kind):
    """Loss, gradients, norm and weights; traffic and memory as forecast."""
    plans = _layouts()[kind]
    found = ranks(mismatches, plans[0].strategy.world_size, [plan.to_toml() for plan in plans], timeout_s=120)
    assert {text for by_rank in found for text in by_rank} == {"None"}


@pytest.mark.parametrize("tp", [1, 2])
def test_two_levels_and_sharding_over_nodes_equal_one_process(ranks, tp):
    plans = [
        make_plan(TIED, num_nodes=2, dp=4, tp=tp, num_micro_batches=2, zero=zero, shard_over=over)
        for zero, over in ((0, "all"), (1, "node"), (2, "all"), (3, "node"), (1, "all"), (2, "node"), (3, "all"))[
            : 7 // tp
        ]
    ]
    assert all(plan.strategy.dp_local == 2 for plan in plans)
    found = ranks(mismatches, 4 * tp, [plan.to_toml() for plan in plans], timeout_s=120)
    assert {text for by_rank in found for text in by_rank} == {"None"}


CONTROLS = {
    "scatter": (make_plan(LLAMA, dp=2, zero=2), ("dp", "reduce_scatter", "gradients")),
    "scatter across nodes": (
        make_plan(LLAMA, num_nodes=2, dp=4, zero=3),
        ("dp_across", "reduce_scatter", "gradients"),
    ),
    "sum over replicas": (
        make_plan(LLAMA, num_nodes=2, dp=4, zero=2, num_micro_batches=2, shard_over="node"),
        ("dp_across", "all_reduce", "gradients"),
    ),
    "sum of two levels": (make_plan(LLAMA, num_nodes=2, dp=4), ("dp_across", "all_reduce", "gradients")),
    "sum of a tied weight": (make_plan(TIED, dp=2, pp=2, zero=3), ("pp_ends", "all_reduce", "gradients")),
    "gather for forward": (make_plan(LLAMA, dp=2, zero=3), ("dp", "all_gather", "gather")),
}


def mutated(rank: int, world: int, text: str, left_out: tuple[str, str, str]) -> str:
    plan = Plan.from_toml(text)
    mesh = make_mesh(plan)
    with pytest.MonkeyPatch.context() as patch:
        without(*left_out)(patch, mesh)
        return str(find_mismatch(plan, mesh, num_steps=SHORT_PARITY))


@pytest.mark.parametrize("name", CONTROLS)
def test_without_one_of_its_collectives_it_differs(ranks, name):
    plan, left_out = CONTROLS[name]
    found = ranks(mutated, plan.strategy.world_size, plan.to_toml(), left_out, timeout_s=120)
    assert any("differs" in text for text in found)


def counted(rank: int, world: int, text: str) -> int:
    engine = make_engine(Plan.from_toml(text))
    train(engine, dataset(engine.plan), range(2))
    return engine.parallel.gatherer.most_gathered


@pytest.mark.parametrize(("prefetch", "model", "most"), [(0, LLAMA, 1), (1, LLAMA, 2), (2, LLAMA, 3), (1, TIED, 3)])
def test_no_more_blocks_are_gathered_than_promised(ranks, prefetch, model, most):
    """The one that runs and those ahead; a tied embedding stays, because embedding and head need it."""
    plan = make_plan(model, dp=2, zero=3, prefetch=prefetch, num_micro_batches=2)
    assert ranks(counted, 2, plan.to_toml()) == [most, most]


@pytest.mark.parametrize(
    ("strategy", "times"), [({"zero": 1}, 2), ({"zero": 2}, 2), ({"zero": 3}, 3), (KEPT, 2), ({"zero": 0}, 1)]
)
def test_stages_send_two_or_three_times_the_parameters(ranks, strategy, times):
    """Ψ parameters over two ranks, padded: an all-reduce counts as two, stages 1 and 2 send 2Ψ, stage 3 sends 3Ψ."""
    plan = make_plan(LLAMA, dp=2, **strategy)
    sent = ranks(counted_sent, 2, plan.to_toml())[0]
    of_parameters = {key: size for key, size in sent.items() if key[2] in ("gradients", "parameters", "gather")}
    padded = sum(-(-slot.numel // 2) * 2 for slot in LLAMA.parameters())
    assert sum(of_parameters.values()) / 8 == pytest.approx(times * padded, rel=0.01)


def counted_sent(rank: int, world: int, text: str) -> dict[tuple[str, str, str], int]:
    engine = make_engine(Plan.from_toml(text))
    train(engine, dataset(engine.plan), range(1))
    return {key: row.payload_bytes for key, row in engine.last_traffic.rows.items()}


def test_stages_are_equal_to_the_bit(ranks):
    """Without clipping all stages do the same arithmetic; and so does a second run."""
    plans = [make_plan(LLAMA, dp=2, precision="fp32", zero=zero) for zero in (0, 1, 2, 3)]
    runs = [ranks(trained_by_sgd, 2, plan.to_toml(), 8) for plan in (*plans, plans[3])]
    first = assembled([boxes for _, boxes in runs[0]])
    for run in runs[1:]:
        assert [losses for losses, _ in run] == [losses for losses, _ in runs[0]]
        found = assembled([boxes for _, boxes in run])
        assert all(torch.equal(found[name], first[name]) for name in first)


def test_replicas_are_equal_to_the_bit_after_fifty_steps(ranks):
    """Every block was gathered from the same shards: both ranks saw the same losses, from first to last."""
    runs = ranks(trained_by_sgd, 2, make_plan(llama(num_layers=1), dp=2, precision="fp32", zero=3).to_toml(), 50)
    assert runs[0][0] == runs[1][0]
    assembled([boxes for _, boxes in runs])


def trained_by_sgd(rank: int, world: int, text: str, steps: int) -> tuple[list[float], Any]:
    engine = make_engine(Plan.from_toml(text), SGD)
    losses = [loss for loss, _ in train(engine, dataset(engine.plan), range(steps))]
    return losses, weights(engine)


def test_shards_smaller_than_a_rank(ranks):
    """More ranks than elements: a final norm of two over four ranks, and a head norm of one."""
    tiny = llama(num_layers=1, hidden_size=2, num_heads=1, num_kv_heads=1, head_dim=2, ffn_size=1, vocab_size=3)
    plans = [make_plan(tiny, dp=4, zero=zero) for zero in (1, 2, 3)]
    found = ranks(mismatches, 4, [plan.to_toml() for plan in plans])
    assert {text for by_rank in found for text in by_rank} == {"None"}


def test_a_rank_that_skips_a_block_is_named(ranks):
    """Every rank ends: the one that skipped says what, the others that it was lost."""
    with pytest.raises(Exception, match=r"rank 1: block `layers.1` was skipped in forward"):
        ranks(skipped_loudly, 2, make_plan(LLAMA, dp=2, zero=3).to_toml(), timeout_s=60)


def skipped_loudly(rank: int, world: int, text: str) -> None:
    engine = make_engine(Plan.from_toml(text))
    if rank == 1:
        del engine.parallel._model.layers["1"]
    train(engine, dataset(engine.plan), range(1))


def fewer(rank: int, world: int, text: str) -> str:
    engine = make_engine(Plan.from_toml(text))
    batches = own_batches(engine, dataset(engine.plan), 0)
    with pytest.raises(InputError) as error:
        engine.forward_backward(batches[rank:])
    return str(error.value)


@pytest.mark.parametrize("zero", [2, 3])
def test_ranks_with_different_numbers_of_micro_batches_are_told(ranks, zero):
    found = ranks(fewer, 2, make_plan(LLAMA, dp=2, zero=zero, num_micro_batches=2).to_toml())
    assert "rank 0 has 2 micro-batches in this step, its 2 dp ranks together 3" in found[0]
    assert "rank 1 has 1 micro-batches" in found[1]


def frozen_run(rank: int, world: int, text: str, names: list[str]) -> tuple[Any, Any]:
    plan = Plan.from_toml(text)
    model = build(plan.model)
    _freeze(model, names)
    engine = parallelize(model, plan, mesh=make_mesh(plan), options=SGD, seed=SEED)
    before = weights(engine)
    batches = counted_batches(plan.model, (8, 3, 5, 1))
    engine.step(batches[2 * rank : 2 * rank + 2] if world > 1 else batches, 0.1)
    return before, weights(engine)


def _freeze(model: torch.nn.Module, names: list[str]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("frozen", [["embedding.weight", "layers.0.mlp.up.weight"], ["layers.1.mlp_norm.weight"]])
def test_frozen_parameters_stay_and_the_others_learn(ranks, zero, frozen, recompute):
    plan = make_plan(LLAMA, dp=2, zero=zero, num_micro_batches=2, recompute=recompute)
    results = ranks(frozen_run, 2, plan.to_toml(), frozen)
    before, after = (assembled([result[at] for result in results]) for at in (0, 1))
    expected = _one_process(LLAMA, frozen)
    for name in before:
        assert torch.equal(before[name], after[name]) == (name in frozen)
        torch.testing.assert_close(after[name], expected[name], rtol=1e-10, atol=1e-12)


def _one_process(spec: ModelSpec, frozen: list[str]) -> dict[str, torch.Tensor]:
    plain = plain_model(spec)
    _freeze(plain, frozen)
    batches = counted_batches(spec, (8, 3, 5, 1))
    tokens, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    loss = torch.nn.functional.cross_entropy(plain(tokens).flatten(0, -2), labels.flatten(), ignore_index=-100)
    loss.backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)
    return {name: parameter.detach() for name, parameter in plain.named_parameters()}


def calls_of_a_step(rank: int, world: int, text: str) -> dict[str, int]:
    """Phase → collectives over dp, the first stage's."""
    engine = make_engine(Plan.from_toml(text))
    train(engine, dataset(engine.plan), range(1))
    rows = engine.last_traffic.rows
    return {phase: rows["reduce_scatter" if phase == "gradients" else "all_gather", "dp", phase].calls
            for phase in ("gradients", "gather")}  # fmt: skip


def test_beside_a_pipeline_a_step_communicates_once(ranks):
    """Or in each of 3 micro-batches, and then gathers for forward and for backward."""
    plans = [make_plan(LLAMA, dp=2, pp=2, num_micro_batches=3, zero=3, reduce_each=each) for each in (False, True)]
    once, each = (ranks(calls_of_a_step, 4, plan.to_toml())[0] for plan in plans)
    num_blocks = once["gradients"]
    assert once == {"gradients": num_blocks, "gather": num_blocks}
    assert each == {"gradients": 3 * num_blocks, "gather": 2 * 3 * num_blocks}
