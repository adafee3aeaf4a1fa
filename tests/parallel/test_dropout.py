"""Dropout: one process's result in every layout, the right rate, masks that have nothing to do with each other."""

from __future__ import annotations

from contextlib import closing
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.core.plan import Plan
from meshwright.parallel.dropout import Dropout, Masks
from meshwright.run.engine import make_mesh
from meshwright.run.parity import find_mismatch
from tests.parallel.layouts import gpt2, llama, make_plan, qwen3
from tests.parallel.runs import dataset, make_engine, train
from tests.parallel.test_matrix import Ranks, assert_parity

LLAMA, QWEN3, GPT2 = llama(num_layers=2), qwen3(num_layers=2), gpt2(num_layers=2)
RATE = 0.3


def plan_of(model: Any, rate: float = RATE, **strategy: Any) -> Plan:
    plan = make_plan(model, **strategy)
    return plan.model_copy(update={"job": plan.job.model_copy(update={"dropout": rate})})


LAYOUTS = [
    plan_of(GPT2, micro_batch_size=2, num_micro_batches=2),
    plan_of(LLAMA, dp=2, num_micro_batches=2),
    plan_of(LLAMA, dp=2, zero=3, recompute="full", micro_batch_size=2),
    plan_of(QWEN3, tp=2, recompute="selective", micro_batch_size=2),
    plan_of(GPT2, tp=2, sequence="megatron", micro_batch_size=2),
    plan_of(GPT2, tp=2, sequence="megatron", recompute="full", recompute_group=2),
    plan_of(LLAMA, context={"kind": "ring", "degree": 2, "balance": "zigzag"}, micro_batch_size=2),
    plan_of(GPT2, context={"kind": "ulysses", "degree": 2, "balance": "striped"}, tp=2, sequence="megatron"),
    plan_of(LLAMA, pp=2, num_micro_batches=3, recompute="full"),
    plan_of(LLAMA, pp=2, num_micro_batches=4, schedule="zb-h1"),
    plan_of(LLAMA, tp=2, pp=2, dp=2, num_micro_batches=2, sequence="megatron", schedule="dualpipe"),
]


def test_every_layout_drops_the_same(ranks: Ranks) -> None:
    """Losses, gradients, weights over several steps; bytes sent and kept as without."""
    assert_parity(ranks, LAYOUTS)


def _every_rank_starts_anew(self: Masks, positions: torch.Tensor) -> torch.Tensor:
    return positions.chunk(self._num_parts)[0]


def _forgets_the_micro_batch(self: Masks, micro_batch: int) -> None:
    self.micro_batch = 0


FAULTS: dict[str, tuple[str, Any, Plan]] = {
    "tokens numbered by rank": ("_own", _every_rank_starts_anew, LAYOUTS[4]),
    "the first micro-batch's mask": ("enter", _forgets_the_micro_batch, LAYOUTS[9]),
}


def with_fault(rank: int, world: int, name: str) -> str | None:
    attribute, wrong, plan = FAULTS[name]
    with pytest.MonkeyPatch.context() as patch, closing(make_mesh(plan)) as mesh:
        patch.setattr(Masks, attribute, wrong)
        mismatch = find_mismatch(plan, mesh)
        return mismatch and mismatch.what


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_number_is_noticed(ranks: Ranks, name: str) -> None:
    assert "gradient" in ranks(with_fault, FAULTS[name][2].strategy.world_size, name, timeout_s=60)


def masks_of(sequences: int = 8, length: int = 64, step: int = 0, seed: int = 0, rate: float = RATE) -> Masks:
    masks = Masks(rate, seed)
    masks.step = step
    masks._rows[0] = masks._of_tokens(sequences, torch.arange(length), 0)
    return masks


def dropped(masks: Masks, layer: int = 0, site: int = 1, features: int = 96) -> torch.Tensor:
    """bool [b, s, h]."""
    b, s = masks._rows[0].shape
    return masks.drop(torch.ones(b, s, features), Dropout(masks, layer, site).place, 0) == 0


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_rate_and_the_scale(rate: float) -> None:
    masks = masks_of(rate=rate)
    off = dropped(masks)
    spread = (rate * (1 - rate) / off.numel()) ** 0.5
    assert abs(float(off.float().mean()) - rate) < 4 * spread
    for dim in range(3):
        of_slice = off.float().movedim(dim, 0).flatten(1).mean(1)
        assert float((of_slice - rate).abs().max()) < 6 * (rate * (1 - rate) / off[0].numel() * len(off)) ** 0.5 * 3
    kept = masks.drop(torch.ones(8, 64, 96, dtype=torch.float64), 7, 0)
    assert set(kept.unique().tolist()) == {0.0, 1 / (1 - rate)}


def test_masks_have_nothing_to_do_with_each_other() -> None:
    """Of layers, sites, steps, seeds, and of neighbouring sequences, tokens and features."""
    base = dropped(masks_of())
    others = [dropped(masks_of(), layer=1), dropped(masks_of(), site=2), dropped(masks_of(step=1)),
              dropped(masks_of(seed=1)), *(base.roll(1, dim) for dim in range(3))]  # fmt: skip
    for a, b in combinations([base, *others], 2):
        pair = torch.stack((a.flatten(), b.flatten())).double()
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / base.numel() ** 0.5
    assert torch.equal(base, dropped(masks_of()))


def test_evaluation_drops_nothing_and_a_step_does() -> None:
    with_it, without = (make_engine(plan_of(GPT2, rate, micro_batch_size=2)) for rate in (RATE, 0.0))
    batches = dataset(with_it.plan).micro_batches(0, 0, 1, 1, 2)
    assert with_it.evaluate([batches]) == without.evaluate([batches])
    assert float(with_it.forward_backward(batches)) != float(without.forward_backward(batches))


def test_a_resumed_run_goes_on_with_the_next_masks(tmp_path: Path) -> None:
    plan = plan_of(GPT2, num_micro_batches=2)
    engine, data = make_engine(plan), dataset(plan)
    train(engine, data, range(2))
    engine.save(tmp_path, 2)
    expected = train(engine, data, [2])
    resumed = make_engine(plan)
    resumed.load(tmp_path)
    assert train(resumed, data, [2]) == expected
