"""Recompute policies: gradients to the bit, bytes kept and sent as forecast, beside every other technique."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.core.strategy import Strategy
from tests.parallel.layouts import gpt2, llama, make_plan, qwen3
from tests.parallel.runs import dataset, gradients, make_engine, own_batches
from tests.parallel.test_matrix import Ranks, assert_parity

LLAMA, QWEN3, GPT2 = llama(num_layers=5), qwen3(num_layers=4), gpt2(num_layers=4)
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "block": {"recompute": "full", "recompute_layers": 2},
    "uniform": {"recompute": "full", "recompute_group": 2},
    "uniform block": {"recompute": "full", "recompute_layers": 3, "recompute_group": 2},
    "selective": {"recompute": "selective"},
    "selective block": {"recompute": "selective", "recompute_layers": 1},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {"micro_batch_size": 2, "num_micro_batches": 2},
    "split backward": {"schedule": "zb-h1", "pp": 2, "num_micro_batches": 2},
    "interleaved": {"schedule": "interleaved-1f1b", "pp": 2, "num_chunks": 2, "num_micro_batches": 2},
    "tp": {"tp": 2, "micro_batch_size": 2},
    "sequence": {"tp": 2, "sequence": "megatron", "micro_batch_size": 2},
    "sequence and split backward": {"tp": 2, "sequence": "megatron", "pp": 2, "schedule": "zb-v"},
    "zero 3": {"dp": 2, "zero": 3},
}


def test_policies_equal_one_process(ranks: Ranks) -> None:
    """Losses, gradients, weights; traffic and kept bytes as forecast. Every layout meets one policy or two."""
    models, policies, plans = (LLAMA, QWEN3, GPT2), list(POLICIES.values()), []
    for at, layout in enumerate(LAYOUTS.values()):
        for policy in (policies[at % 6], policies[(at + 3) % 6])[: 1 + (at in (1, 4))]:
            if layout.get("zero") != 3 or "recompute_group" not in policy:
                plans.append(make_plan(models[(at + len(plans)) % 3], **layout, **policy))
    assert_parity(ranks, plans)


def test_grids_run_attention_again(ranks: Ranks) -> None:
    """Also where backward is split, on a square and on a cube."""
    heads = llama(num_layers=2, num_kv_heads=4)
    split = {"schedule": "zb-h1", "num_micro_batches": 2}
    plans = [
        make_plan(heads, tp=4, pp=2, tensor={"kind": "2d"}, micro_batch_size=2, recompute="selective", **split),
        make_plan(GPT2, tp=8, tensor={"kind": "3d"}, micro_batch_size=4, recompute="selective", recompute_layers=2),
        make_plan(heads, tp=8, tensor={"kind": "3d"}, micro_batch_size=4, recompute="selective", **split),
    ]
    assert_parity(ranks, plans)


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_those_without_to_the_bit(policy: str) -> None:
    """With dropout too."""

    def of(**changes: Any) -> Any:
        plan = make_plan(GPT2, num_micro_batches=2, micro_batch_size=2, precision="fp32", **changes)
        plan = plan.model_copy(update={"job": plan.job.model_copy(update={"dropout": 0.2})})
        engine = make_engine(plan)
        engine.forward_backward(own_batches(engine, dataset(plan), 0))
        return gradients(engine)

    expected, found = of(), of(**POLICIES[policy])
    assert all(torch.equal(a[-1], b[-1]) for a, b in zip(expected, found, strict=True))


def test_groups() -> None:
    chosen = Strategy(recompute="full", recompute_layers=5, recompute_group=2)
    assert chosen.recompute_groups(range(10, 18)) == (range(10, 12), range(12, 14), range(14, 15))
    assert chosen.recompute_groups(range(3)) == (range(2), range(2, 3))
    assert Strategy(recompute_layers=5).recompute_groups(range(3)) == ()
    assert Strategy(recompute="selective").num_recomputed(4) == 4
