"""Offload under training: every tier and ZeRO stage is the run without it, bit by bit; late updates are the simulated
ones; checkpoints pass between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.core.flat import rank_buckets
from meshwright.core.plan import Plan
from meshwright.core.strategy import Offload
from meshwright.cost.memory import memory
from meshwright.cost.offload import offload_forecast
from meshwright.run.engine import Engine, make_mesh
from meshwright.run.parity import find_mismatch
from tests.parallel.layouts import llama, qwen3
from tests.parallel.runs import ADAMW, SGD, assembled, dataset, make_engine, own_batches, run_plan, train, weights

LLAMA, TIED = llama(num_layers=2), qwen3(num_layers=2)
GROUP = 200
"""Elements of a group here, so that every bucket has several."""


def moved(path: Any = None, **kinds: Any) -> Offload:
    return Offload(**{"group_numel": GROUP, "path": str(path) if path else None, **kinds})


def kinds_of(zero: int, tier: str) -> list[dict[str, str]]:
    """What a stage may offload, all at once and one by one."""
    names = ["optimizer", *(["gradients"] if zero >= 2 else []), *(["parameters"] if zero == 3 else [])]
    whole = dict.fromkeys(names, tier)
    return [whole] if len(names) == 1 else [whole, *({name: tier} for name in names)]


def bits(engine: Engine) -> list[tuple[Any, ...]]:
    """All that a checkpoint would hold of this rank, as it is."""
    pieces = engine._pieces(whole=False)
    return [(piece.key, piece.box, piece.read().clone()) for piece in pieces]


def assert_equal_bits(ours: list[tuple[Any, ...]], theirs: list[tuple[Any, ...]], what: str) -> None:
    assert [entry[:2] for entry in ours] == [entry[:2] for entry in theirs]
    wrong = [key for (key, _, a), (_, _, b) in zip(ours, theirs, strict=True) if not torch.equal(a, b)]
    assert wrong == [], what


def assert_as_forecast(engine: Engine) -> None:
    """Memory by category, tiers, and what passed in the last step."""
    plan, rank = engine.plan, engine.mesh.coordinates
    job = plan.job.model_copy(update={"optimizer": engine.optimizer.options.kind})
    expected = memory(plan.model, job, plan.strategy, rank)
    assert engine.memory(expected.activations_bytes) == expected
    buckets = rank_buckets(plan.model, plan.strategy, rank)
    forecast = offload_forecast(plan.strategy, job.optimizer, buckets, rank)
    for tier, passed in engine.last_tier_traffic.items():
        assert passed == forecast.traffic(tier), f"{plan.strategy.offload} {tier}"


def bitwise(rank: int, world: int, plans: list[str], options: Any) -> None:
    """Three steps of each plan beside the same without offload."""
    for text in plans:
        plan = Plan.from_toml(text)
        plain = plan.model_copy(update={"strategy": plan.strategy.model_copy(update={"offload": Offload()})})
        engine, reference = make_engine(plan, options), make_engine(plain, options)
        data = dataset(plan)
        ours, theirs = train(engine, data, range(3)), train(reference, data, range(3))
        assert ours == theirs, plan.strategy.offload
        assert_equal_bits(bits(engine), bits(reference), f"{plan.strategy.describe()} {plan.strategy.offload}")
        assert_as_forecast(engine)
        engine.close()


def plans_of(zero: int, tier: str, path: Any, precision: str, **more: Any) -> list[str]:
    return [
        run_plan(LLAMA, 4, zero=zero, precision=precision, offload=moved(path, **kinds), **more).to_toml()
        for kinds in kinds_of(zero, tier)
    ]


@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2])
def test_every_stage_and_tier_is_the_run_without(ranks, tmp_path, zero, tier, dp):
    plans = [text for precision in ("fp32", "bf16") for text in plans_of(zero, tier, tmp_path, precision, dp=dp)]
    ranks(bitwise, dp, plans, replace(ADAMW, clip_norm=0.05), timeout_s=120)
    assert list(tmp_path.iterdir()) == [], "closed engines leave nothing"


def test_other_layouts_are_the_run_without(ranks, tmp_path):
    """Replicated gradients over tp and the ends of a pipeline, nodes, tiles, prefetch, accumulation: sums on a tier are
    made in all the ways in which they are in memory."""
    everything = {"optimizer": "disk", "gradients": "cpu", "parameters": "disk"}
    four = [
        {"dp": 2, "tp": 2, "zero": 3, "offload": moved(tmp_path, **everything)},
        {"dp": 2, "pp": 2, "zero": 3, "reduce_each": True, "offload": moved(tmp_path, **everything)},
        {"dp": 2, "tp": 2, "zero": 2, "offload": moved(gradients="cpu")},
        {"dp": 1, "tp": 2, "pp": 2, "zero": 0, "offload": moved(optimizer="cpu")},
        {"dp": 2, "pp": 2, "zero": 1, "offload": moved(tmp_path, optimizer="disk"), "num_micro_batches": 4},
    ]
    nodes = [{"num_nodes": 2, "dp": 4, "zero": 3, "shard_over": over, "offload": moved(tmp_path, **everything)}
             for over in ("all", "node")]  # fmt: skip
    plans = [run_plan(TIED, 8, precision="fp32", **layout).to_toml() for layout in [*four, *nodes]]
    ranks(bitwise, 4, plans, ADAMW, timeout_s=180)


def test_other_choices_are_the_run_without(ranks, tmp_path):
    everything = {"optimizer": "cpu", "gradients": "disk", "parameters": "cpu"}
    choices = [
        *({"prefetch": ahead} for ahead in (0, 2, 9)),
        *({"tile": 3, "recompute": recompute} for recompute in ("none", "full")),
        *({"precision": precision} for precision in ("fp64", "bf16-16", "bf16-sr", "fp16")),
    ]
    plans = [
        run_plan(LLAMA, 4, **{"precision": "fp32", "dp": 2, "zero": 3, "offload": moved(tmp_path, **kinds), **choice})
        for choice in choices
        for kinds in (everything, {"parameters": "disk"})
    ]
    ranks(bitwise, 2, [plan.to_toml() for plan in plans], ADAMW, timeout_s=180)
    ranks(bitwise, 2, [plan.to_toml() for plan in plans[:2]], SGD, timeout_s=180)


def parity(rank: int, world: int, texts: list[str]) -> list[str]:
    plans = map(Plan.from_toml, texts)
    return [str(find_mismatch(plan, make_mesh(plan))) for plan in plans]


def test_equal_to_one_process_and_to_the_forecast(ranks, tmp_path):
    offload = moved(tmp_path, optimizer="disk", gradients="cpu", parameters="disk")
    plans = [
        run_plan(TIED, 4, dp=2, zero=3, offload=offload),
        run_plan(TIED, 4, dp=2, zero=2, offload=moved(optimizer="cpu", delayed=True)),
    ]
    assert ranks(parity, 2, [plan.to_toml() for plan in plans], timeout_s=120) == [["None"] * 2] * 2


# --- updates that are one step late ------------------------------------------------------------------------


def simulated(engine: Engine, data: Any, num_steps: int, num_synchronous: int) -> list[tuple[float, float]]:
    """θ_{i+1} = U(θ_i, g_{i−1}): a plain engine whose parameters are put back after an update that is late."""
    states, optimizer = engine.parallel.states, engine.optimizer
    ahead: list[torch.Tensor] | None = None
    found = []
    for step in range(num_steps):
        loss = engine.forward_backward(own_batches(engine, data, step))
        seen = [bucket.own_parameters.clone() for bucket in states.buckets]
        for bucket, values in zip(states.buckets, ahead or seen, strict=True):
            bucket.own_parameters.copy_(values)  # the update goes on from the newest values
        stats = engine.update(loss, 1e-2)
        found.append((float(stats.loss), float(stats.grad_norm)))
        if step >= num_synchronous:
            newest = [bucket.own_parameters.clone() for bucket in states.buckets]
            for bucket, values in zip(states.buckets, ahead or seen, strict=True):
                bucket.own_parameters.copy_(values)  # the next step sees the update before
            engine.parallel.gather_parameters()
            ahead = newest
    for bucket, values in zip(states.buckets, ahead or (), strict=bool(ahead)):
        bucket.own_parameters.copy_(values)
    engine.parallel.gather_parameters()
    assert optimizer.delayed is None
    return found


def delayed_as_simulated(rank: int, world: int, plans: list[str], num_synchronous: int) -> None:
    options = replace(ADAMW, synchronous_steps=num_synchronous)
    for text in plans:
        plan = Plan.from_toml(text)
        plain = plan.model_copy(update={"strategy": plan.strategy.model_copy(update={"offload": Offload()})})
        engine, reference = make_engine(plan, options), make_engine(plain, options)
        data = dataset(plan)
        ours, theirs = train(engine, data, range(5)), simulated(reference, data, 5, num_synchronous)
        assert ours == theirs, plan.strategy.offload
        assert_as_forecast(engine)
        engine.finish()
        mine, other = bits(engine), bits(reference)
        assert_equal_bits(mine, other, f"{plan.strategy.describe()} {plan.strategy.offload}")
        engine.close()


@pytest.mark.parametrize("num_synchronous", [0, 2])
@pytest.mark.parametrize("dp", [1, 2])
def test_late_updates_are_the_simulated_ones(ranks, tmp_path, dp, num_synchronous):
    cases = [
        (0, {"optimizer": "cpu"}),
        (1, {"optimizer": "disk"}),
        (2, {"optimizer": "disk", "gradients": "cpu"}),
        (3, {"optimizer": "cpu", "gradients": "cpu"}),
    ]
    plans = [
        run_plan(LLAMA, 4, precision=precision, dp=dp, zero=zero, offload=moved(tmp_path, delayed=True, **kinds))
        for zero, kinds in cases
        for precision in ("fp32", "bf16", "bf16-sr")
    ]
    ranks(delayed_as_simulated, dp, [plan.to_toml() for plan in plans], num_synchronous, timeout_s=180)


def late_with_parameters(rank: int, world: int, texts: list[str]) -> None:
    """Parameters on a tier or in memory: the same."""
    engines = [make_engine(text, replace(ADAMW, synchronous_steps=1)) for text in texts]
    data = dataset(engines[0].plan)
    runs = [train(engine, data, range(5)) for engine in engines]
    assert runs[0] == runs[1]
    for engine in engines:
        assert_as_forecast(engine)
        engine.finish()
    assert_equal_bits(bits(engines[0]), bits(engines[1]), "parameters on a tier")
    for engine in engines:
        engine.close()


def test_late_updates_of_parameters_on_a_tier(ranks, tmp_path):
    memory, disk = (moved(tmp_path, optimizer="cpu", parameters=tier, delayed=True) for tier in ("none", "disk"))
    plans = [
        run_plan(LLAMA, 4, precision="bf16", dp=2, zero=3, offload=offload).to_toml() for offload in (memory, disk)
    ]
    ranks(late_with_parameters, 2, plans, timeout_s=120)


# --- checkpoints -------------------------------------------------------------------------------------------


def trained_in_turn(rank: int, world: int, texts: list[str], folder: str, options: Any) -> Any:
    """Two steps under each plan, each from the checkpoint of the one before. All weights at the end."""
    engine = None
    for turn, text in enumerate(texts):
        engine = make_engine(text, options)
        if turn:
            assert engine.load(folder)["step"] == 2 * turn
        train(engine, dataset(engine.plan), range(2 * turn, 2 * turn + 2))
        if turn + 1 < len(texts):
            engine.save(folder, 2 * turn + 2)
            engine.close()
    engine.finish()
    held = weights(engine)
    engine.close()
    return held


def test_checkpoints_go_from_tier_to_memory_and_back(ranks, tmp_path):
    """Of other layouts, too: a box that is loaded lies across the rows of one that was saved."""
    disk = moved(tmp_path, optimizer="disk", gradients="disk", parameters="disk")
    for precision in ("fp64", "bf16"):
        plans = [
            run_plan(TIED, 4, precision=precision, dp=2, zero=3, offload=disk),
            run_plan(TIED, 4, precision=precision, dp=2, zero=1),
            run_plan(TIED, 4, precision=precision, tp=2, zero=0, offload=moved(optimizer="cpu")),
            run_plan(TIED, 4, precision=precision, dp=2, zero=3, offload=disk),
        ]
        same = [plans[0], plans[1], plans[0], plans[0]]
        plain = [plan.model_copy(update={"strategy": plan.strategy.model_copy(update={"offload": Offload()})})
                 for plan in (*plans, *same)]  # fmt: skip
        texts = [plan.to_toml() for plan in (*plans, *same, *plain)]
        found = [
            assembled(ranks(trained_in_turn, 2, texts[at : at + 4], str(tmp_path / f"{precision}{at}"), ADAMW,
                            timeout_s=120))
            for at in range(0, 16, 4)
        ]  # fmt: skip
        for offloaded, without in ((found[0], found[2]), (found[1], found[3])):
            assert all(torch.equal(offloaded[name], without[name]) for name in without)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_late_update_goes_on_from_its_checkpoint(ranks, tmp_path, precision):
    """What is saved between an update and its adoption: the resumed run is the uninterrupted one, to the bit. Without
    delay the update is adopted when it is loaded, and nothing of it is lost."""
    late = run_plan(LLAMA, 4, precision=precision, dp=2, zero=2, offload=moved(optimizer="cpu", delayed=True))
    prompt = run_plan(LLAMA, 4, precision=precision, dp=2, zero=2)
    options = replace(ADAMW, synchronous_steps=0)
    late, prompt = late.to_toml(), prompt.to_toml()
    resumed = assembled(ranks(trained_in_turn, 2, [late, late], str(tmp_path / "a"), options, timeout_s=120))
    whole = assembled(ranks(trained_at_once, 2, late, 4, options, timeout_s=120))
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    adopted = assembled(ranks(loaded, 2, late, prompt, str(tmp_path / "b"), options, timeout_s=120))
    ended = assembled(ranks(trained_at_once, 2, late, 2, options, timeout_s=120))
    assert all(torch.equal(adopted[name], ended[name]) for name in ended)
    taken_up = assembled(ranks(trained_in_turn, 2, [prompt, late, prompt], str(tmp_path / "c"), options, timeout_s=120))
    assert all(value.isfinite().all() for value in taken_up.values())


def trained_at_once(rank: int, world: int, text: str, num_steps: int, options: Any) -> Any:
    engine = make_engine(text, options)
    train(engine, dataset(engine.plan), range(num_steps))
    engine.finish()
    return weights(engine)


def loaded(rank: int, world: int, saver: str, loader: str, folder: str, options: Any) -> Any:
    """Weights of a plain engine that loads what a delayed one saved."""
    engine = make_engine(saver, options)
    train(engine, dataset(engine.plan), range(2))
    engine.save(folder, 2)
    plain = make_engine(loader, options)
    plain.load(folder)
    return weights(plain)
