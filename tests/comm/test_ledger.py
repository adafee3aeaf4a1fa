"""The ledger counts what the formulas say, to the byte."""

from __future__ import annotations

import pytest
import torch

from meshwright.comm import collectives as c
from meshwright.comm.differentiable import copy_to, gather_first_partial, reduce_from
from meshwright.comm.ledger import Ledger
from meshwright.comm.mesh import Mesh
from meshwright.comm.p2p import recv_start, send_start
from meshwright.core.errors import InputError
from meshwright.core.measures import Traffic


def every_primitive(rank: int, world: int) -> Traffic:
    ledger = Ledger()
    axis = Mesh.create({"dp": world}, ledger=ledger)["dp"]
    full, block = torch.ones(6 * world), torch.ones(6)
    with ledger.phase("gradients"):
        c.all_reduce(full, axis)
        c.all_reduce(full, axis)
        c.reduce_scatter(block, full, axis)
    with ledger.phase("parameters"):
        c.all_gather(full, block, axis)
    c.all_to_all(torch.empty_like(full), full, axis)
    c.broadcast(block, axis, 0)
    c.reduce(block, axis, 0)
    c.barrier(axis)
    if world > 1:
        with ledger.phase("forward"):
            works = [send_start(block, axis, (rank + 1) % world, 0)]
            works.append(recv_start(torch.empty(6), axis, (rank - 1) % world, 0))
        for work in works:
            work.wait()
    return ledger.take()


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_rows_equal_the_formulas(ranks, world):
    full = 4 * 6 * world
    expected = Traffic()
    expected.add("all_reduce", "dp", "gradients", full, world, calls=2)
    expected.add("reduce_scatter", "dp", "gradients", full, world)
    expected.add("all_gather", "dp", "parameters", full, world)
    expected.add("all_to_all", "dp", "other", full, world)
    expected.add("broadcast", "dp", "other", 24, world)
    expected.add("reduce", "dp", "other", 24, world)
    expected.add("send", "dp", "forward", 24, world)
    for traffic in ranks(every_primitive, world):
        assert traffic == expected


def backward_rows(rank: int, world: int) -> Traffic:
    ledger = Ledger()
    axis = Mesh.create({"tp": world}, ledger=ledger)["tp"]
    x = torch.ones(4, 2, requires_grad=True)
    with ledger.phase("forward"):
        y = reduce_from(gather_first_partial(copy_to(x, axis), axis), axis)
    with ledger.phase("backward"):
        y.sum().backward()
    return ledger.take()


def test_adjoints_are_counted_in_the_phase_that_runs_them(ranks):
    expected = Traffic()
    expected.add("all_gather", "tp", "forward", 64, 2)
    expected.add("all_reduce", "tp", "forward", 64, 2)
    expected.add("reduce_scatter", "tp", "backward", 64, 2)
    expected.add("all_reduce", "tp", "backward", 32, 2)
    assert ranks(backward_rows, 2) == [expected, expected]


def fail_inside(ledger: Ledger) -> None:
    with ledger.phase("recompute"):
        ledger.record("all_reduce", "tp", 8, 2)
        raise ZeroDivisionError


def test_phases_nest_and_end_after_an_error():
    ledger = Ledger()
    with ledger.phase("backward"):
        with pytest.raises(ZeroDivisionError):
            fail_inside(ledger)
        ledger.record("all_reduce", "tp", 8, 2)
    ledger.record("all_reduce", "tp", 8, 2)
    assert [phase for _, _, phase in ledger.take().rows] == ["recompute", "backward", "other"]
    assert ledger.take() == Traffic()


def test_an_unknown_phase_is_refused():
    with pytest.raises(InputError, match="`warm-up` is not a phase"), Ledger().phase("warm-up"):
        pass
