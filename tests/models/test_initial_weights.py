"""Initial weights do not depend on how a parameter is cut."""

from itertools import pairwise

import pytest
import torch

from meshwright.core.model import ParamSpec
from meshwright.core.placement import Box, param_box
from meshwright.core.strategy import Strategy
from meshwright.models.build import build
from meshwright.models.init import TILE, initial_box, initial_std, initialize
from tests.models.tiny import SPECS

SPEC = SPECS["llama"]
BIG = ParamSpec("layers.0.mlp.up.weight", (2 * TILE + 37, TILE + 11), ("ffn", "embed"), "mlp", 0)


def whole(param):
    return Box((0,) * len(param.shape), param.shape)


def cuts(total, parts):
    edges = [total * i // parts for i in range(parts + 1)]
    return [(a, b - a) for a, b in pairwise(edges)]


@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (7, 1), (3, 4), (2, 2)])
def test_any_grid_of_boxes_is_the_whole(rows, columns):
    full = initial_box(BIG, SPEC, whole(BIG), seed=1)
    grid = [
        [initial_box(BIG, SPEC, Box((r, c), (nr, nc)), seed=1) for c, nc in cuts(BIG.shape[1], columns)]
        for r, nr in cuts(BIG.shape[0], rows)
    ]
    assert torch.equal(torch.cat([torch.cat(row, dim=1) for row in grid]), full)


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_boxes_are_parts_of_the_whole(tp):
    for param in SPECS["gpt2"].parameters():
        full = initial_box(param, SPECS["gpt2"], whole(param), seed=0)
        for index in range(tp):
            box = param_box(SPECS["gpt2"], param, Strategy(tp=tp).grid, index)
            assert torch.equal(initial_box(param, SPECS["gpt2"], box, seed=0), full[box.slices])


def test_seed_name_and_tile_all_matter():
    full = initial_box(BIG, SPEC, whole(BIG), seed=1)
    other = ParamSpec("layers.1.mlp.up.weight", BIG.shape, BIG.dims, BIG.part, 1)
    assert not torch.equal(full, initial_box(BIG, SPEC, whole(BIG), seed=2))
    assert not torch.equal(full, initial_box(other, SPEC, whole(other), seed=1))
    tiles = [full[r : r + 11, c : c + 11] for r in (0, TILE, 2 * TILE) for c in (0, TILE)]
    assert not any(torch.equal(a, b) for i, a in enumerate(tiles) for b in tiles[i + 1 :])


def test_distribution():
    full = initial_box(BIG, SPEC, whole(BIG), seed=3).double()
    error = SPEC.initializer_std / BIG.numel**0.5
    assert abs(full.mean()) < 4 * error
    assert full.std() == pytest.approx(SPEC.initializer_std, rel=0.01)
    assert (full / SPEC.initializer_std).pow(4).mean() == pytest.approx(3, rel=0.05)


def test_projections_into_the_residual_stream_are_smaller():
    std = {param.name: initial_std(param, SPEC) for param in SPEC.parameters()}
    assert std["layers.1.attention.q.weight"] == SPEC.initializer_std
    small = {name for name, value in std.items() if value == SPEC.initializer_std / 2}  # 2 layers: √4
    assert small == {f"layers.{i}.{end}.weight" for i in range(2) for end in ("attention.o", "mlp.down")}


@pytest.mark.parametrize("name", ["gpt2", "qwen3-wide-heads"])
def test_initialize_fills_everything(name):
    spec = SPECS[name]
    model = build(spec, "cpu", torch.float64)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    initialize(model, spec, seed=0)
    for path, parameter in model.named_parameters():
        if "norm" in path:
            assert (parameter == (1 if path.endswith("weight") else 0)).all()
        elif path.endswith("bias"):
            assert (parameter == 0).all()
        else:
            assert parameter.isfinite().all()
            assert parameter.std() > 0
    assert model.head.weight is model.embedding.weight or not spec.tied_embeddings
