"""Groups of the axes, and what a rank sees of them."""

from __future__ import annotations

import os
import socket

import pytest
import torch

from meshwright.comm import mesh as m
from meshwright.comm.collectives import all_gather, all_reduce
from meshwright.core.errors import InputError, RankError

D2T2P4 = {"pp": 4, "dp": 2, "tp": 2}


def test_groups_are_the_lines_of_the_grid():
    """16 ranks, tp innermost, pp outermost: the published example of Megatron-LM's rank order."""
    groups = m.axis_groups(D2T2P4)
    assert groups["tp"][:3] == ((0, 1), (2, 3), (4, 5))
    assert groups["dp"][:3] == ((0, 2), (1, 3), (4, 6))
    assert groups["pp"] == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert groups["pp_ends"][:3] == ((0, 12), (4,), (8,))
    assert groups["tp_kv"] == tuple((rank,) for rank in range(16))
    assert groups["world"] == (tuple(range(16)),)


def test_ends_and_mirrors_of_a_pipeline_are_where_its_stages_stand():
    """Stages that go down and up again end where they began; with two directions ranks hold the same in pairs."""
    assert m.axis_groups(D2T2P4, pp_ends=(0, 0))["pp_ends"] == tuple((rank,) for rank in groups_order(D2T2P4))
    assert m.axis_groups(D2T2P4, pp_ends=(2, 1))["pp_ends"][:3] == ((4, 8), (0,), (12,))
    assert m.axis_groups(D2T2P4, pp_mirrored=True)["pp_mirror"][:3] == ((0, 12), (4, 8), (1, 13))
    assert m.axis_groups(D2T2P4)["pp_mirror"][:2] == ((0,), (4,))


def test_experts_see_the_ranks_of_a_stage_in_a_second_way():
    """Experts whole on the four ranks of two tp groups; or each cut over a whole stage."""
    groups = m.axis_groups(D2T2P4, ep=4, etp=1)
    assert groups["etp"][:2] == ((0,), (1,))
    assert groups["ep"] == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    groups = m.axis_groups({"dp": 4, "tp": 2}, ep=2, etp=2)
    assert (groups["etp"][1], groups["ep"][:2], groups["edp"][0]) == ((2, 3), ((0, 2), (1, 3)), (0, 4))
    assert m.axis_groups(D2T2P4, etp=4)["edp"] == tuple((rank,) for rank in range(16))
    assert "ep" not in m.axis_groups(D2T2P4)


def groups_order(sizes):
    """Ranks, one pipeline after the other."""
    return [rank for line in m.axis_groups(sizes)["pp"] for rank in line]


@pytest.mark.parametrize("kv_replicas", [1, 2, 4])
@pytest.mark.parametrize("sizes", [D2T2P4, {"pp": 1, "dp": 3, "tp": 4}, {"pp": 2, "dp": 1, "tp": 4}])
def test_every_rank_stands_in_one_group_of_each_axis(sizes, kv_replicas):
    world = sizes["pp"] * sizes["dp"] * sizes["tp"]
    for groups in m.axis_groups(sizes, kv_replicas).values():
        assert sorted(rank for group in groups for rank in group) == list(range(world))


def test_context_ranks_lie_between_data_and_tensor():
    groups = m.axis_groups({"pp": 2, "dp": 2, "cp": 2, "tp": 2})
    assert groups["tp"][:2] == ((0, 1), (2, 3))
    assert groups["cp"][:3] == ((0, 2), (1, 3), (4, 6))
    assert groups["dp"][:2] == ((0, 4), (1, 5))
    assert groups["dp_cp"] == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    assert groups["pp"][:2] == ((0, 8), (1, 9))


def test_sub_axes_are_the_lines_of_a_grid():
    """Rank = j + q·(i + q·k): rows are neighbours, columns stand q apart, depths q²."""
    groups = m.axis_groups({"dp": 2, "tp": 8}, tensor=[("tp_depth", 2), ("tp_col", 2), ("tp_row", 2)])
    assert groups["tp_row"][:4] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert groups["tp_col"][:4] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert groups["tp_depth"][:4] == ((0, 4), (1, 5), (2, 6), (3, 7))
    for part in groups.values():
        assert sorted(rank for group in part for rank in group) == list(range(16))


def test_a_grid_that_tp_does_not_fill_is_refused():
    with pytest.raises(InputError, match="tp=1 ranks do not fill a grid of tp_col=2 × tp_row=2"):
        m.Mesh.create({}, tensor=[("tp_col", 2), ("tp_row", 2)])


def test_key_value_replicas_are_neighbours():
    assert m.axis_groups({"pp": 1, "dp": 1, "tp": 8}, 4)["tp_kv"] == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_a_data_parallel_group_is_cut_by_nodes():
    """Two nodes of 4 ranks, tp inside: each dp group has two ranks on each node."""
    groups = m.axis_groups({"pp": 1, "dp": 4, "tp": 2}, dp_local=2)
    assert groups["dp"] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert groups["dp_node"] == ((0, 2), (4, 6), (1, 3), (5, 7))
    assert groups["dp_across"] == ((0, 4), (2, 6), (1, 5), (3, 7))


@pytest.mark.parametrize("local", [None, 1, 2, 3, 6])
def test_node_groups_and_groups_across_meet_in_one_rank(local):
    """Together they span the dp group; on one node, or one rank to a node, one of them is the dp group itself."""
    groups = m.axis_groups({"pp": 2, "dp": 6, "tp": 2}, dp_local=local)
    assert len(groups["dp_across"][0]) * len(groups["dp_node"][0]) == 6
    for line in groups["dp"]:
        inside = [set(part) for part in groups["dp_node"] if set(part) <= set(line)]
        across = [set(part) for part in groups["dp_across"] if set(part) <= set(line)]
        assert set().union(*inside) == set().union(*across) == set(line)
        assert all(len(a & b) == 1 for a in inside for b in across)
    if local in (None, 6):
        assert groups["dp_node"] == groups["dp"]
    if local == 1:
        assert groups["dp_across"] == groups["dp"]


def test_nodes_must_divide_dp():
    with pytest.raises(InputError, match="dp=1 ranks cannot lie evenly on nodes with 2 of them"):
        m.Mesh.create({}, dp_local=2)


def seen(rank: int, world: int, sizes: dict[str, int], kv_replicas: int) -> dict[str, list[int]]:
    """Who answers on each axis."""
    mesh = m.Mesh.create(sizes, kv_replicas=kv_replicas)
    answers = {}
    for name, axis in mesh.axes.items():
        assert axis.ranks[axis.index] == rank
        out = torch.empty(axis.size, dtype=torch.int64)
        answers[name] = all_gather(out, torch.tensor([rank]), axis).tolist()
        assert answers[name] == list(axis.ranks)
        assert (axis.group is None) == (axis.size == 1)
    assert mesh.rank == rank
    assert {axis: mesh[axis].index for axis in mesh.coordinates} == mesh.coordinates
    return answers


def test_each_axis_reaches_its_ranks(ranks):
    answers = ranks(seen, 8, {"pp": 2, "tp": 4}, 2)
    assert answers[6] == {
        "pp": [2, 6],
        "dp": [6],
        "dp_node": [6],
        "dp_across": [6],
        "cp": [6],
        "dp_cp": [6],
        "tp": [4, 5, 6, 7],
        "tp_kv": [6, 7],
        "pp_ends": [2, 6],
        "pp_mirror": [6],
        "world": list(range(8)),
    }
    inner = ranks(seen, 3, {"pp": 3}, 1)[1]
    assert inner["pp_ends"] == [1]


def wrong_product(rank: int, world: int) -> None:
    m.Mesh.create({"dp": 2, "tp": 2})


def test_a_wrong_product_is_refused():
    with pytest.raises(InputError, match="pp=1 × dp=2 × cp=1 × tp=2 = 4 ranks, but this run has 1"):
        wrong_product(0, 1)


def test_unknown_axes_are_refused():
    with pytest.raises(InputError, match="`ep` is not an axis"):
        m.Mesh.create({"ep": 1})
    with pytest.raises(InputError, match="`ep` is not an axis"):
        m.Mesh.create({})["ep"]


def test_replicas_must_divide_tp():
    with pytest.raises(InputError, match="groups of 2 key/value replicas"):
        m.Mesh.create({"tp": 1}, kv_replicas=2)


def test_an_unknown_device_is_refused():
    with pytest.raises(InputError, match="device `tpu`"):
        m.start("tpu")


def restart(rank: int, world: int, port: int) -> list[float]:
    """As a launcher would: two ranks that meet through the environment; then each by itself."""
    m.stop()
    launched = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in launched.items()})
    m.start(timeout_s=30)
    m.start()
    together = total(rank, world)
    m.stop()
    for name in launched:
        del os.environ[name]
    m.start()
    alone = total(rank, 1)
    m.stop()
    m.stop()
    return [together, alone]


def total(rank: int, world: int) -> float:
    return all_reduce(torch.ones(1), m.Mesh.create({"dp": world})["dp"]).item()


def free_port() -> int:
    """Below the ports that a system hands out by itself, so that no other test is given it meanwhile."""
    for port in range(10_000 + os.getpid() % 4_000, 15_000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def test_start_with_and_without_an_environment(ranks):
    assert ranks(restart, 2, free_port()) == [[2.0, 1.0]] * 2


def stays_away(rank: int, world: int, port: int) -> str:
    m.stop()
    if rank == 1:
        return ""
    os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        with pytest.raises(RankError) as caught:
            m.start(timeout_s=1)
        return str(caught.value)
    finally:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]


def test_a_rank_that_never_comes_ends_the_start(ranks):
    assert ranks(stays_away, 2, free_port())[0].startswith("rank 0 of 2 found no other ranks")


def timeouts(rank: int, world: int) -> list[float]:
    mesh = m.Mesh.create({"dp": 2, "tp": 2})
    return [m._timeout_of(axis.group).total_seconds() for axis in mesh.axes.values() if axis.group is not None]


def test_all_groups_keep_the_run_timeout(ranks):
    assert ranks(timeouts, 4, group_timeout_s=17.0)[0] == [17.0] * 5
