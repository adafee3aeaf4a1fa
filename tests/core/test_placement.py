"""Boxes tile every parameter; ownership counts each element once; query heads meet their key/value heads."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from meshwright.comm.mesh import axis_groups
from meshwright.core.axes import (
    ALL_AXES,
    MESH_ORDER,
    PP,
    PP_ENDS,
    PP_MIRROR,
    TP,
    TP_DEPTH,
    TP_KV,
    coordinates_of,
    rank_of,
)
from meshwright.core.flat import make_buckets, rank_buckets
from meshwright.core.model import ModelSpec
from meshwright.core.placement import Placement, kv_group, placements
from meshwright.core.sources import load_model
from meshwright.core.strategy import Strategy

LAYOUTS = [(1, 1), (2, 1), (1, 2), (4, 1), (4, 3), (8, 2), (2, 5)]
"""(tp, pp)."""


def _spec(family: str, tied: bool = False) -> ModelSpec:
    small = {"num_layers": 5, "hidden_size": 16, "num_heads": 8, "num_kv_heads": 2, "head_dim": 4, "ffn_size": 24}
    if family == "gpt2":
        small["num_kv_heads"] = 8
    changes = {**small, "vocab_size": 13, "max_positions": 7, "tied_embeddings": tied}
    return load_model({"gpt2": "gpt2", "qwen3": "qwen3-8b", "mixtral": "mixtral-8x7b"}[family]).model_copy(
        update=changes
    )


def _everywhere(spec: ModelSpec, strategy: Strategy) -> list[tuple[dict[str, int], Placement]]:
    return [
        ({PP: stage, "dp": 0, TP: index}, placement)
        for stage, index in product(range(strategy.pp), range(strategy.tp))
        for placement in placements(spec, strategy, {PP: stage, "dp": 0, TP: index})
    ]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mixtral"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_is_owned_once_and_held(layout: tuple[int, int], family: str, tied: bool) -> None:
    spec, strategy = _spec(family, tied), Strategy(tp=layout[0], pp=layout[1])
    owned = {param.name: np.zeros(param.shape, dtype=int) for param in spec.parameters()}
    for _, placement in _everywhere(spec, strategy):
        owned[placement.name][placement.box.slices] += placement.owned
    assert all((count == 1).all() for count in owned.values())


FURTHER = {"zb-v": 4, "dualpipe": 4, "dualpipe-v": 4, "bfs": 4}
"""Schedule → ranks of a pipeline, with two stages on each."""


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", FURTHER)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_with_several_stages_per_rank_every_element_is_owned_once(schedule: str, tied: bool, tp: int) -> None:
    spec = _spec("qwen3", tied).model_copy(update={"num_layers": 9})
    strategy = Strategy(tp=tp, pp=FURTHER[schedule], schedule=schedule, num_chunks=2 if schedule == "bfs" else 1)
    owned = {param.name: np.zeros(param.shape, dtype=int) for param in spec.parameters()}
    for _, placement in _everywhere(spec, strategy):
        owned[placement.name][placement.box.slices] += placement.owned
    assert all((count == 1).all() for count in owned.values())


def test_a_tied_embedding_is_held_once_where_both_ends_stand_on_one_rank() -> None:
    spec = _spec("qwen3", tied=True).model_copy(update={"num_layers": 8})
    folded = Strategy(pp=4, schedule="zb-v")
    held = [(at[PP], p) for at, p in _everywhere(spec, folded) if p.name == "embedding.weight"]
    assert [(rank, p.stages, p.sum_over) for rank, p in held] == [(0, (0, 7), ())]
    looped = Strategy(pp=4, schedule="bfs", num_chunks=2)
    held = [(at[PP], p) for at, p in _everywhere(spec, looped) if p.name == "embedding.weight"]
    assert [(rank, p.stages, p.sum_over) for rank, p in held] == [(0, (0,), (PP_ENDS,)), (3, (7,), (PP_ENDS,))]


def test_of_two_directions_mirrored_ranks_hold_the_same_and_lay_it_out_alike() -> None:
    spec, strategy = _spec("qwen3", tied=True), Strategy(pp=4, tp=4, schedule="dualpipe")
    for rank, index in product(range(4), range(4)):
        held, mirrored = (rank_buckets(spec, strategy, {PP: at, "dp": 0, TP: index}) for at in (rank, 3 - rank))
        for one, other in zip(held, mirrored, strict=True):
            assert PP_MIRROR in one.sum_over
            assert one.sum_over == other.sum_over
            assert [(s.placement.key, s.start) for s in one.slots] == [(s.placement.key, s.start) for s in other.slots]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_query_heads_meet_their_key_value_heads(tp: int) -> None:
    spec = _spec("qwen3")
    per_kv = spec.num_heads // spec.num_kv_heads
    for index in range(tp):
        held = {p.name: p.box for p in placements(spec, Strategy(tp=tp), {PP: 0, "dp": 0, TP: index})}
        query, key = held["layers.0.attention.q.weight"], held["layers.0.attention.k.weight"]

        def rows(box: object) -> set[int]:
            rows = box.slices[0]  # type: ignore[attr-defined]
            assert rows.start % spec.head_dim == rows.stop % spec.head_dim == 0
            return set(range(rows.start // spec.head_dim, rows.stop // spec.head_dim))

        assert {head // per_kv for head in rows(query)} == rows(key)


GRIDS = {"2d": (16, 1), "2.5d": (32, 2), "3d": (64, 1)}
"""Kind → tp and depth, of side 4: each of two key/value heads is held by two columns of ranks."""


@pytest.mark.parametrize("kind", GRIDS)
def test_on_a_grid_key_value_heads_are_held_by_neighbours_and_owned_once(kind: str) -> None:
    spec, (tp, depth) = _spec("qwen3"), GRIDS[kind]
    strategy = Strategy(tp=tp, tensor={"kind": kind, "depth": depth})
    groups = axis_groups(strategy.sizes, kv_group(spec, strategy), tensor=strategy.grid.axes)[TP_KV]
    owned = {param.name: np.zeros(param.shape, dtype=int) for param in spec.parameters()}
    boxes = {}
    for at, placement in _everywhere(spec, strategy):
        owned[placement.name][placement.box.slices] += placement.owned
        boxes[placement.name, at[TP]] = placement
    assert all((count == 1).all() for count in owned.values())
    name, per_kv = "layers.0.attention.k.weight", spec.num_heads // spec.num_kv_heads
    for group in groups:
        assert len(group) == 2
        assert len({boxes[name, rank].box for rank in group}) == 1
        columns = {strategy.grid.coordinates(rank)[strategy.grid.heads_axis] for rank in group}
        assert len(columns) == 2
    for rank in range(tp):
        key, query = boxes[name, rank], boxes["layers.0.attention.q.weight", rank]
        assert key.sum_over == ((TP_DEPTH, TP_KV) if depth > 1 else (TP_KV,))
        heads = range(query.box.slices[0].start, query.box.slices[0].stop, spec.head_dim)
        assert {head // spec.head_dim // per_kv for head in heads} == {key.box.offsets[0] // spec.head_dim}


def test_what_must_be_summed() -> None:
    spec, strategy = _spec("qwen3", tied=True), Strategy(tp=4, pp=2)
    sums = {placement.name: placement.sum_over for _, placement in _everywhere(spec, strategy)}
    assert sums["layers.0.attention.q_norm.weight"] == (TP,)
    assert sums["layers.0.attention.k.weight"] == (TP_KV,)
    assert sums["embedding.weight"] == (PP_ENDS,)
    assert sums["layers.0.attention.q.weight"] == sums["layers.0.mlp_norm.weight"] == ()
    assert set().union(*sums.values()) <= set(ALL_AXES)
    alone = [placement.sum_over for _, placement in _everywhere(spec, Strategy())]
    assert set(alone) == {()}


def test_layers_that_do_not_divide_stand_on_one_stage_each() -> None:
    for layers, pp in ((30, 4), (5, 4), (7, 7), (12, 5)):
        stages = Strategy(pp=pp).stage_layers(layers)
        assert [layer for stage in stages for layer in stage] == list(range(layers))
        assert min(len(stage) for stage in stages) >= 1
        assert max(len(stage) for stage in stages) - min(len(stage) for stage in stages) <= 1


def test_rank_order_puts_tp_innermost() -> None:
    sizes = {"pp": 2, "dp": 3, "cp": 1, "tp": 4}
    assert [rank_of(coordinates_of(rank, sizes), sizes) for rank in range(24)] == list(range(24))
    assert coordinates_of(1, sizes) == {"pp": 0, "dp": 0, "cp": 0, "tp": 1}
    assert tuple(coordinates_of(0, sizes)) == MESH_ORDER


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize("cap_bytes", [1, 2000, 10**9])
def test_buckets_hold_each_parameter_once(dp: int, cap_bytes: int) -> None:
    held = placements(_spec("qwen3", tied=True), Strategy(tp=4, pp=2), {PP: 0, "dp": 0, TP: 1})
    buckets = make_buckets(held, dp, cap_bytes, 4)
    assert sorted(slot.placement.name for b in buckets for slot in b.slots) == sorted(p.name for p in held)
    for bucket in buckets:
        assert bucket.numel % dp == 0
        assert {slot.placement.sum_over for slot in bucket.slots} == {bucket.sum_over}
        covered = np.zeros(bucket.numel, dtype=int)
        for slot in bucket.slots:
            covered[slot.start : slot.stop] += 1
        assert covered.max() == 1
        assert bucket.numel - covered.sum() < dp
        pieces = np.zeros(bucket.numel, dtype=int)
        for index in range(dp):
            for segment in bucket.segments(*bucket.shard(dp, index)):
                pieces[segment.start : segment.stop] += 1
                for slot in bucket.slots:
                    if slot.start < segment.stop and segment.start < slot.stop:
                        assert (slot.placement.decay, slot.placement.owned) == (segment.decay, segment.owned)
        assert (pieces == covered).all()
