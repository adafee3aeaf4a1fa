"""Multi-head latent attention over ranks, beside one process: losses, gradients, weights, bytes sent and bytes held."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright.core.errors import RuleError
from meshwright.core.model import ModelSpec
from meshwright.core.router import RouterSpec
from tests.parallel.layouts import latent, make_plan
from tests.parallel.test_matrix import assert_parity

Ranks = Callable[..., list[list[str | None]]]

EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_size": 8, "shared_ffn_size": 8, "dense_layers": (0,)}
GATE = RouterSpec(score="sigmoid", bias=True, renormalise="before_drop", scale=2.5, balance_loss=0.1, num_groups=4,
                  groups_per_token=2)  # fmt: skip
MODELS: dict[str, ModelSpec] = {
    "dense": latent(),
    "plain queries": latent(None),
    "v3": latent(**EXPERTS, router=GATE),
    "v2": latent(None, **EXPERTS, router=RouterSpec(balance_loss=0.1)),
}

LAYOUTS = [
    ("dense", {}),
    ("v2", {"recompute": "selective", "num_micro_batches": 2}),
    ("v2", {"offload": {"activations": "cpu"}, "num_micro_batches": 2}),
    ("dense", {"tp": 2, "num_micro_batches": 2}),
    ("plain queries", {"tp": 2, "sequence": "megatron"}),
    ("dense", {"tp": 2, "sequence": "megatron", "recompute": "selective", "zero": 1}),
    ("v3", {"tp": 2, "recompute": "full", "sequence": "megatron"}),
    ("v3", {"context": {"degree": 2}, "zero": 3}),
    ("v3", {"dp": 2, "expert": {"degree": 2}, "zero": 2}),
    ("dense", {"pp": 2, "schedule": "zb-h1", "num_micro_batches": 3}),
    ("dense", {"dp": 2, "zero": 3, "tile": 2}),
    ("plain queries", {"tp": 2, "context": {"degree": 2, "kind": "ulysses", "balance": "zigzag"}, "zero": 1}),
    ("dense", {"tp": 2, "context": {"degree": 2, "kind": "ring", "balance": "zigzag"}, "sequence": "megatron"}),
    ("plain queries", {"context": {"degree": 2, "kind": "ring-self-attention"}, "pp": 2, "num_micro_batches": 2}),
    ("dense", {"tp": 2, "sequence": "megatron", "pp": 2, "schedule": "zb-h1", "num_micro_batches": 3}),
    ("v2", {"tp": 2, "pp": 2, "schedule": "zb-h1", "num_micro_batches": 3}),
    ("v3", {"dp": 2, "tp": 2, "expert": {"degree": 2}, "zero": 1}),
]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_layout_is_one_process(ranks: Ranks, world: int) -> None:
    plans = [make_plan(MODELS[name], **layout) for name, layout in LAYOUTS]
    assert_parity(ranks, [plan for plan in plans if plan.strategy.world_size == world])


def test_grids_are_refused() -> None:
    with pytest.raises(RuleError, match=r"has latent attention: tensor.kind=2d \(rule `latent`") as raised:
        make_plan(MODELS["dense"], tp=4, tensor={"kind": "2d"}, micro_batch_size=2)
    assert "\n" not in str(raised.value)
