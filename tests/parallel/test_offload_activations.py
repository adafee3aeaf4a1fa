"""Kept activations on the host: the run without, bit by bit; memory and transfers as forecast."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.core.axes import PP
from meshwright.core.plan import Plan
from meshwright.core.strategy import Offload
from meshwright.cost.memory import memory, moved_traffic
from meshwright.parallel.offload import activations
from meshwright.run.engine import make_mesh
from meshwright.run.parity import find_mismatch
from tests.parallel.layouts import gpt2, llama, mixture, qwen3
from tests.parallel.runs import SGD, dataset, make_engine, own_batches, run_plan, train, weights

HOST = Offload(activations="cpu")
LLAMA = llama(num_layers=3)

ALONE = [
    run_plan(llama(num_layers=1), 4, offload=HOST),
    run_plan(qwen3(num_layers=4), 4, offload=HOST, recompute="selective"),
    run_plan(gpt2(num_layers=5), 4, offload=HOST, recompute="full", recompute_group=2, recompute_layers=3),
    run_plan(mixture(), 4, offload=HOST),
]
SCHEDULES: list[dict[str, Any]] = [{"schedule": name} for name in ("zb-v", "dualpipe")] + [
    {"schedule": name, "num_chunks": 2} for name in ("interleaved-1f1b", "bfs")
]
PAIRS = [
    *(run_plan(llama(), 4, pp=2, offload=HOST, **choice) for choice in SCHEDULES),
    run_plan(llama(num_layers=4), 4, pp=2, offload=HOST, recompute="full"),
    run_plan(LLAMA, 4, dp=2, zero=3, offload=HOST, precision="bf16"),
    run_plan(
        LLAMA, 4, dp=2, zero=2, offload=Offload(activations="cpu", optimizer="cpu", gradients="cpu", group_numel=200)
    ),
    run_plan(LLAMA, 4, tp=2, sequence="megatron", offload=HOST),
    run_plan(LLAMA, 4, offload=HOST, context={"degree": 2, "kind": "ring", "balance": "zigzag"}),
    run_plan(mixture(), 4, pp=2, offload=HOST),
    *(run_plan(LLAMA, 4, pp=2, offload=HOST, schedule=name) for name in ("pipedream-2bw",)),
]


def bitwise(rank: int, world: int, texts: list[str]) -> None:
    """Steps of each plan beside the same without offload; memory, and what passed in the last one, as forecast."""
    for plan in map(Plan.from_toml, texts):
        plain = plan.model_copy(update={"strategy": plan.strategy.model_copy(update={"offload": Offload()})})
        is_endless, what = plan.strategy.pipeline_schedule.is_asynchronous, plan.strategy.describe()
        ours, theirs = make_engine(plan, SGD), make_engine(plain, SGD)
        data = dataset(plan)
        with ours.parallel.census() as census:
            found = train(ours, data, range(2))
        assert found == train(theirs, data, range(2)), what
        assert theirs.last_tier_traffic == {}
        job = plan.job.model_copy(update={"optimizer": "sgd"})
        if not is_endless:  # whose steps end with micro-batches under way
            assert ours.memory(census.peak_bytes) == memory(plan.model, job, plan.strategy, ours.mesh.coordinates), what
            passed = ours.last_tier_traffic["cpu"].rows["activations"]
            expected = moved_traffic(plan.model, plan.job, plan.strategy, ours.mesh.coordinates[PP])
            assert passed == expected.rows["activations"], what
        ours.finish()
        theirs.finish()
        for (name, *_, a), (_, *_, b) in zip(weights(ours), weights(theirs), strict=True):
            assert torch.equal(a, b), f"{what}: {name}"
        ours.close()


@pytest.mark.parametrize(("num_ranks", "plans"), [(1, ALONE), (2, PAIRS)], ids=["one rank", "two ranks"])
def test_the_run_without_bit_by_bit_and_the_forecast_to_the_byte(ranks, num_ranks, plans):
    ranks(bitwise, num_ranks, [plan.to_toml() for plan in plans], timeout_s=240)


class Watched(activations._Unit):
    """Remembers every storage that leaves."""

    left: ClassVar[list[StorageWeakRef]] = []

    def write_start(self) -> None:
        self.left += [StorageWeakRef(kept.near) for kept in self._alive()]
        super().write_start()


def freed(rank: int, world: int, text: str) -> tuple[int, int]:
    """(storages that left, those of them that are still there) after all forwards of a step, before its backwards."""
    plan, whole = Plan.from_toml(text), activations._Unit
    engine = make_engine(plan)
    engine.step(own_batches(engine, dataset(plan), 0), 0.0)
    Watched.left, activations._Unit = [], Watched
    found: list[tuple[int, int]] = []

    def before_backward() -> None:
        found.append((len(Watched.left), sum(not ref.expired() for ref in Watched.left)))

    engine.parallel.runner.before_backward = before_backward
    try:
        engine.step(own_batches(engine, dataset(plan), 1), 0.0)
    finally:
        activations._Unit = whole
    engine.close()
    return found[0]


def test_what_has_left_is_gone(ranks):
    """By the allocator's word, not the census's: no storage outlives its way to the host."""
    plan = run_plan(llama(num_layers=6), 4, pp=2, schedule="zb-v", offload=HOST)
    gpipe = run_plan(llama(num_layers=6), 4, pp=2, schedule="gpipe", offload=HOST)
    for each in (plan, gpipe):
        for num_left, num_there in ranks(freed, 2, each.to_toml()):
            assert num_left > 20
            assert num_there == 0, f"{num_there} of {num_left} are still on the device"


def wrong(rank: int, world: int, text: str, fault: str) -> str:
    plan, unit = Plan.from_toml(text), activations._Unit
    names = {"stays": "leave", "both ahead": "come_back", "lost": "read_start"}
    right = getattr(unit, names[fault])

    def stays(self: Any) -> None:
        self._handle.wait()

    def both_ahead(self: Any) -> None:
        right(self)
        if self._before is not None and self._before._before is not None:
            self._before._before.read_start()

    def lost(self: Any) -> None:
        with torch.no_grad():
            right(self)
            for kept in self._alive() if not self._is_away else ():
                activations._flat(kept.near).zero_()

    setattr(unit, names[fault], {"stays": stays, "both ahead": both_ahead, "lost": lost}[fault])
    try:
        return str(find_mismatch(plan, make_mesh(plan)))
    finally:
        setattr(unit, names[fault], right)


@pytest.mark.parametrize(("fault", "seen"), [("stays", "memory"), ("both ahead", "memory"), ("lost", "gradient")])
def test_faults_are_noticed(ranks, fault, seen):
    plan = run_plan(llama(num_layers=4), 4, offload=HOST)
    assert ranks(wrong, 1, plan.to_toml(), fault)[0].startswith(f"{seen} of")
