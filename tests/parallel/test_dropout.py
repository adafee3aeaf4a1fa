"""Dropout: one process's result in every layout, the right rate, masks that have nothing to do with each other."""

from __future__ import annotations

from contextlib import closing
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.core.plan import Plan
from meshwright.models.documents import document_mask
from meshwright.parallel.context import block
from meshwright.parallel.context.local import attention
from meshwright.parallel.dropout import Dropout, Dropped, Masks, ScoreDropout, ScoreMask
from meshwright.run.engine import make_mesh
from meshwright.run.parity import find_mismatch
from tests.parallel.layouts import gpt2, llama, make_plan, qwen3
from tests.parallel.runs import SHORT_PARITY, dataset, make_engine, train
from tests.parallel.test_matrix import Ranks, assert_parity

LLAMA, QWEN3, GPT2 = llama(num_layers=2), qwen3(num_layers=2), gpt2(num_layers=2)
RATE = 0.3


def plan_of(model: Any, rate: float = RATE, attention: float = 0.0, **strategy: Any) -> Plan:
    plan = make_plan(model, **strategy)
    rates = {"dropout": rate, "attention_dropout": attention}
    return plan.model_copy(update={"job": plan.job.model_copy(update=rates)})


def in_attention(model: Any, **strategy: Any) -> Plan:
    return plan_of(model, 0.0, 0.4, **strategy)


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


GRIDS = [
    plan_of(llama(num_layers=2, num_heads=4, num_kv_heads=4), attention=0.4, tp=4, tensor={"kind": "2d"},
            micro_batch_size=2, num_micro_batches=2),
    plan_of(llama(num_layers=2, num_heads=4, num_kv_heads=4), attention=0.4, tp=8, tensor={"kind": "3d"},
            micro_batch_size=4),
    plan_of(gpt2(num_layers=1), tp=8, tensor={"kind": "2.5d", "depth": 2}, micro_batch_size=4),
]  # fmt: skip
RINGS = ("ring", "ring-self-attention", "ulysses")
HEADS = llama(num_layers=2, num_heads=8, num_kv_heads=4, head_dim=4)
OF_ATTENTION = [
    in_attention(QWEN3, micro_batch_size=2, num_micro_batches=2, recompute="selective"),
    in_attention(LLAMA, tp=2, dp=2, micro_batch_size=2, recompute="full"),
    in_attention(HEADS, tp=2, sequence="megatron", pp=2, num_micro_batches=2, schedule="zb-h1"),
    *(in_attention(HEADS, context={"kind": kind, "degree": 2, "balance": balance}, micro_batch_size=2)
      for kind, balance in zip(RINGS, ("zigzag", "striped", "zigzag"), strict=True)),
    *(in_attention(HEADS, context={"kind": kind, "degree": 2}, tp=2) for kind in RINGS),
]  # fmt: skip


@pytest.mark.parametrize("plans", [LAYOUTS, GRIDS, OF_ATTENTION], ids=["hidden states", "grids", "probabilities"])
def test_every_layout_drops_the_same(ranks: Ranks, plans: list[Plan]) -> None:
    """Losses, gradients, weights over several steps; bytes sent and kept as without."""
    assert_parity(ranks, plans)


def _every_rank_starts_anew(self: Masks, positions: torch.Tensor) -> torch.Tensor:
    return positions.chunk(self.part.tokens[1])[0]


def _forgets_the_micro_batch(self: Masks, micro_batch: int) -> None:
    self.micro_batch = 0


def _heads_of_the_first_rank(self: Masks, place: int, num_heads: int, index: int) -> Any:
    return OF_ATTENTION_RIGHT(self, place, num_heads, 0)


def _keys_numbered_by_rank(self: Dropped, rows: torch.Tensor, keys: torch.Tensor) -> Any:
    return BETWEEN_RIGHT(self, rows, torch.arange(len(keys)))


OF_ATTENTION_RIGHT, BETWEEN_RIGHT = Masks.of_attention, Dropped.between
FAULTS: dict[str, tuple[Any, str, Any, Plan]] = {
    "tokens numbered by rank": (Masks, "_own", _every_rank_starts_anew, LAYOUTS[4]),
    "the first micro-batch's mask": (Masks, "enter", _forgets_the_micro_batch, LAYOUTS[9]),
    "heads numbered by rank": (Masks, "of_attention", _heads_of_the_first_rank, OF_ATTENTION[1]),
    "keys numbered by rank": (Dropped, "between", _keys_numbered_by_rank, OF_ATTENTION[3]),
}


def with_fault(rank: int, world: int, name: str) -> str | None:
    owner, attribute, wrong, plan = FAULTS[name]
    with pytest.MonkeyPatch.context() as patch, closing(make_mesh(plan)) as mesh:
        patch.setattr(owner, attribute, wrong)
        mismatch = find_mismatch(plan, mesh, num_steps=SHORT_PARITY)
        return mismatch and mismatch.what


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_number_is_noticed(ranks: Ranks, name: str) -> None:
    assert "gradient" in ranks(with_fault, FAULTS[name][3].strategy.world_size, name, timeout_s=60)


def masks_of(sequences: int = 8, length: int = 64, step: int = 0, seed: int = 0, rate: float = RATE) -> Masks:
    masks = Masks(rate, seed)
    masks.step = step
    masks._rows[0] = masks._of_tokens(masks._of_sequences(sequences, torch.device("cpu"), 0), torch.arange(length))
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


def of_attention(layer: int = 0, **of: Any) -> torch.Tensor:
    """bool [b, a, s, s] of dropped probabilities."""
    masks = masks_of(**{"sequences": 2, "length": 96, **of})
    masks.attention_rate, masks._is_active = RATE, True
    masks._sequences[0] = masks._of_sequences(len(masks._rows[0]), torch.device("cpu"), 0)
    found, at = ScoreDropout(masks, layer, 0).now(torch.empty(1, 4)), torch.arange(96)
    assert found is not None
    ones = torch.ones(len(masks._rows[0]), 4, 1, 96, 96)
    return found.between(found.rows(at), at).apply_(ones).squeeze(2) == 0


def test_masks_of_probabilities_have_nothing_to_do_with_each_other() -> None:
    """Of layers, steps, seeds, and of neighbouring sequences, heads, queries and keys; a query's key is no key's
    query."""
    base = of_attention()
    assert abs(float(base.float().mean()) - RATE) < 4 * (RATE * (1 - RATE) / base.numel()) ** 0.5
    others = [of_attention(layer=1), of_attention(step=1), of_attention(seed=1), base.transpose(2, 3),
              *(base.roll(1, dim) for dim in range(4))]  # fmt: skip
    for a, b in combinations([base, *others], 2):
        pair = torch.stack((a.flatten(), b.flatten())).double()
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / base.numel() ** 0.5


def test_a_few_probabilities_at_a_time_with_documents_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to a mask of all of them, forward and backward, and no more than a few are there at once."""
    length, most = 40, 512
    q, k, v = (torch.randn(2, a, length, 4, dtype=torch.float64, requires_grad=True) for a in (4, 2, 2))
    documents = torch.tensor([[0] * 9 + [1] * 31, [0] * 25 + [1] * 15])
    found = Dropped(torch.tensor([5, 9]), torch.arange(4), RATE)
    at, seen = torch.arange(length), []
    of_part = ScoreMask.kept
    ones = torch.ones(2, 2, 2, length, length, dtype=torch.float64)
    kept = found.between(found.rows(at), at).apply_(ones).flatten(1, 2)
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) / 2
    p = scores.masked_fill(~document_mask(documents).unsqueeze(1), float("-inf")).softmax(-1)
    expected = (p * kept) @ v.repeat_interleave(2, 1)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)

    def counted(self: ScoreMask, dtype: torch.dtype) -> torch.Tensor:
        seen.append(of_part(self, dtype).numel())
        return of_part(self, dtype)

    monkeypatch.setattr(block, "MAX_SCORES", {"cpu": most})
    monkeypatch.setattr(ScoreMask, "kept", counted)
    ours = attention(q, k, v, documents, found)
    assert torch.allclose(ours, expected, rtol=0, atol=1e-12)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), grad), wanted, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
    assert 0 < max(seen) <= most


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
