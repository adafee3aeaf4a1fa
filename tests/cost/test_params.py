"""Parameter counts by part, in matrix products, and on each rank."""

from __future__ import annotations

from itertools import product

import pytest

from meshwright.core.axes import MESH_ORDER
from meshwright.core.model import ModelSpec
from meshwright.core.placement import placements
from meshwright.core.sources import load_model, model_names
from meshwright.core.strategy import Strategy
from meshwright.cost.params import (
    local_parameter_counts,
    local_parameters,
    matmul_parameters,
    parameter_counts,
)


def _ranks(strategy: Strategy) -> list[dict[str, int]]:
    return [
        dict(zip(MESH_ORDER, at, strict=True)) for at in product(*(range(strategy.sizes[axis]) for axis in MESH_ORDER))
    ]


def _tiny(**changes: object) -> ModelSpec:
    small = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 40}
    return load_model("qwen3-8b").model_copy(update={**small, "vocab_size": 50, **changes})


def test_parts_by_hand() -> None:
    """GPT-2 small, from the shapes: h = 768, 12 layers, 4h MLP, biases everywhere, tied head."""
    h, layers, vocab, positions = 768, 12, 50257, 1024
    assert parameter_counts(load_model("gpt2")) == {
        "embedding": (vocab + positions) * h,
        "attention": layers * (4 * h * h + 4 * h),
        "mlp": layers * (8 * h * h + 5 * h),
        "norm": (2 * layers + 1) * 2 * h,
    }


@pytest.mark.parametrize("name", model_names())
def test_parts_sum_to_the_total(name: str) -> None:
    spec = load_model(name)
    assert sum(parameter_counts(spec).values()) == spec.num_parameters
    assert (spec.num_active_parameters < spec.num_parameters) == bool(spec.num_experts)


def test_matmul_parameters() -> None:
    """Without look-ups, biases and norms; a tied head counts although it has no parameter of its own."""
    h, layers, vocab = 768, 12, 50257
    assert matmul_parameters(load_model("gpt2")) == layers * 12 * h * h + vocab * h
    llama = load_model("llama-3-8b")
    counts = parameter_counts(llama)
    assert matmul_parameters(llama) == counts["attention"] + counts["mlp"] + counts["head"]
    tied = llama.model_copy(update={"tied_embeddings": True})
    assert matmul_parameters(tied) == matmul_parameters(llama)
    assert tied.num_parameters == llama.num_parameters - counts["head"]


def test_matmul_parameters_of_experts() -> None:
    spec = load_model("mixtral-8x7b")
    counts = parameter_counts(spec)
    assert matmul_parameters(spec) == counts["attention"] + counts["router"] + counts["head"] + counts["mlp"] // 4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 2, 2), (1, 4, 1), (2, 2, 4), (1, 1, 3)])
def test_owned_elements_of_all_ranks_are_the_model(sizes: tuple[int, int, int], tied: bool) -> None:
    spec = _tiny(tied_embeddings=tied)
    dp, tp, pp = sizes
    strategy = Strategy(dp=dp, tp=tp, pp=pp)
    owned = sum(
        placement.box.numel
        for at in _ranks(strategy)
        if at["dp"] == 0
        for placement in placements(spec, strategy, at)
        if placement.owned
    )
    assert owned == spec.num_parameters


def test_one_rank_holds_everything() -> None:
    spec = _tiny()
    assert local_parameter_counts(spec, Strategy(), {"pp": 0, "dp": 0, "tp": 0}) == parameter_counts(spec)


def test_local_counts_by_hand() -> None:
    """tp = 4 with 2 key/value heads: k and v are cut in 2 and repeated; 50 rows of vocabulary go 13, 13, 12, 12."""
    spec = _tiny()
    strategy = Strategy(tp=4, pp=2)
    first = local_parameter_counts(spec, strategy, {"pp": 0, "dp": 0, "tp": 0})
    last = local_parameter_counts(spec, strategy, {"pp": 1, "dp": 0, "tp": 3})
    h, d, f = 32, 8, 40
    assert first == {
        "embedding": 13 * h,
        "attention": 2 * (2 * h * d + 2 * h * d),
        "mlp": 2 * 3 * h * f // 4,
        "norm": 2 * (2 * h + 2 * d),
    }
    assert last == {**{k: v for k, v in first.items() if k != "embedding"}, "norm": first["norm"] + h, "head": 12 * h}


def test_tied_embedding_is_held_by_both_ends() -> None:
    spec = _tiny(tied_embeddings=True)
    counts = [local_parameter_counts(spec, Strategy(pp=3), {"pp": stage, "dp": 0, "tp": 0}) for stage in range(3)]
    assert [c.get("embedding", 0) for c in counts] == [50 * 32, 0, 50 * 32]


def test_claim_70b_on_tp4() -> None:
    """140 GB of 16-bit weights over 4 ranks are 35 GB each, up to what is replicated."""
    spec = load_model("llama-2-70b")
    strategy = Strategy(tp=4)
    held = [local_parameters(spec, strategy, {"pp": 0, "dp": 0, "tp": k}) for k in range(4)]
    norms = parameter_counts(spec)["norm"]
    assert sum(held) == spec.num_parameters + 3 * norms
    assert 2 * max(held) == pytest.approx(35e9, rel=0.02)
