"""Mixtures of experts over ranks, beside one process: losses of routers, gradients, norms, weights, bytes."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.comm import differentiable
from meshwright.comm.mesh import Mesh
from meshwright.core.axes import coordinates_of
from meshwright.core.errors import RuleError
from meshwright.core.layouts import Expert
from meshwright.core.placement import placements
from meshwright.core.plan import Plan
from meshwright.core.strategy import Strategy
from meshwright.cost.memory import memory
from meshwright.cost.traffic import traffic
from meshwright.parallel.experts import Exchange
from meshwright.rehearse.verify import REHEARSED_TOLERANCE
from tests.models.copies import Copied
from tests.models.tiny import random_model
from tests.parallel.layouts import make_plan, mixture
from tests.parallel.mixtures import MIXTURES
from tests.parallel.runs import Boxes, assembled, dataset, make_engine, own_batches, run_plan, train, weights
from tests.parallel.test_matrix import assert_parity

Ranks = Callable[..., list[list[str | None]]]


MOMENTS = {"optimizer": "cpu", "gradients": "cpu", "group_numel": 64}
HOST = {**MOMENTS, "parameters": "cpu"}
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("capacity", {"num_micro_batches": 2, "recompute": "full"}),
    ("sigmoid", {"pp": 4, "schedule": "dualpipe", "num_micro_batches": 8}),
    ("shared", {"dp": 4, "expert": {"degree": 2}, "zero": 3, "num_micro_batches": 2, "tile": 2}),
    (
        "batch",
        {"dp": 2, "context": {"degree": 2}, "expert": {"degree": 4}, "schedule": "gpipe", "num_micro_batches": 2},
    ),
    ("switch", {"dp": 2, "tp": 2, "expert": {"degree": 4, "tensor": 1}, "zero": 2, "micro_batch_size": 2}),
    ("shared", {"tp": 4, "expert": {"degree": 2, "tensor": 2}, "recompute": "full", "num_micro_batches": 2}),
    ("mixture", {"tp": 4, "dp": 2, "expert": {"degree": 2, "tensor": 2}, "sequence": "megatron", "zero": 1}),
    ("mixture", {"dp": 4, "expert": {"degree": 2}, "zero": 3, "offload": HOST, "num_micro_batches": 2}),
]
"""What `tests.parallel.mixtures` leaves out: larger degrees, tiles, two directions."""


@pytest.mark.parametrize("world", [1, 4, 8])
def test_every_layout_is_one_process(ranks: Ranks, world: int) -> None:
    plans = [make_plan(MIXTURES[name], **layout) for name, layout in LAYOUTS]
    assert_parity(ranks, [plan for plan in plans if plan.strategy.world_size == world])


def test_a_loss_over_the_batch_needs_all_forwards_first() -> None:
    with pytest.raises(RuleError, match=r"rule `balance`"):
        make_plan(MIXTURES["batch"], num_micro_batches=2)
    assert isinstance(make_plan(MIXTURES["batch"], num_micro_batches=1), Plan)
    assert isinstance(make_plan(MIXTURES["batch"], num_micro_batches=2, schedule="gpipe"), Plan)


def saved_on_rank(rank: int, world: int, plan: str, folder: str) -> None:
    engine = make_engine(plan)
    data = dataset(engine.plan)
    train(engine, data, range(2))
    engine.save(folder, 2)


def loaded_on_rank(rank: int, world: int, plan: str, folder: str) -> tuple[float, float, list[list[float]]]:
    engine = make_engine(plan)
    data = dataset(engine.plan)
    engine.load(folder)
    biases = [bias.tolist() for bias in engine.parallel.router_biases().values()]
    (losses,) = train(engine, data, range(2, 3))
    return *losses, biases


def test_experts_and_biases_are_saved_and_loaded_under_other_layouts(ranks: Ranks, tmp_path: Path) -> None:
    model, found = MIXTURES["sigmoid"], []
    saved = run_plan(model, 4, dp=2, tp=2, zero=1, expert={"degree": 4, "tensor": 1})
    ranks(saved_on_rank, 4, saved.to_toml(), str(tmp_path))
    for layout in ({}, {"dp": 2, "tp": 2, "zero": 3, "expert": {"degree": 2}}, {"pp": 2}):
        plan = run_plan(model, 4, **layout)
        by_rank = ranks(loaded_on_rank, plan.strategy.world_size, plan.to_toml(), str(tmp_path))
        biases = [bias for *_, held in (by_rank if plan.strategy.pp > 1 else by_rank[:1]) for bias in held]
        found.append((*by_rank[0][:2], biases))
    for loss, norm, biases in found:
        assert loss == pytest.approx(found[0][0], rel=1e-10)
        assert norm == pytest.approx(found[0][1], rel=1e-10)
        assert biases == found[0][2]
    assert any(value != 0 for bias in found[0][2] for value in bias)


def test_all_tokens_to_one_expert(ranks: Ranks) -> None:
    """A router of zeros: the lowest index wins, the others get nothing."""
    for layout in ({"dp": 2}, {"dp": 2, "expert": {"degree": 2}}, {"pp": 2}):
        for loss, report in ranks(collapsed_on_rank, 2, run_plan(mixture(), 4, **layout).to_toml()):
            assert isfinite(loss)
            assert report == [4 * 8] * 3


def collapsed_on_rank(rank: int, world: int, plan: str) -> tuple[float, list[int]]:
    engine = make_engine(plan)
    for name, values in engine.parallel.states.parameters.items():
        if name.endswith("router.weight"):
            values.data.zero_()
    (losses,) = train(engine, dataset(engine.plan), range(1))
    report = engine.last_routing
    assert report is not None
    assert report.taken[:, 2:].abs().max() == 0
    assert float(report.imbalance.max()) == 4
    return losses[0], report.taken[:, 0].long().tolist()


def fullest_on_rank(rank: int, world: int, plan: str) -> tuple[int, int, int]:
    """(activations, rows sent over ep, calls over ep) of a step in which all tokens go to the first expert."""
    engine = make_engine(plan)
    for name, values in engine.parallel.states.parameters.items():
        if name.endswith("router.weight"):
            values.data.zero_()
    with engine.parallel.census() as census:
        engine.step(own_batches(engine, dataset(engine.plan), 0), 0.0)
    row = engine.last_traffic.rows["all_to_all", "ep", "backward"]
    return engine.memory(census.peak_bytes).activations_bytes, row.payload_bytes, row.calls


@pytest.mark.parametrize("layout", [{"pp": 1}, {"pp": 2, "schedule": "zb-h1"}], ids=["whole", "split backward"])
def test_the_fullest_rank_holds_what_an_imbalance_says(ranks: Ranks, layout: dict[str, Any]) -> None:
    """All tokens on one rank of two: twice the mean. Its memory is the forecast's, and the other rank has less."""
    model = mixture({"balance_loss": 0.0, "z_loss": 0.0}, num_layers=2, dense_layers=None, experts_per_token=1)
    plan = run_plan(model, 4, dp=2, expert={"degree": 2}, **layout)
    found = ranks(fullest_on_rank, plan.strategy.world_size, plan.to_toml())
    job = plan.job.model_copy(update={"imbalance": 2.0})
    at = [coordinates_of(rank, plan.strategy.sizes) for rank in range(len(found))]
    uneven = [memory(model, job, plan.strategy, each).activations_bytes for each in at]
    even = [memory(model, plan.job, plan.strategy, each).activations_bytes for each in at]
    for rank, (kept, _, calls) in enumerate(found):
        forecast = traffic(model, job, plan.strategy, at[rank]).rows["all_to_all", "ep", "backward"]
        assert calls == forecast.calls
        if at[rank]["dp"] == 0:
            assert uneven[rank] > 1.1 * even[rank]
            assert kept == pytest.approx(uneven[rank], rel=REHEARSED_TOLERANCE)
        else:
            assert kept < even[rank]


def overlapped_on_rank(rank: int, world: int, plan: str) -> list[str]:
    """What happens to rows on their way to experts, and when shared experts run, in a step of one micro-batch."""
    engine, seen = make_engine(plan), list[str]()
    shared = next(iter(engine.parallel._model.layers.values())).mlp.shared
    shared.register_forward_hook(lambda *_: seen.append("shared"))
    shared.register_full_backward_hook(lambda *_: seen.append("shared's gradient"))
    start, wait = differentiable.all_to_all_start, differentiable.Flight.wait

    def started(*args: Any) -> Any:
        seen.append("start")
        return start(*args)

    def waited(self: differentiable.Flight) -> None:
        seen.append("arrived")
        wait(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(differentiable, "all_to_all_start", started)
        patch.setattr(differentiable.Flight, "wait", waited)
        train(engine, dataset(engine.plan), range(1))
    return seen


def test_shared_experts_run_while_rows_travel(ranks: Ranks) -> None:
    plan = run_plan(mixture(num_layers=1, dense_layers=None, shared_ffn_size=16), 2, dp=2, expert={"degree": 2})
    for seen in ranks(overlapped_on_rank, 2, plan.to_toml()):
        assert seen == ["start", "shared", "arrived", "start", "shared's gradient", "arrived"]


def exchanged_on_rank(rank: int, world: int, plan: str) -> tuple[dict[str, list[int]], dict[str, int]]:
    """([rows sent to others, all rows sent, of dispatch and of the way back] by what the exchange saw, ledger)."""
    engine, seen = make_engine(plan), {"dispatch": [0, 0], "back": [0, 0]}
    right = Exchange._counts

    def counts(self: Exchange, rows: torch.Tensor, loads: torch.Tensor) -> tuple[list[int], list[int]]:
        sent, runs = right(self, rows, loads)
        num = len(runs) // self._axis.size
        received = [sum(runs[at : at + num]) for at in range(0, len(runs), num)]
        for way, by_rank in (("dispatch", sent), ("back", received)):
            seen[way][0] += sum(by_rank) - by_rank[self._axis.index]
            seen[way][1] += sum(by_rank)
        return sent, runs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "_counts", counts)
        train(engine, dataset(engine.plan), range(1))
    rows = engine.last_traffic.rows
    return seen, {phase: rows["all_to_all", "ep", phase] for phase in ("forward", "backward")}


@pytest.mark.parametrize(("layout", "tokens"), [({"dp": 4}, 8), ({"dp": 2, "tp": 2}, 4)], ids=["whole", "of tp ranks"])
def test_bytes_over_ep_are_those_of_the_rows(ranks: Ranks, layout: dict[str, int], tokens: int) -> None:
    """To the byte, given where the step's tokens went; forward and backward the same rows, and forward counts."""
    model = mixture()
    plan = run_plan(model, 4, **layout, expert={"degree": 4, "tensor": 1})
    per_row = model.hidden_size * 8
    calls = 3 * plan.strategy.num_micro_batches
    for seen, ledger in ranks(exchanged_on_rank, 4, plan.to_toml()):
        to_others, rows = (seen["dispatch"][i] + seen["back"][i] for i in range(2))
        assert seen["dispatch"][1] == calls * tokens * 2  # experts each
        counts = calls * 8 * model.num_experts
        assert (ledger["backward"].calls, ledger["forward"].calls) == (2 * calls, 3 * calls)
        assert (ledger["backward"].payload_bytes, ledger["backward"].wire_bytes) == (
            rows * per_row,
            to_others * per_row,
        )
        assert ledger["forward"].payload_bytes == rows * per_row + counts
        assert ledger["forward"].wire_bytes == to_others * per_row + counts * 3 // 4


def copied_on_rank(rank: int, world: int) -> int:
    spec = mixture(num_layers=1, dense_layers=None)
    axis, layer = Mesh.create({"dp": world})["dp"], random_model(spec, torch.float64).layers["0"].mlp
    for part in (layer.experts.gate, layer.experts.up, layer.experts.down):
        part.weight = torch.nn.Parameter(part.weight.detach().chunk(world)[rank].clone())
    layer.experts.compute = Exchange(layer.experts, axis)
    x = torch.randn(1, 8 + rank, spec.hidden_size, dtype=torch.float64, requires_grad=True)
    with Copied(spec.hidden_size) as copied:
        layer(x).backward(torch.ones_like(x))
    return copied.elements


def test_rows_that_travel_are_copied_once_on_each_way(ranks: Ranks) -> None:
    """A rank permutes its own tokens' rows to experts, and their gradients, whatever it sends and gets; on the way back
    they are summed where they lie."""
    hidden = mixture().hidden_size
    assert ranks(copied_on_rank, 2) == [2 * 2 * tokens * hidden for tokens in (8, 9)]


def replicas_on_rank(rank: int, world: int, plan: str) -> Boxes:
    engine = make_engine(plan)
    train(engine, dataset(engine.plan), range(50))
    return weights(engine)


def test_replicas_of_experts_stay_equal_and_experts_stay_different(ranks: Ranks) -> None:
    plan = run_plan(mixture(num_layers=1, dense_layers=None), 4, dp=4, expert={"degree": 2})
    whole = assembled(ranks(replicas_on_rank, 4, plan.to_toml()))  # fails where replicas differ in a bit
    up = whole["layers.0.mlp.experts.up.weight"]
    assert all(not torch.equal(up[i], up[j]) for i in range(8) for j in range(i))


def test_eight_experts_on_four_ranks_are_two_each() -> None:
    strategy, model = Strategy(dp=4, expert=Expert(degree=4)), mixture()
    for rank in range(4):
        held = placements(model, strategy, coordinates_of(rank, strategy.sizes))
        boxes = [p.box for p in held if p.name == "layers.1.mlp.experts.up.weight"]
        assert [(box.offsets[0], box.sizes[0]) for box in boxes] == [(2 * rank, 2)]
        assert next(p for p in held if p.name.endswith("router.weight")).box.sizes[0] == 8


def balanced_on_rank(rank: int, world: int, plan: str, steps: int) -> tuple[float, float]:
    """Largest load over the mean load, of the worst layer, before and after training a router that prefers expert 0."""
    engine = make_engine(plan)
    for name, values in engine.parallel.states.parameters.items():
        if name.endswith("router.weight"):
            values.data[1:] *= 0.1
            values.data[0] = values.data[1:].mean(0) + 0.5
    found = []
    for step in range(steps):
        train(engine, dataset(engine.plan), [step], rate=3e-3)
        assert engine.last_routing is not None
        found.append(float(engine.last_routing.imbalance.max()))
    return sum(found[:3]) / 3, sum(found[-3:]) / 3


def test_a_collapse_is_seen_and_the_balance_loss_ends_it(ranks: Ranks) -> None:
    after = {}
    for coefficient in (0.0, 1.0):
        model = mixture({"balance_loss": coefficient, "z_loss": 0.0}, num_layers=2, experts_per_token=1)
        ((_, after[coefficient]),) = ranks(balanced_on_rank, 1, run_plan(model, 4).to_toml(), 15)
    assert after[1.0] < 3.0
    assert after[0.0] > 1.3 * after[1.0]
