"""Training goes on from a checkpoint as if it had never stopped: under the same layout, and under any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: TID251 the witness

from meshwright.core.axes import DP
from meshwright.core.errors import InputError
from meshwright.core.placement import param_box
from meshwright.core.strategy import Strategy
from meshwright.models import hf
from meshwright.run.engine import Engine
from meshwright.train.data import PackedDataset
from tests.parallel.layouts import gpt2, llama, qwen3
from tests.parallel.runs import Boxes, assembled, dataset, layouts_of, make_engine, run_plan, train, weights

MODEL = qwen3(num_layers=4)
LAYOUTS = {
    "D2 T2 P2 zero 1": {"dp": 2, "tp": 2, "pp": 2, "zero": 1},
    "D4": {"dp": 4},
    "T2 P4": {"tp": 2, "pp": 4},
    "one rank": {},
    "D2 T4": {"dp": 2, "tp": 4, "zero": 1},
    "P2 uneven": {"pp": 2, "layers_per_stage": (1, 3), "schedule": "gpipe", "recompute": "full"},
}
PLANS = {name: run_plan(MODEL, **split) for name, split in LAYOUTS.items()}

Steps = list[tuple[float, float]]


def state(engine: Engine) -> Boxes:
    """Everything that a checkpoint holds, as this rank holds it."""
    return [(p.key, p.shape, p.box, p.tensor.clone()) for p in engine._pieces(whole=True)]


def save_after(rank: int, world: int, plan: str, folder: str, num_steps: int) -> tuple[Boxes, Steps, float]:
    """Train, save, train on. Returns the state saved, all steps, and the optimizer's step count at the end."""
    engine = make_engine(plan)
    data = dataset(engine.plan)
    steps = train(engine, data, range(num_steps))
    engine.save(folder, num_steps, {"data": data.state_dict(num_steps)})
    saved = state(engine)
    steps += train(engine, data, range(num_steps, 2 * num_steps))
    return saved, steps, float(engine.optimizer.step_count)


def load_and_train(rank: int, world: int, plan: str, folder: str, num_steps: int) -> tuple[Boxes, Steps, float]:
    engine = make_engine(plan)
    data = dataset(engine.plan)
    extra = engine.load(folder)
    data.load_state_dict(extra["data"])
    loaded, first = state(engine), extra["step"]
    return loaded, train(engine, data, range(first, first + num_steps)), float(engine.optimizer.step_count)


@pytest.mark.parametrize("saved", ["D2 T2 P2 zero 1", "one rank"])
def test_any_layout_goes_on_with_the_same_losses(ranks, tmp_path, saved):
    """Weights, both moments and the step count are taken over exactly; the losses that follow are the same."""
    plan = PLANS[saved]
    results = ranks(save_after, plan.strategy.world_size, plan.to_toml(), str(tmp_path), 3, timeout_s=120)
    expected = assembled([boxes for boxes, _, _ in results])
    assert {key.split("/")[0] for key in expected} == {"parameters", "moment1", "moment2"}
    assert all((value != 0).any() for value in expected.values())
    for other, again in layouts_of(ranks, load_and_train, PLANS.values(), str(tmp_path), 3):
        loaded = assembled([boxes for boxes, _, _ in again])
        assert loaded.keys() == expected.keys(), other.strategy
        assert all(torch.equal(loaded[key], expected[key]) for key in expected), other.strategy
        for _, steps, count in again:
            assert steps == [pytest.approx(step, rel=1e-10) for step in results[0][1][3:]], other.strategy
            assert count == 6


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_a_resumed_run_is_equal_to_the_bit(ranks, tmp_path, precision):
    """Six steps, or three, a checkpoint, and three."""
    plan = run_plan(MODEL, dp=2, pp=2, zero=1, precision=precision).to_toml()
    whole = ranks(save_after, 4, plan, str(tmp_path), 3)
    resumed = ranks(load_and_train, 4, plan, str(tmp_path), 3)
    for (saved, steps, _), (loaded, again, _) in zip(whole, resumed, strict=True):
        assert again == steps[3:]
        assert all(torch.equal(a[-1], b[-1]) for a, b in zip(saved, loaded, strict=True))


def fill_with_numbers(rank: int, world: int, plan: str, folder: str) -> None:
    """Layer i is the constant i."""
    engine = make_engine(plan)
    engine.parallel.states.fill(lambda at: torch.full(at.box.sizes, float(-1 if at.layer is None else at.layer)))
    engine.save(folder, 1)


def read_weights(rank: int, world: int, plan: str, folder: str) -> Boxes:
    engine = make_engine(plan)
    engine.load(folder)
    return weights(engine)


@pytest.mark.parametrize("saved", ["one rank", "T2 P4", "P2 uneven"])
def test_layers_keep_their_numbers(ranks, tmp_path, saved):
    plan = PLANS[saved]
    ranks(fill_with_numbers, plan.strategy.world_size, plan.to_toml(), str(tmp_path))
    others = [PLANS[name] for name in ("one rank", "P2 uneven", "T2 P4")]
    for _, results in layouts_of(ranks, read_weights, others, str(tmp_path)):
        for name, value in assembled(results).items():
            expected = float(name.split(".")[1]) if name.startswith("layers.") else -1.0
            assert (value == expected).all(), name


def test_a_checkpoint_is_read_without_this_library(ranks, tmp_path):
    plan = PLANS["D2 T2 P2 zero 1"]
    results = ranks(save_after, 8, plan.to_toml(), str(tmp_path / "run"), 1, timeout_s=120)
    dcp_to_torch_save(tmp_path / "run" / "step-00000001", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    expected = assembled([boxes for boxes, _, _ in results])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("model", [llama(vocab_size=13), gpt2(vocab_size=13)], ids=lambda model: model.name)
def test_a_vocabulary_that_tp_does_not_divide_is_saved_unpadded(ranks, tmp_path, model):
    two, one = run_plan(model, tp=2), run_plan(model)
    saved = ranks(save_after, 2, two.to_toml(), str(tmp_path / "run"), 1)
    _, steps, _ = ranks(load_and_train, 1, one.to_toml(), str(tmp_path / "run"), 1)[0]
    assert steps == [pytest.approx(step, rel=1e-10) for step in saved[0][1][1:]]
    whole = assembled(ranks(read_weights, 1, one.to_toml(), str(tmp_path / "run")))
    assert whole["embedding.weight"].shape == (13, 16)
    hf.export(tmp_path / "hf", model, whole.items())
    with hf.HFCheckpoint(tmp_path / "hf", model) as exported:
        for param in model.parameters():
            assert torch.equal(exported.read(param, param_box(model, param, Strategy().grid, 0)), whole[param.name])


def seen_samples(data: PackedDataset, plan_dp: int, steps: range) -> list[bytes]:
    """Every sample that the dp ranks together are given."""
    per_rank = data.global_batch_size // plan_dp
    return [
        tokens.numpy().tobytes()
        for step in steps
        for index in range(plan_dp)
        for tokens, _ in data.micro_batches(step, index, plan_dp, per_rank, 1)
    ]


def test_fewer_data_parallel_ranks_see_every_sample_once():
    """Four ranks for four steps, then two ranks with a smaller batch: an epoch without loss or repetition."""
    plan = run_plan(MODEL, dp=4)
    first = dataset(plan)
    seen = seen_samples(first, 4, range(4))
    smaller = run_plan(MODEL, batch=4, dp=2)
    second = dataset(smaller)
    second.load_state_dict(first.state_dict(4))
    left = first.num_samples - len(seen)
    seen += seen_samples(second, 2, range(4, 4 + left // 4))
    assert len(set(seen)) == len(seen) == first.num_samples - left % 4


def test_other_data_is_refused():
    plan = run_plan(MODEL)
    saved = dataset(plan).state_dict(3)
    with pytest.raises(InputError, match="samples would be lost or seen twice"):
        dataset(plan).load_state_dict({**saved, "seed": saved["seed"] + 1})


def restored(rank: int, world: int, plan: str, folder: str) -> tuple[int, list[bool]]:
    """After loading over garbage: which of this rank's states changed back."""
    engine = make_engine(plan)
    train(engine, dataset(engine.plan), range(1))
    engine.save(folder, 1)
    right = state(engine)
    for piece in engine._pieces(whole=True):
        piece.tensor.fill_(7.0)
    engine.load(folder)
    return engine.mesh.coordinates[DP], [torch.equal(a[-1], b[-1]) for a, b in zip(right, state(engine), strict=True)]


def test_every_rank_restores_its_own_shard(ranks, tmp_path: Path):
    plan = run_plan(MODEL, dp=4, zero=1)
    results = ranks(restored, 4, plan.to_toml(), str(tmp_path))
    assert [index for index, _ in results] == [0, 1, 2, 3]
    assert all(all(same) for _, same in results)
